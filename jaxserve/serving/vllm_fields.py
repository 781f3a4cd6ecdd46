"""Fields of vLLM's requests that are not served here: why, and which of their values ask for nothing and pass.

Owns this table, and the base of requests that it is about. Knows no request model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import model_validator

from jaxserve.serving.strict_model import Model


@dataclass(frozen=True)
class Missing:
    """instead: why it is not here, or what to do. accepts: values that ask for what is so anyway; null always does.
    of: the only route that vLLM has it for; "": several."""

    instead: str
    accepts: tuple[Any, ...] = ()
    of: str = ""


_RESPONSES, _GENERATE = "/v1/responses", "/inference/v1/generate"
MISSING: dict[str, Missing] = {
    "watermarking": Missing("outputs carry no watermark", (False,)),
    "session_id": Missing("servers keep no sessions, and a router goes by the prompt: leave it out, or give user"),
    "kv_transfer_params": Missing("KV is kept by the server's --kv_store, and no request moves it", ({},)),
    "ec_transfer_params": Missing("prompts are text: there is no encoder", ({},)),
    "media_io_kwargs": Missing("prompts are text", ({},)),
    "mm_processor_kwargs": Missing("prompts are text", ({},)),
    "mm_payload": Missing("prompts are text", ("tensors",)),
    "return_mm_kwargs": Missing("prompts are text", (True,)),
    "return_token_offsets": Missing("vLLM answers it on /render alone; ours tells no offsets", (False,)),
    "routed_experts_prompt_start": Missing("answers do not say which experts a token went to", (0,)),
    "vllm_xargs": Missing("there are no extensions that could read it", ({},)),
    "max_tool_calls": Missing("tools are run by the client, which can count them", of=_RESPONSES),
    "prompt": Missing("there are no stored prompts; a conversation is in input, or in messages", of=_RESPONSES),
    "previous_input_messages": Missing("give the items of the conversation in input", of=_RESPONSES),
    "features": Missing("prompts are token ids", of=_GENERATE),
    "content_parts": Missing("prompts are token ids", ([],), of=_GENERATE),
    "token_offsets": Missing("nothing here needs the text of a prompt of token ids", of=_GENERATE),
    "reasoning_parser_kwargs": Missing("reasoning_ended says all: the chat template's marks are the same", ({},), of=_GENERATE),
    "stream_interval": Missing("chunks come as tokens do", (1,), of=_GENERATE),
    "output_kind": Missing("stream says whether an answer comes in parts", (0, 1, 2), of=_GENERATE),
    "extra_args": Missing("there are no extensions that could read it", ({},), of=_GENERATE),
    "flat_logprobs": Missing("log-probabilities have one form", (False,), of=_GENERATE),
    "skip_reading_prefix_cache": Missing("give a cache_salt that no other request has", (False,), of=_GENERATE),
    "prompt_logprob_token_ids": Missing("give prompt_logprobs: the likeliest tokens and the prompt's own", of=_GENERATE),
    "prompt_logprob_start": Missing("prompt_logprobs are of the whole prompt", (0,), of=_GENERATE),
    "skip_clone": Missing("nothing is cloned", (False, True), of=_GENERATE),
    "output_text_buffer_length": Missing("what could become a stop string is held back anyway", (0,), of=_GENERATE),
    "trace_decode_token_ids": Missing("tokens are sampled", ([],), of=_GENERATE),
}


class VLLMModel(Model):
    """A request that has fields of vLLM's: those of MISSING that it has not, and whose values ask for nothing, are passed over."""

    @model_validator(mode="before")
    @classmethod
    def _idle_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.keys().isdisjoint(MISSING):
            return given
        return {
            name: value
            for name, value in given.items()
            if name in cls.model_fields or name not in MISSING or not _is_idle(value, MISSING[name])
        }


def _is_idle(value: Any, row: Missing) -> bool:
    return value is None or any(type(value) is type(x) and value == x for x in row.accepts)

"""Fields of vLLM's requests that are not served here: why, and which of their values ask for nothing and pass.

Owns this table. Knows no request model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Missing:
    """instead: why it is not here, or what to do. accepts: values that ask for what is so anyway; null always does."""

    instead: str
    accepts: tuple[Any, ...] = ()


MISSING: dict[str, Missing] = {
    "watermarking": Missing("outputs carry no watermark", (False,)),
    "session_id": Missing("servers keep no sessions, and a router goes by the prompt: leave it out, or give user"),
    "kv_transfer_params": Missing("KV is kept by the server's --kv_store, and no request moves it", ({},)),
    "ec_transfer_params": Missing("prompts are text: there is no encoder", ({},)),
    "media_io_kwargs": Missing("prompts are text", ({},)),
    "mm_processor_kwargs": Missing("prompts are text", ({},)),
    "mm_payload": Missing("prompts are text", ("tensors",)),
    "return_mm_kwargs": Missing("prompts are text", (True,)),
    "return_token_offsets": Missing("vLLM answers it on /render alone, which is not here", (False,)),
    "routed_experts_prompt_start": Missing("answers do not say which experts a token went to", (0,)),
    "vllm_xargs": Missing("there are no extensions that could read it", ({},)),
}


def without_idle(given: dict[str, Any]) -> dict[str, Any]:
    """A request's fields without those of MISSING whose values ask for nothing."""
    return {name: value for name, value in given.items() if name not in MISSING or not _is_idle(value, MISSING[name])}


def _is_idle(value: Any, row: Missing) -> bool:
    return value is None or any(type(value) is type(x) and value == x for x in row.accepts)

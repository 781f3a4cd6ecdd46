"""Every field of vLLM's requests is served, or refused with the reason."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from jaxserve.serving.chat_protocol import ChatRequest, TokenizeChatRequest
from jaxserve.serving.dialects.anthropic_protocol import MessagesPrompt, MessagesRequest
from jaxserve.serving.dialects.generate import GenerateRequest, GenerateSampling
from jaxserve.serving.dialects.responses_protocol import ResponsesRequest
from jaxserve.serving.protocol import CompletionRequest, TokenizeCompletionRequest
from jaxserve.serving.vllm_fields import MISSING
from scripts.write_options import fields_page
from tests.alphabet_model import ids
from tests.serving.calls import ok, refusal

# Fields of vLLM 0.32.0's CompletionRequest and ChatCompletionRequest, as of 2026-11-25. A name alone is copied.
BOTH = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature
top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids
prompt_logprobs logprob_token_ids bad_words add_special_tokens response_format structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs
cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval echo"""
COMPLETIONS = f"{BOTH} prompt suffix prompt_embeds".split()
CHATS = f"""{BOTH} messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs return_prompt_text""".split()


RESPONSES = """background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store stream temperature text tool_choice
tools top_logprobs top_p top_k min_p truncation user skip_special_tokens include_stop_str_in_output presence_penalty
frequency_penalty prompt_cache_key watermarking request_id session_id media_io_kwargs mm_processor_kwargs priority mm_payload
return_mm_kwargs cache_salt enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop
stop_token_ids ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs""".split()
MESSAGES = """model messages max_tokens metadata output_config thinking stop_sequences stream system temperature tool_choice tools
top_k top_p mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params ec_transfer_params vllm_xargs
chat_template_kwargs""".split()
COUNT_TOKENS = "model messages output_config system thinking tool_choice tools chat_template_kwargs".split()
TOKENIZE = "model prompt add_special_tokens return_token_strs".split()
TOKENIZE_CHAT = """model messages add_generation_prompt return_token_strs continue_final_message add_special_tokens chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""".split()
GENERATE = """request_id token_ids token_offsets features content_parts sampling_params model reasoning_ended
reasoning_parser_kwargs return_token_ids output_mode stream stream_options cache_salt priority kv_transfer_params
ec_transfer_params""".split()
SAMPLING = """n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words
skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start trace_decode_token_ids""".split()

USER = [{"role": "user", "content": "a"}]
# name -> (request, vLLM's fields of it, path, a body of its)
REQUESTS: dict[str, tuple[type[BaseModel], Sequence[str], str, dict[str, Any]]] = {
    "completions": (CompletionRequest, COMPLETIONS, "/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "chats": (ChatRequest, CHATS, "/v1/chat/completions", {"messages": USER, "max_tokens": 1}),
    "responses": (ResponsesRequest, RESPONSES, "/v1/responses", {"input": "a", "max_output_tokens": 1}),
    "messages": (MessagesRequest, MESSAGES, "/v1/messages", {"model": "alphabet", "messages": USER, "max_tokens": 1}),
    "count_tokens": (MessagesPrompt, COUNT_TOKENS, "/v1/messages/count_tokens", {"model": "alphabet", "messages": USER}),
    "tokenize": (TokenizeCompletionRequest, TOKENIZE, "/tokenize", {"prompt": "a"}),
    "tokenize of chats": (TokenizeChatRequest, TOKENIZE_CHAT, "/tokenize", {"messages": USER}),
    "generate": (GenerateRequest, GENERATE, "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
    "sampling_params": (GenerateSampling, SAMPLING, "/inference/v1/generate", {"token_ids": [1]}),
}


@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_field_is_served_or_has_a_row(request_name):
    model, names, *_ = REQUESTS[request_name]
    assert len(COMPLETIONS) == 55 and len(CHATS) == 68 and len(RESPONSES) == 53 and len(MESSAGES) == 22
    assert not [name for name in names if name not in model.model_fields and name not in MISSING]
    assert not [name for name, row in MISSING.items() if not row.of and name in model.model_fields]


def test_every_row_is_a_field():
    assert not MISSING.keys() - {name for _, names, *_ in REQUESTS.values() for name in names}


MISSED = [(kind, name) for kind, (model, names, *_) in REQUESTS.items() for name in names if name not in model.model_fields]


@pytest.mark.parametrize("kind, name", MISSED)
def test_a_missing_field_is_refused_with_the_reason_unless_it_asks_for_nothing(server, kind, name):
    *_, path, body = REQUESTS[kind]

    def ask(value: Any) -> httpx.Response:
        given = body | ({"sampling_params": {"max_tokens": 1, name: value}} if kind == "sampling_params" else {name: value})
        return server.client.post(path, json=given)

    def refused(value: Any) -> str:
        answer = ask(value)
        assert answer.status_code == 400
        return answer.json()["error"]["message"]

    message = refused(["something"])
    assert name in message
    assert MISSING[name].instead in message or kind == "tokenize of chats", "of two kinds of requests both say what is wrong"
    for value in (None, *MISSING[name].accepts):
        ok(ask(value))
    for value in (0, False, True, 1):
        if not any(type(value) is type(x) and value == x for x in MISSING[name].accepts):
            refused(value)


def test_vllms_own_sampling_params_are_taken(server):
    """As a client sends them whole, with vLLM's defaults."""
    defaults: dict[str, Any] = dict.fromkeys(SAMPLING) | {
        **{"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 3, "min_tokens": 0},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "output_kind": 2},
        **dict.fromkeys(["detokenize", "skip_special_tokens", "spaces_between_special_tokens"], True),
        **dict.fromkeys(["ignore_eos", "flat_logprobs", "include_stop_str_in_output", "skip_clone"], False),
        **dict.fromkeys(["output_text_buffer_length", "routed_experts_prompt_start"], 0),
    }
    body = {"token_ids": ids("a"), "sampling_params": defaults}
    answer = ok(server.client.post("/inference/v1/generate", json=body))
    assert answer["choices"][0]["token_ids"] == ids("bcd")
    silent = defaults | {"detokenize": False}
    assert ok(server.client.post("/inference/v1/generate", json=body | {"sampling_params": silent}))["choices"] == answer["choices"]
    for changes in ({"output_mode": "text"}, {"sampling_params": silent | {"stop": "x"}}):
        error = refusal(server.client.post("/inference/v1/generate", json=body | {"sampling_params": silent} | changes))
        assert "detokenize=false" in error["message"]


def test_every_field_is_described():
    for model in (CompletionRequest, ChatRequest):
        assert not [name for name, field in model.model_fields.items() if not field.description]


def test_the_table_has_every_field():
    text = fields_page()
    assert all(f"| `{name}` |" in text for name in {*COMPLETIONS, *CHATS})
    assert "| `echo` | yes | yes |" in text and "| `prompt` | yes |  |" in text

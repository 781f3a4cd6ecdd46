"""Every field of vLLM's requests is served, or refused with the reason."""

import pytest

from jaxserve.serving.chat_protocol import ChatRequest
from jaxserve.serving.protocol import CompletionRequest
from jaxserve.serving.vllm_fields import MISSING
from scripts.write_options import fields_page
from tests.serving.calls import chat, complete, ok, refusal

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


@pytest.mark.parametrize("model,names", [(CompletionRequest, COMPLETIONS), (ChatRequest, CHATS)])
def test_every_field_is_served_or_has_a_row(model, names):
    assert len(COMPLETIONS) == 55 and len(CHATS) == 68
    assert not [name for name in names if (name in model.model_fields) == (name in MISSING)]
    assert not MISSING.keys() - {*COMPLETIONS, *CHATS}


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("name", MISSING)
def test_a_missing_field_is_refused_with_the_reason_unless_it_asks_for_nothing(server, ask, name):
    error = refusal(ask(server, **{name: ["something"]}))
    assert error["param"] == name and MISSING[name].instead in error["message"]
    for value in (None, *MISSING[name].accepts):
        ok(ask(server, max_tokens=1, **{name: value}))
    for value in (0, False, True, 1):
        if not any(value is x for x in MISSING[name].accepts):
            refusal(ask(server, **{name: value}))


def test_the_table_has_every_field():
    text = fields_page()
    assert all(f"| `{name}` |" in text for name in {*COMPLETIONS, *CHATS})
    assert "| `echo` | yes | yes |" in text and "| `prompt` | yes |  |" in text

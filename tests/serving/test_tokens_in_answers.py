"""Fields of vLLM's requests and answers that are about tokens: their ids, prompts that are cut or gone on with, reasoning that is
counted or left out."""

import pytest
from tokenizers.processors import TemplateProcessing

from jaxserve.serving.chat_protocol import AssistantTurn
from tests.alphabet_model import BOS, EOS, SPECIALS, VOCABULARY, after, ids
from tests.serving.calls import chat, chunks, complete, ok, refusal
from tests.serving.test_forms import NO_BLANKS

PROMPT = ids("u:tea;A")  # of the chat "tea"


def test_token_ids_of_completions(server):
    choices = ok(complete(server, ["tea", "x"], return_token_ids=True))["choices"]
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in choices] == [(ids("tea"), ids("bcde")), (ids("x"), ids("yz{|"))]
    choice = ok(complete(server))["choices"][0]
    assert choice["token_ids"] is None and choice["prompt_token_ids"] is None


def test_token_ids_of_streamed_completions(server):
    """Also of characters that are not complete yet: every token is in some chunk. After 0xC1 come bytes that begin characters."""
    streamed = [c for chunk in chunks(complete(server, [0xC1], stream=True, return_token_ids=True)) for c in chunk["choices"]]
    assert [c.get("prompt_token_ids") for c in streamed] == [[0xC1]] + [None] * (len(streamed) - 1)
    assert [i for c in streamed for i in c["token_ids"]] == [0xC2, 0xC3, 0xC4, 0xC5] and not streamed[0]["text"]


def test_token_ids_of_chats(server):
    answer = ok(chat(server, return_token_ids=True, n=2))
    assert answer["prompt_token_ids"] == PROMPT and [c["token_ids"] for c in answer["choices"]] == [ids("BCDE")] * 2
    streamed = chunks(chat(server, return_token_ids=True, stream=True))
    assert [chunk.get("prompt_token_ids") for chunk in streamed] == [PROMPT] + [None] * (len(streamed) - 1)
    assert [i for chunk in streamed for c in chunk["choices"] for i in c.get("token_ids", [])] == ids("BCDE")
    opening = {"chat_template_kwargs": {"opening": "\u00ff"}}  # its last byte is 0xBF
    streamed = chunks(chat(server, return_token_ids=True, stream=True, **opening))
    assert [i for chunk in streamed for c in chunk["choices"] for i in c.get("token_ids", [])] == [0xC0, 0xC1, 0xC2, 0xC3]


def test_tokens_of_logprobs_as_ids(server):
    found = ok(complete(server, logprobs=1, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{i}" for i in ids("bcde")] and found["text_offset"] == [0, 1, 2, 3]
    assert [list(top) for top in found["top_logprobs"]] == [[token] for token in found["tokens"]]
    entries = ok(chat(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]["content"]
    assert [(x["token"], bytes(x["bytes"])) for x in entries] == [(f"token_id:{i}", bytes([i])) for i in ids("BCDE")]
    assert [x["top_logprobs"][0]["token"] for x in entries] == [x["token"] for x in entries]


@pytest.mark.parametrize(
    ("side", "keep", "kept"), [(None, 2, "ea"), ("left", 2, "ea"), ("right", 2, "te"), ("left", 3, "tea"), ("right", 200, "tea")]
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_are_cut(server, side, keep, kept, as_ids):
    cut = {"truncate_prompt_tokens": keep} | ({"truncation_side": side} if side else {})
    choice = ok(complete(server, ids("tea") if as_ids else "tea", return_token_ids=True, echo=True, **cut))["choices"][0]
    assert choice["prompt_token_ids"] == ids(kept) and choice["text"] == kept + after(kept, 4)


def test_what_the_tokenizer_puts_around_a_prompt_is_kept(server):
    backend = server.engine.get_tokenizer().backend
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", SPECIALS[BOS]), ("</s>", SPECIALS[EOS])]
    )
    try:
        for side, kept in (("left", "ea"), ("right", "te")):
            cut = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
            choice = ok(complete(server, "tea", **cut))["choices"][0]
            assert choice["prompt_token_ids"] == [SPECIALS[BOS], *ids(kept), SPECIALS[EOS]]
    finally:
        backend.post_processor = before


def test_a_chat_is_cut(server):
    answer = ok(chat(server, truncate_prompt_tokens=3, return_token_ids=True))
    assert answer["prompt_token_ids"] == PROMPT[-3:] and answer["choices"][0]["message"]["content"] == "BCDE"


def test_a_prompt_that_is_too_long_is_cut_to_leave_room(server):
    longest = server.engine.config.scheduler.max_model_len
    assert refusal(complete(server, "ab" * longest))["message"]
    for prompt in ("ab" * longest, "ab" * 100 * longest, ids("ab" * longest)):
        choice = ok(complete(server, prompt, truncate_prompt_tokens=-1, return_token_ids=True))["choices"][0]
        assert choice["prompt_token_ids"] == ids("ab" * longest)[-(longest - 1) :] and choice["text"] == "c"
    error = refusal(complete(server, truncate_prompt_tokens=longest + 1))
    assert f"truncate_prompt_tokens={longest + 1} is more than max_model_len={longest}" in error["message"]
    assert "truncate_prompt_tokens" in refusal(complete(server, truncate_prompt_tokens=0))["message"]


def test_a_last_message_is_gone_on_with(server):
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "klm "}]
    blank = [said[0], {"role": "assistant", "content": chr(ord(" ") - 1)}]  # after which a blank comes
    assert ok(chat(server, blank, continue_final_message=True))["choices"][0]["message"]["content"] == ' !"#'
    answer = ok(chat(server, said, continue_final_message=True, return_token_ids=True))
    assert answer["prompt_token_ids"] == ids("u:?;a:klm ") and answer["choices"][0]["message"]["content"] == after(" ", 4)
    assert "not both" in refusal(chat(server, said, continue_final_message=True, add_generation_prompt=True))["message"]
    empty = [said[0], {"role": "assistant", "content": ""}]
    assert "message 1 has no content" in refusal(chat(server, empty, continue_final_message=True))["message"]
    assert "must not hold" in refusal(chat(server, said, chat_template_kwargs={"continue_final_message": True}))["message"]


# ---- reasoning


def ask(server, **body):
    """It thinks "?@" until its seed draws </think>, which is rather likely."""
    asked = {"chat_template_kwargs": {"opening": "<think>"}, "temperature": 1, "seed": 1, "logit_bias": {str(VOCABULARY - 1): 4}}
    return chat(server, "?", **asked | {"max_tokens": 40} | body)


def test_reasoning_by_both_names_and_its_tokens(thinking):
    answer = ok(ask(thinking, return_token_ids=True))
    (choice,) = answer["choices"]
    message, end = choice["message"], choice["token_ids"].index(VOCABULARY - 1)
    assert end and message["reasoning"] == message["reasoning_content"] != ""
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": end}
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) > end + 1
    streamed = chunks(ask(thinking, stream=True, stream_options={"include_usage": True}))
    parts = [c["delta"].get("reasoning", "") for chunk in streamed for c in chunk["choices"]]
    assert "".join(parts) == message["reasoning"]
    assert streamed[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": end}


def test_reasoning_is_left_out(thinking):
    message = ok(ask(thinking))["choices"][0]["message"]
    hidden = ok(ask(thinking, include_reasoning=False))["choices"][0]["message"]
    assert message["content"] == hidden["content"] != "" and hidden["reasoning"] is None and "reasoning_content" not in hidden
    streamed = [c["delta"] for chunk in chunks(ask(thinking, include_reasoning=False, stream=True)) for c in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in streamed) == message["content"]
    assert not any("reasoning" in delta for delta in streamed)
    for shown in ({"return_token_ids": True}, {"logprobs": True}):
        assert "would show the tokens" in refusal(ask(thinking, include_reasoning=False, **shown))["message"]


def test_a_thought_is_gone_on_with(thinking):
    """What comes behind an open <think> of the last message is reasoning, and a form applies behind its end."""
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>ab"}]
    open_, closed = said, [said[0], {"role": "assistant", "content": "<think>ab</think>c"}]
    asked = {"continue_final_message": True, "max_tokens": 4}
    assert ok(chat(thinking, open_, **asked))["choices"][0]["message"]["reasoning"] == "cdef"
    message = ok(chat(thinking, closed, **asked))["choices"][0]["message"]
    assert message["content"] == "defg" and message["reasoning"] is None
    form = {"structured_outputs": {"regex": "x{3}"}, "logit_bias": NO_BLANKS | {str(VOCABULARY - 1): 100}}
    message = ok(chat(thinking, open_, **asked | form))["choices"][0]["message"]
    assert message["content"] == "xxx" and message["reasoning"] is None
    assert (
        ok(chat(thinking, closed, **asked | {"structured_outputs": {"regex": "x{3}"}}))["choices"][0]["message"]["content"] == "xxx"
    )


def test_reasoning_in_a_message_by_its_newer_name():
    plain = AssistantTurn.model_validate({"role": "assistant", "content": "c", "reasoning": "r"}).plain()
    assert plain == {"role": "assistant", "content": "c", "reasoning_content": "r"}, "which templates read"

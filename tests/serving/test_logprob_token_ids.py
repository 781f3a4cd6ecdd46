"""Log-probabilities of given token ids in the answers of every route that has them."""

import pytest

from tests.alphabet_model import ids
from tests.serving.calls import chat, chunks, complete, ok, refusal
from tests.serving.test_completions import logprob_after

GIVEN = ids("zba")


def expected(token: str) -> dict[str, float]:
    """By text, of the token that follows `token` and of those that are given."""
    return {text: logprob_after(token, text) for text in (chr(ord(token) + 1), *"zba")}


@pytest.mark.parametrize("stream", [False, True])
def test_completions(server, stream):
    """The number of likeliest tokens does not count, as in vLLM."""
    for logprobs in (0, 5):
        response = complete(server, logprob_token_ids=GIVEN, logprobs=logprobs, stream=stream)
        parts = chunks(response) if stream else [ok(response)]
        found = [top for part in parts for top in part["choices"][0]["logprobs"]["top_logprobs"]]
        assert found == [pytest.approx(expected(token), abs=1e-4) for token in "abcd"]
    as_ids = ok(complete(server, logprob_token_ids=GIVEN, logprobs=0, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    assert set(as_ids["top_logprobs"][0]) == {f"token_id:{i}" for i in GIVEN}


def test_a_prompt_that_is_echoed_keeps_its_likeliest(server):
    found = ok(complete(server, "ab", logprob_token_ids=GIVEN, logprobs=1, echo=True, max_tokens=1))["choices"][0]["logprobs"]
    assert [top and len(top) for top in found["top_logprobs"]] == [None, 1, 4]
    assert found["top_logprobs"][2] == pytest.approx(expected("b"), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_chats(server, stream):
    for likeliest in ({}, {"top_logprobs": 2}):
        response = chat(server, logprobs=True, logprob_token_ids=[*GIVEN, *GIVEN], stream=stream, **likeliest)
        parts = chunks(response) if stream else [ok(response)]
        content = [t for part in parts for t in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [entry["token"] for entry in content] == list("BCDE")
        for entry in content:
            top = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            assert list(top) == [entry["token"], *"zba"] and top[entry["token"]] == entry["logprob"]
            assert top == pytest.approx(expected(chr(ord(entry["token"]) - 1)), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(server, stream):
    sampling = {"temperature": 0, "max_tokens": 2, "logprob_token_ids": GIVEN}
    for body in ({}, {"logprobs": len(GIVEN)}):
        asked = {"token_ids": ids("a"), "sampling_params": sampling | body, "stream": stream}
        response = server.client.post("/inference/v1/generate", json=asked)
        parts = chunks(response) if stream else [ok(response)]
        content = [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]]
        assert [entry["token_id"] for entry in content] == ids("bc")
        assert [[x["token_id"] for x in entry["top_logprobs"]] for entry in content] == [ids("bza"), ids("czba")]
        assert [x["rank"] for x in content[1]["top_logprobs"]] == [1, None, None, None]
        found = {chr(x["token_id"]): x["logprob"] for x in content[1]["top_logprobs"]}
        assert found == pytest.approx(expected("b"), abs=1e-4)
    asked = {"token_ids": ids("a"), "sampling_params": sampling | {"logprobs": 2}}
    assert "logprobs=2 must be None or 3" in refusal(server.client.post("/inference/v1/generate", json=asked))["message"]


def test_what_a_form_forbids(server):
    """JSON has no infinity."""
    entries = ok(chat(server, logprobs=True, logprob_token_ids=GIVEN, structured_outputs={"regex": "[a-c]{3}"}))
    content = entries["choices"][0]["logprobs"]["content"]
    assert [x["logprob"] == -9999.0 for x in content[0]["top_logprobs"] if x["token"] in "zba"].count(True) == 1


def test_no_ids_ask_for_nothing(server):
    for ask in (complete, chat):
        assert ok(ask(server, logprob_token_ids=[], max_tokens=1))["choices"][0]["logprobs"] is None

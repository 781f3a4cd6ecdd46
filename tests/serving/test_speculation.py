"""A server whose engine speculates: clients get what the plain one says, several tokens at a time."""

from typing import Any

import pytest

from jaxserve import LLM, BucketPlan
from tests.serving.calls import chat, chunks, complete, ok
from tests.serving.http_server import Server, serving
from tests.serving.test_operator_routes import metric

PLAN = BucketPlan(mixed=((32, 4),), head_rows=(32,))
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
# The model says the alphabet; behind a chat's prompt, which ends with an A, in capitals.
PROMPT = "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz abc"
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop string": {"stop": ["kl", "KL"]},
    "samples": {"n": 2, "temperature": 0.5, "seed": 1},
    "regex": {"structured_outputs": {"regex": "[A-Za-z]{6,20}"}},
}
LOGPROBS: dict[Any, dict[str, Any]] = {complete: {"logprobs": 2}, chat: {"logprobs": True, "top_logprobs": 2}}


@pytest.fixture(scope="module")
def drafting(folder):
    options = {"bucket_plan": PLAN, "num_pages": 96, "page_size": 4, "compilation_cache_dir": ""}
    with serving(LLM(folder, speculative_config=SPECULATIVE, **options)) as server:
        yield server
        server.wait_idle()


def said(parts: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of each sample its text, tokens, log-probabilities (and of the tokens beside them), and why it ended. parts: an answer, or
    the chunks of a stream."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        sample = found.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": [], "end": None})
        given = choice["logprobs"] or {}
        if "text" in choice:
            sample["text"] += choice["text"]
            sample["tokens"] += given.get("tokens", [])
            beside = zip(given.get("token_logprobs", []), given.get("top_logprobs", []), strict=True)
            sample["logprobs"] += [x for own, top in beside for x in (own, *sorted(top.values()))]
        else:
            sample["text"] += choice.get("message", choice.get("delta")).get("content") or ""
            for entry in given.get("content", []):
                sample["tokens"].append(entry["token"])
                sample["logprobs"] += [entry["logprob"], *sorted(x["logprob"] for x in entry["top_logprobs"])]
        sample["end"] = choice["finish_reason"], choice.get("stop_reason")
    return found


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("ask", [complete, chat])
def test_answers_are_those_of_a_plain_server(server, drafting, ask, body):
    asked = {"max_tokens": 24} | LOGPROBS[ask] | body
    plain = ok(ask(server, PROMPT, **asked))
    streamed = chunks(ask(drafting, PROMPT, **asked, stream=True, stream_options={"include_usage": True}))
    for parts in ([ok(ask(drafting, PROMPT, **asked))], streamed):
        found, expected = said(parts), said([plain])
        assert found.keys() == expected.keys() and parts[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        for index, sample in found.items():
            assert sample.pop("logprobs") == pytest.approx(expected[index].pop("logprobs"), abs=1e-4)
            assert sample == expected[index] and len(sample["tokens"]) > 5
    pieces = [len(sample["tokens"]) for part in streamed for sample in said([part]).values()]
    assert max(pieces) > 3, "drafts stand, and come in one piece with what they follow"


def test_what_stood_is_counted(drafting: Server):
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")

    def counts() -> dict[str, float]:
        drafting.wait_idle()
        found = {name: metric(drafting, f"spec_decode_num_{name}_total") for name in names}
        return found | {name: metric(drafting, f"{name}_total") for name in ("steps", "generation_tokens")}

    before = counts()
    ok(complete(drafting, PROMPT, max_tokens=20, logprobs=0))
    gained = {name: value - before[name] for name, value in counts().items()}
    assert 0 < gained["drafts"] <= gained["steps"] < 10 and gained["generation_tokens"] == 20
    assert 10 < gained["accepted_tokens"] == gained["accepted_tokens_per_pos"] <= gained["draft_tokens"] <= 5 * gained["drafts"]

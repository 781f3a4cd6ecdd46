"""vLLM's request fields beyond OpenAI's, and the server's options about answers: each changes what its name says."""

from typing import Any

import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.models.generation_defaults import GenerationDefaults
from jaxserve.serving.notations import REASONING, Thinking
from tests import alphabet_model
from tests.alphabet_model import BOS, SPECIALS, TURN, VOCABULARY, after, ids
from tests.serving.calls import chat, chunks, complete, ok, refusal
from tests.serving.conftest import PLAN
from tests.serving.http_server import serving
from tests.serving.test_operator_routes import metric

SAID = [{"role": "user", "content": "tea"}, {"role": "assistant", "content": "abc"}]
GO_ON = {"continue_final_message": True, "add_generation_prompt": False}


def texts(streamed) -> str:
    return "".join(c["delta"].get("content", "") for chunk in streamed for c in chunk["choices"])


class Recommending:
    """The shared LLM as one whose generation_config.json has max_new_tokens."""

    def __init__(self, llm, max_new_tokens: int):
        self.tokenizer, self.engine, self.grammars = llm.tokenizer, llm.engine, llm.grammars
        self.generation_defaults = GenerationDefaults(max_new_tokens=max_new_tokens)
        self._params = llm.get_default_sampling_params().with_(max_tokens=max_new_tokens)

    def get_default_sampling_params(self):
        return self._params


def test_max_new_tokens_of_the_server_is_the_most(shared_llm):
    """Of --override_generation_config: over the checkpoint's own, and over what a request asks for, in every dialect."""
    overridden = shared_llm.get_default_sampling_params().with_(max_tokens=4)
    with serving(Recommending(shared_llm, 3), default_sampling_params=overridden, max_new_tokens=4) as server:

        def num_tokens(path: str, count: str = "completion_tokens", **body: Any) -> int:
            return ok(server.client.post(path, json=body))["usage"][count]

        said = {"messages": [{"role": "user", "content": "a"}], "temperature": 0}
        asking: list[tuple[dict[str, Any], int]] = [({}, 4), ({"max_tokens": 2}, 2), ({"max_tokens": 9, "min_tokens": 8}, 4)]
        for asked, number in asking:
            assert num_tokens("/v1/chat/completions", **said, **asked, ignore_eos=True) == number
            assert num_tokens("/v1/completions", prompt="a", **asked, ignore_eos=True) == number
            sampling = asked | {"ignore_eos": True}
            assert num_tokens("/inference/v1/generate", token_ids=ids("a"), sampling_params=sampling) == number
        assert num_tokens("/v1/responses", "output_tokens", input="a", max_output_tokens=9, ignore_eos=True) == 4
        assert num_tokens("/v1/messages", "output_tokens", model="alphabet", max_tokens=9, **said) == 4
        assert num_tokens("/v1/completions", prompt="a", use_beam_search=True, n=2, max_tokens=9, ignore_eos=True) == 8


def test_max_new_tokens_of_the_checkpoint(shared_llm):
    """Where a chat, or a request of token ids, does not say how many; a completion has OpenAI's 16."""
    with serving(Recommending(shared_llm, 3)) as server:

        def num_tokens(path: str, **body: Any) -> int:
            return ok(server.client.post(path, json=body))["usage"]["completion_tokens"]

        said = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "ignore_eos": True}
        assert num_tokens("/v1/chat/completions", **said) == 3
        assert num_tokens("/v1/chat/completions", **said, max_tokens=5) == 5
        assert num_tokens("/v1/completions", prompt="a", temperature=0, ignore_eos=True) == 16
        for sampling, number in (({}, 3), ({"max_tokens": 4}, 4)):
            assert (
                num_tokens("/inference/v1/generate", token_ids=ids("a"), sampling_params=sampling | {"ignore_eos": True}) == number
            )


# ---- what an answer holds


def test_the_prompt_alone(server):
    answer = ok(complete(server, "tea", echo=True, max_tokens=0, logprobs=1))
    (choice,) = answer["choices"]
    assert choice["text"] == "tea" and choice["logprobs"]["tokens"] == ["t", "e", "a"] and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(c["text"] for x in chunks(complete(server, echo=True, max_tokens=0, stream=True)) for c in x["choices"]) == "tea"


def test_echo_of_token_ids_has_special_tokens_too(server):
    assert ok(complete(server, [alphabet_model.SPECIALS["<s>"], *ids("a")], echo=True))["choices"][0]["text"] == "<s>abcde"


def test_a_chat_echoes_what_it_goes_on_with(server):
    assert ok(chat(server, SAID, echo=True, **GO_ON))["choices"][0]["message"]["content"] == "abcdefg"
    assert ok(chat(server, SAID, echo=False, **GO_ON))["choices"][0]["message"]["content"] == "defg"
    assert texts(chunks(chat(server, SAID, echo=True, stream=True, **GO_ON))) == "abcdefg"
    assert ok(chat(server, echo=True))["choices"][0]["message"]["content"] == "BCDE", "a new turn goes on with nothing"


def test_the_role_is_that_of_the_turn(shared_llm, server):
    said = [{"role": "user", "content": "abc"}]
    assert ok(chat(server, said, **GO_ON))["choices"][0]["message"]["role"] == "user"
    with serving(shared_llm, options={"response_role": "cat"}) as other:
        assert ok(chat(other))["choices"][0]["message"]["role"] == "cat"
        assert chunks(chat(other, stream=True))[0]["choices"][0]["delta"]["role"] == "cat"


def test_the_prompt_as_text(server):
    assert ok(chat(server, return_prompt_text=True))["prompt_text"] == "u:tea;A" and ok(chat(server))["prompt_text"] is None
    streamed = chunks(chat(server, return_prompt_text=True, stream=True))
    assert [chunk.get("prompt_text") for chunk in streamed] == ["u:tea;A"] + [None] * (len(streamed) - 1)


def test_the_bodys_request_id(server):
    assert (
        ok(complete(server, request_id="mine"))["id"] == "cmpl-mine" and ok(chat(server, request_id="a.1"))["id"] == "chatcmpl-a.1"
    )
    headers = {"X-Request-Id": "theirs"}
    answer = server.client.post("/v1/completions", json={"prompt": "a", "request_id": "mine"}, headers=headers)
    assert ok(answer)["id"] == "cmpl-theirs" and "x-request-id" not in answer.headers
    assert refusal(complete(server, request_id="a b"))["param"] == "request_id"


def test_an_empty_model_is_the_served_one(server):
    assert ok(complete(server, model=""))["model"] == "alphabet"


# ---- streams


@pytest.mark.parametrize("ask", [complete, chat])
def test_usage_in_streams(server, shared_llm, ask):
    def usages(server, **options) -> list[Any]:
        return [chunk.get("usage") for chunk in chunks(ask(server, stream=True, **options))]

    assert not any(usages(server, stream_options={"include_usage": False, "continuous_usage_stats": True}))
    *others, last = usages(server, stream_options={"include_usage": True})
    assert not any(others) and last["completion_tokens"] == 4
    counted = [
        x["completion_tokens"] for x in usages(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    ]
    assert counted == sorted(counted) and counted[-1] == 4
    with serving(shared_llm, options={"enable_force_include_usage": True}) as forced:
        assert [x["completion_tokens"] for x in usages(forced)] == counted


def test_chunks_of_several_tokens(server):
    streamed = chunks(complete(server, max_tokens=9, stream=True, stream_interval=4, logprobs=0))
    assert [c["choices"][0]["text"] for c in streamed] == ["b", "cdef", "ghij"]
    assert streamed[1]["choices"][0]["logprobs"]["text_offset"] == [1, 2, 3, 4]
    streamed = chunks(complete(server, ["a", "k"], n=2, max_tokens=8, stream=True, stream_interval=3))
    whole = ["".join(c["text"] for x in streamed for c in x["choices"] if c["index"] == i) for i in range(4)]
    assert whole == [after("a", 8)] * 2 + [after("k", 8)] * 2
    assert texts(chunks(chat(server, max_tokens=9, stream=True, stream_interval=100))) == after("A", 9)


# ---- beam search


def test_beam_search(server, shared_llm):
    from jaxserve.engine.beam_search import BeamSearchParams

    body = {"use_beam_search": True, "n": 2, "max_tokens": 3}
    answer = ok(complete(server, ["tea", "tea"], **body))
    found = [choice["text"] for choice in answer["choices"]]
    assert found[0] == "bcd" and found[:2] == found[2:] and found[0] != found[1] and answer["usage"]["completion_tokens"] == 12
    server.wait_idle()
    expected = shared_llm.beam_search([ids("tea")], BeamSearchParams(beam_width=2, max_tokens=3))[0].sequences
    assert found[:2] == [shared_llm.tokenizer.decode(s.tokens[3:]) for s in expected]
    assert [c["message"]["content"] for c in ok(chat(server, **body))["choices"]][0] == "BCD"
    assert texts(chunks(chat(server, stream=True, use_beam_search=True, max_tokens=3))) == "BCD"


@pytest.mark.parametrize(
    "field,said", [({"logprobs": 1}, "logprobs"), ({"stop": "x"}, "stop"), ({"top_p": 0.5}, "top_p"), ({"n": 11}, "n=11")]
)
def test_what_does_not_go_with_beam_search(server, field, said):
    assert said in refusal(complete(server, use_beam_search=True, **field))["message"]


# ---- chat templates


def test_variables_of_the_template_by_default(shared_llm):
    with serving(shared_llm, options={"default_chat_template_kwargs": {"opening": "k"}}) as server:
        assert ok(chat(server))["choices"][0]["message"]["content"] == "lmno"
        assert ok(chat(server, chat_template_kwargs={"opening": "b"}))["choices"][0]["message"]["content"] == "cdef"


def test_a_template_of_the_requests_own(shared_llm, server):
    asked = {"chat_template": "{{ messages[0].content }}x"}
    assert "trust_request_chat_template" in refusal(chat(server, **asked))["message"]
    with serving(shared_llm, options={"trust_request_chat_template": True}) as trusting:
        assert ok(chat(trusting, **asked))["choices"][0]["message"]["content"] == "yz{|"
        assert refusal(chat(trusting, chat_template="{{ oh no"))["type"] == "invalid_request_error"


def test_reasoning_effort_is_for_templates_that_read_it(server, shared_llm):
    assert "reads neither" in refusal(chat(server, reasoning_effort="low"))["message"]
    with serving(shared_llm, options={"trust_request_chat_template": True}) as trusting:
        template = "{{ 'k' if enable_thinking else 'b' }}"
        found = [
            ok(chat(trusting, chat_template=template, reasoning_effort=effort))["choices"][0]["message"]["content"]
            for effort in ("low", "none")
        ]
    assert found == [after("k", 4), after("b", 4)]


def test_documents_are_for_templates_that_read_them(server):
    assert "documents" in refusal(chat(server, documents=[{"title": "a", "text": "b"}]))["message"]


def test_marks_that_are_special_tokens_stay_in_the_text_that_is_parsed(shared_llm, monkeypatch):
    monkeypatch.setitem(REASONING, "turns", Thinking((TURN,), (BOS,)))
    asked = {"chat_template_kwargs": {"opening": TURN}, "logit_bias": {str(SPECIALS[BOS]): 100}, "max_tokens": 3}
    with serving(shared_llm, options={"reasoning_parser": "turns"}) as server:
        assert ok(chat(server, **asked))["choices"][0]["message"]["content"] == BOS * 2, "the first ends the reasoning"
        assert ok(chat(server, skip_special_tokens=True, **asked))["choices"][0]["message"]["content"] == ""


# ---- a budget of reasoning


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A server whose model knows <think> and </think> as tokens."""
    template = alphabet_model.CHAT_TEMPLATE + "{# <think> </think> #}"
    rows = {name: np.pad(x, [(0, 4), (0, 0)]) if len(x) == VOCABULARY else x for name, x in alphabet_model.weights().items()}
    folder = tmp_path_factory.mktemp("counted")
    marks = ["<think>", "</think>"]
    alphabet_model.save(folder, tensors=rows, chat_template=template, added_tokens=marks, vocab_size=VOCABULARY + 4)
    with serving(LLM(folder, bucket_plan=PLAN, num_pages=96, page_size=4, compilation_cache_dir="")) as server:
        yield server
        server.wait_idle()


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_ends_with_its_budget(counted, budget, stream):
    begin, end = (counted.engine.get_tokenizer().backend.token_to_id(mark) for mark in ("<think>", "</think>"))
    asked = {"chat_template_kwargs": {"opening": "<think>"}, "max_tokens": 12, "return_token_ids": True, "logit_bias": {"120": 50}}
    answer = chat(counted, thinking_token_budget=budget, stream=stream, **asked)
    if stream:
        streamed = chunks(answer)
        found = [i for chunk in streamed for c in chunk["choices"] for i in c.get("token_ids") or []]
        reasoning = "".join(c["delta"].get("reasoning", "") for chunk in streamed for c in chunk["choices"])
    else:
        choice = ok(answer)["choices"][0]
        found, reasoning = choice["token_ids"], choice["message"]["reasoning"] or ""
    assert found == [*ids("x" * budget), end, *ids("x" * (11 - budget))] and reasoning == "x" * budget
    assert begin is not None and ok(chat(counted, **asked))["choices"][0]["message"]["reasoning"] == "x" * 12


def test_a_budget_holds_where_the_model_begins_to_think(counted):
    begin, end = (counted.engine.get_tokenizer().backend.token_to_id(mark) for mark in ("<think>", "</think>"))
    asked = {"max_tokens": 9, "return_token_ids": True, "n": 2, "thinking_token_budget": 3}
    choices = ok(chat(counted, **asked, logit_bias={str(begin): 90, "120": 50}))["choices"]
    assert [(c["token_ids"][0], c["token_ids"].index(end)) for c in choices] == [(begin, 4)] * 2
    assert ok(chat(counted, thinking_token_budget=3))["choices"][0]["message"]["content"] == "BCDE", "it need not think"


@pytest.mark.parametrize("form", [{"choice": ["yes"]}, {"regex": "yes"}])
def test_a_form_follows_a_budget(counted, form):
    asked = {"chat_template_kwargs": {"opening": "<think>"}, "logit_bias": {"120": 50}, "max_tokens": 20}
    message = ok(chat(counted, thinking_token_budget=2, structured_outputs=form, **asked))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("xx", "yes")


@pytest.mark.parametrize("form", [{}, {"structured_outputs": {"choice": ["yes"]}}])
def test_a_budget_is_rendered(counted, form):
    """As the body of a request for token ids, which is answered as the chat."""
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 9, "thinking_token_budget": 2}
    body |= {"chat_template_kwargs": {"opening": "<think>"}, "logit_bias": {"120": 50}} | form
    answer = ok(counted.client.post("/v1/chat/completions", json=body | {"return_token_ids": True}))
    rendered = ok(counted.client.post("/v1/chat/completions/render", json=body))
    assert rendered["reasoning_ended"] is False and rendered["sampling_params"]["thinking_token_budget"] == 2
    unseen = ok(counted.client.post("/v1/chat/completions/render", json=body | {"include_reasoning": False}))
    for asked in (rendered, unseen):
        found = ok(counted.client.post("/inference/v1/generate", json=asked))["choices"][0]["token_ids"]
        assert found == answer["choices"][0]["token_ids"] and found[:2] == ids("xx")


def test_a_budget_of_a_completion(counted):
    answer = ok(complete(counted, "a<think>", thinking_token_budget=2, max_tokens=6, logit_bias={"120": 50}, return_token_ids=True))
    end = counted.engine.get_tokenizer().backend.token_to_id("</think>")
    assert answer["choices"][0]["token_ids"] == [120, 120, end, 120, 120, 120]


def test_budgets_that_can_not_be_kept(server, thinking):
    assert refusal(chat(server, thinking_token_budget=3))["param"] == "thinking_token_budget"
    error = refusal(chat(thinking, thinking_token_budget=3))
    assert "<think>" in error["message"] and error["param"] == "thinking_token_budget"
    assert refusal(chat(server, thinking_token_budget=-2))["param"] == "thinking_token_budget"
    assert ok(chat(server, thinking_token_budget=-1))["choices"][0]["message"]["content"] == "BCDE"


# ---- the server


def test_tokens_as_ids_by_default(shared_llm):
    with serving(shared_llm, options={"return_tokens_as_token_ids": True}) as server:
        assert ok(complete(server, logprobs=0))["choices"][0]["logprobs"]["tokens"][0] == "token_id:98"
        assert ok(complete(server, logprobs=0, return_tokens_as_token_ids=False))["choices"][0]["logprobs"]["tokens"][0] == "b"


def test_prompts_in_the_log_where_that_is_asked_for(shared_llm, caplog):
    with caplog.at_level("INFO"), serving(shared_llm, options={"enable_log_requests": True, "max_log_len": 3}) as server:
        ok(complete(server, "teapot", max_tokens=2, request_id="mine"))
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request mine")]
    assert "6 tokens, prompt 'tea', ids [116, 101, 97]" in line and "max_tokens=2" in line


def test_the_load_with_an_answer(server):
    def load(kind):
        answer = server.client.post("/v1/completions", json={"prompt": "a"}, headers={"endpoint-load-metrics-format": kind})
        return answer.headers.get("endpoint-load-metrics")

    assert load("text").startswith("TEXT named_metrics.kv_cache_usage_perc=") and "named_metrics.num_requests_waiting=" in load(
        "TEXT"
    )
    assert load("json").startswith('JSON {"named_metrics":{"kv_cache_usage_perc":') and load("xml") is None


def test_a_root_path(shared_llm):
    with serving(shared_llm, options={"root_path": "/models/one", "api_keys": ("key",)}) as server:
        for path in ("/v1/models", "/models/one/v1/models"):
            assert server.client.get(path).status_code == 401
            assert server.client.get(path, headers={"Authorization": "Bearer key"}).status_code == 200
        assert server.client.get("/models/one/health").status_code == 200


async def add_a_header(request, call_next):
    response = await call_next(request)
    response.headers["x-seen"] = "function"
    return response


class AddHeader:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def also(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-class", b"yes")]
            await send(message)

        await self.app(scope, receive, also)


def test_middleware_and_pages_of_other_origins(shared_llm):
    from jaxserve.serving.options import CrossOrigin

    names = (f"{__name__}.add_a_header", f"{__name__}.AddHeader")
    options = {"middleware": names, "cross_origin": CrossOrigin(origins=("https://a.example",))}
    with serving(shared_llm, options=options) as server:
        seen = server.client.get("/health", headers={"Origin": "https://a.example"}).headers
        assert (
            seen["x-seen"] == "function" and seen["x-class"] == "yes" and seen["access-control-allow-origin"] == "https://a.example"
        )
        assert "access-control-allow-origin" not in server.client.get("/health", headers={"Origin": "https://b.example"}).headers
    for name in ("nosuch.Thing", "json.JSONDecodeErrors", "json.dumps", "plain"):
        with pytest.raises(ValueError, match=f"middleware='{name}'"), serving(shared_llm, options={"middleware": (name,)}):
            pass


# ---- an output that repeats itself


def test_an_output_that_repeats_itself_ends(server):
    ended = metric(server, "request_success_total", finished_reason="repetition")
    patterns = {"max_pattern_size": 2, "min_count": 3}
    again: dict[str, Any] = {"allowed_token_ids": ids("b"), "max_tokens": 20, "repetition_detection": patterns}
    (choice,) = ok(complete(server, "bbbbbb", **again))["choices"]  # the prompt's repetitions do not count
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bbb", "repetition", "repetition_detected")
    (choice,) = ok(chat(server, **again, min_tokens=7))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("b" * 7, "repetition")
    last = [chunk["choices"][0] for chunk in chunks(chat(server, **again, stream=True)) if chunk["choices"]][-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")
    (choice,) = ok(complete(server, **again | {"repetition_detection": {"max_pattern_size": 0}}))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("b" * 20, "length")
    asked = {"token_ids": ids("b"), "sampling_params": {name: again[name] for name in again}}
    (choice,) = ok(server.client.post("/inference/v1/generate", json=asked))["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids("bbb"), "repetition")
    server.wait_idle()
    assert metric(server, "request_success_total", finished_reason="repetition") == ended + 4


@pytest.mark.parametrize(
    "wrong", [{"max_pattern_size": 3}, {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}, {"size": 1}]
)
def test_patterns_that_no_output_could_have(server, wrong):
    error = refusal(complete(server, repetition_detection=wrong))
    assert error["param"] == "repetition_detection" and error["message"].count("repetition_detection") == 1

"""Outputs of a given form over HTTP: `response_format` and `structured_outputs`, whole, streamed, and through openai's helpers."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pydantic
import pytest

from jaxserve import BucketPlan
from jaxserve.serving.async_llm import MAX_FORM
from jaxserve.structured.grammars import GrammarCompiler
from tests.alphabet_model import VOCABULARY, after
from tests.serving.calls import chat, chunks, complete, ok, refusal
from tests.serving.http_server import Server

PLAN = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=4)
    age: int = pydantic.Field(ge=0, le=99)


SCHEMA = Person.model_json_schema() | {"additionalProperties": False}
NAMED = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
NO_BLANKS = {str(ord(c)): -100 for c in " \t\r\n"}  # this model would go on with them for ever
LONG = {"max_tokens": 80, "temperature": 1, "seed": 3, "logit_bias": NO_BLANKS}


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("stream", [False, True])
def test_response_formats(server, ask, stream):
    def text(**body) -> str:
        response = ask(server, stream=stream, **LONG | body)
        if not stream:
            (choice,) = ok(response)["choices"]
            reason, said = choice["finish_reason"], choice["text"] if ask is complete else choice["message"]["content"]
        else:
            choices = [chunk["choices"][0] for chunk in chunks(response)]
            reason = choices[-1]["finish_reason"]
            said = "".join(c["text"] if ask is complete else c["delta"].get("content", "") for c in choices)
        assert reason == "stop"
        return said

    Person.model_validate_json(text(response_format=NAMED))
    close = {"logit_bias": NO_BLANKS | {str(ord("}")): 100}}
    assert json.loads(text(response_format={"type": "json_object"}, **close)) == {}
    assert text(response_format={"type": "text"}, stop=["d", "D"], temperature=0) == ("bc" if ask is complete else "BC")
    assert re.fullmatch("[0-9]{3}", text(structured_outputs={"regex": "[0-9]{3}"}))


CLOSED = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
SEVEN = {"structures": [{"begin": "d<", "schema": {"const": 7}, "end": ">"}], "triggers": ["d"], "stop_after_first": True}
KINDS = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, r'\{"name":"[^"]*","age":[0-9]+\}'),
    "json text": ({"json": json.dumps(SCHEMA), "whitespace_pattern": "~"}, r'\{~?"name"~?:~?"[^"]*"~?,~?"age"~?:~?[0-9]+~?\}'),
    "closed": ({"json": CLOSED, "disable_additional_properties": True, "disable_any_whitespace": True}, r'\{"a":1\}'),
    "choice": ({"choice": ["yes", "no"], "json": None}, "yes|no"),
    "grammar": ({"grammar": 'start: "<" start ">" | /[a-c]{2}/'}, "<*[abc]{2}>*"),
    "structural_tag": ({"structural_tag": SEVEN}, "bcd<7>"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_structured_outputs(server, kind):
    form, pattern = KINDS[kind]
    (choice,) = ok(complete(server, max_tokens=80, logit_bias=NO_BLANKS, structured_outputs=form))["choices"]
    assert re.fullmatch(pattern, choice["text"], re.DOTALL) and choice["finish_reason"] == "stop"


def test_samples_beside_one_that_is_free(server):
    """A form constrains its own request, in the greedy direction where it leaves a choice; all n samples have it."""
    answer = ok(complete(server, ["tea", "x"], n=2, structured_outputs={"choice": ["bcx", "yz", "y1"]}, logprobs=1))
    assert [c["text"] for c in answer["choices"]] == ["bcx", "bcx", "yz", "yz"]
    assert answer["choices"][0]["logprobs"]["tokens"] == list("bcx")
    assert ok(complete(server))["choices"][0]["text"] == "bcde"


def test_an_output_that_is_cut_says_so(server):
    (choice,) = ok(complete(server, max_tokens=5, response_format=NAMED))["choices"]
    assert choice["finish_reason"] == "length"


def test_refused_before_anything_is_sent(server):
    """A stream too is a 400 with the compiler's words, also while the engine is at work and the grammar has been refused before."""
    wrong = {"structured_outputs": {"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}}
    for stream in (True, False, True):
        error = refusal(complete(server, stream=stream, n=2, **wrong))
        assert error["param"] == "structured_outputs" and "json: " in error["message"] and "nsatisf" in error["message"]


def test_a_compiler_that_breaks_is_no_fault_of_the_request(server, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(GrammarCompiler, "_compile", broken)
        assert "broken on purpose" in refusal(complete(server, structured_outputs={"regex": "once"}), 500)["message"]
    assert ok(complete(server, structured_outputs={"regex": "once"}))["choices"][0]["text"] == "once"


# ---- a compiler that is behind


@pytest.fixture
def blocked(server, monkeypatch) -> Iterator[tuple[list[str], threading.Event]]:
    """(regexes whose compilation began, what lets it go on): both of the compiler's threads are busy with two forms."""
    compile_, begun, gate = GrammarCompiler._compile, list[str](), threading.Event()

    def slowly(self, params, vocabulary):
        begun.append(params.regex)
        assert gate.wait(120)
        return compile_(self, params, vocabulary)

    monkeypatch.setattr(GrammarCompiler, "_compile", slowly)
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(complete, server, structured_outputs={"regex": f"{i}{time.time_ns()}"}) for i in range(2)]
            wait_for(lambda: len(begun) == 2)
            yield begun, gate
            gate.set()
            for response in asked:
                ok(response.result())
    finally:
        gate.set()


def formed(server: Server, regex: str) -> str:
    (choice,) = ok(complete(server, max_tokens=20, structured_outputs={"regex": regex}))["choices"]
    return choice["text"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [complete, chat])
def test_a_client_that_leaves_is_not_compiled_for(server, blocked, ask, stream):
    begun, gate = blocked
    leaves, stays = f"leaves{time.time_ns()}", f"stays{time.time_ns() % 1000}"
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=0.3) as client:
        stayed = pool.submit(formed, server, stays)
        wait_for(lambda: server.engine.num_requests == 3)
        for wanted in (leaves, stays):  # who leaves takes nothing from another who wants the same
            with pytest.raises(httpx.ReadTimeout):
                ask(replace(server, client=client), stream=stream, structured_outputs={"regex": wanted})
            wait_for(lambda: server.engine.num_requests == 3)
        gate.set()
        assert stayed.result() == stays
    assert leaves not in begun and stays in begun


def test_a_request_that_is_refused_is_not_compiled_for(server, blocked):
    begun, gate = blocked
    for _ in range(3):
        refusal(complete(server, "a" * 10_000, structured_outputs={"regex": "refused"}))
    gate.set()
    assert formed(server, "last") == "last"
    assert "refused" not in begun


def test_too_many_forms_wait(server, blocked, monkeypatch):
    _, gate = blocked
    monkeypatch.setattr(server.engine._engine._grammars, "_max_waiting", 3)
    with ThreadPoolExecutor(2) as pool:
        third = pool.submit(formed, server, "third")
        wait_for(lambda: server.engine.num_requests == 3)
        response = complete(server, structured_outputs={"regex": "fourth"})
        assert "3 grammars are not compiled yet" in refusal(response, 429)["message"] and response.headers["retry-after"] == "1"
        again = pool.submit(formed, server, "third")
        wait_for(lambda: server.engine.num_requests == 4)
        gate.set()
        assert third.result() == again.result() == "third"
    assert formed(server, "fourth") == "fourth"


def test_too_large_a_form(server):
    error = refusal(complete(server, structured_outputs={"choice": ["x" * MAX_FORM]}))
    assert error["param"] == "structured_outputs" and f"the most is {MAX_FORM}" in error["message"]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"description": "x" * MAX_FORM}}}
    assert refusal(chat(server, response_format=schema))["param"] == "response_format"


# ---- behind reasoning


def test_a_form_is_of_the_content_and_not_of_the_reasoning(thinking):
    def answer(opening: str, end: float = 0.0, **body):
        asked = {"structured_outputs": {"regex": "x{3}"}, "chat_template_kwargs": {"opening": opening}, "max_tokens": 100}
        bias = NO_BLANKS | {str(VOCABULARY - 1): end}
        (choice,) = ok(chat(thinking, **asked | {"logit_bias": bias} | body))["choices"]
        return choice["message"].get("reasoning_content", ""), choice["message"]["content"], choice["finish_reason"]

    thought, content, reason = answer("<think>", end=3.5)
    assert thought and thought == after(">", len(thought)) and (content, reason) == ("xxx", "stop")
    assert answer("<think>", max_tokens=6) == (after(">", 6), "", "length"), "the prompt has opened it"
    assert answer("<think></think>") == ("", "xxx", "stop"), "the prompt has closed it"
    assert answer("A", bad_words=["<"]) == ("", "xxx", "stop"), "it may think, and does not"
    thought, content, reason = answer(";", end=3.5)
    assert thought == after(">", len(thought)) and (content, reason) == ("xxx", "stop"), "it may think, and does"


@pytest.mark.parametrize("opening", ["<think>", "<think></think>", "A"])
@pytest.mark.parametrize("form", [{"regex": "[^\\s\\S]"}, {"grammar": "start: /[^\\s\\S]/"}, {"json": False}])
def test_what_nothing_satisfies_is_refused_before_it_thinks(thinking, opening, form):
    asked = {"structured_outputs": form, "chat_template_kwargs": {"opening": opening}}
    for stream in (False, True):
        error = refusal(chat(thinking, stream=stream, **asked))
        assert error["param"] == "structured_outputs" and "satisf" in error["message"]


# ---- openai's helpers


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


ASKED = {"model": "alphabet", "messages": [{"role": "user", "content": "a"}], "response_format": Person}


def test_parse(client):
    answer = client.chat.completions.parse(**ASKED, **LONG, n=2)
    assert all(isinstance(choice.message.parsed, Person) for choice in answer.choices)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**ASKED, max_tokens=4, temperature=0)


def test_parse_of_a_stream(client):
    with client.chat.completions.stream(**ASKED, **LONG) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person) and "content.done" in kinds and kinds.count("content.delta") > 3

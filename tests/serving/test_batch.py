"""Files of requests in OpenAI's batch format: the lines as they are read, asked and resumed."""

import asyncio
import json

import pytest

from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.batch import BatchLine, count_results, read_lines, run_batch
from jaxserve.serving.options import ServerOptions
from tests.alphabet_model import after


def line(custom_id="a", url="/v1/completions", **body) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def results(llm, lines, max_concurrency=4, **engine) -> list[dict]:
    async def main():
        app = make_app(AsyncLLM(llm, **engine), ServerOptions(names=("alphabet",)))
        async with app.router.lifespan_context(app):
            return [result async for result in run_batch(app, read_lines(lines), max_concurrency)]

    return asyncio.run(main())


def test_each_url_is_answered_in_order(llm):
    said = [{"role": "user", "content": "a"}]
    found = results(
        llm,
        [
            line("one", prompt="a", max_tokens=30, temperature=0),
            line("two", "/v1/chat/completions", messages=said, max_tokens=3, temperature=0),
            line("three", "/v1/responses", input="a", max_output_tokens=3, temperature=0),
        ],
    )
    assert [result["custom_id"] for result in found] == ["one", "two", "three"]
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in found)
    completion, chat, response = (result["response"]["body"] for result in found)
    assert completion["choices"][0]["text"] == after("a", 30) and chat["choices"][0]["message"]["content"] == "BCD"
    assert response["output"][0]["content"][0]["text"] == "BCD"
    assert len({result["id"] for result in found}) == 3 and all(result["response"]["request_id"] for result in found)


def test_what_fails_is_said_and_the_rest_runs(llm):
    found = results(
        llm,
        ["nonsense\n", "\n", line("a", prompt="a", temperature=-1), line("b", prompt="a", max_tokens=2, temperature=0), line("b")],
    )
    bad, refused, fine, twice = found
    assert bad["custom_id"] is None and bad["response"] is None and bad["error"]["message"].startswith("line 1: not JSON")
    assert refused["response"]["status_code"] == 400 and refused["error"]["message"].startswith("temperature")
    assert refused["error"]["message"] == refused["response"]["body"]["error"]["message"]
    assert fine["response"]["body"]["choices"][0]["text"] == "bc"
    assert twice["custom_id"] == "b" and "an earlier line's" in twice["error"]["message"]


def test_more_lines_than_room(llm):
    """A server that has room for no more says so, and is asked again."""
    lines = [line(str(i), prompt="a", max_tokens=1 + i % 5, temperature=0) for i in range(40)]
    found = results(llm, lines, max_concurrency=20, max_waiting=0)
    assert [result["custom_id"] for result in found] == [str(i) for i in range(40)]
    assert [r["response"]["body"]["choices"][0]["text"] for r in found] == [after("a", 1 + i % 5) for i in range(40)]


@pytest.mark.parametrize(
    "given, said",
    [
        ("[]", "must be an object"),
        ('{"method": "POST"}', "custom_id must be a text, found None"),
        (line("a", "/v1/embeddings"), "url must be one of"),
        (line().replace("POST", "GET"), "method must be POST, found 'GET'"),
        (line().replace("{}", "3"), "body must be an object"),
        (line(stream=True), "body.stream must be false"),
        (line(background=True), "body.background must be false"),
        (line().replace('"body"', '"more": 1, "body"'), "unknown fields ['more']"),
    ],
)
def test_lines_that_are_no_requests(given, said):
    (made,) = read_lines([given])
    assert made.error and made.error.startswith("line 1: ") and said in made.error


def test_a_request(llm):
    (made,) = read_lines(["\n", line("x", prompt="é")])
    assert made == BatchLine(2, "x", "/v1/completions", json.dumps({"prompt": "é"}).encode())


def test_results_are_counted_to_resume():
    lines = [line("a"), "nonsense\n", line("c"), line("d")]
    done = [b'{"custom_id": "a", "error": null}\n', b'{"custom_id": null, "error": {}}\n']
    rest = read_lines(lines)
    assert count_results([*done, b'{"custom_id": "c", "err'], rest) == (2, 1, sum(map(len, done)))
    assert [made.custom_id for made in rest] == ["c", "d"]
    with pytest.raises(ValueError, match="line 2 is not the result of that request"):
        count_results([done[0], done[0]], read_lines(lines))
    with pytest.raises(ValueError, match="line 1 is not a result of a batch"):
        count_results([b'{"prompt": "a"}\n'], read_lines(lines))
    with pytest.raises(ValueError, match="line 5 is not the result"):
        count_results([*done, b'{"custom_id": "c", "error": 0}\n', b'{"custom_id": "d", "error": 0}\n', done[0]], read_lines(lines))

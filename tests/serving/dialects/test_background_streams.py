"""Responses in the background whose events are streamed, read by clients that leave and come back."""

import asyncio
import contextlib
import json

import httpx
import pytest

from jaxserve.serving.dialects.event_log import EndedLogs, EventLog, EventsGoneError
from jaxserve.serving.dialects.response_events import Answer
from jaxserve.serving.dialects.response_store import MemoryStore
from tests.serving.calls import ok, refusal
from tests.serving.dialects.answers import named_events
from tests.serving.http_server import serving, slow_down

ASK = {"model": "alphabet", "input": "a", "temperature": 0, "max_output_tokens": 30, "background": True, "stream": True}


@pytest.fixture(scope="module")
def shared(tools_llm):
    with serving(tools_llm) as server:
        yield server


def followed(server, response_id: str, **query) -> list:
    response = server.client.get(f"/v1/responses/{response_id}", params={"stream": True} | query)
    assert response.status_code == 200, response.text
    return named_events(response.text)


@pytest.mark.slow
def test_who_leaves_comes_back_for_the_rest(client, server, tools_llm, monkeypatch):
    """By the openai client: all events come once, in order, and are those of who stays."""
    slow_down(monkeypatch, tools_llm)
    with client.responses.create(**ASK) as stream:
        first = [event for event, _ in zip(stream, range(6), strict=False)]
    response_id = first[0].response.id
    assert [event.type.removeprefix("response.") for event in first[:3]] == ["created", "queued", "in_progress"]
    assert [event.response.status for event in first[:3]] == ["queued", "queued", "in_progress"]
    assert client.responses.retrieve(response_id).status == "in_progress", "it goes on without a reader"
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=first[-1].sequence_number))
    assert rest[-1].type == "response.incomplete" and rest[-1].response.output_text
    events = [event.to_dict() for event in (*first, *rest)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [data for _, data in followed(server, response_id)] == events
    assert events[-1]["response"] == client.responses.retrieve(response_id).to_dict(), "the last event has what is kept"
    server.wait_idle()


def test_several_follow_at_once(server, tools_llm, monkeypatch):
    slow_down(monkeypatch, tools_llm)

    async def follow_all() -> list[str]:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/responses", json=ASK) as made,
        ):
            text = made.aiter_text()
            begin = await anext(text)
            response_id = json.loads(begin.partition("data: ")[2].partition("\n")[0])["response"]["id"]
            path = f"/v1/responses/{response_id}?stream=true"
            others = asyncio.gather(*(client.get(path) for _ in range(3)))
            whole = begin + "".join([part async for part in text])
            return [whole, *(answer.text for answer in await others)]

    texts = asyncio.run(follow_all())
    assert len(set(texts)) == 1 and len(named_events(texts[0])) > 30
    server.wait_idle()


def test_cancelled_and_deleted(client, server, tools_llm, monkeypatch):
    slow_down(monkeypatch, tools_llm)
    with client.responses.create(**ASK | {"max_output_tokens": 200}, extra_body={"ignore_eos": True}) as stream:
        response_id = next(iter(stream)).response.id
        next(iter(stream))
        assert client.responses.cancel(response_id).status == "cancelled"
        assert [event.type for event in stream][-1] == "response.cancelled"
    server.wait_idle()
    assert followed(server, response_id)[-1][0] == "response.cancelled"
    ok(server.client.delete(f"/v1/responses/{response_id}"))
    refusal(server.client.get(f"/v1/responses/{response_id}?stream=true"), 404)


def test_what_has_no_events(client, server):
    made = client.responses.create(**ASK | {"stream": False, "max_output_tokens": 1})
    error = refusal(server.client.get(f"/v1/responses/{made.id}?stream=true"))
    assert "made with background=true and stream=true" in error["message"] and error["param"] == "stream"
    assert "only with stream=true" in refusal(server.client.get(f"/v1/responses/{made.id}?starting_after=1"))["message"]
    refusal(server.client.get(f"/v1/responses/{made.id}?stream=true&starting_after=-1"))
    refusal(server.client.get("/v1/responses/resp_none?stream=true"), 404)
    server.wait_idle()


# ---- bounds


def read(log: EventLog, begin: int = 0) -> list[bytes]:
    async def collect():
        return [event async for event in log.follow(begin)]

    return asyncio.run(asyncio.wait_for(collect(), 10))


def test_the_oldest_events_are_forgotten():
    log = EventLog(max_bytes=10)
    for number in range(8):
        log.add(b"%03d" % number)
    log.end()
    assert log.first == 5 and log.num_bytes == 9 and read(log, 5) == [b"005", b"006", b"007"]
    assert read(log, 7) == [b"007"] and read(log, 8) == []
    with pytest.raises(EventsGoneError, match="before 5 are not kept"):
        read(log, 4)


def test_a_slow_reader_sees_no_gap():
    async def go():
        log, seen = EventLog(max_bytes=4), []
        log.add(b"0")
        log.add(b"1")
        async with contextlib.aclosing(log.follow()) as events:
            with pytest.raises(EventsGoneError):
                async for event in events:
                    seen.append(event)
                    for number in range(2, 8):  # while it was not reading
                        log.add(b"%d" % number)
        return seen

    assert asyncio.run(asyncio.wait_for(go(), 10)) == [b"0"]


def test_ended_streams_are_bounded():
    def log(size: int) -> EventLog:
        made = EventLog()
        made.add(bytes(size))
        return made

    ended = EndedLogs(max_logs=3, max_bytes=100)
    for number in range(5):
        ended.put(str(number), log(10))
    assert [ended.get(str(number)) is not None for number in range(5)] == [False, False, True, True, True]
    ended.put("large", log(95))
    assert ended.get("4") is None and ended.get("large") is not None
    ended.delete("large")
    assert ended.get("large") is None


def test_events_that_are_gone(server, monkeypatch):
    """The response is there all the same."""
    text = server.client.post("/v1/responses", json=ASK).text
    events, kept = named_events(text), EventLog(max_bytes=3000)  # bounded only now: a bound meanwhile would end a slow reader
    for event in text.split("\n\n")[:-1]:
        kept.add(f"{event}\n\n".encode())
    kept.end()
    monkeypatch.setattr(EndedLogs, "get", lambda *_: kept)
    path = f"/v1/responses/{events[-1][1]['response']['id']}"
    error = refusal(server.client.get(f"{path}?stream=true"))
    assert error["param"] == "starting_after" and "are not kept any more" in error["message"]
    last = len(events) - 1
    assert named_events(server.client.get(f"{path}?stream=true&starting_after={last - 1}").text) == events[-1:]
    assert server.client.get(f"{path}?stream=true&starting_after={last}").text == ""
    beyond = refusal(server.client.get(f"{path}?stream=true&starting_after={last + 1}"))
    assert f"starting_after={last + 1}: the last event is {last}" in beyond["message"]
    assert ok(server.client.get(path))["status"] == "incomplete"


def test_who_reads_too_slowly_is_told(server, monkeypatch):
    async def too_late(log, begin=0):
        yield log._events[0]
        raise EventsGoneError("the events before 9 are not kept any more")

    monkeypatch.setattr(EventLog, "follow", too_late)
    (first, _), (last, data) = named_events(server.client.post("/v1/responses", json=ASK).text)
    assert first == "response.created" and last == "error"
    assert data == {"type": "error", "code": "events_gone", "message": "the events before 9 are not kept any more"}
    server.wait_idle()


def test_a_response_too_large_to_be_repeated(server):
    asked = ASK | {"user": "x" * (1 << 20)}
    error = refusal(server.client.post("/v1/responses", json=asked))
    assert error["param"] == "stream" and "of at most 1048576 in the background" in error["message"]
    server.wait_idle()
    ok(server.client.post("/v1/responses", json=asked | {"stream": False}))
    server.wait_idle()


def test_what_breaks_ends_the_stream(server, monkeypatch):
    """An answer that breaks has failed, and a store that breaks leaves no reader waiting."""

    async def broken(self):
        yield self._lifecycle("created")
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "events", broken)
        events = named_events(server.client.post("/v1/responses", json=ASK).text)
    assert [name for name, _ in events] == ["response.created", "response.failed"]
    server.wait_idle()

    def refuses(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(MemoryStore, "put", refuses)
    events = named_events(server.client.post("/v1/responses", json=ASK).text)
    assert events[-1][0] == "response.incomplete"
    refusal(server.client.get(f"/v1/responses/{events[-1][1]['response']['id']}"), 404)

"""Several processes on one engine loop, as far as one process can show it: hubs, pipes, and what stands in for the loop."""

import asyncio
import contextlib
import pickle
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from jaxserve import SamplingParams
from jaxserve.serving.app import make_app
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.messages import (
    Delta,
    FailedError,
    HTTPAnswered,
    QueueFullError,
    Report,
    RequestError,
    UnavailableError,
)
from jaxserve.serving.metrics import Metrics
from jaxserve.serving.options import ServerOptions
from jaxserve.serving.pipes import ENGINE_GONE, EngineHub, Pipe, RemoteLoop, framed
from jaxserve.serving.streams import Ask
from scripts.bench.replay_engine import FOX, replay_llm

SEQS = 8


class Users:
    """A hub, and AsyncLLMs that use it as other processes would."""

    def __init__(self, step_seconds: float, max_waiting: int):
        self.llm = replay_llm(SEQS, step_seconds, chat_template="{{ messages[0].content }}")
        self.hub = EngineHub(
            self.llm,
            max_waiting=max_waiting,
            max_failures=3,
            make_metrics=lambda stats, refused: Metrics("m", stats, num_refused=refused),
        )
        self.hub.start()
        self.lost: list[int] = []
        self.ends: list[socket.socket] = []
        self.engines = [self.add(i) for i in range(2)]

    def add(self, i: int) -> AsyncLLM:
        ours, theirs = socket.socketpair()
        self.hub.attach(ours)
        self.ends.append(theirs)

        def connect(deliver: Callable[[Any], None]) -> RemoteLoop:
            return RemoteLoop(theirs, self.hub.stats, deliver, lambda: self.lost.append(i))

        return AsyncLLM(self.llm, max_waiting=1000, connect=connect, tag=f"{i}-")

    def number(self, name: str) -> float:
        lines = [line for line in self.hub.metrics.render().decode().splitlines() if line.startswith(f"jaxserve:{name}")]
        return sum(float(line.rsplit(None, 1)[1]) for line in lines)


@contextlib.asynccontextmanager
async def users(step_seconds: float = 0.002, max_waiting: int = 1000) -> AsyncGenerator[Users]:
    made = Users(step_seconds, max_waiting)
    for engine in made.engines:
        engine.start()
    try:
        yield made
    finally:
        for engine in made.engines:
            await engine.shutdown(0)
        await asyncio.to_thread(made.hub.stop)


async def answer(engine: AsyncLLM, name: str, max_tokens: int = 20) -> str:
    async for output in engine.generate("x", SamplingParams(max_tokens=max_tokens), name):
        text = output.outputs[0].text
    return text


async def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_responses_that_nothing_is_kept_of():
    """Any process may be asked next, so that none can keep one."""

    async def check() -> None:
        async with users() as made:
            app = make_app(made.engines[0], ServerOptions(names=("m",)), shares_engine=True, one_of_several="api_server_count")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

                async def post(**body: Any) -> httpx.Response:
                    return await client.post("/v1/responses", json={"input": "x", "max_output_tokens": 5} | body)

                for body in ({}, {"store": False}, {"background": False, "previous_response_id": None}):
                    response = (await post(**body)).json()
                    assert response["output"][0]["content"][0]["text"] == FOX[:5] and response["store"] is False
                for name, value in (("store", True), ("background", True), ("previous_response_id", "resp_1")):
                    refused = await post(**{name: value})
                    assert refused.status_code == 501 and refused.json()["error"]["param"] == name
                    assert "--api_server_count=1" in refused.json()["error"]["message"]
                for method, path in (("GET", "/v1/responses/r"), ("DELETE", "/v1/responses/r"), ("POST", "/v1/responses/r/cancel")):
                    assert (await client.request(method, path)).status_code == 501

    asyncio.run(check())


def test_requests_of_one_name_go_where_they_came_from():
    async def check() -> None:
        async with users() as made:
            lengths = [(engine, 1 + 7 * i % 40) for i in range(12) for engine in made.engines]
            texts = await asyncio.gather(*(answer(engine, "same", length) for engine, length in lengths))
            assert texts == [FOX[:length] for _, length in lengths]
            assert await made.engines[0].ask("num_requests") == 0
            assert made.number("request_success_total") == 24 and made.number("request_generation_tokens_sum") == sum(
                map(len, texts)
            )
            made.engines[1].tell(HTTPAnswered("/v1/completions", 200, 5))
            rendered = (await made.engines[1].ask("metrics")).decode()
            assert 'jaxserve:http_requests_total{path="/v1/completions",status="200"} 1.0' in rendered
            assert 'reason="max_num_queued_reqs"} 5.0' in rendered
            with pytest.raises(ValueError, match="method='pause' must be"):
                await made.engines[0].ask("pause")

    asyncio.run(check())


def test_the_bound_on_what_waits_is_that_of_all_together():
    async def check() -> None:
        async with users(step_seconds=0.05, max_waiting=2) as made:
            one = SamplingParams(max_tokens=1000)
            asks = [Ask([1, 2], one) for _ in range(SEQS)]
            first = await made.engines[0].open(asks)
            second = await made.engines[1].open(asks[:2])
            with pytest.raises(QueueFullError, match=f"{SEQS + 2} samples are running or waiting, of at most {SEQS + 2}") as error:
                await made.engines[1].open(asks[:1])
            assert error.value.retry_after == 1 and made.engines[1].num_refused == 1
            with pytest.raises(QueueFullError):
                await made.engines[1].open(asks[:3])
            assert made.engines[1].num_refused == 2  # calls, however many prompts each has
            made.engines[1].tell(HTTPAnswered("/v1/completions", 429, made.engines[1].num_refused))
            await until(lambda: made.hub.num_refused == 2)
            second.close()
            await until(lambda: made.number("request_success_total") == 2)
            (await made.engines[1].open(asks[:1])).close()
            first.close()
            await until(lambda: not made.llm.engine.num_requests)

    asyncio.run(check())


def test_what_a_lost_process_asked_for_ends_and_the_others_go_on():
    async def check() -> None:
        async with users(step_seconds=0.01) as made:
            mine = await made.engines[0].open([Ask([1], SamplingParams(max_tokens=10_000))])
            other = asyncio.create_task(answer(made.engines[1], "other", 60))
            await until(lambda: made.llm.engine.num_requests == 2)
            made.ends[0].shutdown(socket.SHUT_RDWR)  # as the kernel does where a process is killed
            await until(lambda: made.number("request_success_total") == 1)
            assert await other == (FOX * 2)[:60] and not made.llm.engine.num_requests
            with pytest.raises(FailedError, match=ENGINE_GONE):
                async for _ in mine:
                    pass

    asyncio.run(check())


def test_an_engine_that_is_gone_fails_all_that_is_asked_of_it():
    async def check() -> None:
        async with users(step_seconds=0.01) as made:
            engine = made.engines[0]
            stream = await engine.open([Ask([1], SamplingParams(max_tokens=10_000))])
            for end in made.ends:
                end.shutdown(socket.SHUT_RDWR)
            with pytest.raises(FailedError, match=ENGINE_GONE):
                async for _ in stream:
                    pass
            await until(lambda: sorted(made.lost) == [0, 1])
            with pytest.raises(UnavailableError, match=ENGINE_GONE):
                await engine.ask("metrics")
            with pytest.raises(UnavailableError, match=ENGINE_GONE):
                await answer(engine, "late")

    asyncio.run(check())


def test_a_broken_engine_is_told_to_all(monkeypatch):
    async def check() -> None:
        async with users() as made:
            monkeypatch.setattr(made.llm.engine, "step", lambda: 1 / 0)
            for _ in range(3):
                with pytest.raises(FailedError, match="ZeroDivisionError"):
                    await answer(made.engines[0], "x")
            await until(lambda: bool(made.engines[1].stats.broken))
            with pytest.raises(UnavailableError, match="3 steps in a row failed"):
                await answer(made.engines[1], "x")

    asyncio.run(check())


def test_what_the_hub_cannot_answer_fails_alone(monkeypatch):
    async def check() -> None:
        async with users() as made:
            monkeypatch.setattr(made.hub.metrics, "render", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await made.engines[0].ask("metrics")
            assert await made.engines[0].ask("num_requests") == 0 and not made.lost

    asyncio.run(check())


def test_what_cannot_be_pickled_fails_alone(monkeypatch):
    async def check() -> None:
        async with users() as made:
            take, engine = made.hub.metrics.take, made.engines[0]

            def spoil(report: Report) -> None:
                take(report)
                for event in report.events:
                    if isinstance(event, Delta) and event.request_id.startswith("bad"):
                        event.stop_reason = lambda: 0  # type: ignore[assignment]

            monkeypatch.setattr(made.hub.metrics, "take", spoil)
            good = asyncio.create_task(answer(engine, "good", 40))
            with pytest.raises(FailedError, match="cannot be pickled"):
                await answer(engine, "bad", 10_000)
            await until(lambda: made.number('request_success_total{finished_reason="abort"') == 1)
            trace: Any = {"x": lambda: 0}
            with pytest.raises(FailedError, match="cannot be pickled"):
                await engine.open([Ask([1], SamplingParams(), trace=trace)])
            assert await good == FOX[:40] and not made.lost and not made.llm.engine.num_requests
            assert engine.num_requests == await engine.ask("num_requests") == 0

    asyncio.run(check())


def test_a_message_that_is_cut_off_ends_its_pipe(monkeypatch):
    ours, theirs = socket.socketpair()
    lost, raised, taken = threading.Event(), list[object](), list[object]()
    monkeypatch.setattr(threading, "excepthook", raised.append)
    Pipe(ours, taken.append, lost.set, lambda message, why: None).start()
    theirs.sendall(framed("whole") + framed("cut off")[:-1])
    theirs.close()
    assert lost.wait(30) and taken == ["whole"] and not raised


@pytest.mark.parametrize("error", [QueueFullError("full", 7), FailedError("x"), UnavailableError("y")])
def test_errors_cross_a_pipe(error: RequestError):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)

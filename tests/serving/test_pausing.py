"""`/pause` by its modes, `/is_paused`, `/is_sleeping`, `/server_info`, `/load`."""

import asyncio
import threading

import pytest

from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.messages import DeadlineError
from tests.alphabet_model import after
from tests.serving.asking import ask, long, pages_back, run, text_of
from tests.serving.calls import ok, refusal
from tests.serving.http_server import serving, slow_down

KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def guarded(shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    with serving(shared_llm, options={"api_keys": ("k",), "enable_control": True, "root": "the/folder"}) as server:
        server.client.headers.update(KEY)
        yield server
        server.wait_idle()


class Asked(threading.Thread):
    """A long completion that is under way."""

    def __init__(self, server, max_tokens=150):
        super().__init__()
        self.server, self.max_tokens, self.answer = server, max_tokens, None
        self.start()
        while server.client.get("/load").json()["server_load"] == 0:
            pass

    def run(self):
        body = {"prompt": "a", "temperature": 0, "max_tokens": self.max_tokens, "ignore_eos": True}
        self.answer = ok(self.server.client.post("/v1/completions", json=body))["choices"][0]

    def choice(self):
        self.join(60)
        assert self.answer is not None
        return self.answer


def test_abort(guarded):
    post = guarded.client.post
    asked = Asked(guarded)
    assert ok(post("/pause")) == {"status": "paused", "reset": True}
    choice = asked.choice()
    assert choice["finish_reason"] == "abort" and len(choice["text"]) < 150
    assert ok(guarded.client.get("/is_paused")) == {"is_paused": True}
    assert ok(post("/sleep")) == {"status": "sleeping", "level": 1}
    assert ok(guarded.client.get("/is_sleeping")) == {"is_sleeping": True}
    assert ok(post("/wake_up?tags=weights&tags=kv_cache")) == {"status": "awake", "tags": ["weights", "kv_cache"]}
    assert ok(post("/wake_up")) == {"status": "awake", "tags": None}
    assert refusal(post("/wake_up?tags=pages"))["param"] == "query.tags"
    ok(post("/sleep"))
    assert ok(post("/wake_up?tags=weights")) == {"status": "sleeping", "tags": ["weights"]}
    assert ok(guarded.client.get("/is_sleeping")) == {"is_sleeping": True}
    assert ok(post("/wake_up?tags=kv_cache")) == {"status": "awake", "tags": ["kv_cache"]}
    assert ok(guarded.client.get("/is_sleeping")) == {"is_sleeping": False}
    assert ok(post("/resume")) == {"status": "resumed"}
    assert ok(guarded.client.get("/is_paused")) == {"is_paused": False}


def test_keep(guarded):
    asked = Asked(guarded, max_tokens=30)
    assert ok(guarded.client.post("/pause?mode=keep")) == {"status": "paused"}
    assert asked.answer is None
    assert "resume first" in refusal(guarded.client.post("/pause?mode=wait"), 409)["message"]
    ok(guarded.client.post("/resume"))
    assert asked.choice()["text"] == after("a", 30)


def test_wait(guarded):
    asked = Asked(guarded, max_tokens=30)
    assert ok(guarded.client.post("/pause?mode=wait&clear_cache=false")) == {"status": "paused"}
    assert asked.choice()["text"] == after("a", 30)
    ok(guarded.client.post("/resume"))


def test_sleep_may_end_what_runs(guarded):
    asked = Asked(guarded)
    assert "unfinished" in refusal(guarded.client.post("/sleep"), 409)["message"]
    ok(guarded.client.post("/sleep?mode=abort&level=1"))
    assert asked.choice()["finish_reason"] == "abort"
    assert ok(guarded.client.get("/is_sleeping")) == {"is_sleeping": True}
    ok(guarded.client.post("/wake_up"))


def test_other_dialects_say_that_they_were_aborted(guarded):
    chat = {"model": "alphabet", "max_tokens": 150, "temperature": 0}
    found = {}

    def message():
        said = [{"role": "user", "content": "a"}]
        found["message"] = guarded.client.post("/v1/messages", json=chat | {"messages": said}).json()

    thread = threading.Thread(target=message)
    thread.start()
    body = {"input": "a", "temperature": 0, "max_output_tokens": 150, "background": True}
    begun = ok(guarded.client.post("/v1/responses", json=body))
    while guarded.client.get("/load").json()["server_load"] < 2:
        pass
    ok(guarded.client.post("/pause"))
    thread.join(60)
    assert found["message"]["stop_reason"] == "pause_turn"
    while (ended := ok(guarded.client.get(f"/v1/responses/{begun['id']}")))["status"] == "in_progress":
        pass
    assert ended["status"] == "cancelled"
    ok(guarded.client.post("/resume"))


def test_modes_are_checked(guarded):
    assert "'abort', 'wait' or 'keep', not 'x'" in refusal(guarded.client.post("/pause?mode=x"))["message"]


def test_server_info(guarded):
    info = ok(guarded.client.get("/server_info?config_format=json"))
    assert info["jaxserve_config"]["cache"]["page_size"] == 4 and "jax" in info["system_env"]
    assert "'page_size': 4" in ok(guarded.client.get("/server_info"))["jaxserve_config"]


def test_models(guarded):
    (card,) = ok(guarded.client.get("/v1/models"))["data"]
    assert card["root"] == "the/folder" and card["max_model_len"] == 256 and card["permission"][0]["allow_sampling"]
    assert ok(guarded.client.get("/v1/models/alphabet")) == card
    assert refusal(guarded.client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"
    for method in ("GET", "POST"):
        assert ok(guarded.client.request(method, "/ping", headers={"Authorization": ""}))["status"] == "ok"


# ---- from asyncio


def test_who_comes_while_a_pause_waits_comes_after_it(llm, monkeypatch):
    slow_down(monkeypatch, llm)

    async def main():
        async with AsyncLLM(llm) as engine:
            async with await engine.open([ask("a", max_tokens=20)]) as stream:
                await anext(stream)
                pause = asyncio.create_task(engine.pause("wait"))
                await asyncio.sleep(0)
                late = asyncio.create_task(text_of(engine, ask("x", max_tokens=2)))
                with pytest.raises(DeadlineError):
                    await engine.open([ask("y")], timeout=0.05)
                assert engine.is_paused and not pause.done()
                assert len([delta async for delta in stream]) == 19
            await pause
            steps = engine.stats.num_steps
            await asyncio.sleep(0.05)
            assert engine.stats.is_paused and engine.stats.num_steps == steps and not late.done()
            await engine.resume()
            assert await late == after("x", 2)

    run(main())


def test_a_pause_that_waits_ends_with_resume(llm, monkeypatch):
    slow_down(monkeypatch, llm)

    async def main():
        async with AsyncLLM(llm) as engine:
            async with await engine.open([long()]) as stream:
                await anext(stream)
                pause = asyncio.create_task(engine.pause("wait"))
                await asyncio.sleep(0.02)
                await engine.resume()
                with pytest.raises(RuntimeError, match="resumed before"):
                    await pause
                assert not engine.is_paused and not stream.finished
            with pytest.raises(ValueError, match="mode='now' must be one of abort, wait, keep"):
                await engine.pause("now")
            await pages_back(engine)

    run(main())


def test_abort_ends_each_sample_with_what_it_has(llm, monkeypatch):
    slow_down(monkeypatch, llm)

    async def main():
        async with AsyncLLM(llm) as engine:
            stream = await engine.open([ask("a", max_tokens=150, n=2), ask("x", max_tokens=150)])
            seen = [await anext(stream) for _ in range(6)]
            await engine.pause("abort")
            seen += [delta async for delta in stream]
            ends = [delta for delta in seen if delta.finish_reason]
            assert [delta.finish_reason for delta in ends] == ["abort"] * 3 and sum(delta.last for delta in ends) == 2
            assert engine.stats.num_free_pages == engine.stats.num_pages and not llm.engine.has_unfinished_requests()
            await engine.resume()
            assert await text_of(engine, ask("a", max_tokens=2)) == "bc"

    run(main())

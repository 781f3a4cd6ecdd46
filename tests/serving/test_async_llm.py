"""`AsyncLLM` on the model whose greedy output can be written down: streams, refusals, cancellation, faults, shutting down."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from jaxserve import LLM, BucketPlan, SamplingParams
from jaxserve.models import named_leaves
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.messages import Call, DeadlineError, Delta, FailedError, QueueFullError, Report, UnavailableError
from jaxserve.serving.reading import SHORT
from jaxserve.serving.streams import Ask
from jaxserve.structured.grammars import GrammarCompiler
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.alphabet_model import after, ids
from tests.serving.http_server import slow_down, steps_until_pages_are_back


def ask(prompt: str = "a", **params: Any) -> Ask:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 8} | params
    return Ask(ids(prompt), SamplingParams(**given), prompt)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded():
        return await asyncio.wait_for(main, 60)

    return asyncio.run(bounded())


async def text_of(engine: AsyncLLM, given: Ask) -> str:
    async with await engine.open([given]) as stream:
        return "".join([delta.text async for delta in stream])


async def pages_back(engine: AsyncLLM) -> None:
    while engine.stats.num_free_pages != engine.stats.num_pages or engine.num_requests:
        await asyncio.sleep(0.001)
        await engine.reset_prefix_cache()  # any call brings a report


def long() -> Ask:
    return ask("a", max_tokens=200, ignore_eos=True)


def test_generate_yields_growing_outputs(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            seen = []
            async for output in engine.generate("tea", SamplingParams(temperature=0, max_tokens=6, logprobs=1)):
                seen.append((output.outputs[0].text, output.finished))
            assert [text for text, _ in seen] == ["bcdefg"[:i] for i in range(1, 7)]
            assert [finished for _, finished in seen] == [False] * 5 + [True]
            return output

    output = run(main())
    (expected,) = llm.generate("tea", SamplingParams(temperature=0, max_tokens=6, logprobs=1), use_tqdm=False)
    assert output.outputs[0] == expected.outputs[0]
    assert output.prompt == "tea" and output.prompt_token_ids == ids("tea") and output.metrics is not None


def test_64_streams_lose_nothing(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            asks = [ask("abcdefgh"[i % 8], max_tokens=3 + i % 9) for i in range(64)]
            return asks, await asyncio.gather(*(text_of(engine, a) for a in asks))

    asks, texts = run(main())
    assert texts == [after(str(a.prompt), a.params.max_tokens) for a in asks]


def test_one_wake_up_a_step_for_the_whole_batch(llm):
    reports: list[Report] = []

    async def main():
        async with AsyncLLM(llm, listener=reports.append) as engine:
            async with await engine.open([ask(c) for c in "abcd"]) as stream:
                return [delta async for delta in stream]

    deltas = run(main())
    assert len(deltas) == 4 * 8
    with_deltas = [r for r in reports if any(isinstance(e, Delta) for e in r.events)]
    assert len(with_deltas) == 8, "four requests of eight tokens, in step with each other"


def test_samples_and_prompts_of_one_call_share_a_stream(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            texts: dict[tuple[str, int], str] = {}
            async with await engine.open([ask("a", n=2), ask("x", max_tokens=2, n=2)], "r") as stream:
                async for d in stream:
                    texts[d.request_id, d.index] = texts.get((d.request_id, d.index), "") + d.text
                assert stream.finished
            return [texts[name, i] for name in stream.request_ids for i in (0, 1)]

    assert run(main()) == [after("a", 8)] * 2 + [after("x", 2)] * 2


def test_stop_strings_never_show(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            async with await engine.open([ask("a", stop="ef", max_tokens=20)]) as stream:
                return [d async for d in stream]

    deltas = run(main())
    assert "".join(d.text for d in deltas) == "bcd"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason, deltas[-1].last) == ("stop", "ef", True)


def test_a_refused_prompt_is_an_error_and_stops_no_other(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            other = asyncio.create_task(text_of(engine, ask("a")))
            for bad, said in ((ask(""), "empty prompt"), (ask("a" * 300), "300 tokens"), (Ask([9999], SamplingParams()), "9999")):
                with pytest.raises(ValueError, match=said):
                    await engine.open([ask("b"), bad])
            with pytest.raises(ValueError, match="no prompt was given"):
                await engine.open([])
            assert await other == after("a", 8)
            await pages_back(engine)

    run(main())


def test_a_priority_that_is_none_is_refused_and_stops_no_other(folder):
    plan = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))
    llm = LLM(folder, bucket_plan=plan, num_pages=96, page_size=4, compilation_cache_dir="", scheduling_policy="priority")

    async def main():
        async with AsyncLLM(llm) as engine:
            async with await engine.open([ask("a", max_tokens=24)]) as stream:
                text = (await anext(stream)).text
                await engine.pause()
                for bad in ("high", None, 0.5, True):
                    with pytest.raises(ValueError, match=f"priority={bad!r} must be an integer"):
                        await engine.open([replace(ask("b"), priority=bad)])
                await engine.resume()
                text += "".join([delta.text async for delta in stream])
            assert text == after("a", 24)
            assert await text_of(engine, replace(ask("p"), priority=-1)) == after("p", 8)
            await pages_back(engine)

    run(main())


def test_requests_of_one_name_are_not_mixed_up(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            async with await engine.open([long()], "mine"), await engine.open([ask("x", max_tokens=2)], "mine") as other:
                assert "".join([d.text async for d in other]) == after("x", 2)
            for c in "abcdefgh":  # nor with what an aborted one of that name still sends
                async with await engine.open([ask(c)], "mine") as again:
                    assert "".join([d.text async for d in again]) == after(c, 8)
                async with await engine.open([long()], "mine"):
                    pass

    run(main())


def test_leaving_early_gives_pages_back_within_two_steps(llm, monkeypatch):
    steps = steps_until_pages_are_back(monkeypatch, llm)

    async def main():
        async with AsyncLLM(llm) as engine:
            async with await engine.open([long()]) as stream:
                await anext(stream)
            await pages_back(engine)
            assert len(steps) == 1 and steps[0] <= 2
            assert engine.num_requests == 0 and engine._streams.num_samples == 0

    run(main())


def test_cancelling_a_task_aborts_its_request(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            task = asyncio.create_task(text_of(engine, long()))
            while not engine.stats.num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await pages_back(engine)
            assert engine.stats.generated_tokens < 10_000

    run(main())


def test_the_queue_is_bounded(llm):
    async def main():
        async with AsyncLLM(llm, max_waiting=2) as engine:  # 4 run
            await engine.pause()
            streams = [await engine.open([ask(c)]) for c in "abcd"] + [await engine.open([ask("e", n=2)])]
            with pytest.raises(QueueFullError, match="6 samples are running or waiting, of at most 6") as refused:
                await engine.open([ask()])
            assert 1 <= refused.value.retry_after <= 60
            with pytest.raises(ValueError, match="7 samples in one call can't be held; the most is 6"):
                await engine.open([ask(n=7)])
            streams.pop().close()
            streams += [await engine.open([ask("f", n=2)])]
            await engine.resume()
            for c, stream in zip("abcdf", streams, strict=True):
                assert "".join([d.text async for d in stream if d.index == 0]) == after(c, 8)
            assert engine._streams.num_samples == 0

    run(main())


def test_a_deadline_ends_the_request(llm):
    async def main():
        async with AsyncLLM(llm, request_timeout=0.2) as engine:
            assert await text_of(engine, ask("a")) == after("a", 8)
            await engine.pause()  # so that it can't end in time
            async with await engine.open([long()]) as stream:
                with pytest.raises(DeadlineError, match="longer than 0.2 s"):
                    await anext(stream)
            await engine.resume()
            await pages_back(engine)

    run(main())


def test_a_deadline_of_ones_own(llm):
    """Within the engine's, from the arrival on."""

    async def main():
        async with AsyncLLM(llm, request_timeout=0.2) as engine:
            await engine.pause()
            for timeout, ends in ((0.05, 0.05), (9, 0.2)):
                with pytest.raises(DeadlineError, match=f"longer than {ends} s"):
                    async for _ in engine.generate("a", timeout=timeout):
                        pass
            with pytest.raises(DeadlineError, match="longer than 0.1 s"):
                await engine.open([ask()], timeout=0.1, arrival=time.monotonic() - 0.1)
            with pytest.raises(ValueError, match="timeout=0 must be a number of seconds > 0"):
                await engine.open([ask()], timeout=0)
            await engine.resume()
            await pages_back(engine)
            assert engine._streams.num_samples == 0

    run(main())


def test_paused_nothing_runs_and_nothing_is_lost(llm):
    async def main():
        async with AsyncLLM(llm) as engine:
            async with await engine.open([ask("a", max_tokens=20)]) as stream:
                first = await anext(stream)
                await engine.pause()
                steps = engine.stats.num_steps
                late = asyncio.create_task(text_of(engine, ask("x", max_tokens=2)))
                await asyncio.sleep(0.05)
                await engine.pause()  # any call brings a report
                assert engine.stats.num_steps == steps and engine.stats.is_paused
                await engine.resume()
                assert first.text + "".join([d.text async for d in stream]) == after("a", 20)
            assert await late == after("x", 2)

    run(main())


def test_weights_are_read_beside_the_steps(llm, folder, monkeypatch):
    """And only their path crosses to the engine's side."""
    from jaxserve.models import loading as model_loader

    load, read = model_loader.load_model, []

    def while_it_steps(*args, **kwargs):
        wanted, deadline = llm.engine.stats.num_steps + 3, time.monotonic() + 60
        while llm.engine.stats.num_steps < wanted:
            assert time.monotonic() < deadline, "the engine stands still"
            time.sleep(0.001)
        read.append(load(*args, **kwargs))
        return read[0]

    async def main():
        async with AsyncLLM(llm) as engine:
            send, sent = engine._engine.send, []
            monkeypatch.setattr(engine._engine, "send", lambda command: (sent.append(command), send(command)))
            async with await engine.open([long()]) as stream:
                await anext(stream)
                with pytest.raises(FileNotFoundError):
                    await engine.update_weights_from_path("/nothing/there")
                monkeypatch.setattr(model_loader, "load_model", while_it_steps)
                await engine.update_weights_from_path(folder, in_flight="keep")
                assert not stream.finished
                held = llm.engine.runner.programs.functions.weights
                assert list(map(id, held)) == list(map(id, named_leaves(read[0].module).values())), "converted between two steps"
            calls = [command for command in sent if isinstance(command, Call)]
            assert [dict(c.arguments)["path"] for c in calls] == ["/nothing/there", str(folder)]
            await pages_back(engine)

    slow_down(monkeypatch, llm)
    run(main())


def test_one_checkpoint_is_read_at_a_time(llm, folder, monkeypatch):
    """And shutting down leaves no thread behind that reads one."""
    from jaxserve.models import loading as model_loader

    load, begun, go_on = model_loader.load_model, asyncio.Event(), threading.Event()

    async def main():
        loop = asyncio.get_running_loop()

        def held(*args, **kwargs):
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(120)
            return load(*args, **kwargs)

        monkeypatch.setattr(model_loader, "load_model", held)
        async with AsyncLLM(llm) as engine:
            first = asyncio.create_task(engine.update_weights_from_path(folder))
            await begun.wait()
            with pytest.raises(RuntimeError, match="other weights are being loaded"):
                await engine.update_weights_from_path("/another")
            go_on.set()
            await first
            await engine.update_weights_from_path(folder)
            go_on.clear()
            begun.clear()
            last = asyncio.create_task(engine.update_weights_from_path(folder))
            await begun.wait()
            loader = engine._engine._loading
            assert loader is not None and loader.is_alive()
            loop.call_later(0.1, go_on.set)
        assert not loader.is_alive()
        with pytest.raises(UnavailableError, match="shutting down"):
            await last

    run(main())


# ---- faults


class Broken:
    """Makes `owner.name` raise on the calls that `when` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when=lambda *args: True):
        self.on, real = True, getattr(owner, name)

        def call(*args, **kwargs):
            if self.on and when(*args):
                raise RuntimeError("broken on purpose")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


def test_a_step_that_raises_fails_what_runs_and_serves_on(llm, monkeypatch):
    async def main():
        async with AsyncLLM(llm) as engine:
            streams = [await engine.open([long()]) for _ in range(3)]
            await anext(streams[0])
            fault = Broken(monkeypatch, llm.engine.runner, "fetch")
            for stream in streams:
                with pytest.raises(FailedError, match="a step of the engine failed.*broken on purpose"):
                    async for _ in stream:
                        pass
            fault.on = False
            engine.check_health()
            assert await text_of(engine, ask("a")) == after("a", 8)
            assert engine.stats.num_failures == 1
            await pages_back(engine)

    run(main())


def test_repeated_failures_end_in_refusals_not_in_a_loop(llm, monkeypatch):
    async def main():
        async with AsyncLLM(llm, max_failures=2) as engine:
            fault = Broken(monkeypatch, llm.engine.runner, "fetch")
            with pytest.raises(FailedError):
                await text_of(engine, ask())
            fault.on = False
            assert await text_of(engine, ask("a")) == after("a", 8)  # a success in between: the count begins anew
            fault.on = True
            for _ in range(2):
                engine.check_health()
                with pytest.raises(FailedError):
                    await text_of(engine, ask())
            with pytest.raises(UnavailableError, match="2 steps in a row failed"):
                await text_of(engine, ask())
            with pytest.raises(UnavailableError, match="2 steps in a row failed"):
                engine.check_health()

    run(main())


def test_text_that_cannot_be_made_fails_its_own_request_only(llm, monkeypatch):
    async def main():
        async with AsyncLLM(llm) as engine:
            Broken(monkeypatch, IncrementalDetokenizer, "step", when=lambda _, token: token == ord("f"))
            good = asyncio.create_task(text_of(engine, ask("m")))
            with pytest.raises(FailedError, match="could not be processed.*broken on purpose"):
                await text_of(engine, ask("a"))
            assert await good == after("m", 8)
            await pages_back(engine)

    run(main())


def test_a_bug_in_the_loop_leaves_nobody_waiting(llm, monkeypatch):
    async def main():
        async with AsyncLLM(llm) as engine:
            stream = await engine.open([long()])
            await anext(stream)
            Broken(monkeypatch, engine._engine, "_can_step")
            with pytest.raises(FailedError, match="the engine's thread ended"):
                async for _ in stream:
                    pass
            with pytest.raises(UnavailableError):
                await text_of(engine, ask())

    run(main())


# ---- shutting down


def test_shutdown_lets_what_runs_finish(llm):
    async def main():
        engine = AsyncLLM(llm)
        stream = await engine.open([ask("a", max_tokens=20)])
        ending = asyncio.create_task(engine.shutdown())
        text = "".join([d.text async for d in stream])
        await ending
        with pytest.raises(UnavailableError, match="shutting down"):
            await engine.open([ask()])
        return text

    assert run(main()) == after("a", 20)


def test_shutdown_after_its_grace_ends_what_still_runs(llm):
    async def main():
        engine = AsyncLLM(llm)
        await engine.pause()
        stream = await engine.open([long()])
        started = time.monotonic()
        await engine.shutdown(0.1)
        assert time.monotonic() - started >= 0.1
        with pytest.raises(UnavailableError, match="shutting down"):
            await anext(stream)

    run(main())


def test_shutdown_ends_what_waits_to_be_read(llm, monkeypatch):
    encode, begun, go_on = Tokenizer.encode, [], threading.Event()

    def held(tokenizer, text, *args):
        begun.append(text)
        assert go_on.wait(120)
        return encode(tokenizer, text, *args)

    async def texts(engine: AsyncLLM) -> list[str]:
        return [output.outputs[0].text async for output in engine.generate("a" * (SHORT + 1))]

    async def main():
        engine = AsyncLLM(llm)
        engine._max_characters = None  # or else it is refused at once
        tasks = [asyncio.create_task(texts(engine)) for _ in range(4)]
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        tasks.pop().cancel()  # its own end is no shutdown
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        await engine.shutdown(0)
        assert len(begun) == 2, "the third waited"
        for ended in [
            *await asyncio.gather(*tasks, return_exceptions=True),
            *await asyncio.gather(texts(engine), return_exceptions=True),
        ]:
            assert isinstance(ended, UnavailableError) and "shutting down" in str(ended)
        with pytest.raises(UnavailableError, match="shutting down"):
            await engine.aside(SHORT + 1, lambda: None)
        assert engine._streams.num_samples == 0

    monkeypatch.setattr(Tokenizer, "encode", held)
    run(main())


def test_arguments_are_checked(llm):
    with pytest.raises(ValueError, match="request_timeout=0 must be a number of seconds > 0"):
        AsyncLLM(llm, request_timeout=0)
    with pytest.raises(ValueError, match="max_waiting=-1 must be at least 0"):
        AsyncLLM(llm, max_waiting=-1)


async def form_of(engine: AsyncLLM, regex: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": regex})
    return [output async for output in engine.generate("a", params)][-1].outputs[0].text


def test_the_vocabulary_is_read_before_anything_is_served(llm, monkeypatch):
    """Once, for an LLM and whoever serves it: no step waits while the first form has it read."""
    fresh = GrammarCompiler(llm.tokenizer, llm.engine.config.model.vocab_size, llm.engine.eos_token_ids)
    monkeypatch.setattr(llm, "grammars", fresh)
    reads, read = [], GrammarCompiler._read_vocabulary
    monkeypatch.setattr(GrammarCompiler, "_read_vocabulary", lambda compiler: (reads.append(compiler), read(compiler))[1])
    engines = [AsyncLLM(llm), AsyncLLM(llm)]
    assert reads == [fresh]
    for engine in engines:
        vocabulary = engine._engine._grammars._vocabulary
        assert vocabulary is not None and vocabulary.done() and vocabulary.exception() is None

    async def main():
        async with engines[0] as engine:
            assert await form_of(engine, "xy[zt]z") == "xyzz"

    run(main())
    assert reads == [fresh]


def test_a_tokenizer_that_has_no_forms_is_served(llm, monkeypatch, caplog):
    def broken(_):
        raise ValueError("broken on purpose")

    fresh = GrammarCompiler(llm.tokenizer, llm.engine.config.model.vocab_size, llm.engine.eos_token_ids)
    monkeypatch.setattr(llm, "grammars", fresh)
    monkeypatch.setattr(GrammarCompiler, "_read_vocabulary", broken)

    async def main():
        async with AsyncLLM(llm) as engine:
            assert "broken on purpose" in caplog.text
            assert await text_of(engine, ask("a", max_tokens=3)) == after("a", 3)
            with pytest.raises(FailedError, match="broken on purpose"):
                await form_of(engine, "x")

    run(main())

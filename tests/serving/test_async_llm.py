"""`AsyncLLM` on the model whose greedy output can be written down: streams, refusals, cancellation, forms."""

import asyncio
from dataclasses import replace

import pytest

from jaxserve import LLM, BucketPlan, SamplingParams
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.engine_loop import EngineLoop
from jaxserve.serving.messages import Accepted, Delta, Failed, FailedError, Report
from jaxserve.serving.streams import Ask, RequestStream
from jaxserve.structured.grammars import GrammarCompiler
from tests.alphabet_model import after, ids
from tests.serving.asking import ask, long, pages_back, run, text_of
from tests.serving.http_server import steps_until_pages_are_back


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
        assert isinstance(engine._engine, EngineLoop)
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


def test_an_error_behind_tokens_is_none_of_the_acceptance():
    """A reader that looks late has what came, then the error; one whose request was refused has the error at once."""

    async def main():
        delta = Delta("r", 0, "b", [1])
        for events, seen in (
            ([Accepted("r"), delta, Failed("r", FailedError("broken"))], [delta]),
            ([Failed("r", FailedError("broken"))], None),
        ):
            stream = RequestStream({"r": ask()}, 0.0, None, lambda *_: None)
            for event in events:
                stream.take(event)
            found = None
            with pytest.raises(FailedError, match="broken"):
                await stream.accepted()
                found = []
                async for each in stream:
                    found.append(each)
            assert found == seen

    run(main())

"""Two engines and a folder: what one has stored of a prompt, the other loads as it is told, and computes what does not come."""

import random
import time
from pathlib import Path

import pytest

from jaxserve import Engine, SamplingParams
from jaxserve.kv_store.disk import DiskTier
from jaxserve.kv_store.store import TieredStore
from jaxserve.request import Request, StoredPrefix
from tests.dummy import Ask, add, assert_empty, differences, poison, serve
from tests.engine.store_faults import Flaky
from tests.engine.storing import NAME, asks, counts, engine_with, expected, prompt, run, stored
from tests.selection import exhaustive_unless

PAGES = 9  # that a prompt of 40 tokens loads: its last token is computed


@pytest.fixture
def two(tmp_path, closed):
    """A prefill and a decode engine on one folder. Neither looks for what the other writes."""
    engines = [engine_with(f"disk:{tmp_path}:16MiB", weights_id=NAME, pool_pages=100) for _ in range(2)]
    closed += engines
    for engine in engines:
        stored(engine).store._tiers[0].refresh = lambda: None
        stored(engine).keep_seconds = 60.0
    return engines


def prefill(engine: Engine, tokens: list[int], name: str = "p") -> Request:
    """A prompt, computed and stored. Its output must not come before that."""
    (request,) = engine.add_request(name, tokens, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    request.keeps_prompt = True
    outputs, deadline = [], time.monotonic() + 120
    while not outputs:
        assert time.monotonic() < deadline and engine.has_unfinished_requests()
        outputs = engine.step()
    assert outputs[0].finished and request.finished and not engine.has_unfinished_requests()
    return request


def decode(engine: Engine, ask: Ask, told: StoredPrefix | None) -> Request:
    """A request that is told of stored pages, once it has its answer, which must be that of an engine alone."""
    wanted = serve(engine_with(None), [ask]).answers["0"].tokens
    (request,) = add(engine, "d", ask)
    request.stored_prefix = told
    run(engine)
    assert request.output_token_ids == wanted
    assert_empty(engine)
    return request


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def test_what_is_told_of_is_loaded_and_nothing_else(two, tmp_path):
    first, second = two
    (ask,) = asks(0)
    told = prefill(first, ask.prompt).stored_prefix
    assert told is not None and told.num_pages == 10 and len(files(tmp_path)) == 10, "all of it is stored when the output comes"
    assert decode(second, ask, None).num_cached_tokens == 0, "it has not looked into the folder"
    second.reset_prefix_cache()
    num_computed = second.stats.prefill_tokens
    assert decode(second, ask, told).num_cached_tokens == 4 * PAGES
    assert second.stats.prefill_tokens - num_computed == 4 and counts(second).num_failed_loads == 0


def test_a_prompt_that_the_pool_has_and_the_folder_has_lost_is_stored_again(two, tmp_path):
    first, second = two
    (ask,) = asks(0)
    prefill(first, ask.prompt)
    for file in files(tmp_path):
        file.unlink()
    DiskTier.refresh(stored(first).store._tiers[0])
    told = prefill(first, ask.prompt, "again").stored_prefix
    assert told is not None and told.num_pages == 10 and first.pool.num_hit_tokens == 36
    assert decode(second, ask, told).num_cached_tokens == 4 * PAGES


@pytest.mark.parametrize("lost", [0, 4])
def test_lost_and_damaged_pages_are_computed(two, tmp_path, lost):
    first, second = two
    (ask,) = asks(0)
    request = prefill(first, ask.prompt)
    name = request.hash_chain[1 + lost].hex()
    (file,) = [file for file in files(tmp_path) if file.stem == name]
    if lost:
        file.unlink()
    else:
        blob = file.read_bytes()
        file.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    assert decode(second, ask, request.stored_prefix).num_cached_tokens == 4 * lost
    assert counts(second).num_failed_loads == 1


@pytest.mark.parametrize("kind", ["hash", "longer", "other tokens"])
def test_pages_of_another_name_are_not_loaded(two, caplog, kind):
    first, second = two
    (ask,) = asks(0)
    told = prefill(first, ask.prompt).stored_prefix
    assert told is not None
    if kind == "hash":
        told = StoredPrefix(told.num_pages, bytes(32))
    elif kind == "longer":
        told = StoredPrefix(11, told.last_hash)
    else:
        ask = asks(1)[0]
    assert decode(second, ask, told).num_cached_tokens == 0
    assert "have other names here" in caplog.text and counts(second).num_failed_loads == 1
    assert counts(second).tiers[0].pages_read == 0


def test_prompts_below_a_page_and_stores_that_nobody_shares_hand_over_nothing(two, closed):
    assert prefill(two[0], prompt(3)).stored_prefix is None
    alone = engine_with("host:4MiB", pool_pages=100)
    closed.append(alone)
    assert prefill(alone, prompt(40)).stored_prefix is None


def test_a_folder_that_takes_nothing_delays_nobody_and_is_told_of_as_it_is(two, monkeypatch):
    tier = stored(two[0]).store._tiers[0]
    write, taken = tier.write, []

    def full(hash_, page):
        taken.append(hash_)
        return False if len(taken) > 6 else write(hash_, page)

    monkeypatch.setattr(tier, "write", full)
    request = prefill(two[0], prompt(40))
    told = request.stored_prefix
    kept = [tier.contains(hash_) for hash_ in request.hash_chain[1:11]]
    assert told is None or told.num_pages == kept.index(False)
    assert decode(two[1], asks(0)[0], told).num_cached_tokens == (0 if told is None else 4 * told.num_pages)


def test_a_store_that_hangs_is_waited_for_no_longer_than_allowed(two):
    first, _ = two
    stored(first).store.save = lambda hashes, kv: object()  # saves that never end
    stored(first).keep_seconds = 0.05
    assert prefill(first, prompt(40)).stored_prefix is None


def test_an_abort_while_the_prompt_is_stored_leaves_nothing(two):
    first, _ = two
    save, stored(first).store.save = stored(first).store.save, lambda hashes, kv: object()
    (request,) = first.add_request("p", prompt(40), SamplingParams(max_tokens=1, ignore_eos=True))
    request.keeps_prompt = True
    for _ in range(10):
        assert first.step() == []
    assert request.finished and first.has_unfinished_requests() and stored(first).is_keeping
    first.abort("p")
    first.step()
    assert not first.has_unfinished_requests() and not stored(first).is_keeping
    stored(first).store.save = save
    stored(first)._saves.clear()
    assert_empty(first)


def test_many_prompts_at_once(two):
    """Prefilled together, some sharing prefixes; decoded together on the other engine, as an engine alone answers."""
    first, second = two
    wanted = [*asks(*range(6)), *asks(0, 1, n=23), *asks(2, n=44)]
    told = []
    for i, ask in enumerate(wanted):
        (request,) = first.add_request(f"p{i}", ask.prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        request.keeps_prompt = True
        told.append(request)
    run(first)
    requests = [add(second, str(i), ask)[0] for i, ask in enumerate(wanted)]
    for request, other in zip(requests, told, strict=True):
        assert other.stored_prefix is not None and other.stored_prefix.num_pages == len(other.prompt_token_ids) // 4
        request.stored_prefix = other.stored_prefix
    run(second)
    right = expected(wanted)
    assert [request.output_token_ids for request in requests] == [right[str(i)].tokens for i in range(len(wanted))]
    assert all(request.num_cached_tokens == (len(request.prompt_token_ids) - 1) // 4 * 4 for request in requests)
    assert differences(serve(second, wanted[:1]).answers, {"0": right["0"]}) == []


def fuzz(closed, folder: Path, num_requests: int, seed: int) -> tuple[Engine, Engine]:
    """Prompts that come back at random go from a prefill to a decode engine, over folders that fail at random. Some are aborted on
    either side, some are told of pages that nobody has."""
    rng, engines = random.Random(seed), []
    for number in range(2):
        engine = engine_with(f"disk:{folder}:16MiB", weights_id=NAME, pool_pages=40)
        pages = stored(engine)
        pages.store.close()
        pages.store = TieredStore([Flaky(DiskTier(pages._layout, folder, 64 << 10), 2 * seed + number)])
        pages.load_seconds = pages.keep_seconds = 0.05
        closed.append(engine)
        engines.append(engine)
    first, second = engines
    plain = engine_with(None, pool_pages=100)
    texts = [prompt(rng.randrange(3, 60), i) for i in range(12)]
    wanted, given, kept, answers = {}, {}, {}, {}
    while len(given) < num_requests or first.has_unfinished_requests() or second.has_unfinished_requests():
        for _ in range(rng.randrange(3)) if len(given) < num_requests else ():
            name, text = str(len(given)), rng.choice(texts)
            text = text[: rng.randrange(1, 1 + len(text))]
            given[name] = Ask(text, SamplingParams(max_tokens=rng.randrange(1, 12), seed=3, temperature=1.0, ignore_eos=True))
            (request,) = first.add_request(name, text, SamplingParams(max_tokens=1, ignore_eos=True))
            request.keeps_prompt = True
        for output in first.step():
            name, told = output.request.request_id, output.request.stored_prefix
            if told is not None and rng.random() < 0.1:
                told = StoredPrefix(told.num_pages, rng.randbytes(32))
            add(second, name, given[name])[0].stored_prefix = told
            answers[name], kept[name] = [], rng.random() > 0.1
        for output in second.step():
            answers[output.request.request_id] += output.new_token_ids
        if given and rng.random() < 0.05:
            first.abort(rng.choice(list(given)))  # it may have ended, or be stored just now
        for name in [name for name, keep in kept.items() if not keep and rng.random() < 0.2]:
            second.abort(name)
            del kept[name]
        for engine in engines:
            engine.scheduler.check_invariants()
            poison(engine)
    for engine in engines:
        assert_empty(engine)
    names = [name for name, keep in kept.items() if keep]
    for name in names:
        plain.add_request(name, given[name].prompt, given[name].params)
        wanted[name] = []
    while plain.has_unfinished_requests():
        for output in plain.step():
            wanted[output.request.request_id] += output.new_token_ids
    assert {name: answers[name] for name in names} == wanted and len(names) > num_requests / 2
    assert counts(second).num_hit_tokens and counts(second).num_failed_loads
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("seed", exhaustive_unless(lambda seed: seed == 0, range(4)))
def test_thousands_of_prompts_and_a_folder_that_fails_at_random(closed, tmp_path, seed):
    fuzz(closed, tmp_path, 1000, 10 + seed)

"""Random requests to an engine with each store, which fails at random: tokens are those of no store, and all pages are back.

STORE_REQUESTS says how many requests each store gets; with -s what happened is printed.
"""

import os
import random
import time
from collections import Counter
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.kv_store import disk, peers
from jaxserve.kv_store.disk import DiskTier
from jaxserve.kv_store.host import HostTier
from jaxserve.kv_store.store import TieredStore
from jaxserve.request import StoredPrefix
from tests.dummy import Ask, assert_empty, poison
from tests.engine.store_faults import Flaky, FolderTrouble, MemoryTrouble, TroubledTransfer
from tests.engine.store_fuzz import Fuzz, converse
from tests.engine.storing import NAME, engine_with, run, stored
from tests.kv_store.memory_transfer import MemoryTransfer
from tests.kv_store.transfers import MAKE, skip_unless_installed

REQUESTS = int(os.environ.get("STORE_REQUESTS", 120))  # of each store
ROUND = 500  # requests, after which the engine is started anew
LATE = 0.02  # seconds after which a load is given up
PEERS = ("transfer fails", "bit", "slow", "damaged in memory", "all overwritten", "told wrongly")
TROUBLE = {
    "host": ("miss", "slow", "read raises", "write raises", "not written"),
    "disk": ("bit", "truncated", "empty", "another page", "another version", "gone", "full disk", "miss", "slow"),
    "memory": PEERS,
    "nixl": PEERS,
    "mooncake": PEERS,
}


def rounds(seed: int):
    """(requests, random numbers) of each round."""
    for start in range(0, REQUESTS, ROUND):
        yield min(ROUND, REQUESTS - start), random.Random(seed + start)


def with_tiers(engine: Any, make: Any) -> list[Any]:
    """Gives the engine a store of such tiers, which `make` makes for its layout."""
    pages = stored(engine)
    pages.store.close()
    tiers = make(pages._layout)
    pages.store, pages.load_seconds = TieredStore(tiers), LATE
    return tiers


def judge(kind: str, fuzz: Fuzz, began: float) -> None:
    """Each thing has gone wrong at least once where there was time for it, and no answer is another for it."""
    loads = f"{fuzz.num_hit_tokens} tokens loaded, {fuzz.num_failed_loads} loads failed, {fuzz.num_preemptions} preemptions"
    print(f"{kind}: {len(fuzz.asks)} requests, {time.monotonic() - began:.0f} s, {loads}, {dict(sorted(fuzz.done.items()))}")
    assert len(fuzz.asks) == REQUESTS and len(fuzz.answers) == REQUESTS - fuzz.done["abort"]
    assert fuzz.num_hit_tokens and fuzz.num_failed_loads and fuzz.done["abort"]
    assert REQUESTS < 1000 or fuzz.num_preemptions and all(fuzz.done[what] for what in (*TROUBLE[kind], "update")), fuzz.done
    assert fuzz.wrong() == []


@pytest.mark.slow
def test_memory_that_fails_at_random(closed):
    fuzz, began = Fuzz(), time.monotonic()
    for count, rng in rounds(1):
        engine = engine_with(pool_pages=24)
        closed.append(engine)
        (tier,) = with_tiers(engine, lambda layout, rng=rng: [Flaky(HostTier(layout, 100 << 10), rng.randrange(1 << 30))])
        converse(fuzz, engine, count, rng)
        fuzz.done += tier.done
    judge("host", fuzz, began)


@pytest.mark.slow
def test_a_folder_that_fails_at_random(closed, tmp_path, monkeypatch):
    """Under a tier of memory, small enough that most pages come from the folder."""
    fuzz, began = Fuzz(), time.monotonic()
    trouble = FolderTrouble(tmp_path, 2, disk)
    monkeypatch.setattr(disk, "_write", trouble.write)
    for count, rng in rounds(2):
        engine = engine_with(f"disk:{tmp_path}:400KiB", weights_id=NAME, pool_pages=24)
        closed.append(engine)
        tiers = with_tiers(
            engine,
            lambda layout, rng=rng: [
                Flaky(tier, rng.randrange(1 << 30)) for tier in (HostTier(layout, 20 << 10), DiskTier(layout, tmp_path, 400 << 10))
            ],
        )
        converse(fuzz, engine, count, rng, trouble)
        for tier in tiers:
            fuzz.done += tier.done
    fuzz.done += trouble.done
    judge("disk", fuzz, began)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", *MAKE])
def test_memory_of_another_engine_that_fails_at_random(closed, monkeypatch, kind):
    """By NIXL and by Mooncake where they are installed, and without either."""
    fuzz, began, network = Fuzz(), time.monotonic(), {}
    transfers: list[TroubledTransfer] = []
    make: Any = MAKE | {"memory": lambda name: MemoryTransfer(name, network)}
    if kind in MAKE:
        skip_unless_installed(kind)

    def troubled(name: str) -> TroubledTransfer:
        transfers.append(TroubledTransfer(make[kind](name), len(transfers)))
        return transfers[-1]

    monkeypatch.setattr(peers, "MooncakeTransfer" if kind == "mooncake" else "NixlTransfer", troubled)
    tier = "mooncake" if kind == "mooncake" else "nixl"
    monkeypatch.setattr(peers, "DOWN_SECONDS", 0.0)
    for count, rng in rounds(3):
        first = engine_with(f"{tier}:127.0.0.1:0:256KiB", weights_id=NAME, pool_pages=100)
        closed.append(first)
        (lends,) = stored(first).store._tiers
        second = engine_with(f"{tier}:127.0.0.1:0+127.0.0.1:{lends.port}:64KiB", weights_id=NAME, pool_pages=24)
        closed.append(second)
        stored(second).load_seconds = LATE
        trouble, told_wrongly = MemoryTrouble(lends, rng.randrange(1 << 30)), Counter()

        def tell(ask: Ask, first=first, rng=rng, told_wrongly=told_wrongly) -> StoredPrefix | None:
            """What a prefill engine says of the prompt that it has computed, which now and then is not true."""
            what = rng.random()
            if what > 0.5:
                return None
            (request,) = first.add_request("p", ask.prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
            request.keeps_prompt = True
            run(first)
            poison(first)
            told = request.stored_prefix
            if told is not None and what < 0.05:
                told_wrongly["told wrongly"] += 1
                return StoredPrefix(told.num_pages + rng.randrange(2), bytes(32) if rng.random() < 0.5 else told.last_hash)
            return told

        converse(fuzz, second, count, rng, trouble, tell)
        assert_empty(first)
        fuzz.done += trouble.done + told_wrongly
        for engine in (second, first):
            engine.close()
    for transfer in transfers:
        fuzz.done += transfer.done
    judge(kind, fuzz, began)

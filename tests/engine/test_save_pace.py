"""Which requests' pages are saved: all of them while that costs little or hits pay, else those of a share."""

import hashlib

import pytest

from jaxserve.engine import stored_pages
from jaxserve.engine.save_pace import ALLOWANCE, COST_SHARE, LEAST_SHARE, LIMIT, MAX_SKIPPED, SavePace
from jaxserve.execution.page_transfer import TRANSFER_PAGES
from tests.dummy import add, poison
from tests.engine.storing import HOST, asks, counts, engine_with, expected, run, settle, stored

HASHES = [hashlib.sha256(b"%d" % i).digest() for i in range(4000)]


def served_at(pace, cost, hashes=HASHES):
    """How many of these requests are saved, of which each takes a second, and saving it costs so much of one."""
    num_saved = 0
    for hash_ in hashes:
        pace.ran(1.0)
        if pace.chooses(hash_):
            num_saved += 1
            pace.saved(cost)
    return num_saved


@pytest.mark.parametrize("cost", [0.05, 0.1, 0.4])
def test_saving_costs_ever_less_where_nothing_is_hit(cost):
    """The cost c solves c' = COST_SHARE / (1 + c / ALLOWANCE), down to LEAST_SHARE, give or take what the account holds."""
    pace = SavePace(always=False)
    spent = [cost * served_at(pace, cost, HASHES[start : start + 400]) for start in range(0, 4000, 400)]
    assert pace.share < 1
    down = ALLOWANCE * (COST_SHARE / LEAST_SHARE - 1)
    seconds_down = (down + down**2 / (2 * ALLOWANCE)) / COST_SHARE
    total = down + LEAST_SHARE * (len(HASHES) - seconds_down)
    assert sum(spent) <= total + 2 * ALLOWANCE + cost
    assert sum(spent) > 0.8 * total, "it saves what it may"
    assert spent[0] > 1.8 * sum(spent[5:]) / 5


def test_the_least_share_of_the_steps_time_is_left():
    """However long nothing was hit: what costs no more is saved whole."""
    pace = SavePace(always=False)
    pace.saved(1e3)
    pace.ran(3 * ALLOWANCE / LEAST_SHARE)
    assert pace.share == 0, "more than that is owed"
    pace.ran(3 * ALLOWANCE / LEAST_SHARE)
    assert pace.share == 1, "a burst, however long, delays saving by a few times what may be saved at first"
    assert served_at(pace, 0.9 * LEAST_SHARE) == len(HASHES) and pace.share == 1
    assert served_at(pace, 3 * LEAST_SHARE) < len(HASHES)


def test_hits_bring_the_first_share_back():
    """A store that was of no use for long is tried like a new one, once what hits have paid is spent."""
    pace, cost = SavePace(always=False), 0.05
    num_first, num_later = (served_at(pace, cost, HASHES[:400]) for _ in range(2))
    assert num_later < 0.6 * num_first
    pace.hit(1e3)
    num_paid = round((LIMIT - ALLOWANCE) / cost)
    assert served_at(pace, cost, HASHES[-num_paid:]) == num_paid
    assert served_at(pace, cost, HASHES[:400]) == pytest.approx(num_first, abs=3)


@pytest.mark.parametrize("burst", [0.0, 0.5, 1e3])
def test_hits_pay_for_saving(burst):
    """One in ten requests is hit, and saves a second. A burst of saves before the first hit is forgotten soon."""
    pace = SavePace(always=False)
    pace.saved(burst)
    num_saved = 0
    for i in range(0, 1000, 10):
        pace.hit(1.0)
        num_saved += served_at(pace, 0.05, HASHES[i : i + 10])
    assert num_saved == 1000


def test_hits_pay_for_saving_that_comes_before_them():
    """The first ten requests spend more than may be spent before any hit; of all later ones all are saved."""
    pace = SavePace(always=False)
    num_saved = []
    for i in range(0, 1000, 10):
        num_saved.append(served_at(pace, 0.05, HASHES[i : i + 10]))
        pace.hit(1.0)
    assert num_saved[0] < 10 and num_saved[1:] == [10] * 99


def test_write_through_saves_everything():
    pace = SavePace(always=True)
    assert served_at(pace, 10.0) == len(HASHES) and pace.share == 1


def test_a_smaller_share_is_part_of_a_larger():
    one, other = SavePace(always=False), SavePace(always=False)
    for pace, cost in ((one, 1.2), (other, 1.6)):
        pace.saved(cost * ALLOWANCE)
    mine, theirs = ({hash_ for hash_ in HASHES if pace.chooses(hash_)} for pace in (one, other))
    assert theirs < mine
    assert len(mine) == pytest.approx(0.8 * len(HASHES), rel=0.05) and len(theirs) == pytest.approx(0.4 * len(HASHES), rel=0.1)


def test_what_was_skipped_is_remembered_once_and_within_bounds():
    pace = SavePace(always=False)
    pace.skip(HASHES[:3])
    assert pace.missed(iter(HASHES[:5])) == 3 and pace.missed(HASHES[:5]) == 0 and not pace.has_skipped
    for i in range(0, MAX_SKIPPED + 100, 100):
        pace.skip([b"%d" % j for j in range(i, i + 100)])
    assert pace.missed([b"0"]) == 0 and pace.missed([b"%d" % (MAX_SKIPPED + 50)]) == 1


# -- of an engine


def empty(engine):
    """Saving has cost so much that no new request is saved."""
    stored(engine).save_pace.saved(1e3)
    assert stored(engine).save_pace.share == 0


def asked(engine, ask, name="a"):
    """The request, served, once its pages are kept and the pool has lost them."""
    (request,) = add(engine, name, ask)
    run(engine)
    settle(engine)
    engine.reset_prefix_cache()
    poison(engine)
    return request


@pytest.fixture
def engine(closed):
    engine = engine_with()
    closed.append(engine)
    return engine


def num_written(engine):
    return counts(engine).tiers[0].pages_written


@pytest.mark.slow
def test_a_request_outside_the_share_is_not_saved(engine):
    empty(engine)
    (ask,) = wanted = asks(0)
    request = asked(engine, ask)
    assert request.output_token_ids == expected(wanted)["0"].tokens
    assert num_written(engine) == 0 and counts(engine).num_skipped_tokens == 48
    assert f"KV store: {HOST}, given the pages of 0% of the requests" in engine.describe()


def test_what_is_computed_again_is_saved_and_opens_the_share(engine):
    """Since saving it would have paid."""
    empty(engine)
    (ask,) = wanted = asks(0)
    asked(engine, ask)
    stored(engine).pace.compute_seconds = 1e3
    asked(engine, ask, "b")
    assert num_written(engine) == 12 and stored(engine).save_pace.share == 1
    request = asked(engine, ask, "c")
    assert counts(engine).num_hit_tokens == 36 and request.output_token_ids == expected(wanted)["0"].tokens


def test_a_chain_is_saved_from_its_beginning(engine):
    """A request that is in the share saves what it found in the pool, too."""
    empty(engine)
    (ask,) = asks(0)
    (first,) = add(engine, "a", ask)
    run(engine)
    assert num_written(engine) == 0
    stored(engine).save_pace.hit(1e3)  # more than is owed
    longer = asks(0)[0]
    longer.prompt[:] = first.token_ids + [5] * 8
    request = asked(engine, longer, "b")
    assert request.num_cached_tokens == 48 and stored(engine).store.lookup(request.hash_chain[1:]) == len(request.hash_chain) - 1


def test_who_hands_its_prompt_over_is_saved(closed, tmp_path):
    engine = engine_with(f"disk:{tmp_path}:4MiB")
    closed.append(engine)
    empty(engine)
    (request,) = add(engine, "a", asks(0)[0])
    request.keeps_prompt = True
    run(engine)
    assert request.stored_prefix is not None and request.stored_prefix.num_pages == 10


def test_write_through_is_an_option(closed):
    engine = engine_with(HOST, kv_store_write_policy="write_through")
    closed.append(engine)
    stored(engine).save_pace.saved(1e3)
    asked(engine, asks(0)[0])
    assert num_written(engine) == 12 and counts(engine).save_share == 1 and counts(engine).save_seconds > 0


def test_what_saving_costs_is_counted(engine):
    assert counts(engine).save_seconds == 0
    asked(engine, asks(0)[0])
    assert 0 < counts(engine).save_seconds < 10
    stored(engine).pace.compute_seconds = 1e3  # of a page: hits save much
    asked(engine, asks(0)[0], "b")
    assert counts(engine).num_hit_tokens == 36 and counts(engine).hit_gain_seconds > 1e3


class TimedStore:
    """A store whose saves each say that they took 100 seconds of its thread."""

    def __init__(self, store):
        self._store, self.num_saves = store, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def poll(self, timeout=0.0):
        ended = self._store.poll(timeout)
        for job, _ in ended:
            if job.kind == "save":
                job.seconds = 100.0
                self.num_saves += 1
        return ended


@pytest.mark.parametrize("shares_cores", [True, False])
def test_the_stores_thread_is_charged_once_and_take_by_its_bytes(engine, monkeypatch, shares_cores):
    """On a CPU; elsewhere the engine's thread alone, which takes no second here."""
    pages = stored(engine)
    pages.store = store = TimedStore(pages.store)
    monkeypatch.setattr(pages, "_shares_cores", shares_cores)
    monkeypatch.setattr(stored_pages, "TAKE_RATE", pages._layout.page_bytes / 10)  # 10 s a page
    asked(engine, asks(0)[0])
    assert num_written(engine) == 12 and store.num_saves >= 3
    of_each = 100 + 10 * TRANSFER_PAGES if shares_cores else 0
    assert counts(engine).save_seconds == pytest.approx(of_each * store.num_saves, abs=1)

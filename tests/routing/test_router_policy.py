"""The router's choice: the longest prefix within the bound of loads, else the least loaded, in any history."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.routing.policy import (
    ROUTING_POLICIES,
    LeastLoaded,
    Load,
    PrefixAware,
    RoundRobin,
    SeenBlocks,
    hash_blocks,
    make_policy,
)
from jaxserve.scheduling.page_pool import extend_hash_chain, root_hash

IDLE = {"a": Load(), "b": Load(), "c": Load()}
PROMPTS = st.lists(st.integers(0, 2), max_size=6).map(tuple)  # few tokens: prefixes are often shared
LOADS = st.dictionaries(st.sampled_from("abcd"), st.builds(Load, st.integers(0, 9), st.integers(0, 40)), min_size=1)


def chain(prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Blocks of one token each, every one known by all that is before it: hashes that can be read."""
    return [prompt[: i + 1] for i in range(len(prompt))]


def test_blocks_are_known_by_all_before_them():
    hashes = hash_blocks(b"abcdefgh", 3)
    assert len(hashes) == 2, "full blocks alone"
    assert hash_blocks(b"abcdefxx", 3) == hashes and hash_blocks(b"abcdef", 3) == hashes
    assert hash_blocks(b"abcxefgh", 3)[0] == hashes[0] and hash_blocks(b"abcxefgh", 3)[1] != hashes[1]
    assert hash_blocks(b"xbcdef", 3)[1] != hashes[1], "a block hashes what comes before it"
    assert not set(hash_blocks(b"abcdef", 3, b"salt")) & set(hashes)
    assert hash_blocks(b"abcdefgh", 3, max_blocks=1) == hashes[:1]
    assert len(hash_blocks(array("i", range(10)).tobytes(), 4 * 4)) == 2
    with pytest.raises(ValueError, match="block_bytes=0 must be at least 1"):
        hash_blocks(b"", 0)


def test_a_page_pools_hashes_do_as_well():
    policy = PrefixAware()
    hashes = [root_hash(0, None)]
    extend_hash_chain(hashes, list(range(32)), 16, 2)
    assert policy.choose(hashes[1:], IDLE).num_matched == 0
    assert policy.choose(hashes[1:], IDLE).num_matched == 2


def test_equal_prefixes_meet_and_others_spread():
    policy = PrefixAware()
    first = policy.choose(chain((1, 2, 3)), IDLE)
    assert (first.num_matched, first.reason) == (0, "load")
    others = [policy.choose(chain((n,)), IDLE) for n in (5, 6, 7)]
    assert {choice.server for choice in others[:2]} | {first.server} == {"a", "b", "c"}, "of equals, who was chosen longest ago"
    again = policy.choose(chain((1, 2, 9)), IDLE)
    assert (again.server, again.num_matched, again.reason) == (first.server, 2, "prefix")


def test_the_longest_match_wins():
    policy = PrefixAware()
    policy.choose(chain((1, 2)), {"a": Load()})
    policy.choose(chain((1, 2, 3, 4)), {"b": Load()})
    assert policy.choose(chain((1, 2, 3, 9)), {"a": Load(), "b": Load(0, 5)}).server == "b"


def test_a_busy_server_is_passed_over():
    policy = PrefixAware(slack=4, ratio=2)
    policy.choose(chain((1, 2)), {"a": Load()})
    loads = {"a": Load(waiting=1, running=0), "b": Load()}
    assert policy.choose(chain((1, 2)), loads).server == "a", "4 * 1 is what the slack allows"
    loads = {"a": Load(waiting=1, running=1), "b": Load()}
    passed_over = policy.choose(chain((1, 2)), loads)
    assert (passed_over.server, passed_over.num_matched, passed_over.reason) == ("b", 0, "overloaded")
    both = policy.choose(chain((1, 2)), {"a": Load(0, 3), "b": Load(0, 2)})
    assert (both.server, both.reason) == ("b", "prefix"), "both have it now: the lesser load decides"
    assert policy.choose(chain((7,)), {"a": Load(0, 9), "b": Load(0, 10)}).server == "a"


def test_what_a_server_lost_no_longer_counts():
    policy = PrefixAware()
    policy.choose(chain((1, 2)), {"a": Load()})
    policy.forget("a")
    policy.forget("never heard of")
    assert policy.choose(chain((1, 2)), {"a": Load(0, 1), "b": Load()}).server == "b"


@given(st.lists(st.tuples(PROMPTS, LOADS), max_size=40), st.integers(1, 30), st.integers(0, 20), st.sampled_from([1, 1.5, 3]))
def test_in_any_history(history, max_blocks, slack, ratio):
    """Whoever is chosen is within the bound, and of those nobody's match is longer; the matches are those of a plain search."""
    policy = PrefixAware(max_blocks=max_blocks, slack=slack, ratio=ratio)
    least_recent_last: dict[str, list[tuple[int, ...]]] = {}
    for prompt, loads in history:
        blocks = chain(prompt)
        matches = {s: sum(b in least_recent_last.get(s, ()) for b in blocks) for s in loads}
        choice = policy.choose(blocks, loads)
        cost = {s: 4 * load.waiting + load.running for s, load in loads.items()}
        allowed = [s for s in loads if cost[s] <= slack + ratio * min(cost.values())]
        assert choice.server in allowed
        assert choice.num_matched == matches[choice.server] == max(matches[s] for s in allowed)
        assert cost[choice.server] == min(cost[s] for s in allowed if matches[s] == choice.num_matched)
        expected = (
            "load" if not any(matches.values()) else "prefix" if choice.num_matched == max(matches.values()) else "overloaded"
        )
        assert choice.reason == expected
        seen = least_recent_last.get(choice.server, [])
        least_recent_last[choice.server] = [*blocks, *(b for b in seen if b not in blocks)][:max_blocks]


@given(st.lists(PROMPTS, max_size=30), st.integers(1, 12))
def test_memory_is_bounded_and_beginnings_stay(prompts, max_blocks):
    seen = SeenBlocks(max_blocks)
    for prompt in prompts:
        seen.note(chain(prompt))
        assert len(seen) <= max_blocks
        assert seen.match(chain(prompt)) == min(len(prompt), max_blocks), "the last one is remembered as far as there is room"
        assert all(block[:-1] in seen._blocks for block in seen._blocks if isinstance(block, tuple) and len(block) > 1)


@given(st.lists(LOADS, min_size=1, max_size=20))
def test_the_least_loaded(history):
    policy = LeastLoaded()
    for loads in history:
        cost = {s: 4 * load.waiting + load.running for s, load in loads.items()}
        choice = policy.choose(chain((1, 2)), loads)
        assert cost[choice.server] == min(cost.values()) and choice.num_matched == 0


def test_in_turn():
    policy = RoundRobin()
    assert [policy.choose((), {**IDLE, "a": Load(9, 9)}).server for _ in range(7)] == list("abcabca")
    assert policy.choose((), {"a": Load(), "b": Load()}).server == "b"


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_no_server_at_all(name):
    with pytest.raises(ValueError, match="there is no server to choose"):
        make_policy(name).choose((), {})


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="ratio=0.5 at least 1"):
        PrefixAware(ratio=0.5)
    with pytest.raises(ValueError, match="name='nearest' must be one of prefix_aware"):
        make_policy("nearest")

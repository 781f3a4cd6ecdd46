"""Bucket plans: what they refuse, what they choose, JSON there and back, and the default rule's limits."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.buckets.padding import PaddingAccount
from jaxserve.buckets.plan import MAX_PROGRAMS, Bucket, BucketPlan

sizes = st.integers(1, 400)
mixed_sizes = st.tuples(sizes, sizes).map(lambda pair: (max(pair), min(pair)))


def unique(elements: st.SearchStrategy, low: int = 0) -> st.SearchStrategy[tuple]:
    return st.lists(elements, min_size=low, max_size=5, unique=True).map(tuple)


drafts = st.tuples(st.integers(1, 40), st.integers(1, 9))
plans = st.builds(BucketPlan, decode=unique(sizes), mixed=unique(mixed_sizes, 1), head_rows=unique(sizes, 1), draft=unique(drafts))


@pytest.mark.parametrize("multiple", [2, 8])
def test_default_plan_has_few_programs_and_holds_every_step(multiple):
    """Many pairs of limits, odd ones too."""
    limits = [1, 2, 3, 6, 7, 8, 16, 60, 100, 128, 250, 256, 333, 512, 1024, 2048]
    for seqs in limits:
        for budget in [*limits, 4096, 8192, 10_000, 16_384, 131_072]:
            if budget < seqs:
                continue
            plan = BucketPlan.default(seqs, budget, min_tokens=multiple)
            assert plan.num_programs <= MAX_PROGRAMS == 24, (seqs, budget)
            plan.check(seqs, budget)
            assert all(b.tokens % multiple == 0 for b in plan.buckets), (seqs, budget)
            assert plan.buckets[-1].tokens < budget + multiple, "a bucket larger than any step"
            assert plan.decode[-1] < seqs + multiple and plan.max_head_rows < seqs + multiple


def test_default_plan_fills_its_room_with_powers_of_two():
    plan = BucketPlan.default(128, 2048)
    assert plan.decode == (8, 16, 32, 64, 128)
    assert plan.mixed == tuple((t, min(t, 128)) for t in (32, 64, 128, 256, 512, 1024, 2048))
    assert plan.head_rows == (8, 16, 32, 64, 128) and plan.num_programs == 24
    drafting = BucketPlan.default(128, 2048, num_drafts=5, max_draft_tokens=256)
    assert drafting.draft == ((1, 3), (1, 5), (4, 3), (4, 5), (16, 3), (16, 5), (64, 3))
    assert (drafting.decode, drafting.mixed, drafting.max_head_rows) == (plan.decode, plan.mixed, 256)
    small = BucketPlan.default(6, 24, min_tokens=2)
    assert (small.decode, small.mixed, small.head_rows) == ((2, 4, 6), ((16, 6), (24, 6)), (2, 4, 6))
    assert small.num_programs == 13


def test_fewer_programs_may_be_asked_for():
    plan = BucketPlan.default(256, 8192, max_programs=12)
    assert plan.num_programs <= 12
    plan.check(256, 8192)
    least = BucketPlan.default(256, 8192, max_programs=10)
    assert least.num_programs == 10
    with pytest.raises(
        ValueError, match="max_programs=9 is too few for the default plan of max_num_seqs=256, which takes 10: raise it"
    ):
        BucketPlan.default(256, 8192, max_programs=9)


def test_a_bucket_of_too_few_sequences_is_named():
    """What its message advises is accepted, either way."""
    plan = BucketPlan(mixed=((512, 64), (1024, 32)), head_rows=(128,))
    with pytest.raises(
        ValueError, match=r"512 tokens or more hold at most 64 .* lower max_num_seqs to 64 or add a bucket \(512, 128\)"
    ):
        plan.check(128, 512)
    plan.check(64, 512)
    BucketPlan(mixed=(*plan.mixed, (512, 128)), head_rows=(128,)).check(128, 512)
    with pytest.raises(ValueError, match="holds steps of at most 512 tokens with 64 sequences.*or add a larger mixed bucket"):
        plan.check(64, 2048)


@given(plans, st.text(max_size=5))
def test_json_there_and_back(plan, text):
    assert BucketPlan.from_json(plan.to_json(workload=text, seconds=1.5)) == plan
    assert json.loads(plan.to_json(workload=text))["about"] == {"workload": text}


def test_files(tmp_path):
    plan = BucketPlan(decode=(4, 2), mixed=((16, 4),), head_rows=(4,))
    path = tmp_path / "new" / "plan.json"
    plan.save(path, device="cpu")
    assert BucketPlan.load(path) == BucketPlan.load(str(path)) == plan
    assert BucketPlan.load(plan) is plan


OK = {"decode": (2,), "mixed": ((8, 2),), "head_rows": (2,)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mixed": ()}, "at least one mixed bucket"),
        ({"head_rows": ()}, "head_rows is empty"),
        ({"decode": (0,)}, r"decode sizes must be integers >= 1, got \[0\]"),
        ({"decode": (True,)}, "decode sizes must be integers"),
        ({"mixed": ((8, -1),)}, "mixed sizes must be integers"),
        ({"mixed": ((8.5, 2),)}, "mixed sizes must be integers"),
        ({"mixed": ((8,),)}, "must be pairs"),
        ({"head_rows": (2.5,)}, "head_rows sizes must be integers"),
        ({"decode": (4, 2, 4)}, r"decode sizes repeat in \[2, 4, 4\]"),
        ({"mixed": ((8, 2), (8, 2))}, "mixed sizes repeat"),
        ({"head_rows": (2, 2)}, "head_rows sizes repeat"),
        ({"mixed": ((8, 9),)}, r"mixed bucket \(8, 9\) has more sequences than tokens"),
        ({"draft": ((8,),)}, r"draft buckets must be pairs \(sequences, drafts\)"),
        ({"draft": ((8, 0),)}, "draft sizes must be integers >= 1"),
        ({"draft": ((8, 2), (8, 2))}, "draft sizes repeat"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        BucketPlan(**{**OK, **changes})
    data = json.loads(BucketPlan(**OK).to_json()) | {k: list(v) for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        BucketPlan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("[]", r"'format' must be 'jaxserve-bucket-plan-1', got \[\]"),
        ('{"format": "other"}', "got 'other'"),
        ('{"format": "jaxserve-bucket-plan-1", "mixed": [[8, 2]], "head_rows": [2], "decod": [2]}', r"unknown fields \['decod'\]"),
        ('{"format": "jaxserve-bucket-plan-1", "mixed": [[8, 2]], "head_rows": 2}', "lists of integers"),
        ('{"format": "jaxserve-bucket-plan-1", "mixed": [8, 2], "head_rows": [2]}', "mixed a list of pairs"),
        ('{"format": "jaxserve-bucket-plan-1", "mixed": [["8", 2]], "head_rows": [2]}', "mixed sizes must be int"),
        ('{"format": "jaxserve-bucket-plan-1", "mixed": [[8, 2, 1]], "head_rows": [2]}', "must be pairs"),
        ('{"format": "jaxserve-bucket-plan-1", "head_rows": [2]}', "at least one mixed bucket"),
    ],
)
def test_refuses_json(text, message):
    with pytest.raises(ValueError, match=message):
        BucketPlan.from_json(text)


@settings(max_examples=300)
@given(plans, st.lists(st.integers(1, 120), min_size=1, max_size=12))
def test_select_is_the_cheapest_that_holds(plan, q_lens):
    """Against all buckets, from the plan's own numbers: the fewest tokens, then a decode bucket, then the fewest sequences."""
    tokens, seqs = sum(q_lens), len(q_lens)
    holding = [(n, 0, n, 1) for n in plan.decode if max(q_lens) == 1 and seqs <= n]
    holding += [(t, 1, s, t) for t, s in plan.mixed if tokens <= t and seqs <= s]
    holding += [(s * (1 + k), 1, s, 1 + k) for s, k in plan.draft if tokens <= s * (1 + k) and seqs <= s and max(q_lens) <= 1 + k]
    if not holding:
        with pytest.raises(ValueError, match=f"no bucket holds {tokens} tokens of {seqs} sequences"):
            plan.select(tokens, seqs, max(q_lens))
        return
    t, _, s, most = min(holding)
    assert plan.select(tokens, seqs, max(q_lens)) == Bucket(t, s, most)


@given(plans, st.integers(1, 500))
def test_select_head_rows_is_the_smallest_that_holds(plan, n):
    holding = [rows for rows in plan.head_rows if rows >= n]
    if holding:
        assert plan.select_head_rows(n) == min(holding)
    else:
        with pytest.raises(ValueError, match=f"no head program holds {n} logits rows"):
            plan.select_head_rows(n)


@settings(max_examples=300)
@given(plans, st.integers(1, 60), st.integers(1, 200))
def test_check_accepts_exactly_the_limits_whose_steps_all_fit(plan, seqs, budget):
    """Every step that a scheduler of these limits can make, tried one by one."""
    if seqs > budget:
        return

    def fits(tokens: int, n: int) -> bool:
        """Whether any step of n sequences and so many tokens fits; only the one of decodes alone has another choice."""
        return any(tokens <= t and n <= s for t, s in plan.mixed)

    holds = all(fits(tokens, min(tokens, seqs)) for tokens in range(1, budget + 1))
    num_drafts = 1 if plan.draft else 0
    if holds and plan.head_rows[-1] >= max(seqs, 1 + num_drafts) and budget >= 1 + num_drafts:
        plan.check(seqs, budget, num_drafts)
    else:
        with pytest.raises(ValueError, match="max_num_batched_tokens|max_num_seqs|num_speculative_tokens"):
            plan.check(seqs, budget, num_drafts)


def test_padding_account():
    account, decode, mixed = PaddingAccount(), Bucket(4, 4, 1), Bucket(16, 4, 16)
    assert account.padding_share == 0
    account.add(mixed, 10, 2, 1)
    account.add(decode, 3, 4, 3)
    account.add(mixed, 16, 0, 0)
    assert account.steps == {decode: 1, mixed: 2} and account.num_steps == 3
    assert (account.tokens, account.padded_tokens, account.samples, account.padded_samples) == (29, 7, 4, 2)
    assert account.padding_share == pytest.approx(7 / 36)
    assert list(account.by_bucket()) == [(decode, 1), (mixed, 2)]


def test_plan_in_words():
    assert str(Bucket(4, 4, 1)) == "decode(4,4)" and str(Bucket(16, 4, 16)) == "mixed(16,4)"
    assert str(Bucket(16, 4, 4)) == "draft(4x3)"
    drafting = BucketPlan(**OK, draft=((2, 3),))
    assert str(drafting) == "decode [2], mixed [(8, 2)], draft [2x3], head rows [2]: 7 programs"
    with pytest.raises(ValueError, match="has buckets for drafts .* but speculation is off"):
        drafting.check(2, 8)
    with pytest.raises(ValueError, match="num_speculative_tokens=3 takes 4 tokens and logits rows"):
        drafting.check(2, 8, num_drafts=3)
    assert str(BucketPlan(**OK)) == "decode [2], mixed [(8, 2)], head rows [2]: 6 programs"

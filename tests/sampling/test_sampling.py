"""Sampling against a float64 reference in numpy, against statistics, and against itself in other company."""

import collections
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling import sampler
from jaxserve.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_SUPPRESSED_IDS, SamplingParams
from tests.selection import slow_unless

PROMPT = 7  # tokens of every prompt here
# Every shape is a program of 2 s to compile. Tests share [4000, 24], [64, 1000] and, with 20 log-probabilities, [24, V]: a
# vocabulary smaller than a block, of one block, of some, and of more blocks than there are candidates.
VOCABULARIES = [1, 3, 128, 300, 49152 + 5]


@functools.partial(jax.jit, static_argnames=("max_logprobs", "num_candidates"))
def _run(logits, packed, given, max_logprobs, num_candidates):
    del num_candidates  # part of the cache's key: the module's constant is patched
    sampled = sampler.sample(logits, sampler.unpack_rows(packed), max_logprobs=max_logprobs, given=given)
    return sampler.pack_sampled(sampled)


def run(logits, packed, max_logprobs=0, given=None):
    """given: i32[R, MAX_LOGPROB_TOKEN_IDS]; None: all 0."""
    given = np.zeros((len(packed), MAX_LOGPROB_TOKEN_IDS), np.int32) if given is None else given
    packed = _run(jnp.asarray(logits, jnp.float32), packed, given, max_logprobs, sampler.NUM_CANDIDATES)
    return sampling_rows.unpack_sampled(np.asarray(packed))


def pack(params, seeds, *, sample_index=0, suppress=frozenset()):
    """One row a seed, all of the same parameters."""
    table = np.zeros((len(seeds), sampling_rows.NUM_COLUMNS), np.int32)
    for row, seed in enumerate(seeds):
        sampling_rows.write_row(
            table,
            row,
            params,
            seed=int(seed),
            sample_index=sample_index,
            num_prompt_tokens=PROMPT,
            suppress_ids=suppress,
        )
    return table


def sample_many(logits, params, n, seed=0):
    """n tokens from one row of logits, a seed each."""
    logits = np.asarray(logits, np.float32)
    return run(np.broadcast_to(logits, (n, logits.size)), pack(params, seed + np.arange(n)))


def likeliest_first(x):
    """Ids in the order (value down, id up)."""
    return np.lexsort((np.arange(x.size), -x))


def reference_probs(logits, params):
    """f64[V]: vLLM's order of operations on a sorted distribution."""
    x = np.asarray(logits, np.float64)
    order = likeliest_first(x)
    if params.temperature == 0:
        return np.eye(1, x.size, order[0])[0]
    top_p, min_p, temperature = np.array([params.top_p, params.min_p, params.temperature], np.float32).astype(np.float64)
    p = np.exp((x - x.max()) / temperature)
    p[p < min_p * p.max()] = 0
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        reached = np.flatnonzero(np.cumsum(p[order]) >= top_p)
        p[order[reached[0] + 1 :]] = 0
    return p / p.sum()


def chi_square_p(counts, expected):
    """The p-value of Pearson's test; bins expected to hold fewer than 8 are pooled."""
    few = expected < 8
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    if expected.size == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(jax.scipy.special.gammaincc((expected.size - 1) / 2, statistic / 2))


LOGITS = np.random.default_rng(0).normal(size=24) * 1.5
FILTERS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_k_one": {"top_k": 1},
    "top_k_all": {"top_k": 24},
    "top_k_more_than_all": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "top_p_tiny": {"top_p": 1e-9},
    "top_p_almost_one": {"top_p": 0.999},
    "min_p": {"min_p": 0.2},
    "min_p_one": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 8, "top_p": 0.8},
    "min_p_top_p": {"min_p": 0.1, "top_p": 0.8, "temperature": 2.0},
    "all": {"temperature": 1.7, "min_p": 0.05, "top_k": 10, "top_p": 0.9},
    "greedy": {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5},
}


@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_are_the_distribution(name):
    n, params = 4000, SamplingParams(**FILTERS[name])
    probs = reference_probs(LOGITS, params)
    counts = np.bincount(sample_many(LOGITS, params, n).tokens, minlength=24)
    assert not counts[probs == 0].any(), "a filtered token was sampled"
    assert counts[probs * n > 20].all(), "a kept token never was"
    assert chi_square_p(counts, probs * n) > 1e-3


@pytest.mark.parametrize(
    ("params", "num_kept"),
    [
        ({"top_p": 0.5}, 2),  # exactly reached by two of four: the third does not come in
        ({"top_p": 0.51}, 3),
        ({"top_k": 3}, 3),
        ({"top_k": 3, "top_p": 0.5}, 2),  # of three thirds, two cross a half
        ({"min_p": 1.0}, 4),
        ({"min_p": 1.0, "top_p": 0.26}, 2),
    ],
)
def test_equal_logits_are_kept_in_vocabulary_order(params, num_kept):
    logits = np.full(1000, -1e4, np.float32)
    equal = [3, 130, 131, 990]
    logits[equal] = 0.0, -0.0, 0.0, -0.0  # the two zeros are equal
    tokens = sample_many(logits, SamplingParams(**params), 64).tokens
    assert sorted(set(tokens.tolist())) == equal[:num_kept]


def reference_uniform(seed, sample_index, position):
    with jax.enable_x64(True):
        key = jax.random.key(np.uint64(seed % 2**64), impl="threefry2x32")
    bits = jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, sample_index), position), (2,), jnp.uint32)
    high, low = (int(b) for b in np.asarray(bits))
    return (high * 2**32 + low) / 2**64


def mixed_rows(V):
    """24 rows of all sorts: logits f32[24, V], their params, packed rows, uniform numbers."""
    rng = np.random.default_rng(V)
    logits = (rng.normal(size=(24, V)) * rng.choice([0.5, 3.0], size=(24, 1)) + 50).astype(np.float32)
    logits[12:] = np.round(logits[12:] * 2) / 2  # ties
    rows = []
    for _ in range(24):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            top_k=int(rng.choice([0, 0, 1, 40, 256, 300])),
            top_p=float(rng.choice([1.0, 0.3, 0.9, 0.99])),
            min_p=float(rng.choice([0.0, 0.0, 0.01])),
        )
        seed, index = int(rng.integers(-(2**63), 2**63 - 1)), int(rng.integers(5))
        rows.append((params, pack(params, [seed], sample_index=index), reference_uniform(seed, index, PROMPT)))
    all_params, packed, uniforms = zip(*rows, strict=True)
    return logits, all_params, np.concatenate(packed), uniforms


@pytest.mark.parametrize("V", slow_unless(lambda V: V in (3, 300), VOCABULARIES))
def test_tokens_are_the_inverse_cdf_of_the_reference(V):
    """Each token is the one at which the reference's CDF passes the row's uniform number; where that lies within 1e-6 of
    a step, either side will do. A filter changes the whole CDF, so that this also proves what is kept."""
    logits, all_params, packed, uniforms = mixed_rows(V)
    tokens = run(logits, packed, max_logprobs=20).tokens
    for row, (params, u) in enumerate(zip(all_params, uniforms, strict=True)):
        cdf = np.cumsum(reference_probs(logits[row], params))
        last = np.searchsorted(cdf, cdf[-1])
        accepted = {min(np.searchsorted(cdf, u + d, side="right"), last) for d in (-1e-6, 0, 1e-6)}
        assert tokens[row] in accepted, (row, params)


def test_every_unit_of_weight_finds_its_entry():
    """The inverse CDF at each integer of a small one, zeros in it; draws land on such an edge once in 2**30."""
    weights = np.random.default_rng(0).choice([0, 0, 1, 2], size=(3, 128)).astype(np.int32)
    weights[1] = 0  # a whole block of nothing
    total = int(weights.sum())
    with jax.enable_x64(True):
        blocks = jnp.broadcast_to(weights, (total, 3, 128))
        found = sampler._locate(blocks, sampler._cumulative(blocks), jnp.arange(total, dtype=jnp.int64))
    np.testing.assert_array_equal(found, np.repeat(np.arange(weights.size), weights.ravel()))


@pytest.mark.slow
def test_a_large_flat_vocabulary_is_drawn_evenly():
    """151,936 equal entries: coarse random numbers, or sums that lose small terms, would favour some."""
    V, n, steps = 151936, 64, 16
    flat, packed = jnp.zeros((n, V)), pack(SamplingParams(), np.arange(n))
    tokens = []
    for step in range(steps):
        packed[:, sampling_rows.POSITION] = step
        tokens.append(run(flat, packed).tokens)
    tokens = np.concatenate(tokens)
    for bins in (tokens % 32, tokens * 32 // V):
        assert chi_square_p(np.bincount(bins, minlength=32), np.full(32, n * steps / 32)) > 1e-3
    assert len(set(tokens.tolist())) > 0.98 * tokens.size  # 1024 draws of 151,936: some 3 pairs


@pytest.mark.slow
def test_a_tail_of_unlikely_tokens_keeps_its_mass():
    """151,935 entries of 2**-20 of the likeliest each hold 13% of the mass together."""
    V, n, steps = 151936, 64, 16
    logits, packed = jnp.full((n, V), -20 * np.log(2)).at[:, 5].set(0.0), pack(SamplingParams(), np.arange(n))
    hits = 0
    for step in range(steps):
        packed[:, sampling_rows.POSITION] = step
        hits += int((run(logits, packed).tokens != 5).sum())
    expected = n * steps * (1 - reference_probs(logits[0], SamplingParams())[5])
    assert abs(hits - expected) < 4 * np.sqrt(expected)


# What the rest of a batch can ask for, and so which path the batch takes.
COMPANY = {
    "greedy": SamplingParams(temperature=0),
    "random": SamplingParams(temperature=1.3),
    "min_p": SamplingParams(min_p=0.02),
    "candidates": SamplingParams(top_k=50, top_p=0.9),
    "sort": SamplingParams(temperature=4.0, top_p=0.999),
    "sort_top_k": SamplingParams(temperature=4.0, top_k=600),
}
V = 1000
COMPANY_LOGITS = (np.random.default_rng(5).normal(size=(64, V)) * 2).astype(np.float32)
COMPANY_LOGITS[::2] = np.round(COMPANY_LOGITS[::2] * 4) / 4  # ties in every other row


def test_company_takes_the_path_it_is_meant_to_take():
    for name, params in COMPANY.items():
        assert run(COMPANY_LOGITS, pack(params, np.arange(64))).by_sort.all() == name.startswith("sort"), name
        assert run(COMPANY_LOGITS, pack(params, np.arange(64))).by_sort.any() == name.startswith("sort"), name


@pytest.mark.parametrize("mine", COMPANY)
def test_a_token_does_not_depend_on_the_company(mine):
    packed = pack(COMPANY[mine], np.arange(64) * 11)
    alone = run(COMPANY_LOGITS, packed).tokens
    for other, params in COMPANY.items():
        mixed = packed.copy()
        mixed[32:] = pack(params, np.arange(32))
        np.testing.assert_array_equal(run(COMPANY_LOGITS, mixed).tokens[:32], alone[:32], err_msg=other)
    for size in (1, 7):  # other programs
        np.testing.assert_array_equal(run(COMPANY_LOGITS[:size], packed[:size]).tokens, alone[:size])
    order = np.random.default_rng(1).permutation(64)
    np.testing.assert_array_equal(run(COMPANY_LOGITS[order], packed[order]).tokens, alone[order])
    np.testing.assert_array_equal(run(COMPANY_LOGITS, packed, max_logprobs=3).tokens, alone)


def test_probabilities_do_not_depend_on_the_shape_of_the_program():
    """Bit for bit: a last bit here would change a token in 10**8, which no comparison of tokens would see."""

    @jax.jit
    def weights(logits, temperature):
        with jax.enable_x64(True):
            return sampler._weights(logits, logits.max((-1, -2)), temperature, jnp.zeros_like(temperature))

    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(64, 8, 128)) * 5).astype(np.float32)
    temperature = rng.uniform(0.3, 2.0, 64).astype(np.float32)
    for blocks in (1, 8):
        x = logits[:, :blocks]
        want = np.asarray(weights(x, temperature))
        for size in (1, 2, 3, 8):
            np.testing.assert_array_equal(weights(x[:size], temperature[:size]), want[:size])


@pytest.mark.parametrize("name", ["candidates", "sort", "sort_top_k"])
def test_the_sort_and_the_candidates_agree(name, monkeypatch):
    packed = pack(COMPANY[name], np.arange(64))
    results = {}
    for num_candidates in (2, 256, 1024):  # never enough, sometimes enough, always enough
        monkeypatch.setattr(sampler, "NUM_CANDIDATES", num_candidates)
        results[num_candidates] = run(COMPANY_LOGITS, packed)
    assert results[2].by_sort.mean() > 0.9 and not results[1024].by_sort.any()
    np.testing.assert_array_equal(results[2].tokens, results[1024].tokens)
    np.testing.assert_array_equal(results[256].tokens, results[1024].tokens)


def test_candidates_decide_where_they_can():
    """No sort for top_k <= 256, nor with mass enough, nor with nothing left outside. Each row owns up for itself."""
    peaked = np.where(np.arange(V) < 200, 0.0, -8.0)
    params = [{"top_k": 256}, {"top_p": 0.9}, {"top_k": 257, "min_p": 0.5}, {"top_k": 257}, {"top_p": 0.99999}]
    packed = np.zeros((64, sampling_rows.NUM_COLUMNS), np.int32)
    packed[:5] = np.concatenate([pack(SamplingParams(**p), [3]) for p in params])
    by_sort = run(np.broadcast_to(peaked, (64, V)), packed).by_sort
    assert by_sort[:5].tolist() == [False, False, False, True, True] and not by_sort[5:].any()


def equations(jaxpr: Any, num_conds: int = 0) -> Iterator[tuple[Any, int]]:
    """The equations of a jaxpr and of all inside of it, each with the number of conditionals around it."""
    for eqn in jaxpr.eqns:
        yield eqn, num_conds
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner, num_conds + (eqn.primitive.name == "cond"))


def test_no_batch_pays_for_what_none_of_its_rows_asks():
    """What costs most stands behind conditionals on `any`, one in another: random rows, filtered ones, undecided ones."""
    V = VOCABULARIES[-1]
    logits, packed = jax.ShapeDtypeStruct((4, V), jnp.float32), pack(SamplingParams(), np.arange(4))
    traced = jax.make_jaxpr(lambda x, packed: sampler.sample(x, sampler.unpack_rows(packed), edit=jnp.sin))(logits, packed)
    depths: dict[tuple[str, bool], set[int]] = collections.defaultdict(set)  # by primitive: how many conditionals are around it
    for eqn, num_conds in equations(traced):
        is_whole = any(x.aval.size >= 4 * V for x in eqn.invars)
        depths[eqn.primitive.name, is_whole].add(num_conds)
    assert depths["sort", True] == {3}, "the sort of the whole vocabulary: if a row is undecided"
    assert depths["top_k", False] | depths["top_k", True] == {2}, "the likeliest entries: if a row is filtered"
    assert depths["exp", True] == {1} == depths["random_bits", False], "if a row is random"
    assert depths["sin", True] == {1}, "if a row asks for edits"


def test_seed_sample_index_and_position_each_give_other_draws():
    """Uniform over 24 tokens: sequences along each axis, and across the axes, are even and uncorrelated."""
    n = 4000
    flat, base = np.zeros((n, 24), np.float32), pack(SamplingParams(), np.zeros(n))
    draws = {}
    for column in ("SEED_LOW", "SEED_HIGH", "SAMPLE_INDEX", "POSITION"):
        packed = base.copy()
        packed[:, getattr(sampling_rows, column)] = np.arange(n, dtype=np.int32) + 1
        draws[column] = run(flat, packed).tokens
    limit = 4 / np.sqrt(n)
    for a, x in draws.items():
        assert chi_square_p(np.bincount(x, minlength=24), np.full(24, n / 24)) > 1e-3, a
        assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < limit, a
        pairs = np.bincount(x[1:] // 2 * 12 + x[:-1] // 2, minlength=144)
        assert chi_square_p(pairs, np.full(144, (n - 1) / 144)) > 1e-3, a
        for b, y in draws.items():
            assert a == b or abs(np.corrcoef(x, y)[0, 1]) < limit, (a, b)
    assert len(set(run(flat, base).tokens.tolist())) == 1  # the same key, the same draw


@pytest.mark.parametrize("V", slow_unless(lambda V: V in (3, 300), VOCABULARIES))
def test_greedy_is_the_first_argmax(V):
    logits = np.random.default_rng(V).normal(size=(24, V)).astype(np.float32)
    logits[12:] = np.round(logits[12:])  # many ties at the top
    logits[23] = -np.abs(logits[23]) - 1e30
    packed = pack(SamplingParams(temperature=0), np.arange(24))
    np.testing.assert_array_equal(run(logits, packed, max_logprobs=20).tokens, np.argmax(logits, -1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e38, 1e300])
def test_extreme_temperatures(temperature):
    logits = np.array([0.0, 30.0, 29.0, -np.inf] * 6, np.float32)[:24]
    tokens = sample_many(logits, SamplingParams(temperature=temperature), 4000)
    assert not tokens.bad_logits.any()
    if temperature < 1:
        assert set(tokens.tokens % 4) == {1}
        assert (len(set(tokens.tokens)) == 1) == (temperature < sampling_rows.GREEDY_BELOW)
    else:  # even, but what is impossible stays so
        counts = np.bincount(tokens.tokens, minlength=24)
        expected = np.where(np.arange(24) % 4 == 3, 0, 4000 / 18)
        assert not counts[expected == 0].any() and chi_square_p(counts, expected) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_ids_back_until_their_position(temperature):
    ids, steps = frozenset({2, 9}), 24
    logits = np.zeros((steps, 300), np.float32)
    logits[:, [2, 9, 299]] = 60.0, 59.0, 30.0
    packed = pack(SamplingParams(temperature=temperature, min_tokens=3), np.arange(steps), suppress=ids)
    packed[:, sampling_rows.POSITION] = PROMPT + np.arange(steps)
    sampled = run(logits, packed, max_logprobs=20)
    assert sampled.tokens[:3].tolist() == [299] * 3
    assert set(sampled.tokens[3:].tolist()) == ({2} if temperature == 0 else {2, 9})
    assert sampled.top_ids is not None and sampled.ranks is not None
    np.testing.assert_array_equal(sampled.top_ids[:, :3], [[2, 9, 299]] * steps)  # the raw distribution's
    assert sampled.ranks[:3].tolist() == [3] * 3
    free = pack(SamplingParams(temperature=temperature), np.arange(steps), suppress=ids)
    assert set(run(logits, free, max_logprobs=20).tokens.tolist()) <= ids


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_is_flagged_and_disturbs_no_other(bad):
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=40)]
    packed = np.concatenate([pack(p, np.arange(16) + 50 * i) for i, p in enumerate(params)])
    logits = COMPANY_LOGITS + np.float32(0)
    good = run(logits, packed, max_logprobs=3)
    assert not good.bad_logits.any()
    logits[::2, slice(None) if bad == -np.inf else 777] = bad  # -inf: no finite logit left
    sampled = run(logits, packed, max_logprobs=3)
    assert sampled.bad_logits.tolist() == [True, False] * 32
    assert not sampled.tokens[::2].any() and not sampled.by_sort[::2].any()
    for name in ("tokens", "by_sort", "logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(sampled, name)[1::2], getattr(good, name)[1::2])


@pytest.mark.parametrize("V", [3, 128, 300])
def test_a_nan_is_seen_wherever_it_lies(V):
    """Beside -inf and large logits too, which are no fault."""
    logits = np.random.default_rng(V).normal(size=(V + 1, V)).astype(np.float32)
    logits[:, ::2], logits[:, 1::2] = -np.inf, logits[:, 1::2] * 1e30
    logits[np.arange(V), np.arange(V)] = np.nan  # but in the last row
    sampled = run(logits, pack(SamplingParams(temperature=0), np.arange(V + 1)))
    assert sampled.bad_logits.tolist() == [True] * V + [False]
    assert sampled.tokens[-1] == np.argmax(logits[-1])


def test_suppressing_everything_is_bad_logits():
    packed = pack(SamplingParams(min_tokens=2), np.arange(24), suppress=frozenset({0, 1, 2}))
    packed[1, sampling_rows.POSITION] += 2
    assert run(np.zeros((24, 3)), packed, max_logprobs=20).bad_logits.tolist() == [True, False] + [True] * 22


@pytest.mark.parametrize("V", slow_unless(lambda V: V in (3, 300), VOCABULARIES))
def test_logprobs_are_the_raw_log_softmax(V):
    logits, _, packed, _ = mixed_rows(V)
    given = np.random.default_rng(V).integers(0, V, (len(logits), MAX_LOGPROB_TOKEN_IDS)).astype(np.int32)
    sampled = run(logits, packed, max_logprobs=20, given=given)
    assert sampled.ranks is not None and sampled.logprobs is not None and sampled.given is not None
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    for row, x in enumerate(logits.astype(np.float64)):
        want = x - x.max() - np.log(np.exp(x - x.max()).sum())
        order = likeliest_first(x)
        token = sampled.tokens[row]
        assert sampled.top_ids[row].tolist() == order[:20].tolist()
        assert order[sampled.ranks[row] - 1] == token
        np.testing.assert_allclose(sampled.top_logprobs[row], want[order[:20]], rtol=1e-6, atol=4e-6)
        np.testing.assert_allclose(sampled.logprobs[row], want[token], rtol=1e-6, atol=4e-6)
        np.testing.assert_allclose(sampled.given[row], want[given[row]], rtol=1e-6, atol=4e-6)
        bits = dict(zip(sampled.top_ids[row].tolist(), sampled.top_logprobs[row].tolist(), strict=True))
        assert all(bits.get(i, x) == x for i, x in zip(given[row].tolist(), sampled.given[row].tolist(), strict=True))


def test_rows_arrive_on_the_device_as_written():
    table = np.full((3, sampling_rows.NUM_COLUMNS), 12345, np.int32)
    params = SamplingParams(temperature=0.3, top_p=0.9, min_p=0.05, top_k=17, min_tokens=4)
    ids = frozenset({900, 5})
    write = functools.partial(sampling_rows.write_row, table, num_prompt_tokens=21, suppress_ids=ids)
    write(1, params, seed=-2, sample_index=3)
    rows = jax.tree.map(lambda x: np.asarray(x)[1].tolist(), sampler.unpack_rows(jnp.asarray(table)))
    reals = np.array([0.3, 0.9, 0.05], np.float32).tolist()
    assert [rows.temperature, rows.top_p, rows.min_p] == reals
    assert (rows.top_k, rows.seed, rows.sample_index) == (17, [2**32 - 2, 2**32 - 1], 3)
    assert (rows.position, rows.suppress_until) == (21, 25)
    assert rows.suppress_ids == [5, 900] + [-1] * (MAX_SUPPRESSED_IDS - 2)
    assert (table[[0, 2]] == 12345).all()
    write(1, SamplingParams(), seed=2**64 - 2, sample_index=3)  # nothing of the row's last request stays
    assert table[1, sampling_rows.SUPPRESS_IDS :].tolist() == [-1] * MAX_SUPPRESSED_IDS
    assert table[1, [sampling_rows.SEED_LOW, sampling_rows.SEED_HIGH]].tolist() == [-2, -1]


def test_too_many_ids_to_hold_back_are_refused():
    ids = frozenset(range(MAX_SUPPRESSED_IDS + 1))
    with pytest.raises(ValueError, match=f"hold back {len(ids)} stop ids"):
        pack(SamplingParams(min_tokens=1), [0], suppress=ids)
    pack(SamplingParams(min_tokens=0), [0], suppress=ids)  # nothing is held back


def test_logits_must_be_float32():
    with pytest.raises(TypeError, match="bfloat16 must be float32"):
        sampler.sample(jnp.zeros((2, 8), jnp.bfloat16), sampler.unpack_rows(jnp.asarray(pack(SamplingParams(), [0, 1]))))


def test_a_row_of_zeros_is_a_greedy_one():
    """Padding rows are zeros, whatever their logits."""
    sampled = run(COMPANY_LOGITS, np.zeros((64, sampling_rows.NUM_COLUMNS), np.int32))
    np.testing.assert_array_equal(sampled.tokens, np.argmax(COMPANY_LOGITS, -1))
    assert not sampled.by_sort.any() and not sampled.bad_logits.any()

"""Sampling where each device has a part of the vocabulary, against one device that has all of it: equal, not nearly equal."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxserve.execution import head
from jaxserve.models.row_tiles import whole
from jaxserve.models.shards import VOCAB_BLOCK
from jaxserve.parallel.mesh import AXIS, make_mesh
from jaxserve.parallel.shard import ALONE, Shard
from jaxserve.sampling import logit_edits, sampler, scoring
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling.edit_rows import EditLayout, kinds_of, num_mask_words
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import rejection
from jaxserve.speculative.proposer import NO_DRAFT
from tests.selection import slow_unless

ROWS, LENGTH = 512, 40
VOCABULARIES = {2: 5000, 4: 1000, 8: 3001}  # by devices; the last device may have nothing at all
DRAWS = {"draw": None, "rejection": rejection.draw_token}
CASES = [(name, tp) for name in DRAWS for tp in VOCABULARIES]
FAST_SCORES = {((2, 9000), 0)}


def random_params(rng: np.random.Generator, V: int) -> SamplingParams:
    """Each option is off in about half of the rows."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    def ids(n):
        return rng.choice(V, n, replace=False).tolist()

    return SamplingParams(
        temperature=maybe(float(rng.choice([0.3, 1.0, 3.0, 30.0])), 0.0),
        top_p=maybe(float(rng.choice([1e-6, 0.3, 0.9, 0.999])), 1.0),
        min_p=maybe(float(rng.choice([0.001, 0.2])), 0.0),
        top_k=maybe(int(rng.choice([1, 3, 255, 256, 257, 700, 990])), 0),
        presence_penalty=maybe(0.7, 0.0),
        frequency_penalty=maybe(-0.4, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        logit_bias=maybe({i: float(rng.integers(-5, 6)) for i in ids(4)}, None),
        allowed_token_ids=ids(V // 3) if rng.random() < 0.1 else None,
        min_tokens=maybe(5, 0),
        max_tokens=10,
        stop_token_ids=ids(3),
    )


def random_logits(rng: np.random.Generator, V: int) -> np.ndarray:
    """f32[ROWS, V]: steep and flat rows, with many ties in some; zeros of both signs; forbidden tokens; a few bad rows."""
    logits = rng.standard_normal((ROWS, V)) * rng.choice([0.01, 1.0, 6.0], (ROWS, 1))
    logits[::3] = np.round(logits[::3])
    logits[::3][logits[::3] == 0] *= -1
    logits[1::7] = np.where(rng.random((len(logits[1::7]), V)) < 0.5, -np.inf, logits[1::7])
    logits[5], logits[6], logits[7, 9], logits[8, V - 1], logits[9] = 0.0, -np.inf, np.nan, np.inf, -0.0
    return logits.astype(np.float32)


def asked(rng: np.random.Generator, V: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed rows, edits, history) of ROWS requests that have written some tokens."""
    layout = EditLayout(LENGTH, V)
    packed = np.zeros((ROWS, sampling_rows.NUM_COLUMNS), np.int32)
    edits, history = np.zeros((ROWS, layout.num_columns), np.int32), np.zeros((ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        params, tokens = random_params(rng, V), rng.integers(0, V, LENGTH - 4).tolist()
        if rng.random() < 0.3:
            params = params.with_(bad_words_token_ids=[[tokens[-1], int(rng.integers(V))], [int(rng.integers(V))]])
        if row % 2:
            params = params.with_(logprob_token_ids=[0, V - 1, *np.random.default_rng(row).integers(0, V, 3)])
        num_prompt = int(rng.integers(1, LENGTH - 4))
        about = {"seed": int(rng.integers(2**62)), "sample_index": row % 3, "num_prompt_tokens": num_prompt}
        sampling_rows.write_row(packed, row, params, suppress_ids=frozenset(params.stop_token_ids or ()), **about)
        packed[row, sampling_rows.POSITION] = len(tokens)
        if kinds_of(params):
            made = layout.pack(row, params, tokens, num_prompt)
            history[row], edits[row] = made[1 : 1 + LENGTH], made[1 + LENGTH :]
    return packed, edits, history


def random_masks(rng: np.random.Generator, V: int) -> np.ndarray:
    """i32[ROWS, words of V], as grammars make them: half of the rows may have any token, the others few or most of them."""
    allowed = rng.random((ROWS, V)) < rng.choice([0.002, 0.1, 0.9], (ROWS, 1))
    allowed[rng.random(ROWS) < 0.5] = True
    allowed[5:10] = True  # the bad rows stay as they are
    packed = np.zeros((ROWS, 32 * num_mask_words(V)), np.uint8)
    packed[:, :V] = allowed
    return np.packbits(packed, axis=1, bitorder="little").view("<i4")


def sample(shard, draw, logits, masks, packed, edits, history, drafts, max_logprobs):
    """As a head does it."""
    rows = sampler.unpack_rows(packed)
    where = {"seq_rows": jnp.arange(ROWS), "positions": rows.position, "table": edits, "history": history}
    edit = functools.partial(logit_edits.edit, kinds=rows.edits, shard=shard, **where)
    how: dict[str, Any] = {} if draw is None else {"draw": functools.partial(draw, drafts=drafts, proposal=None)}
    how["given"] = logit_edits.given_ids(rows.edits, where["seq_rows"], edits)
    allowed = head.Masks(masks, jnp.bool_(True))
    return sampler.pack_sampled(head._sample(logits, rows, max_logprobs, allowed, edit, shard=shard, map_rows=whole, **how))


def padded(x: np.ndarray, axis: int, tp: int, fill: float, block: int = VOCAB_BLOCK) -> np.ndarray:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % (block * tp))
    return np.pad(x, widths, constant_values=fill)


def cut(logits: np.ndarray, masks: np.ndarray, tp: int) -> tuple[np.ndarray, np.ndarray]:
    """Padded so that every device has an equal part; nothing past the end is allowed."""
    return padded(logits, 1, tp, -np.inf), padded(masks, 1, tp, 0, VOCAB_BLOCK // 32)


def is_allowed(masks: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return (masks[np.arange(ROWS), tokens // 32] >> (tokens % 32)) & 1 == 1


@functools.cache
def samplers(tp: int, draw, max_logprobs: int):
    """(on one device, on tp devices)."""
    mesh = make_mesh(tp)
    assert mesh is not None
    one = jax.jit(functools.partial(sample, ALONE, draw, max_logprobs=max_logprobs))
    parts = functools.partial(sample, Shard(AXIS, tp), draw, max_logprobs=max_logprobs)
    specs = (P(None, AXIS), P(None, AXIS), *[P()] * 4)
    return one, jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda x: f"{x[1]} devices, {x[0]}")
def test_draws_are_equal(case, record_property):
    draw, tp = case
    V, kinds = VOCABULARIES[tp], 0
    for seed in range(4):
        rng = np.random.default_rng(100 * tp + seed)
        logits, about, masks = random_logits(rng, V), asked(rng, V), random_masks(rng, V)
        drafts = np.where(rng.random(ROWS) < 0.3, NO_DRAFT, np.argmax(logits, 1)).astype(np.int32)
        one, several = samplers(tp, DRAWS[draw], 0)
        expected = sampling_rows.unpack_sampled(np.asarray(one(logits, masks, *about, drafts)))
        found = sampling_rows.unpack_sampled(np.asarray(several(*cut(logits, masks, tp), *about, drafts)))
        assert is_allowed(masks, expected.tokens)[~expected.bad_logits].all() and not expected.bad_logits[10:].all()
        assert found.bad_logits.tolist() == expected.bad_logits.tolist() and expected.bad_logits[6:9].all()
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.by_sort.tolist() == expected.by_sort.tolist()
        kinds += int(expected.by_sort.sum())
    assert kinds > 50, "rows that the likeliest entries do not decide"
    record_property("counted", f"{tp} devices: {4 * ROWS} rows, {kinds} of them by bisection")


@pytest.mark.slow
@pytest.mark.parametrize("tp", VOCABULARIES)
def test_logprobs_are_equal_to_rounding(tp):
    V, rng = VOCABULARIES[tp], np.random.default_rng(tp)
    logits, about, masks = random_logits(rng, V), asked(rng, V), random_masks(rng, V)
    logits[6:9] = 1.0
    one, several = samplers(tp, None, 20)
    drafts = np.full(ROWS, NO_DRAFT, np.int32)
    expected = sampling_rows.unpack_sampled(np.asarray(one(logits, masks, *about, drafts)))
    found = sampling_rows.unpack_sampled(np.asarray(several(*cut(logits, masks, tp), *about, drafts)))
    for name in ("tokens", "ranks", "top_ids"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    for name in ("logprobs", "top_logprobs", "given"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=2e-7, atol=2e-6)


@pytest.mark.parametrize(
    "case", slow_unless(lambda x: x in FAST_SCORES, itertools.product(((2, 9000), (4, 2500), (8, 6144)), (0, 1)))
)
def test_scores_are_equal(case):
    """Of whole numbers, whose products have no roundings; in blocks with 9,000 entries, at once with fewer."""
    (tp, V), vocab_axis = case
    rng, C, D = np.random.default_rng(V), 24, 16
    x, weight = rng.integers(-3, 4, (C, D)).astype(np.float32), rng.integers(-1, 2, (V, D)).astype(np.float32)
    tokens = rng.integers(0, V, C).astype(np.int32)
    tokens[:2] = 0, V - 1
    mesh = make_mesh(tp)
    assert mesh is not None

    def score(shard, x, weight, tokens):
        scored = scoring.score(x, weight, vocab_axis, tokens, jnp.bool_(True), max_logprobs=20, vocab_size=V, shard=shard)
        return scoring.pack_scored(scored)

    parts = functools.partial(score, Shard(AXIS, tp))
    cut = P(AXIS) if vocab_axis == 0 else P(None, AXIS)
    several = jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=(P(), cut, P()), out_specs=P(), check_vma=False))
    weight = weight if vocab_axis == 0 else weight.T
    expected = sampling_rows.unpack_scored(np.asarray(jax.jit(functools.partial(score, ALONE))(x, weight, tokens)))
    found = sampling_rows.unpack_scored(np.asarray(several(x, padded(weight, vocab_axis, tp, 0.0), tokens)))
    assert (found.ranks == expected.ranks).all() and (found.top_ids == expected.top_ids).all()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=4e-6)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=4e-6)

"""Scores of tokens from hidden rows: against float64, with the vocabulary in blocks and at once."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.parallel.shard import ALONE
from jaxserve.sampling import scoring
from jaxserve.sampling.rows import ScoredRows, unpack_scored
from tests.sampling.test_sampling import likeliest_first
from tests.selection import chosen

C, D, TOP = 12, 24, 20
SIZES = [3, 300, 2048, 2049, 4096, 3 * 2048 - 1, 49152 + 5]  # of vocabularies


def rows_of(x: jax.Array, weight: jax.Array, vocab_axis: int, tokens: np.ndarray, with_top: bool) -> ScoredRows:
    def run(x, weight, tokens, with_top):
        return scoring.pack_scored(scoring.score(x, weight, vocab_axis, tokens, with_top, max_logprobs=TOP))

    return unpack_scored(np.asarray(jax.jit(run)(x, weight, tokens, with_top)))


def inputs(V: int, vocab_axis: int, dtype: str) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Small integers, whose products any order of summation gives exactly, with many ties; and 5 entries of equal weights."""
    rng = np.random.default_rng(V)
    x, weight = rng.integers(-3, 4, (C, D)), rng.integers(-1, 2, (V, D))
    weight[rng.choice(V, min(V, 5), replace=False)] = weight[0]
    tokens = rng.integers(0, V, C)
    tokens[:4] = 0, V - 1, (x[2] @ weight.T).argmax(), (x[3] @ weight.T).argmin()
    return jnp.asarray(x, dtype), jnp.asarray(weight if vocab_axis == 0 else weight.T, dtype), tokens.astype(np.int32)


@pytest.mark.parametrize(
    ("way", "vocab_axis", "V"),
    chosen(
        itertools.product(("as_on_a_cpu", "at_once"), (0, 1), SIZES),
        quick=lambda way, vocab_axis, V: V == 2049,
        in_ci=lambda way, vocab_axis, V: (way == "at_once") == (vocab_axis + SIZES.index(V)) % 2,
    ),
)
def test_scores_are_the_log_softmax(V, vocab_axis, way, monkeypatch):
    dtype = "float32" if vocab_axis else "bfloat16"
    if way == "at_once":  # as where a loop costs more than memory
        monkeypatch.setattr(scoring, "SCORED_AT_ONCE", V)
    x, weight, tokens = inputs(V, vocab_axis, dtype)
    full = np.asarray(x, np.float64) @ np.moveaxis(np.asarray(weight, np.float64), vocab_axis, 1)
    with_top, without = (rows_of(x, weight, vocab_axis, tokens, top) for top in (True, False))
    n = min(V, TOP)
    for row, logits in enumerate(full):
        want = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        order = likeliest_first(logits)
        np.testing.assert_allclose(with_top.logprobs[row], want[tokens[row]], rtol=1e-6, atol=4e-6)
        assert order[with_top.ranks[row] - 1] == tokens[row]
        assert with_top.top_ids[row].tolist() == order[:n].tolist()
        np.testing.assert_allclose(with_top.top_logprobs[row], want[order[:n]], rtol=1e-6, atol=4e-6)
    assert without.logprobs.tolist() == with_top.logprobs.tolist() and without.ranks.tolist() == with_top.ranks.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_blocks_say_what_all_logits_say_of_real_numbers(vocab_axis, dtype):
    """Of inexact logits too: values within roundings; and the rank is that of the token's own logit among the blocks', to the
    last bit, as a token is nowhere ahead of itself."""
    rng, V = np.random.default_rng(0), 3 * 2048 + 77
    x = jnp.asarray(rng.normal(size=(256, 96)), dtype)
    weight = jnp.asarray(rng.normal(size=(V, 96) if vocab_axis == 0 else (96, V)), dtype)
    best = np.asarray(x, np.float64) @ np.moveaxis(np.asarray(weight, np.float64), vocab_axis, 1)
    tokens = np.concatenate([best.argmax(-1)[:128], rng.integers(0, V, 128)]).astype(np.int32)
    arguments = x, weight, jnp.asarray(tokens), jnp.asarray(True)
    how = {"vocab_axis": vocab_axis, "n": TOP, "vocab_size": V, "shard": ALONE}
    by_block = partial(scoring._score_in_blocks, block=scoring.SCORED_AT_ONCE)
    blocks, at_once = (jax.jit(partial(f, **how))(*arguments) for f in (by_block, scoring._score_at_once))
    np.testing.assert_allclose(blocks.logprobs, at_once.logprobs, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(blocks.top_logprobs, at_once.top_logprobs, rtol=1e-5, atol=2e-5)
    assert blocks.ranks[:128].tolist() == [1] * 128
    assert blocks.top_ids[:128, 0].tolist() == tokens[:128].tolist()
    first = np.asarray(blocks.top_ids)[128:] == tokens[128:, None]
    assert (np.asarray(blocks.ranks)[128:][first.any(-1)] == 1 + first.argmax(-1)[first.any(-1)]).all()


def test_a_row_is_worth_the_same_wherever_it_stands():
    rng, V = np.random.default_rng(1), 2 * 2048 + 5
    x, weight = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in ((256, 64), (V, 64)))
    tokens, order = rng.integers(0, V, 256).astype(np.int32), rng.permutation(256)
    here, there = rows_of(x, weight, 0, tokens, True), rows_of(x[order], weight, 0, tokens[order], True)
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        assert getattr(here, name)[order].tolist() == getattr(there, name).tolist()


def test_a_bad_row_disturbs_no_other():
    x, weight, tokens = inputs(5000, 0, "float32")
    good = rows_of(x, weight, 0, tokens, True)
    bad = rows_of(x.at[3].set(jnp.nan).at[5].set(jnp.inf), weight, 0, tokens, True)
    others = [i for i in range(C) if i not in (3, 5)]
    assert np.isnan(bad.logprobs[[3, 5]]).all()
    assert bad.logprobs[others].tolist() == good.logprobs[others].tolist()
    assert bad.top_ids[others].tolist() == good.top_ids[others].tolist()

"""Drafts of a head that knows a part of the vocabulary, against the same logits scattered over all of it."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.draft_functions import choose
from jaxserve.models.draft_ids import add_draft_ids
from jaxserve.sampling.sampler import SamplingRows
from tests.selection import slow_unless

R, V, N = 24, 1000, 300


def rows(rng: np.random.Generator) -> SamplingRows:
    """Every kind of row: greedy or not, each filter on or off, some tokens suppressed."""
    pick = lambda *values: jnp.asarray(rng.choice(values, R))  # noqa: E731
    made = SamplingRows(
        temperature=pick(0.0, 0.7, 1.5).astype(jnp.float32),
        top_p=pick(1.0, 0.8).astype(jnp.float32),
        min_p=pick(0.0, 0.1).astype(jnp.float32),
        top_k=pick(0, 3, 40, 299, 300, 999).astype(jnp.int32),
        seed=jnp.asarray(rng.integers(0, 2**32, (R, 2)), jnp.uint32),
        sample_index=jnp.zeros(R, jnp.int32),
        position=jnp.asarray(rng.integers(0, 50, R), jnp.int32),
        suppress_until=pick(0, 100).astype(jnp.int32),
        suppress_ids=jnp.asarray(rng.integers(-1, V, (R, 8)), jnp.int32),
        edits=jnp.zeros(R, jnp.int32),
    )
    assert {field.name for field in fields(SamplingRows)} == set(vars(made))
    return made


@pytest.mark.parametrize("draws", slow_unless(bool, [False, True]))
def test_a_part_of_the_vocabulary_is_drawn_from_as_all_of_it_is_where_the_others_are_impossible(draws):
    rng, of_part, of_all = np.random.default_rng(5), jax.jit(choose, static_argnums=(2, 4)), jax.jit(choose, static_argnums=2)
    for _ in range(6):
        ids = np.sort(rng.choice(V, N, replace=False)).astype(np.int32)
        logits = rng.normal(0, 2, (R, N)).astype(np.float32).round(1)  # with ties
        some = rows(rng)
        likeliest = ids[logits.argmax(1)]
        some = replace(some, suppress_ids=some.suppress_ids.at[:, 0].set(jnp.asarray(likeliest)))
        everywhere = np.full((R, V), -np.inf, np.float32)
        everywhere[:, ids] = logits
        tokens, probs = of_part(jnp.asarray(logits), some, draws, jnp.asarray(ids), V)
        expected, expected_probs = of_all(jnp.asarray(everywhere), some, draws)
        np.testing.assert_array_equal(tokens, expected)
        if draws:
            np.testing.assert_array_equal(probs, expected_probs)
        assert np.isin(tokens, ids).all()


def test_the_columns_of_a_head_come_in_the_vocabularys_order():
    ids = np.array([7, 2, 9], np.int32)
    loaded = {"a/lm_head/kernel": jnp.asarray([[70.0, 20.0, 90.0]]), "fc/kernel": jnp.asarray([[1.0, 2.0, 3.0]])}
    add_draft_ids(loaded, ids)
    assert {path: np.asarray(x).tolist() for path, x in loaded.items()} == {
        "a/lm_head/kernel": [[20.0, 70.0, 90.0]],
        "fc/kernel": [[1.0, 2.0, 3.0]],
        "draft_ids": [2, 7, 9],
    }

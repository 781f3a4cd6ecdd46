"""Prompt lookup on the device against a loop in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling.rows import NUM_COLUMNS
from jaxserve.sampling.sampler import unpack_rows
from jaxserve.speculative.ngram import NgramProposer, lookup
from jaxserve.speculative.proposer import NO_DRAFT, Seen

LENGTH = 24


def slow_lookup(tokens: list[int], num_drafts: int, least: int, most: int) -> list[int]:
    """What followed the last n tokens where they stood before: the longest n first, then the most recent place."""
    for n in range(most, least - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if n <= len(tokens) and tokens[start : start + n] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for i in range(num_drafts):  # as a copy that overlaps itself goes on
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return [NO_DRAFT] * num_drafts


sequences = st.lists(st.integers(0, 3), min_size=1, max_size=LENGTH)
run = jax.jit(lookup, static_argnames=("num_drafts", "least", "most"))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(sequences, min_size=3, max_size=3), st.sampled_from([(1, 1, 1), (4, 1, 3), (3, 2, 2), (6, 2, 5), (2, 3, 30)]))
def test_lookup_is_the_plain_loop(rows, sizes):
    num_drafts, least, most = sizes
    tokens = np.full((3, LENGTH), 1, np.int32)  # what stands behind a sequence is no part of it
    for row, sequence in zip(tokens, rows, strict=True):
        row[: len(sequence)] = sequence
    lengths = np.array([len(sequence) for sequence in rows], np.int32)
    found = run(tokens, lengths, num_drafts=num_drafts, least=least, most=most)
    assert np.asarray(found).tolist() == [slow_lookup(sequence, *sizes) for sequence in rows]


@pytest.mark.parametrize(
    "tokens, drafts",
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9]),
        ([5, 6, 7, 5, 6, 8, 5, 6], [8, 5, 6]),  # the most recent of two
        ([4, 5, 6, 7, 5, 6, 8, 4, 5, 6], [7, 5, 6]),  # a longer match comes before a more recent one
        ([1, 2, 9, 1, 2, 9, 1, 2], [9, 1, 2]),  # on in cycles
        ([3, 3, 3], [3, 3, 3]),
        ([1, 2, 3, 4], [NO_DRAFT] * 3),
        ([7, 1, 7], [NO_DRAFT] * 3),  # one token alone is too short a match
        ([7], [NO_DRAFT] * 3),
    ],
)
def test_what_is_found(tokens, drafts):
    history = np.zeros((2, 12), np.int32)
    history[1, : len(tokens)] = tokens
    proposer = NgramProposer(num_drafts=3, least=2, most=3)
    rows = np.array([1, 2], np.int32)  # the second is padding
    known = np.full(2, len(tokens), np.int32)
    sampling = unpack_rows(jnp.zeros((2, NUM_COLUMNS), jnp.int32))
    seen = Seen(
        *map(jnp.asarray, (rows, known, history, np.zeros((2, 4), np.float32))),
        sampling=sampling,
        page_table=jnp.zeros((2, 1), jnp.int32),
    )
    state, found, probs = jax.jit(proposer.propose)(proposer.weights, proposer.init_state(), seen)
    assert state == () and found[0].tolist() == drafts and probs is None and not proposer.draws

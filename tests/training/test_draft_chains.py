"""Chains of drafts over whole sequences, as training has them, against torch's chains one draft at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.loading import load_model
from jaxserve.training import draft_chains
from jaxserve.training.draft_chains import States, chain_logits, chain_ranks, loss, target_states
from tests.goldens.golden import ATOL, HERE
from tests.models import test_eagle, test_medusa
from tests.models.test_eagle import target


def test_chains_of_eagle3_are_torchs():
    """Behind each start the sequence goes on with the drafts that torch made, so that each is given those before it."""
    head = test_eagle.load("eagle3")
    with np.load(HERE / "eagle3" / "expected.npz") as file:
        golden = dict(file)
    assert golden["gaps"].min() > 2 * ATOL
    num_drafts, ids = golden["drafts"].shape[1], np.asarray(draft_chains.known_ids(head))
    chains = jax.jit(lambda tokens: chain_logits(head, target_states(target(), head, tokens), num_drafts))
    for start, drafts in zip(golden["starts"].tolist(), golden["drafts"], strict=True):
        tokens = [*golden["tokens"][: start + 1], *drafts]
        logits = chains(jnp.asarray([tokens + [0] * (30 - len(tokens))]))
        assert [int(ids[x[0, start - 1].argmax()]) for x in logits] == drafts.tolist(), start


def test_chains_of_medusa_are_torchs():
    heads = test_medusa.load()
    with np.load(test_medusa.FOLDER / "expected.npz") as expected:
        states = target_states(target(), heads, jnp.asarray(expected["tokens"])[None])
        np.testing.assert_allclose(np.stack(chain_logits(heads, states, 3))[:, 0], expected["logits"], atol=ATOL, rtol=0)


def as_states(heads, num_tokens: int, vocab_size: int) -> States:
    rng = np.random.default_rng(0)
    read = jnp.asarray(rng.normal(size=(2, num_tokens, heads.config.hidden_size)), jnp.float32)
    return States(read, read, jnp.asarray(rng.normal(size=(2, num_tokens, vocab_size)), jnp.float32))


def test_the_loss_and_ranks_are_counted_over_answers_alone():
    """Against loops over sequences, places and drafts, with the indices written out."""
    heads, S, K = test_medusa.load(), 10, 3
    states = as_states(heads, S, heads.config.vocab_size)
    begins, ends = np.array([3, 5]), np.array([8, 10])
    logits = [np.asarray(x, np.float64) for x in chain_logits(heads, states, K)]
    tokens = np.zeros((2, S), np.int64)
    rng = np.random.default_rng(1)
    for b in range(2):  # the first two drafts behind some places are right
        for t in range(S):
            tokens[b, t] = logits[rng.integers(2)][b, max(t - 2, 0)].argmax()
    total, expected = 0.0, {}
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()  # noqa: E731
    for j in range(K):
        each = [
            -(softmax(np.asarray(states.logits[b, t], np.float64)) * np.log(softmax(logits[j][b, t - 1 - j]))).sum()
            for b in range(2)
            for t in range(begins[b] - 1, ends[b] - 1)
            if t - 1 - j >= 0
        ]
        total += 0.8**j * np.mean(each)
    for b in range(2):
        for last in range(begins[b], ends[b] - K):  # a chain behind each token of the answer that K tokens follow
            orders = [np.argsort(-logits[j][b, last - 1]).tolist() for j in range(K)]
            expected[b, last - 1] = [orders[j].index(tokens[b, last + 1 + j]) for j in range(K)]
    batch = jnp.asarray(tokens), jnp.asarray(begins), jnp.asarray(ends)
    np.testing.assert_allclose(loss(heads, states, *batch, K), total, rtol=1e-5)
    ranks, chains = chain_ranks(heads, states, *batch, K)
    assert {(b, t): ranks[b, t].tolist() for b, t in np.argwhere(chains).tolist()} == expected
    assert 0 < sum(found[0] == 0 for found in expected.values()) < len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("begins", [(0, 1), (2, 6)])
def test_the_loss_of_a_head_that_knows_a_part_of_the_vocabulary(begins):
    """Against loops as above: every draft counts whose token is learnt and known, and whose chain begins in the sequence."""
    head, ends, rng = test_eagle.load("eagle3"), (12, 9), np.random.default_rng(2)
    tokens, ids = rng.integers(0, target().config.vocab_size, (2, 12)), np.asarray(draft_chains.known_ids(head))
    tokens = np.where(rng.random((2, 12)) < 0.6, ids[rng.integers(0, len(ids), (2, 12))], tokens)
    states = target_states(target(), head, jnp.asarray(tokens))
    logits = [np.asarray(x, np.float64) for x in chain_logits(head, states, 3)]
    wanted, total = np.asarray(states.logits, np.float64), 0.0
    for j in range(3):
        each = [
            -(np.exp(log_softmax(wanted[b, chain + 1 + j])) * log_softmax(logits[j][b, chain])).sum()
            for b in range(2)
            for chain in range(12)
            if begins[b] <= chain + 2 + j < ends[b] and tokens[b, chain + 2 + j] in ids
        ]
        assert 4 < len(each) < sum(ends) - sum(begins)
        total += 0.8**j * np.mean(each)
    ours = loss(head, states, jnp.asarray(tokens), jnp.asarray(begins), jnp.asarray(ends), 3)
    np.testing.assert_allclose(ours, total, rtol=1e-5)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_windows", "qwen3_moe"])
def test_sequences_of_a_batch_know_nothing_of_each_other(name):
    model = load_model(HERE / name, skip_tokenizer_init=True).module
    tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, (3, 20))
    head = draft_chains.new_eagle3(model, np.arange(30), 0, tokens[0].tolist())
    chains = lambda tokens: np.stack(chain_logits(head, target_states(model, head, jnp.asarray(tokens)), 3))  # noqa: E731
    together = chains(tokens)
    for b in range(3):
        alone, reachable = chains(tokens[b : b + 1])[:, 0], 20 - 3
        np.testing.assert_allclose(together[:, b, :reachable], alone[:, :reachable], atol=1e-4, rtol=0)
    assert np.abs(together[:, 0] - together[:, 1]).max() > 0.1


@pytest.mark.slow
def test_ranks_of_a_head_that_knows_a_part_of_the_vocabulary():
    head, tokens = test_eagle.load("eagle3"), np.arange(20)[None] % 7
    ids, states = np.asarray(draft_chains.known_ids(head)), target_states(target(), head, jnp.asarray(tokens))
    logits = [np.asarray(x)[0] for x in chain_logits(head, states, 2)]
    ranks, chains = chain_ranks(head, states, jnp.asarray(tokens), jnp.array([4]), jnp.array([18]), 2)
    places, knew = np.flatnonzero(chains[0]).tolist(), set()
    assert places == [*range(3, 15)], "behind which are a token and two drafts of the answer"
    for place in places:
        for j in range(2):
            wanted = tokens[0, place + 2 + j]
            order = ids[np.argsort(-logits[j][place])].tolist()
            knew.add(wanted in order)
            assert ranks[0, place, j] == (order.index(wanted) if wanted in order else len(ids))
    assert knew == {True, False}

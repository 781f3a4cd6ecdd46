"""Rejection sampling against the target's own distribution in float64, and against rules that are almost right."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling import edit_rows, logit_edits, sampler
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling.edit_rows import EditLayout
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import rejection, verify
from jaxserve.speculative.proposer import NO_DRAFT
from tests.sampling.test_sampling import chi_square_p, pack, reference_probs, reference_uniform
from tests.selection import chosen, slow_unless

V, DRAFTS, LENGTH = 6, 2, 3  # a vocabulary of which every sequence of LENGTH tokens can be listed
N = 4096  # sequences of each test
PROMPT = [1, 4, 1, 2, 0, 5, 3]  # its length is that of test_sampling's
rng = np.random.default_rng(0)
LOGITS = (rng.normal(size=(V, V)) * 1.2).astype(np.float32)  # after each token
WRONG = rng.dirichlet(np.full(V, 0.7), size=V)

PARAMS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"temperature": 1.4, "top_p": 0.8},
    "top_k_min_p": {"top_k": 4, "min_p": 0.05},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 1.0, "repetition_penalty": 1.7},
    "penalties_top_p": {"frequency_penalty": -0.7, "repetition_penalty": 1.4, "top_p": 0.7, "temperature": 1.2},
}
PROPOSALS = {  # f64[V, V]: what follows each token
    "uniform": np.full((V, V), 1 / V),
    "wrong": WRONG,
    "sharp": 0.98 * np.roll(np.eye(V), 2, axis=1) + 0.02 / V,
    "good": 0.9 * np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True) + 0.1 * WRONG,
    "half": np.where(np.arange(V) % 2, 2 / V, 0.0) * np.ones((V, 1)),  # nothing of half the vocabulary
    "point": np.roll(np.eye(V), 2, axis=1),
}


def not_renormalised(weights, proposed, shard):
    """The residual as it stands, in which what is missing falls to the last token."""
    residual = jnp.maximum(weights - proposed, 0)
    return residual.at[:, 0, V - 1].add(weights.sum((1, 2), dtype=jnp.int64) - residual.sum((1, 2)))


RULES = {  # what replaces functions of the module
    "right": {},
    "every draft stands": {"_stands": lambda weight, proposed, at: at < 1},
    "the target's weight alone decides": {"_stands": lambda weight, proposed, at: at * 2.0**30 < weight},
    "rejected: from the target": {"_residual": lambda weights, proposed, shard: weights},
    "rejected: not renormalised": {"_residual": not_renormalised},
    "rejected: the difference's size": {"_residual": lambda weights, proposed, shard: jnp.abs(weights - proposed)},
    "one random number for both": {"ACCEPTANCE_STREAM": None},
}


def verify_step(logits, rows, drafts, proposal, **options):
    """What a head does with the rows of sequences that have drafts: logits f32[S * (k + 1), V], drafts i32[S, k], proposal
    f32[S, k, V] or None. Returns (how many drafts of each sequence stand i32[S], what was sampled in each row)."""
    S, k = drafts.shape
    seq_rows = jnp.arange(S * (k + 1), dtype=jnp.int32) // (k + 1)
    tokens = jnp.pad(drafts, ((0, 0), (1, 0))).reshape(-1)  # of each row's input
    is_draft = verify.follows(seq_rows)
    if proposal is not None:
        proposal = jnp.pad(proposal, ((0, 0), (0, 1), (0, 0))).reshape(logits.shape)
    draw = functools.partial(rejection.draw_token, drafts=verify.drafts_after(is_draft, tokens), proposal=proposal)
    sampled = sampler.sample(logits, rows, draw=draw, **options)
    delivered = verify.delivered(is_draft, tokens, sampled.tokens, sampled.bad_logits)
    return delivered.reshape(S, k + 1).sum(1) - 1, sampled


@functools.cache
def program(rule, with_proposal):
    """verify_step with the penalties of a step, compiled under a rule."""

    @jax.jit
    def run(logits, packed, drafts, proposal, table, history):
        rows = sampler.unpack_rows(packed)
        seqs = jnp.arange(len(packed), dtype=jnp.int32) // (drafts.shape[1] + 1)
        edit = functools.partial(
            logit_edits._penalise,
            wanted=rows.edits != 0,
            rows=table[seqs],
            seq_rows=seqs,
            positions=rows.position,
            history=history,
        )
        accepted, sampled = verify_step(logits, rows, drafts, proposal if with_proposal else None, edit=edit)
        return accepted, sampled.tokens, sampled.bad_logits

    def patched(*args):
        with pytest.MonkeyPatch.context() as patch:  # traced at the first call
            for name, value in RULES[rule].items():
                patch.setattr(rejection, name, value)
            return [np.asarray(x) for x in run(*args)]

    return patched


def generate(params, proposal, *, rule="right", seed=0):
    """LENGTH tokens of N sequences in speculative steps of 0 to DRAFTS drafts, as an engine would: what a step rejected is drawn
    anew by the next. Returns (tokens i64[N, LENGTH], which first drafts were accepted, of those there were)."""
    rng, matrix = np.random.default_rng(seed), PROPOSALS[proposal]
    run = program(rule, proposal != "point")
    packed = np.repeat(pack(params, seed * N + np.arange(N)), DRAFTS + 1, axis=0)
    history = np.zeros((N, len(PROMPT) + LENGTH + DRAFTS + 1), np.int32)
    layout = EditLayout(history.shape[1], V)
    edits = layout.pack(0, params, PROMPT, len(PROMPT))[1 + layout.max_model_len :]
    table = np.repeat(edits[None, : edit_rows.BIAS_IDS], N, axis=0)
    history[:, : len(PROMPT)] = PROMPT
    lengths, seqs, first = np.full(N, len(PROMPT)), np.arange(N), []
    while (lengths < len(PROMPT) + LENGTH).any():
        q = np.zeros((N, DRAFTS, V), np.float32)
        drafts = np.zeros((N, DRAFTS), np.int32)
        for j in range(DRAFTS):
            q[:, j] = matrix[history[seqs, lengths + j - 1]]
            cdf = np.cumsum(q[:, j], 1, dtype=np.float64)
            drafts[:, j] = (cdf < rng.random((N, 1)) * cdf[:, -1:]).sum(1)
            history[seqs, lengths + j] = drafts[:, j]
        before = history[seqs[:, None], lengths[:, None] + np.arange(DRAFTS + 1) - 1]
        num_drafts = rng.integers(DRAFTS + 1, size=(N, 1))
        drafts[np.arange(DRAFTS) >= num_drafts] = NO_DRAFT
        packed[:, sampling_rows.POSITION] = (lengths[:, None] + np.arange(DRAFTS + 1)).reshape(-1)
        accepted, tokens, bad = run(LOGITS[before].reshape(-1, V), packed, drafts, q, table, history)
        assert not bad.any() and (accepted <= num_drafts[:, 0]).all()
        tokens = tokens.reshape(N, -1)
        for j in range(DRAFTS + 1):
            grown = (j <= accepted) & (lengths + j < history.shape[1])
            history[seqs[grown], lengths[grown] + j] = tokens[grown, j]
        if not first:
            first = list(accepted[num_drafts[:, 0] > 0] > 0)
        lengths = np.minimum(lengths + 1 + accepted, len(PROMPT) + LENGTH)
    return history[:, len(PROMPT) : len(PROMPT) + LENGTH], np.array(first)


def next_probs(prefix, params):
    """f64[V]: what the target says after prompt + prefix."""
    x = LOGITS[(PROMPT + list(prefix))[-1]].astype(np.float64)
    in_output = np.bincount(np.array(prefix, int), minlength=V)
    seen = in_output + np.bincount(PROMPT, minlength=V) > 0
    x = np.where(seen, np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
    x = x - params.frequency_penalty * in_output - params.presence_penalty * (in_output > 0)
    return reference_probs(x, params)


def fit(tokens, params):
    """How well the joint of a sequence's first tokens fits the target's: a p-value."""
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        probs = {(*prefix, t): p * q for prefix, p in probs.items() for t, q in enumerate(next_probs(prefix, params))}
    expected = np.array([probs[sequence] for sequence in itertools.product(range(V), repeat=LENGTH)])
    counts = np.bincount(np.ravel_multi_index(tuple(tokens.T), (V,) * LENGTH), minlength=V**LENGTH)
    assert not counts[expected == 0].any(), "a sequence that the target forbids"
    return chi_square_p(counts, expected * len(tokens))


@pytest.mark.parametrize(
    ("name", "proposal"),
    chosen(  # in CI each parameter with two proposals and each proposal with two parameters, beside the quick ones
        itertools.product(PARAMS, PROPOSALS),
        quick=lambda name, proposal: name == "penalties_top_p" and proposal in ("uniform", "half"),
        in_ci=lambda name, proposal: (list(PARAMS).index(name) + list(PROPOSALS).index(proposal)) % 3 == 0,
    ),
)
def test_sequences_are_distributed_as_the_targets_own(name, proposal):
    params = SamplingParams(**PARAMS[name])
    tokens, accepted = generate(params, proposal, seed=list(PARAMS).index(name))
    assert fit(tokens, params) > 1e-3
    possible = np.minimum(next_probs((), params), PROPOSALS[proposal][PROMPT[-1]]).sum()  # no rule can accept more often
    assert abs(accepted.mean() - possible) < 4 * np.sqrt(possible * (1 - possible) / len(accepted)) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "right"])
def test_a_wrong_rule_is_found_out(rule):
    params = SamplingParams(**PARAMS["penalties"])
    tokens, _ = generate(params, "wrong", rule=rule)
    with pytest.raises(AssertionError):
        assert fit(tokens, params) > 1e-6


def rows_of(params, seeds, k):
    packed = np.repeat(pack(params, seeds), k + 1, axis=0)
    packed[:, sampling_rows.POSITION] = np.tile(len(PROMPT) + np.arange(k + 1), len(seeds))
    return packed


@functools.partial(jax.jit, static_argnames="with_proposal")
def run(logits, packed, drafts, proposal, with_proposal=True):
    rows = sampler.unpack_rows(packed)
    accepted, sampled = verify_step(logits, rows, drafts, proposal if with_proposal else None)
    return accepted, sampled.tokens.reshape(len(drafts), -1), sampled.bad_logits


LARGE, SEQS = 300, 32  # a vocabulary of several blocks


@pytest.fixture(scope="module")
def large():
    """logits f32[SEQS, 4, LARGE], drafts i32[SEQS, 3], proposal f32[SEQS, 3, LARGE] from which they were drawn."""
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(SEQS, 4, LARGE)) * 2).astype(np.float32)
    x = logits[:, :3] + rng.normal(size=(SEQS, 3, LARGE)) * 0.7
    proposal = (np.exp(x) / np.exp(x).sum(-1, keepdims=True)).astype(np.float32)
    drafts = np.array([[rng.choice(LARGE, p=q / q.sum()) for q in row] for row in proposal.astype(np.float64)], np.int32)
    return logits, drafts, proposal


PARAMS_LARGE = SamplingParams(temperature=0.8, top_p=0.95)


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "drawn", ["drawn", "point"]))
def test_each_row_is_algorithm_1_on_its_own_random_numbers(large, kind):
    """Written out in float64; what lies within 1e-6 of an edge may fall on either side of it."""
    logits, drafts, proposal = large
    seeds = 100 + np.arange(SEQS)
    args = logits.reshape(-1, LARGE), rows_of(PARAMS_LARGE, seeds, 3), drafts, proposal
    accepted, tokens, *_ = (np.asarray(x) for x in run(*args, with_proposal=kind == "drawn")[:2])
    num_close = 0
    for s, j in itertools.product(range(SEQS), range(4)):
        p = reference_probs(logits[s, j], PARAMS_LARGE)
        u = reference_uniform(int(seeds[s]), 0, len(PROMPT) + j)
        draft, q = (drafts[s, j], np.eye(LARGE)[drafts[s, j]]) if j < 3 else (NO_DRAFT, np.zeros(LARGE))
        if kind == "drawn" and j < 3:
            q = proposal[s, j].astype(np.float64)
        share = 0.0 if j == 3 else p[draft] / q[draft]
        at = uniform_of_acceptance(int(seeds[s]), len(PROMPT) + j)
        residual = np.maximum(p - q, 0)
        cdf = np.cumsum(residual / residual.sum())
        wanted = {int(np.searchsorted(cdf, u + d, side="right")) for d in (-1e-6, 0, 1e-6)}
        if abs(at - share) < 1e-6:
            num_close += 1
            wanted.add(int(draft))
        elif at < share:
            wanted = {int(draft)}
        assert tokens[s, j] in wanted, (s, j)
    assert num_close < 3
    equal = tokens[:, :3] == drafts
    assert accepted.tolist() == [int(np.argmin([*row, False])) for row in equal]
    assert 0.03 < equal.mean() < 0.9 and len(set(accepted.tolist())) > 1


def uniform_of_acceptance(seed, position):
    with jax.enable_x64(True):
        key = jax.random.key(np.uint64(seed), impl="threefry2x32")
    for data in (0, position, 1):  # sample index, position, the stream
        key = jax.random.fold_in(key, data)
    high, low = (int(b) for b in np.asarray(jax.random.bits(key, (2,), jnp.uint32)))
    return (high * 2**32 + low) / 2**64


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_batch_nor_on_padding(large):
    logits, drafts, proposal = large
    packed = rows_of(PARAMS_LARGE, np.arange(SEQS), 3)
    whole = [np.asarray(x) for x in run(logits.reshape(-1, LARGE), packed, drafts, proposal)[:2]]
    order = np.random.default_rng(1).permutation(SEQS)[:5]
    few = run(logits[order].reshape(-1, LARGE), packed.reshape(SEQS, 4, -1)[order].reshape(20, -1), drafts[order], proposal[order])
    np.testing.assert_array_equal(few[0], whole[0][order])
    np.testing.assert_array_equal(few[1], whole[1][order])

    def wider(x, fill):
        return np.pad(x, ((0, 0), (0, 2), (0, 0))[: x.ndim], constant_values=fill)

    args = (
        wider(logits, 0).reshape(-1, LARGE),
        rows_of(PARAMS_LARGE, np.arange(SEQS), 5),
        wider(drafts, NO_DRAFT),
        wider(proposal, 0),
    )
    padded = run(*args)
    np.testing.assert_array_equal(padded[0], whole[0])
    np.testing.assert_array_equal(np.asarray(padded[1])[:, :4], whole[1])


def test_without_drafts_it_is_the_sampler(large):
    logits, drafts, proposal = large
    packed = rows_of(PARAMS_LARGE, np.arange(SEQS), 3)
    accepted, tokens, _ = run(logits.reshape(-1, LARGE), packed, np.full_like(drafts, NO_DRAFT), proposal)
    assert not np.asarray(accepted).any()
    plain = jax.jit(lambda logits, packed: sampler.sample(logits, sampler.unpack_rows(packed)).tokens)
    np.testing.assert_array_equal(np.asarray(tokens).reshape(-1), plain(logits.reshape(-1, LARGE), packed))


@pytest.mark.parametrize("kind", ["drawn", "point"])
def test_greedy_accepts_what_equals_the_argmax(large, kind):
    logits, drafts, proposal = large
    best = logits.argmax(-1)
    drafts = np.where(np.random.default_rng(4).random(drafts.shape) < 0.6, best[:, :3], drafts).astype(np.int32)
    packed = rows_of(SamplingParams(temperature=0), np.arange(SEQS), 3)
    accepted, tokens, _ = run(logits.reshape(-1, LARGE), packed, drafts, proposal, with_proposal=kind == "drawn")
    np.testing.assert_array_equal(tokens, best)
    assert np.asarray(accepted).tolist() == [int(np.argmin([*row, False])) for row in drafts == best[:, :3]]
    assert set(np.asarray(accepted).tolist()) == {0, 1, 2, 3}

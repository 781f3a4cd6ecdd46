"""Penalties, bias, allowed ids and bad words against references in numpy, one token at a time, and against statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.row_tiles import RowTiles, whole
from jaxserve.sampling import logit_edits, sampler
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling.edit_rows import EditLayout, kinds_of
from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, SamplingParams
from tests.sampling.test_sampling import chi_square_p, likeliest_first

SEQS, LEN = 24, 2600  # three spans of the history's count
JUNK = 987654321  # what no request wrote


def reference(logits, params, prompt, output):
    """f64[V]: vLLM's order, each rule as its documentation words it."""
    x = np.asarray(logits, np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for word in params.bad_words_token_ids or ():
        if (output + [word[-1]])[-len(word) :] == list(word):
            x[word[-1]] = -np.inf
    if params.allowed_token_ids is not None:
        x[[i for i in range(x.size) if i not in params.allowed_token_ids]] = -np.inf
    return x


@functools.partial(jax.jit, static_argnames=("max_logprobs", "edited"))
def _run(logits, packed, seq_rows, table, history, max_logprobs, edited):
    rows = sampler.unpack_rows(packed)
    where = {"seq_rows": seq_rows, "positions": rows.position}
    edit = functools.partial(logit_edits.edit, kinds=rows.edits, table=table, history=history, **where)
    given = logit_edits.given_ids(rows.edits, seq_rows, table)
    sampled = sampler.sample(logits, rows, max_logprobs=max_logprobs, given=given, edit=edit if edited else None)
    return sampler.pack_sampled(sampled), edit(logits), logit_edits.remember(history, seq_rows, rows.position, sampled.tokens)


def run(logits, asks, seq_rows, *, history_len=LEN, max_logprobs=0, edited=True):
    """asks: (params, prompt, output, seed) of each row. Returns (SampledRows, edited logits, the history after)."""
    R, V = logits.shape
    layout = EditLayout(history_len, V)
    table = np.full((SEQS, layout.num_columns), JUNK, np.int32)
    history = np.full((SEQS, history_len), 1, np.int32)  # a valid id: past the position it must not count
    packed = np.zeros((R, sampling_rows.NUM_COLUMNS), np.int32)
    for i, (params, prompt, output, seed) in enumerate(asks):
        sampling_rows.write_row(packed, i, params, seed=seed, sample_index=0, num_prompt_tokens=len(prompt))
        packed[i, sampling_rows.POSITION] += len(output)
        if kinds_of(params):
            row = layout.pack(int(seq_rows[i]), params, prompt + output, len(prompt))
            history[row[0]], table[row[0]] = row[1 : 1 + history_len], row[1 + history_len :]
            history[row[0], len(prompt) + len(output) :] = 1
    out = _run(jnp.asarray(logits, jnp.float32), packed, np.asarray(seq_rows, np.int32), table, history, max_logprobs, edited)
    sampled, edited_logits, after = map(np.asarray, out)
    return sampling_rows.unpack_sampled(sampled), edited_logits, after


ONE_EACH = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_one": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.5},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": -0.3, "presence_penalty": 1.1},
    "bias": {"logit_bias": {0: 3.5, 7: -100.0, 39: 100.0}},
    "allowed": {"allowed_token_ids": [3, 31, 32, 39, 3]},
    "bad_word": {"bad_words_token_ids": [[5]]},
    "bad_words": {"bad_words_token_ids": [[9], [4, 5], [1, 2, 3], [2, 2, 2, 2]]},
    "nothing": {},
}
ALL = {
    **ONE_EACH["penalties"],
    "logit_bias": {2: 1.0, 5: -2.0},
    "allowed_token_ids": list(range(1, 30)),
    "bad_words_token_ids": [[1, 2], [8]],
}
V = 40


def random_asks(rng, num_rows, *, longest=60, **more):
    asks = []
    settings = [*ONE_EACH.values(), ALL]
    for i in range(num_rows):
        params = SamplingParams(**{"temperature": 0.0, **settings[i % len(settings)], **more})
        prompt = rng.integers(0, 6, int(rng.integers(1, longest))).tolist()  # few ids: they repeat, and words occur
        output = rng.integers(0, 6, int(rng.integers(0, longest))).tolist()
        asks.append((params, prompt, output, i))
    return asks


@pytest.mark.parametrize("longest", [6, 60, 1250])
def test_edited_logits_are_the_reference(longest):
    """Rows of all kinds together, at sequence rows in any order, some without edits; and greedy tokens are the best."""
    rng = np.random.default_rng(longest)
    bad_words_hit = 0
    for _ in range(4):
        logits = rng.normal(size=(22, V)).astype(np.float32) * 3
        asks, seq_rows = random_asks(rng, 22, longest=longest), rng.permutation(SEQS)[:22]
        sampled, edited, after = run(logits, asks, seq_rows)
        for i, (params, prompt, output, _) in enumerate(asks):
            want = reference(logits[i], params, prompt, output)
            np.testing.assert_allclose(edited[i], want, rtol=1e-6, atol=4e-6, err_msg=str(params))
            assert sampled.tokens[i] == likeliest_first(want)[0]
            assert after[seq_rows[i], len(prompt) + len(output)] == sampled.tokens[i]
            words = params.bad_words_token_ids or ()
            bad_words_hit += any(len(w) > 1 for w in words) and bool(np.isneginf(want[[w[-1] for w in words if len(w) > 1]]).any())
    assert bad_words_hit > 0


def test_a_bad_word_may_begin_in_the_output_only():
    """Its first tokens at the prompt's end forbid nothing, as in vLLM."""
    params = SamplingParams(temperature=0, bad_words_token_ids=[[1, 2, 3]])
    logits = np.zeros((3, V), np.float32)
    logits[:, 3] = 5.0
    asks = [(params, [1, 2], [], 0), (params, [1], [2], 0), (params, [9], [1, 2], 0)]
    assert run(logits, asks, [4, 0, 2])[0].tokens.tolist() == [3, 3, 0]


def test_caps_hold_what_they_say():
    """The most that may be asked for reaches the device whole. Log-probabilities of given ids are those before any edit."""
    rng = np.random.default_rng(1)
    bias = {int(i): float(i % 7 - 3) for i in rng.permutation(1000)[:MAX_LOGIT_BIAS]}
    words = [rng.integers(0, 1000, MAX_BAD_WORD_TOKENS).tolist() for _ in range(MAX_BAD_WORDS)]
    given = rng.permutation(1000)[:MAX_LOGPROB_TOKEN_IDS]
    params = SamplingParams(temperature=0, logit_bias=bias, bad_words_token_ids=words, logprob_token_ids=given)  # pyright: ignore[reportArgumentType]
    output = words[-1][:-1]
    logits = rng.normal(size=(1, 1000)).astype(np.float32)
    sampled, edited, _ = run(logits, [(params, [1], output, 0)], [3], history_len=64, max_logprobs=2)
    raw = logits[0].astype(np.float64)
    assert sampled.given is not None
    np.testing.assert_allclose(sampled.given[0], raw[given] - np.log(np.exp(raw).sum()), rtol=1e-6, atol=4e-6)
    np.testing.assert_allclose(edited[0], reference(logits[0], params, [1], output), rtol=1e-6)
    assert np.flatnonzero(np.isneginf(edited[0])).tolist() == [words[-1][-1]]


@pytest.mark.slow
def test_frequencies_with_everything_together():
    """4000 draws under penalties, bias, masks and filters, against the float64 distribution."""
    n, rng = 4000, np.random.default_rng(0)
    logits = np.broadcast_to(rng.normal(size=V).astype(np.float32) * 1.5, (n, V))
    filters = {"temperature": 1.4, "min_p": 0.02, "top_k": 18, "top_p": 0.95}
    params, prompt, output = SamplingParams(**ALL, **filters), [1, 2, 3, 20, 21], [2, 2, 5, 22, 1]
    sampled = run(logits, [(params, prompt, output, seed) for seed in range(n)], np.zeros(n, int))[0]
    x = reference(logits[0], params, prompt, output)
    assert np.isneginf(x).sum() == V - 29 + 2  # token 2 would complete a bad word, 8 is one
    p = np.exp((x - x.max()) / 1.4)
    p[p < 0.02] = 0
    p[likeliest_first(x)[18:]] = 0
    p /= p.sum()
    order = likeliest_first(x)
    p[order[np.flatnonzero(np.cumsum(p[order]) >= 0.95)[0] + 1 :]] = 0
    p /= p.sum()
    plain = np.exp(logits[0] / 1.4) / np.exp(logits[0] / 1.4).sum()
    counts = np.bincount(sampled.tokens, minlength=V)
    assert not counts[p == 0].any() and counts[p * n > 20].all()
    assert chi_square_p(counts, p * n) > 1e-3 > chi_square_p(counts, plain * n)


@pytest.mark.slow
def test_a_token_does_not_depend_on_the_company():
    """Bit for bit: other rows' edits, the number of rows, where a row lies, and whether there are edits at all."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(22, V)).astype(np.float32) * 2
    asks = random_asks(rng, 22, temperature=1.0)
    together, edited, _ = run(logits, asks, np.arange(22))
    for rows in ([0], [10], [4, 9, 10, 15, 21], list(range(22))[::-1]):
        some, some_edited, _ = run(logits[rows], [asks[i] for i in rows], rng.permutation(SEQS)[: len(rows)])
        np.testing.assert_array_equal(some.tokens, together.tokens[rows])
        np.testing.assert_array_equal(some_edited, edited[rows])
    plain = [i for i, (params, *_) in enumerate(asks) if not kinds_of(params)]
    alone = run(logits[plain], [asks[i] for i in plain], plain, edited=False)[0]
    np.testing.assert_array_equal(alone.tokens, together.tokens[plain])


def bits_by_rows(map_rows):
    """{number of rows: f32[rows, 97]} of penalised and biased logits, of the first rows of one batch."""
    rng, most, vocab = np.random.default_rng(5), 40, 97
    layout = EditLayout(64, vocab)
    table, history = np.zeros((most, layout.num_columns), np.int32), np.zeros((most, 64), np.int32)
    for i in range(most):
        params = SamplingParams(
            temperature=0,
            logit_bias={3: 0.7},
            repetition_penalty=1.2 + i / 97,
            frequency_penalty=i / 71 - 0.3,
            presence_penalty=1.1,
        )
        row = layout.pack(i, params, rng.integers(0, 30, 40).tolist(), 10)
        history[i], table[i] = row[1:65], row[65:]
    logits = rng.normal(size=(most, vocab)).astype(np.float32) * 3
    kinds, positions = np.full(most, kinds_of(params), np.int32), np.full(most, 40, np.int32)
    edit = functools.partial(logit_edits.edit, table=jnp.asarray(table), history=jnp.asarray(history), map_rows=map_rows)
    run, seq_rows = jax.jit(lambda *rows: edit(*rows)), np.arange(most, dtype=np.int32)
    return {n: np.asarray(run(logits[:n], kinds[:n], seq_rows[:n], positions[:n])) for n in (1, 2, 8, 16, 17, most)}


def rows_whose_bits_follow_their_number(found):
    return [n for n, rows in found.items() if (rows != found[max(found)][:n]).any()]


@pytest.fixture
def rounded_by_shape(monkeypatch):
    """Penalties whose last bits follow how many rows are computed together, as a compiler may make them."""
    right = logit_edits._penalise_counted
    monkeypatch.setattr(logit_edits, "_penalise_counted", lambda x, *rest: right(x * (1 + x.shape[0] * 2.0**-20), *rest))


@pytest.mark.slow
def test_bits_of_penalties_do_not_depend_on_the_number_of_rows():
    found = bits_by_rows(RowTiles(16))
    assert rows_whose_bits_follow_their_number(found) == []
    np.testing.assert_allclose(found[40], bits_by_rows(whole)[40], rtol=1e-6)


@pytest.mark.slow
def test_penalties_are_computed_in_tiles_alone(rounded_by_shape):
    """However they are rounded; and all rows at once they are not equal, or the test could not fail."""
    assert rows_whose_bits_follow_their_number(bits_by_rows(RowTiles(16))) == []
    assert rows_whose_bits_follow_their_number(bits_by_rows(whole)) == [1, 2, 8, 16, 17]


def test_logprobs_are_of_the_raw_logits():
    rng = np.random.default_rng(4)
    logits, asks = rng.normal(size=(22, V)).astype(np.float32), random_asks(rng, 22)
    sampled = run(logits, asks, np.arange(22), max_logprobs=3)[0]
    x = logits.astype(np.float64)
    want = x - np.log(np.exp(x).sum(-1, keepdims=True))
    assert sampled.logprobs is not None and sampled.top_ids is not None
    np.testing.assert_allclose(sampled.logprobs, want[np.arange(22), sampled.tokens], rtol=1e-6, atol=4e-6)
    assert sampled.top_ids[:, 0].tolist() == logits.argmax(-1).tolist()


@pytest.mark.slow
def test_forbidding_every_token_is_flagged():
    params = SamplingParams(allowed_token_ids=[3, 4], bad_words_token_ids=[[3], [4]])
    sampled = run(np.zeros((2, V), np.float32), [(params, [1], [], 0), (SamplingParams(), [1], [], 0)], [0, 1])[0]
    assert sampled.bad_logits.tolist() == [True, False]


def test_padding_rows_write_no_history():
    params = SamplingParams(temperature=0)
    before = run(np.zeros((2, V), np.float32), [(params, [1], [], 0)] * 2, [SEQS, SEQS + 5])[2]
    assert (before == 1).all()

"""Beam search against transformers' beams, against all sequences there are, and through `LLM`."""

import itertools
import math

import numpy as np
import pytest

from jaxserve import LLM, BeamSearchParams, BucketPlan
from jaxserve.engine.beam_search import BeamSearchSequence, score_of, search
from jaxserve.outputs import Logprob
from jaxserve.sampling_params import MAX_LOGPROBS
from tests import alphabet_model
from tests.alphabet_model import EOS, SPECIALS, ids

V, END = 4, 3


def table_model(seed: int):
    """A model of the last two tokens: f64[V, V, V] log-probabilities."""
    x = np.random.default_rng(seed).normal(size=(V, V, V)) * 1.5
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def expand_by(table, num_candidates):
    def expand(beams):
        rows = [table[tokens[-2], tokens[-1]] for _, tokens in beams]
        best = [np.argsort(-row, stable=True)[:num_candidates].tolist() for row in rows]
        return [{t: Logprob(float(row[t]), r + 1) for r, t in enumerate(top)} for row, top in zip(rows, best, strict=True)]

    return expand


def logprob_of(table, tokens):
    return sum(table[a, b, c] for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
def test_a_search_wide_enough_finds_the_best_of_all_sequences(length_penalty):
    """With a beam for every sequence of 3 tokens, nothing is lost: all sequences that end by END or at the length, ranked."""
    for seed in range(5):
        table, prompt = table_model(seed), [0, 1]
        params = BeamSearchParams(beam_width=10, max_tokens=3, length_penalty=length_penalty)
        every = []
        for n in (1, 2, 3):
            for tokens in itertools.product(range(V), repeat=n):
                if END not in tokens[:-1] and (tokens[-1] == END or n == 3):
                    length = 2 + n - (tokens[-1] == END)
                    every.append((logprob_of(table, [*prompt, *tokens]) / length**length_penalty, tokens))
        want = sorted(every, reverse=True)[:10]
        wide = BeamSearchParams(beam_width=10, max_tokens=3, length_penalty=length_penalty)
        object.__setattr__(wide, "beam_width", 64)  # more than there are
        found = search([prompt, prompt], wide, {END}, expand_by(table, V))
        assert [len(beams) for beams in found] == [len(every)] * 2
        for beams in found:
            for beam, (score, tokens) in zip(beams[:10], want, strict=True):
                ended = tokens[-1] == END
                assert beam.tokens == [*prompt, *(tokens[:-1] if ended else tokens)]
                assert (beam.finish_reason, beam.stop_reason) == (("stop", END) if ended else ("length", None))
                length = len(beam.tokens)
                assert math.isclose(beam.cum_logprob / length**length_penalty, score, abs_tol=1e-12)
        narrow = search([prompt], params, {END}, expand_by(table, V))[0]
        assert len(narrow) == 10 and narrow[0].cum_logprob <= max(b.cum_logprob for b in found[0]) + 1e-12


def test_one_beam_is_greedy_and_eos_may_be_ignored():
    table = table_model(7)
    (beam,) = search([[0, 1]], BeamSearchParams(beam_width=1, max_tokens=9, ignore_eos=True), {END}, expand_by(table, 2))[0]
    tokens = [0, 1]
    for _ in range(9):
        tokens.append(int(table[tokens[-2], tokens[-1]].argmax()))
    assert beam.tokens == tokens and END in tokens and beam.finish_reason == "length"
    assert len(beam.logprobs) == 9 and all(list(entry)[0] == t for entry, t in zip(beam.logprobs, tokens[2:], strict=True))
    assert math.isclose(beam.cum_logprob, logprob_of(table, tokens))


def test_length_counts_the_prompt_and_leaves_eos_out():
    beam = BeamSearchSequence([5, 6, 7, 2], cum_logprob=-6.0)
    assert (score_of(beam, {2}, 1.0), score_of(beam, (), 1.0), score_of(beam, {2}, 0.0)) == (-2.0, -1.5, -6.0)


BAD = [
    ("beam_width", 0),
    ("beam_width", MAX_LOGPROBS // 2 + 1),
    ("beam_width", 1.0),
    ("max_tokens", 0),
    ("max_tokens", None),
    ("length_penalty", math.nan),
    ("ignore_eos", 1),
    ("include_stop_str_in_output", None),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_parameters_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: value})


def test_a_temperature_is_refused():
    with pytest.raises(NotImplementedError, match="temperature=0.5 is not supported"):
        BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.5)


# -- through LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = alphabet_model.save(tmp_path_factory.mktemp("alphabet"))
    plan = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))
    return LLM(folder, bucket_plan=plan, num_pages=64, page_size=4, compilation_cache_dir="")


def test_beams_of_a_model_written_down(llm):
    """Two prompts, against a search by the model's own table of logits."""
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    outputs = llm.beam_search(["ax", {"prompt_token_ids": ids("yes")}], params)

    def expand(beams):
        x = np.array([alphabet_model.logits(tokens[-1]) for _, tokens in beams], np.float64)
        x -= np.log(np.exp(x).sum(-1, keepdims=True))
        return [{t: Logprob(float(row[t])) for t in np.argsort(-row, stable=True)[:6].tolist()} for row in x]

    want = search([ids("ax"), ids("yes")], params, {SPECIALS[EOS]}, expand)
    for output, beams in zip(outputs, want, strict=True):
        assert [s.tokens for s in output.sequences] == [b.tokens for b in beams]
        for have, beam in zip(output.sequences, beams, strict=True):
            assert have.cum_logprob == pytest.approx(beam.cum_logprob, abs=1e-3)
            assert have.text == llm.get_tokenizer().decode(have.tokens) and have.finish_reason == "length"
    assert outputs[0].sequences[0].text == "axyz{|}"
    assert not llm.engine.has_unfinished_requests() and llm.engine.pool.num_free_pages == llm.engine.pool.num_pages


def test_eos_ends_a_beam(llm):
    start, eos = SPECIALS[EOS] - 2, SPECIALS[EOS]
    (output,) = llm.beam_search([[start]], BeamSearchParams(beam_width=2, max_tokens=5, include_stop_str_in_output=True))
    ended = [s for s in output.sequences if s.finish_reason == "stop"]
    assert ended and all(s.tokens[-1] == eos and s.stop_reason == eos for s in ended)
    assert len(ended[0].logprobs) == len(ended[0].tokens) - 1
    (output,) = llm.beam_search([[start]], BeamSearchParams(beam_width=2, max_tokens=5))
    assert ended[0].tokens[:-1] in [s.tokens for s in output.sequences]


def test_a_prompt_too_long_is_refused(llm):
    with pytest.raises(ValueError, match=r"prompt 1 has 250 tokens, and max_tokens=7 more go past max_model_len=256"):
        llm.beam_search(["a", "b" * 250], BeamSearchParams(beam_width=2, max_tokens=7))

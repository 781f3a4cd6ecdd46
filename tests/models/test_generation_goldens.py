"""Greedy search under penalties, bias and masks, and beams, against what transformers generates (tests/goldens/generation.json)."""

import json

import pytest

from jaxserve import BeamSearchParams, Engine, EngineConfig, SamplingParams
from jaxserve.engine.beam_search import search
from jaxserve.models.loading import load_model
from tests.dummy import ONE_BUCKET, SEQS, TOKENS, Ask, serve
from tests.goldens.golden import HERE
from tests.selection import slow_unless

GOLDENS = json.loads((HERE / "generation.json").read_text())["models"]


@pytest.fixture(scope="module", params=slow_unless(lambda name: name == "qwen3_tied", GOLDENS))
def served(request):
    """(engine, entries): pages of 4 tokens, too few for all requests."""
    config = EngineConfig(
        page_size=4,
        max_model_len=48,
        max_num_seqs=SEQS,
        max_num_batched_tokens=TOKENS,
        num_pages=30,
        bucket_plan=ONE_BUCKET,
        compilation_cache_dir="",
    )
    model = load_model(HERE / request.param, skip_tokenizer_init=True, dtype="float32").module
    return Engine(model, config, eos_token_ids=()), GOLDENS[request.param]


def params_of(settings: dict) -> SamplingParams:
    bias = {ids[0]: value for ids, value in settings.get("sequence_bias", [])}
    suppressed = settings.get("suppress_tokens", [])
    return SamplingParams(
        temperature=0,
        max_tokens=16,
        repetition_penalty=settings.get("repetition_penalty", 1.0),
        logit_bias=bias,
        bad_words_token_ids=settings.get("bad_words_ids"),
        allowed_token_ids=[i for i in range(160) if i not in suppressed] if suppressed else None,
    )


def test_greedy_tokens_are_those_of_transformers(served):
    """All prompts in all cases together."""
    engine, entries = served
    asks, want = [], []
    for entry in entries:
        for case in entry["cases"].values():
            asks.append(Ask(entry["prompt"], params_of(case["settings"])))
            want.append(case["tokens"])
            assert case["tokens"] != entry["greedy"], "the case changes nothing"
    run = serve(engine, asks)
    assert [run.answers[str(i)].tokens for i in range(len(asks))] == want
    assert run.stats.num_preemptions and run.num_mixed_steps and len(entries) >= 3


def test_beams_are_those_of_transformers(served):
    """Without an eos and a length penalty, where the two rank alike."""
    engine, entries = served
    step = SamplingParams(temperature=0, max_tokens=1, logprobs=8)

    def expand(beams):
        found = {}
        for i, (_, tokens) in enumerate(beams):
            engine.add_request(str(i), tokens, step)
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.logprobs is not None
                found[int(output.request.request_id)] = output.logprobs[0]
        return [found[i] for i in range(len(beams))]

    params = BeamSearchParams(beam_width=4, max_tokens=16, length_penalty=0.0)
    for entry, beams in zip(entries, search([e["prompt"] for e in entries], params, (), expand), strict=True):
        assert [beam.tokens[len(entry["prompt"]) :] for beam in beams] == [tokens for tokens, _ in entry["beams"]]
        for beam, (_, score) in zip(beams, entry["beams"], strict=True):
            assert beam.cum_logprob == pytest.approx(score, abs=1e-3)

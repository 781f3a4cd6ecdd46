"""Every sampling parameter beside every other: a request's answer is the same alone and in a crowd, with and without drafts, and
nothing compiles.

Requests are drawn so that any two values of any two parameters meet in one of them. The model sees its context; it is dense, or a
mixture of experts. There are fewer pages than the crowd wants.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, BucketPlan, RequestOutput, SamplingParams
from jaxserve.execution.compilation import compile_counts
from jaxserve.text.tokenizer import Tokenizer
from tests import alphabet_model
from tests.dummy import CONFIG, SEQS, TOKENS, dummy_model
from tests.engine.test_engine_experts import SPARSE

OPTIMISED = True
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
LETTERS = range(ord("a"), ord("z") + 1)
VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1, 3),
    "temperature": (0.0, 0.7, 1.4),
    "top_p": (1.0, 0.8),
    "top_k": (0, 12),
    "min_p": (0.0, 0.02),
    "seed": (7, -3, 2**64 - 1),
    "max_tokens": (3, 9, None),
    "min_tokens": (0, 3),
    "stop": (None, ("e", "zq")),
    "stop_token_ids": (None, (ord("t"), 200)),
    "ignore_eos": (False, True),
    "include_stop_str_in_output": (False, True),
    "skip_special_tokens": (True, False),
    "detokenize": (True, False),
    "logprobs": (None, 0, 4),
    "logprob_token_ids": (None, (ord("a"), 255, ord("z"), 0)),
    "presence_penalty": (0.0, 0.6),
    "frequency_penalty": (0.0, -0.4),
    "repetition_penalty": (1.0, 1.3),
    "logit_bias": (None, {ord("q"): 3.0, 256: -2.0}),
    "allowed_token_ids": (None, (*LETTERS, 256)),
    "bad_words": (None, ("ab", "x")),
    "bad_words_token_ids": (None, ((ord("h"),), (ord("o"), ord("p")))),
    "prompt_logprobs": (None, 0, 5),
    "structured_outputs": (None, {"regex": "[a-z]{2,20}"}),
    "repetition_detection": (None, {"max_pattern_size": 2, "min_count": 3}),
}


def allowed(choice: dict[str, Any]) -> bool:
    fits = choice["logprob_token_ids"] is None or choice["logprobs"] in (None, 4)
    return (choice["detokenize"] or choice["stop"] is None) and fits


@functools.cache
def combinations() -> list[dict[str, Any]]:
    """Choices of a value each in which any two values of two parameters meet, unless they contradict each other: of many random
    choices, always the one that brings most pairs that had not met."""
    rng, names = np.random.default_rng(0), list(VALUES)

    def pairs(indices: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, indices[a], b, indices[b]) for a, b in itertools.combinations(range(len(names)), 2)}

    def draw() -> tuple[int, ...]:
        return tuple(int(rng.integers(len(values))) for values in VALUES.values())

    def values_of(indices: tuple[int, ...]) -> dict[str, Any]:
        return {name: VALUES[name][i] for name, i in zip(names, indices, strict=True)}

    wanted = set.union(*(pairs(draw()) for _ in range(2000)))
    impossible = {
        (names.index("stop"), 1, names.index("detokenize"), 1),
        (names.index("logprobs"), 1, names.index("logprob_token_ids"), 1),
    }
    chosen = []
    while missing := wanted - impossible:
        possible = [c for c in (draw() for _ in range(100)) if allowed(values_of(c))]
        best = max(possible, key=lambda c: len(pairs(c) & missing))
        wanted -= pairs(best)
        if pairs(best) & missing:
            chosen.append(values_of(best))
    return chosen


def test_any_two_values_meet():
    assert set(VALUES) == {field.name for field in dataclasses.fields(SamplingParams)}
    for (a, values), (b, others) in itertools.combinations(VALUES.items(), 2):
        for value, other in itertools.product(values, others):
            met = any(c[a] == value and c[b] == other for c in combinations())
            nothing = {"detokenize": True, "stop": None, "logprobs": None, "logprob_token_ids": None}
            assert met or not allowed(nothing | {a: value, b: other}), (a, value, b, other)


def said(output: RequestOutput) -> tuple[Any, ...]:
    return output.outputs, output.prompt_logprobs


@pytest.mark.parametrize("config", [CONFIG, SPARSE], ids=["dense", "experts"])
@pytest.mark.slow
def test_alone_as_in_a_crowd(config, tmp_path):
    model = dummy_model("float32", dataclasses.replace(config, vocab_size=alphabet_model.VOCABULARY, eos_token_ids=(256,)))
    tokenizer = Tokenizer.from_id(alphabet_model.save(tmp_path / "alphabet"))

    def make_llm(speculative: dict[str, Any] | None) -> LLM:
        return LLM.from_params(
            model,
            tokenizer=tokenizer,
            bucket_plan=BucketPlan(mixed=((TOKENS, SEQS),), head_rows=(TOKENS,)),
            max_num_seqs=SEQS,
            max_num_batched_tokens=TOKENS,
            page_size=4,
            num_pages=40,
            max_model_len=72,
            warm_up="all",
            compilation_cache_dir="",
            speculative_config=speculative,
        )

    rng, llm = np.random.default_rng(1), make_llm(None)
    shared = rng.choice(LETTERS, 9).tolist()
    params = [SamplingParams(**choice) for choice in combinations()]
    prompts = [shared[: i % 10] + rng.choice(LETTERS, 1 + i * 7 % 45).tolist() for i in range(len(params))]

    def serve_crowd(llm: LLM) -> None:
        """As it was alone, in pages that others have left or leave, without a compile."""
        before, programs = llm.engine.scheduler.stats(), compile_counts().programs
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert compile_counts().programs == programs
        for output, alone, asked in zip(outputs, expected, params, strict=True):
            assert said(output) == said(alone), asked
        stats = llm.engine.scheduler.stats()
        assert stats.num_preemptions > before.num_preemptions and stats.num_hit_tokens > before.num_hit_tokens

    programs, expected = compile_counts().programs, []
    for prompt, asked in zip(prompts, params, strict=True):
        assert llm.engine.reset_prefix_cache()
        expected += llm.generate(prompt, asked, use_tqdm=False)
    assert compile_counts().programs == programs
    serve_crowd(llm)
    samples = [sample for output in expected for sample in output.outputs]
    assert {"stop", "length", "repetition"} == {sample.finish_reason for sample in samples}
    assert len({tuple(sample.token_ids) for sample in samples}) > len(samples) / 2, "answers that say nothing"

    drafting = make_llm(NGRAM)
    serve_crowd(drafting)
    assert 0 < drafting.engine.stats.num_accepted_tokens < drafting.engine.stats.num_draft_tokens

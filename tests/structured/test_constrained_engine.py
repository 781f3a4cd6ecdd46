"""An engine whose requests have grammars: whatever random weights want, what comes out parses and validates."""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxserve import BucketPlan, Engine, Request, SamplingParams
from jaxserve.structured.grammars import GrammarCompiler
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer
from tests import dummy
from tests.structured import random_grammars

VOCAB = 512
CONFIG = replace(dummy.CONFIG, vocab_size=VOCAB)
EOS = dummy.EOS
PAGES, FORMS_PAGES = 26, 56  # of small pools, for outputs of 24 and of 150 tokens
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE whose merges come from text like what the grammars spell, so that a token often crosses their boundaries."""
    rng = np.random.default_rng(0)
    corpus = [json.dumps(random_grammars.schema(rng)) for _ in range(200)]
    corpus += [
        json.dumps({"name": "value", "ab": [1, 20, 300], "c": None, "flag": True, "x": -1.5e3}, indent=i % 3) for i in range(60)
    ]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - 8, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def model():
    return dummy.dummy_model(config=CONFIG)


def make_engine(model, **settings) -> Engine:
    return dummy.make_engine(model, bucket_plan=dummy.ONE_BUCKET, **settings)


def serve(
    engine: Engine, asks: list[tuple[list[int], SamplingParams, Future | None]], served: list[Request] | None = None
) -> list[dummy.Answer]:
    """The answers in the order of the asks, all samples of each; `served` gets the requests in that order."""
    answers = {}
    for i, (prompt, params, grammar) in enumerate(asks):
        requests = engine.add_request(str(i), prompt, params, grammar=grammar)
        answers |= {request.request_id: dummy.Answer() for request in requests}
        if served is not None:
            served += requests
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request.request_id].take(output)
        engine.scheduler.check_invariants()
    dummy.assert_empty(engine)
    assert not engine._constraints
    return list(answers.values())


def prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, VOCAB, rng.integers(1, 30)).tolist() for _ in range(n)]


def matches(regex: str, text: str) -> None:
    assert re.fullmatch(regex, text), (regex, text)


NUM_FORMS = int(os.environ.get("JAXSERVE_TEST_FORMS", "400"))  # about a third of them regular expressions
LIKELIER = {"frequency_penalty": -2.0, "repetition_penalty": 0.8}  # what was said is likelier, and drafts stand
RARER = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
Asks = list[tuple[list[int], SamplingParams, Future | None]]
Check = Callable[[str], None]


def random_form(rng: np.random.Generator) -> tuple[StructuredOutputsParams, Check]:
    """A form, and what raises unless a text has it: other implementations than the one that makes the masks."""
    if rng.random() < 1 / 3:
        regex = random_grammars.regex(rng)
        if rng.random() < 0.5:
            regex = f"(?:{regex}){{3,9}}"  # long enough that drafts stand
        return StructuredOutputsParams(regex=regex), lambda text: matches(regex, text)
    schema = random_grammars.schema(rng)
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=rng.random() < 0.75)
    return form, lambda text: jsonschema_rs.validate(schema, json.loads(text))


def random_params(rng: np.random.Generator, seed: int) -> SamplingParams:
    """Each option is drawn whatever the others are, so that any two of them meet."""

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    drawn = {"temperature": one_of(0.0, 1.0, 3.0), "top_k": one_of(0, 5), "n": one_of(1, 1, 1, 2)}
    drawn |= {"logprobs": one_of(None, None, 2), "min_tokens": one_of(0, 0, 0, 0, 0, 6)}
    penalties = one_of({}, {}, {}, LIKELIER, LIKELIER, RARER)
    return SamplingParams(seed=seed, max_tokens=150, **drawn, **penalties)


@pytest.fixture(scope="module")
def forms(compiler) -> tuple[Asks, list[tuple[str, SamplingParams, Check]]]:
    """(requests, of each sample the kind of its form, its parameters, and what its output must be)."""
    rng = np.random.default_rng(2)
    shared, wanted, asks = prompts(1)[0][:12], [], []
    for i, prompt in enumerate(prompts(NUM_FORMS)):
        (form, check), params = random_form(rng), random_params(rng, seed=i)
        wanted += [(form.kind, params, check)] * params.n
        asks.append((shared + prompt if rng.random() < 0.5 else prompt, params, compiler.submit(form)))
    return asks, wanted


def serve_preempted(
    model, asks: Asks, speculative: dict | None, pool_pages: int
) -> tuple[Engine, list[dummy.Answer], list[Request]]:
    """With pages so short that requests are preempted, and in steps of one shape with and without drafts."""
    plan, served = BucketPlan(mixed=((dummy.TOKENS, dummy.SEQS),), head_rows=(dummy.TOKENS,)), list[Request]()
    engine = dummy.make_engine(model, bucket_plan=plan, pool_pages=pool_pages, speculative_config=speculative)
    answers = serve(engine, asks, served)
    assert engine.scheduler.stats().num_preemptions > len(asks) // 20
    assert engine.scheduler.stats().num_hit_tokens > len(asks)
    return engine, answers, served


@pytest.fixture(scope="module")
def without_drafts(model, forms) -> tuple[Engine, list[dummy.Answer]]:
    return serve_preempted(model, forms[0], None, FORMS_PAGES)[:2]


@pytest.mark.slow
def test_several_hundred_schemas_and_regexes(tokenizer, forms, without_drafts, record_property):
    engine, answers = without_drafts
    reasons = Counter(answer.finish_reason for answer in answers)
    for answer, (_, params, check) in zip(answers, forms[1], strict=True):
        if answer.finish_reason == "stop":
            check(tokenizer.decode(answer.tokens))
        else:
            assert (answer.finish_reason, len(answer.tokens)) == ("length", params.max_tokens), answer.stop_reason
        assert params.logprobs is None or len(answer.logprobs) == len(answer.tokens)
        assert all(entry[token][0] <= 0 for entry, token in zip(answer.logprobs, answer.tokens, strict=False))
    assert reasons["stop"] > 0.9 * len(answers), reasons
    num_tokens = sum(len(answer.tokens) for answer in answers)
    num_sampled = engine.stats.padding.samples
    counted = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    record_property("counted", f"forms: {num_tokens} tokens of {len(answers)} outputs ({counted}) from {num_sampled} samples")
    assert num_sampled < 0.95 * num_tokens, "forced tokens take no step each"


KINDS: dict[str, Callable[[Request], bool]] = {
    "penalties": lambda r: r.params.frequency_penalty != 0,
    "logprobs": lambda r: r.params.logprobs is not None,
    "n": lambda r: r.params.n > 1,
    "min_tokens": lambda r: r.params.min_tokens > 0,
    "random": lambda r: r.params.temperature > 0,
    "preempted": lambda r: r.num_preemptions > 0,
    "prefix hit": lambda r: r.num_cached_tokens > 0,
}


def accepted_drafts(served: list[Request], forms: list[str]) -> Counter[tuple[str, str]]:
    """How many drafts stood of requests that are of both kinds; `forms` are kinds too, each sample's own."""
    accepted = Counter[tuple[str, str]]()
    for request, form in zip(served, forms, strict=True):
        assert request.metrics is not None
        kinds = [form, *(name for name, has in KINDS.items() if has(request))]
        accepted.update(dict.fromkeys(itertools.combinations_with_replacement(kinds, 2), request.metrics.num_accepted_tokens))
    return accepted


@pytest.mark.slow
def test_several_hundred_forms_with_drafts(model, forms, without_drafts, record_property):
    """Each output is what it is without drafts, to the last bit, whatever is asked for beside its form and whatever befalls it;
    and of every two of these, drafts stood where both were."""
    engine, answers, served = serve_preempted(model, forms[0], NGRAM, FORMS_PAGES)
    assert not differing(answers, without_drafts[1])
    accepted = accepted_drafts(served, [kind for kind, *_ in forms[1]])
    kinds = itertools.combinations_with_replacement(["json", "regex", *KINDS], 2)
    fewest, pair = min((accepted[pair], pair) for pair in kinds if pair != ("json", "regex"))
    counted = f"of any two kinds {fewest} or more ({' and '.join(pair)})"
    record_property("counted", f"forms with drafts: {engine.stats.draft_summary}; accepted {counted}")
    assert fewest > 0, pair
    assert engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


WORDS = ["".join(letters) for letters in itertools.product("xy", repeat=8)]  # hardly forced, so that drafts stand
GRAMMARS = {
    "object": StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {
                "a long property": {"type": "integer", "maximum": 999, "minimum": 0},
                "b": {"enum": ["yes", "no", None]},
            },
            "required": ["a long property", "b"],
            "additionalProperties": False,
        }
    ),
    "regex": StructuredOutputsParams(regex="([ab]{3,5}-){2,5}[0-9]{2}"),
    "choice": StructuredOutputsParams(choice=["the first of them", "the second of them", *WORDS]),
    "lark": StructuredOutputsParams(grammar='start: "<" start ">" | /[a-c]{1,4}([xy]{2,5}){2,3}/'),
    "gbnf": StructuredOutputsParams(grammar='root ::= "<" root ">" | item item item\nitem ::= [ab] [ab] [ab] [ab]'),
    "tag": StructuredOutputsParams(
        structural_tag={"structures": [{"begin": "x", "schema": {"type": "boolean"}, "end": "/x"}], "triggers": ["x"]}
    ),
    "any object": StructuredOutputsParams(json_object=True),
}


def differing(answers: list[dummy.Answer], expected: list[dummy.Answer]) -> list[str]:
    return dummy.differences(*({str(i): answer for i, answer in enumerate(some)} for some in (answers, expected)))


def mixed_asks(compiler, each: int = 2, **params) -> Asks:
    """`each` requests of every kind of grammar and of none, by turns, with options of their own but for `params`; some share a
    prefix, some score their prompts, and a small pool preempts them."""
    rng, names = np.random.default_rng(5), [*GRAMMARS, None] * each
    shared, asks = prompts(1)[0][:12], []
    for i, (name, prompt) in enumerate(zip(names, prompts(len(names)), strict=True)):
        drawn = random_params(rng, seed=i).with_(max_tokens=24, prompt_logprobs=1 if rng.random() < 0.2 else None)
        prompt = shared + prompt if rng.random() < 0.7 else prompt
        asks.append((prompt, drawn.with_(**params), compiler.submit(GRAMMARS[name]) if name else None))
    return asks


@pytest.mark.slow
def test_every_kind_of_grammar_with_drafts(model, compiler, record_property):
    """As of the random forms: the outputs are those without drafts, and of each kind drafts stood."""
    asks, names = mixed_asks(compiler, each=40), [*GRAMMARS, "none"]
    expected = serve_preempted(model, asks, None, PAGES)[1]
    engine, answers, served = serve_preempted(model, asks, NGRAM, PAGES)
    assert not differing(answers, expected)
    accepted = accepted_drafts(served, [names[int(request.parent_id) % len(names)] for request in served])
    found = {name: accepted[name, name] for name in [*names, *KINDS]}
    record_property("counted", f"kinds of grammars with drafts: {engine.stats.draft_summary}; accepted {found}")
    assert all(found.values()), found
    lacking = [(name, kind) for name in names for kind in KINDS if not accepted[name, kind]]
    assert not lacking, lacking


@pytest.mark.slow
def test_alone_and_together_are_equal_bit_for_bit(model, compiler):
    """One bucket: whatever shares the batch, chunks, preemption, prefix hits, stepping ahead."""
    asks = mixed_asks(compiler)
    engine = make_engine(model, pool_pages=PAGES)
    together = serve(engine, asks)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions and stats.num_hit_tokens
    alone = []
    for ask in asks:
        alone += serve(make_engine(model, async_scheduling=False, enable_prefix_caching=False), [ask])
    assert not differing(together, alone)


@pytest.mark.slow
def test_logprobs_are_of_what_the_grammar_allows(model, tokenizer, compiler):
    """Against the module's own forward and llguidance's own matcher, token by token: of the likeliest, or of given ids, which a
    form may forbid."""
    given = tuple(range(40, 168))
    by_ids = {"logprobs": None, "logprob_token_ids": given}
    asks = [
        (prompt, params.with_(**by_ids) if i % 2 else params, grammar)
        for i, (prompt, params, grammar) in enumerate(mixed_asks(compiler, n=1, logprobs=3))
    ]
    answers = serve(make_engine(model), asks)
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    checked = forbidden = 0
    for (prompt, params, grammar), answer in zip(asks, answers, strict=True):
        if grammar is None:
            continue
        plain = dummy.plain_logprobs(prompt + answer.tokens, config=CONFIG)
        matcher, bits = grammar.result().matcher(), allocate_token_bitmask(1, VOCAB)
        for i, token in enumerate(answer.tokens):
            forced = [] if params.min_tokens else matcher.compute_ff_tokens()  # none is, if ends are held back
            fill_next_token_bitmask(matcher, bits)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB] == 1
            if forced:
                allowed[:] = np.arange(VOCAB) == forced[0]
            row = np.where(allowed, plain[len(prompt) + i - 1], -np.inf)
            expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
            assert answer.logprobs[i][token][0] == pytest.approx(expected, abs=2e-4)
            if params.logprob_token_ids is None:
                assert all(allowed[other] for other in answer.logprobs[i])
            else:
                found = [answer.logprobs[i][other][0] for other in given]
                np.testing.assert_allclose(found, row[40:168] - row[token] + expected, atol=4e-4)
                forbidden += int(np.isneginf(found).sum())
            assert matcher.consume_token(token)
            checked += 1
    assert checked > 100 and forbidden > 1000


@pytest.mark.slow
def test_nobody_waits_for_a_grammar_that_compiles(model, compiler):
    engine = make_engine(model)
    pending: Future = Future()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("waits", [1, 2, 3], params, grammar=pending)
    engine.add_request("runs", [1, 2, 3], params)
    tokens: dict[str, list[int]] = {"waits": [], "runs": []}

    def step():
        for output in engine.step():
            tokens[output.request.request_id] += output.new_token_ids

    while len(tokens["runs"]) < 8:
        step()
    assert not tokens["waits"] and engine.has_unfinished_requests()
    pending.set_result(compiler.compile(GRAMMARS["choice"]))
    while engine.has_unfinished_requests():
        step()
    assert tokens["waits"]


def test_a_grammar_that_cannot_be_ends_its_request_alone(model, compiler):
    grammar = compiler.submit(StructuredOutputsParams(json={"type": "string", "minLength": 5, "maxLength": 3}))
    asks = [([1, 2], SamplingParams(max_tokens=4, ignore_eos=True), g) for g in (None, grammar)]
    fine, refused = serve(make_engine(model), asks)
    assert fine.finish_reason == "length"
    assert refused.finish_reason == "error" and "minLength (5) is greater than maxLength (3)" in str(refused.stop_reason)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": "(?=x)y"}, "look-around"),
        ({"regex": "[^\\s\\S]"}, "nothing satisfies it"),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"not": {"type": "integer"}}}, 'Unimplemented keys: \\["not"\\]'),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"choice": []}, "one at least"),
        ({"json": {}, "regex": "a"}, "exactly one of"),
        ({}, "exactly one of"),
        ({"regexp": "a"}, "unknown fields regexp"),
        ({"json": "{"}, "not JSON"),
        ({"regex": "a", "disable_any_whitespace": True}, "is for json, not for regex"),
    ],
)
def test_what_cannot_be_compiled_says_why(compiler, asked, words):
    with pytest.raises(ValueError, match=words):
        compiler.compile(StructuredOutputsParams.make(asked))


def test_a_grammar_is_compiled_once(compiler):
    one = compiler.submit(StructuredOutputsParams(json={"type": "integer", "minimum": 3}))
    assert compiler.submit(StructuredOutputsParams(json='{"type": "integer", "minimum": 3}')) is one
    assert compiler.submit(StructuredOutputsParams(json={"type": "integer", "minimum": 4})) is not one


def test_what_a_grammar_needs(tokenizer):
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match="names no eos token"):
        GrammarCompiler(tokenizer, VOCAB, []).submit(form)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        GrammarCompiler(None, VOCAB, [EOS]).submit(form)


def test_a_grammar_that_breaks_off_ends_its_request_alone(model, compiler):
    """llguidance has limits that a regular expression can reach long after it was compiled."""
    asks: list[tuple[list[int], SamplingParams, Future | None]]
    asks = [([1, 2], SamplingParams(max_tokens=40, ignore_eos=True), None)]
    asks.append(([1, 2], SamplingParams(max_tokens=40), compiler.submit(StructuredOutputsParams(regex="a{1000}{500}"))))
    fine, broken = serve(make_engine(model), asks)
    assert fine.finish_reason == "length"
    assert broken.finish_reason == "error" and "the grammar broke off" in str(broken.stop_reason)


def test_a_failed_compiler_ends_its_request_alone(model):
    """Whatever it raises."""
    broken: Future = Future()
    broken.set_exception(MemoryError("no room"))
    asks = [([1, 2], SamplingParams(max_tokens=4, ignore_eos=True), grammar) for grammar in (None, broken)]
    fine, failed = serve(make_engine(model), asks)
    assert fine.finish_reason == "length" and failed.finish_reason == "error" and "no room" in str(failed.stop_reason)


def test_a_forced_text_longer_than_the_model_is_cut(model, compiler):
    longest = compiler.submit(StructuredOutputsParams(choice=["word " * 200]))
    for max_tokens, reached in ((5, 5), (None, dummy.SETTINGS["max_model_len"] - 3)):
        (answer,) = serve(make_engine(model), [([1, 2, 3], SamplingParams(max_tokens=max_tokens), longest)])
        assert answer.finish_reason == "length" and len(answer.tokens) == reached


@pytest.mark.slow
def test_grammars_after_sleep_and_new_weights(model, compiler):
    asks = mixed_asks(compiler)
    engine = make_engine(model)
    before = serve(engine, asks)
    engine.sleep()
    engine.wake_up()
    assert not differing(before, serve(engine, asks))
    engine.update_params(model)
    assert not differing(before, serve(engine, asks))

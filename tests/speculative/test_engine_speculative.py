"""Speculation changes how many steps an output takes and nothing else.

The same requests are served with and without it, in steps of one shape: tokens, log-probabilities and reasons are equal to the last
bit, whatever they ask for and whatever happens to them. Each run asserts that drafts were accepted, refused, and missing. Their
vocabularies are small, so that what they say repeats itself.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve import BucketPlan, Engine, SamplingParams
from jaxserve.scheduling.step_budget import StepBudget
from jaxserve.speculative import verify
from jaxserve.structured.grammars import GrammarCompiler
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer
from tests import dummy, workload
from tests.dummy import SEQS, TOKENS, Answer, Ask, stages
from tests.engine.test_engine_compiles import num_compiled, use_everything
from tests.engine.test_engine_exactness import TOLERANCE, compare
from tests.selection import chosen, exhaustive_unless
from tests.simulation.machines import MODEL

OPTIMISED = True
VOCAB = 260
CONFIG = replace(dummy.CONFIG, vocab_size=VOCAB)
PLAN = BucketPlan(mixed=((TOKENS, SEQS),), head_rows=(TOKENS,))
SEVERAL = BucketPlan(decode=(2,), mixed=((24, 6),), head_rows=(6, 24), draft=((1, 3), (4, 3)))
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_max_spec_factor": 2.0, "adaptive": False}
SMALL_POOL = 34
OBJECT = {
    "type": "object",
    "properties": {"a property": {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 3, "maxItems": 6}},
    "required": ["a property"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level, without merges, with eos at 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({"</s>": 0} | {letter: i for i, letter in enumerate(alphabet, 1)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("</s>", special=True)])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB, [dummy.EOS])
    yield compiler
    compiler.close()


def make_engine(speculative: dict | None = NGRAM, **settings) -> Engine:
    settings = {"bucket_plan": PLAN, **settings}
    return dummy.make_engine(dummy.dummy_model(config=CONFIG), speculative_config=speculative, **settings)


def asks(compiler: GrammarCompiler | None = None) -> list[tuple[Ask, Future | None]]:
    """Greedy and drawn, n > 1, every edit of logits, stops of each kind, log-probabilities, grammars, shared prefixes."""
    rng = np.random.default_rng(3)
    few = rng.integers(1, VOCAB, 4).tolist()
    copied = {"temperature": 0, "repetition_penalty": 0.4}  # what was said is likelier
    period, shared = rng.integers(1, VOCAB, 5).tolist(), rng.integers(1, VOCAB, 9).tolist()
    made: list[Ask] = []

    def ask(prompt, at=0, **params):
        params = {"max_tokens": 36, "ignore_eos": True, **params}
        made.append(Ask(prompt, SamplingParams(**params), at=at))

    ask(period * 4, logprobs=2, **copied)
    ask(shared + period, temperature=0.7, seed=1, allowed_token_ids=few, n=3, logprobs=0, at=1)
    ask(shared + few, temperature=0, allowed_token_ids=few, frequency_penalty=0.3, presence_penalty=0.2, prompt_logprobs=1)
    ask(shared + few[:2], temperature=1, seed=2, allowed_token_ids=few, bad_words_token_ids=[few[:1], few[1:3]], at=3)
    ask(rng.integers(1, VOCAB, 50).tolist(), temperature=0, repetition_penalty=0.3, at=2, logprob_token_ids=few)
    ask(period, temperature=1, seed=3, allowed_token_ids=few, stop_token_ids=few[:1], min_tokens=11, ignore_eos=False)
    ask(few, temperature=1, seed=4, allowed_token_ids=[*few, 0], ignore_eos=False, min_tokens=4, at=2)
    ask(period * 2, temperature=0.9, seed=5, top_k=3, repetition_penalty=0.5, top_p=0.9, min_p=0.01, n=2, logprobs=3)
    ask(shared, max_tokens=1, **copied)
    ask(period * 5, max_tokens=2, at=5, **copied)
    pairs: list[tuple[Ask, Future | None]] = [(ask, None) for ask in made]
    if compiler is not None:
        forms = [
            (StructuredOutputsParams(regex="(a|b){30}"), {"temperature": 0}),
            (StructuredOutputsParams(regex="(ab|cd|e){6,12}"), {"temperature": 1, "seed": 6, "logprobs": 2, "n": 2}),
            (StructuredOutputsParams(regex="[xy]+z"), {"temperature": 1, "seed": 7, "frequency_penalty": 0.4, "min_tokens": 8}),
            (StructuredOutputsParams(json=OBJECT), {"temperature": 1, "seed": 8, "logprobs": 1, "max_tokens": 90}),
            (StructuredOutputsParams(json=OBJECT), {"temperature": 0, "max_tokens": 30}),
            (StructuredOutputsParams(choice=["no no no no no no", "no no yes"]), {"temperature": 1, "seed": 9}),
        ]
        for i, (form, params) in enumerate(forms):
            params = SamplingParams(**{"max_tokens": 36, **params})
            pairs.append((Ask(shared + period[:i], params, at=2 * i), compiler.submit(form)))
    return pairs


Happenings = dict[int, Callable[[Engine], None]]  # by the step before which each happens


def serve(engine: Engine, pairs: list[tuple[Ask, Future | None]], happenings: Happenings | None = None) -> dict[str, Answer]:
    answers, arrivals = {}, sorted(range(len(pairs)), key=lambda i: pairs[i][0].at)[::-1]
    for _, grammar in pairs:
        if grammar is not None:
            grammar.result()
    for step in range(1000):
        while arrivals and (pairs[arrivals[-1]][0].at <= step or not engine.has_unfinished_requests()):
            ask, grammar = pairs[i := arrivals.pop()]
            made = engine.add_request(str(i), ask.prompt, ask.params, grammar=grammar)
            answers |= {request.request_id: Answer() for request in made}
        if not engine.has_unfinished_requests():
            break
        if happenings and step in happenings:
            happenings[step](engine)
        for output in engine.step():
            answers[output.request.request_id].take(output)
        engine.scheduler.check_invariants()
        dummy.poison(engine)
    dummy.assert_empty(engine)
    return answers


@dataclass(frozen=True)
class WithoutDrafts:
    """What asks(compiler) get in steps of PLAN's shape without speculation: whatever shares the steps, to the last bit."""

    answers: dict[str, Answer]
    num_steps: int

    @property
    def free(self) -> dict[str, Answer]:
        """Of asks(), which have no grammar."""
        return {name: answer for name, answer in self.answers.items() if int(name.split("/")[0]) < len(asks())}


@pytest.fixture(scope="module")
def expected(compiler) -> WithoutDrafts:
    engine = make_engine(None)
    return WithoutDrafts(serve(engine, asks(compiler)), engine.scheduler.stats().num_steps)


def assert_drafted(engine: Engine) -> None:
    """Some drafts stood, some did not, all of a step's now and then."""
    stats = engine.stats
    assert len(stats.num_accepted_tokens_per_pos) == 3 and min(stats.num_accepted_tokens_per_pos) > 5
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens < stats.num_draft_tokens
    assert 0 < stats.num_drafts <= stats.num_draft_tokens <= 3 * stats.num_drafts


@pytest.mark.parametrize(
    ("pool", "steps"),
    chosen(
        itertools.product(("large_pool", "small_pool"), ("async", "sync")),
        quick=lambda *x: x == ("small_pool", "async"),
        in_ci=lambda *x: x == ("large_pool", "sync"),
    ),
)
def test_the_output_is_that_without_drafts(compiler, expected, pool, steps):
    asynchronous, pool_pages = steps == "async", SMALL_POOL if pool == "small_pool" else None
    check_outputs(make_engine(async_scheduling=asynchronous, pool_pages=pool_pages), compiler, expected)


@pytest.mark.slow
@pytest.mark.parametrize("pool_pages", exhaustive_unless(bool, [None, SMALL_POOL]), ids=["large_pool", "small_pool"])
def test_drafts_that_the_host_makes_change_no_output(compiler, expected, pool_pages):
    on = make_engine(SUFFIX, pool_pages=pool_pages)
    assert on.pipeline.max_in_flight == 0, "the host knows all tokens when it drafts"
    check_outputs(on, compiler, expected)
    assert on.pipeline.host_drafts is not None and len(on.pipeline.host_drafts.outputs.kept) > 10
    num_drafts = on.stats.num_draft_tokens
    answers = serve(on, asks(compiler))  # by now their outputs are known
    assert dummy.differences(answers, expected.answers) == [] and on.stats.num_draft_tokens - num_drafts > num_drafts


def check_outputs(on: Engine, compiler: GrammarCompiler, expected: WithoutDrafts) -> None:
    answers = serve(on, asks(compiler))
    assert dummy.differences(answers, expected.answers) == []
    assert_drafted(on)
    stats = on.scheduler.stats()
    assert stats.num_hit_tokens and bool(stats.num_preemptions) == (on.pool.num_pages == SMALL_POOL)
    assert stats.num_steps < expected.num_steps
    reasons = {(answer.finish_reason, answer.stop_reason is None) for answer in answers.values()}
    assert reasons == {("length", True), ("stop", True), ("stop", False)}


def test_the_default_chooses_lengths_and_changes_no_output(compiler, expected):
    """adaptive, where all steps have one shape: the rates alone decide."""
    adaptive = {name: value for name, value in NGRAM.items() if name != "adaptive"}
    on, pairs = make_engine(adaptive), asks(compiler)
    assert dummy.differences(serve(on, pairs), expected.answers) == []
    assert 0 < on.stats.num_accepted_tokens < on.stats.num_draft_tokens
    always = make_engine()
    serve(always, pairs)
    assert on.stats.num_draft_tokens < always.stats.num_draft_tokens


def test_a_dynamic_budget_holds_drafts_and_prompts(expected, monkeypatch):
    """An objective that no step meets: the least budget beside decodes, of which every prompt that may join gets a part."""
    sizes = BucketPlan(mixed=((8, SEQS), (16, SEQS), (TOKENS, SEQS)), head_rows=(SEQS,))
    monkeypatch.setattr("jaxserve.engine.engine.step_budget", lambda config: StepBudget(MODEL, sizes, 1e-6, SEQS, TOKENS))
    engine = make_engine()
    schedules = dummy._spy(engine)
    assert dummy.differences(serve(engine, asks()), expected.free) == []
    assert_drafted(engine)
    both = [s for s in schedules if 0 < s.num_decodes < s.num_seqs]
    assert len(both) > 3 and max(s.num_tokens for s in both) == 8 and any(s.num_drafts for s in both)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_accepted_drafts_are_output_tokens(asynchronous):
    """A step's last token is not a draft, unless the request stopped at it; what stood behind a stop does not count."""
    engine = make_engine(async_scheduling=asynchronous)
    few, rng, steps, stopped = [5, 9, 17], np.random.default_rng(1), Counter(), 0
    params = SamplingParams(temperature=3, seed=1, n=40, allowed_token_ids=few, stop_token_ids=few[:1], max_tokens=20)
    requests = engine.add_request("0", rng.choice(few, 40).tolist(), params)
    while engine.has_unfinished_requests():
        steps.update(output.request.request_id for output in engine.step() if output.new_token_ids)
    for request in requests:
        assert request.metrics is not None
        at_draft = request.metrics.num_accepted_tokens - (request.num_output_tokens - steps[request.request_id])
        assert at_draft == 0 or at_draft == 1 and request.finish_reason == "stop"
        stopped += at_draft
    assert stopped > 2, "drafts were hardly ever a stop"


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_draft_that_equals_a_bad_rows_sample_is_not_accepted(asynchronous):
    """A row that has no token left samples 0, which means nothing. Here 0 is the draft, and a token could follow it."""
    engine = make_engine({**NGRAM, "prompt_lookup_min": 1}, async_scheduling=asynchronous)
    params = SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=[5], ignore_eos=True)
    (fine,) = engine.add_request("fine", [7, 5, 5, 5, 7], params)
    (bad,) = engine.add_request("bad", [7, 5, 0, 7], params.with_(bad_words_token_ids=[[5, 5]]))
    while engine.has_unfinished_requests():
        engine.step()
    assert (fine.finish_reason, fine.num_output_tokens) == ("length", 9)
    assert bad.finish_reason == "error" and bad.output_token_ids == [5] and "every token" in str(bad.stop_reason)
    assert fine.metrics is not None and bad.metrics is not None
    assert bad.metrics.num_draft_tokens and not bad.metrics.num_accepted_tokens
    assert engine.stats.num_accepted_tokens == fine.metrics.num_accepted_tokens > 0


@pytest.mark.slow
def test_rejection_obeys_grammars(compiler, tokenizer):
    engine = make_engine({**NGRAM, "acceptance": "rejection"})
    forms = ["(ab|cd|e){6,12}", r'\{"answers": \["(yes|no)"(, "(yes|no)"){2,5}\]\}']
    pairs: list[tuple[Ask, Future | None]] = []
    for seed in range(8):
        params = SamplingParams(temperature=1, seed=seed, max_tokens=120, n=2)
        grammar = compiler.submit(StructuredOutputsParams(regex=forms[seed % 2]))
        pairs.append((Ask([1 + seed, 7, 9], params, at=seed), grammar))
    for name, answer in serve(engine, pairs).items():
        text = tokenizer.decode(answer.tokens)
        assert answer.finish_reason == "stop" and re.fullmatch(forms[int(name.split("/")[0]) % 2], text), (name, text)
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.slow
def test_across_buckets_they_part_only_at_near_ties(dtype, record_property):
    """Steps with drafts, without, and with chunks, each in shapes of its own, against steps of one shape without drafts."""
    model, asks = dummy.dummy_model(dtype), workload.requests(True, logprobs=True)
    expected = dummy.serve(dummy.make_engine(model, bucket_plan=dummy.ONE_BUCKET), asks).answers
    settings = {"pool_pages": workload.SMALL_POOL[True], "bucket_plan": SEVERAL, "speculative_config": NGRAM}
    engine = dummy.make_engine(model, **settings)
    run = dummy.serve(engine, asks)
    names = {str(bucket).split("(")[0] for bucket in engine.stats.padding.steps}
    assert names == {"decode", "draft", "mixed"} and run.stats.num_preemptions
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    num_greedy, num_random, largest = compare(run.answers, expected, asks, TOLERANCE[dtype])
    counted = f"of {len(asks)} requests {num_greedy} greedy and {num_random} random ones part"
    record_property("counted", f"buckets, with drafts, {dtype}: {counted}; log-probabilities differ by at most {largest:.1e}")
    assert num_greedy <= (0 if dtype == "float32" else 2) and num_random <= (1 if dtype == "float32" else 3)


@pytest.mark.slow
def test_nothing_compiles_after_warm_up():
    """Drafts of any length for any row, from step to step."""
    settings = {"pool_pages": 48, "scheduling_policy": "priority", "bucket_plan": SEVERAL, "speculative_config": NGRAM}
    engine = dummy.make_engine(dummy.dummy_model(), **settings)
    jax.clear_caches()  # of eager operations, which an engine before this one may have filled
    engine.runner.warm_up()
    assert set(engine.runner.programs.keys) <= set(stages(engine)[0].programs._compiled)
    assert len(engine.runner.programs.keys) == SEVERAL.num_programs == 10
    assert engine.draft_lengths is not None
    rng = np.random.default_rng(1)

    def choose(rows: np.ndarray, *, explore: bool, queued: bool) -> np.ndarray:
        return np.minimum(rng.choice([0, 2, 3]), rng.integers(0, 9, len(rows))).astype(np.int32)

    engine.draft_lengths.choose = choose
    before = num_compiled()
    use_everything(engine)
    assert num_compiled() == before
    assert set(engine.stats.padding.steps) == set(engine.config.plan.buckets), "a bucket was not used"
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_weights_change_among_drafts(compiler, expected, in_flight):
    """The same weights again, so that the outputs are still those without drafts."""

    def update(engine: Engine) -> None:
        engine.update_params(dummy.dummy_model(config=CONFIG), in_flight=in_flight)

    pairs = asks(compiler)
    on = make_engine()
    assert dummy.differences(serve(on, pairs, dict.fromkeys((6, 13, 21), update)), expected.answers) == []
    assert_drafted(on)
    assert (on.scheduler.stats().num_preemptions > 0) == (in_flight == "recompute")


def test_aborts_pauses_and_faults_among_drafts(expected):
    def fail(engine: Engine) -> None:
        dispatch, engine.runner.dispatch_head = engine.runner.dispatch_head, None  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(TypeError):
            while True:
                engine.step()
        engine.runner.dispatch_head = dispatch

    engine = make_engine()
    for i, (ask, _) in enumerate(asks()):
        engine.add_request(f"first {i}", ask.prompt, ask.params)
    for _ in range(6):
        engine.step()
    engine.abort(["first 0", "first 4"])
    engine.step()
    fail(engine)
    dummy.poison(engine)
    assert dummy.differences(serve(engine, asks()), expected.free) == []
    engine.sleep()
    engine.wake_up()
    dummy.poison(engine)
    assert dummy.differences(serve(engine, asks()), expected.free) == []


@pytest.mark.parametrize("rule", ["all stand", "one more stands", "none stands"])
@pytest.mark.slow
def test_a_wrong_rule_shows(rule, expected, monkeypatch):
    """The tests above would see drafts that stand and should not; and speculation that gains nothing."""
    right = verify.delivered

    def wrong(is_draft, drafts, sampled, bad):
        if rule == "all stand":
            return is_draft | ~is_draft
        found = right(is_draft, drafts, sampled, bad)
        if rule == "none stands":
            return found & ~is_draft
        before = np.s_[:-1]
        return found.at[1:].set(found[1:] | (found[before] & is_draft[1:] & (drafts[1:] >= 0)))

    monkeypatch.setattr(verify, "delivered", wrong)
    engine = make_engine(compile_anew="heads")
    differ = dummy.differences(serve(engine, asks()), expected.free)
    assert bool(differ) == (rule != "none stands")
    if not differ:
        with pytest.raises(AssertionError):
            assert_drafted(engine)

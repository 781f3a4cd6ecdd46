"""A draft model in the engine: outputs are those without it, its KV is that of its own forward, and what can't draft is refused."""

import functools
import itertools
import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, BucketPlan, Engine, EngineConfig, SamplingParams
from jaxserve.buckets.plan import Bucket
from jaxserve.engine.drafting import Draft
from jaxserve.engine.sharding import check_sharding
from jaxserve.execution import draft_model, draft_pages
from jaxserve.execution.draft_pages import DraftPages
from jaxserve.execution.programs import RestBody, RestHead
from jaxserve.sampling import sampler
from jaxserve.speculative import draft_rests
from jaxserve.speculative.config import SpeculativeConfig
from tests import alphabet_model, dummy
from tests.dummy import Ask
from tests.engine.test_engine_compiles import num_compiled
from tests.goldens.golden import HERE
from tests.sampling.test_sampling import chi_square_p
from tests.selection import exhaustive_unless
from tests.speculative import test_engine_rejection as rejection_tests
from tests.speculative import test_engine_speculative as speculative_tests
from tests.speculative.drafts import NAMED, eagle, medusa, near, other
from tests.speculative.test_engine_speculative import CONFIG, PLAN, SMALL_POOL, asks, serve

compiler, expected, tokenizer = speculative_tests.compiler, speculative_tests.expected, speculative_tests.tokenizer


@functools.cache
def draft(name: str) -> Draft:
    if name == "medusa":
        return medusa(CONFIG, 3)
    if name.startswith("eagle"):
        return eagle(CONFIG, 3 if name == "eagle3" else 1)
    return {"same": lambda: near(CONFIG, 0.0), "near": lambda: near(CONFIG), "other": lambda: other(CONFIG)}[name]()


def make_engine(name: str = "near", **settings) -> Engine:
    settings = {"bucket_plan": PLAN, "speculative_config": NAMED, **settings}
    return dummy.make_engine(dummy.dummy_model(config=CONFIG), draft=draft(name), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("pool_pages", exhaustive_unless(bool, [SMALL_POOL, None]), ids=["small_pool", "large_pool"])
def test_the_output_is_that_without_drafts(compiler, expected, pool_pages):
    on = make_engine(pool_pages=pool_pages)
    answers = serve(on, asks(compiler))
    assert dummy.differences(answers, expected.answers) == []
    assert 0 < on.stats.num_accepted_tokens < on.stats.num_draft_tokens, "few stand where tokens are forbidden or penalised"
    stats = on.scheduler.stats()
    assert stats.num_hit_tokens and bool(stats.num_preemptions) == (pool_pages is not None)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [4, 8])
def test_the_target_drafts_for_itself_and_is_always_right(page_size):
    """Greedy and drawn, in chunks, from shared prefixes and after preemptions: whatever a draft's KV lacked would show."""
    engine = make_engine("same", page_size=page_size, pool_pages=140 // page_size)
    rng = np.random.default_rng(0)
    shared = rng.integers(1, CONFIG.vocab_size, 17).tolist()
    for i in range(10):
        prompt = shared[: 17 - i % 3] + rng.integers(1, CONFIG.vocab_size, rng.integers(1, 30)).tolist()
        params = SamplingParams(temperature=i % 3 / 2, top_k=7 * (i % 2), seed=i, max_tokens=25, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
        dummy.poison(engine)
    stats = engine.stats
    assert engine.scheduler.stats().num_preemptions and engine.scheduler.stats().num_hit_tokens
    assert stats.num_draft_tokens > 100 and stats.num_accepted_tokens >= stats.num_draft_tokens - stats.num_drafts * 0.25 * 3
    refused = stats.num_draft_tokens - stats.num_accepted_tokens
    assert refused <= 0.02 * stats.num_draft_tokens + 2 * 10, "only behind an output's end"


FAULTS = {
    "drafts without the last page": (DraftPages, "branch", lambda right: without_copy),
    "one position off": (draft_pages.LastRows, "of", lambda right: classmethod(lambda cls, seen: shifted(right(seen)))),
    "prompts are not read": (draft_model.DraftModel, "read_body", lambda right: lambda self, weights, state, ran: state),
}


def without_copy(self, kv_pages, page_table, seq_rows, positions, right=DraftPages.branch):
    return kv_pages, right(self, kv_pages, page_table, seq_rows, positions)[1]


def shifted(last: draft_pages.LastRows) -> draft_pages.LastRows:
    return replace(last, positions=last.positions + 1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_with_a_fault_is_seldom_right(fault, monkeypatch):
    """What `test_the_target_drafts_for_itself_and_is_always_right` would find."""
    owner, name, make = FAULTS[fault]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    engine = make_engine("same", compile_anew="all")
    for i in range(3):
        prompt = np.random.default_rng(i).integers(1, CONFIG.vocab_size, 30).tolist()
        engine.add_request(str(i), prompt, SamplingParams(temperature=1, seed=i, max_tokens=40, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats.num_accepted_tokens < 0.7 * engine.stats.num_draft_tokens


@pytest.mark.slow
def test_a_draft_of_another_shape(expected):
    on = make_engine("other")
    assert dummy.differences(serve(on, asks()), expected.free) == []
    assert on.stats.num_draft_tokens > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "acceptance"),
    [
        ("near", "sampled"),
        pytest.param("near", "rejection", marks=pytest.mark.exhaustive),
        ("eagle3", "rejection"),
        pytest.param("eagle", "sampled", marks=pytest.mark.exhaustive),
        ("medusa", "rejection"),
    ],
)
def test_nothing_compiles_after_warm_up_nor_after_a_sleep(name, acceptance):
    several = BucketPlan(decode=(2,), mixed=((24, 6),), head_rows=(6, 24), draft=((1, 3), (4, 3)))
    speculative = {**NAMED, "acceptance": acceptance} | ({} if name == "near" else {"method": name})
    engine = make_engine(name, compile_anew="all", bucket_plan=several, speculative_config=speculative)
    jax.clear_caches()  # of eager operations, which an engine before this one may have filled
    engine.runner.warm_up()
    held = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(dummy.stages(engine)[0].state.rows.drafts))
    assert engine.runner.programs.draft_bytes == held
    said = []
    for sleep in (False, True, True):
        if sleep:
            engine.sleep()
            engine.wake_up()
        before = num_compiled()
        requests = [
            request
            for i in range(8)
            for request in engine.add_request(str(i), [1 + i, *range(30)], SamplingParams(temperature=i % 2, seed=i, max_tokens=20))
        ]
        while engine.has_unfinished_requests():
            engine.step()
        assert num_compiled() == before
        said.append([request.token_ids for request in requests])
    assert said[0] == said[1] == said[2] and engine.stats.num_draft_tokens
    assert name != "near" or engine.stats.num_accepted_tokens


def test_drafts_are_distributed_as_the_model_that_drafts():
    """What rejection is told of a draft is what it was drawn from: temperature, filters and all."""
    rng, V, n = np.random.default_rng(2), 40, 4000
    logits = jnp.asarray(np.repeat(rng.normal(0, 2, (1, V)).astype(np.float32), n, 0))
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.0, 0, 1.0)):
        columns: list[Any] = [np.full(n, x, np.float32) for x in (temperature, top_p, 0)] + [np.full(n, top_k, np.int32)]
        columns += [np.stack([np.arange(n), np.zeros(n)], 1).astype(np.uint32)]
        columns += [np.zeros(n, np.int32), np.full(n, 9, np.int32), np.zeros(n, np.int32)]
        columns += [np.full((n, 1), -1, np.int32), np.zeros(n, np.int32)]
        rows = sampler.SamplingRows(*map(jnp.asarray, columns))
        tokens, probs = map(np.asarray, jax.jit(lambda rows: sampler.draw_with_probs(logits, rows, 2))(rows))
        order = np.argsort(-logits[0], kind="stable")
        p = np.exp((logits[0] - logits[0].max()) / (temperature or 1e-9)).astype(np.float64)
        p[order[top_k or V :]] = 0
        p /= p.sum()
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
        np.testing.assert_allclose(probs[0], p, atol=1e-6)
        kept = p > 0
        assert np.isin(tokens, np.flatnonzero(kept)).all()
        if kept.sum() > 1:
            assert chi_square_p(np.bincount(tokens, minlength=V)[kept], p[kept] * n) > 1e-3


def joint_distribution(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """(p: of the first three tokens' counts, against the target's own distribution; the share of drafts that were accepted)."""
    config, method = rejection_tests.CONFIG, "draft_model" if name == "near" else name
    if rule in rejection_tests.WRONG:
        monkeypatch.setattr(*rejection_tests.WRONG[rule])
    speculative = {**NAMED, "method": method, "num_speculative_tokens": 2, "acceptance": "rejection"}
    settings: dict[str, Any] = {"max_num_seqs": rejection_tests.SAMPLES, "max_num_batched_tokens": rejection_tests.TOKENS}
    settings |= {"bucket_plan": rejection_tests.PLAN, "speculative_config": speculative}
    heads = {"near": lambda: near(config, 0.3), "eagle": lambda: eagle(config, 1), "eagle3": lambda: eagle(config, 3)}
    drafts = (heads | {"medusa": lambda: medusa(config, 2, scale=0.3)})[name]()
    engine = dummy.make_engine(dummy.dummy_model(config=config), draft=drafts, compile_anew="heads", **settings)
    num_requests = rejection_tests.REQUESTS
    monkeypatch.setitem(rejection_tests.PARAMS, "frequency_penalty", 0.0)
    rejection_tests.next_probs.cache_clear()
    counted = rejection_tests.counts(engine, num_requests)
    p = chi_square_p(counted, rejection_tests.distribution() * num_requests * rejection_tests.SAMPLES)
    rejection_tests.next_probs.cache_clear()
    return p, engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name != "eagle", ["near", "eagle", "eagle3", "medusa"]))
def test_rejection_has_the_targets_distribution(name, monkeypatch, record_property):
    """The joint distribution of three tokens. Rules that are almost right fail with n-grams and Markov, more of whose drafts are
    among the few tokens that the outputs may have (test_engine_rejection.py)."""
    p, accepted = joint_distribution(name, "right", monkeypatch)
    record_property("counted", f"drafts of {name}: outputs p {p:.1e}, accepted {accepted:.3f}")
    assert 0.05 < accepted < 0.95
    assert p > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name == "eagle3", ["eagle", "eagle3"]))
def test_a_rule_that_is_wrong_shows_with_heads_too(name, monkeypatch):
    """Too few of these Medusa heads' drafts are allowed to show it."""
    p, _ = joint_distribution(name, "every draft stands", monkeypatch)
    assert p < 1e-6


def test_what_can_not_draft_is_refused():
    model = dummy.dummy_model(config=CONFIG)
    engine = functools.partial(dummy.make_engine, model, bucket_plan=PLAN)
    with pytest.raises(ValueError, match=r"can't draft for this one: its vocab_size is 99, the target's 260: take"):
        engine(draft=dummy.dummy_model(config=replace(CONFIG, vocab_size=99)), speculative_config=NAMED)
    with pytest.raises(
        ValueError, match=r"its max_position_embeddings=40 is less than the \d+ tokens that a request may have: lower"
    ):
        engine(draft=dummy.dummy_model(config=replace(CONFIG, max_position_embeddings=40)), speculative_config=NAMED)
    with pytest.raises(ValueError, match="the draft's weights are bfloat16, the target's float32"):
        engine(draft=dummy.dummy_model("bfloat16", config=CONFIG), speculative_config=NAMED)
    with pytest.raises(ValueError, match="method='draft_model' needs a draft: LLM loads it"):
        engine(speculative_config=NAMED)
    with pytest.raises(ValueError, match="draft= is given, and speculative_config asks for no model"):
        engine(draft=model)
    for field, message in (
        ({"model": None}, "method='draft_model' needs model, the checkpoint that drafts, found None"),
        ({"method": "ngram"}, "method='ngram' takes no model, found model='given'"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens=0 must be an integer in \[1, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeConfig.make({**NAMED, **field})
    with pytest.raises(NotImplementedError, match="kv_store=.* keeps the target's pages, and not those of model='given'"):
        EngineConfig(speculative_config=NAMED, kv_store="host:1GiB")
    with pytest.raises(NotImplementedError, match="method='draft_model' runs on one device, and tensor_parallel_size=2"):
        check_sharding(EngineConfig(speculative_config=NAMED, tensor_parallel_size=2))


@pytest.fixture(scope="module")
def alphabets(tmp_path_factory):
    """Folders: a target, a draft, and one whose tokenizer has two tokens in each other's place."""
    folders = [alphabet_model.save(tmp_path_factory.mktemp(name)) for name in ("target", "draft", "other")]
    file = folders[2] / "tokenizer.json"
    said = json.loads(file.read_text())
    vocabulary = said["model"]["vocab"]
    first, second = (next(token for token, i in vocabulary.items() if i == wanted) for wanted in (65, 66))
    vocabulary[first], vocabulary[second] = 66, 65
    file.write_text(json.dumps(said))
    return folders


@pytest.mark.slow
def test_an_llm_loads_what_drafts(alphabets):
    speculative = {"method": "draft_model", "model": alphabets[1], "num_speculative_tokens": 4, "adaptive": False}
    options = {"bucket_plan": BucketPlan(mixed=((24, 4),), head_rows=(24,)), "num_pages": 64, "page_size": 4}
    llm = LLM(alphabets[0], speculative_config=speculative, compilation_cache_dir="", **options)
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    (output,) = llm.generate(["a"], params, use_tqdm=False)
    assert output.outputs[0].text == alphabet_model.after("a", 21)
    assert llm.engine.stats.num_steps < 8 and llm.engine.stats.num_accepted_tokens > 12, "five tokens a step"
    assert "% of" in llm.engine.stats.draft_summary
    weights = dict(zip(*(getattr(llm.engine.runner.programs.functions, name) for name in ("paths", "weights")), strict=True))
    config = llm.engine.config.model
    again = LLM.from_params(weights, config, tokenizer=alphabets[0], speculative_config=speculative, **options)
    assert again.generate(["a"], params, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_another_vocabulary_is_refused_before_weights_are_read(alphabets, monkeypatch):
    monkeypatch.setattr("jaxserve.llm.load_files", None)
    speculative = {"method": "draft_model", "model": str(alphabets[2]), "num_speculative_tokens": 4}
    with pytest.raises(
        ValueError, match=r"another vocabulary than the target: of 256 tokens that were compared [12] have other texts"
    ):
        LLM(alphabets[0], speculative_config=speculative, compilation_cache_dir="")
    with pytest.raises(ValueError, match="its vocab_size is 160, the target's 260"):
        LLM(alphabets[0], speculative_config={**speculative, "model": HERE / "llama"}, compilation_cache_dir="")
    with pytest.raises(FileNotFoundError, match="nowhere/at/all"):
        LLM(alphabets[0], speculative_config={**speculative, "model": "nowhere/at/all"}, compilation_cache_dir="")


def test_a_row_has_pages_of_its_own_for_any_place_in_a_page():
    for page_size, num_drafts in itertools.product((2, 4, 16), (1, 2, 3, 5, 16)):
        pages = DraftPages(10, page_size, 3, num_drafts, "xla")
        most = max((offset + num_drafts - 1) // page_size for offset in range(page_size))
        assert pages.pages_per_row == most + 1 and pages.total == 10 + 3 * pages.pages_per_row


@pytest.mark.slow
@pytest.mark.parametrize("name", ["near", "eagle3", "medusa"])
def test_heads_make_no_drafts_where_none_pay(name, monkeypatch):
    """First no drafts are worth it: plain steps run heads that draft nothing, but for a few. Then all are made and verified again.
    Outputs stay those without drafts, to the last bit, as all steps have one shape."""
    for constant, value in (("PATIENCE", 1), ("PROBE_EVERY", 4), ("PROBE_STEPS", 1)):
        monkeypatch.setattr(draft_rests, constant, value)
    method = "draft_model" if name == "near" else name
    engine = make_engine(name, speculative_config=NAMED | {"method": method, "adaptive": True})
    lengths, dispatch, seen = engine.draft_lengths, engine.runner.dispatch_head, []
    assert lengths is not None
    assert [key for key in engine.runner.programs.keys if isinstance(key, RestHead)] == [RestHead(*PLAN.head_rows)]
    engine.runner.programs.get(RestHead(*PLAN.head_rows))  # heads rest in programs that are compiled alone

    def noted(body, allowed=None):
        seen.append((body.inputs.proposes, lengths.adaptive))
        return dispatch(body, allowed)

    def verify_all(engine):
        lengths.adaptive = False

    engine.runner.dispatch_head = noted
    monkeypatch.setattr(lengths, "_choose", lambda rows, explore, queued: np.zeros(len(rows), np.int32))
    plain = [SamplingParams(temperature=i % 2, seed=i, max_tokens=50, ignore_eos=True) for i in range(4)]
    pairs: list[tuple[Ask, Any]] = [(Ask([1 + i, 7, 9], params, at=4 * i), None) for i, params in enumerate(plain)]
    without = serve(dummy.make_engine(dummy.dummy_model(config=CONFIG), bucket_plan=PLAN), pairs)
    assert dummy.differences(serve(engine, pairs, {45: verify_all}), without) == []
    rested = [not proposes for proposes, _ in seen]
    assert 10 < sum(rested) < len(seen) and not any(r for r, (_, adaptive) in zip(rested, seen, strict=True) if not adaptive)
    assert engine.stats.num_draft_tokens > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["near", "eagle3"])
def test_what_never_paid_is_not_run_over_steps_at_rest(name, monkeypatch):
    """Of their tokens it knows nothing, zeros instead of what stood in the pages before; of all others it does. Outputs stay."""
    for constant, value in (("PATIENCE", 1), ("PROBE_EVERY", 8), ("PROBE_STEPS", 3), ("RESTS_THAT_FOLLOW", 0)):
        monkeypatch.setattr(draft_rests, constant, value)
    plan = BucketPlan(decode=(2,), mixed=PLAN.mixed, head_rows=(2, *PLAN.head_rows))
    method = "draft_model" if name == "near" else name
    options = {"bucket_plan": plan, "async_scheduling": False, "page_size": 4, "pool_pages": 30}
    engine = make_engine(name, speculative_config=NAMED | {"method": method, "adaptive": True}, **options)
    lengths, dispatch, was_read, garbage = engine.draft_lengths, engine.runner.dispatch_head, [], 5.0
    assert lengths is not None
    for key in (RestHead(2), RestBody(Bucket(2, 2, 1))):
        assert key in engine.runner.programs.keys
        engine.runner.programs.get(key)
    monkeypatch.setattr(lengths, "_choose", lambda rows, explore, queued: np.zeros(len(rows), np.int32))

    def noted(body, allowed=None):
        was_read.append(body.inputs.is_read)
        assert body.inputs.is_read or not body.inputs.proposes
        return dispatch(body, allowed)

    engine.runner.dispatch_head = noted
    runner: Any = engine.runner
    proposer = runner.state.rows.drafts.proposer
    pages = proposer if name == "near" else proposer.kv_pages
    pages[:] = [jnp.full_like(kv, garbage) for kv in pages]
    prompt, params = [1, 7, 9], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (request,) = engine.add_request("0", prompt, params)
    table = None
    while not request.finished:
        engine.step()
        if not request.finished:
            table = np.asarray(runner.state.rows.page_table[request.row])
    without = dummy.make_engine(dummy.dummy_model(config=CONFIG), **options)
    (expected,) = without.add_request("0", prompt, params)
    while not expected.finished:
        without.step()
    assert request.token_ids == expected.token_ids and was_read.count(False) > 10 < was_read.count(True)

    state = runner.state.rows.drafts.proposer
    (kv, *_) = state if name == "near" else state.kv_pages
    known = [True] * len(prompt) + was_read[1:]  # of each position's token
    if name == "eagle3":  # of each pair, for which the state and the token behind it must be known
        known = [now and then for now, then in itertools.pairwise(known)]
    assert table is not None
    for position, is_known in enumerate(known[:-1]):
        found = np.asarray(kv[table[position // 4], :, :, position % 4])
        assert (found != garbage).all() and (found.any() if is_known else not found.any()), (position, is_known)

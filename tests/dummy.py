"""A two-layer model with random weights, an engine around it, and a loop that serves requests and looks at every step.

The model is made so that a wrong context shows: its weights are large enough that each token it generates depends on all
that came before, and one of its layers sees a window of a few tokens. EOS is token 0, which is also what stands in padding.
The loop fills with NaN, between any two steps, every KV slot that nobody may read.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve import BucketPlan, Engine, EngineConfig, EngineOutput, Request, SamplingParams
from jaxserve.buckets.plan import Bucket
from jaxserve.execution.leading_runner import LeadingRunner
from jaxserve.execution.pipeline_runner import PipelineRunner
from jaxserve.execution.runner import Runner
from jaxserve.models import Decoder, ModelConfig, RopeConfig, named_leaves, transpose_kernels, with_leaves
from jaxserve.scheduling.schedule import Schedule, SchedulerStats
from tests.scheduler_state import has_unfinished, hash_of, ref_count

EOS = 0
VOCAB = 96
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    sliding_windows=(None, 6),
    qk_norm=True,
    tie_word_embeddings=False,  # so that a bad embedding row spoils the requests that use it and no other's logits
)
TOKENS, SEQS = 24, 6  # of a step
SETTINGS = {
    "page_size": 4,
    "num_pages": 128,
    "max_model_len": 192,
    "max_num_seqs": SEQS,
    "max_num_batched_tokens": TOKENS,
    "compilation_cache_dir": "",
}
ONE_BUCKET = BucketPlan(mixed=((TOKENS, SEQS),), head_rows=(SEQS,))
SEVERAL_BUCKETS = BucketPlan(decode=(2, 6), mixed=((8, 6), (16, 6), (24, 6)), head_rows=(2, 6))


@functools.cache
def dummy_model(dtype: str = "float32", config: ModelConfig = CONFIG, transposed: bool = False) -> Decoder:
    if transposed:
        return transpose_kernels(nnx.clone(dummy_model(dtype, config)))
    rng = np.random.default_rng(7)
    abstract, leaves = Decoder.abstract(config, dtype), {}
    for path, leaf in named_leaves(abstract).items():
        x = rng.standard_normal(leaf.shape)
        if path.endswith("/scale"):
            x = 1 + 0.1 * x
        elif path.startswith("lm_head/"):
            x *= 2.5 / math.sqrt(leaf.shape[0])
            x[:, EOS] *= 1.5  # likelier than others, so that requests do end by it
        elif path.endswith("/kernel"):
            x *= 1.5 / math.sqrt(leaf.shape[-2])
        leaves[path] = jnp.asarray(x, dtype)
    return with_leaves(abstract, leaves)


@functools.cache
def _plain_forward(dtype: str, config: ModelConfig) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(dummy_model(dtype, config))


def plain_logprobs(tokens: Sequence[int], dtype: str = "float32", config: ModelConfig = CONFIG) -> np.ndarray:
    """f64[len(tokens), V]: log-probabilities of what follows each token, by the module's own causal forward over the whole
    sequence: no pages, no steps, no engine."""
    padded = np.zeros((1, SETTINGS["max_model_len"]), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(_plain_forward(dtype, config)(jnp.asarray(padded)), np.float64)[0, : len(tokens)]
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


_compiled: dict[Any, dict[Any, Any]] = {}  # programs by the shapes that all of them depend on, then as Programs keeps them


def make_engine(
    model: Decoder,
    *,
    pool_pages: int | None = None,
    compile_anew: str = "",
    eos: int = EOS,
    weights_id: str | None = None,
    draft: Any = None,
    **settings: Any,
) -> Engine:
    """An engine with SETTINGS, changed by `settings`.

    draft: as `Engine`'s.
    pool_pages: pages that the scheduler may hand out of the KV pool's. Programs are shared between engines of equal shapes, but
    for compile_anew: "bodies" or "heads" where what is traced has been changed, "all" where it is counted what compiles.
    """
    engine = Engine(model, EngineConfig(**{**SETTINGS, **settings}), eos_token_ids=(eos,), weights_id=weights_id, draft=draft)
    c, programs = engine.config, engine.runner.programs
    shapes = (c.scheduler.max_num_seqs, c.max_pages_per_seq, c.cache.page_size, c.cache.num_pages, c.plan.max_head_rows)
    shapes += (c.speculative and replace(c.speculative, adaptive=True),)  # the lengths are the host's choice
    shapes += (len(stages(engine)), c.attention_backend, c.engine.matmul_backend, c.engine.moe_backend, c.engine.deterministic)
    shapes += (tuple(programs.functions.paths), c.engine.tensor_parallel_size, c.engine.pipeline_parallel_size)
    shapes += (c.engine.attention_groups, None if draft is None else (draft.config, tuple(named_leaves(draft))))
    for stage, runner in enumerate(stages(engine)):
        programs = runner.programs
        shared = _compiled.setdefault((c.model, c.pages.dtype, shapes, stage), {})  # weights are a program's arguments
        if compile_anew in ("bodies", "heads"):
            programs._compiled = {k: made for k, made in shared.items() if isinstance(k, Bucket) == (compile_anew == "heads")}
        elif compile_anew != "all":
            programs._compiled = shared
    if pool_pages is not None:
        engine._make_host_state(pool_pages)
    for runner in stages(engine):
        _spoil_unowned(runner)
    poison(engine)
    return engine


def stages(engine: Engine) -> list[Runner]:
    """The runner of each stage of its pipeline, or the only one."""
    assert not isinstance(engine.runner, LeadingRunner), "it has the stages of one process"
    return engine.runner.stages if isinstance(engine.runner, PipelineRunner) else [engine.runner]


def _spoil_unowned(runner: Runner) -> None:
    """What stands at a row without an owner means nothing."""
    rows, step_hidden = runner.state.rows, runner.state.step_hidden
    drafts, fills = rows.drafts, {"page_table": -1, "num_computed": 11, "last_tokens": 22, "history": 33, "edits": 44}
    held = {name: getattr(rows, name) for name in fills}
    spoilt = {name: x if x is None else jnp.full_like(x, fills[name]) for name, x in held.items()}
    rows = replace(rows, **spoilt, drafts=drafts and replace(drafts, drafts=jnp.full_like(drafts.drafts, 5)))
    hidden = step_hidden if step_hidden is None else jnp.full_like(step_hidden, jnp.nan)
    runner.state = replace(runner.state, step_hidden=hidden, rows=rows)


def forget() -> None:
    """Every program that engines share."""
    _compiled.clear()
    _plain_forward.cache_clear()


@functools.partial(jax.jit, donate_argnums=0)
def _fill_with_nan(kv_pages: list[jax.Array], slots: jax.Array) -> list[jax.Array]:  # slots: bool[groups, num_pages, page_size]
    heads = jnp.repeat(slots, kv_pages[0].shape[2] // len(slots), axis=0).swapaxes(0, 1)  # those of a group's devices
    return [jnp.where(heads[:, None, :, :, None], jnp.nan, kv) for kv in kv_pages]


def poison(engine: Engine) -> None:
    """NaN into every slot that no step may read from now on: pages that nobody owns and no prefix can hit, and of owned pages
    what no step dispatched so far has written. Enqueued behind the steps in flight, like any step."""
    cache, pools, rows = engine.config.cache, engine.pools, engine.scheduler.rows
    slots = np.ones((len(pools), cache.num_pages, cache.page_size), bool)
    for group, pool in enumerate(pools):
        for page in range(pool.num_pages):
            slots[group, page] = not ref_count(pool, page) and hash_of(pool, page) is None
    for row in rows.order.tolist():
        owned = np.array(rows.pages(row), np.int32)
        position = np.arange(len(owned) * cache.page_size).reshape(len(owned), cache.page_size)
        slots[row // rows.rows_per_group, owned] |= position >= rows.num_computed[row]
    for runner in stages(engine):
        runner.state = replace(runner.state, kv_pages=_fill_with_nan(runner.state.kv_pages, slots))


@dataclass(frozen=True)
class Ask:
    """A request to be served. at: the number of steps before which it arrives. priority: counts where the engine heeds it."""

    prompt: list[int]
    params: SamplingParams
    at: int = 0
    priority: int = 0
    cache_salt: str | None = None

    def changed(self, **params: Any) -> "Ask":
        return replace(self, params=self.params.with_(**params))


@dataclass
class Answer:
    """All that the engine's outputs said of one sample. logprobs, prompt_logprobs: a token's {id: (logprob, rank)}."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, tuple[float, int | None]]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, tuple[float, int | None]] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, "an output after the last"
        self.tokens += output.new_token_ids
        self.logprobs += [{t: (x.logprob, x.rank) for t, x in entry.items()} for entry in output.logprobs or ()]
        if output.request.prompt_scores is not None:
            scores = output.request.prompt_scores.to_dicts()
            entries = [None if entry is None else {t: (x.logprob, x.rank) for t, x in entry.items()} for entry in scores]
            assert self.prompt_logprobs in (None, entries), "there from the first output on"
            self.prompt_logprobs = entries
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


@dataclass
class Run:
    """answers: by request id (`str(index of the Ask)`, or `index/sample`)."""

    answers: dict[str, Answer]
    schedules: list[Schedule]
    stats: SchedulerStats

    @property
    def num_mixed_steps(self) -> int:
        return sum(0 < s.num_decodes < s.num_seqs for s in self.schedules)

    @property
    def num_chunks(self) -> int:
        """Parts of prompts that did not end them."""
        return sum(int((~s.samples).sum()) for s in self.schedules)


def add(engine: Engine, name: str, ask: Ask) -> list[Request]:
    priority = ask.priority if engine.config.scheduler.order == "priority" else 0
    return engine.add_request(name, ask.prompt, ask.params, priority=priority, cache_salt=ask.cache_salt)


def serve(engine: Engine, asks: Sequence[Ask], *, check: bool = True, max_steps: int = 600) -> Run:
    """Serves the requests together, poisoning before every step. check: assert the scheduler's invariants after every step,
    and at the end that nothing is left; without it, what has not ended after max_steps stays unfinished."""
    schedules, answers = _spy(engine), {}
    arrivals = sorted(range(len(asks)), key=lambda i: asks[i].at)[::-1]
    for step in range(max_steps):
        while arrivals and (asks[arrivals[-1]].at <= step or not engine.has_unfinished_requests()):
            i = arrivals.pop()
            answers |= {r.request_id: Answer() for r in add(engine, str(i), asks[i])}
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            answers[output.request.request_id].take(output)
        if check:
            engine.scheduler.check_invariants()
        poison(engine)
    if check:
        assert_empty(engine)
    return Run(answers, schedules, engine.scheduler.stats())


def _spy(engine: Engine) -> list[Schedule]:
    """The schedules that the engine makes from now on."""
    seen: list[Schedule] = []
    schedule = engine.scheduler.schedule

    def spy() -> Schedule | None:
        made = schedule()
        if made is not None:
            seen.append(made)
        return made

    engine.scheduler.schedule = spy
    return seen


def serve_alone(model: Decoder, asks: Sequence[Ask], **settings: Any) -> dict[str, Answer]:
    """The answers of each sample served with nobody beside it, before it (no prefix is cached) or after it, one step at a
    time, in steps of the same shapes."""
    engine = make_engine(model, enable_prefix_caching=False, async_scheduling=False, **settings)
    answers = {}
    for i, ask in enumerate(asks):
        for k in range(ask.params.n):
            samples = add(engine, str(i), ask)
            for other in samples[:k] + samples[k + 1 :]:
                engine.finish(other, "abort")
            answers[samples[k].request_id] = answer = Answer()
            while engine.has_unfinished_requests():
                for output in engine.step():
                    answer.take(output)
                poison(engine)
    return answers


def assert_empty(engine: Engine) -> None:
    """Nothing of any request is left: no entry, row, page or reference."""
    scheduler, pool = engine.scheduler, engine.pool
    scheduler.check_invariants()
    assert not engine.has_unfinished_requests() and not engine._requests and not engine.pipeline.in_flight
    assert not has_unfinished(scheduler) and not scheduler.num_running and not scheduler.num_waiting
    assert scheduler.rows.num_free == engine.config.scheduler.max_num_seqs
    assert pool.num_free_pages == pool.num_pages and not any(ref_count(pool, page) for page in range(pool.num_pages))


def differences(answers: dict[str, Answer], expected: dict[str, Answer]) -> list[str]:
    """What of the answers is not exactly as expected, tokens, log-probabilities and reasons, in words."""
    found = []
    if answers.keys() != expected.keys():
        found.append(f"requests {sorted(answers)} instead of {sorted(expected)}")
    for name in answers.keys() & expected.keys():
        a, e = answers[name], expected[name]
        for what in ("tokens", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs"):
            if getattr(a, what) != getattr(e, what):
                found.append(f"request {name}: {what} {getattr(a, what)} instead of {getattr(e, what)}")
    return found

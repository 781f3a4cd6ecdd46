"""The compiled programs of a bucket plan: a body a bucket, a head a number of rows and variant, the scoring of
prompts and the state's update.

Owns their shapes and compilation, from shapes alone: nothing is allocated here. Knows nothing of steps in flight.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.batching.layout import StepLayout
from jaxserve.buckets.plan import Bucket
from jaxserve.execution.body import HeadInputs, body
from jaxserve.execution.compilation import compile_side_by_side
from jaxserve.execution.device_state import DeviceState, abstract_state, update_rows
from jaxserve.execution.draft_functions import TakenApart
from jaxserve.execution.draft_model import DraftModel
from jaxserve.execution.draft_pages import DraftPages
from jaxserve.execution.eagle import Eagle
from jaxserve.execution.head import Masks, drafting_head, head, score
from jaxserve.execution.medusa import Medusa
from jaxserve.execution.memory import reserve_bytes
from jaxserve.execution.mesh_programs import (
    KV_HEADS,
    MOVED_HEADS,
    REPLICATED,
    last_axis_on_mesh,
    moved_pages_on_mesh,
    on_mesh,
    run_on_mesh,
    state_on_mesh,
    state_specs,
)
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.execution.page_transfer import TRANSFER_PAGES, put, take
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.models import ModelConfig
from jaxserve.parallel.mesh import spans_hosts
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling.edit_rows import EditLayout, num_mask_words
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.proposer import BodyReader, Proposer
from jaxserve.speculative.suffix import HostDrafts
from kernels.backends import ATTENTION
from kernels.ragged_paged_attention import host_planner

logger: logging.Logger = logging.getLogger("jaxserve")


@dataclass(frozen=True)
class RestHead:
    """The key of a head of so many logits rows, without log-probabilities, that neither verifies drafts nor makes any."""

    rows: int


@dataclass(frozen=True)
class RestBody:
    """The key of the body of a bucket of decodes which what drafts does not read."""

    bucket: Bucket


ProgramKey = Bucket | tuple[int, bool] | RestBody | RestHead | str

UPDATE_BATCH = 1024  # page-table entries an update program takes at once
SCORE_ROWS = 256  # most logits rows that the score program holds at once

# On a GPU: matmuls go to cuBLASLt and sorts stay kernels of XLA's own. Both then need no device to be chosen by, so that a compile
# without one (scripts.aot_check) gives the card's program, and both can be captured in a CUDA graph. Nothing is computed twice to
# save memory: where weights and pages take more than 0.8 of the device, XLA would do so in every layer, and could save nothing. Nor
# to save a copy: a matmul whose rows are both kept and read would be run once for each.
GPU_COMPILER_OPTIONS: dict[str, bool | int | str] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_cub_radix_sort": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_disable_hlo_passes": "rematerialization",
}

# The same where bits must not follow the bucket: all matmuls are XLA's Triton ones in a single tile, K unsplit, the activations
# always on the left. Norms stay with XLA's own reductions, whose order follows the row's length; in Triton it follows the shape.
# `aot_check --deterministic=always` reads from the compiled programs whether it came out so.
GPU_ALWAYS_OPTIONS: dict[str, bool | int | str] = {
    "xla_gpu_enable_cub_radix_sort": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_gpu_enable_triton_gemm": True,
    "xla_gpu_cublas_fallback": False,
    "xla_gpu_experimental_force_split_k": 1,
    "xla_gpu_override_gemm_autotuner": "block_m: 64, block_n: 64, block_k: 64, split_k: 1, "
    "num_stages: 4, num_warps: 4, num_ctas: 1",
    "xla_disable_hlo_passes": "rematerialization,triton-softmax-rewriter,gemm-fusion-swap-operands",
    "xla_allow_excess_precision": False,  # every rounding that is written is done, whatever is fused
}


# What a CUDA graph may hold where it holds sums over devices. XLA's own choice leaves these out, and with them every conditional
# that has one. Graphs with collectives have been seen to be recorded anew at every run and to hang (openxla/xla#35360,
# marin-community/marin#8277); none of ours has run.
GRAPH_COLLECTIVES = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES"


# Of a mesh with devices of several processes. Hosts do not time kernels for one another: one that finds its programs in its cache
# would leave the others waiting. Who is stuck in a collective of NCCL's gives up. No card has run either.
GPU_HOSTS_OPTIONS: dict[str, bool | int | str] = {
    "xla_gpu_shard_autotuning": False,
    "xla_gpu_nccl_termination_timeout_seconds": 10,
}


def gpu_compiler_options(deterministic: str, graph_collectives: bool = False, several_hosts: bool = False) -> dict[str, Any]:
    """XLA's options for a GPU. deterministic: "bucket" or "always". graph_collectives: as EngineConfig's. several_hosts: whether
    the program's devices belong to several processes."""
    options = GPU_ALWAYS_OPTIONS if deterministic == "always" else GPU_COMPILER_OPTIONS
    options = options | (GPU_HOSTS_OPTIONS if several_hosts else {})
    return options | ({"xla_gpu_enable_command_buffer": GRAPH_COLLECTIVES} if graph_collectives else {})


class ProgramSpec(NamedTuple):
    """What a program is compiled from."""

    function: Callable[..., Any]
    donated: tuple[int, ...]  # argument numbers
    args: tuple[Any, ...]  # abstract


class Programs:
    """Programs of one model and plan, each compiled when first asked for and kept.

    Keys: a Bucket for its body, (rows, with_logprobs) for a head, "score" and "update"; with a store of KV also "take" and "put".
    Where drafts cost time and their number adapts, also a RestHead for plain steps, and a RestBody where bodies cost time too.
    The functions may be those of a pipeline's stage: heads and "score" are the last one's then. What they run:
    `execution.body.body`, `execution.head.head` (or `drafting_head`), `head.score`, `device_state.update_rows` and page_transfer's.
    Donated is the state that each of them returns anew, never weights, nor what the host fetches.
    """

    def __init__(self, functions: ModelFunctions, config: ResolvedConfig):
        self.functions = functions
        self.config = config
        limits = config.scheduler
        sizes = limits.max_num_seqs, config.cache.page_size, config.plan.max_head_rows
        self.layouts: dict[Bucket, StepLayout] = {
            b: StepLayout(b, *sizes, _planners(config, b), limits.num_groups, _draft_planners(config, functions, b))
            for b in config.plan.buckets
        }
        self.proposer: Proposer | None = make_proposer(config, functions)
        self.edit_layout: EditLayout = EditLayout(config.scheduler.max_model_len, config.model.vocab_size)
        self.num_awaited: int = 0  # calls of `get` that wait for a compile now
        self._compiled: dict[ProgramKey, Any] = {}
        self._counted = threading.Lock()
        self._locks: defaultdict[ProgramKey, threading.Lock] = defaultdict(threading.Lock)  # held while one is compiled

    @property
    def num_compiled(self) -> int:
        """Programs compiled, or loaded from the persistent cache, so far."""
        return len(self._compiled)

    @property
    def keys(self) -> list[ProgramKey]:
        """Every program of the plan."""
        plan = self.config.plan
        transfers = ("take", "put") if self.config.engine.kv_store is not None else ()
        if not self.functions.is_last:
            return [*plan.buckets, "update", *transfers]
        heads = [(rows, lp) for rows in plan.head_rows for lp in (False, True)]
        return [*plan.buckets, *heads, *self._at_rest, "score", "update", *transfers]

    @property
    def _at_rest(self) -> list[RestHead | RestBody]:
        speculative, plan = self.config.speculative, self.config.plan
        if speculative is None or not (speculative.adaptive and speculative.by_model):
            return []
        most = plan.select_head_rows(self.config.scheduler.max_num_seqs)
        bodies = plan.buckets if isinstance(self.proposer, BodyReader) else ()
        return [
            *(RestBody(bucket) for bucket in bodies if bucket.max_q_len == 1),
            *(RestHead(rows) for rows in plan.head_rows if rows <= most),
        ]

    def has(self, key: ProgramKey) -> bool:
        """Whether this program is compiled."""
        return key in self._compiled

    def get(self, key: ProgramKey) -> Any:
        """The program of one of `keys`, to be called with the arguments of its `spec`; compiled if it is not yet. Any thread may
        call it; where another compiles the same program already, this one waits for it."""
        if key not in self._compiled:
            with self._counted:
                self.num_awaited += 1
            try:
                self.compile(key)
            finally:
                with self._counted:
                    self.num_awaited -= 1
        return self._compiled[key]

    def compile(self, key: ProgramKey) -> None:
        """As `get`, behind what runs: nothing waits for the program."""
        with self._locks[key]:
            if key not in self._compiled:
                self._compiled[key] = self._compile(key)

    def spec(self, key: ProgramKey) -> ProgramSpec:
        """What the program of one of `keys` is compiled from: on a mesh, one device's function inside a `shard_map` over it."""
        spec, mesh = self._local_spec(key), self.functions.mesh
        if mesh is None:
            return spec
        taken = REPLICATED if spans_hosts(mesh) else MOVED_HEADS  # host 0 has no part of other processes' devices
        cut: dict[ProgramKey, Any] = {"take": taken, "put": KV_HEADS}
        results = (state_specs(), REPLICATED) if isinstance(key, Bucket | RestBody) else cut.get(key, REPLICATED)
        return spec._replace(function=run_on_mesh(spec.function, mesh, spec.args, results), args=on_mesh(spec.args, mesh))

    def _local_spec(self, key: ProgramKey) -> ProgramSpec:
        if isinstance(key, Bucket):
            return self._body_spec(key)
        if isinstance(key, RestBody):
            return self._body_spec(key.bucket, is_read=False)
        if isinstance(key, RestHead):
            return self._head_spec(key.rows, False, proposes=False)
        if key == "score":
            return self._score_spec()
        if key == "update":
            return self._update_spec()
        if isinstance(key, str):
            return self._transfer_spec(key)
        return self._head_spec(*key)

    def _body_spec(self, bucket: Bucket, is_read: bool = True) -> ProgramSpec:
        """(body weights, DeviceState, packed) -> (DeviceState, HeadInputs). A stage behind the first also takes hidden rows; one
        before the last returns such instead."""
        layout, reader = self.layouts[bucket], self.proposer if isinstance(self.proposer, BodyReader) else None
        function = functools.partial(body, self.functions, layout, self.config.attention_backend, reader, is_read=is_read)
        own = [] if reader is None or not is_read else self._proposer_weights()
        weights = self._weights(self.functions.body_indices) + own
        args = (weights, self.state, _i32(layout.size))
        if not self.functions.is_first:
            args += (jax.ShapeDtypeStruct((bucket.tokens, self.config.model.hidden_size), self.config.pages.dtype),)
        return ProgramSpec(function, (1,), args)

    def _head_spec(self, rows: int, with_logprobs: bool, proposes: bool = True) -> ProgramSpec:
        """(head weights, RowState, HeadInputs, Masks) -> (RowState, what the host fetches)."""
        R, hidden_size = self.config.plan.max_head_rows, self.config.model.hidden_size
        hidden: Any = jax.ShapeDtypeStruct((R, hidden_size), self.config.pages.dtype)
        inputs = HeadInputs(hidden, _i32(R), None if self.proposer is None else _i32(R), _i32(R, sampling_rows.NUM_COLUMNS))
        given: Any = jax.ShapeDtypeStruct((), jnp.bool_)
        masks = Masks(_i32(rows, self.num_mask_words), given)
        if self.functions.mesh is not None:
            masks = Masks(last_axis_on_mesh(masks.allowed, self.functions.mesh), given)
        shape = rows, min(MAX_LOGPROBS, self.config.model.vocab_size) if with_logprobs else 0
        if self.proposer is None or not proposes:
            function = functools.partial(head, self.functions, *shape)
        else:
            assert self.config.speculative is not None
            how = self.functions, self.proposer, self.config.speculative.acceptance
            function = functools.partial(drafting_head, *how, *shape)
        return ProgramSpec(function, (1,), (self._head_weights(), self.state.rows, inputs, masks))

    def _score_spec(self) -> ProgramSpec:
        """(head weights, step_hidden, packed spans) -> what the host fetches; of `score_rows` rows."""
        args = self._head_weights(), self.state.step_hidden, _i32(1 + 2 * self.score_rows)
        return ProgramSpec(functools.partial(score, self.functions, MAX_LOGPROBS), (), args)

    def _update_spec(self) -> ProgramSpec:
        """(RowState, page updates i32[UPDATE_BATCH, 3], one edit row) -> RowState."""
        return ProgramSpec(update_rows, (0,), (self.state.rows, _i32(UPDATE_BATCH, 3), _i32(*self.edit_layout.nothing.shape)))

    def _transfer_spec(self, key: str) -> ProgramSpec:
        """take: (KV pages, page ids) -> their KV; put: (KV pages, page ids of each group, KV) -> KV pages. Both of TRANSFER_PAGES
        pages. Over several processes what was taken is gathered, so that each has all of it."""
        pages, ids, mesh, shard = self.state.kv_pages, _i32(TRANSFER_PAGES), self.functions.mesh, self.functions.shard
        if key == "take":
            gathers = mesh is not None and spans_hosts(mesh)
            return ProgramSpec(functools.partial(take, shard if gathers else None), (), (pages, ids))
        kv = jax.eval_shape(functools.partial(take, None), pages, ids)
        args = pages, _i32(shard.groups * TRANSFER_PAGES), kv if mesh is None else moved_pages_on_mesh(kv, mesh)
        return ProgramSpec(functools.partial(put, shard), (0,), args)

    def _head_weights(self) -> list[jax.ShapeDtypeStruct]:
        """The model's, and behind them the proposer's."""
        return self._weights(self.functions.head_indices) + self._proposer_weights()

    def _proposer_weights(self) -> list[jax.ShapeDtypeStruct]:
        """Its own, and those of the model that it shares."""
        return [] if self.proposer is None else [*self.proposer.abstract, *self._weights(self.proposer.shared)]

    def _weights(self, indices: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        return [self.functions.abstract[i] for i in indices]

    @property
    def score_rows(self) -> int:
        """Tokens that a run of the score program scores."""
        return min(SCORE_ROWS, self.config.plan.buckets[-1].tokens)

    @property
    def num_mask_words(self) -> int:
        """int32 words of a logits row's mask, those of several devices one after the other."""
        shards = self.functions.shards
        return num_mask_words(self.config.model.vocab_size if shards is None else shards.vocab_size)

    @functools.cached_property
    def state(self) -> DeviceState:
        """The abstract state that the programs share."""
        functions = self.functions
        stage = {"num_layers": len(functions.layers), "is_last": functions.is_last}
        state = abstract_state(self.config, self.proposer, functions.shard.size, **stage)
        return state if functions.mesh is None else state_on_mesh(state, functions.mesh)

    @property
    def draft_bytes(self) -> int:
        """Of the draft state: the drafts, what they were drawn from, and what the proposer keeps."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state.rows.drafts))

    def largest_temp_bytes(self) -> int:
        """As much temporary memory as any program may need: see memory.reserve_bytes."""
        plan = self.config.plan
        largest = [key for key in (plan.buckets[-1], (plan.max_head_rows, True), "score") if key in self.keys]
        compile_side_by_side(self.get, largest)
        return reserve_bytes(self.get(key).memory_analysis().temp_size_in_bytes for key in largest)

    def _compile(self, key: ProgramKey) -> Any:
        start, spec = time.perf_counter(), self.spec(key)
        options = None
        if jax.default_backend() == "gpu":
            shards, engine = self.functions.shards, self.config.engine
            several = shards is not None and any(map(spans_hosts, shards.meshes))
            options = gpu_compiler_options(self.config.deterministic, engine.graph_collectives, several)
        compiled = jax.jit(spec.function, donate_argnums=spec.donated).lower(*spec.args).compile(compiler_options=options)
        logger.info("compiled %s in %.1f s", name_of(key), time.perf_counter() - start)
        return compiled


def name_of(key: ProgramKey) -> str:
    """A program, for logs and reports."""
    if isinstance(key, Bucket):
        return f"body {key}"
    if isinstance(key, str):
        return {"score": "score", "update": "state update", "take": "pages to the host", "put": "pages from the host"}[key]
    if isinstance(key, RestBody):
        return f"body {key.bucket}, not read"
    if isinstance(key, RestHead):
        return f"head({key.rows}, no drafts)"
    rows, with_logprobs = key
    return f"head({rows}{', logprobs' if with_logprobs else ''})"


def _i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def make_proposer(config: ResolvedConfig, functions: ModelFunctions) -> Proposer | None:
    """What drafts for a model, by the config; None: nothing does."""
    asked = config.speculative
    if asked is None:
        return None
    if asked.method == "suffix":
        return HostDrafts(asked.num_speculative_tokens)
    if asked.method == "ngram":
        assert asked.prompt_lookup_min is not None and asked.prompt_lookup_max is not None
        return NgramProposer(asked.num_speculative_tokens, asked.prompt_lookup_min, asked.prompt_lookup_max)
    if functions.draft is None:
        raise ValueError(f"speculative_config: method={asked.method!r} needs a draft: LLM loads it, and Engine takes it as draft=")
    cache, drafts, seqs = config.cache, asked.num_speculative_tokens, config.scheduler.max_num_seqs
    draws = asked.acceptance == "rejection"
    if asked.method == "medusa":
        return Medusa(functions.draft, functions, drafts, draws)
    backend = draft_attention(functions.draft, config.attention_backend, cache.page_size)
    pages = DraftPages(
        cache.num_pages, cache.page_size, seqs, drafts, backend, _row_planners(backend, functions.draft.model_config)
    )
    if asked.method == "draft_model":
        return DraftModel(functions.draft, pages, draws)
    return Eagle(functions.draft, functions, pages, draws, config.plan.max_head_rows)


def draft_attention(draft: TakenApart, backend: str, page_size: int) -> str:
    """The attention of a model that drafts beside a target with `backend`: the same, but "xla" where that can't do the draft's
    shapes, which is logged."""
    model = draft.model_config
    heads = {"num_query_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    lacks = ATTENTION[backend].functions.lacks(**heads, page_size=page_size, dtype=draft.dtype)
    if lacks is None:
        return backend
    _say_fallback(backend, lacks)
    return "xla"


@functools.cache
def _say_fallback(backend: str, lacks: str) -> None:
    logger.warning("attention of the draft runs on xla: %s can't do %s", backend, lacks)


def _planners(config: ResolvedConfig, bucket: Bucket) -> dict[int | None, Any]:
    """The attention planner of each sliding window of the model, where the backend is planned on the host."""
    return _body_planners(config, config.attention_backend, config.local, bucket)


def _draft_planners(config: ResolvedConfig, functions: ModelFunctions, bucket: Bucket) -> dict[int | None, Any]:
    """The same of a draft model, whose layers attend in bodies. (EAGLE's attends in heads alone.)"""
    if config.speculative is None or config.speculative.method != "draft_model" or functions.draft is None:
        return {}
    backend = draft_attention(functions.draft, config.attention_backend, config.cache.page_size)
    return _body_planners(config, backend, functions.draft.model_config, bucket)


def _body_planners(config: ResolvedConfig, backend: str, model: ModelConfig, bucket: Bucket) -> dict[int | None, Any]:
    bucket = bucket.part(config.scheduler.num_groups)
    num_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    return _window_planners(
        *(backend, model),
        num_tokens=bucket.tokens,
        num_seqs=bucket.seqs,
        max_q_len=bucket.max_q_len,
        max_kv_len=config.max_pages_per_seq * config.cache.page_size,
        split_q_len=min(bucket.max_q_len, 1 + num_drafts),
    )


def _row_planners(backend: str, model: ModelConfig) -> Callable[[int, int], dict[int | None, Any]] | None:
    """As DraftPages.planners."""
    if host_planner(backend) is None:
        return None
    return lambda rows, positions: _window_planners(
        backend, model, num_tokens=rows, num_seqs=rows, max_q_len=1, max_kv_len=positions
    )


def _window_planners(backend: str, model: ModelConfig, **sizes: int) -> dict[int | None, Any]:
    make_planner = host_planner(backend)
    if make_planner is None:
        return {}
    heads = {"num_query_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    return {window: make_planner(sliding_window=window, **heads, **sizes) for window in dict.fromkeys(model.sliding_windows)}

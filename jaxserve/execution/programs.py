"""The compiled programs of a bucket plan: a body a bucket, a head a number of rows and variant, the scoring of
prompts and the state's update.

Owns their shapes and compilation, from shapes alone: nothing is allocated here. Knows nothing of steps in flight.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.batching.layout import StepLayout
from jaxserve.buckets.plan import Bucket
from jaxserve.execution import step
from jaxserve.execution.memory import reserve_bytes
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling.edit_rows import EditLayout, num_mask_words
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.proposer import BodyReader, Proposer

logger: logging.Logger = logging.getLogger("jaxserve")

UPDATE_BATCH = 1024  # page-table entries an update program takes at once
SCORE_ROWS = 256  # most logits rows that the score program holds at once

# On a GPU: matmuls go to cuBLASLt and sorts stay kernels of XLA's own. Both then need no device to be chosen by, so that a compile
# without one (scripts.aot_check) gives the card's program, and both can be captured in a CUDA graph.
GPU_COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cub_radix_sort": False}


class Programs:
    """Programs of one model and plan, each compiled when first asked for and kept.

    Every program takes flat lists of weights first. Donated: the body's kv_pages, page_table, num_computed and step_hidden (and
    the state of a proposer that reads it), the head's last_tokens and history (and where speculation is on num_computed and its
    state), the update's page_table, history and edits; never what the host fetches.
    """

    def __init__(self, functions: step.ModelFunctions, config: ResolvedConfig):
        self.functions = functions
        self.config = config
        self.layouts: dict[Bucket, StepLayout] = {
            b: StepLayout(b, config.scheduler.max_num_seqs, config.cache.page_size, config.plan.max_head_rows, _planners(config, b))
            for b in config.plan.buckets
        }
        self.proposer: Proposer | None = make_proposer(config.speculative)
        self.reader: BodyReader | None = self.proposer if isinstance(self.proposer, BodyReader) else None
        self.edit_layout: EditLayout = EditLayout(config.scheduler.max_model_len, config.model.vocab_size)
        self._compiled: dict[Any, Any] = {}

    @property
    def num_compiled(self) -> int:
        """Programs compiled, or loaded from the persistent cache, so far."""
        return len(self._compiled)

    @property
    def keys(self) -> list[Any]:
        """Every program of the plan, as arguments for `get`: a Bucket, (rows, with_logprobs), "score" or "update"."""
        plan = self.config.plan
        return [*plan.buckets, *((rows, lp) for rows in plan.head_rows for lp in (False, True)), "score", "update"]

    def get(self, key: Any) -> Any:
        """The program of one of `keys`, compiled if it is not yet."""
        if isinstance(key, Bucket):
            return self.body(key)
        return getattr(self, key)() if isinstance(key, str) else self.head(*key)

    def body(self, bucket: Bucket) -> Any:
        """compiled(leaves, kv_pages, page_table, num_computed, step_hidden, last_tokens, packed, *of_drafts(state)): `step.body` of
        this bucket."""
        if bucket not in self._compiled:
            self._compiled[bucket] = self._compile(f"body {bucket}", *self.body_spec(bucket))
        return self._compiled[bucket]

    def head(self, rows: int, with_logprobs: bool) -> Any:
        """compiled(leaves, last_tokens, history, edits, hidden, HeadInputs, masks, masked): `step.head` for this many rows. Where
        speculation is on, `step.drafting_head`, with num_computed and its state behind the history."""
        key = (rows, with_logprobs)
        if key not in self._compiled:
            self._compiled[key] = self._compile(f"head({rows}{', logprobs' if with_logprobs else ''})", *self.head_spec(*key))
        return self._compiled[key]

    def score(self) -> Any:
        """compiled(leaves of the head, step_hidden, packed): `step.score` of `score_rows` rows."""
        if "score" not in self._compiled:
            self._compiled["score"] = self._compile("score", *self.score_spec())
        return self._compiled["score"]

    @property
    def score_rows(self) -> int:
        return min(SCORE_ROWS, self.config.plan.buckets[-1].tokens)

    def score_spec(self) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        """(function, donated argument numbers, abstract arguments) of the score program."""
        leaves = [self.functions.abstract[i] for i in self.functions.head_indices]
        packed = jax.ShapeDtypeStruct((1 + 2 * self.score_rows,), jnp.int32)
        return functools.partial(step.score, self.functions, MAX_LOGPROBS), (), (leaves, self.state[3], packed)

    def update(self) -> Any:
        """compiled(page_table, history, edits, updates i32[UPDATE_BATCH, 3], one edit row): `step.update_state`."""
        if "update" not in self._compiled:
            self._compiled["update"] = self._compile("state update", *self.update_spec())
        return self._compiled["update"]

    def update_spec(self) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        """(function, donated argument numbers, abstract arguments) of the update program."""
        uploads = (UPDATE_BATCH, 3), self.edit_layout.nothing.shape
        args = (self.state[1], *self.edit_state, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in uploads))
        return step.update_state, (0, 1, 2), args

    def body_spec(self, bucket: Bucket) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        """(function, donated argument numbers, abstract arguments) of a bucket's body."""
        layout = self.layouts[bucket]
        function = functools.partial(step.body, self.functions, layout, self.config.attention_backend)
        leaves = [self.functions.abstract[i] for i in self.functions.body_indices]
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        donated, of_drafts = (1, 2, 3, 4), () if self.proposer is None else self.of_drafts(self.draft_state)
        if self.reader is not None:
            function, donated = functools.partial(function, reader=self.reader), (*donated, 8)
        return function, donated, (leaves, *self.state, packed, *of_drafts)

    def of_drafts(self, state: step.DraftState) -> tuple[Any, ...]:
        """What a body takes of speculation's state: the drafts, and what is the proposer's own where that reads bodies."""
        return (state.drafts,) if self.reader is None else (state.drafts, state.proposer)

    def head_spec(self, rows: int, with_logprobs: bool) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        """(function, donated argument numbers, abstract arguments) of a head."""
        R, S = self.config.plan.max_head_rows, jax.ShapeDtypeStruct
        max_logprobs = MAX_LOGPROBS if with_logprobs else 0
        leaves = [self.functions.abstract[i] for i in self.functions.head_indices]
        hidden = S((R, self.config.model.hidden_size), self.config.pages.dtype)
        rows_of, sampling_of = S((R,), jnp.int32), S((R, sampling_rows.NUM_COLUMNS), jnp.int32)
        inputs: Any = step.HeadInputs(rows_of, None if self.proposer is None else rows_of, sampling_of)  # pyright: ignore[reportArgumentType]
        masks = S((rows, self.num_mask_words), jnp.int32), S((), jnp.bool_)
        history, edits = self.edit_state
        rest = (edits, hidden, inputs, *masks)
        if self.proposer is None:
            function = functools.partial(step.head, self.functions, rows, max_logprobs)
            return function, (1, 2), (leaves, self.state[4], history, *rest)
        assert self.config.speculative is not None
        drafting = self.proposer, self.config.speculative.acceptance
        function = functools.partial(step.drafting_head, self.functions, *drafting, rows, max_logprobs)
        return function, (1, 2, 3, 4), (leaves, self.state[4], history, self.state[2], self.draft_state, *rest)

    @property
    def num_mask_words(self) -> int:
        """int32 words of a logits row's mask."""
        return num_mask_words(self.config.model.vocab_size)

    @property
    def state(self) -> tuple[Any, Any, Any, Any, Any]:
        """Abstract (kv_pages, page_table, num_computed, step_hidden, last_tokens)."""
        c = self.config
        kv = jax.ShapeDtypeStruct(c.pages.layer(c.cache.num_pages), c.pages.dtype)
        seqs = jax.ShapeDtypeStruct((c.scheduler.max_num_seqs,), jnp.int32)
        table = jax.ShapeDtypeStruct((c.scheduler.max_num_seqs, c.max_pages_per_seq), jnp.int32)
        hidden = jax.ShapeDtypeStruct((c.plan.buckets[-1].tokens, c.model.hidden_size), c.pages.dtype)
        return [kv] * c.pages.num_layers, table, seqs, hidden, seqs

    @property
    def edit_state(self) -> tuple[Any, Any]:
        """Abstract (history, edits)."""
        seqs, layout = self.config.scheduler.max_num_seqs, self.edit_layout
        return (
            jax.ShapeDtypeStruct((seqs, layout.max_model_len), jnp.int32),
            jax.ShapeDtypeStruct((seqs, layout.num_columns), jnp.int32),
        )

    @property
    def draft_state(self) -> step.DraftState:
        """Abstract, where speculation is on."""
        assert self.proposer is not None and self.config.speculative is not None
        shape = self.config.scheduler.max_num_seqs, self.proposer.num_drafts
        drafts, probs = jax.ShapeDtypeStruct(shape, jnp.int32), None
        if self.proposer.draws and self.config.speculative.acceptance == "rejection":
            probs = jax.ShapeDtypeStruct((*shape, self.config.model.vocab_size), jnp.float32)
        return step.DraftState(drafts, probs, jax.eval_shape(self.proposer.init_state))  # pyright: ignore[reportArgumentType]

    @property
    def draft_bytes(self) -> int:
        """Of the draft state: the drafts, what they were drawn from, and what the proposer keeps."""
        leaves = [] if self.proposer is None else jax.tree.leaves(self.draft_state)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def largest_temp_bytes(self) -> int:
        """As much temporary memory as any program may need: see memory.reserve_bytes."""
        plan = self.config.plan
        largest = [self.body(plan.buckets[-1]), self.head(plan.max_head_rows, True), self.score()]
        return reserve_bytes(program.memory_analysis().temp_size_in_bytes for program in largest)

    def _compile(self, what: str, function: Callable, donate: tuple[int, ...], args: tuple[Any, ...]) -> Any:
        start = time.perf_counter()
        options = GPU_COMPILER_OPTIONS if jax.default_backend() == "gpu" else None
        compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile(compiler_options=options)
        logger.info("compiled %s in %.1f s", what, time.perf_counter() - start)
        return compiled


def make_proposer(config: SpeculativeConfig | None) -> Proposer | None:
    """What drafts, by `config`; None: nothing does."""
    if config is None:
        return None
    assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
    return NgramProposer(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)


def _planners(config: ResolvedConfig, bucket: Bucket) -> dict[int | None, Any]:
    """The attention planner of each sliding window of the model, where the backend is planned on the host."""
    if config.attention_backend != "mosaic_sm90":
        return {}
    from kernels.ragged_paged_attention.mosaic_sm90.planner import Planner

    model = config.model
    num_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    make = functools.partial(
        Planner.make,
        num_tokens=bucket.tokens,
        num_seqs=bucket.seqs,
        max_q_len=bucket.max_q_len,
        num_query_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_kv_len=config.max_pages_per_seq * config.cache.page_size,
        split_q_len=min(bucket.max_q_len, 1 + num_drafts),
    )
    return {window: make(sliding_window=window) for window in dict.fromkeys(model.sliding_windows)}

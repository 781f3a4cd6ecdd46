"""The device side of the engine: its state, dispatch and fetch.

Owns the KV pages, the page table, the decode state and the rows' edits on the device. Knows nothing of requests or scheduling: it
runs StepInputs in the order in which they come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.buckets.plan import Bucket
from jaxserve.execution.programs import UPDATE_BATCH, Programs
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.execution.step import DraftState
from jaxserve.sampling.rows import SampledRows, ScoredRows, unpack_sampled, unpack_scored
from jaxserve.speculative.proposer import NO_DRAFT


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A dispatched step. `out` is what the host fetches; None where no sequence sampled."""

    out: jax.Array | None  # i32[head rows, columns]
    scored: list[jax.Array]  # i32[score_rows, columns] each
    done: jax.Array  # ready when the step is
    num_samples: int


class Runner:
    """Runs steps in a plan's programs, each compiled when it is first needed unless `warm_up` came before.

    The model's weights are used in place, as `programs.functions.leaves`; state is allocated here.
    """

    body_leaves: list[Any]  # weights, as each program takes them
    head_leaves: list[Any]
    kv_pages: list[jax.Array]  # a layer: [num_pages, 2, K, page_size, H]
    page_table: jax.Array  # i32[S, P]; S: max_num_seqs
    num_computed: jax.Array  # i32[S]
    step_hidden: jax.Array  # [tokens of the largest bucket, D]
    last_tokens: jax.Array  # i32[S]
    history: jax.Array  # i32[S, max_model_len]
    edits: jax.Array  # i32[S, columns of edit_rows]

    def __init__(self, programs: Programs):
        self.programs = programs
        self.config: ResolvedConfig = programs.config
        self.has_weights: bool = True
        self._share_leaves()
        self._on_cpu = jax.default_backend() == "cpu"
        self.score_rows: int = programs.score_rows
        self.weights_version: int = 0
        self._no_masks = functools.cache(self._make_no_masks)
        self._allocate()

    def _share_leaves(self) -> None:
        functions = self.programs.functions
        self.body_leaves = [functions.leaves[i] for i in functions.body_indices]
        self.head_leaves = [functions.leaves[i] for i in functions.head_indices]

    def _allocate(self) -> None:
        kv_pages, *rest = self.programs.state
        self.kv_pages = [jnp.zeros(x.shape, x.dtype) for x in kv_pages]
        self.page_table, self.num_computed, self.step_hidden, self.last_tokens = (jnp.zeros(x.shape, x.dtype) for x in rest)
        self.history, self.edits = (jnp.zeros(x.shape, x.dtype) for x in self.programs.edit_state)
        self.draft_state: DraftState | None = None
        if self.programs.proposer is not None:
            shapes = self.programs.draft_state
            drafts = jnp.full(shapes.drafts.shape, NO_DRAFT, jnp.int32)
            probs = None if shapes.probs is None else jnp.zeros(shapes.probs.shape, shapes.probs.dtype)
            self.draft_state = DraftState(drafts, probs, self.programs.proposer.init_state())

    def reset(self) -> None:
        """State as new: a step that broke off may have consumed some of it (donated buffers) or left an error in its place."""
        rest = (self.page_table, self.num_computed, self.step_hidden, self.last_tokens, self.history, self.edits)
        for array in (*self.kv_pages, *rest, *jax.tree.leaves(self.draft_state)):
            array.delete()
        self._allocate()

    def set_weights(self, leaves: Iterable[Any]) -> None:
        """New weights of the same shapes and dtypes, in the order of `functions.paths`. Each old one is let go as the next comes,
        so that what is converted on the way is never held twice as a whole."""
        held = self.programs.functions.leaves
        self.body_leaves, self.head_leaves = [], []
        self.weights_version += 1
        self.has_weights = False  # until all have come
        for i, leaf in enumerate(leaves):
            held[i] = leaf
        self._share_leaves()
        self.has_weights = True

    def num_deleted_weights(self) -> int:
        """Weights whose buffers are gone, because their owner donated or deleted them."""
        return sum(isinstance(x, jax.Array) and x.is_deleted() for x in self.programs.functions.leaves)

    def sleep(self, *, keep_weights: bool) -> None:
        """Frees the KV pages and the rest of the state, and lets go of the weights, which move to the host's memory or are gone."""
        keep_weights = keep_weights and self.has_weights
        held = self.programs.functions.leaves
        held[:] = [np.array(leaf) if keep_weights else None for leaf in held]
        self.body_leaves, self.head_leaves, self.has_weights = [], [], keep_weights
        for state in jax.tree.leaves(vars(self)):  # all arrays that are left here
            if isinstance(state, jax.Array):
                state.delete()

    def wake_up(self) -> None:
        """State as new, and the weights on the device again, if there are any."""
        held = self.programs.functions.leaves
        if self.has_weights:
            for i, leaf in enumerate(held):
                held[i] = jax.device_put(leaf, jax.devices()[0])
            self._share_leaves()
        self._allocate()

    def warm_up(self, progress: Callable[[list], Iterable] = iter) -> None:
        """Compiles every program of the plan, then runs each on a step of nothing: once on a CPU, three times on a GPU, where a new
        program evicts live CUDA graphs and a program's first run skips its own."""
        keys = self.programs.keys
        for key in progress(keys):
            self.programs.get(key)
        buckets = [k for k in keys if isinstance(k, Bucket)]
        heads = [k for k in keys if isinstance(k, tuple)]
        nothing = np.full((1, 3), (self.config.scheduler.max_num_seqs, 0, 0), np.int32)
        for _ in range(3 if jax.default_backend() == "gpu" else 1):
            self._update_state(nothing, [])
            np.asarray(self.programs.score()(self.head_leaves, self.step_hidden, np.zeros(1 + 2 * self.score_rows, np.int32)))
            for i in range(max(len(buckets), len(heads))):
                bucket, (rows, with_logprobs) = buckets[i % len(buckets)], heads[i % len(heads)]
                self.fetch(self._run(bucket, self.programs.layouts[bucket].padding, rows, with_logprobs, rows))

    def dispatch(self, inputs: StepInputs, masks: Callable[[], np.ndarray] | None = None) -> StepHandle:
        """Enqueues a step and returns at once; it runs after all that were dispatched before it.

        masks: gives i32[>= head rows, mask words] for grammars. Called when the body is enqueued, so that what it waits for (the
          tokens of the step before) delays the head alone. The array must stay as it is until the step is fetched.
        """
        if len(inputs.extra_page_updates) or inputs.edit_rows:
            self._update_state(inputs.extra_page_updates, inputs.edit_rows)
        handle = self._run(inputs.bucket, inputs.packed, inputs.head_rows, inputs.with_logprobs, inputs.num_samples, masks)
        for rows in inputs.score_rows:
            handle.scored.append(self.programs.score()(self.head_leaves, self.step_hidden, rows))
            self._start_fetching(handle.scored[-1])
        return handle

    def _run(
        self,
        bucket: Bucket,
        packed: np.ndarray,
        head_rows: int,
        with_logprobs: bool,
        num_samples: int,
        masks: Callable[[], np.ndarray] | None = None,
    ) -> StepHandle:
        state = self.draft_state
        before = self.body_leaves, self.kv_pages, self.page_table, self.num_computed, self.step_hidden, self.last_tokens, packed
        of_drafts = () if state is None else self.programs.of_drafts(state)
        after = self.programs.body(bucket)(*before, *of_drafts)
        hidden, head_inputs, self.kv_pages, self.page_table, self.num_computed, self.step_hidden, own = after
        if state is not None and own is not None:
            self.draft_state = state = replace(state, proposer=own)
        if not head_rows:
            return StepHandle(None, [], hidden, 0)
        head: Any = self.programs.head(head_rows, with_logprobs)
        allowed = self._no_masks(head_rows) if masks is None else (masks()[:head_rows], np.True_)
        rest = (self.edits, hidden, head_inputs, *allowed)
        if state is None:
            self.last_tokens, self.history, out = head(self.head_leaves, self.last_tokens, self.history, *rest)
        else:
            self.last_tokens, self.history, self.num_computed, self.draft_state, out = head(
                self.head_leaves, self.last_tokens, self.history, self.num_computed, state, *rest
            )
        self._start_fetching(out)
        return StepHandle(out, [], out, num_samples)

    def _start_fetching(self, out: jax.Array) -> None:
        if not self._on_cpu:  # where `out` is host memory already, and asking costs 50 us
            out.copy_to_host_async()

    def _make_no_masks(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """What a head of so many rows takes where no grammar is: on the device once and for all."""
        return jax.device_put(np.zeros((rows, self.programs.num_mask_words), np.int32)), jax.device_put(np.False_)

    def _update_state(self, page_updates: np.ndarray, edit_rows: Sequence[np.ndarray]) -> None:
        """page_updates i32[m, 3]: (row, column, page); as many calls of the update program as either list takes."""
        for i in range(max(-(-len(page_updates) // UPDATE_BATCH), len(edit_rows))):
            part = page_updates[i * UPDATE_BATCH : (i + 1) * UPDATE_BATCH]
            batch = np.full((UPDATE_BATCH, 3), (self.config.scheduler.max_num_seqs, 0, 0), np.int32)
            batch[: len(part)] = part
            row = edit_rows[i] if i < len(edit_rows) else self.programs.edit_layout.nothing
            self.page_table, self.history, self.edits = self.programs.update()(
                self.page_table, self.history, self.edits, batch, row
            )

    def fetch(self, handle: StepHandle) -> SampledRows | None:
        """Waits for a step and returns its sampled rows; None where no sequence sampled."""
        if handle.out is None:
            handle.done.block_until_ready()
            return None
        proposer = self.programs.proposer
        return unpack_sampled(np.asarray(handle.out)[: handle.num_samples], proposer.num_drafts if proposer else 0)

    @staticmethod
    def fetch_scores(handle: StepHandle) -> ScoredRows:
        """Waits for the rows that a step scored; those of all batches in order, the last one's padding included."""
        return unpack_scored(np.concatenate([np.asarray(x) for x in handle.scored]))

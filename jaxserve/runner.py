"""The device side of the engine: its state, dispatch and fetch.

Owns the KV pages, the page table and the decode state on the device. Knows nothing of requests or scheduling: it runs StepInputs in
the order in which they come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch import StepInputs
from jaxserve.buckets import Bucket
from jaxserve.programs import UPDATE_BATCH, Programs
from jaxserve.sampling_rows import SampledRows, unpack_sampled


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A dispatched step. `out` is what the host fetches; None where no sequence sampled."""

    out: jax.Array | None  # i32[head rows, columns]
    done: jax.Array  # ready when the step is
    num_samples: int


class Runner:
    """Runs steps in a plan's programs, each compiled when it is first needed unless `warm_up` came before.

    The model's weights are used in place, as `programs.functions.leaves`; state is allocated here.
    """

    def __init__(self, programs: Programs):
        self.programs, self.config = programs, programs.config
        functions = programs.functions
        self.body_leaves = [functions.leaves[i] for i in functions.body_indices]
        self.head_leaves = [functions.leaves[i] for i in functions.head_indices]
        self._on_cpu = jax.default_backend() == "cpu"
        self.weights_version = 0
        self._true = jax.device_put(np.True_)
        self._no_masks = functools.cache(self._make_no_masks)
        self._allocate()

    def _allocate(self) -> None:
        kv_pages, *rest = self.programs.state
        self.kv_pages = [jnp.zeros(x.shape, x.dtype) for x in kv_pages]
        self.page_table, self.num_computed, self.last_tokens = (jnp.zeros(x.shape, x.dtype) for x in rest)

    def reset(self) -> None:
        """State as new: a step that broke off may have consumed some of it (donated buffers) or left an error in its place."""
        for array in (*self.kv_pages, self.page_table, self.num_computed, self.last_tokens):
            array.delete()
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
            self._update_page_table(nothing)
            for i in range(max(len(buckets), len(heads))):
                bucket, (rows, with_logprobs) = buckets[i % len(buckets)], heads[i % len(heads)]
                self.fetch(self._run(bucket, self.programs.layouts[bucket].padding, rows, with_logprobs, rows))

    def dispatch(self, inputs: StepInputs, masks: Callable[[], np.ndarray] | None = None) -> StepHandle:
        """Enqueues a step and returns at once; it runs after all that were dispatched before it.

        masks: gives i32[>= head rows, mask words] for grammars. Called when the body is enqueued, so that what it waits for (the
        tokens of the step before) delays the head alone. The array must stay as it is until the step is fetched.
        """
        if inputs.extra_page_updates is not None:
            self._update_page_table(inputs.extra_page_updates)
        return self._run(inputs.bucket, inputs.packed, inputs.head_rows, inputs.with_logprobs, inputs.num_samples, masks)

    def _run(
        self,
        bucket: Bucket,
        packed: np.ndarray,
        head_rows: int,
        with_logprobs: bool,
        num_samples: int,
        masks: Callable[[], np.ndarray] | None = None,
    ) -> StepHandle:
        hidden, head_inputs, self.kv_pages, self.page_table, self.num_computed = self.programs.body(bucket)(
            self.body_leaves, self.kv_pages, self.page_table, self.num_computed, self.last_tokens, packed
        )
        if not head_rows:
            return StepHandle(None, hidden, 0)
        head: Any = self.programs.head(head_rows, with_logprobs)
        allowed = self._no_masks(head_rows) if masks is None else (masks()[:head_rows], self._true)
        self.last_tokens, out = head(self.head_leaves, self.last_tokens, hidden, head_inputs, *allowed)
        if not self._on_cpu:  # where `out` is host memory already, and asking costs 50 us
            out.copy_to_host_async()
        return StepHandle(out, out, num_samples)

    def _make_no_masks(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """What a head of so many rows takes where no grammar is: on the device once and for all."""
        return jax.device_put(np.zeros((rows, self.programs.num_mask_words), np.int32)), jax.device_put(np.False_)

    def _update_page_table(self, updates: np.ndarray) -> None:
        """updates i32[m, 3]: (row, column, page), any number of them."""
        for i in range(0, len(updates), UPDATE_BATCH):
            part = updates[i : i + UPDATE_BATCH]
            batch = np.full((UPDATE_BATCH, 3), (self.config.scheduler.max_num_seqs, 0, 0), np.int32)
            batch[: len(part)] = part
            self.page_table = self.programs.update()(self.page_table, batch)

    def fetch(self, handle: StepHandle) -> SampledRows | None:
        """Waits for a step and returns its sampled rows; None where no sequence sampled."""
        if handle.out is None:
            handle.done.block_until_ready()
            return None
        return unpack_sampled(np.asarray(handle.out)[: handle.num_samples])

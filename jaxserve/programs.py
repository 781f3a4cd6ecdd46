"""The compiled programs of a bucket plan: a body a bucket, a head a number of rows and variant, and the page-table update.

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

from jaxserve import sampling_rows, step
from jaxserve.batch import StepLayout
from jaxserve.buckets import Bucket
from jaxserve.config import ResolvedConfig
from jaxserve.request import MAX_LOGPROBS

logger = logging.getLogger("jaxserve")

UPDATE_BATCH = 1024  # page-table entries an update program takes at once


class Programs:
    """Programs of one model and plan, each compiled when first asked for and kept.

    Every program takes flat lists of weights first. Donated: the body's kv_pages, page_table and num_computed, the head's
    last_tokens, the update's page_table; never what the host fetches.
    """

    def __init__(self, functions: step.ModelFunctions, config: ResolvedConfig):
        self.functions, self.config = functions, config
        self.layouts = {
            b: StepLayout(b, config.scheduler.max_num_seqs, config.cache.page_size, config.plan.max_head_rows)
            for b in config.plan.buckets
        }
        self._compiled: dict[Any, Any] = {}

    @property
    def num_compiled(self) -> int:
        """Programs compiled, or loaded from the persistent cache, so far."""
        return len(self._compiled)

    @property
    def keys(self) -> list[Any]:
        """Every program of the plan, as arguments for `get`: a Bucket, (rows, with_logprobs), or "update"."""
        plan = self.config.plan
        return [*plan.buckets, *((rows, lp) for rows in plan.head_rows for lp in (False, True)), "update"]

    def get(self, key: Any) -> Any:
        """The program of one of `keys`, compiled if it is not yet."""
        if isinstance(key, Bucket):
            return self.body(key)
        return self.update() if key == "update" else self.head(*key)

    def body(self, bucket: Bucket) -> Any:
        """compiled(leaves, kv_pages, page_table, num_computed, last_tokens, packed): `step.body` of this bucket."""
        if bucket not in self._compiled:
            self._compiled[bucket] = self._compile(f"body {bucket}", *self.body_spec(bucket))
        return self._compiled[bucket]

    def head(self, rows: int, with_logprobs: bool) -> Any:
        """compiled(leaves, last_tokens, hidden, HeadInputs, masks, masked): `step.head` for this many rows."""
        key = (rows, with_logprobs)
        if key not in self._compiled:
            self._compiled[key] = self._compile(f"head({rows}{', logprobs' if with_logprobs else ''})", *self.head_spec(*key))
        return self._compiled[key]

    def update(self) -> Any:
        """compiled(page_table, updates i32[UPDATE_BATCH, 3])."""
        if "update" not in self._compiled:
            args = (self.state[1], jax.ShapeDtypeStruct((UPDATE_BATCH, 3), jnp.int32))
            self._compiled["update"] = self._compile("page-table update", step.update_page_table, (0,), args)
        return self._compiled["update"]

    def body_spec(self, bucket: Bucket) -> tuple[Callable, tuple[int, ...], tuple[Any, ...]]:
        """(function, donated argument numbers, abstract arguments) of a bucket's body."""
        layout = self.layouts[bucket]
        function = functools.partial(step.body, self.functions, layout, self.config.engine.attention_backend)
        leaves = [self.functions.abstract[i] for i in self.functions.body_indices]
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        return function, (1, 2, 3), (leaves, *self.state, packed)

    def head_spec(self, rows: int, with_logprobs: bool) -> tuple[Callable, tuple[int, ...], tuple[Any, ...]]:
        """(function, donated argument numbers, abstract arguments) of a head."""
        R, S = self.config.plan.max_head_rows, jax.ShapeDtypeStruct
        function = functools.partial(step.head, self.functions, rows, MAX_LOGPROBS if with_logprobs else 0)
        leaves = [self.functions.abstract[i] for i in self.functions.head_indices]
        hidden = S((R, self.config.model.hidden_size), self.config.pages.dtype)
        rows_of, sampling_of = S((R,), jnp.int32), S((R, sampling_rows.NUM_COLUMNS), jnp.int32)
        inputs = step.HeadInputs(rows_of, sampling_of)  # pyright: ignore[reportArgumentType]  (abstract, like all arguments here)
        masks = S((rows, self.num_mask_words), jnp.int32), S((), jnp.bool_)
        return function, (1,), (leaves, self.state[3], hidden, inputs, *masks)

    @property
    def num_mask_words(self) -> int:
        """int32 words of a logits row's mask."""
        return -(-self.config.model.vocab_size // 32)

    @property
    def state(self) -> tuple[Any, Any, Any, Any]:
        """Abstract (kv_pages, page_table, num_computed, last_tokens)."""
        c = self.config
        kv = jax.ShapeDtypeStruct(c.pages.layer(c.cache.num_pages), c.pages.dtype)
        seqs = jax.ShapeDtypeStruct((c.scheduler.max_num_seqs,), jnp.int32)
        table = jax.ShapeDtypeStruct((c.scheduler.max_num_seqs, c.max_pages_per_seq), jnp.int32)
        return [kv] * c.pages.num_layers, table, seqs, seqs

    def largest_temp_bytes(self) -> int:
        """Most temporary memory any program needs: that of the largest body and of the largest head."""
        plan = self.config.plan
        largest = [self.body(plan.buckets[-1]), self.head(plan.max_head_rows, True)]
        return max(program.memory_analysis().temp_size_in_bytes for program in largest)

    def _compile(self, what: str, function: Callable, donate: tuple[int, ...], args: tuple[Any, ...]) -> Any:
        start = time.perf_counter()
        compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
        logger.info("compiled %s in %.1f s", what, time.perf_counter() - start)
        return compiled

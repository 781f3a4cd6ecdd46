"""The engine's decode step against a bare jitted one: what the engine costs beside its model's program.

Owns the bare step and the turns. It has the engine's weights, kernels and shapes, so that their ratio says nothing of how fast the
program is.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


def compare_step(engine: Any, batch: int, num_steps: int) -> dict[str, float]:
    """The engine's decode step and a bare one in turn, at the same batch and KV lengths; medians in ms. Also the bytes that a step
    must read, and how long reading them takes at the bandwidth of now. num_steps: of each side, a
    multiple of ten; the engine's context holds 40 more. ValueError where it is none.

    Ten steps at a time, so that dispatching ahead counts as it does in service; the last one is waited for, so that nobody's step
    runs on the other's time.
    """
    from jaxserve import SamplingParams

    if num_steps < 10 or num_steps % 10:
        raise ValueError(f"{num_steps=} must be a multiple of ten")
    bare = BareStep(engine, batch, num_steps)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=num_steps + 8, ignore_eos=True, detokenize=False)
    for i in range(batch):
        engine.add_request(f"step-{i}", rng.integers(0, engine.config.model.vocab_size, 32).tolist(), params)
    for _ in range(4):
        engine.step()
    mine, its, bandwidth = [], [], read_bandwidth()
    for _ in range(num_steps // 10):
        start = time.perf_counter()
        for _ in range(10):
            engine.step()
        engine.runner.state.rows.last_tokens.block_until_ready()
        mine.append((time.perf_counter() - start) / 10)
        start = time.perf_counter()
        for _ in range(10):
            bare.run()
        bare.wait()
        its.append((time.perf_counter() - start) / 10)
    engine.abort([f"step-{i}" for i in range(batch)])
    engine.drain()
    engine_ms, bare_ms = 1e3 * statistics.median(mine), 1e3 * statistics.median(its)
    found = {"engine_ms": engine_ms, "bare_ms": bare_ms, "ratio": engine_ms / bare_ms}
    num_bytes = step_bytes(engine, batch, 32 + 4 + num_steps // 2)
    return found | {"bytes": num_bytes, "bytes_per_second": bandwidth, "reading_ms": 1e3 * num_bytes / bandwidth}


def step_bytes(engine: Any, batch: int, num_positions: int) -> int:
    """What a decode must read: all weights, but no embedding of its own, and the KV of so many positions of each sequence."""
    import jax

    weights = jax.tree.leaves((engine.runner.body_weights, engine.runner.head_weights))
    num_bytes = sum(x.nbytes for x in {id(x): x for x in weights}.values())
    model, pages = engine.config.model, engine.config.pages
    if not model.tie_word_embeddings:
        num_bytes -= model.vocab_size * model.hidden_size * weights[0].dtype.itemsize
    return num_bytes + batch * num_positions * pages.page_bytes // pages.page_size


def read_bandwidth(num_bytes: int = 1 << 28, repeats: int = 9) -> float:
    """Bytes a second that all of this process's CPUs read from memory together: the best of some passes over an array that no cache
    holds. Each CPU has a part, over which numpy runs with its vector instructions and without Python's lock."""
    num_parts = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_parts)
    with ThreadPoolExecutor(num_parts) as pool:

        def seconds() -> float:
            start = time.perf_counter()
            list(pool.map(np.maximum.reduce, parts))
            return time.perf_counter() - start

        return num_bytes / min(seconds() for _ in range(repeats))


class BareStep:
    """One jitted program: forward of a decode bucket over its own KV pages, logits, argmax; tokens fed back on the device, and read
    one step late, while the next one runs."""

    def __init__(self, engine: Any, batch: int, num_steps: int):
        import jax
        import jax.numpy as jnp

        from jaxserve.execution.device_state import replace_rows
        from jaxserve.sampling.sampler import first_highest, in_blocks

        programs = engine.runner.programs
        functions, layout = programs.functions, programs.layouts[engine.config.plan.select(batch, batch, 1)]
        body = programs.spec(layout.bucket).function
        rows = engine.config.plan.select_head_rows(batch)

        def bare(body_weights, head_weights, state, packed):
            state, head_inputs = body(body_weights, state, packed)
            model = functions.module(functions.head_indices, head_weights)
            blocks = in_blocks(model.normed_logits(head_inputs.hidden[:rows], functions.kernels.fused), -jnp.inf)
            _, tokens = first_highest(blocks, blocks.max(-1))
            return replace_rows(state, last_tokens=state.rows.last_tokens.at[: min(rows, batch)].set(tokens[:batch])), tokens

        self._weights = (engine.runner.body_weights, engine.runner.head_weights)
        self._state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), programs.state)
        pages = 1 + (40 + num_steps) // layout.page_size
        table = np.zeros(self._state.rows.page_table.shape, np.int32)
        table[:batch, :pages] = np.arange(batch * pages).reshape(batch, pages)
        lengths = jnp.full_like(self._state.rows.num_computed, 32)
        self._state = replace_rows(self._state, page_table=jnp.asarray(table), num_computed=lengths)
        self._packed = layout.padding.copy()
        fields = layout.unpack(self._packed)
        fields["seq_rows"][:batch], fields["q_lens"][:batch] = np.arange(batch), 1
        fields["starts"][:batch], fields["token_ids"][:batch] = -1, -1
        fields["logits_tokens"][:batch] = np.arange(batch)
        self._step = jax.jit(bare, donate_argnums=2)
        self._unread = jnp.zeros(rows, jnp.int32)
        self.run()
        self.wait()

    def run(self) -> np.ndarray:
        """Dispatches a step; the tokens of the one before, i32[rows]."""
        before = self._unread
        self._state, self._unread = self._step(*self._weights, self._state, self._packed)
        return np.asarray(before)

    def wait(self) -> None:
        self._unread.block_until_ready()

"""Ragged paged attention on the card at hand: how fast each shape runs.

Owns the batches, the sweeps and their bookkeeping (bytes that must move, operations that must be done). The kernel is called
through its public entry, as the engine calls it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from scripts.gpu.device_rates import Rates, measure
from scripts.gpu.figures import Figures

# The head shapes of Qwen3 0.6B, 4B and 8B, 32B, 30B-A3B: (query heads, KV heads, head_dim).
HEADS = {"0.6b": (16, 8, 128), "8b": (32, 8, 128), "32b": (64, 8, 128), "30b-a3b": (32, 4, 128)}
SHAPES = HEADS | {"smollm2": (9, 3, 64), "tiny": (4, 2, 64)}  # for parity head_dim 64 too; tiny is of a dry run
PAGE = 64
_POOL_BYTES = 4 << 30  # of KV pages, 80 times an H100's L2: pages come from memory even where sequences share them


def backend() -> str:
    """What runs: our kernel for the card, or interpreted the one for Hopper, else XLA's attention."""
    import jax

    from kernels import gpu

    if gpu.is_interpreted() or jax.default_backend() != "gpu":
        return "mosaic_sm90" if gpu.is_interpreted() else "xla"
    return "mosaic_portable" if gpu.missing_for_sm90() and not gpu.missing_for_mma() else "mosaic_sm90"


@dataclass(frozen=True)
class Variant:
    """What a batch may have other than the models' plain attention. split_q_len: 1 + drafts."""

    dtype: str = "bfloat16"
    page_size: int = PAGE
    sliding_window: int | None = None
    soft_cap: float | None = None
    split_q_len: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call."""
        return {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap}

    def __str__(self) -> str:
        return "".join(f" {f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)


PLAIN = Variant()


@dataclass
class Batch:
    """A ragged batch on random pages of a pool, and a program of attention calls that feed each other.

    arrays: (kv_pages, page_table, cu_q_lens, kv_lens), as the kernel takes them after q.
    """

    q: Any
    arrays: tuple[Any, ...]
    seqs: list[tuple[int, int]]  # (q_len, kv_len)
    max_q_len: int
    variant: Variant = PLAIN

    @classmethod
    def make(
        cls,
        heads: tuple[int, int, int],
        seqs: list[tuple[int, int]],
        *,
        num_pages: int,
        kv_pages: Any = None,
        max_kv_len: int = 0,
        variant: Variant = PLAIN,
    ) -> Batch:
        """A batch of these (q_len, kv_len), in a page table of rows that hold the longest, or max_kv_len positions."""
        import jax.numpy as jnp

        (N, K, H), page_size = heads, variant.page_size
        rng = np.random.default_rng(0)
        kv_pages = make_pages((num_pages, 2, K, page_size, H), variant.dtype) if kv_pages is None else kv_pages
        q_lens = np.array([q for q, _ in seqs], np.int32)
        kv_lens = np.array([kv for _, kv in seqs], np.int32)
        used = -(-kv_lens // page_size)
        table = np.zeros((len(seqs), max(int(used.max()), max_kv_len // page_size)), np.int32)
        rounds = -(-int(used.sum()) // len(kv_pages))  # a new order each, so that no two sequences share all their pages
        pages = np.concatenate([rng.permutation(len(kv_pages)) for _ in range(rounds)])[: used.sum()]
        for row, part in zip(table, np.split(pages, np.cumsum(used)[:-1]), strict=True):
            row[: len(part)] = part
        cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        q = jnp.asarray(rng.standard_normal((int(cu[-1]), N, H), np.float32), variant.dtype)
        return cls(q, (kv_pages, jnp.asarray(table), jnp.asarray(cu), jnp.asarray(kv_lens)), seqs, int(q_lens.max()), variant)

    def part(self, s: int, rows: int) -> Batch:
        """The last `rows` query tokens of sequence s alone, on the same pages."""
        import jax.numpy as jnp

        kv_pages, page_table, cu_q_lens, kv_lens = self.arrays
        end = int(cu_q_lens[s + 1])
        arrays = (kv_pages, page_table[s : s + 1], jnp.asarray([0, rows], jnp.int32), kv_lens[s : s + 1])
        return Batch(self.q[end - rows : end], arrays, [(rows, self.seqs[s][1])], rows, self.variant)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        _, _, K, _, H = self.arrays[0].shape
        return sum(kv for q, kv in self.seqs if q) * 2 * K * H * 2

    @property
    def flops(self) -> int:
        """Operations of the two matmuls over what causality leaves."""
        _, N, H = self.q.shape
        return sum(4 * N * H * (q * kv - q * (q - 1) // 2) for q, kv in self.seqs)

    @property
    def lens(self) -> tuple[np.ndarray, np.ndarray]:
        """i32[S] each: q_lens, kv_lens."""
        q_lens, kv_lens = np.array(self.seqs, np.int32).T
        return q_lens, kv_lens

    def planner(self, tiles: Any = None) -> Any:
        """The Mosaic kernel's planner of this batch. tiles: None is what the kernel would choose."""
        from kernels.backends import ATTENTION

        T, N, H = self.q.shape
        kv_pages, page_table, *_ = self.arrays
        which = backend()
        return ATTENTION[which if which.startswith("mosaic") else "mosaic_sm90"].functions.make_planner(
            num_tokens=T,
            num_seqs=len(self.seqs),
            max_q_len=self.max_q_len,
            num_query_heads=N,
            num_kv_heads=kv_pages.shape[2],
            head_dim=H,
            max_kv_len=page_table.shape[1] * kv_pages.shape[3],
            sliding_window=self.variant.sliding_window,
            split_q_len=self.variant.split_q_len,
            tiles=tiles,
        )

    def program(self, calls: int = 1, tiles: Any = None, planned_kv_lens: np.ndarray | None = None) -> Callable:
        """run() -> what the last of `calls` dependent calls gives: one dispatch for all of them, planned before. planned_kv_lens:
        i32[S], lengths to plan for instead of the true ones, none of them less."""
        import jax

        which, (q_lens, kv_lens) = backend(), self.lens
        planner = self.planner(tiles) if which.startswith("mosaic") else None
        packed = None
        if planner is not None:
            packed = jax.device_put(planner.plan(q_lens, kv_lens if planned_kv_lens is None else planned_kv_lens))
        chain = _chain(calls, which, self.max_q_len, planner, self.variant)
        key = chain, *((x.shape, x.dtype) for x in jax.tree.leaves((self.q, self.arrays, packed)))
        if key not in _COMPILED:
            _COMPILED[key] = chain.lower(self.q, self.arrays, packed).compile()
        compiled = _COMPILED[key]
        return lambda: compiled(self.q, self.arrays, packed)

    @property
    def timed_calls(self) -> int:
        """Calls that the longer one of the timed programs has more than the other."""
        return 4 if self.max_q_len > 1024 else 8

    def compile(self) -> None:
        """The programs that `seconds` times."""
        for calls in (1, self.timed_calls + 1):
            self.program(calls)

    def seconds(self, figures: Figures, tiles: Any = None) -> float:
        """Seconds of one attention call: what `timed_calls` more of them in a program add, so that dispatch stays out of it."""
        import jax

        def time(calls: int) -> float:
            program = self.program(calls, tiles)
            return figures.seconds_per_call(lambda i: program(), jax.block_until_ready, batches=5)

        return time(1) if figures.dry_run else (time(self.timed_calls + 1) - time(1)) / self.timed_calls


_COMPILED: dict[Any, Any] = {}  # programs by what they compute and their arguments' shapes: batches of one shape share them


@functools.cache
def _chain(calls: int, which: str, max_q_len: int, planner: Any, variant: Variant) -> Callable:
    """jitted (q, arrays, packed work list) -> q after `calls` calls; kept, so that batches of one shape share a program."""
    import jax

    from kernels.ragged_paged_attention import plan_work, ragged_paged_attention

    @jax.jit
    def chain(q, arrays, packed):
        *_, cu_q_lens, kv_lens = arrays
        if planner is None:
            work = plan_work(cu_q_lens, kv_lens, num_tokens=len(q), max_q_len=max_q_len, backend=which)
        else:
            work = planner.work(packed)
        attend = jax.jit(functools.partial(ragged_paged_attention, max_q_len=max_q_len, backend=which, **variant.options))
        for _ in range(calls):
            q = attend(q, *arrays, work=work)
        return q

    return chain


def make_pages(shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    """Random pages, without the memory that drawing them at once would take."""
    import jax
    import jax.numpy as jnp

    def draw(key):
        base = jax.random.normal(key, (min(shape[0], 1024), *shape[1:]), dtype)
        return jnp.take(base, jnp.arange(shape[0]) % len(base), axis=0)

    return jax.jit(draw)(jax.random.key(0))


def pool_pages(heads: tuple[int, int, int], dry_run: bool) -> Any:
    _, K, H = heads
    return make_pages((16 if dry_run else _POOL_BYTES // (2 * K * PAGE * H * 2), 2, K, PAGE, H))


def _pools(names: list[str], dry_run: bool) -> dict[str, Any]:
    """name -> pages; models with the same KV heads share them."""
    made: dict[tuple[int, ...], Any] = {}
    for name in names:
        heads = SHAPES[name]
        if heads[1:] not in made:
            made[heads[1:]] = pool_pages(heads, dry_run)
    return {name: made[SHAPES[name][1:]] for name in names}


def decode_points() -> list[tuple[int, int]]:
    """(B, KV) as they are timed. The goal's first; then those that need no new programs, and small batches last."""
    large, small = (32, 128, 256, 64), (8, 1)
    lens = (16384, 1024, 32768, 256)
    return [
        *((B, 4096) for B in large),
        *((B, kv_len) for kv_len in lens for B in large),
        *((B, kv_len) for B in small for kv_len in (4096, *lens)),
    ]


def prefill_points() -> list[tuple[int, int]]:
    """(q_len, KV) as they are timed: whole prompts of the goal, then chunks, then short prompts."""
    chunks = [(2048, kv_len) for kv_len in (8192, 32768, 4096, 16384)]
    return [*((n, n) for n in (8192, 16384, 32768)), *chunks, *((n, n) for n in (4096, 2048, 1024))]


def decode(figures: Figures) -> None:
    """Decode batches: % of the measured copy bandwidth. Each point for all models. A dry run has our kernel, interpreted."""
    from kernels import gpu

    rates = measure(figures)
    points, names = decode_points(), ["8b", "0.6b", "30b-a3b", "32b"]
    if figures.dry_run:
        points, names = [(1, 64)], ["tiny"]
    longest = max(kv_len for _, kv_len in points)  # one page table and so one program a batch size, whatever its KV
    pools = _pools(names, figures.dry_run)
    with gpu.interpreted() if figures.dry_run else contextlib.nullcontext():
        for B, kv_len in points:
            _compile(figures, [(name, [(1, kv_len)] * B) for name in names], pools, longest)
            for name in names:
                title, seqs = f"decode {name} B={B} KV={kv_len}", [(1, kv_len)] * B
                figures.attempt(title, _speed, figures, rates, "decode", title, name, seqs, pools[name], max_kv_len=longest)


def prefill(figures: Figures) -> None:
    """Whole prompts from paged KV, and chunks of 2048 at the end of longer ones: TFLOP/s and % of the measured matmul rate."""
    rates = measure(figures)
    points, names = prefill_points(), ["8b", "0.6b", "32b", "30b-a3b"]
    if figures.dry_run:
        points, names = [(16, 32), (16, 16)], ["tiny"]
    pools = _pools(names, figures.dry_run)
    for q_len, kv_len in points:
        _compile(figures, [(name, [(q_len, kv_len)]) for name in names], pools)
        for name in names:
            title = f"{'prefill' if q_len == kv_len else 'chunk'} {name} {q_len} KV={kv_len}"
            figures.attempt(title, _speed, figures, rates, "prefill", title, name, [(q_len, kv_len)], pools[name])


def mixed(figures: Figures) -> None:
    """Decodes beside a chunk of a prompt, as a step of the engine mixes them."""
    rates = measure(figures)
    batches = {
        "64 decodes of 2048 + 1984 of 4096": [(1, 2048)] * 64 + [(1984, 4096)],
        "128 decodes of 4096 + 384 of 384": [(1, 4096)] * 128 + [(384, 384)],
        "32 decodes of 16384 + 2 x 240 of 8192": [(1, 16384)] * 32 + [(240, 8192)] * 2,
    }
    names = ["tiny"] if figures.dry_run else ["8b", "0.6b"]
    pools = _pools(names, figures.dry_run)
    for label, seqs in {"dry": [(1, 30), (8, 40)]}.items() if figures.dry_run else batches.items():
        for name in names:
            title = f"mixed {name} {label}"
            figures.attempt(title, _speed, figures, rates, "mixed", title, name, seqs, pools[name])


def _compile(
    figures: Figures, batches: list[tuple[str, list[tuple[int, int]]]], pools: dict[str, Any], max_kv_len: int = 0
) -> None:
    """Compiles what the (model, sequences) of a point are timed with, side by side, if it is not yet: most of a section's time was
    one program after the other."""
    from jaxserve.execution.compilation import compile_side_by_side

    def compile(number: int) -> None:
        name, seqs = batches[number]
        Batch.make(SHAPES[name], seqs, num_pages=len(pools[name]), kv_pages=pools[name], max_kv_len=max_kv_len).compile()

    if not figures.dry_run and figures.seconds_left > 10:  # a dry run times one call alone
        with contextlib.suppress(Exception):  # the point that needs what failed says so
            compile_side_by_side(compile, range(len(batches)))


def _speed(
    figures: Figures,
    rates: Rates,
    kind: str,  # decode, prefill or mixed
    title: str,
    name: str,
    seqs: list[tuple[int, int]],
    pages: Any,
    max_kv_len: int = 0,
) -> None:
    batch = Batch.make(SHAPES[name], seqs, num_pages=len(pages), kv_pages=pages, max_kv_len=max_kv_len)
    seconds = batch.seconds(figures)
    bandwidth, rate = batch.kv_bytes / seconds, batch.flops / seconds
    floor = max(batch.kv_bytes / rates.copy, batch.flops / rates.matmul)
    share, unit = {
        "decode": (bandwidth / rates.copy, "% of copy bandwidth"),
        "prefill": (rate / rates.matmul, "% of matmul rate"),
        "mixed": (floor / seconds, "% of the floor's speed"),
    }[kind]
    figures.record(title, 100 * share, unit, us=seconds * 1e6, gb_per_s=bandwidth / 1e9, tflops=rate / 1e12, floor_us=floor * 1e6)


# ---- tuning


def tune(figures: Figures) -> None:
    """Times every tile size that fits, on a decode and a prefill batch of each head_dim; the best become this device's table. A
    batch of which some size was not timed gets no entry. Only mosaic_sm90 has a table: elsewhere the figure is "unsupported"."""
    import datetime
    import itertools
    import json
    from pathlib import Path

    import jax

    from kernels import gpu
    from kernels.ragged_paged_attention.mosaic_sm90.tiles import TUNED

    best: dict[str, dict[str, int]] = {}
    with gpu.interpreted() if figures.dry_run else contextlib.nullcontext():
        which = backend()
        if which != "mosaic_sm90":
            figures.record("tuned tiles", None, "unsupported", why=f"tiles of mosaic_sm90 are tuned, and here {which} runs")
            return
        for head_dim, kind in [(64, "decode")] if figures.dry_run else itertools.product((128, 64), ("decode", "prefill")):
            heads = (4, 2, 64) if figures.dry_run else (32, 8, head_dim)
            seqs = {"decode": [(1, 8192)] * 64, "prefill": [(2048, 8192)]}[kind] if not figures.dry_run else [(1, 70)]
            batch = Batch.make(heads, seqs, num_pages=8 if figures.dry_run else 16384)
            tiles = figures.attempt(f"tiles head_dim={head_dim} {kind}", best_tiles, figures, batch, f"head_dim={head_dim} {kind}")
            if tiles is not None:
                best[f"head_dim={head_dim} {kind}"] = vars(tiles)
    kind = jax.devices()[0].device_kind
    name = f"{kind.lower().replace(' ', '_')}.json"
    about = {"device": kind, "jax": jax.__version__, "date": datetime.date.today().isoformat(), "by": "scripts.gpu_check"}
    figures.record("tuned tiles", best, "", file=name)
    if best and not figures.dry_run:
        TUNED.mkdir(exist_ok=True)
        (Path(TUNED) / name).write_text(json.dumps({"tiles": best, "about": about}, indent=1) + "\n")


def best_tiles(figures: Figures, batch: Batch, what: str) -> Any:
    """The fastest Tiles of a batch; None unless all that fit were timed."""
    candidates = tile_candidates(batch)[: 1 if figures.dry_run else None]
    times = {}
    for tiles in candidates:
        name = f"tiles {what} {tiles.consumers} x {tiles.stages}"
        seconds = figures.attempt(name, batch.seconds, figures, tiles=tiles)
        if seconds is not None and seconds > 0:  # it is a difference
            times[tiles] = seconds
            figures.record(name, 1e6 * seconds, "us")
    if len(times) < len(candidates):
        figures.record(f"tiles {what}", None, "skipped", why=f"only {len(times)} of {len(candidates)} were timed: no entry")
        return None
    return min(times, key=times.__getitem__)


def tile_candidates(batch: Batch) -> list[Any]:
    """The Tiles that fit a batch, first those that the kernel takes untuned."""
    import itertools

    from kernels.ragged_paged_attention.mosaic_sm90.tiles import REGISTERS, ROWS, Tiles, choose_tiles

    (_, N, H), K = batch.q.shape, batch.arrays[0].shape[2]
    untuned = choose_tiles(head_dim=H, group=N // K, max_q_len=batch.max_q_len, device_kind="")
    found = []
    for consumers, stages in itertools.product((1, *REGISTERS), range(3, 13)):
        if consumers > 1 and batch.max_q_len * (N // K) <= ROWS:
            continue  # a second consumer would have no rows
        with contextlib.suppress(ValueError):  # does not fit into shared memory
            batch.planner(Tiles(consumers, stages))
            found.append(Tiles(consumers, stages))
    return sorted(found, key=lambda tiles: tiles != untuned)

"""Measures steps of an engine's programs on the machine at hand, bucket by bucket, for a StepTimeModel.

Owns which steps are run (buckets, lengths) and how they are timed. Knows no requests: the runner gets packed arrays made here.

Steps are timed as the engine runs them, one in flight while the next is dispatched. Every point is visited in several rounds, all
points a round, so that a slow minute of a shared machine falls on all alike; a point's time is a low quantile of all its steps, and
how far the median lies above it is kept beside it. Where a bucket half-way between two measured ones is not what lies between them
(tiles, cache sizes), it becomes a measured one too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.batching.packer import BatchPacker
from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.config import EngineConfig
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.schedule import Schedule
from jaxserve.step_times.fitted import StepPoint, StepTimeModel, fit_model

LOW_QUANTILE = 0.1  # of a point's steps: what they take where nobody else uses the machine

_GREEDY = SamplingParams(temperature=0)
_NO_UPDATES = np.zeros((0, 3), np.int32)


@dataclass(frozen=True)
class StepShape:
    """A step to be run: `decodes` decodes whose KV is `decode_kv` long, and chunks of `chunk` tokens that start at `start`."""

    bucket: Bucket
    decodes: int
    decode_kv: int
    chunks: tuple[int, ...] = ()
    start: int = 0

    def demand(self, page_size: int) -> tuple[int, int]:
        """(kv_tokens, pairs), as jaxserve.scheduling.demand defines them."""
        pages = -(-self.decode_kv // page_size)
        return self.decodes * pages * page_size, sum(n * self.start + n * (n + 1) // 2 for n in self.chunks)


def grid_plan(max_num_seqs: int, max_num_batched_tokens: int, multiple: int, per_octave: int = 4) -> tuple[BucketPlan, list[int]]:
    """(every bucket that may be measured, the levels of sequences). `per_octave` sizes in each doubling of tokens."""
    decode = _sizes(multiple, max_num_seqs, multiple, per_octave)
    tokens = _sizes(min(max(4 * multiple, 16), max_num_batched_tokens), max_num_batched_tokens, multiple, per_octave)
    levels = sorted({s for s in (max_num_seqs // 8, max_num_seqs) if s >= min(multiple, max_num_seqs)})
    mixed = sorted({(t, min(t, level)) for level in levels for t in tokens})
    heads = _sizes(multiple, max_num_seqs, multiple, 1)
    return BucketPlan(decode=tuple(decode), mixed=tuple(mixed), head_rows=tuple(heads)), levels


def _sizes(low: int, high: int, multiple: int, per_octave: int) -> list[int]:
    """Sizes from low to high, multiples of `multiple` but for the last, evenly spaced on a logarithmic scale."""
    n = max(1, round(per_octave * np.log2(max(high / low, 1))))
    sizes = {int(-(-(low * (high / low) ** (i / n)) // multiple) * multiple) for i in range(n)}
    return sorted({s for s in sizes if s < high} | {high})


class StepMeasurer:
    """Runs steps on the programs of one model.

    Args:
      model: a `jaxserve.models.Decoder`; cut for several devices as an engine cuts it, where the config asks for them.
      config: the engine's limits; its bucket_plan is replaced by the grid.
      multiple: bucket sizes are multiples of it.
      min_seconds: that a visit of a point lasts at least.
    """

    def __init__(self, model: Any, config: EngineConfig, *, multiple: int, min_seconds: float = 0.1):
        import jax

        from jaxserve.engine.kernel_choice import choose_kernels, decide_deterministic
        from jaxserve.engine.resolution import model_functions, resolve
        from jaxserve.engine.sharding import local_part, model_shards
        from jaxserve.execution.model_functions import weights_dtype
        from jaxserve.execution.programs import Programs
        from jaxserve.execution.runner import Runner
        from jaxserve.models.shard_placement import shard_model

        if config.pipeline_parallel_size != 1:
            raise NotImplementedError(f"pipeline_parallel_size={config.pipeline_parallel_size}: profiles are of one stage")
        if config.attention_groups != 1:
            raise NotImplementedError(f"attention_groups={config.attention_groups}: profiles are of one group")
        shards, config = model_shards(model.config, config)
        if shards is not None:
            model = shard_model(model, shards)
        part, dtype = local_part(model), weights_dtype(model)
        config = decide_deterministic(part, dtype, config)
        kernels = choose_kernels(part, dtype, config)
        functions = model_functions(model, config, kernels.layer)
        limits = resolve(functions, config, kernels.attention).scheduler
        self.levels: list[int]
        plan, self.levels = grid_plan(limits.max_num_seqs, limits.max_num_batched_tokens, multiple)
        self.config: ResolvedConfig = resolve(functions, replace(config, bucket_plan=plan), kernels.attention)
        self.programs: Programs = Programs(functions, self.config)
        self.runner: Runner = Runner(self.programs)
        self.min_seconds = min_seconds
        self.device: str = jax.local_devices()[0].device_kind
        self.compile_seconds: dict[Bucket, float] = {}
        self._visits: dict[tuple[StepShape, int], list[float]] = {}

    @property
    def plan(self) -> BucketPlan:
        return self.config.plan

    @property
    def page_size(self) -> int:
        return self.config.cache.page_size

    def shapes(self, bucket: Bucket) -> list[StepShape]:
        """The steps that a bucket is measured with: short, middling and long KV, chunks that start early and late."""
        shortest = self.page_size
        if bucket.max_q_len == 1:
            longest = self._longest_kv(bucket.seqs, 0)
            return [StepShape(bucket, bucket.seqs, kv) for kv in (shortest, max(shortest, longest // 3), longest)]
        T, S = bucket.tokens, bucket.seqs
        late = max(0, min(self.config.scheduler.max_model_len, self._pool_tokens) * 3 // 4 - T)
        pieces = self._cut(T, min(S, max(1, T // 256)))
        decodes = min(S - 1, T - 1)
        shapes = [StepShape(bucket, 0, 0, pieces), StepShape(bucket, 0, 0, pieces, late)]
        if decodes:
            rest = self._cut(T - decodes, min(S - decodes, max(1, (T - decodes) // 256)))
            longest = self._longest_kv(decodes, T)
            shapes += [StepShape(bucket, decodes, kv, rest) for kv in (shortest, max(shortest, longest // 3), longest)]
        return shapes

    def random_shape(self, bucket: Bucket, rng: np.random.Generator) -> StepShape:
        """A step that fills a bucket in a way that `shapes` does not."""
        if bucket.max_q_len == 1:
            decodes = int(rng.integers(max(1, bucket.seqs * 3 // 4), bucket.seqs + 1))
            return StepShape(bucket, decodes, int(rng.integers(self.page_size, self._longest_kv(decodes, 0) + 1)))
        T, S = bucket.tokens, bucket.seqs
        num_chunks = int(rng.integers(1, max(1, min(S, 8, T // 16)) + 1))
        decodes = int(rng.integers(0, min(S - num_chunks, T - num_chunks) + 1))
        tokens = int(rng.integers(max(decodes + num_chunks, T * 3 // 4), T + 1))
        chunks = self._cut(tokens - decodes, num_chunks)
        longest = self._longest_kv(decodes, T) if decodes else 0
        kv = int(rng.integers(1, longest + 1)) if decodes else 0
        return StepShape(bucket, decodes, kv, chunks, int(rng.integers(0, 3)) * min(256, self.config.scheduler.max_model_len // 8))

    @property
    def _pool_tokens(self) -> int:
        return self.config.cache.num_pages * self.page_size

    def _longest_kv(self, num_seqs: int, other_tokens: int) -> int:
        """KV length that so many sequences can have at once, beside chunks of `other_tokens` in all."""
        share = (self._pool_tokens - 2 * other_tokens) // num_seqs // self.page_size * self.page_size
        return max(1, min(self.config.scheduler.max_model_len, share))

    @staticmethod
    def _cut(tokens: int, pieces: int) -> tuple[int, ...]:
        return tuple(tokens // pieces + (i < tokens % pieces) for i in range(pieces))

    def inputs(self, shape: StepShape, head_rows: int) -> StepInputs:
        """A step as the engine packs it, for the head of `head_rows` logits rows (0: no head): so many of its sequences sample, or
        all. They are in rows 0, 1, ..., with pages of their own where the pool has enough. All are packed as chunks, so that a step
        repeated is the same step."""
        bucket, pool_pages = shape.bucket, self.config.cache.num_pages
        q_lens = np.array([1] * shape.decodes + list(shape.chunks), np.int32)
        starts = np.array([max(0, shape.decode_kv - 1)] * shape.decodes + [shape.start] * len(shape.chunks), np.int32)
        ends, n = starts + q_lens, len(q_lens)
        counts = np.minimum(-(-ends // self.page_size), self.config.max_pages_per_seq).tolist()
        pages = [(row, column) for row, count in enumerate(counts) for column in range(count)]
        vocab = self.config.model.vocab_size
        requests = [Request(str(row), [row % vocab] * end, _GREEDY, seed=0, arrival=0.0) for row, end in enumerate(ends.tolist())]
        schedule = Schedule(
            step_id=0,
            requests=requests,
            rows=np.arange(n),
            q_lens=q_lens,
            starts=starts,
            least_starts=starts,
            samples=np.arange(n) < head_rows,
            generations=np.zeros(n, np.int64),
            page_updates=np.array([(*at, i % pool_pages) for i, at in enumerate(pages)], np.int32),
            num_decodes=0,
            num_tokens=int(q_lens.sum()),
            max_q_len=bucket.max_q_len if bucket.max_q_len == 1 else int(q_lens.max()),
        )
        plan, limits = self.plan, self.config.scheduler
        mixed = plan.mixed[-1] if bucket.max_q_len == 1 else (bucket.tokens, bucket.seqs)
        decode = (bucket.seqs,) if bucket.max_q_len == 1 else ()
        alone = BucketPlan(decode, (mixed,), plan.head_rows)  # or the step would run in the smallest bucket of the grid
        packer = BatchPacker(alone, self.programs.layouts, limits.max_num_seqs, self.programs.edit_layout)
        packer.newcomers(schedule)
        inputs = packer.pack(schedule)
        assert inputs.bucket == bucket and inputs.head_rows == (plan.select_head_rows(min(head_rows, n)) if head_rows else 0)
        return inputs

    def visit(self, shape: StepShape, head_rows: int = 0) -> float:
        """Times one visit of a point; its first compiles what it needs. Returns the median of its steps, in seconds."""
        self.programs.get("update")
        if shape.bucket not in self.compile_seconds:
            start = time.perf_counter()
            self.programs.get(shape.bucket)
            self.compile_seconds[shape.bucket] = time.perf_counter() - start
        inputs, runner = self.inputs(shape, head_rows), self.runner
        if head_rows:
            self.programs.get((head_rows, False))
        start = time.perf_counter()
        runner.fetch(runner.dispatch(inputs))  # with the page table
        seconds = [time.perf_counter() - start]
        if seconds[0] < 4 * self.min_seconds:  # beside a longer step the table, and what a pipeline hides, are nothing
            inputs, seconds = replace(inputs, extra_page_updates=_NO_UPDATES), []
            handle, following = runner.dispatch(inputs), runner.dispatch(inputs)
            runner.fetch(handle)
            before = time.perf_counter()
            while sum(seconds) < self.min_seconds or len(seconds) < 2:
                handle, following = following, runner.dispatch(inputs)
                runner.fetch(handle)
                now = time.perf_counter()
                seconds.append(now - before)
                before = now
            runner.fetch(following)
        self._visits.setdefault((shape, head_rows), []).extend(seconds)
        return float(np.median(seconds))

    def dispatch_seconds(self) -> float:
        """Host time of a dispatch: what the smallest decode step takes to return from it."""
        bucket = self.plan.buckets[0]
        inputs = replace(self.inputs(self.shapes(bucket)[0], 0), extra_page_updates=_NO_UPDATES)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            handle = self.runner.dispatch(inputs)
            times.append(time.perf_counter() - start)
            self.runner.fetch(handle)
        return float(np.median(times))

    def point(self, shape: StepShape, head_rows: int = 0) -> StepPoint:
        """What the visits of a point say."""
        visits, bucket = self._visits[shape, head_rows], shape.bucket
        kv_tokens, pairs = shape.demand(self.page_size)
        seconds, median = np.quantile(visits, [LOW_QUANTILE, 0.5]).tolist()
        spread = median / seconds - 1
        return StepPoint(bucket.tokens, bucket.seqs, bucket.max_q_len, head_rows, kv_tokens, pairs, seconds, spread)

    def run(
        self,
        *,
        rounds: int = 3,
        tolerance: float = 0.1,
        max_buckets: int = 64,
        max_spread: float = 0.1,
        progress: Callable[..., Iterable] = lambda items, **_: items,
    ) -> tuple[StepTimeModel, list[StepPoint]]:
        """(the fitted model, the points that it was fitted to, heads among them).

        rounds: visits of every point; those whose spread is wider than max_spread get as many again. tolerance: relative error of
        interpolation at a bucket half-way above which that one is kept; at most max_buckets are measured. ValueError if more
        are needed to begin with.
        """
        lines = [[Bucket(s, s, 1) for s in self.plan.decode]]
        grid = set(self.plan.mixed)
        for level in self.levels:
            tokens = sorted({t for t, s in grid if s == min(t, level)})
            lines.append([Bucket(t, min(t, level), t) for t in tokens])
        chosen: set[Bucket] = set()
        for line in lines:
            chosen |= {line[0], line[-1], *line[:: max(1, len(line) // 4)]}
        if len(chosen) > max_buckets:
            raise ValueError(f"{max_buckets=} is too few: the fit begins with {len(chosen)} buckets; allow that many")
        self._visit_heads(rounds)
        self._visit_all(chosen, 1, progress)
        tested: set[Bucket] = set()
        while True:  # halves of the intervals that are not straight
            halves = {b for line in lines for b in _halves(line, chosen, tested)}
            halves = set(sorted(halves)[: max(0, max_buckets - len(chosen | tested))])
            if not halves:
                break
            model = self._fit(chosen)
            self._visit_all(halves, 1, progress)
            tested |= halves
            for bucket in halves:
                if model.error([self.point(s) for s in self.shapes(bucket)])["median"] > tolerance:
                    chosen.add(bucket)
        measured = chosen | tested
        self._visit_all(measured, rounds - 1, progress)
        self._visit_noisy(self._visits, rounds, max_spread, progress)
        return self._fit(measured), self._points(measured)

    def held_out(
        self,
        num_points: int,
        seed: int,
        *,
        rounds: int = 3,
        max_spread: float = 0.1,
        progress: Callable[..., Iterable] = lambda items, **_: items,
    ) -> list[StepPoint]:
        """Points of random buckets of the grid, random loads, every sequence sampling: none of them was fitted."""
        rng = np.random.default_rng(seed)
        buckets = [self.plan.buckets[i] for i in rng.integers(0, len(self.plan.buckets), num_points)]
        shapes = [self.random_shape(b, rng) for b in buckets]
        keys = [(shape, self.plan.select_head_rows(shape.decodes + len(shape.chunks))) for shape in shapes]
        for _ in range(rounds):
            for key in progress(keys, desc="held-out points"):
                self.visit(*key)
        self._visit_noisy(keys, rounds, max_spread, progress)
        return [self.point(*key) for key in keys]

    def _visit_all(self, buckets: Iterable[Bucket], rounds: int, progress: Callable[..., Iterable]) -> None:
        shapes = [s for bucket in sorted(buckets) for s in self.shapes(bucket)]
        for _ in range(rounds):
            for shape in progress(shapes, desc="steps"):
                self.visit(shape)

    def _visit_noisy(self, keys: Iterable[Any], rounds: int, max_spread: float, progress: Callable[..., Iterable]) -> None:
        noisy = [key for key in keys if self.point(*key).spread > max_spread]
        for _ in range(rounds if noisy else 0):
            for key in progress(noisy, desc="noisy points again"):
                self.visit(*key)

    def _visit_heads(self, rounds: int) -> None:
        for _ in range(rounds):
            for rows in (0, *self.plan.head_rows):
                self.visit(self._head_shape, rows)

    @property
    def _head_shape(self) -> StepShape:
        bucket = Bucket(self.plan.decode[-1], self.plan.decode[-1], 1)
        return StepShape(bucket, bucket.seqs, self.page_size)

    def _points(self, buckets: Iterable[Bucket]) -> list[StepPoint]:
        """Of the buckets without heads, and of every head."""
        bodies = [self.point(shape) for bucket in sorted(buckets) for shape in self.shapes(bucket)]
        return bodies + [self.point(self._head_shape, rows) for rows in self.plan.head_rows]

    def _fit(self, buckets: Iterable[Bucket]) -> StepTimeModel:
        programs = {}
        for bucket in buckets:
            memory = self.programs.get(bucket).memory_analysis()
            programs[bucket] = self.compile_seconds[bucket], int(memory.temp_size_in_bytes) if memory is not None else 0
        return fit_model(self._points(programs), programs, self.levels, self.page_size)


def _halves(line: Sequence[Bucket], chosen: set[Bucket], tested: set[Bucket]) -> list[Bucket]:
    """The middles of the intervals between neighbours on the line that were chosen, where no middle was tested yet."""
    at = [i for i, b in enumerate(line) if b in chosen]
    middles = []
    for low, high in zip(at, at[1:], strict=False):
        inside = set(line[low + 1 : high])
        if inside and not inside & tested:
            middles.append(line[(low + high) // 2])
    return middles

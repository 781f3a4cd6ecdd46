"""How long a step takes: a model fitted to measured steps of one machine, model and set of limits.

Owns what a model of step times is asked (StepTimes), the measured one's form, its fit, its interpolation between measured buckets,
and its JSON. Knows nothing of how steps are measured (engine/measure.py) or of requests; analytic.py models machines not at hand.

A body's time is affine in what it attends to, with coefficients of each bucket's own, since padding and tiles are a bucket's:

    seconds(bucket) = base + per_kv_token * (KV positions that decodes read) + per_pair * (query-key pairs of chunks)

Between measured buckets the coefficients are interpolated linearly, in tokens first, then in sequences. The split of linear
operators by number of tokens from attention by decode KV and by prefill pairs is that of Vidur (Agrawal et al., MLSys 2024).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.buckets.plan import Bucket

# What a profile that does not say it was measured with: the engine's options of devices, one device.
DEVICES: dict[str, Any] = {"tensor_parallel_size": 1, "graph_collectives": False, "all_reduce_backend": "auto"}
NEIGHBOURS = 2  # buckets on either side that a bucket's KV and pair terms are the median over

_FORMAT = "jaxserve-step-times-1"


class StepTimes(Protocol):
    """What a replay asks: seconds of a body in its bucket and of a head, affine in the KV positions that decodes read (kv_tokens)
    and the query-key pairs of chunks (pairs).

    page_size: tokens a page. host_seconds: of dispatching a step. window: positions that a query sees, which kv_tokens and pairs
    are counted by; None: all of them.
    """

    @property
    def page_size(self) -> int: ...
    @property
    def host_seconds(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    def body_seconds(self, bucket: Bucket, kv_tokens: Any = 0, pairs: Any = 0) -> Any: ...
    def coefficients(self, bucket: Bucket) -> np.ndarray: ...
    def head_seconds(self, rows: int) -> float: ...
    def seconds(self, bucket: Bucket, head_rows: int, kv_tokens: float, pairs: float) -> float: ...


@dataclass(frozen=True)
class StepPoint:
    """One measured step. head_rows 0: the body alone. spread: how far the median of its runs lies above `seconds`."""

    tokens: int  # of the bucket, like seqs and max_q_len
    seqs: int
    max_q_len: int
    head_rows: int
    kv_tokens: int
    pairs: int
    seconds: float
    spread: float = 0.0

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.tokens, self.seqs, self.max_q_len)


@dataclass(frozen=True)
class BucketTimes:
    """A measured bucket: the three coefficients, and what its program costs to make and to run."""

    tokens: int
    seqs: int
    max_q_len: int
    base: float  # seconds
    per_kv_token: float
    per_pair: float
    compile_seconds: float = 0.0
    temp_bytes: int = 0

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.tokens, self.seqs, self.max_q_len)

    @property
    def row(self) -> tuple[float, ...]:
        return self.base, self.per_kv_token, self.per_pair, self.compile_seconds, float(self.temp_bytes)


@dataclass(frozen=True)
class StepTimeModel:
    """Predicted times of steps.

    times: measured buckets, decode and mixed. heads: (rows, seconds) of head programs. host_seconds: what the host takes to
    dispatch a step, hidden while the device is the slower of the two. page_size: as it was measured. levels: the numbers of
    sequences at which mixed buckets were measured; a mixed bucket (T, min(T, level)) belongs to each level. slowdown: what a step
    typically takes over what times and heads say, which are of the machine's quiet moments. about: where it comes from.
    """

    times: tuple[BucketTimes, ...]
    heads: tuple[tuple[int, float], ...]
    levels: tuple[int, ...]
    page_size: int
    host_seconds: float = 0.0
    slowdown: float = 1.0
    about: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.times or not self.heads or not self.levels:
            raise ValueError("a step-time model needs measured buckets, heads and levels; run `jaxserve tune profile`")

    def __hash__(self) -> int:
        return id(self)

    @property
    def window(self) -> int | None:
        """None: what a window saves is in the coefficients."""
        return None

    @functools.cached_property
    def _decode_curve(self) -> tuple[np.ndarray, np.ndarray]:
        return _curve([(t.seqs, t.row) for t in self.times if t.max_q_len == 1])

    @functools.cached_property
    def _mixed_curves(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        mixed = [t for t in self.times if t.max_q_len > 1]
        return {level: _curve([(t.tokens, t.row) for t in mixed if t.seqs == min(t.tokens, level)]) for level in self.levels}

    @property
    def max_tokens(self) -> int:
        """The largest measured step."""
        return max(t.tokens for t in self.times)

    @functools.cache  # noqa: B019 (a few hundred buckets, for as long as the model lives)
    def _row(self, bucket: Bucket) -> np.ndarray:
        """f64[5]: base, per_kv_token, per_pair, compile_seconds, temp_bytes."""
        return self._quiet_row(bucket) * np.array([self.slowdown] * 3 + [1.0, 1.0])

    def _quiet_row(self, bucket: Bucket) -> np.ndarray:
        if bucket.max_q_len == 1 and len(self._decode_curve[0]):
            sizes, rows = self._decode_curve
            self._check_size(bucket, bucket.seqs, sizes[-1])
            return _interpolate(bucket.seqs, sizes, rows)
        at, values = [], []
        for level, (sizes, rows) in self._mixed_curves.items():
            self._check_size(bucket, bucket.tokens, sizes[-1])
            seqs = min(level, bucket.tokens)
            if seqs not in at:
                at.append(seqs)
                values.append(_interpolate(bucket.tokens, sizes, rows))
        return _interpolate(bucket.seqs, np.array(at), np.array(values))

    @staticmethod
    def _check_size(bucket: Bucket, size: int, measured: int) -> None:
        if size > measured:
            raise ValueError(
                f"bucket {bucket} is larger than any that was profiled ({measured}); run `jaxserve tune profile` with larger "
                "max_num_batched_tokens and max_num_seqs"
            )

    def body_seconds(self, bucket: Bucket, kv_tokens: Any = 0, pairs: Any = 0) -> Any:
        """Seconds of a body; kv_tokens and pairs may be arrays. ValueError for a bucket beyond what was profiled."""
        base, per_kv_token, per_pair, _, _ = self._row(bucket)
        return base + per_kv_token * kv_tokens + per_pair * pairs

    def coefficients(self, bucket: Bucket) -> np.ndarray:
        """f64[3]: base, per_kv_token, per_pair."""
        return self._row(bucket)[:3]

    def head_seconds(self, rows: int) -> float:
        """Seconds of a head; 0 rows: none runs."""
        if not rows:
            return 0.0
        sizes, seconds = zip(*self.heads, strict=True)
        return float(np.interp(rows, sizes, seconds)) * self.slowdown

    def seconds(self, bucket: Bucket, head_rows: int, kv_tokens: float, pairs: float) -> float:
        """Seconds of one step on the device."""
        return float(self.body_seconds(bucket, kv_tokens, pairs)) + self.head_seconds(head_rows)

    def compile_seconds(self, bucket: Bucket) -> float:
        """Seconds that the body's program took to compile."""
        return float(self._row(bucket)[3])

    def temp_bytes(self, bucket: Bucket) -> int:
        """Temporary memory of the body's program."""
        return int(self._row(bucket)[4])

    def check_devices(self, options: Mapping[str, Any]) -> None:
        """ValueError if it was measured on other devices than an engine's options say, of which those of DEVICES are looked at."""
        for name, unsaid in DEVICES.items():
            measured, asked = self.about.get(name, unsaid), options.get(name, unsaid)
            if measured != asked:
                raise ValueError(
                    f"the profile of step times was measured with {name}={measured}, not {asked}: give {name}={measured}, or "
                    "profile again with `jaxserve tune profile`"
                )

    def error(self, points: Iterable[StepPoint]) -> dict[str, float]:
        """Relative errors |predicted / measured - 1| over `points`, in quiet moments: median, p90, max, and how many there are."""
        points = list(points)
        if not points:
            raise ValueError("no points to compare with")
        predicted = np.array([self.seconds(p.bucket, p.head_rows, p.kv_tokens, p.pairs) for p in points])
        errors = np.abs(predicted / self.slowdown / np.array([p.seconds for p in points]) - 1)
        return {
            "median": float(np.median(errors)),
            "p90": float(np.quantile(errors, 0.9)),
            "max": float(errors.max()),
            "num_points": len(points),
        }

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    def save(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StepTimeModel:
        """The model of a JSON file written by `save`. ValueError says what is wrong with it."""
        try:
            data = json.loads(Path(path).read_text())
            if data.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            times = tuple(BucketTimes(**t) for t in data.pop("times"))
            heads = tuple((int(rows), float(seconds)) for rows, seconds in data.pop("heads"))
            return cls(times=times, heads=heads, levels=tuple(data.pop("levels")), **data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"step times {str(path)!r} cannot be used: {error!r}; write them with `jaxserve tune profile`"
            ) from error


def _curve(entries: list[tuple[int, tuple[float, ...]]]) -> tuple[np.ndarray, np.ndarray]:
    entries.sort()
    return np.array([size for size, _ in entries]), np.array([row for _, row in entries]).reshape(len(entries), -1)


def _interpolate(x: float, sizes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Row at x, linear between sizes, constant beyond them. sizes rise."""
    return np.array([np.interp(x, sizes, column) for column in rows.T])


def fit_model(
    points: Sequence[StepPoint],
    programs: Mapping[Bucket, tuple[float, int]],  # measured bucket -> (seconds to compile, bytes of temporary memory)
    levels: Sequence[int],
    page_size: int,
    heads: Sequence[tuple[int, float]] = (),
) -> StepTimeModel:
    """The model of measured points: buckets as `fit_buckets`, heads by what a step takes longer with one than without, made to rise
    with their rows. The fit is of quiet moments, which differ least from point to point; all times are then longer by one factor,
    the median of how far the points' own medians lie above them.

    points: with head_rows, only those whose step is there without a head too. heads: (rows, seconds) where none has.
    """
    from scipy.optimize import isotonic_regression

    bodies: dict[Bucket, list[StepPoint]] = {}
    for point in points:
        if not point.head_rows:
            bodies.setdefault(point.bucket, []).append(point)
    alone = {(p.bucket, p.kv_tokens, p.pairs): p.seconds for some in bodies.values() for p in some}
    with_head = sorted((p.head_rows, p.seconds - alone[p.bucket, p.kv_tokens, p.pairs]) for p in points if p.head_rows)
    rows, seconds = zip(*(with_head or heads), strict=True)
    rising = isotonic_regression([max(0.0, s) for s in seconds]).x  # more rows never take less
    times = [
        BucketTimes(bucket.tokens, bucket.seqs, bucket.max_q_len, *coefficients, *programs[bucket])
        for bucket, coefficients in sorted(fit_buckets(bodies, levels).items())
    ]
    slowdown = 1 + float(np.median([p.spread for p in points]))
    known_heads = tuple(zip(rows, map(float, rising), strict=True))
    return StepTimeModel(tuple(times), known_heads, tuple(levels), page_size, slowdown=slowdown)


def refit(profile: StepTimeModel) -> StepTimeModel:
    """The model that the fit as it is now makes of the points that a profile keeps, with its errors on them and on those that were
    held out; nothing else of the profile changes. ValueError if it keeps none."""
    try:
        points, held_out = ([StepPoint(**point) for point in profile.about[name]] for name in ("points", "held_out"))
        programs = {t.bucket: (t.compile_seconds, t.temp_bytes) for t in profile.times}
        fitted = fit_model(points, programs, profile.levels, profile.page_size, profile.heads)
        errors = {"fit_error": fitted.error(points), "held_out_error": fitted.error(held_out)}
    except (KeyError, TypeError) as error:
        raise ValueError(f"the profile does not keep the points it was fitted to ({error!r}); measure anew") from None
    return replace(fitted, host_seconds=profile.host_seconds, about=profile.about | errors)


def fit_buckets(
    points: Mapping[Bucket, Sequence[StepPoint]], levels: Sequence[int]
) -> dict[Bucket, tuple[float, float, float]]:  # bucket -> (base, per_kv_token, per_pair)
    """Each bucket by itself (`fit_bucket`), then its KV and pair terms as the running median over its neighbours, decode
    buckets and the mixed ones of each level apart, and its base once more with these.

    What a KV token costs hardly changes from one size to the next, and three terms of one bucket are few points: on a busy machine
    a lucky bucket would seem to read its KV at twice the speed of its neighbours, and a search would pick it for that.
    """
    alone = {bucket: fit_bucket(some) for bucket, some in points.items()}
    lines: dict[int, list[Bucket]] = {}
    for bucket in sorted(points):
        line = 0 if bucket.max_q_len == 1 else min((level for level in levels if level >= bucket.seqs), default=bucket.seqs)
        lines.setdefault(line, []).append(bucket)
    fitted = {}
    for line in lines.values():
        for i, bucket in enumerate(line):
            near = [alone[b][1:] for b in line[max(0, i - NEIGHBOURS) : i + NEIGHBOURS + 1]]
            per_kv_token, per_pair = (float(x) for x in np.median(near, axis=0))
            seconds = np.array([p.seconds for p in points[bucket]])
            rest = np.array([p.kv_tokens * per_kv_token + p.pairs * per_pair for p in points[bucket]])
            base = float(((seconds - rest) / seconds**2).sum() / (1 / seconds**2).sum())  # least squares of relative errors
            fitted[bucket] = (base, per_kv_token, per_pair) if base > 0 else alone[bucket]
    return fitted


def fit_bucket(points: Sequence[StepPoint]) -> tuple[float, float, float]:
    """(base, per_kv_token, per_pair) of one bucket, none of them negative: least squares of relative errors.

    points: bodies alone (head_rows 0). With three coefficients the best subset of those that stay positive is found by trying all.
    """
    x = np.array([(1.0, p.kv_tokens, p.pairs) for p in points])
    y = np.array([p.seconds for p in points])
    x = x / y[:, None]
    scale = np.maximum(np.abs(x).max(axis=0), 1e-300)
    best, least = np.zeros(3), np.inf
    for n in (3, 2, 1):
        for columns in itertools.combinations(range(3), n):
            columns = list(columns)
            solution, *_ = np.linalg.lstsq(x[:, columns] / scale[columns], np.ones(len(y)), rcond=None)
            w = np.zeros(3)
            w[columns] = solution / scale[columns]
            loss = float(((x @ w - 1) ** 2).sum())
            if (w >= 0).all() and w[0] > 0 and loss < least * (1 - 1e-9):
                best, least = w, loss
    return float(best[0]), float(best[1]), float(best[2])

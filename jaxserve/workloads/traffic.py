"""Workloads by distribution, with shared prefixes and with times of arrival; `workloads` has the named ones.

Owns length fits, shared prefixes, conversations and the processes of arrival. Everything is seeded. Knows no engine; numpy only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

from jaxserve.lazy_names import Late
from jaxserve.workloads.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")  # the commands' --help reads LENGTH_FITS

NORMAL_P90 = 1.2815515655446004  # the standard normal's 0.9-quantile


@dataclass(frozen=True)
class LengthFit:
    """Log-normal lengths by published quantiles, in tokens: (median, P90) of prompt and output, and the most that both make."""

    prompt: tuple[float, float]
    output: tuple[float, float]
    max_total: int

    @functools.cached_property
    def normals(self) -> np.ndarray:
        """f64[2, 2]: mean and standard deviation of the logarithms, of prompt and of output, with which the requests that max_total
        leaves have the published quantiles. By Newton's method, from where they would be without it."""
        targets = np.log([self.prompt, self.output])
        x = np.stack([targets[:, 0], np.log((targets[:, 1] - targets[:, 0]) / NORMAL_P90)])  # [2, 2]: means, logs of deviations
        for _ in range(50):
            missed = self._log_quantiles(x) - targets
            if np.abs(missed).max() < 1e-5:
                return np.stack([x[0], np.exp(x[1])], axis=1)
            moved = [self._log_quantiles(x + step.reshape(2, 2)) - targets - missed for step in 1e-4 * np.eye(4)]
            jacobian = np.stack(moved, axis=-1).reshape(4, 4) / 1e-4
            x -= np.clip(np.linalg.solve(jacobian, missed.ravel()).reshape(2, 2), -0.25, 0.25)
        raise ValueError(f"no log-normal lengths of at most {self.max_total} tokens have these quantiles: {self}")

    def _log_quantiles(self, x: np.ndarray) -> np.ndarray:  # [2, 2]: means, logs of deviations, each of prompt and of output
        """f64[2, 2]: logarithms of median and P90, of prompt and of output, among requests of at most max_total tokens."""
        grid = np.linspace(0.0, np.log(self.max_total), 2001)  # logarithms of lengths
        room = np.log(np.maximum(self.max_total - np.exp(grid), 1e-9))  # and of the other one's, at most
        density = np.exp(-(((grid - x[0][:, None]) / np.exp(x[1][:, None])) ** 2) / 2)
        below = _cumulative(density)
        both = density * np.stack([np.interp(room, grid, other) for other in below[::-1]])
        return np.stack([np.interp(np.array([0.5, 0.9]) * share[-1], share, grid) for share in _cumulative(both)])


def _cumulative(density: np.ndarray) -> np.ndarray:  # f64[2, n], on an even grid
    """Its integral from the left, up to a factor."""
    steps = np.cumsum((density[:, 1:] + density[:, :-1]) / 2, axis=1)
    return np.concatenate([np.zeros((len(density), 1)), steps], axis=1)


# Medians and P90s: Agrawal et al., Sarathi-Serve (OSDI 2024), table 2.
LENGTH_FITS = {
    "openchat_sharegpt4": LengthFit((1730, 5696), (415, 834), 8192),
    "arxiv_summarization": LengthFit((7059, 12985), (208, 371), 16384),
}


def log_normal(name: str, num_requests: int, seed: int) -> Workload:
    """Lengths with the medians and P90s of one of LENGTH_FITS, those that are left when requests longer than its max_total are
    drawn again."""
    if name not in LENGTH_FITS:
        raise ValueError(f"{name=} must be one of {', '.join(LENGTH_FITS)}")
    fit, rng = LENGTH_FITS[name], np.random.default_rng(seed)
    kept: list[tuple[int, int]] = []
    while len(kept) < num_requests:
        draws = []
        for mean, deviation in fit.normals:
            draws.append(np.maximum(1, np.rint(np.exp(mean + deviation * rng.standard_normal(num_requests)))).astype(int))
        kept += [(p, o) for p, o in zip(*(d.tolist() for d in draws), strict=True) if p + o <= fit.max_total]
    return Workload(name, tuple(WorkloadRequest(p, o) for p, o in kept[:num_requests]))


def shared_prefix(
    num_requests: int, num_groups: int, prefix_len: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> Workload:
    """Prompts of a prefix that a group of requests shares (a system prompt, say) and `input_len` tokens of their own, in random
    order of groups."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, vocab_size, (num_groups, prefix_len))
    requests = []
    for group in rng.permutation(np.arange(num_requests) % num_groups):
        prompt = (*prefixes[group].tolist(), *rng.integers(0, vocab_size, input_len).tolist())
        requests.append(WorkloadRequest(len(prompt), output_len, prompt_token_ids=prompt))
    return Workload("shared_prefix", tuple(requests))


@dataclass(frozen=True, slots=True)
class GroupedPrompt(Sequence[int]):
    """Token ids that are not written out: num_prefix times `prefix`, which a group's prompts share, then `own` to the length."""

    num_tokens: int
    num_prefix: int
    prefix: int
    own: int

    def __len__(self) -> int:
        return self.num_tokens

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(
            itertools.repeat(self.prefix, self.num_prefix), itertools.repeat(self.own, self.num_tokens - self.num_prefix)
        )

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return list(self)[index]


def in_groups(workload: Workload, num_groups: int, prefix_len: int, seed: int) -> Workload:
    """The workload with prompts that begin alike: each request is of one of the groups, at random, and its first prefix_len tokens,
    or all but its last, are those of the group. The ids are not those of a vocabulary: for simulators.

    Raises:
      ValueError: a number below 1, or the workload's prompts are known by their ids already.
    """
    if num_groups < 1 or prefix_len < 1:
        raise ValueError(f"{num_groups=} and {prefix_len=} must be at least 1")
    if any(r.prompt_token_ids for r in workload.requests):
        raise ValueError(
            f"the prompts of workload {workload.name} have token ids of their own: they are in groups, or not, already"
        )
    groups = np.random.default_rng(seed).integers(num_groups, size=len(workload.requests)).tolist()
    requests = [
        replace(
            r,
            prompt_token_ids=GroupedPrompt(r.num_prompt_tokens, min(prefix_len, r.num_prompt_tokens - 1), group, num_groups + row),
        )
        for row, (r, group) in enumerate(zip(workload.requests, groups, strict=True))
    ]
    return replace(workload, requests=tuple(requests))


def multi_turn(num_conversations: int, num_turns: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> Workload:
    """Conversations turn by turn, with scripted answers: a prompt is the conversation so far and a question of `input_len` tokens.
    All first turns come first, then all second ones."""
    rng = np.random.default_rng(seed)
    length = num_turns * (input_len + output_len)
    streams = rng.integers(0, vocab_size, (num_conversations, length)).tolist()
    requests = []
    for turn in range(num_turns):
        end = turn * (input_len + output_len) + input_len
        requests += [WorkloadRequest(end, output_len, prompt_token_ids=tuple(stream[:end])) for stream in streams]
    return Workload("multi_turn", tuple(requests))


def fitting(workload: Workload, max_model_len: int) -> tuple[Workload, int]:
    """(the requests of at most max_model_len tokens, prompt and output; how many were longer). ValueError if none is left."""
    lengths = [r.num_prompt_tokens + r.num_output_tokens for r in workload.requests]
    kept = tuple(r for r, length in zip(workload.requests, lengths, strict=True) if length <= max_model_len)
    if not kept:
        raise ValueError(
            f"no request of {workload.name} fits max_model_len={max_model_len}: the shortest has {min(lengths)} tokens, "
            f"the longest {max(lengths)}; raise it"
        )
    return replace(workload, requests=kept), len(lengths) - len(kept)


def at_once(workload: Workload) -> Workload:
    """The same requests, all arriving at the beginning."""
    return replace(workload, requests=tuple(replace(r, arrived_at=0.0) for r in workload.requests))


def at_rate(workload: Workload, rate: float, seed: int, burstiness: float = 1.0) -> Workload:
    """The same requests, in their order, `rate` a second on average. The gaps follow a Gamma distribution of shape `burstiness`, as
    in vLLM's benchmark: 1 is Poisson, less is burstier, and they are scaled so that the last request comes at (n - 1) / rate.
    ValueError unless rate and burstiness are above 0."""
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"request_rate={rate} and {burstiness=} must be above 0")
    n = len(workload.requests)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), n)
    gaps[0] = 0.0
    total = gaps.sum()
    times = np.cumsum(gaps) * ((n - 1) / rate / total if total else 1.0)
    return replace(
        workload, requests=tuple(replace(r, arrived_at=t) for r, t in zip(workload.requests, times.tolist(), strict=True))
    )


def as_recorded(workload: Workload) -> Workload:
    """The same requests sorted by their own times, the first at 0."""
    requests = sorted(workload.requests, key=lambda r: r.arrived_at)
    first = requests[0].arrived_at
    return replace(workload, requests=tuple(replace(r, arrived_at=r.arrived_at - first) for r in requests))


def repeated(workload: Workload, times: int) -> Workload:
    """The workload `times` times, one after the other, a mean gap between them: a day from an hour's trace. ValueError unless times
    is at least 1 and requests are in the order of their arrivals."""
    arrivals = [r.arrived_at for r in workload.requests]
    if times < 1 or arrivals != sorted(arrivals):
        raise ValueError(f"{times=} must be at least 1, and {workload.name} in the order of its arrivals; see as_recorded")
    span = (arrivals[-1] - arrivals[0]) * len(arrivals) / max(1, len(arrivals) - 1)
    requests = (replace(r, arrived_at=r.arrived_at + i * span) for i in range(times) for r in workload.requests)
    return replace(workload, requests=tuple(requests))


def stretches(workload: Workload, num_requests: int, length: int = 500) -> Workload:
    """Part of a workload: runs of `length` requests from all over it, one run after another, num_requests of them in all (rounded
    down to whole runs). Each arrives as long after the one before as it did. ValueError if it has fewer requests."""
    n, count = len(workload.requests), num_requests // length
    if not 1 <= count or n < num_requests:
        raise ValueError(f"{num_requests=} of {n} in runs of {length}: must be at least one run and no more than there are")
    starts = np.linspace(0, n - length, count).round().astype(int)
    rows = (starts[:, None] + np.arange(length)).ravel()
    arrivals = np.diff([r.arrived_at for r in workload.requests], prepend=0.0)[rows].cumsum()
    kept = tuple(replace(workload.requests[row], arrived_at=float(at)) for row, at in zip(rows, arrivals, strict=True))
    return replace(workload, requests=kept)


def describe(workload: Workload, quantiles: Sequence[float] = (0.5, 0.9, 0.99)) -> str:
    """One line: how many requests, and their lengths' quantiles."""
    parts = [f"{workload.name}: {len(workload.requests)} requests"]
    labels = "/".join(f"P{100 * q:g}" for q in quantiles)
    for name in ("prompt", "output"):
        lengths = [getattr(r, f"num_{name}_tokens") for r in workload.requests]
        parts.append(f"{name} {'/'.join(f'{np.quantile(lengths, q):.0f}' for q in quantiles)} tokens ({labels})")
    return ", ".join(parts)

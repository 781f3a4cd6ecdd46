"""The requests of an engine that have not ended: each one's samples by its id, and what is settled when one ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.constraints import Constraints


def samples_of(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    priority: int,
    cache_salt: str | None,
) -> list[Request]:
    """The n samples of a request."""
    requests = [
        Request(
            request_id=request_id if params.n == 1 else f"{request_id}/{i}",
            prompt_token_ids=[int(t) for t in prompt_token_ids],
            params=params,
            eos_token_ids=eos_token_ids,
            priority=int(priority),  # the queue negates it, which an unsigned integer would not survive
            cache_salt=cache_salt,
            sample_index=i,
            parent_id=request_id,
        )
        for i in range(params.n)
    ]
    for request in requests:
        request.samples = requests if params.n > 1 else ()
    return requests


class LiveRequests:
    """Owns the groups of samples. A group is dropped when the last of its samples has finished."""

    def __init__(self, constraints: Constraints):
        self._constraints = constraints
        self._groups: dict[str, list[Request]] = {}  # request id -> its samples

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        """Requests, not samples."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Request]:
        """The unfinished samples of all requests."""
        return (r for group in self._groups.values() for r in group if not r.finished)

    @property
    def ids(self) -> list[str]:
        """In the order in which they were added."""
        return list(self._groups)

    def add(self, request_id: str, samples: list[Request]) -> None:
        self._groups[request_id] = samples

    def remove(self, request_id: str) -> list[Request]:
        """Drops a request and returns its samples; none if it is unknown."""
        return self._groups.pop(request_id, [])

    def end(self, request: Request) -> None:
        """One sample has finished: its times are recorded, its grammar is dropped, and its request with its last sample."""
        self.settle(request)
        group = self._groups.get(request.parent_id)
        if group is not None and all(r.finished for r in group):
            del self._groups[request.parent_id]

    def settle(self, request: Request) -> None:
        """As `end`, for a sample whose request is dropped by other means."""
        self._constraints.discard(request)
        metrics = request.metrics
        if metrics is not None and metrics.finished_time is None:
            metrics.finished_time = time.monotonic()
            metrics.num_preemptions = request.num_preemptions

    def clear(self) -> None:
        """Forgets all requests."""
        self._groups.clear()

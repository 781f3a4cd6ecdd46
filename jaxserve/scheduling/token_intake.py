"""Adding tokens to requests: sampled tokens, accepted drafts, and forced tokens that the host knows beforehand.

Owns which request a token belongs to when its row has a new owner, how many places rejected drafts give back, and whether a token
ends its request. Knows nothing of queues, budgets or policies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.lifecycle import RequestLifecycle
from jaxserve.scheduling.schedule import Schedule, StepResult


@functools.cache
def _prefixes(width: int) -> np.ndarray:  # bool[width + 1, width]
    """The first n of so many, for each n. (A row of this table is had sooner than compared.)"""
    return np.tri(width + 1, width, -1, bool)


class TokenIntake:
    """Adds tokens to `requests`. num_discarded_rows: entries whose request had finished by the time their tokens came back."""

    def __init__(self, requests: RequestLifecycle):
        self.requests = requests
        self.num_discarded_rows: int = 0
        self._rows, self._pages = requests.rows, requests.pages

    def take(
        self,
        schedule: Schedule,
        sampled: np.ndarray,  # i32[n]; anything where samples is False
    ) -> StepResult:
        """The tokens of a step without drafts, one an entry that samples."""
        assert not schedule.num_drafts, "a step with drafts is updated with counts"
        assert len(sampled) == schedule.num_seqs, f"{len(sampled)} tokens for {schedule.num_seqs} entries"
        state, stop_ids = self._rows, self.requests.stop_ids
        requests, rows, tokens = schedule.requests, schedule.rows, sampled.tolist()
        samples = self._without_forced(schedule) if self.requests.forced else schedule.samples
        own = state.generation[rows] == schedule.generations
        if samples is not schedule.samples or schedule.num_decodes < schedule.num_seqs:
            own &= samples
        late: list[int] = []
        if not own.all():
            index = np.flatnonzero(own)
            late = np.flatnonzero(samples & ~own).tolist()
            requests, rows, tokens = [requests[i] for i in index.tolist()], rows[index], sampled[index].tolist()
        for request, token in zip(requests, tokens):  # noqa: B905 (strict costs 2 us at 256)
            request.token_ids.append(token)
        known = state.num_known[rows] + 1
        state.num_known[rows] = known
        self._pages.register_full(rows)
        result = StepResult(requests, tokens)
        ended = (known >= state.limit[rows]).nonzero()[0].tolist()
        if not stop_ids.keys().isdisjoint(tokens):
            ended = sorted({*ended, *(i for i, token in enumerate(tokens) if token in stop_ids)})
        if watched := self.requests.repetitions:
            ended = sorted({*ended, *(i for i, request in enumerate(requests) if request.request_id in watched)})
        for i in ended:
            self._finish_if_ended(requests[i], result)
        for i in late:
            self._deliver(schedule.requests[i], [int(sampled[i])], 1, result)
        return result

    def take_drafted(
        self,
        schedule: Schedule,
        sampled: np.ndarray,  # i32[n, 1 + k]
        counts: np.ndarray,  # i32[n]: an entry's accepted drafts and one more
    ) -> StepResult:
        """The tokens of a step with drafts. An entry brings one token and its accepted drafts, and gives back the rejected ones."""
        state, rows, requests = self._rows, schedule.rows, schedule.requests
        samples = self._without_forced(schedule) if self.requests.forced else schedule.samples
        planned = schedule.q_lens
        if schedule.num_decodes < len(rows):
            planned = np.where(np.arange(len(rows)) < schedule.num_decodes, planned, 1)
        odd = samples & ((counts < 1) | (counts > planned))
        assert not odd.any(), f"{counts[odd]} tokens of entries that planned {planned[odd]}"
        own = samples & (state.generation[rows] == schedule.generations)
        state.num_computed[rows] -= (planned - counts) * own
        known = state.num_known[rows] + counts
        alone = samples & ~(own & (known < state.limit[rows]))  # that may end, or that have no row any more
        given = _prefixes(sampled.shape[1]).take(counts, 0)
        tokens, stop_ids = sampled[given].tolist(), self.requests.stop_ids
        if stop_ids and not stop_ids.keys().isdisjoint(tokens):
            alone |= samples & (given & np.isin(sampled, list(stop_ids))).any(1)
        if watched := self.requests.repetitions:
            alone |= samples & np.array([request.request_id in watched for request in requests], bool)
        (together,) = (samples & ~alone).nonzero()
        own_rows = rows
        if len(together) < len(rows):
            own_rows, known, tokens = rows[together], known[together], sampled[together][given[together]].tolist()
        owners = [requests[i] for i in together.repeat(counts[together]).tolist()]
        for request, token in zip(owners, tokens):  # noqa: B905 (as in `take`)
            request.token_ids.append(token)
        result = StepResult(owners, tokens)
        state.num_known[own_rows] = known
        self._pages.register_full(own_rows)
        for i in alone.nonzero()[0].tolist():
            self._deliver(requests[i], sampled[i, : counts[i]].tolist(), int(planned[i]), result)
        return result

    def append_forced(self, request: Request, token_ids: Sequence[int], *, max_tokens: int, num_cut: int = 0) -> StepResult:
        """As `Scheduler.append_forced`; at most `max_tokens` of them."""
        result, rows, row = StepResult([], []), self._rows, request.row
        in_flight = request.num_in_flight - num_cut
        if (
            request.status is not RequestStatus.RUNNING
            or request.num_forced_in_flight
            or rows.num_computed[row] < rows.prefill_end[row]
        ):
            return result  # tokens that it already owes come first
        token_ids = token_ids[: min(max_tokens, request.max_total_tokens - len(request.token_ids))]
        while rows.capacity[row] < len(request.token_ids) + len(token_ids) and self._pages.grow(np.array([row])):
            pass
        token_ids = token_ids[: max(0, int(rows.capacity[row]) - len(request.token_ids))]
        if len(token_ids) <= max(1, in_flight):
            return result
        rows.num_computed[row] -= num_cut
        if in_flight:
            request.num_forced_in_flight = in_flight
            self.requests.forced[request.request_id] = request
        for token in token_ids:
            request.token_ids.append(token)
            result.requests.append(request)
            result.tokens.append(token)
            if self._end(request) is not None:
                break
        rows.num_known[row] = rows.prefill_end[row] = len(request.token_ids)
        self._finish_if_ended(request, result)
        return result

    def skip(self, num_steps: int, token: int) -> None:
        """Every running request decodes `num_steps` more tokens, each of them `token`. None may end with these. Each row then holds
        as many pages as after so many steps, but they may be other pages."""
        rows, order = self._rows, self._rows.order
        while len(short := order[rows.capacity[order] < rows.num_computed[order] + num_steps]):
            grown = self._pages.grow(short)
            assert grown, "a certain step lacks pages"
        rows.num_uploaded[order] = rows.capacity[order]
        rows.num_computed[order] += num_steps
        rows.num_known[order] += num_steps
        tokens = [token] * num_steps
        for request in rows.requests_at(order):
            request.token_ids += tokens
        self._pages.register_full(order)

    def _without_forced(self, schedule: Schedule) -> np.ndarray:
        """bool[n]: `schedule.samples`, False also where the host already knows the token, because it was forced meanwhile."""
        samples = schedule.samples.copy()
        for i, request in enumerate(schedule.requests):
            if samples[i] and request.num_forced_in_flight:
                samples[i] = False
                request.num_forced_in_flight -= 1
                if not request.num_forced_in_flight:
                    self.requests.forced.pop(request.request_id, None)
        return samples

    def _deliver(self, request: Request, tokens: list[int], num_planned: int, result: StepResult) -> None:
        """Appends one request's tokens up to its end, whether it runs or waits. num_planned: tokens in flight for them."""
        if request.finished:
            self.num_discarded_rows += 1
            return
        row = request.row
        if row < 0:
            request.num_unfetched -= num_planned
        for token in tokens:
            request.token_ids.append(token)
            if row >= 0:
                self._rows.num_known[row] += 1
            result.requests.append(request)
            result.tokens.append(token)
            if self._end(request) is not None:
                break
        if row >= 0:
            self._pages.register_full(np.array([row]))
        self._finish_if_ended(request, result)

    def _finish_if_ended(self, request: Request, result: StepResult) -> None:
        end = self._end(request)
        if end is not None:
            self.requests.finish(request, *end)
            result.finished.append(request)

    def _end(self, request: Request) -> tuple[str, int | str | None] | None:
        """(finish_reason, stop_reason) if the last token ends the request."""
        end, watch = request.end(), self.requests.repetitions.get(request.request_id)
        if end is None and watch is not None and watch.repeats() and request.num_output_tokens >= request.params.min_tokens:
            return "repetition", "repetition_detected"
        return end

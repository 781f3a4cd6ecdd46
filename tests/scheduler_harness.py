"""A device without a model, for tests of the scheduler: it runs schedules as the real one does and samples a pure function.

FakeDevice holds what the device holds (KV pages, page table, last token and KV length of each row), takes only what a Schedule
brings, and samples `next_token(seed, all tokens read back from the pages)`. A page that is handed out too early, written twice,
shared wrongly or not uploaded therefore changes the tokens, which are compared with `solo`, a loop that knows no scheduler.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.schedule import Schedule, StepResult
from jaxserve.scheduling.scheduler import Scheduler
from tests.scheduler_state import has_unfinished

EOS = 0  # also what stands in every place that holds no token: padding must never be taken for it
VOCABULARY = 40


def next_token(seed: int, tokens: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), seed) % VOCABULARY


def solo(request: Request, max_model_len: int) -> tuple[list[int], str, int | str | None]:
    """(output, finish_reason, stop_reason) of a request alone, token by token."""
    tokens, params, output = list(request.prompt_token_ids), request.params, []
    while True:
        token = next_token(request.seed, tokens)
        tokens.append(token)
        output.append(token)
        if len(output) > params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return output, "stop", None
            if token in (params.stop_token_ids or ()):
                return output, "stop", token
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length", None
        if len(output) >= params.min_tokens and repeats(output, params.repetition_detection):
            return output, "repetition", "repetition_detected"


def repeats(output: list[int], asked: Any) -> bool:
    """Whether it ends with a pattern often enough, each size and each repetition looked at."""
    if asked is None:
        return False
    sizes = range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1)
    return any(output[-n:] * asked.min_count == output[-n * asked.min_count :] for n in sizes)


class FakeDevice:
    def __init__(self, scheduler: Scheduler):
        pool, rows = scheduler.pool, scheduler.rows
        self.rows_per_group = rows.rows_per_group
        self.kv = np.full((len(scheduler.pools), pool.num_pages, pool.page_size), -1)
        self.page_table = np.full(rows.page_table.shape, -1)
        self.kv_lens = np.zeros(len(rows.page_table), int)
        self.last_tokens = np.zeros(len(rows.page_table), int)
        self.drafts: dict[int, list[int]] = {}  # by row: what is proposed to follow its last token
        self.cut: set[int] = set()  # rows none of whose drafts stands in the next step

    def run(self, schedule: Schedule, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
        """(sampled i32[n, num_columns], counts i32[n]), EOS and 0 where nothing is sampled."""
        places = [tuple(update[:2]) for update in schedule.page_updates.tolist()]
        assert len(set(places)) == len(places), "two updates of one place in one step"
        for row, column, page in schedule.page_updates.tolist():
            self.page_table[row, column] = page
        inputs = [self._input(schedule, i) for i in range(schedule.num_seqs)]
        for row, (start, tokens) in zip(schedule.rows, inputs, strict=True):
            for position, token in enumerate(tokens, start):
                self.kv[self._slot(row, position)] = token
        sampled, counts = np.full((schedule.num_seqs, num_columns), EOS, np.int32), np.zeros(schedule.num_seqs, np.int32)
        for i, (start, tokens) in enumerate(inputs):
            row, drafts = schedule.rows[i], tokens[1:] if i < schedule.num_decodes else []
            self.kv_lens[row] = start + len(tokens)
            if not schedule.samples[i]:
                continue
            self.kv_lens[row] -= len(drafts)
            while True:
                read = [int(self.kv[self._slot(row, position)]) for position in range(self.kv_lens[row])]
                token = self.last_tokens[row] = sampled[i, counts[i]] = next_token(schedule.requests[i].seed, read)
                counts[i] += 1
                if counts[i] > len(drafts) or drafts[counts[i] - 1] != token or row in self.cut:
                    break
                self.kv_lens[row] += 1
        self.cut.clear()
        return sampled, counts

    def _input(self, schedule: Schedule, i: int) -> tuple[int, list[int]]:
        row, start, q_len = schedule.rows[i], int(schedule.starts[i]), int(schedule.q_lens[i])
        if i < schedule.num_decodes:
            drafts = self.drafts.pop(int(row), [])[: q_len - 1]
            tokens = [int(self.last_tokens[row]), *drafts, *[-1] * (q_len - 1 - len(drafts))]  # -1: a draft that is none
            assert schedule.least_starts[i] <= self.kv_lens[row] <= start, "the host's positions must be bounds"
            start = int(self.kv_lens[row])
        else:
            tokens = schedule.requests[i].token_ids[start : start + q_len]
        assert len(tokens) == q_len
        return start, tokens

    def _slot(self, row: int, position: int) -> tuple[int, int, int]:
        page_size = self.kv.shape[2]
        return row // self.rows_per_group, self.page_table[row, position // page_size], position % page_size


class Proposed:
    """What the scheduler asks for lengths of drafts: as many as were proposed for a row since it was last asked."""

    def __init__(self, max_num_seqs: int, max_rows: int):
        self.num_drafts, self.max_rows = np.zeros(max_num_seqs, np.int32), max_rows
        self.explored = False  # whether lengths might be tried when it was last asked

    def choose(self, rows: np.ndarray, *, explore: bool, queued: bool) -> np.ndarray:
        chosen, self.explored = self.num_drafts[rows], explore
        self.num_drafts[:] = 0
        return chosen


class Harness:
    """A scheduler, its pool, a device and the steps in flight, at most `depth` of them while the next is scheduled."""

    def __init__(
        self,
        *,
        page_size=4,
        num_pages=64,
        prefix_caching=True,
        depth=0,
        num_drafts=0,
        max_rows=1000,
        step_budget: Any = None,
        **config,
    ):
        config = {"max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8, **config}
        self.config = SchedulerConfig(**config)
        self.pools = [PagePool(num_pages, page_size, prefix_caching) for _ in range(self.config.num_groups)]
        self.pool = self.pools[0]
        self.proposed = Proposed(self.config.max_num_seqs, max_rows)
        lengths: Any = self.proposed if num_drafts else None
        self.scheduler = Scheduler(self.config, self.pool, step_budget, lengths, other_pools=self.pools[1:])
        self.device = FakeDevice(self.scheduler)
        self.depth = depth
        self.num_drafts = num_drafts
        self.in_flight: deque[tuple[Schedule, np.ndarray, np.ndarray]] = deque()
        self.finished: list[Request] = []
        self.delivered: dict[str, list[int]] = {}
        self.num_made = self.num_calls = 0

    def request(self, prompt: int | Sequence[int] = 5, max_tokens: int | None = 5, **kwargs) -> Request:
        """A request, not added; a prompt given by its length differs from every other from its first token on."""
        names = ("min_tokens", "ignore_eos", "stop_token_ids", "repetition_detection")
        params = SamplingParams(max_tokens=max_tokens, **{n: kwargs.pop(n) for n in names if n in kwargs})
        self.num_made += 1
        if isinstance(prompt, int):
            prompt = [(1000 * self.num_made + i) for i in range(prompt)]
        kwargs = {"request_id": f"r{self.num_made}", "seed": self.num_made, "arrival": float(self.num_made), **kwargs}
        return Request(prompt_token_ids=list(prompt), params=params, eos_token_ids=frozenset([EOS]), **kwargs)

    def add(self, *args, **kwargs) -> Request:
        """Adds a request that ends by length unless told otherwise."""
        request = self.request(*args, **{"ignore_eos": True, **kwargs})
        self.scheduler.add(request)
        return request

    def schedule(self) -> Schedule:
        """The next step, running on the device from now on."""
        schedule = self.schedule_or_none()
        assert schedule is not None, "nothing to schedule"
        return schedule

    def schedule_or_none(self) -> Schedule | None:
        self.num_calls += 1
        assert self.num_calls < 3000, "no end in sight"
        schedule = self.scheduler.schedule()
        if schedule is not None:
            self.in_flight.append((schedule, *self.device.run(schedule, 1 + self.num_drafts)))
        return schedule

    def decodes(self, request: Request) -> bool:
        """Whether a running request is past its prompt, or past what it recomputes."""
        rows = self.scheduler.rows
        return bool(rows.num_computed[request.row] >= rows.prefill_end[request.row])

    def propose(self, right: Sequence[bool]) -> None:
        """Drafts for every running decode's next step: what it will sample where `right`, in turn, and something else where not."""
        self.device.drafts.clear()
        for request in self.scheduler.running:
            if not self.decodes(request):
                continue
            tokens, known = list(request.prompt_token_ids), self.device.kv_lens[request.row] + 1
            while len(tokens) < known + len(right):
                tokens.append(next_token(request.seed, tokens))
            drafts = [t if ok else t + 1 for t, ok in zip(tokens[known:], right, strict=True)]
            self.device.drafts[request.row], self.proposed.num_drafts[request.row] = drafts, len(drafts)

    def append_forced(self, request: Request, num_tokens: int, num_cut: int = 0) -> StepResult:
        """Tells the scheduler the request's next tokens, which count as delivered as far as it takes them."""
        tokens = list(request.token_ids)
        for _ in range(num_tokens):
            tokens.append(next_token(request.seed, tokens))
        result = self.scheduler.append_forced(request, tokens[len(request.token_ids) :], num_cut=num_cut)
        self._record(result)
        return result

    def update(self, first_token: int | None = None) -> StepResult:
        """The oldest step's tokens come back; `first_token` stands in for the token of its first entry."""
        schedule, sampled, counts = self.in_flight.popleft()
        if first_token is not None:
            sampled[0, 0] = first_token
        args = (sampled, counts) if self.num_drafts else (sampled[:, 0],)
        result = self.scheduler.update(schedule, *args)
        self._record(result)
        return result

    def _record(self, result: StepResult) -> None:
        for request, token in zip(result.requests, result.tokens, strict=True):
            self.delivered.setdefault(request.request_id, []).append(token)
        self.finished += result.finished

    def step(self) -> Schedule:
        """Schedules a step, then takes in the oldest if more than `depth` are in flight."""
        schedule = self.step_or_none()
        assert schedule is not None, "nothing to schedule"
        return schedule

    def step_or_none(self) -> Schedule | None:
        """As `step`; takes in the oldest also if nothing could be scheduled."""
        schedule = self.schedule_or_none()
        if self.in_flight and (schedule is None or len(self.in_flight) > self.depth):
            self.update()
        return schedule

    def drain(self) -> None:
        """Steps until nothing is left, and checks that nothing is."""
        while has_unfinished(self.scheduler) or self.in_flight:
            in_flight = len(self.in_flight)
            assert self.step_or_none() is not None or in_flight, "idle with work left"
            self.scheduler.check_invariants()
        self.assert_empty()

    def assert_empty(self) -> None:
        scheduler = self.scheduler
        scheduler.check_invariants()
        assert not scheduler.num_running and not scheduler.num_waiting
        assert all(pool.num_free_pages == pool.num_pages for pool in self.pools)
        assert not scheduler.requests.by_id and not scheduler.requests.stop_ids
        assert not scheduler.requests.forced
        assert scheduler.rows.num_free == self.config.max_num_seqs and not any(scheduler.rows._requests)

    def assert_solo(self, *requests: Request) -> None:
        """Every request ended as it would have alone, and its tokens were delivered once each, in order."""
        for request in requests:
            output, finish_reason, stop_reason = solo(request, self.config.max_model_len)
            assert request.output_token_ids == output == self.delivered[request.request_id], request.request_id
            assert (request.finish_reason, request.stop_reason) == (finish_reason, stop_reason)

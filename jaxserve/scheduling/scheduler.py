"""Which request gets how many tokens this step: the scheduler as the engine sees it.

Owns the order of steps (`schedule`, then, at once or later, `update`) and joins three parts. RequestLifecycle (lifecycle.py) has
the requests and where each is, StepComposer (step_composer.py) chooses what a step holds, and TokenIntake (token_intake.py) takes
its tokens in. Pages are the pool's (page_pool.py), per-row numbers SequenceRows' (sequence_rows.py). Pure Python and numpy.

Counters advance when a step is scheduled, not when its tokens come back, so `schedule` may be called again while earlier steps
are in flight: a decode's input is the token that the device sampled last, whether the host knows it or not. The device runs steps
in the order of their schedules, hence pages and rows given up are reused at once. Work follows what changed: the decodes of a
step are handled as arrays over rows, and only a row that crosses a page boundary, stops or reaches its length costs Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.config import SchedulerConfig, resolve_policy
from jaxserve.scheduling.lifecycle import RequestLifecycle
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.policies import BatchingPolicy
from jaxserve.scheduling.schedule import Chunks, Decodes, Schedule, SchedulerStats, StepResult, join
from jaxserve.scheduling.sequence_rows import SequenceRows
from jaxserve.scheduling.step_budget import StepBudget
from jaxserve.scheduling.step_composer import DraftLengthChooser, StepComposer
from jaxserve.scheduling.token_intake import TokenIntake


class Scheduler:
    """Admits, composes, preempts and finishes requests; a step is `schedule`, then, at once or later, `update`.

    step_budget: what a step with decodes may hold; None: always max_num_batched_tokens. draft_lengths: how many drafts each decode
    verifies; None: speculation is off.

    Raises:
      ValueError: a step budget with a policy that doesn't cut prompts or mix steps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        step_budget: StepBudget | None = None,
        draft_lengths: DraftLengthChooser | None = None,
    ):
        self.config = config
        self.policy: BatchingPolicy = resolve_policy(config)
        if step_budget is not None and not (self.policy.chunked and self.policy.mixed):
            raise ValueError("a dynamic budget cuts prompts to what decodes leave: it needs chunked prefill and mixed steps")
        self.pool = pool
        self.requests: RequestLifecycle = RequestLifecycle(config, self.policy, pool)
        self.rows: SequenceRows = self.requests.rows
        self.composer: StepComposer = StepComposer(self.requests, step_budget, draft_lengths)
        self.intake: TokenIntake = TokenIntake(self.requests)
        self._drafting = draft_lengths is not None
        self._num_steps = 0
        self._num_updates = 0
        self._num_scheduled_tokens = 0
        self._all = np.ones(config.max_num_seqs, bool)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Takes a request in, to wait for admission; with status WAITING_FOR_GRAMMAR it waits for `set_ready` first, and where
        another of its `samples` is here and has not computed their prompt, for that one.

        Raises:
          ValueError: its id is in use, its prompt is empty or too long, or the pool could never hold it. Nothing has changed then.
        """
        self.requests.add(request)

    def check(self, request: Request) -> int:
        """The most tokens (prompt + output) that the request may reach; ValueError, as `add`, if it can't be served."""
        return self.requests.check(request)

    def set_ready(self, request: Request) -> None:
        """The grammar of a request added with status WAITING_FOR_GRAMMAR is compiled: it waits from now on, at its place."""
        self.requests.set_ready(request)

    def append_forced(self, request: Request, token_ids: Sequence[int], *, num_cut: int = 0) -> StepResult:
        """The request's next output tokens are forced (jump-forward decoding: SGLang, 2024): its next step computes them as a chunk
        and samples what follows. Call it between an `update` and the next `schedule`; the last of the steps in flight may have
        sampled the first of these tokens, which must then have had no choice. Taken up to the request's end, the budget and the
        free pages, and not at all where that gains nothing; returns what was taken.

        num_cut: drafts of the step in flight that will not be verified if any token is taken."""
        return self.intake.append_forced(request, token_ids, max_tokens=self.config.max_num_batched_tokens, num_cut=num_cut)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Finishes the requests at once, waiting or running; unknown and finished ids are ignored. Returns those it finished."""
        return self.requests.abort(request_ids)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Finishes an unfinished request in whatever state; its pages and row are free, its tokens in flight will be discarded.
        With reason "error" its KV is not to be trusted: no page that it hashed is hit again."""
        self.requests.finish(request, reason, stop_reason)

    def change_weights(self, version: int, *, recompute: bool) -> None:
        """From now on steps run with weights of this version; no page that was hashed before is hit again.

        recompute: running requests are preempted and compute all their tokens anew. Otherwise they go on with the KV they have,
        which no other request may share, since part of it is of the old weights; that part is gone if they are preempted later.
        To be called with no step in flight.
        """
        assert not self.num_steps_in_flight, "steps in flight would deliver tokens of the old weights' schedule"
        self.requests.change_weights(version, recompute=recompute)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self.requests.by_id.get(request_id)

    @property
    def running(self) -> list[Request]:
        """In order of admission."""
        return self.requests.running

    @property
    def waiting(self) -> list[Request]:
        """In the order in which they will be admitted; those that wait for something else last."""
        return self.requests.waiting

    @property
    def num_running(self) -> int:
        """Sequences that hold a row, chunked prompts included."""
        return len(self.rows.order)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones and those whose grammar compiles included."""
        return self.requests.num_waiting

    @property
    def num_begun(self) -> int:
        """Unfinished requests that have run: those running, and those preempted."""
        return self.num_running + sum(request.status is RequestStatus.PREEMPTED for request in self.requests.queue)

    @property
    def num_steps_in_flight(self) -> int:
        """Schedules whose tokens have not come back."""
        return self._num_steps - self._num_updates

    def stats(self) -> SchedulerStats:
        """Counts since the scheduler was made, and how many run and wait now."""
        return SchedulerStats(
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_preemptions=self.requests.num_preemptions,
            num_discarded_rows=self.intake.num_discarded_rows,
            num_queried_tokens=self.pool.num_queried_tokens,
            num_hit_tokens=self.pool.num_hit_tokens,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
        )

    # A step

    def schedule(self) -> Schedule | None:
        """The next step, or None if nothing can be computed before tokens in flight come back (or nothing is left to do)."""
        if not self.requests.by_id:
            return None
        step = self.composer.compose()
        return None if step is None else self._assemble(*step)

    def _assemble(self, decodes: Decodes, chunks: Chunks) -> Schedule:
        requests, rows, starts, q_lens, samples = join(decodes, chunks, self.rows.requests_at(decodes.rows), self._all)
        num_tokens = decodes.num_tokens + chunks.num_tokens
        least_starts = starts
        if self._drafting:  # what is known has been accepted
            least_starts = np.minimum(starts, self.rows.num_known[rows] - 1)
        self._num_steps += 1
        self._num_scheduled_tokens += num_tokens
        return Schedule(
            step_id=self._num_steps - 1,
            requests=requests,
            rows=rows,
            q_lens=q_lens,
            starts=starts,
            least_starts=least_starts,
            samples=samples,
            generations=self.rows.generation[rows],
            page_updates=self.rows.take_page_updates(rows),
            num_decodes=len(decodes.rows),
            num_tokens=num_tokens,
            max_q_len=int(q_lens.max()) if num_tokens > len(rows) else 1,
            num_drafts=decodes.num_tokens - len(decodes.rows),
        )

    def update(
        self,
        schedule: Schedule,
        sampled: np.ndarray,  # i32[n], or i32[n, 1 + k] with `counts`; anything where samples is False
        counts: np.ndarray | None = None,  # i32[n]: an entry's accepted drafts and one more
    ) -> StepResult:
        """Takes in the tokens of a step, in the order of the schedules, however many steps late.

        Tokens for a request that finished meanwhile are dropped; for one that was preempted meanwhile they are delivered all the
        same, and may finish it. Full pages whose tokens are now known become shareable.
        """
        assert schedule.step_id == self._num_updates, f"step {self._num_updates} comes before {schedule.step_id}"
        self._num_updates += 1
        return self.intake.take(schedule, sampled) if counts is None else self.intake.take_drafted(schedule, sampled, counts)

    # Steps that need no composing (a simulator's)

    def may_admit(self) -> bool:
        """Whether the next of the queue could be given a row and, without any hit, its pages. While False, nobody joins until a
        request is added or ends."""
        return self.composer.may_admit()

    def skip_decodes(self, num_steps: int, token: int, num_batches: int = 1) -> None:
        """Leaves the scheduler as if it had made `num_steps` steps that decode every running request and had taken in as many that
        sampled `token`. The caller knows that no request may join or end in them, and that pages suffice.

        num_batches: micro-batches that each of the steps was cut into.
        """
        self.intake.skip(num_steps, token)
        self.composer.skip_decodes()
        self._num_steps += num_steps * num_batches
        self._num_updates += num_steps * num_batches
        self._num_scheduled_tokens += num_steps * self.num_running

    def check_invariants(self) -> None:
        """Asserts that no request, page or row is lost or held twice. For tests: O(everything)."""
        assert 0 <= self.num_steps_in_flight
        assert self.num_steps_in_flight or not any(request.num_in_flight for request in self.requests.by_id.values())
        self.requests.check_invariants()

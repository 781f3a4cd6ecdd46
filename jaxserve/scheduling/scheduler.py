"""Which request gets how many tokens this step: the scheduler as the engine sees it.

Owns the order of steps: `schedule`, then `update`, which may come several steps later. It joins three parts:

- RequestLifecycle (lifecycle.py) holds the requests and their states;
- StepComposer (step_composer.py) chooses what a step holds;
- TokenIntake (token_intake.py) adds the step's tokens to their requests.

Pages belong to the pool (page_pool.py), numbers per row to SequenceRows (sequence_rows.py). This is pure Python and numpy.

Counters advance when a step is scheduled, not when its tokens come back. `schedule` may therefore be called again while earlier
steps are in flight: the input of a decode is the token that the device sampled last, whether the host knows it or not. The device
runs steps in the order of their schedules, so pages and rows that are given up can be reused at once. The decodes of a step are
handled as arrays over rows. Only a row that crosses a page boundary, stops or reaches its length takes time in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.request import Request
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
    """Admits, composes, preempts and finishes requests. A step is a call of `schedule`, then one of `update`.

    Args:
      config: the limits of a step and the policy.
      pool: the KV pages; the scheduler is their only user. Of several groups of devices (`config.num_groups`), those of the first.
      other_pools: the pages of the other groups, as many.
      step_budget: chooses how many tokens a step with decodes may hold. None: always max_num_batched_tokens.
      draft_lengths: chooses how many drafts each decode verifies. None: speculation is off.
      hides_in_flight: steps are micro-batches of a pipeline: the requests of one that is in flight are in no other until its tokens
        are taken in, as in the engines of the pipeline-parallel literature (Orca, section 4.2; Sarathi-Serve, section 3.3). So a
        request stays with those that it was first scheduled with, as new ones join them and old ones end.

    Raises:
      ValueError: a step budget with a policy that doesn't cut prompts or mix steps; another number of pools than of groups.
      NotImplementedError: several groups with a policy that runs prompts whole, a step budget, drafts or micro-batches.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        step_budget: StepBudget | None = None,
        draft_lengths: DraftLengthChooser | None = None,
        *,
        hides_in_flight: bool = False,
        other_pools: Sequence[PagePool] = (),
    ):
        self.config = config
        self.hides_in_flight = hides_in_flight
        self.policy: BatchingPolicy = resolve_policy(config)
        if step_budget is not None and not (self.policy.chunked and self.policy.mixed):
            raise ValueError("a dynamic budget cuts prompts to what decodes leave: it needs chunked prefill and mixed steps")
        self.pool = pool
        self.pools: tuple[PagePool, ...] = (pool, *other_pools)
        if len(self.pools) != config.num_groups:
            raise ValueError(f"{len(self.pools)} pools of pages for {config.num_groups} groups: each needs one")
        if config.num_groups > 1 and (not self.policy.chunked or step_budget or draft_lengths or hides_in_flight):
            raise NotImplementedError("attention in groups is for chunked prompts, without a dynamic budget, drafts or stages")
        self.requests: RequestLifecycle = RequestLifecycle(config, self.policy, self.pools)
        self.rows: SequenceRows = self.requests.rows
        self.composer: StepComposer = StepComposer(self.requests, step_budget, draft_lengths)
        self.intake: TokenIntake = TokenIntake(self.requests)
        self._drafting = draft_lengths is not None
        self._num_steps = 0
        self._num_updates = 0
        self._num_scheduled_tokens = 0
        self._all = np.ones(config.max_num_seqs, bool)
        self._num_holding = np.zeros(config.max_num_seqs, np.int32)  # micro-batches in flight that hold the row

    # Requests come and go

    def add(self, request: Request) -> None:
        """Takes a request, which then waits for admission. With status WAITING_FOR_GRAMMAR it first waits for `set_ready`. Where
        another of its `samples` is here and has not computed their common prompt, it first waits for that.

        Raises:
          ValueError: its id is in use, its prompt is empty or too long, or the pool can never hold it. Nothing has changed then.
        """
        self.requests.add(request)

    def check(self, request: Request) -> int:
        """The most tokens (prompt + output) that the request may reach. Raises ValueError, as `add`, if it can't be served."""
        return self.requests.check(request)

    def set_ready(self, request: Request) -> None:
        """The grammar of a request added with status WAITING_FOR_GRAMMAR is compiled: the request joins the queue, at its place."""
        self.requests.set_ready(request)

    def kv_ready(self, request: Request) -> None:
        """The pages that a request with status WAITING_FOR_KV waits for have come, or will not: it joins the queue again."""
        self.requests.release_from_kv(request)

    def append_forced(self, request: Request, token_ids: Sequence[int], *, num_cut: int = 0) -> StepResult:
        """Appends output tokens that are forced (jump-forward decoding: SGLang, 2024). The request's next step computes them as a
        chunk and samples the token after them.

        Call it between an `update` and the next `schedule`. The last step in flight may have sampled the first of these tokens, but
        only if its mask allowed no other. Tokens are taken up to the request's end, the budget and the free pages. None are taken
        where that saves no step.

        num_cut: drafts of the step in flight that will not be verified if any token is taken.

        Returns:
          The tokens that were taken.
        """
        return self.intake.append_forced(request, token_ids, max_tokens=self.config.max_num_batched_tokens, num_cut=num_cut)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Finishes requests at once, waiting or running. Unknown and finished ids are ignored. Returns those that it finished."""
        return self.requests.abort(request_ids)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Finishes an unfinished request in any state. Its pages and row are free then, and its tokens in flight will be discarded.
        With reason "error" its KV may be wrong: no page that it hashed is hit again."""
        self.requests.finish(request, reason, stop_reason)

    def change_weights(self, num_updates: int, version: str, *, recompute: bool) -> None:
        """From now on steps run with other weights; no page that was hashed before is hit again.

        num_updates: of the weights so far. version: the name of these.
        recompute: running requests are preempted and compute all their tokens anew. Otherwise they continue with the KV they have.
        No other request may share it, since part of it was computed with the old weights. A later preemption discards that part.

        Call it with no step in flight.
        """
        assert not self.num_steps_in_flight, "steps in flight would deliver tokens of the old weights' schedule"
        self.requests.change_weights(num_updates, version, recompute=recompute)

    def name_weights(self, version: str) -> None:
        """Tokens that come from now on are marked with this name of the weights, which stay as they are."""
        self.requests.name_weights(version)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self.requests.by_id.get(request_id)

    @property
    def running(self) -> list[Request]:
        """In order of admission."""
        return self.requests.running

    @property
    def waiting(self) -> list[Request]:
        """In the order in which they will be admitted. Those that are held come last."""
        return self.requests.waiting

    @property
    def num_running(self) -> int:
        """Sequences that hold a row, chunked prompts included."""
        return len(self.rows.order)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, including preempted ones and those whose grammar is being compiled."""
        return self.requests.num_waiting

    @property
    def num_begun(self) -> int:
        """Unfinished requests that have run: those running, and those preempted."""
        return self.num_running + sum(request.num_preemptions > 0 for request in self.requests.waiting)

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
            num_queried_tokens=sum(pool.num_queried_tokens for pool in self.pools),
            num_hit_tokens=sum(pool.num_hit_tokens for pool in self.pools),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_held=len(self.requests.held),
        )

    # A step

    def schedule(self) -> Schedule | None:
        """The next step, or None if nothing can be computed before tokens in flight come back (or nothing is left to do)."""
        if not self.requests.by_id:
            return None
        if not self.hides_in_flight:
            step = self.composer.compose()
            return None if step is None else self._assemble(*step)
        with self.rows.hiding(self._num_holding > 0):
            step = self.composer.compose()
        schedule = None if step is None else self._assemble(*step)
        if schedule is not None:
            self._num_holding[schedule.rows] += 1
        return schedule

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
        """Adds the tokens of a step to their requests. Steps are updated in the order of their schedules, however many steps late.

        Tokens of a request that finished meanwhile are dropped. Those of a request that was preempted meanwhile are delivered, and
        may finish it. Full pages whose tokens are now known become shareable.
        """
        assert schedule.step_id == self._num_updates, f"step {self._num_updates} comes before {schedule.step_id}"
        self._num_updates += 1
        if self.hides_in_flight:
            self._num_holding[schedule.rows] -= 1
        return self.intake.take(schedule, sampled) if counts is None else self.intake.take_drafted(schedule, sampled, counts)

    def is_undisturbed(self, schedule: Schedule) -> bool:
        """Whether all requests of a step in flight still run in their rows, none with a forced token in flight."""
        return not self.requests.forced and bool((self.rows.generation[schedule.rows] == schedule.generations).all())

    # Steps that need no composing (a simulator's)

    def may_admit(self) -> bool:
        """Whether there may be a row and pages for the first request of the queue. While it is False, no request is admitted until
        one is added or ends."""
        return self.composer.may_admit()

    def skip_decodes(self, num_steps: int, token: int, num_batches: int = 1) -> None:
        """Has the effect of `num_steps` steps that decode every running request and sample `token` for each. The caller knows that
        no request can join or end in these steps, and that there are enough pages.

        num_batches: micro-batches into which each of the steps is divided.
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
        assert (self._num_holding == 0).all() or self.num_steps_in_flight and (self._num_holding >= 0).all()
        self.requests.check_invariants()

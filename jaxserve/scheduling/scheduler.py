"""Which request gets how many tokens this step.

Owns the life of a request between `add` and its last token: the waiting queue, admission, the composition of each step, page
growth, preemption, and what the sampled tokens mean (stops and lengths). Pages are the pool's (page_pool.py), per-row numbers
SequenceRows' (sequence_rows.py), the rules of composition a BatchingPolicy's (policies.py). Pure Python and numpy; knows no device.

There is no prefill mode and no decode mode: a request owes the tokens that are known and not computed, and a step's budget is
spent on what is owed (iteration-level scheduling: Orca, OSDI 2022; chunks beside decodes: Sarathi-Serve, OSDI 2024; paging,
preemption by recomputation: Kwon et al., SOSP 2023).

Counters advance when a step is scheduled, not when its tokens come back, so `schedule` may be called again while earlier steps
are in flight: a decode's input is the token that the device sampled last, whether the host knows it or not. The device runs steps
in the order of their schedules, hence pages and rows given up are reused at once. Work follows what changed: the decodes of a
step are handled as arrays over rows, and only a row that crosses a page boundary, stops or reaches its length costs Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.config import SchedulerConfig, resolve_policy
from jaxserve.scheduling.page_pool import PagePool, root_hash
from jaxserve.scheduling.policies import ORDER_KEYS, BatchingPolicy
from jaxserve.scheduling.schedule import NO_DECODES, Chunks, Decodes, Schedule, SchedulerStats, StepResult, join
from jaxserve.scheduling.sequence_pages import SequencePages
from jaxserve.scheduling.sequence_rows import NEVER, SequenceRows
from jaxserve.scheduling.step_budget import StepBudget
from jaxserve.scheduling.waiting_queue import WaitingQueue


class DraftLengthChooser(Protocol):
    """How many drafts each decode verifies: `speculative.draft_lengths.DraftLengths`."""

    max_rows: int  # logits rows that a step may have

    def choose(
        self,
        rows: np.ndarray,  # intp[n]
        *,
        explore: bool,
        queued: bool,
    ) -> np.ndarray:  # i32[n]
        """The drafts of each of `rows`, as far as there is room."""
        ...


class Scheduler:
    """Admits, composes, preempts and finishes requests; a step is `schedule`, then, at once or later, `update`."""

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
        self.step_budget = step_budget  # what a step with decodes may hold; None: always max_num_batched_tokens
        self.draft_lengths = draft_lengths  # how many drafts each decode verifies; None: speculation is off
        self.pool = pool
        self.rows: SequenceRows = SequenceRows(config.max_num_seqs, config.max_model_len, pool.page_size)
        self.pages: SequencePages = SequencePages(pool, self.rows)
        self._order_key = ORDER_KEYS[config.order]
        self._waiting = WaitingQueue(self._order_key)
        self._held: dict[str, Request] = {}  # those that wait for something else than their turn: a grammar, a sample's prompt
        self._requests: dict[str, Request] = {}  # every unfinished request, by id
        self._forced: dict[str, Request] = {}  # those with tokens in flight that are known already
        self._stop_ids: Counter[int] = Counter()  # stop ids of unfinished requests
        self._last_was_prefill = False
        self._preempted = False  # whether the decodes of the step being composed took a page from a running request
        self._batch_end = 0  # where only an idle engine admits: requests added before this many may still join the batch
        self._num_added = 0
        self._num_steps = 0
        self._num_updates = 0
        self._num_scheduled_tokens = 0
        self._num_preemptions = 0
        self._num_discarded_rows = 0
        self._ones = np.ones(config.max_num_seqs, np.int32)
        self._all = np.ones(config.max_num_seqs, bool)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Takes a request in, to wait for admission; with status WAITING_FOR_GRAMMAR it waits for `set_ready` first, and where
        another of its `samples` is here and has not computed their prompt, for that one.

        Raises:
          ValueError: its id is in use, its prompt is empty or too long, or the pool could never hold it. Nothing has changed then.
        """
        request.max_total_tokens = self.check(request)
        request.order = self._num_added
        self._num_added += 1
        self._set_weights_version(request, request.weights_version)
        self._requests[request.request_id] = request
        self._stop_ids.update(request.stop_ids)
        if request.status is RequestStatus.WAITING:
            self._push_or_hold(request)
        else:
            self._held[request.request_id] = request

    def _push_or_hold(self, request: Request) -> None:
        """To the queue, unless another sample is yet to compute the prompt: the pages of one then serve all."""
        first = next((sample for sample in request.samples if sample.request_id in self._requests), request)
        if first is not request and not self._has_prompt(first):
            request.status = RequestStatus.WAITING_FOR_PROMPT
            self._held[request.request_id] = request
        else:
            request.status = RequestStatus.WAITING
            self._waiting.push(request)

    def _release_samples(self, request: Request) -> None:
        """Those that wait for this one's prompt go on, for it is scheduled, or this one has ended."""
        for sample in request.samples:
            if sample.status is RequestStatus.WAITING_FOR_PROMPT and self._held.pop(sample.request_id, None) is not None:
                self._push_or_hold(sample)

    @staticmethod
    def _has_prompt(request: Request) -> bool:
        """Whether its prompt is computed as far as others can share it, by the steps scheduled so far."""
        return request.num_computed_tokens >= request.num_prompt_tokens

    def check(self, request: Request) -> int:
        """The most tokens (prompt + output) that the request may reach; ValueError, as `add`, if it can't be served."""
        id_, num_prompt, config, pool = request.request_id, request.num_prompt_tokens, self.config, self.pool
        if id_ in self._requests:
            raise ValueError(f"request_id={id_!r} is in use by an unfinished request; choose another")
        if not num_prompt:
            raise ValueError(f"request {id_!r} has an empty prompt; give it one token at least")
        if num_prompt >= config.max_model_len:
            raise ValueError(
                f"request {id_!r} has a prompt of {num_prompt} tokens, but max_model_len={config.max_model_len} must hold it and "
                "one output token; shorten the prompt or raise max_model_len"
            )
        if not self.policy.chunked and num_prompt > config.max_num_batched_tokens:
            raise ValueError(
                f"request {id_!r} has a prompt of {num_prompt} tokens, which no step can hold: prompts are not chunked and "
                f"max_num_batched_tokens={config.max_num_batched_tokens}; turn chunking on or raise the budget"
            )
        max_tokens = request.params.max_tokens
        limit = config.max_model_len if max_tokens is None else min(num_prompt + max_tokens, config.max_model_len)
        # The last token's KV is never needed. Preempted, it holds nothing, and alone it is never preempted, so no headroom is due.
        num_pages = self.pages.num_pages(limit - 1)
        if num_pages > pool.num_pages:
            raise ValueError(
                f"request {id_!r} may reach {limit} tokens (prompt {num_prompt}, {max_tokens=}), which take {num_pages} pages of "
                f"{pool.page_size}, but the pool has {pool.num_pages}; lower max_tokens or raise num_pages"
            )
        return limit

    def set_ready(self, request: Request) -> None:
        """The grammar of a request added with status WAITING_FOR_GRAMMAR is compiled: it waits from now on, at its place."""
        if self._held.get(request.request_id) is request and request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            del self._held[request.request_id]
            self._push_or_hold(request)

    def append_forced(self, request: Request, token_ids: Sequence[int], *, num_cut: int = 0) -> StepResult:
        """The request's next output tokens are known without a step each: its next step computes them as a chunk and samples what
        follows. Call it between an `update` and the next `schedule`; the last of the steps in flight may have sampled the first of
        these tokens, which must then have had no choice. Taken up to the request's end, the budget and the free pages, and not at
        all where that gains nothing; returns what was taken.

        num_cut: drafts of the step in flight that will not be verified if any token is taken."""
        result, rows, row = StepResult([], []), self.rows, request.row
        in_flight = request.num_in_flight - num_cut
        if (
            request.status is not RequestStatus.RUNNING
            or request.num_forced_in_flight
            or rows.num_computed[row] < rows.prefill_end[row]
        ):
            return result  # what it has to compute already comes first
        token_ids = token_ids[: min(self.config.max_num_batched_tokens, request.max_total_tokens - len(request.token_ids))]
        while rows.capacity[row] < len(request.token_ids) + len(token_ids) and self.pages.grow(np.array([row])):
            pass
        token_ids = token_ids[: max(0, int(rows.capacity[row]) - len(request.token_ids))]
        if len(token_ids) <= max(1, in_flight):
            return result
        rows.num_computed[row] -= num_cut
        if in_flight:
            request.num_forced_in_flight = in_flight
            self._forced[request.request_id] = request
        for token in token_ids:
            request.token_ids.append(token)
            result.requests.append(request)
            result.tokens.append(token)
            if request.end() is not None:
                break
        rows.num_known[row] = rows.prefill_end[row] = len(request.token_ids)
        self._finish_if_ended(request, result)
        return result

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Finishes the requests at once, waiting or running; unknown and finished ids are ignored. Returns those it finished."""
        aborted = [self._requests[id_] for id_ in dict.fromkeys(request_ids) if id_ in self._requests]
        for request in aborted:
            self.finish(request, "abort")
        return aborted

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Finishes an unfinished request in whatever state; its pages and row are free, its tokens in flight will be discarded.
        With reason "error" its KV is not to be trusted: no page that it hashed is hit again."""
        assert self._requests.get(request.request_id) is request, f"{request.request_id} is unknown or has finished"
        if request.status is RequestStatus.RUNNING:
            self.pages.release(request)
        elif request.request_id in self._held:
            del self._held[request.request_id]
        else:
            self._waiting.remove(request)
        if reason == "error":
            self.pool.forget(self.pool.find(request.hash_chain[1:]))
        del self._requests[request.request_id]
        self._forced.pop(request.request_id, None)
        for token in request.stop_ids:
            self._stop_ids[token] -= 1
            if not self._stop_ids[token]:
                del self._stop_ids[token]
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._release_samples(request)

    def change_weights(self, version: int, *, recompute: bool) -> None:
        """From now on steps run with weights of this version; no page that was hashed before is hit again.

        recompute: running requests are preempted and compute all their tokens anew. Otherwise they go on with the KV they have,
        which no other request may share, since part of it is of the old weights; that part is gone if they are preempted later.
        To be called with no step in flight.
        """
        assert not self.num_steps_in_flight, "steps in flight would deliver tokens of the old weights' schedule"
        if recompute:
            for request in reversed(self.running):
                self._preempt(request)
        self.rows.num_hashed[self.rows.order] = NEVER
        self.pool.forget(range(self.pool.num_pages))
        for request in self._requests.values():
            self._set_weights_version(request, version)
            scores = request.prompt_scores
            if recompute and scores is not None and scores.wanted:
                scores.next = scores.first  # all of a prompt's scores are of the same weights

    def _set_weights_version(self, request: Request, version: int) -> None:
        request.weights_version = version
        if self.pool.enable_prefix_caching:
            request.hash_chain = [root_hash(version, request.cache_salt)]

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    @property
    def running(self) -> list[Request]:
        """In order of admission."""
        return [self.rows.request_at(row) for row in self.rows.order.tolist()]

    @property
    def waiting(self) -> list[Request]:
        """In the order in which they will be admitted; those that wait for something else last."""
        return [*self._waiting, *self._held.values()]

    @property
    def num_running(self) -> int:
        """Sequences that hold a row, chunked prompts included."""
        return len(self.rows.order)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones and those whose grammar compiles included."""
        return len(self._waiting) + len(self._held)

    @property
    def num_begun(self) -> int:
        """Unfinished requests that have run: those running, and those preempted."""
        return self.num_running + sum(request.status is RequestStatus.PREEMPTED for request in self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    @property
    def num_steps_in_flight(self) -> int:
        """Schedules whose tokens have not come back."""
        return self._num_steps - self._num_updates

    def stats(self) -> SchedulerStats:
        """Counts since the scheduler was made, and how many run and wait now."""
        return SchedulerStats(
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_preemptions=self._num_preemptions,
            num_discarded_rows=self._num_discarded_rows,
            num_queried_tokens=self.pool.num_queried_tokens,
            num_hit_tokens=self.pool.num_hit_tokens,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
        )

    # A step is composed

    def schedule(self) -> Schedule | None:
        """The next step, or None if nothing can be computed before tokens in flight come back (or nothing is left to do)."""
        if not self._requests:
            return None
        if not len(self.rows.order):
            self._batch_end = self._num_added
        self._preempted = False
        if self.policy.mixed:
            decodes = self._schedule_decodes()
            chunks = self._schedule_prefills(decodes)
        elif self.policy.prefill_first or not self._last_was_prefill:
            chunks = self._schedule_prefills(NO_DECODES)
            decodes = NO_DECODES if chunks.requests else self._schedule_decodes()
        else:
            decodes = self._schedule_decodes()
            chunks = Chunks() if decodes.num_tokens else self._schedule_prefills(decodes)
        if not decodes.num_tokens and not chunks.requests:
            return None
        self._last_was_prefill = bool(chunks.requests)
        return self._assemble(decodes, chunks)

    def _schedule_decodes(self) -> Decodes:
        """One token of every running request past its prompt, and drafts. Pages first, by preemption if need be; then, with nobody
        left to be taken out again, the counters."""
        rows = self.rows
        decodes, starts = self._owing_decodes()
        short = decodes[starts >= rows.capacity[decodes]]
        if len(short) and not self.pages.grow(short):
            self._grow_preempting(rows.requests_at(short))
            decodes, starts = self._owing_decodes()
        q_lens, num_tokens = self._ones[: len(decodes)], len(decodes)
        if self.draft_lengths is not None and num_tokens:
            num_drafts = self._schedule_drafts(self.draft_lengths, decodes, starts)
            if num_drafts.any():
                q_lens = 1 + num_drafts
                num_tokens = int(q_lens.sum())
        if len(decodes):
            self._batch_end = 0  # the first decode closes it
        rows.num_computed[decodes] = starts + q_lens
        return Decodes(decodes, starts, q_lens, num_tokens)

    def _owing_decodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows (in running order) that owe their last sampled token and may sample another, and that token's position.

        One that may not sample another has its last token in flight: tokens never go past the limit, whatever is in flight.
        """
        rows = self.rows
        order, computed = rows.order, rows.num_computed[rows.order]
        owing = (computed >= rows.prefill_end[order]) & (computed < rows.limit[order] - 1)
        return (order, computed) if owing.all() else (order[owing], computed[owing])

    def _grow_preempting(self, requests: list[Request]) -> None:
        """One more page for each of `requests`, in running order, as long as it runs; victims give up theirs."""
        for request in requests:
            # It may have been a victim before its turn, and becomes its own if it is the worst.
            while request.status is RequestStatus.RUNNING and not self.pages.grow(np.array([request.row])):
                self._preempt(self._choose_victim())

    def _choose_victim(self) -> Request:
        """First-come-first-served: the last admitted. Priority: the worst priority, of these the latest arrival."""
        if self.config.order == "fcfs":
            return self.rows.request_at(int(self.rows.order[-1]))
        return max(self.running, key=self._order_key)

    def _preempt(self, request: Request) -> None:
        """Back to the queue, to recompute all its tokens; its pages keep their hashes, so that much of it may be hit again."""
        request.num_unfetched = request.num_in_flight
        self.pages.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._preempted = True
        self._waiting.push(request)

    def _schedule_drafts(
        self,
        draft_lengths: DraftLengthChooser,
        decodes: np.ndarray,  # intp[n], n > 0
        starts: np.ndarray,  # i32[n]
    ) -> np.ndarray:  # i32[n]
        """How many drafts each decode verifies. Every decode has its own token's budget, logits row and page already; drafts take
        what is left, of tokens and logits rows half where prompts owe tokens, in running order, up to the length limit, and never
        preempt."""
        rows, n = self.rows, len(decodes)
        num_prompts = len(rows.order) - n + len(self._waiting) + len(self._held)  # samples held may follow the first at once
        num_prompts = min(num_prompts, self.config.max_num_seqs - n)  # that may end in this step, with a logits row each
        wanted = draft_lengths.choose(decodes, explore=not num_prompts, queued=bool(self._waiting))
        if not wanted.any():
            return wanted
        wanted = np.minimum(wanted, rows.limit[decodes] - starts - 2)
        room = min(self._budget(starts) - n, draft_lengths.max_rows - n - num_prompts)
        ends = np.minimum(np.cumsum(np.maximum(wanted, 0)), max(0, room // 2 if num_prompts else room))
        num_drafts = np.diff(ends, prepend=0).astype(np.int32)
        for i in (starts + num_drafts >= rows.capacity[decodes]).nonzero()[0].tolist():
            row = decodes[i]
            while rows.capacity[row] <= starts[i] + num_drafts[i] and self.pages.grow(np.array([row])):
                pass
            num_drafts[i] = min(num_drafts[i], rows.capacity[row] - starts[i] - 1)
        return num_drafts

    def _schedule_prefills(self, decodes: Decodes) -> Chunks:
        """Chunks of the running requests' prompts, then of newly admitted ones, within the budget that the decodes leave."""
        rows, chunks = self.rows, Chunks()
        partial = self._partial_prompts()
        num_prompts = len(partial) + len(self._waiting)
        budget = self._budget(decodes.starts) - decodes.num_tokens
        for row in partial:
            known, computed = int(rows.prefill_end[row]), int(rows.num_computed[row])
            num_tokens = self._chunk_size(known, computed, budget - chunks.num_tokens, num_prompts)
            if num_tokens:
                self._add_chunk(chunks, rows.request_at(row), num_tokens)
        if self._preempted and (decodes.num_tokens or chunks.requests):
            return chunks  # pages are short: nobody joins, unless the step would stand idle
        while self._waiting and rows.num_free and chunks.num_tokens < budget:
            if not self._admit(self._waiting.peek(), chunks, budget - chunks.num_tokens, num_prompts):
                break
        return chunks

    def _partial_prompts(self) -> list[int]:
        """Rows whose prompt is not computed to its end, in running order."""
        rows = self.rows
        return rows.order[rows.num_computed[rows.order] < rows.prefill_end[rows.order]].tolist()

    def _budget(self, starts: np.ndarray) -> int:  # i32[n]: positions of the step's decodes
        """Tokens that the step may hold: decodes, their drafts and chunks. An objective counts where decodes and prompts may both
        be in it (or prompts alone: StepBudget); drafts and chunks share what it leaves beside the decodes' own tokens."""
        chosen = self.step_budget if len(starts) or self.step_budget is not None and self.step_budget.every_step else None
        partial = self._partial_prompts() if chosen is not None else []
        if chosen is None or not (partial or self._waiting and self.rows.num_free):
            return self.config.max_num_batched_tokens
        chunk_start = int(self.rows.num_computed[partial[0]]) if partial else 0
        return max(len(starts), chosen.choose(starts, chunk_start))

    def _chunk_size(self, num_known: int, num_computed: int, budget: int, num_prompts: int) -> int:
        """How many of a request's `num_known` tokens to compute in this step; 0 if it must wait.

        The threshold counts while more than one prompt is unfinished or waits. Where prompts are not chunked, one that no step
        could hold, which only the recomputation of a preempted request can be, is chunked nevertheless.
        """
        owed = num_known - num_computed
        if not self.policy.chunked and num_known <= self.config.max_num_batched_tokens:
            return owed if owed <= budget else 0
        threshold = self.config.long_prefill_token_threshold
        return min(owed, budget, threshold) if threshold and num_prompts > 1 else min(owed, budget)

    def _admit(self, request: Request, chunks: Chunks, budget: int, num_prompts: int) -> bool:
        """Gives the request a row, pages for all its known tokens (or for all it may reach) and a first chunk; False if any of
        them is short, and nothing has changed then."""
        pool = self.pool
        if request.num_unfetched or not pool.num_free_pages:
            return False  # it will recompute its tokens in flight too, and needs one page of its own at least
        if self.policy.admit_only_when_idle and request.order >= self._batch_end:
            return False
        num_known = len(request.token_ids)
        hits = self._pages_of_others(request)
        num_hit_tokens = len(hits) * pool.page_size
        num_tokens = self._chunk_size(num_known, num_hit_tokens, budget, num_prompts)
        if not num_tokens:
            return False
        if not self.pages.admit(request, hits, request.max_total_tokens - 1 if self.policy.reserve_full else num_known):
            return False
        self._waiting.pop()
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_hit_tokens
        self._add_chunk(chunks, request, num_tokens)
        return True

    def _pages_of_others(self, request: Request) -> list[int]:
        """Pages that hold the beginning of its tokens already: the prefix cache's, or those of the prompt that a running sample of
        it has computed, where that is more (without a prefix cache, above all)."""
        page_size, hits = self.pool.page_size, self.pool.match(request.hash_chain, request.token_ids)
        num_shared = min(request.num_prompt_tokens, len(request.token_ids) - 1) // page_size
        for sample in request.samples:
            if len(hits) < num_shared and sample.row >= 0 and self._has_prompt(sample) and self.pages.shareable(sample.row):
                hits = sample.pages[:num_shared]
        scores = request.prompt_scores
        if scores is not None and scores.wanted:  # the token before each one that is scored must be computed
            hits = hits[: (scores.next - 1) // page_size]
        return hits

    def _add_chunk(self, chunks: Chunks, request: Request, num_tokens: int) -> None:
        """Commits the next `num_tokens` tokens of a prompt to the step, and hashes the pages that they fill: a step writes its KV
        before it reads any, so that a request admitted later in the same step may hit them."""
        row = request.row
        start = int(self.rows.num_computed[row])
        self.rows.num_computed[row] = start + num_tokens
        chunks.requests.append(request)
        chunks.rows.append(row)
        chunks.starts.append(start)
        chunks.q_lens.append(num_tokens)
        chunks.samples.append(start + num_tokens == self.rows.prefill_end[row])
        chunks.num_tokens += num_tokens
        self.pages.register_full(np.array([row]))
        if request.samples and self._has_prompt(request):
            self._release_samples(request)

    def _assemble(self, decodes: Decodes, chunks: Chunks) -> Schedule:
        requests, rows, starts, q_lens, samples = join(decodes, chunks, self.rows.requests_at(decodes.rows), self._all)
        num_tokens = decodes.num_tokens + chunks.num_tokens
        least_starts = starts
        if self.draft_lengths is not None:  # what is known has been accepted
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

    # Its tokens come back

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
        if counts is not None:
            return self._update_drafted(schedule, sampled, counts)
        assert not schedule.num_drafts, "a step with drafts is updated with counts"
        assert len(sampled) == schedule.num_seqs, f"{len(sampled)} tokens for {schedule.num_seqs} entries"
        requests, rows, tokens = schedule.requests, schedule.rows, sampled.tolist()
        samples = self._without_forced(schedule) if self._forced else schedule.samples
        own = samples & (self.rows.generation[rows] == schedule.generations)
        late: list[int] = []
        if not own.all():
            index = np.flatnonzero(own)
            late = np.flatnonzero(samples & ~own).tolist()
            requests, rows, tokens = [requests[i] for i in index.tolist()], rows[index], sampled[index].tolist()
        for request, token in zip(requests, tokens):  # noqa: B905 (strict costs 2 us at 256)
            request.token_ids.append(token)
        known = self.rows.num_known[rows] + 1
        self.rows.num_known[rows] = known
        self.pages.register_full(rows)
        result = StepResult(requests, tokens)
        ended = (known >= self.rows.limit[rows]).nonzero()[0].tolist()
        if not self._stop_ids.keys().isdisjoint(tokens):
            ended = sorted({*ended, *(i for i, token in enumerate(tokens) if token in self._stop_ids)})
        for i in ended:
            self._finish_if_ended(requests[i], result)
        for i in late:
            self._deliver(schedule.requests[i], [int(sampled[i])], 1, result)
        return result

    def _without_forced(self, schedule: Schedule) -> np.ndarray:
        """schedule.samples without those whose token the host has known since the step was scheduled."""
        samples = schedule.samples.copy()
        for i, request in enumerate(schedule.requests):
            if samples[i] and request.num_forced_in_flight:
                samples[i] = False
                request.num_forced_in_flight -= 1
                if not request.num_forced_in_flight:
                    self._forced.pop(request.request_id, None)
        return samples

    def _update_drafted(self, schedule: Schedule, sampled: np.ndarray, counts: np.ndarray) -> StepResult:
        """`update` where entries may bring several tokens: each planned for all its drafts and gives back the rejected ones."""
        result = StepResult([], [])
        samples = self._without_forced(schedule) if self._forced else schedule.samples
        own = self.rows.generation[schedule.rows] == schedule.generations
        for i in np.flatnonzero(samples).tolist():
            request, count = schedule.requests[i], int(counts[i])
            num_planned = int(schedule.q_lens[i]) if i < schedule.num_decodes else 1
            assert 1 <= count <= num_planned, f"{count} tokens of an entry that planned {num_planned}"
            if own[i]:
                self.rows.num_computed[request.row] -= num_planned - count
            self._deliver(request, sampled[i, :count].tolist(), num_planned, result)
        return result

    def _deliver(self, request: Request, tokens: list[int], num_planned: int, result: StepResult) -> None:
        """Appends one request's tokens up to its end, wherever it is now; `num_planned` were in flight for them."""
        if request.finished:
            self._num_discarded_rows += 1
            return
        row = request.row
        if row < 0:
            request.num_unfetched -= num_planned
        for token in tokens:
            request.token_ids.append(token)
            if row >= 0:
                self.rows.num_known[row] += 1
            result.requests.append(request)
            result.tokens.append(token)
            if request.end() is not None:
                break
        if row >= 0:
            self.pages.register_full(np.array([row]))
        self._finish_if_ended(request, result)

    def _finish_if_ended(self, request: Request, result: StepResult) -> None:
        end = request.end()
        if end is not None:
            self.finish(request, *end)
            result.finished.append(request)

    def check_invariants(self) -> None:
        """Asserts that no request, page or row is lost or held twice. For tests: O(everything)."""
        running, waiting = self.running, self.waiting
        ids = [request.request_id for request in running + waiting]
        assert len(ids) == len(set(ids)) and set(ids) == set(self._requests), "a request is lost, or in two places"
        assert all(request.status is RequestStatus.RUNNING and not request.num_unfetched for request in running)
        assert all(request.row < 0 and request.rows is None and request.num_in_flight >= 0 for request in waiting)
        assert all(request.num_in_flight == 0 or self.num_steps_in_flight for request in running + waiting)
        assert set(self._forced) == {request.request_id for request in running + waiting if request.num_forced_in_flight}
        keys = [self._order_key(request) for request in self._waiting]
        assert keys == sorted(keys), "the queue is out of order"
        assert self._stop_ids == Counter(token for request in running + waiting for token in request.stop_ids)
        assert 0 <= self.num_steps_in_flight and (self._requests or not self.rows.order.size)
        self.rows.check_invariants()
        self.pool.check_invariants([page for request in running for page in self.rows.pages(request.row)])

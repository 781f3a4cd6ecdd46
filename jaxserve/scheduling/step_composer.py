"""What the next step holds: decodes, their drafts, and chunks of prompts, within a budget of tokens.

Owns the composition of a step: which running requests decode and with how many drafts, which is preempted when pages run out, which
is admitted, and how much of each prompt is computed. A BatchingPolicy (policies.py) has the rules. lifecycle.py changes the state
of requests.

There is no prefill mode and no decode mode. A request owes the tokens that are known and not computed, and a step spends its budget
on what is owed. Sources: iteration-level scheduling from Orca (OSDI 2022); chunks beside decodes from Sarathi-Serve (OSDI 2024);
paging and preemption by recomputation from Kwon et al. (SOSP 2023).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.lifecycle import RequestLifecycle, has_prompt
from jaxserve.scheduling.schedule import NO_DECODES, Chunks, Decodes
from jaxserve.scheduling.step_budget import StepBudget


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
        """How many drafts each of `rows` should verify; the composer may cut them.

        explore: the step will hold decodes alone, so a shape whose time is unknown may be tried. queued: requests wait for a row.
        """
        ...


class KVLoads(Protocol):
    """Loads pages from a store into the pool: `engine.stored_pages.StoredPages`."""

    def begin(self, request: Request, hits: list[int], max_pages: int, group: int) -> bool:
        """Whether pages behind `hits`, the first of the request's, are now on their way, or were already, so that it has to wait.
        `Scheduler.kv_ready` ends the wait. max_pages: of the request's that may come from elsewhere, `hits` included. group: of
        devices, in whose pool the hits are and the others will be."""
        ...

    def num_waiting(self, group: int) -> int:
        """Requests that wait for pages on their way into the group's pool, where they are likely to run."""
        ...

    def preempting(self, request: Request) -> None:
        """The request is about to lose its pages. All steps that were scheduled have been dispatched, so that the pages that are
        registered hold what they should."""
        ...


class StepComposer:
    """Composes steps of `requests`. It advances their counters, and takes rows and pages for them.

    max_step_tokens: max_num_batched_tokens, or less while larger buckets are not compiled.
    last_was_prefill: whether the last step held chunks.
    batch_end: under a policy that admits only when idle, requests of an `order` below this may still join the batch.
    kv_loads: asked before a request is admitted. None: there is no store.
    """

    kv_loads: KVLoads | None = None

    def __init__(
        self, requests: RequestLifecycle, step_budget: StepBudget | None = None, draft_lengths: DraftLengthChooser | None = None
    ):
        self.requests = requests
        self.max_step_tokens: int = requests.config.max_num_batched_tokens
        self.step_budget = step_budget
        self.draft_lengths = draft_lengths
        self.last_was_prefill: bool = False
        self.batch_end: int = 0
        self._rows, self._pages, self._queue = requests.rows, requests.pages, requests.queue
        self._policy, self._config = requests.policy, requests.config
        self._ones = np.ones(requests.config.max_num_seqs, np.int32)

    def compose(self) -> tuple[Decodes, Chunks] | None:
        """The next step; None if nothing can be computed now."""
        if not len(self._rows.order):
            self.batch_end = self.requests.num_added
        if self._policy.mixed:
            decodes = self._decodes()
            chunks = self._chunks(decodes)
        elif self._policy.prefill_first or not self.last_was_prefill:
            chunks = self._chunks(NO_DECODES)
            decodes = NO_DECODES if chunks.requests else self._decodes()
        else:
            decodes = self._decodes()
            chunks = Chunks() if decodes.num_tokens else self._chunks(decodes)
        if not decodes.num_tokens and not chunks.requests:
            return None
        self.last_was_prefill = bool(chunks.requests)
        return decodes, chunks

    def skip_decodes(self) -> None:
        """Notes that steps of decodes were run which `compose` did not make."""
        self.last_was_prefill, self.batch_end = False, 0

    def may_admit(self) -> bool:
        """Whether a row is free and the pool has enough pages for the first request of the queue; with prefix caching, whether
        there is one: cached pages or a store's may let it in."""
        if not self._queue or self._pages.enable_prefix_caching:
            return bool(self._queue)
        num_pages = self._pages.num_pages(self._num_tokens_to_hold(self._queue.peek()))
        pools = enumerate(self._pages.pools)
        return any(self._rows.num_free_of(group) and num_pages <= pool.num_free_pages for group, pool in pools)

    # Decodes and their drafts

    def _decodes(self) -> Decodes:
        """One token, and drafts, of every running request that is past its prompt. Pages are taken first, if need be by preemption.
        Counters advance after that, when no request can lose its place in the step any more."""
        rows, preempted = self._rows, False
        decodes, starts = self._owing_decodes()
        short = decodes[starts >= rows.capacity[decodes]]
        if len(short) and not self._pages.grow(short):
            preempted = self._grow_preempting(rows.requests_at(short))
            decodes, starts = self._owing_decodes()
        q_lens, num_tokens = self._ones[: len(decodes)], len(decodes)
        if self.draft_lengths is not None and num_tokens:
            num_drafts = self._num_drafts(self.draft_lengths, decodes, starts)
            if num_drafts.any():
                q_lens = 1 + num_drafts
                num_tokens = int(q_lens.sum())
        if len(decodes):
            self.batch_end = 0  # the first decode closes the batch
        rows.num_computed[decodes] = starts + q_lens
        return Decodes(decodes, starts, q_lens, num_tokens, preempted)

    def _owing_decodes(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows in running order whose last sampled token is not computed yet, that token's position in each).

        Rows whose last possible token is in flight are left out: a request never samples past its limit.
        """
        rows = self._rows
        order, computed = rows.order, rows.num_computed[rows.order]
        owing = (computed >= rows.prefill_end[order]) & (computed < rows.limit[order] - 1)
        return (order, computed) if owing.all() else (order[owing], computed[owing])

    def _grow_preempting(self, requests: list[Request]) -> bool:
        """Gives each of `requests`, in running order, one more page, and preempts others where the pool has none. Returns whether
        any request was preempted."""
        num_before = self.requests.num_preemptions
        for request in requests:
            # A request may have been preempted before its turn. It preempts itself if no other is worse.
            while request.status is RequestStatus.RUNNING and not self._pages.grow(np.array([request.row])):
                victim = self._choose_victim(self._pages.group_of(request.row))
                if self.kv_loads is not None:
                    self.kv_loads.preempting(victim)
                self.requests.preempt(victim)
        return self.requests.num_preemptions > num_before

    def _choose_victim(self, group: int) -> Request:
        """The request of the group to preempt. fcfs: the last admitted. priority: the latest arrival among those of the worst
        priority."""
        rows = self._rows
        running = (rows.request_at(row) for row in rows.order[::-1].tolist() if self._pages.group_of(row) == group)
        return next(running) if self._config.order == "fcfs" else max(running, key=self.requests.order_key)

    def _num_drafts(
        self,
        draft_lengths: DraftLengthChooser,
        decodes: np.ndarray,  # intp[n], n > 0
        starts: np.ndarray,  # i32[n]
    ) -> np.ndarray:  # i32[n]
        """How many drafts each decode verifies.

        Every decode already has the budget, logits row and page of its own token. Drafts take what is left, in running order and up
        to each request's limit. Where prompts owe tokens, drafts take at most half of the tokens and logits rows left. They never
        preempt.
        """
        rows, n = self._rows, len(decodes)
        # Prompts that may end in this step, each with a logits row. Samples that are held may be admitted in this step too.
        num_prompts = len(rows.order) - n + self.requests.num_waiting
        num_prompts = min(num_prompts, self._config.max_num_seqs - n)
        wanted = draft_lengths.choose(decodes, explore=not num_prompts, queued=bool(self._queue))
        if not wanted.any():
            return wanted
        wanted = np.minimum(wanted, rows.limit[decodes] - starts - 2)
        room = min(self._budget(starts) - n, draft_lengths.max_rows - n - num_prompts)
        room, num_drafts = max(0, room // 2 if num_prompts else room), np.maximum(wanted, 0)
        ends = num_drafts.cumsum()
        if ends[-1] > room:
            num_drafts = np.diff(np.minimum(ends, room), prepend=0).astype(np.int32)
        (short,) = (starts + num_drafts >= rows.capacity[decodes]).nonzero()
        while len(short) and self._pages.grow(decodes[short]):  # a page for each, or none where there are too few
            short = short[(starts + num_drafts)[short] >= rows.capacity[decodes[short]]]
        for i in short.tolist():
            row = decodes[i]
            while rows.capacity[row] <= starts[i] + num_drafts[i] and self._pages.grow(np.array([row])):
                pass
            num_drafts[i] = min(num_drafts[i], rows.capacity[row] - starts[i] - 1)
        return num_drafts

    # Chunks and admission

    def _chunks(self, decodes: Decodes) -> Chunks:
        """Chunks of the running requests' prompts, then of newly admitted ones, within the budget that the decodes leave."""
        rows, queue, chunks = self._rows, self._queue, Chunks()
        partial = [] if decodes.rows is rows.order else self._partial_prompts()  # none where everyone decodes
        num_prompts = len(partial) + len(queue)
        if not num_prompts:
            return chunks
        budgets = self._budgets(decodes)
        for row in partial:
            group, known, computed = self._pages.group_of(row), int(rows.prefill_end[row]), int(rows.num_computed[row])
            num_tokens = self._chunk_size(known, computed, budgets[group], num_prompts)
            if num_tokens:
                self._add_chunk(chunks, rows.request_at(row), num_tokens)
                budgets[group] -= num_tokens
        if decodes.preempted and (decodes.num_tokens or chunks.requests):
            return chunks  # pages are short: no request is admitted, unless the step would be empty
        while queue and self._has_room(budgets):
            if not self._admit(queue.peek(), chunks, budgets, num_prompts):
                break
        return chunks

    def _has_room(self, budgets: list[int]) -> bool:
        """Whether some group has tokens left, and a row."""
        return any(budget > 0 and self._num_free_rows(group) > 0 for group, budget in enumerate(budgets))

    def _num_free_rows(self, group: int) -> int:
        """Rows of the group beside those of requests that wait for KV there, which can use its pages; less than 0 where there are
        fewer rows than such requests."""
        return self._rows.num_free_of(group) - (0 if self.kv_loads is None else self.kv_loads.num_waiting(group))

    def _budgets(self, decodes: Decodes) -> list[int]:
        """Tokens that the step may hold beside its decodes, of each group."""
        budget, num_groups = self._budget(decodes.starts), self._config.num_groups
        if num_groups == 1:
            return [budget - decodes.num_tokens]
        held = np.bincount(decodes.rows // self._rows.rows_per_group, minlength=num_groups)
        return (budget // num_groups - held).tolist()

    def _partial_prompts(self) -> list[int]:
        """Rows whose prompt is not computed to its end, in running order."""
        rows = self._rows
        return rows.order[rows.num_computed[rows.order] < rows.prefill_end[rows.order]].tolist()

    def _budget(self, starts: np.ndarray) -> int:  # i32[n]: positions of the step's decodes
        """Tokens that the step may hold: decodes, their drafts and chunks.

        The step-time objective applies to steps that may hold both decodes and prompts (or prompts alone: `StepBudget.every_step`).
        """
        chosen = self.step_budget if len(starts) or self.step_budget is not None and self.step_budget.every_step else None
        partial = self._partial_prompts() if chosen is not None else []
        if chosen is None or not (partial or self._queue and self._rows.num_free):
            return self.max_step_tokens
        chunk_start = int(self._rows.num_computed[partial[0]]) if partial else 0
        return max(len(starts), min(self.max_step_tokens, chosen.choose(starts, chunk_start)))

    def _chunk_size(self, num_known: int, num_computed: int, budget: int, num_prompts: int) -> int:
        """How many of a request's `num_known` tokens to compute in this step; 0 if it must wait.

        long_prefill_token_threshold applies while more than one prompt is unfinished or waits. Where prompts are not chunked, one
        that is larger than a step is chunked all the same; only the recomputation of a preempted request can be that large.
        """
        owed = num_known - num_computed
        if not self._policy.chunked and num_known <= self._config.max_num_batched_tokens:
            return owed if owed <= budget else 0
        threshold = self._config.long_prefill_token_threshold
        return min(owed, budget, threshold) if threshold and num_prompts > 1 else min(owed, budget)

    def _num_tokens_to_hold(self, request: Request) -> int:
        """Tokens for which a request needs pages at its admission: all it knows, or all it may reach."""
        return request.max_total_tokens - 1 if self._policy.reserve_full else len(request.token_ids)

    def _admit(self, request: Request, chunks: Chunks, budgets: list[int], num_prompts: int) -> bool:
        """Gives the request a row, pages for the tokens it knows (or for all it may reach) and a first chunk, in the first group
        that has room for them. Returns False, and changes nothing, if none has. budgets: tokens left to each group; that of its
        group is lowered. A request whose pages a store has is taken from the queue instead."""
        if request.num_unfetched:
            return False  # tokens in flight must come back first
        if self._policy.admit_only_when_idle and request.order >= self.batch_end:
            return False
        for group, hits in self._groups_with_room(request, budgets):
            if self.kv_loads is not None and self.kv_loads.begin(request, hits, self._max_shared(request), group):
                self.requests.hold_for_kv(request)
                return True
            num_computed = len(hits) * self._pages.page_size
            num_tokens = self._chunk_size(len(request.token_ids), num_computed, budgets[group], num_prompts)
            if num_tokens and self.requests.start(request, hits, self._num_tokens_to_hold(request), group):
                self._add_chunk(chunks, request, num_tokens)
                budgets[group] -= num_tokens
                return True
        return False

    def _groups_with_room(self, request: Request, budgets: list[int]) -> list[tuple[int, list[int]]]:
        """(group, pages that hold the first of the request's tokens) of each group that has a row, a page and tokens left, best
        first: most such pages, then fewest requests, then most free pages. Groups with an eighth more rows in use or kept than the
        emptiest come last: a step takes as long as its fullest group."""
        pools = self._pages.pools
        free = [self._num_free_rows(group) for group in range(len(pools))]
        found = [
            (group, self._pages_of_others(request, group))
            for group, pool in enumerate(pools)
            if budgets[group] > 0 and free[group] > 0 and pool.num_free_pages
        ]
        if len(pools) == 1:
            return found
        most_free = max(free)

        def rank(entry: tuple[int, list[int]]) -> tuple[int, int, int]:
            group, hits = entry
            is_full = most_free - free[group] > self._rows.rows_per_group // 8
            return 1 if is_full else -len(hits), -free[group], -pools[group].num_free_pages

        return sorted(found, key=rank)

    def _pages_of_others(self, request: Request, group: int) -> list[int]:
        """Pages of the group that already hold the first of its tokens: those that the prefix cache has, or those of another
        sample's prompt, whichever are more. (Without a prefix cache only samples share.)"""
        pool = self._pages.pools[group]
        page_size, hits = pool.page_size, pool.match(request.hash_chain, request.token_ids)
        num_shared = min(request.num_prompt_tokens, len(request.token_ids) - 1) // page_size
        for sample in request.samples:
            if len(hits) < num_shared and self._shares_prompt(sample, group):
                hits = sample.pages[:num_shared]
        scores = request.prompt_scores
        return hits[: self._max_shared(request)] if scores is not None and scores.wanted else hits

    def _max_shared(self, request: Request) -> int:
        """How many of a request's pages may hold what others computed: all but its last token's. The token before each one that is
        scored must be computed too."""
        scores, num_tokens = request.prompt_scores, len(request.token_ids)
        if scores is not None and scores.wanted:
            num_tokens = min(num_tokens, scores.next)
        return (num_tokens - 1) // self._pages.page_size

    def _shares_prompt(self, sample: Request, group: int) -> bool:
        """Whether the sample runs in the group, and the KV of its prompt there is of the present weights."""
        row = sample.row
        return row >= 0 and self._pages.group_of(row) == group and has_prompt(sample) and self._pages.shareable(row)

    def _add_chunk(self, chunks: Chunks, request: Request, num_tokens: int) -> None:
        """Adds the next `num_tokens` tokens of a prompt to the step, and hashes the pages that they fill. A step writes its KV
        before it reads any, so a request that is admitted later in the same step may hit these pages."""
        row, rows = request.row, self._rows
        start = int(rows.num_computed[row])
        rows.num_computed[row] = start + num_tokens
        chunks.requests.append(request)
        chunks.rows.append(row)
        chunks.starts.append(start)
        chunks.q_lens.append(num_tokens)
        chunks.samples.append(start + num_tokens == rows.prefill_end[row])
        chunks.num_tokens += num_tokens
        self._pages.register_full(np.array([row]))
        if request.samples and has_prompt(request):
            self.requests.release_samples(request)

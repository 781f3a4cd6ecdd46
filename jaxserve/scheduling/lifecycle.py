"""The life of a request between `add` and its end: queued, held, running, preempted, finished.

Owns every unfinished request: those in the waiting queue, those held for a grammar, for another sample's prompt or for a store's
pages, and those running, with their rows and pages. It decides nothing. The composer chooses who is admitted or preempted
(step_composer.py), and the intake adds tokens (token_intake.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool, root_hash
from jaxserve.scheduling.policies import ORDER_KEYS, BatchingPolicy, OrderKey
from jaxserve.scheduling.repetition import RepetitionWatch
from jaxserve.scheduling.sequence_pages import SequencePages
from jaxserve.scheduling.sequence_rows import NEVER, SequenceRows
from jaxserve.scheduling.waiting_queue import WaitingQueue


class RequestLifecycle:
    """Every unfinished request, and the transitions between its states.

    by_id: every unfinished request, by its id.
    queue: requests that wait for admission.
    held: requests that wait for a grammar, for another sample's prompt or for a store's pages, by id.
    forced: requests with tokens in flight that the host knows already, by id.
    stop_ids: how many unfinished requests have each stop id.
    repetitions: what watches the outputs that end where they repeat themselves, by id.
    """

    def __init__(self, config: SchedulerConfig, policy: BatchingPolicy, pools: Sequence[PagePool]):
        self.config = config
        self.policy = policy
        self.pools = pools
        self.rows: SequenceRows = SequenceRows(config.max_num_seqs, config.max_model_len, pools[0].page_size, len(pools))
        self.pages: SequencePages = SequencePages(pools, self.rows)
        self.order_key: Callable[[Request], OrderKey] = ORDER_KEYS[config.order]
        self.queue: WaitingQueue = WaitingQueue(self.order_key)
        self.held: dict[str, Request] = {}
        self.by_id: dict[str, Request] = {}
        self.forced: dict[str, Request] = {}
        self.stop_ids: Counter[int] = Counter()
        self.repetitions: dict[str, RepetitionWatch] = {}
        self.num_added: int = 0
        self.num_preemptions: int = 0

    def add(self, request: Request) -> None:
        """As `Scheduler.add`."""
        if not request.max_total_tokens:  # nobody has checked it
            request.max_total_tokens = self.check(request)
        self._check_unused(request)
        request.order = self.num_added
        self.num_added += 1
        self._set_root(request, request.num_weight_updates)
        self.by_id[request.request_id] = request
        self.stop_ids.update(request.stop_ids)
        if request.params.repetition_detection is not None:
            self.repetitions[request.request_id] = RepetitionWatch(request)
        if request.status is RequestStatus.WAITING:
            self._queue_or_hold(request)
        else:
            self.held[request.request_id] = request

    def check(self, request: Request) -> int:
        """As `Scheduler.check`."""
        id_, num_prompt, config, pool = request.request_id, request.num_prompt_tokens, self.config, self.pools[0]
        self._check_unused(request)
        if not num_prompt:
            raise ValueError(f"request {id_!r} has an empty prompt; give it one token at least")
        if num_prompt >= config.max_model_len:
            raise ValueError(
                f"request {id_!r} has a prompt of {num_prompt} tokens, but max_model_len={config.max_model_len} must hold it and "
                f"one output token: the model's maximum context length is {config.max_model_len} tokens; shorten the prompt or "
                "raise max_model_len"
            )
        if not self.policy.chunked and num_prompt > config.max_num_batched_tokens:
            raise ValueError(
                f"request {id_!r} has a prompt of {num_prompt} tokens, which no step can hold: prompts are not chunked and "
                f"max_num_batched_tokens={config.max_num_batched_tokens}; turn chunking on or raise the budget"
            )
        max_tokens = request.params.max_tokens
        limit = config.max_model_len if max_tokens is None else min(num_prompt + max_tokens, config.max_model_len)
        # The last token's KV is never needed. A request that runs alone is never preempted, so no page is kept in reserve.
        num_pages = self.pages.num_pages(limit - 1)
        if num_pages > pool.num_pages:
            raise ValueError(
                f"request {id_!r} may reach {limit} tokens (prompt {num_prompt}, {max_tokens=}), which take {num_pages} pages of "
                f"{pool.page_size}, but the pool has {pool.num_pages}; lower max_tokens or raise num_pages"
            )
        return limit

    def _check_unused(self, request: Request) -> None:
        if request.request_id in self.by_id:
            raise ValueError(f"request_id={request.request_id!r} is in use by an unfinished request; choose another")

    def set_ready(self, request: Request) -> None:
        """As `Scheduler.set_ready`."""
        if self.held.get(request.request_id) is request and request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            del self.held[request.request_id]
            self._queue_or_hold(request)

    def _queue_or_hold(self, request: Request) -> None:
        """Puts the request into the queue, or holds it while another sample computes their prompt: all then share its pages."""
        first = next((sample for sample in request.samples if sample.request_id in self.by_id), request)
        if first is not request and not has_prompt(first):
            request.status = RequestStatus.WAITING_FOR_PROMPT
            self.held[request.request_id] = request
        else:
            request.status = RequestStatus.WAITING
            self.queue.push(request)

    def release_samples(self, request: Request) -> None:
        """Queues the samples that waited for this request's prompt. Its last chunk is scheduled, or the request has ended."""
        for sample in request.samples:
            if sample.status is RequestStatus.WAITING_FOR_PROMPT and self.held.pop(sample.request_id, None) is not None:
                self._queue_or_hold(sample)

    def hold_for_kv(self, request: Request) -> None:
        """The first request of the queue waits outside it until `release_from_kv`: a store's pages are on their way."""
        popped = self.queue.pop()
        assert popped is request, f"{request.request_id} is not the next of the queue"
        request.status = RequestStatus.WAITING_FOR_KV
        self.held[request.request_id] = request

    def release_from_kv(self, request: Request) -> None:
        """Back to its place in the queue, unless it has ended. Whether the pages came or not: what is not there is computed."""
        if self.held.get(request.request_id) is request and request.status is RequestStatus.WAITING_FOR_KV:
            del self.held[request.request_id]
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            self.queue.push(request)

    def start(self, request: Request, hit_pages: list[int], num_tokens: int, group: int = 0) -> bool:
        """Moves the first request of the queue to running, with a row of the group and pages for `num_tokens` tokens. The first of
        them are `hit_pages`. Returns False, and changes nothing, if there are too few pages."""
        if not self.pages.admit(request, hit_pages, num_tokens, group):
            return False
        popped = self.queue.pop()
        assert popped is request, f"{request.request_id} is not the next of the queue"
        request.status, request.kv_sought = RequestStatus.RUNNING, False
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = len(hit_pages) * self.pages.page_size
        return True

    def preempt(self, request: Request) -> None:
        """Returns a running request to the queue, to recompute all its tokens. Its pages keep their hashes and may be hit again."""
        request.num_unfetched = request.num_in_flight
        self.pages.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.queue.push(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """As `Scheduler.abort`."""
        aborted = [self.by_id[id_] for id_ in dict.fromkeys(request_ids) if id_ in self.by_id]
        for request in aborted:
            self.finish(request, "abort")
        return aborted

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """As `Scheduler.finish`."""
        assert self.by_id.get(request.request_id) is request, f"{request.request_id} is unknown or has finished"
        if request.status is RequestStatus.RUNNING:
            self.pages.release(request)
        elif request.request_id in self.held:
            del self.held[request.request_id]
        else:
            self.queue.remove(request)
        if reason == "error":
            for pool in self.pools:
                pool.forget(pool.find(request.hash_chain[1:]))
        del self.by_id[request.request_id]
        self.forced.pop(request.request_id, None)
        self.repetitions.pop(request.request_id, None)
        for token in request.stop_ids:
            self.stop_ids[token] -= 1
            if not self.stop_ids[token]:
                del self.stop_ids[token]
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        self.release_samples(request)

    def change_weights(self, num_updates: int, version: str, *, recompute: bool) -> None:
        """As `Scheduler.change_weights`."""
        if recompute:
            for request in reversed(self.running):
                self.preempt(request)
        self.rows.num_hashed[self.rows.order] = NEVER
        for pool in self.pools:
            pool.forget(range(pool.num_pages))
        for request in self.by_id.values():
            self._set_root(request, num_updates)
            request.begin_weights(version)
            scores = request.prompt_scores
            if recompute and scores is not None and scores.wanted:
                scores.next = scores.first  # all scores of a prompt come from the same weights

    def name_weights(self, version: str) -> None:
        """As `Scheduler.name_weights`."""
        for request in self.by_id.values():
            request.begin_weights(version)

    def _set_root(self, request: Request, num_weight_updates: int) -> None:
        request.num_weight_updates = num_weight_updates
        if self.pages.enable_prefix_caching:
            request.hash_chain = [root_hash(num_weight_updates, request.cache_salt, self.pages.pools[0].root_names)]

    @property
    def running(self) -> list[Request]:
        """In order of admission."""
        return [self.rows.request_at(row) for row in self.rows.order.tolist()]

    @property
    def waiting(self) -> list[Request]:
        """In the order in which they will be admitted. Those that are held come last."""
        return [*self.queue, *self.held.values()]

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those held."""
        return len(self.queue) + len(self.held)

    def check_invariants(self) -> None:
        """Asserts that no request, page or row is lost or held twice."""
        running, waiting = self.running, self.waiting
        ids = [request.request_id for request in running + waiting]
        assert len(ids) == len(set(ids)) and set(ids) == set(self.by_id), "a request is lost, or in two places"
        assert all(request.status is RequestStatus.RUNNING and not request.num_unfetched for request in running)
        assert all(request.row < 0 and request.rows is None and request.num_in_flight >= 0 for request in waiting)
        assert set(self.forced) == {request.request_id for request in running + waiting if request.num_forced_in_flight}
        keys = [self.order_key(request) for request in self.queue]
        assert keys == sorted(keys), "the queue is out of order"
        assert self.stop_ids == Counter(token for request in running + waiting for token in request.stop_ids)
        watched = {request.request_id for request in running + waiting if request.params.repetition_detection is not None}
        assert set(self.repetitions) == watched
        assert self.by_id or not self.rows.order.size
        self.rows.check_invariants()
        for group, pool in enumerate(self.pools):
            rows = [request.row for request in running if self.pages.group_of(request.row) == group]
            pool.check_invariants([page for row in rows for page in self.rows.pages(row)])


def has_prompt(request: Request) -> bool:
    """Whether the steps scheduled so far compute all of its prompt, so that other samples can share it."""
    return request.num_computed_tokens >= request.num_prompt_tokens

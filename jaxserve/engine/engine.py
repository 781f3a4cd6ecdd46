"""Token ids in, token ids out: an engine's requests from add_request to their last EngineOutput.

Owns what requests may come in, how they are ended from outside, and what is made anew when a step breaks off. Steps are
pipeline.py's. Knows nothing of text. Not thread-safe: one thread calls it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxserve.batching.packer import BatchPacker
from jaxserve.config import EngineConfig
from jaxserve.engine.admission import check_arrival, check_future, check_ids, check_kinds, check_priority
from jaxserve.engine.demand_log import DemandWriter
from jaxserve.engine.description import EngineDescription, describe
from jaxserve.engine.drafting import Draft, make_drafting
from jaxserve.engine.grammar_following import GrammarFollower
from jaxserve.engine.kernel_choice import KernelChoice
from jaxserve.engine.live_requests import LiveRequests, samples_of
from jaxserve.engine.pipeline import StepPipeline
from jaxserve.engine.resolution import step_budget
from jaxserve.engine.runner_setup import set_up_runner
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.stored_pages import StoredPages, stored_pages
from jaxserve.engine.weights import WeightsAndSleep
from jaxserve.execution.leading_runner import AnyRunner
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.execution.stage_clock import StageClock
from jaxserve.execution.warm_up import BackgroundWarmUp
from jaxserve.hosts.group import HostGroup
from jaxserve.hosts.pulse import HostLostError
from jaxserve.models import Decoder
from jaxserve.models.shards import ShardedModel
from jaxserve.outputs import RequestMetrics
from jaxserve.qualification.qualify import Qualification
from jaxserve.request import EngineOutput, Request, RequestStatus
from jaxserve.sampling.nothing_allowed import check_something
from jaxserve.sampling.prompt_scores import scores_of
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.bubbles import Bubbles
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.speculative.draft_lengths import DraftLengths
from jaxserve.structured.constraints import Constraints
from jaxserve.structured.grammars import Grammar

logger: logging.Logger = logging.getLogger("jaxserve")


class Engine:
    """vLLM's engine interface on a JAX model: add_request, step, abort, has_unfinished_requests.

    Args:
      model: a `jaxserve.models.Decoder` with its weights in place; its arrays are used as they are, not copied.
      config: what to build; None fields are decided from the model and the device.
      mesh: the devices to run on, those of its axis "tp"; None: as many of the first as `config.tensor_parallel_size` says. A model
        of one device is cut for several; arrays that lie on them as they are needed are shared.
      hosts: the group of processes whose devices share the model, and of which this one leads; the others make a `Follower` of
        the same model and config.
      eos_token_ids: ids that end a request unless it says ignore_eos.
      weights_id: what names the weights to the other engines of a kv_store. None: they can't use what this one saves there.
      draft: the model or head that drafts, where `config.speculative_config` asks for one: of the same vocabulary and dtype.
      qualification: what `qualify_kernels` found before the weights were read; it is not tried again.

    Raises:
      ValueError: a limit that can't be met (pool too small for a request of max_model_len, a bucket plan too small, ...).
    """

    def __init__(
        self,
        model: Decoder | ShardedModel,
        config: EngineConfig | None = None,
        *,
        eos_token_ids: Iterable[int] | None = None,
        mesh: Mesh | None = None,
        hosts: HostGroup | None = None,
        qualification: Qualification | None = None,
        weights_id: str | None = None,
        draft: Draft | None = None,
    ):
        config = config or EngineConfig()
        setup = set_up_runner(model, config, mesh, hosts, self.has_unfinished_requests, qualification, draft)
        self.kernels: KernelChoice = setup.kernels
        self.config: ResolvedConfig = setup.config
        self.runner: AnyRunner = setup.runner
        self._hosts = hosts
        self._warm_up: BackgroundWarmUp | None = setup.warm_up
        self.is_paused: bool = False
        self.eos_token_ids: frozenset[int] = frozenset(self.config.model.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.stats: EngineStats = EngineStats()
        self.stored_pages: StoredPages | None = stored_pages(self.config, self.runner, weights_id, self.stats)
        self._weights = WeightsAndSleep(self.runner, hosts)
        stages = self.config.engine.pipeline_parallel_size
        self._clock = StageClock(stages) if stages > 1 else None
        self._constraints = Constraints(self.config.model.vocab_size, self.config.plan.max_head_rows, max(2, stages))
        self._requests = LiveRequests(self._constraints)
        self._numbers = itertools.count()
        self._step_budget = step_budget(self.config)
        self._demand_log = DemandWriter(config.demand_log, self.config.cache.page_size) if config.demand_log else None
        self._make_host_state()
        logger.info("%s", self.describe())
        if config.warm_up == "all":
            self.runner.warm_up()
        if self._warm_up is not None:
            if not self.runner.num_deleted_weights():  # or else the next step says so
                list(self.runner.run_empty_steps(self._warm_up.first))  # not waited for: the caller has other things to set up
            self._warm_up.start()

    def _make_host_state(self, num_pages: int | None = None) -> None:
        """Scheduler, pool and all that goes by them, as new. num_pages: that may be handed out; None: all."""
        cache, limits, plan = self.config.cache, self.config.scheduler, self.config.plan
        speculative, programs = self.config.speculative, self.runner.programs
        pool = num_pages or cache.num_pages, cache.page_size, cache.enable_prefix_caching
        self.pools: list[PagePool] = [PagePool(*pool) for _ in range(limits.num_groups)]  # of each group of devices
        self.pool: PagePool = self.pools[0]
        lengths, host_drafts = make_drafting(self.config)
        self.draft_lengths: DraftLengths | None = lengths
        stages, is_async = self.config.engine.pipeline_parallel_size, self.config.engine.async_scheduling and not host_drafts
        self.scheduler: Scheduler = Scheduler(
            limits, self.pool, self._step_budget, self.draft_lengths, hides_in_flight=stages > 1, other_pools=self.pools[1:]
        )
        shapes = plan if self._warm_up is None else self._warm_up.shapes
        self.packer: BatchPacker = BatchPacker(
            shapes,
            programs.layouts,
            limits.max_num_seqs,
            programs.edit_layout,
            keeps_history=speculative is not None,
            sends_tokens=stages > 1,
            num_groups=limits.num_groups,
            drafts=None if host_drafts is None or lengths is None else lengths.proposed,
        )
        self.pipeline: StepPipeline = StepPipeline(
            runner=self.runner,
            scheduler=self.scheduler,
            packer=self.packer,
            grammars=GrammarFollower(self._constraints, self._requests, self.scheduler, self.packer, self.stats),
            requests=self._requests,
            stats=self.stats,
            draft_lengths=self.draft_lengths,
            demand_log=self._demand_log,
            max_in_flight=max(1, stages - 1) if is_async else 0,
            clock=self._clock,
            stored=self.stored_pages,
            host_drafts=host_drafts,
        )
        if self.stored_pages is not None:
            self.stored_pages.attach(self.pools, self.scheduler)

    # -- requests in

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival: float | None = None,
        grammar: Future[Grammar] | None = None,
        score_from: int | None = None,
        stops_at_text: bool = False,
    ) -> list[Request]:
        """Queues a request: one `Request` for each of its `params.n` samples, with ids `request_id`, or `request_id/i` for n > 1.

        score_from: gathers the log-probabilities of the prompt's tokens from this position on, 1 at least, in the first sample's
          `prompt_scores`; those before it may come from the prefix cache.
        grammar: what the output must be, as `GrammarCompiler.submit` returns it. While it compiles the request waits, and nobody
          with it; if it can't be, the request ends with finish_reason "error".
        stops_at_text: whoever calls makes texts of the output, and calls `finish` where one holds a string of `params.stop`.

        Raises:
          ValueError: an empty or too long prompt, an id out of the vocabulary, a duplicate request id, a priority that is no
            integer or that nobody asks for, an `arrival` that is no finite number, `params.stop` where nobody stops at it, or more
            KV than the pool can ever hold. Nothing is queued then and no other request is touched.
          TypeError: a request id, params, score_from or grammar of another kind.
          RuntimeError: the engine is asleep or has no weights.
        """
        self._weights.check_awake()
        check_future(grammar)
        requests = self.prepare(
            request_id,
            prompt_token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            score_from=score_from,
            stops_at_text=stops_at_text,
        )
        return self.add(requests, arrival=arrival, grammar=grammar)

    def prepare(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        score_from: int | None = None,
        stops_at_text: bool = False,
    ) -> list[Request]:
        """The samples of a request, checked, for `add`; nothing is queued yet. Arguments and errors as `add_request`'s."""
        params = SamplingParams() if params is None else params
        check_kinds(request_id, params, score_from)
        self._check_unused(request_id)
        check_ids(prompt_token_ids, params, self.config.model.vocab_size, self.eos_token_ids)
        check_priority(priority)
        if params.stop and not stops_at_text:
            raise ValueError(f"stop={params.stop!r} is text: use LLM or AsyncLLM, which stop at it, or stop_token_ids")
        if priority and self.config.scheduler.order != "priority":
            raise ValueError(f"priority={priority} means nothing here: make the engine with scheduling_policy='priority'")
        requests = samples_of(request_id, prompt_token_ids, params, self.eos_token_ids, priority, cache_salt)
        check_something(requests[0], self.config.model.vocab_size)
        for request in requests:
            request.max_total_tokens = self.scheduler.check(request)
            request.prompt_scores = scores_of(request, score_from)
        return requests

    def add(
        self, requests: list[Request], *, arrival: float | None = None, grammar: Future[Grammar] | None = None
    ) -> list[Request]:
        """Queues what `prepare` returned, once; what it checked is not checked again. Arguments and errors as `add_request`'s."""
        self._weights.check_awake()
        first = requests[0]
        params, request_id = first.params, first.parent_id
        check_future(grammar)
        if params.structured_outputs is not None and grammar is None:
            raise ValueError(f"structured_outputs={params.structured_outputs} needs a tokenizer: use LLM, or give its grammar")
        arrival = time.monotonic() if arrival is None else arrival
        check_arrival(arrival)
        self._check_unused(request_id)
        seed = self._seed_of(next(self._numbers)) if params.seed is None else params.seed
        self._requests.add(request_id, requests)  # first, so that `abort` finds what an interrupt leaves half added
        for request in requests:
            request.seed, request.arrival, request.num_weight_updates = seed, arrival, self.runner.num_weight_updates
            request.begin_weights(self.weight_version)
            request.metrics = RequestMetrics(arrival_time=arrival)
            if grammar is not None:
                request.status = RequestStatus.WAITING_FOR_GRAMMAR
                self._constraints.add(request, grammar)
            self.scheduler.add(request)
        return requests

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is already in use; give each request its own")

    def check_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        stops_at_text: bool = False,
    ) -> None:
        """ValueError, or TypeError, if `add_request` would refuse this; changes nothing."""
        self.prepare(request_id, prompt_token_ids, params, priority=priority, stops_at_text=stops_at_text)

    def _seed_of(self, number: int) -> int:
        return int(np.random.SeedSequence((self.config.engine.seed % 2**64, number)).generate_state(1, np.uint64)[0])

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends these requests at once and frees their pages; unknown or finished ids do no harm. No output follows."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            group = self._requests.remove(request_id)
            self.scheduler.abort([r.request_id for r in group])
            for request in group:
                self._requests.settle(request)
        self._drop_loads()
        gone = set(ids)
        self.pipeline.drop_outputs(lambda request: request.parent_id in gone)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends one sample for a reason the engine can't see, such as a stop string in its text. No output follows."""
        if not request.finished:
            self.scheduler.finish(request, reason, stop_reason)
            self._requests.end(request)
            self._drop_loads()
            self.pipeline.drop_outputs(lambda other: other is request)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to run or to deliver."""
        return bool(self._requests or self.pipeline.in_flight or self.pipeline.undelivered)

    def describe(self) -> str:
        """What was decided, for the log: the kernels, pool, limits, plan. `description` has all of it."""
        return str(self.description)

    @property
    def description(self) -> EngineDescription:
        """What was decided, as data."""
        share = None if self.stored_pages is None else self.stored_pages.save_pace.share
        return describe(self.runner.programs, self.kernels, share)

    @property
    def qualification(self) -> str | None:
        """What the card's check of our kernels found, or that it was skipped, in a line; None on a CPU."""
        return self.kernels.said if self.kernels.skipped or self.kernels.qualification is not None else None

    @property
    def bubbles(self) -> Bubbles | None:
        """Seconds that a pipeline's stages have waited so far, by the simulator's kinds; None with one stage."""
        return None if self._clock is None else self._clock.bubbles

    # -- the step

    def step(self) -> list[EngineOutput]:
        """Schedules and dispatches a step, and returns what an earlier one brought (one step late, so that the device never waits
        for the host; the first call of a busy spell may return nothing).

        While the engine is paused nothing new starts: what was in flight is delivered, then nothing. An exception on the way,
        Ctrl-C too, ends every request as aborted and passes on; the engine stays usable. One such is the RuntimeError where the
        weights' buffers are gone, because the trainer that shares them donated them.
        """
        with self._whole_or_nothing():
            if self._warm_up is not None:
                self._follow_warm_up(self._warm_up)
            return self.pipeline.step(paused=self.is_paused)

    def _follow_warm_up(self, warm_up: BackgroundWarmUp) -> None:
        """Steps grow with the buckets that are compiled; nothing is left of this when all are."""
        most = self.config.scheduler.max_num_batched_tokens
        self.scheduler.composer.max_step_tokens = min(warm_up.shapes.max_tokens, most)
        if not self.num_programs_left:
            self._warm_up, self.packer.plan = None, self.config.plan

    @property
    def num_programs_left(self) -> int:
        """Programs of the plan that are not compiled yet. Any thread may ask."""
        programs = self.runner.programs
        return len(programs.keys) - programs.num_compiled

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Calls this too after each program that is compiled behind the steps (warm_up="background"), on the compiling thread."""
        if self._warm_up is not None:
            self._warm_up.on_progress.append(call)

    def on_lost(self, call: Callable[[HostLostError], None]) -> None:
        """Calls this, on a thread of the group's, when a host is lost with which the engine shares its devices."""
        if self._hosts is not None:
            self._hosts.on_lost(call)

    def drain(self) -> None:
        """Waits for the steps in flight; what they bring is delivered by the next `step`. Exceptions as in `step`."""
        with self._whole_or_nothing():
            self.pipeline.collect()

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """A step that breaks off leaves pages hashed that were never written, page-table entries that were never sent, and donated
        buffers gone. Nothing of that is worth mending: host and device begin anew, the cached prefixes forgotten."""
        try:
            yield
        except BaseException as error:
            for request in list(self._requests):
                request.status, request.finish_reason, request.rows, request.row = RequestStatus.FINISHED, "abort", None, -1
                self._requests.settle(request)
            self._requests.clear()
            self._constraints.clear()
            self._make_host_state()
            self.runner.reset()
            if self._clock is not None:
                self._clock.reset()
            num_deleted = self.runner.num_deleted_weights()
            if num_deleted and isinstance(error, Exception):
                raise RuntimeError(
                    f"{num_deleted} of the weights were deleted since they were given, donated by the trainer that shares them: "
                    "call update_params with the current ones before the next step"
                ) from error
            raise

    # -- weights and memory

    def read_weights(self, path: str | Path) -> Decoder | ShardedModel:
        """Another checkpoint of the same model, laid out so that `update_params` converts nothing. Any thread may call this.

        Raises:
          FileNotFoundError, NotImplementedError, ValueError: as `models.loading.load_model`, for what can't be read.
        """
        return self._weights.read(path, self.config.engine.dtype)

    def update_params(self, params: Any, in_flight: str = "refuse", weight_version: str | None = None) -> None:
        """From the next step on the engine runs with these weights; no cached prefix of the old ones is used again.

        Args:
          params: anything that `LLM.from_params` takes, for the model at hand. Arrays of the engine's dtype, in the layout of its
            own `Decoder`, on its device, are used as they are; others are cast, fused, transposed (as an LLM that read its model
            from files on a CPU holds it: `models.transpose_kernels`) or moved, one weight at a time.
          in_flight: what becomes of requests that have begun (those that wait just run with the new weights). "refuse": a
            RuntimeError. "recompute": their tokens so far stand, their KV is made anew. "keep": they go on with the KV they have.
          weight_version: the weights' name, of 1 to 128 characters, with which outputs are marked; None: the number of updates.

        Nothing is compiled where no conversion is needed, nor for a conversion that was made before. A shared array must stay as it
        is until the next update: a trainer that donates it makes `step` fail with a RuntimeError that says so. May be called while
        the engine is paused or asleep.

        Raises:
          ValueError: leaves are missing, unknown, mis-shaped, of a wrong dtype or deleted; all are listed, and nothing has changed.
          RuntimeError: see in_flight; nothing has changed.
        """
        self._drop_loads(all_of_them=True)
        self._weights.update(params, in_flight, weight_version, self.scheduler, self.drain)
        self.stats.num_weight_updates += 1

    @property
    def weight_version(self) -> str:
        """The name of the weights; "0" until the first update, unless `update_weight_version` gives another."""
        return self._weights.version

    def update_weight_version(self, new_version: str) -> None:
        """Names the weights that the engine has. ValueError: it is no name."""
        self._weights.rename(new_version, self.scheduler)

    def pause(self) -> None:
        """No new steps until `resume`. Requests may be added and wait; those in flight keep their pages."""
        self.is_paused = True

    def resume(self) -> None:
        """Ends `pause`."""
        self.is_paused = False

    def sleep(self, level: int = 1) -> None:
        """Frees the KV pages until `wake_up`, and the cached prefixes with them; compiled programs stay. As vLLM's:

        level 1: the weights move to the host's memory, and come back with `wake_up`.
        level 2: the engine lets go of its weights; before or after `wake_up`, `update_params` must bring others.

        Where weights are shared with a trainer, level 1 gives the engine a copy of its own: prefer level 2.

        Raises:
          RuntimeError: requests are unfinished.
        """
        num_unfinished = max(len(self._requests), int(self.has_unfinished_requests()))
        self._drop_loads()
        self._weights.sleep(level, num_unfinished, self.pools)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends `sleep`: KV pages as new and, after level 1, the weights on the device. tags: "weights" or "kv_cache" alone, so that
        new weights can come before the pages take their memory; it sleeps until both are awake."""
        self._weights.wake_up(tags)

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called, and `wake_up` has not woken all yet."""
        return self._weights.is_asleep

    def check_can_step(self) -> None:
        """RuntimeError, with what to do, where requests could not run now: asleep, without weights, or paused."""
        self._weights.check_awake()
        if self.is_paused:
            raise RuntimeError("the engine is paused: call resume() first")

    def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while any request holds pages. reset_external: those of a kv_store
        too. From then on no other engine finds there what this one saves, nor this one what others do."""
        self._drop_loads(all_of_them=reset_external)
        is_unused = all(pool.num_free_pages == pool.num_pages for pool in self.pools)
        if is_unused and reset_external and self.stored_pages is not None:
            self.drain()
            self.stored_pages.rename()
            self.scheduler.change_weights(self.runner.num_weight_updates, self.weight_version, recompute=False)
        return is_unused and all(pool.reset() for pool in self.pools)

    def _drop_loads(self, *, all_of_them: bool = False) -> None:
        """Pages that are loaded for nobody, or for anybody, are free again."""
        if self.stored_pages is not None:
            self.stored_pages.drop_loads(all_of_them=all_of_them)

    def close(self) -> None:
        """Ends every request and closes the demand log. A program that is being compiled behind the steps is waited for."""
        if self._warm_up is not None:
            self._warm_up.close()
        self.abort(self._requests.ids)
        self.drain()
        self.pipeline.undelivered.clear()
        if self.stored_pages is not None:
            self.stored_pages.close()
        if self._clock is not None:
            self._clock.close()
        if self._demand_log is not None:
            self._demand_log.close()
            self._demand_log = self.pipeline.demand_log = None
        if self._hosts is not None:
            with contextlib.suppress(HostLostError):
                self._hosts.dismiss()

"""The device side of the engine: its weights and state, dispatch and fetch.

Owns the DeviceState and which program runs on it next. Knows nothing of requests or scheduling: it runs StepInputs in the order in
which they come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.buckets.plan import Bucket
from jaxserve.execution import host_memory
from jaxserve.execution.body import HeadInputs
from jaxserve.execution.device_state import DeviceState, new_state
from jaxserve.execution.head import Masks
from jaxserve.execution.page_transfer import HEADS, TRANSFER_PAGES, TakenPages, padded_ids, parts_of_group
from jaxserve.execution.placing import SLEEP_PARTS, to_device, to_host
from jaxserve.execution.programs import UPDATE_BATCH, ProgramKey, Programs, RestBody, RestHead
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.execution.stage_reports import Result
from jaxserve.parallel.layout import Layout
from jaxserve.parallel.mesh import spans_hosts
from jaxserve.sampling.rows import SampledRows, ScoredRows, unpack_sampled, unpack_scored
from jaxserve.speculative.proposer import BodyReader


@dataclass(frozen=True, slots=True)
class BodyHandle:
    """A step whose body is enqueued and whose head is not."""

    inputs: StepInputs
    head_inputs: HeadInputs | None  # None: of a pipeline whose last stage is on other hosts
    passed: tuple[jax.Array | None, ...] = ()  # hidden rows [T, D] that a pipeline's stages hand on; None: on other hosts


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A dispatched step. `out` is what the host fetches; None where no sequence sampled."""

    out: Result | None  # i32[logits rows of the head, columns]
    scored: Sequence[Result]  # i32[score_rows, columns] each
    done: Result  # ready when the step is
    num_samples: int
    stages: tuple[Result, ...] = ()  # of a pipeline: each is ready when that stage is done
    num_drafts: int = 0  # columns of drafts in `out`


class Runner:
    """Runs steps in a plan's programs, each compiled when it is first needed unless `warm_up` came before.

    The model's weights are used in place, as `programs.functions.weights`; state is allocated here.
    """

    body_weights: list[Any]  # as each program takes them
    head_weights: list[Any]
    state: DeviceState

    def __init__(self, programs: Programs, copies: Mapping[int, jax.Array] | None = None):
        """copies: as those of `share_weights`."""
        self.programs = programs
        self.config: ResolvedConfig = programs.config
        self.has_weights: bool = True
        self.share_weights(copies)
        mesh = programs.functions.mesh
        self._alone = mesh is None or not spans_hosts(mesh)  # its devices are all of this process
        self._on_cpu = jax.default_backend() == "cpu"
        self.score_rows: int = programs.score_rows
        self.num_weight_updates: int = 0
        self._no_masks = functools.cache(self._make_no_masks)
        if self._on_cpu:
            host_memory.keep_freed()
        self.allocate()

    def share_weights(self, copies: Mapping[int, jax.Array] | None = None) -> None:
        """Takes the weights as they are in `programs.functions.weights`. copies: {number: weight} of those that the head takes in
        their place."""
        functions = self.programs.functions
        self.body_weights = [functions.weights[i] for i in functions.body_indices]
        self.head_weights = [(copies or {}).get(i, functions.weights[i]) for i in functions.head_indices]
        if (proposer := self.programs.proposer) is not None:
            own = [*proposer.weights, *(functions.weights[i] for i in proposer.shared)]
            self.body_weights += own if isinstance(proposer, BodyReader) else []
            self.head_weights += own

    def drop_weights(self) -> None:
        """Lets go of the weights, but for those in `programs.functions.weights`."""
        self.body_weights, self.head_weights = [], []

    def allocate(self) -> None:
        """State as new."""
        self.state = new_state(self.programs.state, self.programs.proposer)

    def free(self) -> None:
        """Frees the state's memory."""
        for array in jax.tree.leaves(self.state):
            array.delete()

    def reset(self) -> None:
        """State as new: a step that broke off may have consumed some of it (donated buffers) or left an error in its place."""
        self.free()
        self.allocate()

    def set_weights(self, weights: Iterable[Any]) -> None:
        """New weights of the same shapes and dtypes, in the order of `functions.paths`. Each old one is let go as the next comes,
        so that what is converted on the way is never held twice as a whole."""
        held = self.programs.functions.weights
        self.drop_weights()
        self.num_weight_updates += 1
        self.has_weights = False  # until all have come
        for i, weight in enumerate(weights):
            held[i] = weight
        self.share_weights()
        self.has_weights = True

    def num_deleted_weights(self) -> int:
        """Weights whose buffers are gone, because their owner donated or deleted them."""
        return sum(isinstance(x, jax.Array) and x.is_deleted() for x in self.programs.functions.weights)

    def sleep(self, *, keep_weights: bool, parts: Collection[str] = SLEEP_PARTS) -> None:
        """Puts these parts to sleep, which are awake. kv_cache: frees the KV pages and the rest of the state. weights: lets go of
        them; they move to the host's memory or are gone. Those of a proposer move there in any case: nobody brings others."""
        if "weights" in parts:
            if (proposer := self.programs.proposer) is not None and isinstance(proposer.weights, list):
                proposer.weights[:] = map(to_host, proposer.weights)
            keep_weights = keep_weights and self.has_weights
            held = self.programs.functions.weights
            held[:] = [to_host(weight) if keep_weights else None for weight in held]
            self.has_weights = keep_weights
            self.drop_weights()
        if "kv_cache" in parts:
            self.free()
        if self._on_cpu:
            host_memory.give_back()

    def wake_up(self, parts: Collection[str] = SLEEP_PARTS) -> None:
        """Wakes these parts, which sleep: state as new, and the weights on the device again, if there are any."""
        if "weights" in parts:
            self._wake_weights()
        if "kv_cache" in parts:
            self.allocate()

    def _wake_weights(self) -> None:
        held = self.programs.functions.weights
        if (proposer := self.programs.proposer) is not None and isinstance(proposer.weights, list):
            proposer.weights[:] = map(to_device, proposer.weights, proposer.abstract)
        if self.has_weights:
            for i, weight in enumerate(held):
                held[i] = to_device(weight, self.programs.functions.abstract[i])
            self.share_weights()

    def warm_up(self, progress: Callable[[list], Iterable] = iter) -> None:
        """Compiles every program of the plan, then runs each on a step of nothing: once on a CPU, three times on a GPU, where a new
        program evicts live CUDA graphs and a program's first run skips its own."""
        warm_up(self, progress)

    def run_beside_steps(self) -> None:
        """Runs the programs that not every step has, on nothing: the state's update, and scoring where heads are."""
        self._update_rows(np.full((1, 3), (self.config.scheduler.max_num_seqs, 0, 0), np.int32), [])
        if self.programs.functions.is_last:
            np.asarray(self._score(np.zeros(1 + 2 * self.score_rows, np.int32)))
        if "put" in self.programs.keys:
            self.put_pages([], np.asarray(self.take_pages([])))

    def run_empty_steps(self, keys: Sequence[ProgramKey]) -> Iterator[StepHandle]:
        """Dispatches steps of nothing, in which each of the bodies and heads of `keys` runs: a program's first run takes longer."""
        return empty_steps(self, keys)

    def dispatch(self, inputs: StepInputs) -> StepHandle:
        """Enqueues a whole step that no grammar constrains."""
        return self.dispatch_head(self.dispatch_body(inputs))

    def dispatch_body(self, inputs: StepInputs) -> BodyHandle:
        """Enqueues a step's body and returns at once; it runs after all that was dispatched before it. Its head comes next."""
        return BodyHandle(inputs, self.run_body(inputs))

    def run_body(self, inputs: StepInputs, *hidden: jax.Array) -> Any:
        """Enqueues a body: HeadInputs, or of a stage before a pipeline's last one hidden rows [T, D]. hidden: those of the stage
        before, if there is one."""
        if len(inputs.extra_page_updates) or inputs.edit_rows:
            self._update_rows(inputs.extra_page_updates, inputs.edit_rows)
        key, weights = inputs.bucket, self.body_weights
        if not inputs.is_read:
            key, weights = RestBody(inputs.bucket), weights[: len(self.programs.functions.body_indices)]
        self.state, out = self.programs.get(key)(weights, self.state, inputs.packed, *hidden)
        return out

    def dispatch_head(self, body: BodyHandle, allowed: np.ndarray | None = None) -> StepHandle:
        """Enqueues the head of the body that was dispatched last, if any sequence samples, and the scoring of its prompts.

        allowed: i32[>= inputs.head_rows, mask words], the tokens that grammars allow; None where there are none. The array must
          stay as it is until the step is fetched.
        """
        inputs, out, num_drafts = body.inputs, None, 0
        assert body.head_inputs is not None
        if inputs.head_rows:
            masks = self._no_masks(inputs.head_rows) if allowed is None else self._masks(allowed[: inputs.head_rows])
            plain = inputs.head_rows, inputs.with_logprobs
            head = self.programs.get(plain if inputs.proposes else RestHead(inputs.head_rows))
            if inputs.proposes and (proposer := self.programs.proposer) is not None:
                num_drafts = proposer.num_drafts
            rows, out = head(self.head_weights, self.state.rows, body.head_inputs, masks)
            self.state = replace(self.state, rows=rows)
            self._start_fetching(out)
        scored = [self._score(spans) for spans in inputs.score_spans]
        done = body.head_inputs.hidden if out is None else out
        return StepHandle(out, scored, done, inputs.num_samples, num_drafts=num_drafts)

    def _score(self, spans: np.ndarray) -> jax.Array:
        scored = self.programs.get("score")(self.head_weights, self.state.step_hidden, spans)
        self._start_fetching(scored)
        return scored

    def _start_fetching(self, out: jax.Array) -> None:
        if not self._on_cpu:  # where `out` is host memory already, and asking costs 50 us
            out.copy_to_host_async()

    def _masks(self, allowed: np.ndarray) -> Masks:
        missing = self.programs.num_mask_words - allowed.shape[1]  # of a vocabulary that is padded for several devices
        if missing:
            allowed = np.pad(allowed, ((0, 0), (0, missing)))
        masks = Masks(allowed, np.True_)  # pyright: ignore[reportArgumentType]
        if self._alone:
            return masks
        return jax.tree.map(to_device, masks, self.programs.spec((len(allowed), False)).args[-1])

    def _make_no_masks(self, rows: int) -> Masks:
        """What a head of so many rows takes where no grammar is: on the device once and for all."""
        masks = Masks(np.zeros((rows, self.programs.num_mask_words), np.int32), np.False_)  # pyright: ignore[reportArgumentType]
        return jax.tree.map(to_device, masks, self.programs.spec((rows, False)).args[-1])

    def _update_rows(self, page_updates: np.ndarray, edit_rows: Sequence[np.ndarray]) -> None:
        """page_updates i32[m, 3]: (row, column, page); as many calls of the update program as either list takes."""
        rows = self.state.rows
        for i in range(max(-(-len(page_updates) // UPDATE_BATCH), len(edit_rows))):
            part = page_updates[i * UPDATE_BATCH : (i + 1) * UPDATE_BATCH]
            batch = np.full((UPDATE_BATCH, 3), (self.config.scheduler.max_num_seqs, 0, 0), np.int32)
            batch[: len(part)] = part
            row = edit_rows[i] if i < len(edit_rows) else self.programs.edit_layout.nothing
            rows = self.programs.get("update")(rows, batch, row)
        self.state = replace(self.state, rows=rows)

    def fetch(self, handle: StepHandle) -> SampledRows | None:
        """Waits for a step and returns its sampled rows; None where no sequence sampled."""
        return fetch_rows(handle)

    @functools.cached_property
    def _kv_heads(self) -> tuple[Layout, Layout]:
        """How KV on its way is cut over all devices, and over those of one group."""
        shards = self.programs.functions.shards
        return (Layout(), Layout()) if shards is None else (shards.kv_heads(HEADS), shards.kv_heads(HEADS, of_group=True))

    @functools.cached_property
    def _put_form(self) -> jax.ShapeDtypeStruct:
        return self.programs.spec("put").args[-1]

    def take_pages(self, page_ids: Sequence[int], group: int = 0) -> TakenPages:
        """[TRANSFER_PAGES, *PageLayout.shape]: the KV of at most so many pages, as the steps dispatched so far leave it, on its way
        to the host. The pages may be used for other tokens at once. group: of devices, whose pages they are."""
        kv, num_groups = self.programs.get("take")(self.state.kv_pages, padded_ids(page_ids, 0)), self.config.scheduler.num_groups
        parts = [kv] if num_groups == 1 else parts_of_group(kv, group, num_groups)
        for part in parts:
            self._start_fetching(part)
        return TakenPages(parts, self._kv_heads[1])

    def put_pages(
        self,
        page_ids: Sequence[int],  # distinct
        kv: np.ndarray,  # [TRANSFER_PAGES, *PageLayout.shape], not to be changed any more
        group: int = 0,
    ) -> None:
        """Writes KV into at most so many pages, for the steps that are dispatched from now on. group: as `take_pages`."""
        num_pages = self.config.cache.num_pages
        ids = np.full((self.config.scheduler.num_groups, TRANSFER_PAGES), num_pages, np.int32)
        ids[group] = padded_ids(page_ids, num_pages)
        cut: Any = self._kv_heads[0].cut(kv)
        if not self._alone:
            cut = to_device(cut, self._put_form)
        self.state = replace(self.state, kv_pages=self.programs.get("put")(self.state.kv_pages, ids.reshape(-1), cut))

    @staticmethod
    def fetch_scores(handle: StepHandle) -> ScoredRows:
        """Waits for the rows that a step scored; those of all batches in order, the last one's padding included."""
        return unpack_scored(np.concatenate([np.asarray(x) for x in handle.scored]))


def fetch_rows(handle: StepHandle) -> SampledRows | None:
    """As `Runner.fetch`."""
    if handle.out is None:
        handle.done.block_until_ready()
        return None
    return unpack_sampled(np.asarray(handle.out)[: handle.num_samples], handle.num_drafts)


class WarmsUp(Protocol):
    """What a warm-up needs of a runner, whose stages and processes may be one or several."""

    programs: Any  # Programs, or PipelinePrograms

    def dispatch(self, inputs: StepInputs) -> StepHandle:
        """Enqueues a whole step that no grammar constrains."""
        ...

    def run_beside_steps(self) -> None:
        """Runs the programs that not every step has, on nothing."""
        ...

    def fetch(self, handle: StepHandle) -> SampledRows | None:
        """Waits for a step."""
        ...


def warm_up(runner: WarmsUp, progress: Callable[[list], Iterable]) -> None:
    """As `Runner.warm_up`."""
    keys = runner.programs.keys
    for key in progress(keys):
        runner.programs.get(key)
    for _ in range(3 if jax.default_backend() == "gpu" else 1):
        runner.run_beside_steps()
        for handle in empty_steps(runner, keys):
            runner.fetch(handle)


def empty_steps(runner: WarmsUp, keys: Sequence[ProgramKey]) -> Iterator[StepHandle]:
    """As `Runner.run_empty_steps`."""
    buckets = [k for k in keys if isinstance(k, Bucket | RestBody)]
    heads = [k for k in keys if isinstance(k, tuple | RestHead)]
    for i in range(max(len(buckets), len(heads))):
        bucket, head = buckets[i % len(buckets)], heads[i % len(heads)]
        rows, with_logprobs = (head.rows, False) if isinstance(head, RestHead) else head
        is_read = not isinstance(bucket, RestBody)
        layout = runner.programs.layouts[bucket if isinstance(bucket, Bucket) else bucket.bucket]
        inputs = StepInputs.padding(layout, rows, with_logprobs)
        yield runner.dispatch(replace(inputs, proposes=not isinstance(head, RestHead), is_read=is_read))

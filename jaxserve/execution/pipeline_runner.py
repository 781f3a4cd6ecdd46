"""Runs steps on a pipeline: micro-batches that go down its stages one behind the other.

Owns what passes between the stages, and which of them this process runs: those of which it has a device. A stage is a Runner of its
own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxserve.batching.layout import StepInputs
from jaxserve.execution.page_transfer import HEADS, TakenPages, TakenStages
from jaxserve.execution.pipeline_programs import AnyPrograms, PipelinePrograms
from jaxserve.execution.placing import SLEEP_PARTS, to_device, to_host
from jaxserve.execution.programs import ProgramKey
from jaxserve.execution.runner import BodyHandle, Runner, StepHandle, empty_steps, fetch_rows, warm_up
from jaxserve.execution.stage_links import StageLink
from jaxserve.execution.stage_reports import Result, StageReports
from jaxserve.hosts.group import HostGroup
from jaxserve.models.shards import ModelShards
from jaxserve.sampling.rows import SampledRows, ScoredRows


class PipelineRunner:
    """As `Runner`, on the stages of a pipeline.

    A step's upload brings the tokens that the last stage has sampled. It may therefore only hold requests whose last step was
    fetched.

    Of several processes each runs the same commands, and dispatches the programs of its own stages. hosts: their group. What stages
    make that host 0 has no device of is reported to it.
    """

    def __init__(self, programs: PipelinePrograms, hosts: HostGroup | None = None):
        self.programs = programs
        self.score_rows: int = programs.score_rows
        self.has_weights: bool = True
        self.num_weight_updates: int = 0
        self._reports = None if hosts is None else StageReports(hosts, programs.meshes)
        self._to_head = StageLink(programs.meshes[0], programs.meshes[-1])
        self._num_steps = self._num_takes = 0
        for link in (*programs.links, self._to_head):
            if link.is_here:
                link.connect()
        copies = self._copies()
        self._all: list[Runner | None] = [  # None: a stage of other processes
            Runner(stage, copies) if programs.is_here(i) else None for i, stage in enumerate(programs.stages)
        ]
        self.stages: list[Runner] = [stage for stage in self._all if stage is not None]

    # -- steps

    def dispatch(self, inputs: StepInputs) -> StepHandle:
        """Enqueues a whole step that no grammar constrains."""
        return self.dispatch_head(self.dispatch_body(inputs))

    def dispatch_body(self, inputs: StepInputs) -> BodyHandle:
        """Enqueues a step's body on every stage and returns at once. Its head comes next."""
        self._num_steps += 1
        like, outs = self.programs.hidden(inputs.bucket), []
        for i, stage in enumerate(self._all):
            link = self.programs.links[i - 1] if i else None
            hidden: Any = (link.send(outs[-1], like),) if link is not None and link.is_here else ()
            outs.append(None if stage is None else stage.run_body(inputs, *hidden))
        return BodyHandle(inputs, outs[-1], tuple(outs[:-1]))

    def dispatch_head(self, body: BodyHandle, allowed: np.ndarray | None = None) -> StepHandle:
        """As `Runner.dispatch_head`, on the last stage."""
        last = self._all[-1]
        handle = None if last is None else last.dispatch_head(body, allowed)
        return self._with_reports(body, handle)

    def _with_reports(self, body: BodyHandle, handle: StepHandle | None) -> StepHandle:
        """The whole step. handle: of the last stage, if it is here. What is not comes by reports."""
        step, inputs, end = self._num_steps, body.inputs, len(self._all) - 1
        stages: list[Result | None] = [*body.passed, None if handle is None else handle.done]
        if self._reports is not None:
            for i, out in enumerate(body.passed):
                if out is not None:
                    self._reports.report(step, i, [out], with_values=False)
                elif found := self._reports.expected(step, i, 1):
                    stages[i] = found[0]
            if handle is not None:
                self._reports.report(step, end, [handle.done, *handle.scored], with_values=True)
            elif found := self._reports.expected(step, end, 1 + len(inputs.score_spans)):
                stages[end], *scored = found
                handle = StepHandle(found[0] if inputs.head_rows else None, scored, found[0], inputs.num_samples)
        here = tuple(stage for stage in stages if stage is not None)
        if handle is None:  # nobody fetches it here
            handle = StepHandle(None, [], here[-1], 0)
        return replace(handle, stages=here)

    def fetch(self, handle: StepHandle) -> SampledRows | None:
        """As `Runner.fetch`. Of a process that is not host 0 and has no device of the last stage: None."""
        return fetch_rows(handle)

    @staticmethod
    def fetch_scores(handle: StepHandle) -> ScoredRows:
        """As `Runner.fetch_scores`."""
        return Runner.fetch_scores(handle)

    def take_pages(self, page_ids: Sequence[int], group: int = 0) -> TakenStages:
        """As `Runner.take_pages`, of every stage. Of a process that is not host 0 what is here."""
        self._num_takes += 1
        taken: list[TakenPages] = []
        for i, stage in enumerate(self._all):
            if stage is not None:
                taken.append(stage.take_pages(page_ids, group))
                if self._reports is not None:
                    self._reports.report(-self._num_takes, i, taken[-1].parts, with_values=True)
            elif self._reports is not None and (found := self._reports.expected(-self._num_takes, i, 1)):
                taken.append(TakenPages(found, self._shards.kv_heads(HEADS, of_group=True)))
        return TakenStages(taken)

    def put_pages(self, page_ids: Sequence[int], kv: np.ndarray, group: int = 0) -> None:
        """As `Runner.put_pages`, of every stage that is here."""
        for stage, layers in zip(self._all, self._shards.layers, strict=True):
            if stage is not None:
                stage.put_pages(page_ids, np.ascontiguousarray(kv[:, layers.start : layers.stop]), group)

    @property
    def _shards(self) -> ModelShards:
        shards = self.programs.functions.shards
        assert shards is not None, "a pipeline's model is cut"
        return shards

    def warm_up(self, progress: Callable[[list], Iterable] = iter) -> None:
        """As `Runner.warm_up`."""
        warm_up(self, progress)

    def run_beside_steps(self) -> None:
        """As `Runner.run_beside_steps`, on every stage."""
        for stage in self.stages:
            stage.run_beside_steps()

    def run_empty_steps(self, keys: Sequence[ProgramKey]) -> Iterator[StepHandle]:
        """As `Runner.run_empty_steps`."""
        return empty_steps(self, keys)

    # -- weights and memory

    def _copies(self) -> dict[int, jax.Array]:
        """{number: weight} of those of the first stage that the head takes too, on the last one: a tied embedding."""
        functions, last, copies = self.programs.functions, self.programs.stages[-1].functions, {}
        for i in last.head_indices:
            if functions.abstract[i].sharding != last.abstract[i].sharding and self._to_head.is_here:
                weight = functions.weights[i]
                copies[i] = self._to_head.send(weight if self.programs.is_here(0) else None, functions.abstract[i])
        return copies

    def _share_weights(self) -> None:
        copies = self._copies()
        for stage in self.stages:
            stage.share_weights(copies)

    def _free_weights(self) -> None:
        for stage in self.stages:
            stage.drop_weights()

    def reset(self) -> None:
        """As `Runner.reset`, on every stage."""
        for stage in self.stages:
            stage.reset()

    def set_weights(self, weights: Iterable[Any]) -> None:
        """As `Runner.set_weights`; the list of weights is that of all stages."""
        self._free_weights()
        self.num_weight_updates += 1
        self.has_weights = False  # until all have come
        held = self.programs.functions.weights
        for i, weight in enumerate(weights):
            held[i] = weight
        self._share_weights()
        self.has_weights = True

    def num_deleted_weights(self) -> int:
        """As `Runner.num_deleted_weights`."""
        return self.stages[0].num_deleted_weights()

    def sleep(self, *, keep_weights: bool, parts: Collection[str] = SLEEP_PARTS) -> None:
        """As `Runner.sleep`."""
        if "weights" in parts:
            keep_weights = keep_weights and self.has_weights
            held = self.programs.functions.weights
            held[:] = [to_host(weight) if keep_weights else None for weight in held]
            self.has_weights = keep_weights
            self._free_weights()
        if "kv_cache" in parts:
            for stage in self.stages:
                stage.free()

    def wake_up(self, parts: Collection[str] = SLEEP_PARTS) -> None:
        """As `Runner.wake_up`."""
        functions = self.programs.functions
        if "weights" in parts and self.has_weights:
            for i, weight in enumerate(functions.weights):
                functions.weights[i] = to_device(weight, functions.abstract[i])
            self._share_weights()
        if "kv_cache" in parts:
            for stage in self.stages:
                stage.allocate()


def make_runner(programs: AnyPrograms, hosts: HostGroup | None = None) -> Runner | PipelineRunner:
    """The runner of one stage, or of several. hosts: the group of processes that share its devices."""
    return PipelineRunner(programs, hosts) if isinstance(programs, PipelinePrograms) else Runner(programs)

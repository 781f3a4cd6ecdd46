"""Runs steps on a pipeline: micro-batches that go down its stages one behind the other.

Owns what passes between the stages: hidden rows from each to the next, and sampled tokens from the last to the first, both from
device to device. A stage is a Runner of its own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.batching.layout import StepInputs
from jaxserve.execution.device_state import replace_rows
from jaxserve.execution.mesh_programs import REPLICATED
from jaxserve.execution.pipeline_programs import AnyPrograms, PipelinePrograms
from jaxserve.execution.placing import to_device
from jaxserve.execution.programs import ProgramKey
from jaxserve.execution.runner import BodyHandle, Runner, StepHandle, empty_steps, warm_up
from jaxserve.sampling.rows import SampledRows, ScoredRows


class PipelineRunner:
    """As `Runner`, on the stages of a pipeline.

    The first stage embeds the tokens that the last one has sampled. It learns them when a step is fetched, from a copy on its own
    devices that was under way since the step's head. A step may therefore only hold requests whose last step was fetched. Were the
    copy given to the first stage at once, its next body would wait for the last stage, and the stages would take turns.
    """

    def __init__(self, programs: PipelinePrograms):
        self.programs = programs
        self.stages: list[Runner] = [Runner(stage) for stage in programs.stages]
        self.score_rows: int = programs.score_rows
        meshes = [stage.functions.mesh for stage in programs.stages]
        self._shardings = [NamedSharding(mesh, REPLICATED) for mesh in meshes if mesh is not None]

    @property
    def _last(self) -> Runner:
        return self.stages[-1]

    # -- steps

    def dispatch(self, inputs: StepInputs) -> StepHandle:
        """Enqueues a whole step that no grammar constrains."""
        return self.dispatch_head(self.dispatch_body(inputs))

    def dispatch_body(self, inputs: StepInputs) -> BodyHandle:
        """Enqueues a step's body on every stage and returns at once. Its head comes next."""
        out, passed = self.stages[0].run_body(inputs), []
        for stage, sharding in zip(self.stages[1:], self._shardings[1:], strict=True):
            passed.append(out)
            out = stage.run_body(inputs, jax.device_put(out, sharding))
        return BodyHandle(inputs, out, tuple(passed))

    def dispatch_head(self, body: BodyHandle, allowed: np.ndarray | None = None) -> StepHandle:
        """As `Runner.dispatch_head`, on the last stage. The tokens set off for the first one."""
        handle = self._last.dispatch_head(body, allowed)
        tokens = None
        if handle.out is not None:
            tokens = jax.device_put(self._last.state.rows.last_tokens, self._shardings[0])
        return replace(handle, last_tokens=tokens, stages=(*body.passed, handle.done))

    def fetch(self, handle: StepHandle) -> SampledRows | None:
        """Waits for a step and returns its sampled rows; None where no sequence sampled. Steps are fetched in order."""
        sampled = self._last.fetch(handle)
        if handle.last_tokens is not None:
            first = self.stages[0]
            first.state = replace_rows(first.state, last_tokens=handle.last_tokens)
        return sampled

    def fetch_scores(self, handle: StepHandle) -> ScoredRows:
        """As `Runner.fetch_scores`."""
        return self._last.fetch_scores(handle)

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

    @property
    def has_weights(self) -> bool:
        """False after `sleep` without them, until `set_weights`."""
        return self._last.has_weights

    @property
    def weights_version(self) -> int:
        """How often the weights were set."""
        return self._last.weights_version

    def reset(self) -> None:
        """As `Runner.reset`, on every stage."""
        for stage in self.stages:
            stage.reset()

    def set_weights(self, weights: Iterable[Any]) -> None:
        """As `Runner.set_weights`."""
        for stage in self.stages[:-1]:
            stage.drop_weights()
        self._last.set_weights(weights)  # the list of weights is that of all stages
        for stage in self.stages[:-1]:
            stage.share_weights()

    def num_deleted_weights(self) -> int:
        """As `Runner.num_deleted_weights`."""
        return self._last.num_deleted_weights()

    def sleep(self, *, keep_weights: bool) -> None:
        """As `Runner.sleep`."""
        for stage in self.stages[:-1]:
            stage.drop_weights()
            stage.free()
        self._last.sleep(keep_weights=keep_weights)

    def wake_up(self) -> None:
        """As `Runner.wake_up`."""
        functions = self.programs.functions
        if self.has_weights:
            for i, weight in enumerate(functions.weights):
                functions.weights[i] = to_device(weight, functions.abstract[i])
        for stage in self.stages:
            if self.has_weights:
                stage.share_weights()
            stage.allocate()


def make_runner(programs: AnyPrograms) -> Runner | PipelineRunner:
    """The runner of one stage, or of several."""
    return PipelineRunner(programs) if isinstance(programs, PipelinePrograms) else Runner(programs)

"""The programs of a pipeline: those of each stage, under one key.

Owns which stage has which program. What a stage's programs are is programs.py's.
"""

from __future__ import annotations

from typing import Any

from jaxserve.batching.layout import StepLayout
from jaxserve.buckets.plan import Bucket
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.execution.programs import ProgramKey, Programs
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.sampling.edit_rows import EditLayout
from jaxserve.speculative.proposer import Proposer


class PipelinePrograms:
    """As `Programs`, for a model whose layers are on several stages. A key stands for the programs of all stages that have it; it
    is compiled when all of them are."""

    def __init__(self, functions: ModelFunctions, config: ResolvedConfig):
        self.functions = functions
        self.config = config
        self.stages: list[Programs] = [Programs(stage, config) for stage in functions.stages]
        last = self.stages[-1]
        self.layouts: dict[Bucket, StepLayout] = last.layouts
        self.proposer: Proposer | None = last.proposer
        self.edit_layout: EditLayout = last.edit_layout

    @property
    def keys(self) -> list[ProgramKey]:
        """Every program of the plan, which the last stage has."""
        return self.stages[-1].keys

    def has(self, key: ProgramKey) -> bool:
        """Whether this program is compiled, for every stage that has it."""
        return all(stage.has(key) for stage in self._with(key))

    def get(self, key: ProgramKey) -> tuple[Any, ...]:
        """The program of each stage that has it, in the order of the stages; compiled if it is not yet."""
        return tuple(stage.get(key) for stage in self._with(key))

    def _with(self, key: ProgramKey) -> list[Programs]:
        every = isinstance(key, Bucket) or key == "update"
        return self.stages if every else self.stages[-1:]

    @property
    def num_compiled(self) -> int:
        """Keys whose programs are compiled."""
        return sum(map(self.has, self.keys))

    @property
    def num_compiling(self) -> int:
        """As `Programs.num_compiling`, of all stages."""
        return sum(stage.num_compiling for stage in self.stages)

    @property
    def score_rows(self) -> int:
        """As `Programs.score_rows`."""
        return self.stages[-1].score_rows

    @property
    def draft_bytes(self) -> int:
        """As `Programs.draft_bytes`."""
        return self.stages[-1].draft_bytes

    def largest_temp_bytes(self) -> int:
        """As `Programs.largest_temp_bytes`, of the stage that needs most."""
        return max(stage.largest_temp_bytes() for stage in self.stages)


AnyPrograms = Programs | PipelinePrograms


def make_programs(functions: ModelFunctions, config: ResolvedConfig) -> AnyPrograms:
    """The programs of a model on one stage, or on several."""
    return Programs(functions, config) if len(functions.stages) == 1 else PipelinePrograms(functions, config)

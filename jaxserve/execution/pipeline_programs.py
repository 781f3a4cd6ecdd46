"""The programs of a pipeline: those of each stage, under one key.

Owns which stage has which program, and that a process compiles those of the stages alone of which it has a device. What a stage's
programs are is programs.py's.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.batching.layout import StepLayout
from jaxserve.buckets.plan import Bucket
from jaxserve.execution.model_functions import ModelFunctions
from jaxserve.execution.programs import ProgramKey, Programs
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.execution.stage_links import StageLink
from jaxserve.parallel.mesh import is_here
from jaxserve.sampling.edit_rows import EditLayout
from jaxserve.speculative.proposer import Proposer


class PipelinePrograms:
    """As `Programs`, for a model whose layers are on several stages. A key stands for the programs of all stages that have it, on
    devices of this process, and of what passes between them; it is compiled when all of them are."""

    def __init__(self, functions: ModelFunctions, config: ResolvedConfig):
        self.functions = functions
        self.config = config
        self.stages: list[Programs] = [Programs(stage, config) for stage in functions.stages]
        self.meshes: list[Mesh] = [stage.mesh for stage in functions.stages if stage.mesh is not None]
        self.links: list[StageLink] = list(map(StageLink, self.meshes, self.meshes[1:]))  # behind each stage but the last
        last = self.stages[-1]
        self.layouts: dict[Bucket, StepLayout] = last.layouts
        self.proposer: Proposer | None = last.proposer
        self.edit_layout: EditLayout = last.edit_layout

    @property
    def keys(self) -> list[ProgramKey]:
        """Every program of the plan, which the last stage has."""
        return self.stages[-1].keys

    def has(self, key: ProgramKey) -> bool:
        """Whether this program is compiled, for every stage that has it here."""
        return all(stage.has(key) for stage in self._with(key)) and all(link.has(self.hidden(key)) for link in self._links_of(key))

    def get(self, key: ProgramKey) -> tuple[Any, ...]:
        """The program of each stage that has it here, in the order of the stages; compiled if it is not yet."""
        self._compile_links(key)
        return tuple(stage.get(key) for stage in self._with(key))

    def compile(self, key: ProgramKey) -> None:
        """As `Programs.compile`, of every stage that has it here."""
        self._compile_links(key)
        for stage in self._with(key):
            stage.compile(key)

    def _compile_links(self, key: ProgramKey) -> None:
        for link in self._links_of(key):
            link.compile(self.hidden(key))

    def is_here(self, stage: int) -> bool:
        """Whether this process has a device of the stage."""
        return is_here(self.meshes[stage])

    def hidden(self, bucket: Any) -> jax.ShapeDtypeStruct:
        """Abstract, what a stage hands to the next in this bucket: [T, D]."""
        return jax.ShapeDtypeStruct((bucket.tokens, self.config.model.hidden_size), self.config.pages.dtype)

    def _with(self, key: ProgramKey) -> list[Programs]:
        every = isinstance(key, Bucket) or key in ("update", "take", "put")
        stages = [stage for i, stage in enumerate(self.stages) if self.is_here(i)]
        return stages if every else [stage for stage in stages if stage.functions.is_last]

    def _links_of(self, key: ProgramKey) -> list[StageLink]:
        return [link for link in self.links if link.is_here] if isinstance(key, Bucket) else []

    @property
    def num_compiled(self) -> int:
        """Keys whose programs are compiled."""
        return sum(map(self.has, self.keys))

    @property
    def num_awaited(self) -> int:
        """As `Programs.num_awaited`, of all stages."""
        return sum(stage.num_awaited for stage in self.stages)

    @property
    def score_rows(self) -> int:
        """As `Programs.score_rows`."""
        return self.stages[-1].score_rows

    @property
    def draft_bytes(self) -> int:
        """As `Programs.draft_bytes`."""
        return self.stages[-1].draft_bytes

    def largest_temp_bytes(self) -> int:
        """As `Programs.largest_temp_bytes`, of the stage here that needs most."""
        return max(stage.largest_temp_bytes() for i, stage in enumerate(self.stages) if self.is_here(i))


AnyPrograms = Programs | PipelinePrograms


def make_programs(functions: ModelFunctions, config: ResolvedConfig) -> AnyPrograms:
    """The programs of a model on one stage, or on several."""
    return Programs(functions, config) if len(functions.stages) == 1 else PipelinePrograms(functions, config)

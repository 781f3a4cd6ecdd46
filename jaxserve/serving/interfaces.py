"""What serving needs from a model: `LLM` and `Engine` have it, and so has whatever stands in for them in a benchmark or a test.

Owns the protocols alone. Members are read-only here, so that a stand-in may have a narrower type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.engine.stats import EngineStats
from jaxserve.hosts.pulse import HostLostError
from jaxserve.request import EngineOutput, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import CacheConfig, SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.schedule import SchedulerStats
from jaxserve.serving.messages import LoopStats
from jaxserve.structured.grammars import Grammar, GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer


class ServedModel(Protocol):
    """The part of a `ModelConfig` that serving reads."""

    @property
    def vocab_size(self) -> int: ...


class ServedConfig(Protocol):
    """The part of a `ResolvedConfig` that serving reads."""

    @property
    def engine(self) -> EngineConfig: ...

    @property
    def model(self) -> ServedModel: ...

    @property
    def scheduler(self) -> SchedulerConfig: ...

    @property
    def cache(self) -> CacheConfig: ...


class SchedulerCounts(Protocol):
    """The part of a `Scheduler` that serving reads."""

    def stats(self) -> SchedulerStats: ...


class ServedEngine(Protocol):
    """The part of an `Engine` that `EngineLoop` and `AsyncLLM` use. Each method is documented at `Engine`."""

    @property
    def config(self) -> ServedConfig: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def scheduler(self) -> SchedulerCounts: ...

    @property
    def pools(self) -> Sequence[PagePool]: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_programs_left(self) -> int: ...

    @property
    def is_asleep(self) -> bool: ...

    @property
    def qualification(self) -> str | None: ...

    @property
    def weight_version(self) -> str: ...

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
        stops_at_text: bool = False,
    ) -> list[Request]: ...

    def abort(self, request_ids: str | Iterable[str]) -> None: ...

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None: ...

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> list[EngineOutput]: ...

    def on_compiled(self, call: Callable[[], None]) -> None: ...

    def on_lost(self, call: Callable[[HostLostError], None]) -> None: ...

    def reset_prefix_cache(self, reset_external: bool = False) -> bool: ...

    def read_weights(self, path: str | Path) -> Any: ...

    def update_params(self, weights: Any, /, in_flight: str = "refuse", weight_version: str | None = None) -> None: ...

    def update_weight_version(self, new_version: str) -> None: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None: ...

    def close(self) -> None: ...


class DescribedEngine(Protocol):
    """What a `ServedEngine` is like."""

    @property
    def config(self) -> ServedConfig: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def qualification(self) -> str | None: ...


class DescribedLLM(Protocol):
    """What a `ServedLLM` is like: all that `AsyncLLM` needs where the engine is in another process."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def engine(self) -> DescribedEngine: ...

    def get_default_sampling_params(self) -> SamplingParams: ...


class EngineSide(Protocol):
    """What `AsyncLLM` talks to: an `EngineLoop`, or what stands in for one of another process."""

    def start(self) -> None: ...

    def send(self, command: Any, /) -> None: ...

    def stats(self) -> LoopStats: ...

    def join(self, timeout: float | None = None) -> bool: ...


class ServedLLM(Protocol):
    """The part of an `LLM` that `AsyncLLM` uses."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def engine(self) -> ServedEngine: ...

    @property
    def grammars(self) -> GrammarCompiler: ...

    def get_default_sampling_params(self) -> SamplingParams: ...

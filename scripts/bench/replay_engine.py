"""An engine without a model: every step gives each running request the next token of a fixed text. What is left is serving itself.

It stands in for `jaxserve.LLM` behind `AsyncLLM`, and for the engine behind its loop, with their real requests, pool and stats.
`jaxserve.serving.interfaces` says what these need; type checkers hold this to it wherever an `AsyncLLM` is made from it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.config import EngineConfig
from jaxserve.engine.stats import EngineStats
from jaxserve.hosts.pulse import HostLostError
from jaxserve.outputs import RequestMetrics
from jaxserve.request import EngineOutput, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import CacheConfig, SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.schedule import SchedulerStats
from jaxserve.structured.grammars import Grammar, GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer

FOX = "The quick brown fox jumps over the lazy dog. "


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """A token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_templates={"default": chat_template} if chat_template else None)


@dataclass(frozen=True)
class ReplayModel:
    """What is left of a model's config."""

    vocab_size: int


@dataclass(frozen=True)
class ReplayConfig:
    engine: EngineConfig
    model: ReplayModel
    scheduler: SchedulerConfig
    cache: CacheConfig


class ReplayScheduler:
    """Counts the requests of an engine that runs as many at a time as its limit says."""

    def __init__(self, engine: ReplayEngine):
        self._engine = engine

    def stats(self) -> SchedulerStats:
        num_requests, most = self._engine.num_requests, self._engine.config.scheduler.max_num_seqs
        return SchedulerStats(
            num_steps=self._engine.stats.num_steps,
            num_scheduled_tokens=0,
            num_preemptions=0,
            num_discarded_rows=0,
            num_queried_tokens=0,
            num_hit_tokens=0,
            num_running=min(num_requests, most),
            num_waiting=max(0, num_requests - most),
        )


class ReplayEngine:
    """A `ServedEngine`. text: token ids, repeated until max_tokens. step_seconds: what a device takes for a step; it begins the
    next when it has ended one, as with steps in flight, so that the host's work counts only where it takes longer."""

    config: ReplayConfig
    eos_token_ids: frozenset[int] = frozenset()
    scheduler: ReplayScheduler
    pool: PagePool
    stats: EngineStats
    is_asleep: bool = False
    num_programs_left: int = 0
    qualification: str | None = None
    weight_version: str = "0"

    def __init__(self, text: Sequence[int], max_num_seqs: int, step_seconds: float = 0.0):
        self._text, self._max_num_seqs, self._step_seconds = list(text), max_num_seqs, step_seconds
        self._step_end = 0.0  # in seconds of time.monotonic()
        self._requests: dict[str, Request] = {}
        self.config = ReplayConfig(
            EngineConfig(),
            ReplayModel(vocab_size=256),
            SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=2**20, max_num_batched_tokens=max_num_seqs),
            CacheConfig(page_size=16, num_pages=1),
        )
        self.stats, self.pools, self.scheduler = EngineStats(), [PagePool(1, 16)], ReplayScheduler(self)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

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
    ) -> list[Request]:
        """One sample whatever params.n says; a form of the output, a priority and a salt change nothing of a fixed text."""
        metrics = RequestMetrics(arrival_time=time.monotonic() if arrival is None else arrival)
        params = SamplingParams() if params is None else params
        request = Request(request_id, list(prompt_token_ids), params, parent_id=request_id, metrics=metrics)
        self._requests[request_id] = request
        return [request]

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Nothing is compiled."""

    def on_lost(self, call: Callable[[HostLostError], None]) -> None:
        """There are no other hosts."""

    def abort(self, request_ids: str | Iterable[str]) -> None:
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._requests.pop(request_id, None)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        self._requests.pop(request.request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[EngineOutput]:
        if self._step_seconds:
            now = time.monotonic()
            is_behind = now > self._step_end + self._step_seconds  # or had nothing to do
            self._step_end = (now if is_behind else self._step_end) + self._step_seconds
            time.sleep(self._step_end - now)
        self.stats.num_steps += 1
        outputs = []
        for request in list(itertools.islice(self._requests.values(), self._max_num_seqs)):
            token = self._text[request.num_output_tokens % len(self._text)]
            request.token_ids.append(token)
            ended = request.num_output_tokens >= (request.params.max_tokens or 16)
            outputs.append(EngineOutput(request, [token], finish_reason="length" if ended else None))
            if ended:
                del self._requests[request.request_id]
        self.stats.generated_tokens += len(outputs)
        return outputs

    def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        return True

    def read_weights(self, path: str | Path) -> NoReturn:
        raise RuntimeError(f"{path} is not read: an engine without a model has no weights")

    def update_params(self, params: Any, in_flight: str = "refuse", weight_version: str | None = None) -> NoReturn:
        raise RuntimeError("an engine without a model has no weights to update")

    def update_weight_version(self, new_version: str) -> NoReturn:
        raise RuntimeError("an engine without a model has no weights to name")

    def sleep(self, level: int = 1) -> NoReturn:
        raise RuntimeError("an engine without a model does not sleep")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """It is awake."""

    def close(self) -> None:
        self._requests.clear()


@dataclass(frozen=True)
class ReplayLLM:
    """A `ServedLLM`."""

    tokenizer: Tokenizer
    engine: ReplayEngine
    grammars: GrammarCompiler

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()


def replay_llm(max_num_seqs: int, step_seconds: float = 0.0, text: str = FOX, chat_template: str | None = None) -> ReplayLLM:
    """What `AsyncLLM` takes for an LLM. text: what every answer is, again and again."""
    tokenizer = byte_tokenizer(chat_template)
    engine = ReplayEngine(tokenizer.encode(text), max_num_seqs, step_seconds)
    return ReplayLLM(tokenizer, engine, GrammarCompiler(tokenizer, 256, engine.eos_token_ids))

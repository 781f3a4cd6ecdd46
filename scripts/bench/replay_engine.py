"""An engine without a model: every step gives each running request the next token of a fixed text. What is left is serving itself.

It stands in for `jaxserve.LLM` behind `AsyncLLM`, and for the engine behind its loop, with their real requests, pool and stats.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.engine.engine import EngineOutput, EngineStats
from jaxserve.outputs import RequestMetrics
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import CacheConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.schedule import SchedulerStats
from jaxserve.structured.grammars import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer

FOX = "The quick brown fox jumps over the lazy dog. "


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """A token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_templates={"default": chat_template} if chat_template else None)


class ReplayEngine:
    """`Engine`'s interface as `EngineLoop` uses it. step_seconds: least time of a step."""

    is_asleep = is_paused = False
    num_programs_left = 0

    def __init__(self, text: Sequence[int], max_num_seqs: int, step_seconds: float = 0.0):
        self._text, self._max_num_seqs, self._step_seconds = list(text), max_num_seqs, step_seconds
        self._requests: dict[str, Request] = {}
        self.stats, self.pool, self.eos_token_ids = EngineStats(), PagePool(1, 16), frozenset[int]()
        limits = SimpleNamespace(max_num_seqs=max_num_seqs, max_model_len=2**20, order="fcfs")
        cache = CacheConfig(page_size=16, num_pages=1)
        model, engine = SimpleNamespace(vocab_size=256), SimpleNamespace(dtype="auto", gpu_memory_utilization=0.0)
        self.config = SimpleNamespace(scheduler=limits, model=model, engine=engine, cache=cache)
        self.scheduler = SimpleNamespace(stats=self._scheduler_stats)

    def _scheduler_stats(self) -> SchedulerStats:
        counts = dict.fromkeys(
            ("num_scheduled_tokens", "num_preemptions", "num_discarded_rows", "num_queried_tokens", "num_hit_tokens"), 0
        )
        running = min(len(self._requests), self._max_num_seqs)
        waiting = len(self._requests) - running
        return SchedulerStats(num_steps=self.stats.num_steps, num_running=running, num_waiting=waiting, **counts)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, arrival: float, **_: Any
    ) -> list[Request]:
        metrics = RequestMetrics(arrival_time=arrival)
        request = Request(request_id, list(prompt_token_ids), params, parent_id=request_id, metrics=metrics)
        self._requests[request_id] = request
        return [request]

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Nothing is compiled."""

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        self._requests.pop(request.request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[EngineOutput]:
        if self._step_seconds:
            time.sleep(self._step_seconds)
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

    def close(self) -> None:
        self._requests.clear()


def replay_llm(max_num_seqs: int, step_seconds: float = 0.0, text: str = FOX, chat_template: str | None = None) -> Any:
    """What `AsyncLLM` takes for an LLM. text: what every answer is, again and again."""
    tokenizer = byte_tokenizer(chat_template)
    engine = ReplayEngine(tokenizer.encode(text), max_num_seqs, step_seconds)
    grammars = GrammarCompiler(tokenizer, 256, engine.eos_token_ids)
    return SimpleNamespace(tokenizer=tokenizer, engine=engine, grammars=grammars, get_default_sampling_params=SamplingParams)

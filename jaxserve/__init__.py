"""jaxserve: a JAX-native LLM inference engine. The public names, imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.buckets.plan import BucketPlan
    from jaxserve.config import EngineConfig
    from jaxserve.engine.beam_search import BeamSearchOutput, BeamSearchParams
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.outputs import EngineOutput
    from jaxserve.llm import LLM
    from jaxserve.request import CompletionOutput, Logprob, Request, RequestOutput, SamplingParams, ScoreOutput
    from jaxserve.structured import StructuredOutputsParams
    from jaxserve.text.tokenizer import Tokenizer

_HOME = {
    "LLM": "llm",
    "Engine": "engine.engine",
    "EngineOutput": "engine.outputs",
    "EngineConfig": "config",
    "BeamSearchOutput": "engine.beam_search",
    "BeamSearchParams": "engine.beam_search",
    "BucketPlan": "buckets.plan",
    "SamplingParams": "request",
    "Request": "request",
    "RequestOutput": "request",
    "CompletionOutput": "request",
    "Logprob": "request",
    "ScoreOutput": "request",
    "StructuredOutputsParams": "structured",
    "Tokenizer": "text.tokenizer",
}

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BucketPlan",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineOutput",
    "Logprob",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "Tokenizer",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(import_module(f"jaxserve.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

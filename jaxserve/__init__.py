"""jaxserve: a JAX-native LLM inference engine. The public names, imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.buckets.plan import BucketPlan
    from jaxserve.config import EngineConfig
    from jaxserve.engine.beam_search import BeamSearchOutput, BeamSearchParams
    from jaxserve.engine.engine import Engine
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput, ScoreOutput
    from jaxserve.request import EngineOutput, Request
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.structured_outputs import StructuredOutputsParams
    from jaxserve.text.tokenizer import Tokenizer

_HOME = {
    "LLM": "llm",
    "Engine": "engine.engine",
    "EngineOutput": "request",
    "EngineConfig": "config",
    "BeamSearchOutput": "engine.beam_search",
    "BeamSearchParams": "engine.beam_search",
    "BucketPlan": "buckets.plan",
    "SamplingParams": "sampling_params",
    "Request": "request",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "ScoreOutput": "outputs",
    "StructuredOutputsParams": "structured_outputs",
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

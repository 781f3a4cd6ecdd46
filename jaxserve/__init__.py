"""jaxserve: a JAX-native LLM inference engine. The public names, imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING

from jaxserve import moved

if TYPE_CHECKING:
    from jaxserve.buckets.plan import BucketPlan as BucketPlan
    from jaxserve.config import EngineConfig as EngineConfig
    from jaxserve.engine.beam_search import BeamSearchOutput as BeamSearchOutput
    from jaxserve.engine.beam_search import BeamSearchParams as BeamSearchParams
    from jaxserve.engine.engine import Engine as Engine
    from jaxserve.llm import LLM as LLM
    from jaxserve.models import named_leaves as named_leaves
    from jaxserve.models.config import ModelConfig as ModelConfig
    from jaxserve.models.decoder import Decoder as Decoder
    from jaxserve.models.loading import random_model as random_model
    from jaxserve.outputs import CompletionOutput as CompletionOutput
    from jaxserve.outputs import Logprob as Logprob
    from jaxserve.outputs import RequestOutput as RequestOutput
    from jaxserve.outputs import ScoreOutput as ScoreOutput
    from jaxserve.request import EngineOutput as EngineOutput
    from jaxserve.request import Request as Request
    from jaxserve.sampling_params import SamplingParams as SamplingParams
    from jaxserve.serving.async_llm import AsyncLLM as AsyncLLM
    from jaxserve.speculative.config import SpeculativeConfig as SpeculativeConfig
    from jaxserve.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from jaxserve.text.tokenizer import Tokenizer as Tokenizer

    __version__: str

_NAMES = {  # module -> what of it is public here; the block above is the same for type checkers
    "buckets.plan": ("BucketPlan",),
    "config": ("EngineConfig",),
    "engine.beam_search": ("BeamSearchOutput", "BeamSearchParams"),
    "engine.engine": ("Engine",),
    "llm": ("LLM",),
    "models": ("named_leaves",),
    "models.config": ("ModelConfig",),
    "models.decoder": ("Decoder",),
    "models.loading": ("random_model",),
    "outputs": ("CompletionOutput", "Logprob", "RequestOutput", "ScoreOutput"),
    "request": ("EngineOutput", "Request"),
    "sampling_params": ("SamplingParams",),
    "serving.async_llm": ("AsyncLLM",),
    "speculative.config": ("SpeculativeConfig",),
    "structured_outputs": ("StructuredOutputsParams",),
    "text.tokenizer": ("Tokenizer",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]
moved.install()


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(import_module(f"jaxserve.{_HOME[name]}"), name)


def _version() -> str:
    """Of the installed distribution; in a checkout that is not installed, pyproject.toml's."""
    from importlib import metadata
    from pathlib import Path

    try:
        return metadata.version("jaxserve")
    except metadata.PackageNotFoundError:
        import tomllib

        with open(Path(__file__).parents[1] / "pyproject.toml", "rb") as file:
            return tomllib.load(file)["project"]["version"]


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])

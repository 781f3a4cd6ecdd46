from jaxserve.buckets.plan import BucketPlan as BucketPlan
from jaxserve.config import EngineConfig as EngineConfig
from jaxserve.engine.beam_search import BeamSearchOutput as BeamSearchOutput
from jaxserve.engine.beam_search import BeamSearchParams as BeamSearchParams
from jaxserve.engine.description import EngineDescription as EngineDescription
from jaxserve.engine.engine import Engine as Engine
from jaxserve.engine.follower import follow as follow
from jaxserve.hosts.group import HostGroup as HostGroup
from jaxserve.hosts.joining import join_hosts as join_hosts
from jaxserve.hosts.pulse import HostLostError as HostLostError
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

__all__: list[str]
__version__: str

from jaxserve.models.config import ModelConfig as ModelConfig
from jaxserve.models.config import RopeConfig as RopeConfig
from jaxserve.models.decoder import Decoder as Decoder
from jaxserve.models.decoder import named_leaves as named_leaves
from jaxserve.models.decoder import random_params as random_params
from jaxserve.models.decoder import transpose_kernels as transpose_kernels
from jaxserve.models.decoder import with_leaves as with_leaves
from jaxserve.models.generation_defaults import GenerationDefaults as GenerationDefaults
from jaxserve.models.hf_keys import hf_tensors as hf_tensors
from jaxserve.models.hf_keys import ignorable_keys as ignorable_keys
from jaxserve.models.hf_keys import key_table as key_table
from jaxserve.models.registry import ARCHITECTURES as ARCHITECTURES

__all__: list[str]

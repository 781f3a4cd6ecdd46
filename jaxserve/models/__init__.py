"""Models: what they are (config, registry, generation_defaults), how they compute (decoder, layers, rope) and where
their weights lie in files (hf_keys).

The names in __init__.pyi are imported at first use, so that reading a config costs milliseconds: the decoder needs jax.
"""

from jaxserve.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)

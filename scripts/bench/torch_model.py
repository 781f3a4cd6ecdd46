"""The model of a peer that is made of torch, and the versions it runs with. Needs torch and transformers, not jax."""

from __future__ import annotations

import sys
from typing import Any

from jaxserve.cli.common.bench_models import RANDOM
from jaxserve.cli.transformers_answers import decoding_greedily, load


def make_model(name: str, dtype: str) -> Any:
    """A transformers model that decodes greedily and never stops by itself. Random weights for a name of RANDOM."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    logging.disable_progress_bar()
    if name not in RANDOM:
        return decoding_greedily(load(name, dtype))
    config = dict(RANDOM[name])
    dtype = config["torch_dtype"] if dtype == "auto" else dtype
    torch.manual_seed(0)
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    return decoding_greedily(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)))


def versions() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    return {
        "device": "cpu",
        "num_threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }

"""Reads the goldens: for each, a config, a checkpoint folder, and what transformers computed (see make_goldens.py)."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
INDEX = json.loads((HERE / "index.json").read_text())
NAMES = tuple(INDEX["goldens"])
ROPE_FREQUENCIES = json.loads((HERE / "rope_frequencies.json").read_text())

# What float32 on another backend may differ by, for logits of up to 10 (measured on a CPU: 3e-5 at most). A greedy
# token is decided where the two best logits are further apart than twice this: so are all steps of all goldens.
ATOL = 1e-4


@dataclass(frozen=True)
class Golden:
    """Prompts and, for each, transformers' float32 logits [len, V] and greedy continuation, eos ids not heeded."""

    name: str
    config_path: Path
    config_v4_path: Path  # the same in the key names of transformers 4
    weights: Path  # the checkpoint's folder; a rope variant's config is not in it
    prompts: list[np.ndarray]  # i32[len] each
    logits: list[np.ndarray]  # f32[len, V] each
    greedy: np.ndarray  # i32[prompts, 24]
    gaps: np.ndarray  # f32[prompts, 24]: best logit less second-best


def load_golden(name: str) -> Golden:
    entry = INDEX["goldens"][name]
    folder = HERE / entry["folder"]
    with np.load(folder / "expected.npz") as expected:
        ends = np.cumsum(expected["prompt_lens"])[:-1]
        return Golden(
            name=name,
            config_path=folder / "config.json",
            config_v4_path=folder / "config_v4.json",
            weights=HERE / entry["weights"],
            prompts=np.split(expected["prompts"], ends),
            logits=np.split(expected["logits"], ends),
            greedy=expected["greedy"],
            gaps=expected["gaps"],
        )

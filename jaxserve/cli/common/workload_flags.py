"""Flags that name a workload, and the workload they name."""

from __future__ import annotations

from absl import flags

from jaxserve.workloads.traffic import LENGTH_FITS, log_normal, multi_turn, shared_prefix
from jaxserve.workloads.workload import WORKLOADS, Workload, fixed, nano_vllm, random_lengths, sharegpt, trace

WORKLOAD_KINDS = (*sorted(WORKLOADS), "nano_vllm", "random", "sharegpt", "trace", *LENGTH_FITS, "shared_prefix", "multi_turn")
_SEEDED = ("nano_vllm", "random", "sharegpt", *LENGTH_FITS, "shared_prefix", "multi_turn")

_WORKLOAD = flags.DEFINE_enum("workload", "short_long_mix", WORKLOAD_KINDS, "Which requests (jaxserve/workloads/workload.py).")
_NUM = flags.DEFINE_integer(
    "num_requests", None, "Requests of nano_vllm (256), trace (all) and every other kind but the fixed ones (100).", lower_bound=1
)
_SEED = flags.DEFINE_integer("workload_seed", 0, "Seed of every kind but the fixed ones and trace.")
_INPUT = flags.DEFINE_integer(
    "random_input_len", 1024, "random: tokens of a prompt; shared_prefix, multi_turn: those that are its own.", lower_bound=1
)
_OUTPUT = flags.DEFINE_integer("random_output_len", 128, "random, shared_prefix, multi_turn: tokens of an output.", lower_bound=1)
_RATIO = flags.DEFINE_float("random_range_ratio", 0.0, "random: by how much of itself a length may vary.")
_PATH = flags.DEFINE_string("dataset_path", None, "sharegpt: its JSON file; trace: a CSV file, perhaps gzip'd.")
_SHAREGPT_OUTPUT = flags.DEFINE_integer("sharegpt_output_len", None, "sharegpt: output tokens, not the answer's.", lower_bound=1)
_PREFIX = flags.DEFINE_integer("prefix_len", 1024, "shared_prefix: tokens that a group shares.", lower_bound=1)
_GROUPS = flags.DEFINE_integer("num_prefixes", 10, "shared_prefix: groups.", lower_bound=1)
_TURNS = flags.DEFINE_integer(
    "num_turns", 4, "multi_turn: turns of a conversation; num_requests counts conversations.", lower_bound=1
)
_VOCABULARY = 4096  # ids of prompts that share; a model of another vocabulary takes them modulo its own
_OWN = {  # flags and the workloads that heed them
    "num_requests": (*_SEEDED, "trace"),
    "workload_seed": _SEEDED,
    "random_input_len": ("random", "shared_prefix", "multi_turn"),
    "random_output_len": ("random", "shared_prefix", "multi_turn"),
    "prefix_len": ("shared_prefix",),
    "num_prefixes": ("shared_prefix",),
    "num_turns": ("multi_turn",),
    "random_range_ratio": ("random",),
    "dataset_path": ("sharegpt", "trace"),
    "sharegpt_output_len": ("sharegpt",),
}


def read_workload(model: str, max_model_len: int | None, seed: int | None = None) -> Workload:
    """The workload of the flags. model: whose tokenizer counts ShareGPT's texts. seed: in --workload_seed's place, for a series of
    them. ValueError where flags and workload don't fit."""
    seed = _SEED.value if seed is None else seed
    kind = _WORKLOAD.value
    for name, kinds in _OWN.items():
        if flags.FLAGS[name].present and kind not in kinds:
            raise ValueError(f"--{name} means nothing to --workload={kind}; it is for {', '.join(kinds)}")
    path = _PATH.value or ""
    if kind in ("sharegpt", "trace") and not path:
        raise ValueError(f"--workload={kind} needs --dataset_path")
    if kind == "nano_vllm":
        return nano_vllm(_NUM.value or 256, seed)
    if kind == "random":
        return random_lengths(_NUM.value or 100, _INPUT.value, _OUTPUT.value, _RATIO.value, seed)
    if kind == "sharegpt":
        from jaxserve.text.tokenizer import Tokenizer

        encode = Tokenizer.from_id(model).encode
        return sharegpt(path, encode, _NUM.value or 100, output_len=_SHAREGPT_OUTPUT.value, seed=seed)
    num = _NUM.value or 100
    if kind in LENGTH_FITS:
        return log_normal(kind, num, seed)
    if kind == "shared_prefix":
        return shared_prefix(num, _GROUPS.value, _PREFIX.value, _INPUT.value, _OUTPUT.value, _VOCABULARY, seed)
    if kind == "multi_turn":
        return multi_turn(num, _TURNS.value, _INPUT.value, _OUTPUT.value, _VOCABULARY, seed)
    if kind == "trace":
        return trace(path, _NUM.value, max_model_len)
    return fixed(kind)

"""The analytic step times beside Vidur's kernel profiles: times of a layer's linear operators by number of tokens and TP degree.

A profile (Vidur: Agrawal et al., MLSys 2024; MIT) is a CSV file, one row a number of tokens and TP degree, medians in milliseconds.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np

# Our name of an operator: Vidur's columns, whose sum it is, and how often a layer runs it.
OPERATORS = {
    "qkv": (("attn_pre_proj",), 1),
    "o": (("attn_post_proj",), 1),
    "mlp_up": (("mlp_up_proj",), 1),
    "mlp_down": (("mlp_down_proj",), 1),
    "mlp_activation": (("mlp_act",), 1),
    "rope": (("attn_rope",), 1),
    "norms": (("input_layernorm", "post_attention_layernorm"), 1),
    "add": (("add",), 2),
}
MATMULS = ("qkv", "o", "mlp_up", "mlp_down")
_COLUMNS = {f"time_stats.{column}.median" for columns, _ in OPERATORS.values() for column in columns}
_COLUMNS |= {"num_tokens", "num_tensor_parallel_workers", "use_gated_mlp", "vocab_size"}
_COLUMNS |= {"n_embd", "n_head", "n_kv_head", "n_expanded_embd"}
_GPUS = {"a100": "a100-80gb", "a40": "a40", "h100": "h100"}


def compare(folder: Path) -> list[dict[str, Any]]:
    """One row a profile and operator (and for the sums "matmuls" and "layer"): relative errors |predicted / measured - 1| over all
    numbers of tokens and TP degrees (median, p90), their median with sign (bias), the medians up to 64, 512 and more tokens, and
    for each TP degree the medians with sign of the same (by_tp).

    Raises:
      ValueError: there is no profile in the folder, or one whose GPU or columns are not known.
    """
    paths = sorted(folder.glob("*_mlp.csv.gz"))
    if not paths:
        raise ValueError(f"no profile <gpu>_<model>_mlp.csv.gz in {folder}")
    rows = []
    for path in paths:
        tokens, degrees, measured, predicted = times_of(path)
        sizes = {"1-64": tokens <= 64, "65-512": (tokens > 64) & (tokens <= 512), "513-": tokens > 512}
        for name in ("layer", "matmuls", *OPERATORS):
            parts = OPERATORS if name == "layer" else MATMULS if name == "matmuls" else (name,)
            errors = np.sum([predicted[p] for p in parts], axis=0) / np.sum([measured[p] for p in parts], axis=0) - 1
            by_tp = {
                int(tp): {size: float(np.median(errors[at & (degrees == tp)])) for size, at in sizes.items()}
                for tp in np.unique(degrees)
            }
            rows.append(
                {
                    "profile": path.name.removesuffix("_mlp.csv.gz"),
                    "operator": name,
                    "num_points": len(errors),
                    "median": float(np.median(np.abs(errors))),
                    "p90": float(np.quantile(np.abs(errors), 0.9)),
                    "bias": float(np.median(errors)),
                    "by_tokens": {size: float(np.median(np.abs(errors[at]))) for size, at in sizes.items()},
                    "by_tp": by_tp,
                }
            )
    return rows


def times_of(path: Path) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(i64[n] tokens, i64[n] TP degrees, measured and predicted seconds f64[n] by operator) of a profile."""
    from jaxserve.step_times.analytic import Deployment
    from jaxserve.step_times.hardware import GPUS
    from jaxserve.step_times.model_shapes import ModelShape

    gpu, _, name = path.name.removesuffix("_mlp.csv.gz").partition("_")
    if gpu not in _GPUS:
        raise ValueError(f"{path}: its name must begin with a known GPU, {', '.join(_GPUS)}")
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    missing = sorted(_COLUMNS - set(rows[0] if rows else ()))
    if missing:
        raise ValueError(f"{path} is no profile of Vidur's: it has {len(rows)} rows and lacks {', '.join(missing)}")
    shape = ModelShape(
        name=name,
        num_layers=1,
        hidden_size=int(rows[0]["n_embd"]),
        num_heads=int(rows[0]["n_head"]),
        num_kv_heads=int(rows[0]["n_kv_head"]),
        head_dim=int(rows[0]["n_embd"]) // int(rows[0]["n_head"]),
        ffn_size=int(rows[0]["n_expanded_embd"]),
        vocab_size=int(rows[0]["vocab_size"]),
        gated=rows[0]["use_gated_mlp"] == "True",
    )
    models = {tp: Deployment(shape, GPUS[_GPUS[gpu]], tp).step_times() for tp in (1, 2, 4, 8)}
    tokens = np.array([int(row["num_tokens"]) for row in rows])
    degrees = np.array([int(row["num_tensor_parallel_workers"]) for row in rows])
    predicted = [models[tp].operators(T) for tp, T in zip(degrees.tolist(), tokens.tolist(), strict=True)]
    measured = {
        ours: np.array([times * sum(float(row[f"time_stats.{c}.median"]) for c in columns) / 1e3 for row in rows])
        for ours, (columns, times) in OPERATORS.items()
    }
    return tokens, degrees, measured, {name: np.array([row[name] for row in predicted]) for name in OPERATORS}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, in percent."""
    sizes = list(rows[0]["by_tokens"])
    heads = ["profile", "operator", "median", "P90", "bias", *(f"{size} tokens" for size in sizes)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows:
        values = [f"{100 * row['median']:.1f}", f"{100 * row['p90']:.1f}", f"{100 * row['bias']:+.1f}"]
        values += [f"{100 * row['by_tokens'][size]:.1f}" for size in sizes]
        lines.append(f"| {row['profile']} | {row['operator']} | {' | '.join(values)} |")
    return "\n".join(lines)


def table_by_tp(rows: list[dict[str, Any]]) -> str:
    """Of the layer and each matmul: the medians with sign, in percent, by TP degree and number of tokens."""
    degrees, sizes = list(rows[0]["by_tp"]), list(rows[0]["by_tokens"])
    heads = ["profile", "operator", *(f"{size} tokens: TP {', '.join(map(str, degrees))}" for size in sizes)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows:
        if row["operator"] in ("layer", *MATMULS):
            cells = [", ".join(f"{100 * row['by_tp'][tp][size]:+.1f}" for tp in degrees) for size in sizes]
            lines.append(f"| {row['profile']} | {row['operator']} | {' | '.join(cells)} |")
    return "\n".join(lines)

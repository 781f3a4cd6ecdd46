"""What a layer's experts cost on this machine: a grouped matmul over those that are chosen, and `jax.lax.ragged_dot` beside it.

    python -m scripts.bench_experts --json=benchmarks/results/cpu/experts.json

A case is a number of experts and how many of them a step's tokens choose, evenly. Ours is what the engine runs (plan, gather, two
grouped matmuls around SwiGLU, combine); the other sorts the same rows and multiplies them by `ragged_dot`. Routing is in neither.
Both are jitted and run by turns, at most 5 times for `ragged_dot`, which may take a hundred times as long; the median tells what a
layer costs here, the least of the runs what the code costs.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.provenance import provenance, write_json

FLAGS = flags.FLAGS
flags.DEFINE_list("experts", ["16", "64", "256"], "Experts there are.")
flags.DEFINE_list("active", ["4", "16"], "Experts that the step's tokens choose.")
flags.DEFINE_string("backend", "auto", "Of the grouped matmul (kernels/grouped_matmul).")
flags.DEFINE_integer("num_tokens", 8, "Tokens of a step.", lower_bound=1)
flags.DEFINE_integer("experts_per_token", 4, "Experts a token.", lower_bound=1)
flags.DEFINE_integer("hidden_size", 512, "D: of a token.", lower_bound=1)
flags.DEFINE_integer("expert_size", 384, "F: of an expert's hidden layer.", lower_bound=1)
flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of tokens and weights.")
flags.DEFINE_integer("repeats", 40, "Runs of each case.", lower_bound=1)
flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

MAX_RAGGED_RUNS = 5


def choices(num_experts: int, num_active: int, num_tokens: int, per_token: int) -> np.ndarray:  # i32[T, k]
    """Experts of each token: `num_active` of them in all, as evenly as can be. ValueError where that can't be."""
    if not per_token <= num_active <= min(num_experts, num_tokens * per_token):
        raise ValueError(
            f"{num_active} active experts can't be: {num_tokens} tokens choose {per_token} each of {num_experts}, so that at least "
            f"{per_token} and at most {min(num_experts, num_tokens * per_token)} are active"
        )
    active = np.random.default_rng(0).choice(num_experts, num_active, replace=False).astype(np.int32)
    return active[np.arange(num_tokens * per_token) % num_active].reshape(num_tokens, per_token)


def swiglu(gate_up: Any) -> Any:  # [M, 2F] -> [M, F]
    import jax
    import jax.numpy as jnp

    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate_up.dtype)


def by_groups(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, backend: str = "auto") -> Any:
    """The layer as the engine runs it: [T, D], i32[T, k], f32[T, k], [E, D, 2F], [E, F, D] -> [T, D]."""
    from kernels.grouped_matmul.api import combine_rows, gather_rows, grouped_matmul, plan_groups

    groups = plan_groups(ids, (gate_up, down), backend=backend)
    hidden = grouped_matmul(gather_rows(x, groups), gate_up, groups, gated=True)
    return combine_rows(grouped_matmul(hidden, down, groups), groups, weights)


def by_ragged_dot(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """The same with `jax.lax.ragged_dot` over rows sorted by expert."""
    import jax
    import jax.numpy as jnp

    T, k = ids.shape
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=gate_up.shape[0]).astype(jnp.int32)
    rows = jax.lax.ragged_dot(swiglu(jax.lax.ragged_dot(x[order // k], gate_up, sizes)), down, sizes)
    rows = jnp.zeros_like(rows).at[order].set(rows).reshape(T, k, -1).astype(jnp.float32)
    return (rows * weights[:, :, None]).sum(axis=1).astype(x.dtype)


def measure(num_experts: int, num_active: int) -> dict[str, Any]:
    """Milliseconds of a layer both ways, on the same arrays."""
    import jax
    import jax.numpy as jnp

    T, k, D, F = FLAGS.num_tokens, FLAGS.experts_per_token, FLAGS.hidden_size, FLAGS.expert_size
    keys = jax.random.split(jax.random.key(0), 3)
    x, gate_up, down = (
        jax.random.normal(key, shape, jnp.dtype(FLAGS.dtype)) * shape[-2] ** -0.5
        for key, shape in zip(keys, ((T, D), (num_experts, D, 2 * F), (num_experts, F, D)), strict=True)
    )
    args = (x, jnp.asarray(choices(num_experts, num_active, T, k)), jnp.full((T, k), 1 / k, jnp.float32), gate_up, down)
    layers = {"grouped": jax.jit(functools.partial(by_groups, backend=FLAGS.backend)), "ragged_dot": jax.jit(by_ragged_dot)}
    times: dict[str, list[float]] = {name: [] for name in layers}
    for run in range(-1, FLAGS.repeats):  # the first compiles and is not counted
        for name, layer in layers.items():
            if name == "ragged_dot" and run >= MAX_RAGGED_RUNS:
                continue
            start = time.perf_counter()
            layer(*args).block_until_ready()
            if run >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    found = {f"{name}_ms": {"min": min(runs), "median": statistics.median(runs), "runs": len(runs)} for name, runs in times.items()}
    return {"experts": num_experts, "active": num_active, **found}


def main() -> None:
    from kernels.backends import GROUPED_MATMUL

    with refuse_bad_input():
        GROUPED_MATMUL.check(FLAGS.backend)
        cases = [(int(experts), int(active)) for experts in FLAGS.experts for active in FLAGS.active]
        for case in cases:
            choices(*case, FLAGS.num_tokens, FLAGS.experts_per_token)
    results = [measure(*case) for case in tqdm(cases, file=sys.stderr, leave=False)]
    for r in results:
        ours, theirs = r["grouped_ms"], r["ragged_dot_ms"]
        print(
            f"{r['experts']:4} experts, {r['active']:3} active: grouped {ours['min']:.2f} ms (median {ours['median']:.2f}), "
            f"ragged_dot {theirs['min']:.2f} ms (median {theirs['median']:.2f})",
            file=sys.stderr if FLAGS.json == "-" else sys.stdout,
        )
    names = ("backend", "num_tokens", "experts_per_token", "hidden_size", "expert_size", "dtype")
    about = {"benchmark": "experts", **{name: FLAGS[name].value for name in names}}
    write_json(FLAGS.json, {**about, "results": results, **provenance()})


if __name__ == "__main__":
    run_command(main)

"""What every backend of the grouped matmul must get right, as data: sizes, and how the choices fall on the groups.

Also their tolerance and the arrays built from them. Every backend runs the same cases.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# Of the largest product of a matrix, against float64 on the same rounded inputs: the output's own rounding, and float32 sums.
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """T tokens (num_tokens of them real) with k choices each among E groups, of which only the first `active` are ever chosen;
    skewed: one group gets a choice of every token. gated: the first half of the columns are gates."""

    name: str
    T: int
    k: int
    E: int
    D: int = 64
    F: int = 128
    num_tokens: int | None = None
    active: int | None = None
    skewed: bool = False
    dtype: str = "float32"
    gated: bool = False


CASES = (
    Case("decode", 8, 2, 6),
    Case("one_token", 1, 1, 1),
    Case("one_of_many", 2, 2, 16, num_tokens=1),
    Case("nothing", 5, 2, 4, num_tokens=0),
    Case("padding", 40, 3, 5, num_tokens=23),
    Case("all_groups", 6, 4, 4, num_tokens=5),
    Case("few_active", 33, 2, 12, active=2),
    Case("one_group", 70, 1, 3, active=1),
    Case("skewed", 90, 2, 7, skewed=True, num_tokens=81),
    Case("prefill", 150, 3, 4, num_tokens=149),
    Case("wide", 9, 2, 5, D=192, F=256, num_tokens=8),
    Case("bfloat16", 21, 2, 5, num_tokens=20, dtype="bfloat16"),
    Case("bfloat16_prefill", 130, 2, 3, D=128, F=256, num_tokens=129, dtype="bfloat16"),
    Case("bfloat16_long", 140, 2, 2, dtype="bfloat16"),
    Case("bfloat16_sizes", 50, 2, 3, skewed=True, num_tokens=49, dtype="bfloat16"),  # 49 rows: stored as 32, 16 and 8
    Case("bfloat16_nothing", 3, 2, 4, num_tokens=0, dtype="bfloat16"),
    Case("float16", 13, 3, 6, active=4, dtype="float16"),
    # Deep enough that every slot of a ring of four blocks of 64 columns is filled three times; tiles of 64 rows and of 128.
    Case("bfloat16_deep", 9, 2, 3, D=768, num_tokens=8, dtype="bfloat16"),
    Case("float16_deep", 130, 1, 1, D=768, num_tokens=129, dtype="float16"),
    Case("gated", 12, 2, 5, F=64, num_tokens=11, gated=True),
    Case("bfloat16_gated", 21, 2, 5, F=256, num_tokens=20, dtype="bfloat16", gated=True),
    # 247 rows: in tiles of 128 stored as 128, and 64, 32, 16 and 8.
    Case("bfloat16_gated_sizes", 248, 1, 2, F=256, skewed=True, num_tokens=247, dtype="bfloat16", gated=True),
    Case("bfloat16_gated_deep", 182, 1, 2, D=768, num_tokens=181, active=1, dtype="bfloat16", gated=True),  # 128, 32, 16, 8
)

# For the layout alone: more groups than a thread block has threads, and more blocks of choices than a thread loads counts at once.
LAYOUTS = (
    Case("many_groups", 40, 8, 150, num_tokens=37),
    Case("many_blocks", 1040, 8, 20, num_tokens=1033),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    x: jax.Array  # [T, D]
    w: jax.Array  # [E, D, F]: NaN in matrices that no real token chose
    group_ids: jax.Array  # i32[T, k]
    num_tokens: jax.Array | None  # i32[]
    gated: bool = dataclasses.field(default=False, metadata={"static": True})


def build(case: Case, seed: int = 0) -> Batch:
    """Random data. What must not be read is NaN: padding tokens, and matrices of groups without rows."""
    rng = np.random.default_rng(seed)
    active = case.active or case.E
    ids = np.stack([rng.permutation(active)[: case.k] for _ in range(case.T)]).astype(np.int32)
    if case.skewed:
        ids[:, 0], ids[:, 1:] = 0, np.where(ids[:, 1:] == 0, ids[:, :1], ids[:, 1:])
    real = case.T if case.num_tokens is None else case.num_tokens
    x = rng.standard_normal((case.T, case.D))
    w = rng.standard_normal((case.E, case.D, case.F))
    x[real:] = np.nan
    w[np.setdiff1d(np.arange(case.E), ids[:real])] = np.nan
    num_tokens = None if case.num_tokens is None else jnp.int32(case.num_tokens)
    return Batch(jnp.asarray(x, case.dtype), jnp.asarray(w, case.dtype), jnp.asarray(ids), num_tokens, case.gated)


def expected(batch: Batch) -> np.ndarray:  # float64 [T, k, F], or [T, k, F / 2] where gated
    """Every token's products, token by token; 0 for padding."""
    x, w, ids = (
        np.asarray(a).astype(np.float64 if a.dtype != jnp.int32 else np.int32) for a in (batch.x, batch.w, batch.group_ids)
    )
    real = len(x) if batch.num_tokens is None else int(batch.num_tokens)
    out = np.zeros((*ids.shape, w.shape[2]))
    for t in range(real):
        for j, group in enumerate(ids[t]):
            out[t, j] = x[t] @ w[group]
    if not batch.gated:
        return out
    gate, up = np.split(out, 2, axis=2)
    return gate / (1 + np.exp(-gate)) * up

"""What every backend of the rotary write must get right, as data, with tolerances and the arrays built from it."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax import numpy as jnp

from kernels.rotary_write import reference

# Of 1 + the wanted value's size, against float64 that rounds where the contract does: two roundings, of which a norm may miss one.
TOLERANCE = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """T tokens, of which `padding` have a slot past the end, with N query and K KV heads of H; norm: whether heads are normed."""

    name: str
    T: int
    N: int
    K: int
    H: int
    page_size: int
    dtype: str = "bfloat16"
    norm: bool = True
    padding: int = 0
    num_pages: int = 5


CASES = (
    Case("one_token", 1, 2, 1, 128, 16),
    Case("qwen3", 8, 4, 2, 128, 64, padding=3),
    Case("no_norm", 5, 4, 2, 128, 16, norm=False, padding=1),
    Case("odd_heads", 7, 9, 3, 64, 32, norm=False, padding=2),  # SmolLM2's: tiles of rows end within a token
    Case("head_96", 6, 3, 3, 96, 32, norm=False, padding=1),  # Phi-3's
    Case("head_96_norm", 5, 2, 1, 96, 16, padding=1),
    Case("head_256", 3, 4, 2, 256, 16, padding=1),
    Case("head_256_no_norm", 2, 2, 1, 256, 128, norm=False, num_pages=2),
    Case("head_64_norm", 40, 2, 1, 64, 16, padding=9),
    Case("float16", 9, 4, 1, 128, 128, dtype="float16", padding=2, num_pages=2),
    Case("float16_no_norm", 4, 2, 2, 64, 16, dtype="float16", norm=False),
    Case("all_padding", 4, 2, 1, 128, 16, padding=4),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """numpy arrays; see api.rotary_write."""

    qkv: np.ndarray
    kv_pages: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    slot_mapping: np.ndarray
    q_scale: np.ndarray | None
    k_scale: np.ndarray | None

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Without the scales."""
        return self.qkv, self.kv_pages, self.cos, self.sin, self.slot_mapping

    @property
    def num_slots(self) -> int:
        return self.kv_pages.shape[0] * self.kv_pages.shape[3]


def build(case: Case, seed: int = 0) -> Batch:
    """Random data. The first token, unless it is padding, has the very last slot, and padding is spread over the tokens. Its heads
    are NaN: they must reach no page and no other token's queries."""
    rng = np.random.default_rng(seed)
    T, N, K, H = case.T, case.N, case.K, case.H
    dtype = jnp.dtype(case.dtype)
    last = case.num_pages * case.page_size
    slots = rng.permutation(last - 1)[:T].astype(np.int32)
    slots[0] = last - 1
    is_padding = np.zeros(T, bool)
    is_padding[np.linspace(T - 1, min(1, T - 1), case.padding).astype(int) if case.padding < T else slice(None)] = True
    slots[is_padding] = (last + np.arange(T, dtype=np.int32))[is_padding]
    qkv = rng.standard_normal((T, N + 2 * K, H)) * 2
    qkv[is_padding] = np.nan
    angles = rng.uniform(0, 2 * np.pi, (T, H // 2))
    scales = [(1 + 0.2 * rng.standard_normal(H)).astype(dtype) if case.norm else None for _ in range(2)]
    pages = rng.standard_normal((case.num_pages, 2, K, case.page_size, H)).astype(dtype)
    pages[0, 0, 0, : case.page_size // 2] = np.nan  # bits that nobody writes must stay, whatever they are
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return Batch(qkv.astype(dtype), pages, cos, sin, slots, *scales)


def expected(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(queries [T, N, H], pages) in float64."""
    return reference.rotary_write(*batch.arrays, batch.q_scale, batch.k_scale, eps=EPS)


def faults(batch: Batch, queries: np.ndarray, pages: np.ndarray, dtype: str) -> list[str]:
    """What is wrong with a result: values, a slot that nobody owns, values of v that are not those given."""
    found, (want_q, want_pages) = [], expected(batch)
    real = batch.slot_mapping < batch.num_slots
    slots = batch.slot_mapping[real]
    at = slots // batch.kv_pages.shape[3], slice(None), slice(None), slots % batch.kv_pages.shape[3]
    for name, have, want in (("queries", queries[real], want_q[real]), ("keys and values", pages[at], want_pages[at])):
        error = np.abs(have.astype(np.float64) - want)
        wrong = ~(error <= TOLERANCE[dtype] * (1 + np.abs(want)))
        if wrong.any():
            found.append(f"{wrong.sum()} {name} are wrong, the worst by {error[wrong].max():.3g}")
    K = batch.kv_pages.shape[2]
    if (_bits(pages[at][:, 1]) != _bits(batch.qkv[real][:, -K:])).any():
        found.append("values are not those given, bit for bit")
    untouched, before = pages.copy(), batch.kv_pages.copy()
    untouched[at] = before[at] = 0
    if (_bits(untouched) != _bits(before)).any():
        found.append("slots that no token owns have changed")
    return found


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.dtype(f"u{x.dtype.itemsize}"))

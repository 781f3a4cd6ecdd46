"""What every backend of ragged paged attention must get right, as data: head shapes, ragged edges, and the batches they make.

Also their tolerance and the arrays built from them. Every backend runs the same cases.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Absolute and relative, against float64 on the same rounded inputs: the output's own rounding, and float32 sums.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}


class Heads(NamedTuple):
    N: int  # query heads
    K: int  # KV heads
    H: int  # head_dim


HEADS = {
    "smollm2_135m": Heads(9, 3, 64),
    "tiny": Heads(4, 2, 64),
    "qwen3_0.6b": Heads(16, 8, 128),
    "qwen3_8b": Heads(32, 8, 128),  # and 4B
    "qwen3_32b": Heads(64, 8, 128),
    "qwen3_30b_a3b": Heads(32, 4, 128),
    "mqa": Heads(8, 1, 128),
    "mha_small": Heads(3, 3, 16),
    "odd_ratio": Heads(10, 2, 32),
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    seqs: tuple[tuple[int, int], ...]  # (q_len, kv_len) of each sequence
    heads: Heads = HEADS["tiny"]
    page_size: int = 16
    dtype: str = "float32"
    scale: float | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    max_q_len: int | None = None
    padding_tokens: int = 3
    padding_seqs: int = 2
    spare_pages: int = 2

    @property
    def options(self) -> dict:
        """The keyword arguments of the call."""
        names = ("scale", "sliding_window", "soft_cap", "max_q_len")
        return {name: getattr(self, name) for name in names}


def edges(page_size: int) -> tuple[tuple[int, int], ...]:
    """Lengths around a page's boundaries, sequences without queries (with and without KV), drafts, a chunk, a whole prompt."""
    p = page_size
    return (1, 1), (1, p - 1), (0, 0), (1, p), (1, p + 1), (0, 2 * p + 1), (4, 5 * p + 2), (p + 5, 3 * p), (1, 300), (7, 7)


DECODES = tuple((1, kv_len) for kv_len in (1, 15, 16, 17, 127, 128, 129, 0, 300, 255, 256, 257, 700))
DECODES = tuple((min(q_len, kv_len), kv_len) for q_len, kv_len in DECODES)

MIXED = ((1, 130), (0, 0), (5, 70), (1, 64), (1, 1), (20, 40))

DRAFTS = ((5, 700), (3, 40), (1, 130), (2, 2))

EVERY_OPTION: dict[str, Any] = {"scale": 0.5, "sliding_window": 21, "soft_cap": 5.0}

# A decode that the Mosaic kernel splits with its default chunk, of 512 positions, too.
SPLIT = Case("gpu-split", ((1, 600), (1, 5)), Heads(2, 1, 64), 64, "bfloat16", max_q_len=1)

AROUND_A_BLOCK = ((1, 1), (1, 63), (1, 64), (1, 65))

# A chunk long enough that a second consumer has some of its tokens, where the group is small too.
CHUNKS = ((1, 130), (40, 90), (0, 0), (1, 65))

# Tiles of 32 tokens, of which a second consumer alone sees the last block.
PASS_BY = ((32, 80), (31, 95), (17, 66), (1, 129), (32, 65))

# With a window of 5: pages before it are gone, and the first page that is seen is the last one, partly filled.
LAST_PAGE_SEEN = ((9, 63), (1, 60), (1, 188))


def small(name: str, num_kv_heads: int) -> Heads:
    """A head shape with fewer KV heads, for an interpreter: as many query heads to each, and the same head_dim."""
    N, K, H = HEADS[name]
    return Heads(N // K * num_kv_heads, num_kv_heads, H)


# Small enough for a GPU kernel to run interpreted: one KV head or two, 16 bits, head_dim 64 and 128, pages of 16 to 128. A case
# whose name ends in a model stands for its heads; where these have two KV heads, their data lie apart in every array.
INTERPRETED = (
    Case("gpu-decodes-0.6b", (*AROUND_A_BLOCK, (0, 0), (1, 150)), small("qwen3_0.6b", 1), 64, "bfloat16", max_q_len=1),
    Case("gpu-mixed-0.6b", CHUNKS, small("qwen3_0.6b", 2), 64, "float16"),
    Case("gpu-mixed-8b", MIXED, small("qwen3_8b", 1), 64, "bfloat16"),
    Case("gpu-decodes-8b", ((1, 129), (1, 63), (1, 300)), small("qwen3_8b", 2), 64, "bfloat16", max_q_len=1),
    Case("gpu-mixed-32b", MIXED, small("qwen3_32b", 1), 16, "float16", scale=0.1, soft_cap=3.0),
    Case("gpu-drafts-32b", ((5, 200), (3, 65), (1, 64)), small("qwen3_32b", 1), 64, "bfloat16", max_q_len=5),
    Case("gpu-mixed-30b_a3b", ((1, 130), (9, 70), (1, 65)), small("qwen3_30b_a3b", 2), 64, "bfloat16"),
    Case("gpu-decodes-30b_a3b", ((1, 65), (0, 0), (1, 200)), small("qwen3_30b_a3b", 2), 64, "bfloat16", max_q_len=1),
    Case("gpu-decodes-smollm2", ((1, 17), (1, 200)), small("smollm2_135m", 2), 16, "bfloat16", max_q_len=1),
    Case("gpu-page_128-smollm2", CHUNKS, small("smollm2_135m", 2), 128, "bfloat16"),
    Case("gpu-page_32-window", MIXED, Heads(4, 1, 64), 32, "bfloat16", sliding_window=40),
    Case("gpu-decodes-window", ((1, 300), (1, 17), (1, 129)), Heads(2, 1, 64), 16, "float16", sliding_window=100, max_q_len=1),
    Case("gpu-window-soft_cap", CHUNKS, small("smollm2_135m", 1), 16, "bfloat16", **EVERY_OPTION),
    Case("gpu-decodes-window-soft_cap", ((1, 300), (1, 65)), small("qwen3_8b", 1), 64, "float16", max_q_len=1, **EVERY_OPTION),
    Case("gpu-page_16-last_page_seen", LAST_PAGE_SEEN, Heads(8, 1, 64), 16, "bfloat16", sliding_window=5),
    Case("gpu-page_32-last_page_seen", ((1, 124), (1, 60)), Heads(2, 1, 64), 32, "bfloat16", sliding_window=20, max_q_len=1),
    # The last one fills its block of KV and not its tile: what rows past it compute is finite, and would be seen if it were stored.
    Case("gpu-drafts", ((4, 200), (3, 65), (2, 2), (1, 64)), Heads(4, 1, 64), 16, "bfloat16", max_q_len=4),
    Case("gpu-nothing", ((0, 0), (0, 70)), Heads(2, 1, 64), 64, "bfloat16"),
    Case("gpu-fills_the_pool", ((16, 192),), Heads(1, 1, 64), 64, "bfloat16", padding_tokens=0, padding_seqs=0, spare_pages=0),
    SPLIT,
    # Long enough that every slot of a ring of three blocks, and of the join's ring, is filled three times.
    Case("gpu-long-decodes", ((1, 640), (1, 600), (1, 577)), Heads(2, 1, 64), 64, "bfloat16", max_q_len=1),
    Case("gpu-long-mixed", ((20, 640), (9, 70), (1, 1)), Heads(4, 1, 64), 64, "bfloat16"),
    Case("gpu-long-mixed-8b", ((20, 640), (9, 70), (1, 1)), small("qwen3_8b", 1), 64, "bfloat16"),
    # Scales that are multiplied in with the maximum's subtraction, and ones that can't be.
    Case("gpu-scale-window", CHUNKS, Heads(4, 1, 64), 64, "bfloat16", scale=0.5, sliding_window=70),
    Case("gpu-scale-negative", MIXED, Heads(4, 1, 64), 64, "bfloat16", scale=-0.1),
    Case("gpu-scale-0", ((1, 130), (9, 70)), Heads(4, 1, 64), 64, "bfloat16", scale=0.0),
    Case("gpu-scale-tiny", ((1, 130), (1, 65)), Heads(2, 1, 64), 64, "float16", scale=1e-8, max_q_len=1),
    # Capped logits, and blocks that are seen whole; with a cap of 50 a scale at which rows saturate.
    Case("gpu-soft_cap", CHUNKS, small("smollm2_135m", 1), 64, "bfloat16", scale=16.0, soft_cap=50.0),
    Case("gpu-decodes-soft_cap", ((1, 200), (1, 65)), small("qwen3_8b", 1), 64, "bfloat16", soft_cap=5.0, max_q_len=1),
    Case("gpu-drafts-soft_cap", ((5, 200), (3, 65)), small("qwen3_8b", 1), 64, "bfloat16", soft_cap=3.0, max_q_len=5),
    # Of tiles of 32 tokens: the first consumer passes by a last block that is partly filled, or has the only row of it.
    Case("gpu-pass_by-8b", PASS_BY, small("qwen3_8b", 1), 64, "bfloat16"),
    Case("gpu-pass_by-window-soft_cap", PASS_BY, Heads(4, 1, 64), 16, "bfloat16", sliding_window=20, soft_cap=3.0),
)

# What the portable kernel alone has: head_dim 96 and 256, with an odd group, small and large pages, and every option.
PORTABLE = (
    Case("gpu-head_96", MIXED, Heads(4, 2, 96), 64, "bfloat16"),
    Case("gpu-head_96-decodes", ((1, 300), (1, 65)), Heads(3, 1, 96), 32, "float16", max_q_len=1),
    Case("gpu-head_96-page_128", CHUNKS, Heads(3, 1, 96), 128, "float16"),
    Case("gpu-head_256", MIXED, Heads(4, 2, 256), 64, "float16"),
    Case("gpu-head_256-window-soft_cap", CHUNKS, Heads(4, 1, 256), 16, "bfloat16", **EVERY_OPTION),
)

CASES = (
    *INTERPRETED,
    *PORTABLE,
    *(
        Case(f"mixed-{name}", MIXED, heads=HEADS[name], page_size=64, dtype="bfloat16")
        for name in ("qwen3_0.6b", "qwen3_8b", "qwen3_32b", "qwen3_30b_a3b")
    ),
    *(
        Case(f"edges-{name}-{dtype}", edges(16), heads=HEADS[name], dtype=dtype)
        for name, dtype in (
            ("smollm2_135m", "bfloat16"),
            ("tiny", "float32"),
            ("tiny", "float16"),
            ("qwen3_0.6b", "bfloat16"),
            ("mqa", "float32"),
            ("mha_small", "float32"),
            ("odd_ratio", "bfloat16"),
        )
    ),
    *(Case(f"page_{page_size}", edges(page_size), page_size=page_size) for page_size in (4, 12, 64, 128)),
    Case("decodes", DECODES, max_q_len=1),
    Case("decodes-bfloat16", DECODES, heads=HEADS["smollm2_135m"], dtype="bfloat16", max_q_len=1, padding_seqs=4),
    Case("two_decodes", ((1, 20), (1, 33)), max_q_len=1, padding_seqs=0),
    Case("nothing", ((0, 0), (0, 40))),
    Case("drafts", DRAFTS, max_q_len=5),
    Case("fills_the_pool", ((40, 640),), padding_tokens=0, padding_seqs=0, spare_pages=0),
    Case("whole_prompt", ((150, 150),), heads=HEADS["smollm2_135m"], dtype="bfloat16", padding_seqs=0),
    Case("two_chunks", ((60, 200), (41, 41)), padding_seqs=4),
    Case("window_1", edges(16), sliding_window=1),
    Case("window_30", edges(16), sliding_window=30),
    Case("window_200-decodes", DECODES, sliding_window=200, max_q_len=1),
    Case("window_past_everything", edges(4), page_size=4, sliding_window=10_000),
    Case("soft_cap", edges(16), soft_cap=2.0),
    Case("scale-window-soft_cap", edges(16), **EVERY_OPTION),
    # The same in 16 bits and with heads that are served, for a kernel that has nothing else.
    Case("page_64-bfloat16", edges(64), heads=HEADS["qwen3_0.6b"], page_size=64, dtype="bfloat16"),
    Case("page_128-float16", edges(128), heads=HEADS["smollm2_135m"], page_size=128, dtype="float16"),
    Case("decodes-float16", DECODES, heads=HEADS["qwen3_30b_a3b"], page_size=64, dtype="float16", max_q_len=1),
    Case("drafts-bfloat16", DRAFTS, heads=HEADS["qwen3_32b"], page_size=64, dtype="bfloat16", max_q_len=5),
    Case("window_1-bfloat16", edges(16), dtype="bfloat16", sliding_window=1),
    Case("window_30-float16", edges(32), page_size=32, dtype="float16", sliding_window=30),
    Case("window_200-decodes-bfloat16", DECODES, dtype="bfloat16", sliding_window=200, max_q_len=1),
    Case("soft_cap-bfloat16", edges(16), heads=HEADS["qwen3_8b"], dtype="bfloat16", soft_cap=2.0),
    Case("scale-window-soft_cap-float16", edges(16), heads=HEADS["qwen3_0.6b"], dtype="float16", **EVERY_OPTION),
    Case("scale-window-soft_cap-bfloat16", edges(64), page_size=64, dtype="bfloat16", **EVERY_OPTION),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A case's arguments, and the same keys and values without pages."""

    q: jax.Array  # [T, N, H]
    kv_pages: jax.Array  # [num_pages, 2, K, page_size, H]
    page_table: jax.Array  # i32[S, P]
    cu_q_lens: jax.Array  # i32[S+1]
    kv_lens: jax.Array  # i32[S]
    keys: tuple[np.ndarray, ...]  # of each sequence, [kv_len, K, H] in the case's dtype
    values: tuple[np.ndarray, ...]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The positional arguments of the call."""
        return self.q, self.kv_pages, self.page_table, self.cu_q_lens, self.kv_lens


def build(case: Case, seed: int = 0) -> Batch:
    """Random data on shuffled pages. Whatever must not be read is hostile.

    Slots that hold no key a query may see (spare pages, tails of last pages, pages wholly before a sliding window) are NaN;
    the page-table entries that go with them are -1, out of range, or another sequence's page.
    """
    rng = np.random.default_rng(seed)
    N, K, H = case.heads
    p = case.page_size
    dtype = jnp.dtype(case.dtype)
    q_lens = np.array([q_len for q_len, _ in case.seqs] + [0] * case.padding_seqs, np.int32)
    kv_lens = np.array([kv_len for _, kv_len in case.seqs] + [0] * case.padding_seqs, np.int32)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    num_pages = int((-(-kv_lens // p)).sum()) + case.spare_pages
    S, P = len(q_lens), max(-(-int(kv_lens.max()) // p), 1) + (1 if case.spare_pages else 0)

    free = list(rng.permutation(num_pages))
    hostile = np.array([-1, num_pages, np.iinfo(np.int32).max, np.iinfo(np.int32).min, 0], np.int64)
    page_table = rng.choice(hostile, (S, P)).astype(np.int32)
    kv_pages = np.full((num_pages, 2, K, p, H), np.nan, dtype)
    keys, values = [], []
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        k, v = rng.standard_normal((2, kv_len, K, H), np.float32).astype(dtype)
        keys.append(k)
        values.append(v)
        first_seen = 0 if case.sliding_window is None else max(0, kv_len - q_len - case.sliding_window + 1)
        for column in range(first_seen // p, -(-kv_len // p)):
            page = page_table[s, column] = free.pop()
            for offset, position in enumerate(range(column * p, min((column + 1) * p, kv_len))):
                kv_pages[page, 0, :, offset] = k[position]
                kv_pages[page, 1, :, offset] = v[position]
    q = 2 * rng.standard_normal((int(cu_q_lens[-1]) + case.padding_tokens, N, H), np.float32)
    arrays = (q.astype(dtype), kv_pages, page_table, cu_q_lens, kv_lens)
    return Batch(*(jnp.asarray(x) for x in arrays), keys=tuple(keys), values=tuple(values))


def expected(case: Case, batch: Batch) -> np.ndarray:  # float64 [cu_q_lens[-1], N, H]
    """Attention by the textbook, one head of one query at a time, over keys that were never in a page."""
    N, K, H = case.heads
    scale = 1 / np.sqrt(H) if case.scale is None else case.scale
    q = np.asarray(batch.q, np.float64)
    out = np.zeros((int(batch.cu_q_lens[-1]), N, H))
    row = 0
    for (q_len, kv_len), keys, values in zip(case.seqs, batch.keys, batch.values, strict=False):
        for position in range(kv_len - q_len, kv_len):
            first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            k, v = (np.asarray(x[first : position + 1], np.float64) for x in (keys, values))
            for n in range(N):
                x = k[:, n * K // N] @ q[row, n] * scale
                if case.soft_cap is not None:
                    x = case.soft_cap * np.tanh(x / case.soft_cap)
                weights = np.exp(x - x.max())
                out[row, n] = weights @ v[:, n * K // N] / weights.sum()
            row += 1
    return out

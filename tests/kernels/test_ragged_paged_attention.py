"""Every backend against float64 attention without pages, its rows' bits against the company they keep, and its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.ragged_paged_attention import plan_work, ragged_paged_attention
from kernels.ragged_paged_attention.cases import CASES, HEADS, TOLERANCE, Case, build, expected
from tests.kernels.cpu_levels import needs_library
from tests.selection import slow_unless

BACKENDS = ("reference", "xla", pytest.param("cpu", marks=needs_library))
QUICK = {  # make test has these cases alone
    *("edges-tiny-float32", "page_12", "decodes", "drafts"),
    *("window_30", "soft_cap-bfloat16", "scale-window-soft_cap-float16", "gpu-fills_the_pool"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", slow_unless(lambda case: case.name in QUICK, CASES), ids=lambda case: case.name)
def test_matches_unpaged_float64(case, backend):
    if backend == "cpu" and case.dtype == "float16":
        pytest.skip("needs another backend: cpu has bfloat16 and float32")
    batch = build(case)
    out = jax.jit(functools.partial(ragged_paged_attention, backend=backend, **case.options))(*batch.arrays)
    want = expected(case, batch)
    tolerance = TOLERANCE[case.dtype]
    assert out.shape == batch.q.shape and out.dtype == batch.q.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64)[: len(want)], want, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(np.asarray(out, np.float64)[len(want) :], 0)  # rows that nobody owns


@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu", marks=needs_library)])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_a_nan_among_the_keys_of_a_sequence_is_not_hidden(backend, soft_cap):
    """A broken model is found out by its logits; other sequences are untouched."""
    case = Case("two", ((1, 40), (1, 30)), heads=HEADS["tiny"], dtype="float32")
    batch = build(case)
    kv_pages = np.array(batch.kv_pages)
    page = np.asarray(batch.page_table)[0, 0]
    kv_pages[page, 0, :, 3] = np.nan
    q, _, *rest = batch.arrays
    out = np.asarray(ragged_paged_attention(q, jnp.asarray(kv_pages), *rest, backend=backend, soft_cap=soft_cap))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


class Pool:
    """Three long sequences in one pool; runs any layout of chunks of them in one compiled shape."""

    def __init__(self, heads, dtype, *, T, S, max_q_len, sliding_window=None, kv_lens=(300, 90, 515), page_size=16, backend="xla"):
        self.T, self.S, self.page_size, self.kv_lens = T, S, page_size, kv_lens
        whole = Case("pool", tuple((n, n) for n in kv_lens), heads=heads, dtype=dtype, page_size=page_size, padding_seqs=0)
        self.batch = build(whole)
        options = {"max_q_len": max_q_len, "sliding_window": sliding_window, "backend": backend}

        @jax.jit
        def run(*arrays):
            work = plan_work(arrays[3], arrays[4], num_tokens=T, max_q_len=max_q_len, backend=backend)
            return ragged_paged_attention(*arrays, work=work, **options)

        self.run = run

    def rows(self, layout, rng) -> dict[tuple[int, int], bytes]:
        """layout: (sequence, first position, q_len) of each batch row. Returns the bits of each (sequence, position)."""
        table, starts = np.asarray(self.batch.page_table), np.asarray(self.batch.cu_q_lens)
        q = rng.standard_normal((self.T, *self.batch.q.shape[1:])).astype(self.batch.q.dtype)
        page_table = np.full((self.S, table.shape[1]), -1, np.int32)
        q_lens, kv_lens = np.zeros((2, self.S), np.int32)
        kv_pages = np.array(self.batch.kv_pages)
        for s, kv_len in enumerate(self.kv_lens):  # nothing past what this layout has computed may matter
            computed = max((first + q_len for seq, first, q_len in layout if seq == s), default=0)
            for position in range(computed, kv_len):
                kv_pages[table[s, position // self.page_size], :, :, position % self.page_size] = np.nan
        owners = []
        for i, (seq, first, q_len) in enumerate(layout):
            q[len(owners) : len(owners) + q_len] = np.asarray(self.batch.q)[starts[seq] + first :][:q_len]
            owners += [(seq, first + j) for j in range(q_len)]
            page_table[i], q_lens[i], kv_lens[i] = table[seq], q_len, first + q_len
        cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        out = np.asarray(self.run(q, kv_pages, page_table, cu_q_lens, kv_lens))
        assert np.isfinite(out[: len(owners)].astype(np.float32)).all()
        return {owner: out[t].tobytes() for t, owner in enumerate(owners)}


def random_layout(pool: Pool, rng, *, max_q_len) -> list[tuple[int, int, int]]:
    layout, left = [], pool.T
    for _ in range(rng.integers(1, pool.S + 1)):
        if not left:
            break
        seq = rng.integers(len(pool.kv_lens))
        q_len = int(rng.integers(0, min(max_q_len, left, 40) + 1)) if rng.random() < 0.6 else 1
        layout.append((seq, int(rng.integers(0, pool.kv_lens[seq] - q_len + 1)), q_len))
        left -= q_len
    return layout


@pytest.mark.parametrize(
    ("heads", "dtype", "T", "S", "max_q_len", "sliding_window"),
    [
        pytest.param("smollm2_135m", "bfloat16", 64, 8, 64, None, id="mixed-bfloat16", marks=pytest.mark.slow),
        pytest.param("tiny", "float32", 64, 8, 64, None, id="mixed", marks=pytest.mark.slow),
        pytest.param("tiny", "float32", 64, 24, 64, 50, id="mixed-window"),
        pytest.param("odd_ratio", "float32", 64, 3, 64, None, id="chunks"),
        pytest.param("smollm2_135m", "bfloat16", 11, 11, 1, None, id="decodes-bfloat16", marks=pytest.mark.slow),
        pytest.param("tiny", "float32", 20, 20, 1, None, id="decodes"),
    ],
)
@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu", marks=needs_library)])
def test_bits_of_a_row_depend_on_its_sequence_alone(heads, dtype, T, S, max_q_len, sliding_window, backend):
    """One compiled shape; rows as decodes and in chunks of any cut, alone and in company, at any place in the batch."""
    rng = np.random.default_rng(0)
    pool = Pool(HEADS[heads], dtype, T=T, S=S, max_q_len=max_q_len, sliding_window=sliding_window, backend=backend)
    if max_q_len == 1:
        watched = [(0, 299), (0, 17), (2, 514), (2, 128), (1, 0)]
    else:
        watched = [(0, position) for position in range(268, 300)] + [(2, position) for position in range(120, 136)]
    seen: dict[tuple[int, int], set[bytes]] = {}

    def note(layout):
        for owner, bits in pool.rows(layout, rng).items():
            seen.setdefault(owner, set()).add(bits)

    for seq, position in watched:
        note([(seq, position, 1)])  # alone, as a decode
    if max_q_len > 1:
        for first in (268, 269, 271, 276, 284):
            note([(1, 3, 5), (0, first, 300 - first)])
            note([(0, first, 300 - first), (2, 500, 1), (2, 120, 16)])
    for _ in range(25):
        note(random_layout(pool, rng, max_q_len=max_q_len))
        seq, position = watched[rng.integers(len(watched))]
        note([(seq, position, 1), *random_layout(pool, rng, max_q_len=max_q_len)][: S - 1][: T // 41 + 1])
    assert len(seen) > len(watched)
    assert [owner for owner, bits in seen.items() if len(bits) > 1] == []


@pytest.mark.parametrize(
    ("seqs", "sliding_window", "num_kv_tiles"),
    [
        pytest.param([(1, 300), (1, 17), (1, 900)], None, 8, id="decodes"),  # 900 positions, 128 a tile
        pytest.param([(1, 300), (1, 17), (1, 450)], None, 4, id="half as long"),
        pytest.param([(1, 300), (1, 17), (1, 900)], 50, 2, id="window"),  # of 900: positions 850 to 899
        pytest.param(
            [(1, 900 - 40 * i) for i in range(20)], None, 4 + 3 + 2, id="three blocks", marks=pytest.mark.slow
        ),  # 900, 580, 260; 256 a tile
        # 8 rows a tile: 900, 300, 292, 284; 276, 268, 5
        pytest.param([(40, 300), (1, 900), (1, 5)], None, 8 + 3, id="mixed", marks=pytest.mark.slow),
    ],
)
def test_xla_walks_the_batchs_kv_and_not_the_page_tables_width(seqs, sliding_window, num_kv_tiles, monkeypatch):
    """Counts the iterations over KV tiles: loops run in Python, with the bounds that the compiled ones have."""
    iterations = []

    def fori_loop(lower, upper, body, state):
        for i in range(int(lower), int(upper)):
            iterations.append(body.__name__)
            state = body(i, state)
        return state

    monkeypatch.setattr(jax.lax, "fori_loop", fori_loop)
    q_lens, kv_lens = np.array([*seqs, (0, 0)], np.int32).T  # a padding sequence
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    q, kv_pages = jnp.zeros((cu_q_lens[-1] + 1, 2, 8)), jnp.zeros((1, 2, 1, 16, 8))
    options = {"max_q_len": int(q_lens.max()), "sliding_window": sliding_window, "backend": "xla"}
    for width in (57, 64 * 57):  # pages; 57 hold 900 positions
        iterations.clear()
        page_table = jnp.zeros((len(q_lens), width), jnp.int32)
        ragged_paged_attention(q, kv_pages, page_table, jnp.asarray(cu_q_lens), jnp.asarray(kv_lens), **options)
        assert iterations.count("step") == num_kv_tiles, width


@pytest.mark.parametrize("name", ["edges-tiny-float32", "decodes", "two_chunks"])
def test_work_covers_each_row_once_longest_first(name):
    case = next(case for case in CASES if case.name == name)
    batch = build(case)
    plan = functools.partial(plan_work, num_tokens=len(batch.q), max_q_len=case.max_q_len, backend="xla")
    work = jax.jit(plan)(batch.cu_q_lens, batch.kv_lens)
    seq, row, position, num_rows = (np.asarray(x) for x in (work.seq, work.row, work.position, work.num_rows))
    live = num_rows > 0
    assert live.sum() == work.num_tiles and live[: int(work.num_tiles)].all()
    rows = [(s, r + i, p + i) for s, r, p, n in zip(seq, row, position, num_rows, strict=True) for i in range(n)]
    cu_q_lens = np.asarray(batch.cu_q_lens)
    assert sorted(rows) == [
        (s, cu_q_lens[s] + i, kv_len - q_len + i) for s, (q_len, kv_len) in enumerate(case.seqs) for i in range(q_len)
    ]
    assert len(seq) > work.block_tiles  # else nothing is sorted, nor need be
    extents = (position + num_rows)[live]
    assert (np.diff(extents) <= 0).all()


def test_shared_work_changes_no_bit():
    case = next(case for case in CASES if case.name == "edges-tiny-float32")
    batch = build(case)

    @jax.jit
    def both(*arrays):
        work = plan_work(arrays[3], arrays[4], num_tokens=len(batch.q), backend="xla")
        return ragged_paged_attention(*arrays, backend="xla"), ragged_paged_attention(*arrays, work=work, backend="xla")

    alone, shared = both(*batch.arrays)
    np.testing.assert_array_equal(alone, shared)


def arguments(**changes):
    arrays = {
        "q": jnp.zeros((8, 4, 64)),
        "kv_pages": jnp.zeros((5, 2, 2, 16, 64)),
        "page_table": jnp.zeros((3, 2), jnp.int32),
        "cu_q_lens": jnp.zeros(4, jnp.int32),
        "kv_lens": jnp.zeros(3, jnp.int32),
    }
    return {**arrays, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((8, 4))}, r"q is float32\(8, 4\); must be \[T, N, H\] with H=64"),
        ({"q": jnp.zeros((8, 5, 64))}, "5 query heads.* multiple of 2 KV heads"),
        ({"q": jnp.zeros((8, 4, 32))}, r"q is float32\(8, 4, 32\); must be \[T, N, H\] with H=64"),
        ({"q": jnp.zeros((8, 4, 64), jnp.bfloat16)}, "must be the same"),
        ({"q": jnp.zeros((8, 4, 64), jnp.int32), "kv_pages": jnp.zeros((5, 2, 2, 16, 64), jnp.int32)}, "int32"),
        (
            {"kv_pages": jnp.zeros((5, 1, 2, 16, 64))},
            r"kv_pages is .*\(5, 1, 2, 16, 64\); must be \[num_pages, 2, K, page_size, H\]",
        ),
        ({"page_table": jnp.zeros((4, 2), jnp.int32)}, r"page_table is int32\(4, 2\); must be int32\[S, P\] with S=3"),
        ({"page_table": jnp.zeros((3, 2))}, r"page_table is float32\(3, 2\); must be int32\[S, P\]"),
        ({"cu_q_lens": jnp.zeros(3, jnp.int32)}, r"cu_q_lens is int32\(3,\); must be int32\[S\+1\] with S=3"),
        ({"kv_lens": jnp.zeros(3)}, r"kv_lens is float32\(3,\); must be int32\[S\]"),
        ({"q": jnp.zeros((0, 4, 64))}, r"q is float32\(0, 4, 64\); .*no axis of size 0"),
        ({"kv_lens": [1, 2, 3]}, r"kv_lens is a list; must be int32\[S\]"),
        ({"max_q_len": 0}, "max_q_len=0"),
        ({"max_q_len": True}, "max_q_len=True"),
        ({"max_q_len": 2.0}, "max_q_len=2.0"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"soft_cap": 0.0}, "soft_cap=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"backend": "triton"}, "auto, reference, xla, cpu, mosaic_portable, mosaic_sm90"),
        ({"work": (), "backend": "xla"}, "was not planned"),
        pytest.param({"work": (), "backend": "cpu"}, "was not planned", marks=needs_library),
        ({"work": (), "backend": "reference"}, "planned for another backend"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_callers_mistakes_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**arguments(**changes))


def test_work_planned_for_another_shape_is_refused():
    given = arguments()
    work = jax.jit(functools.partial(plan_work, num_tokens=8, max_q_len=1))(given["cu_q_lens"], given["kv_lens"])
    with pytest.raises(ValueError, match="was not planned"):
        ragged_paged_attention(**given, work=work)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine without a GPU")
def test_mosaic_says_what_it_lacks():
    given = arguments(q=jnp.zeros((8, 4, 64), jnp.bfloat16), kv_pages=jnp.zeros((5, 2, 2, 16, 64), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="mosaic_sm90 .*compute capability 9.0"):
        ragged_paged_attention(**given, backend="mosaic_sm90")
    with pytest.raises(NotImplementedError, match="mosaic_sm90 .* plan on the host"):
        plan_work(given["cu_q_lens"], given["kv_lens"], num_tokens=8, backend="mosaic_sm90")

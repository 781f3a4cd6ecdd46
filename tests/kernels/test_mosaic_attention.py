"""The Mosaic attention kernel: native on a Hopper GPU, elsewhere interpreted with races detected.

What runs interpreted differs from what runs on a device in one function, `consumer._add_weighted_values`, and in the registers
that warpgroups ask for.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kernels import gpu
from kernels.ragged_paged_attention import api, ragged_paged_attention, resolve_backend, work_list
from kernels.ragged_paged_attention.cases import INTERPRETED, SPLIT, TOLERANCE, Batch, Case, Heads, build, expected
from kernels.ragged_paged_attention.mosaic_sm90 import combine, producer
from kernels.ragged_paged_attention.mosaic_sm90 import tiles as tiles_file
from kernels.ragged_paged_attention.mosaic_sm90.planner import Planner
from kernels.ragged_paged_attention.mosaic_sm90.tiles import Tiles, choose_tiles
from scripts.gpu.attention import Batch as AttentionBatch
from scripts.gpu.attention import tile_candidates
from tests.selection import chosen, slow_unless

ON_DEVICE = gpu.missing_for_sm90() is None
QUICK = {"gpu-window-soft_cap", "gpu-drafts"}  # make test has these cases alone
# What each other case has, once: shapes, dtypes, pages, windows, caps, scales, sequences that are split or passed by.
IN_CI = {
    *("gpu-mixed-0.6b", "gpu-decodes-8b", "gpu-mixed-32b", "gpu-drafts-32b", "gpu-page_128-smollm2", "gpu-page_32-window"),
    *("gpu-decodes-window-soft_cap", "gpu-page_16-last_page_seen", "gpu-nothing", "gpu-fills_the_pool", "gpu-split"),
    *("gpu-long-decodes", "gpu-long-mixed", "gpu-long-mixed-8b", "gpu-scale-negative", "gpu-scale-0", "gpu-pass_by-8b"),
    *("gpu-soft_cap", "gpu-decodes-soft_cap", "gpu-pass_by-window-soft_cap"),
}
# Four consumers, round their ring three times, and others with three items each.
FOUR = Case(
    "gpu-four_consumers",
    ((64, 640), *((1, k) for k in range(1, 8))),
    Heads(3, 1, 64),
    64,
    "bfloat16",
    padding_tokens=0,
    padding_seqs=0,
)
CHUNK = 64  # so that short sequences cross boundaries and are split
# The interpreter multiplies with numpy, which warns of the NaN that stands in slots and rows that nobody reads.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpreted_without_a_gpu():
    with contextlib.nullcontext() if ON_DEVICE else gpu.interpreted(detect_races=True):
        yield


def planner_of(case: Case, batch: Batch, *, num_ctas: int = 3, split_q_len: int = 1, consumers: int | None = None) -> Planner:
    T, N, H = batch.q.shape
    max_q_len = min(case.max_q_len or T, T)
    tiles = choose_tiles(head_dim=H, group=N // case.heads.K, max_q_len=max_q_len, device_kind="")
    return Planner.make(
        num_tokens=T,
        num_seqs=len(batch.kv_lens),
        max_q_len=max_q_len,
        num_query_heads=N,
        num_kv_heads=case.heads.K,
        head_dim=H,
        max_kv_len=batch.page_table.shape[1] * case.page_size,
        sliding_window=case.sliding_window,
        split_q_len=split_q_len,
        num_ctas=num_ctas,
        tiles=Tiles(consumers=consumers or tiles.consumers, stages=3, chunk=CHUNK),
    )


def attention(planner: Planner, case: Case):
    """jitted: (arrays of a batch, packed work list) -> [T, N, H]."""

    @jax.jit
    def run(arrays, packed):
        return ragged_paged_attention(*arrays, **case.options, backend="mosaic_sm90", work=planner.work(packed))

    def run_and_check(arrays, packed):
        out = np.asarray(run(arrays, packed))
        if not ON_DEVICE:
            assert not gpu.races_found()
            # What nobody writes of an interpreted kernel's output is NaN: rows that no sequence owns are not touched.
            assert np.isnan(out[int(arrays[3][-1]) :].astype(np.float32)).all()
        return out

    return run_and_check


@pytest.mark.parametrize(
    "case",
    chosen(
        [(case,) for case in (*INTERPRETED, FOUR)],
        quick=lambda case: case.name in QUICK,
        in_ci=lambda case: case.name in IN_CI or case is FOUR,
    ),
    ids=lambda case: case.name,
)
def test_matches_unpaged_float64(case):
    batch = build(case)
    planner = planner_of(case, batch, split_q_len=4 if "drafts" in case.name else 1)
    packed = planner.plan(np.diff(batch.cu_q_lens), batch.kv_lens)
    out, want = attention(planner, case)(batch.arrays, packed), expected(case, batch)
    assert out.shape == batch.q.shape and out.dtype == batch.q.dtype
    tolerance = 2 * TOLERANCE[case.dtype]  # weights are rounded to the dtype before they meet the values
    np.testing.assert_allclose(out[: len(want)].astype(np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 150])
def test_what_the_device_plans_has_the_bits_of_what_the_host_plans(window):
    """Of sequences that are split, that are not, and that have no query; planned for some positions more than there are."""
    seqs = ((1, 300), (1, 20), (1, 129), (0, 90))
    case = Case("decodes", seqs, Heads(4, 1, 64), 16, "bfloat16", max_q_len=1, sliding_window=window, padding_tokens=1)
    batch = build(case)
    planner, q_lens = planner_of(case, batch), jnp.diff(batch.cu_q_lens)
    run = attention(planner, case)
    least = batch.kv_lens * q_lens
    device = planner.plan_decodes(least + 3 * q_lens, least)
    host = planner.plan(np.asarray(q_lens), np.asarray(batch.kv_lens))
    assert planner.shape.unpack(device)["num_split"] > 0
    got, want = (run(batch.arrays, packed)[:3].view(np.uint16) for packed in (device, host))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", slow_unless(lambda case: case is SPLIT, [INTERPRETED[0], SPLIT]), ids=lambda case: case.name)
def test_a_call_outside_of_jit_plans_for_itself(monkeypatch, case):
    plans, plan = [], work_list.plan

    def plan_and_keep(shape, *lens, **options):
        packed = plan(shape, *lens, **options)
        plans.append(shape.unpack(packed))
        return packed

    monkeypatch.setattr(work_list, "plan", plan_and_keep)
    batch = build(case)
    out, want = np.asarray(ragged_paged_attention(*batch.arrays, backend="mosaic_sm90", **case.options)), expected(case, batch)
    assert ON_DEVICE or not gpu.races_found()
    (parts,) = plans
    assert parts["num_split"] == (1 if case is SPLIT else 0)
    tolerance = 2 * TOLERANCE[case.dtype]
    np.testing.assert_allclose(out[: len(want)].astype(np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_a_second_consumer_of_the_cases_has_rows(case):
    planner = planner_of(case, build(case))
    tokens = planner.tiles.consumer_tokens(case.heads.N // case.heads.K, planner.shape.max_q_len)
    assert (planner.tiles.consumers > 1) == (max(q_len for q_len, _ in case.seqs) > tokens)


def test_the_cases_go_round_every_ring_twice():
    """Every slot is filled a third time, in cases that CI has: a fault in how it is freed shows then."""
    blocks: dict[int, int] = {1: 0, 2: 0, 3: 0, 4: 0}  # most of any CTA, by its consumers
    items: dict[int, int] = dict(blocks)
    partials = 0  # most of any group
    for case in (FOUR, *(case for case in INTERPRETED if case.name in QUICK | IN_CI)):
        batch = build(case)
        planner = planner_of(case, batch, split_q_len=4 if "drafts" in case.name else 1)
        q_lens, kv_lens = np.diff(batch.cu_q_lens), np.asarray(batch.kv_lens)
        packed = planner.plan(q_lens, kv_lens)
        parts, consumers = planner.shape.unpack(packed), planner.tiles.consumers
        items_of_cta = np.diff(parts["cta_start"])
        loads = work_list.loads(planner.shape, packed, q_lens, kv_lens) - work_list.ITEM_COST * items_of_cta
        blocks[consumers] = max(blocks[consumers], loads.max())
        items[consumers] = max(items[consumers], items_of_cta.max())
        partials = max(partials, parts["groups"][: parts["num_split"][0], 2].max(initial=0))
    assert min(blocks.values()) >= 3 * planner.tiles.stages, blocks
    assert min(items.values()) >= 3, items
    assert partials >= 3 * combine.DEPTH


BITS = Case("bits", ((1, 300), (4, 90), (20, 40), (1, 129)), Heads(4, 1, 64), 16, "bfloat16", padding_tokens=4, padding_seqs=1)


def seats(batch: Batch, order: list[int]) -> tuple[tuple, np.ndarray]:
    """The batch with only these sequences, in this order, in the same shapes: (arrays, the rows of `batch` that come first)."""
    q, kv_pages, table, cu_q_lens, kv_lens = (np.asarray(x) for x in batch.arrays)
    rows = np.concatenate([np.arange(cu_q_lens[s], cu_q_lens[s + 1]) for s in order])
    new_q, new_table = np.full_like(q, np.nan), np.full_like(table, -1)
    new_kv_lens, q_lens = np.zeros_like(kv_lens), np.zeros_like(kv_lens)
    new_q[: len(rows)], new_table[: len(order)], new_kv_lens[: len(order)] = q[rows], table[order], kv_lens[order]
    q_lens[: len(order)] = np.diff(cu_q_lens)[order]
    new_cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    return (new_q, kv_pages, new_table, new_cu, new_kv_lens), rows


@pytest.mark.parametrize("heads", [Heads(4, 1, 64), Heads(8, 1, 128)], ids=["4/1x64", "8/1x128"])
@pytest.mark.slow
def test_bits_depend_on_the_sequence_alone(monkeypatch, heads):
    """In company, alone, in another order, planned longer than true, on another number of CTAs, split or not."""
    case = dataclasses.replace(BITS, heads=heads)
    batch = build(case)
    q_lens = np.diff(batch.cu_q_lens)
    planner = planner_of(case, batch)
    run = attention(planner, case)
    packed = planner.plan(q_lens, batch.kv_lens)
    whole = run(batch.arrays, packed)
    was_split = [set(planner.shape.unpack(packed)["groups"][:, 2])]

    for order in ([0], [3, 2], [2, 0, 1]):
        arrays, rows = seats(batch, order)
        packed = planner.plan(np.diff(arrays[3]), arrays[4])
        was_split.append(set(planner.shape.unpack(packed)["groups"][:, 2]))
        out = run(arrays, packed)
        assert out[: len(rows)].tobytes() == whole[rows].tobytes(), order
    assert any(was_split[1] - {0})  # alone, the decode of 300 is split

    n = int(batch.cu_q_lens[-1])
    longer = planner.plan(q_lens, np.where(q_lens > 0, np.minimum(np.asarray(batch.kv_lens) + 70, planner.shape.max_kv_len), 0))
    # The decode of 129 has three chunks: one of its items finds no KV at all.
    assert planner.shape.unpack(longer)["groups"][:2].tolist() == [[0, 0, 5], [3, 5, 4]]
    assert run(batch.arrays, longer)[:n].tobytes() == whole[:n].tobytes()

    one_cta = planner_of(case, batch, num_ctas=1)
    monkeypatch.setattr(work_list, "SPLIT_SHARE", 1e-6)
    unsplit = one_cta.plan(q_lens, batch.kv_lens)
    assert (one_cta.shape.unpack(unsplit)["groups"][:, 2] == 0).all()
    assert attention(one_cta, case)(batch.arrays, unsplit)[:n].tobytes() == whole[:n].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu-mixed-8b", "gpu-pass_by-8b"])
def test_a_plan_may_pass_the_kv(name):
    """By 70 positions: items then have no blocks, and two consumers must take their turns all the same."""
    case = next(case for case in INTERPRETED if case.name == name)
    batch = build(case)
    planner, q_lens, kv_lens = planner_of(case, batch), np.diff(batch.cu_q_lens), np.asarray(batch.kv_lens)
    longer = planner.plan(q_lens, np.where(q_lens > 0, np.minimum(kv_lens + 70, planner.shape.max_kv_len), kv_lens))
    begin, stop, _ = work_list._planned_extents(planner.shape, longer, q_lens, kv_lens)
    assert planner.tiles.consumers > 1 and (begin == stop).any()
    run, n = attention(planner, case), int(batch.cu_q_lens[-1])
    exact = run(batch.arrays, planner.plan(q_lens, kv_lens))
    assert run(batch.arrays, longer)[:n].tobytes() == exact[:n].tobytes()


RUNS = Case("runs", ((1, 600), (1, 330), (1, 200)), Heads(2, 1, 64), 64, "bfloat16", max_q_len=1)


@pytest.mark.parametrize(
    "case", slow_unless(lambda case: case is RUNS, [RUNS, dataclasses.replace(RUNS, sliding_window=200)]), ids=["all", "window"]
)
@pytest.mark.slow
def test_items_of_several_chunks(monkeypatch, case):
    """Planned longer than true too: then some chunks of an item have no KV, its last or, where a window moves on, its first."""
    batch = build(case)
    planner = planner_of(case, batch, num_ctas=2)
    run, q_lens, true = attention(planner, case), np.diff(batch.cu_q_lens), np.asarray(batch.kv_lens)
    longer = np.where(q_lens > 0, np.minimum(true + 130, planner.shape.max_kv_len), 0)
    outs = []
    for kv_lens, least in ((true, None), (longer, true), (longer, np.maximum(true - 130, q_lens))):
        packed = planner.plan(q_lens, kv_lens, least_kv_lens=least)
        parts = planner.shape.unpack(packed)
        assert parts["items"][:, 3].max() > 1  # chunks
        assert parts["num_split"] == 3  # on two CTAs
        outs.append(run(batch.arrays, packed)[:3])
    monkeypatch.setattr(work_list, "SPLIT_SHARE", 1e-6)
    whole = planner.plan(q_lens, true)
    assert not planner.shape.unpack(whole)["items"][:, 3].any()
    outs.append(run(batch.arrays, whole)[:3])
    assert len({out.tobytes() for out in outs}) == 1
    np.testing.assert_allclose(outs[0].astype(np.float64), expected(case, batch), rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(ON_DEVICE, reason="nothing is interpreted, where loads can be counted")
@pytest.mark.parametrize("page_size", slow_unless(lambda page_size: page_size == 16, [16, 32, 128]))
def test_the_kernel_loads_what_the_plan_counts(monkeypatch, page_size):
    rows, load_rows = [], producer._load_rows

    def count_and_load(*args):
        jax.debug.callback(lambda: rows.append(args[-1]))
        load_rows(*args)

    monkeypatch.setattr(producer, "_load_rows", count_and_load)
    case = Case("tails", ((1, 150), (1, 63), (3, 66), (1, 128)), Heads(2, 1, 64), page_size, "bfloat16")
    batch = build(case)
    planner, q_lens = planner_of(case, batch), np.diff(batch.cu_q_lens)
    packed = planner.plan(q_lens, batch.kv_lens)
    attention(planner, case)(batch.arrays, packed)
    jax.effects_barrier()
    assert sum(rows) == 160 + 64 + 80 + 128
    assert sum(rows) == work_list.positions_read(planner.shape, packed, q_lens, np.asarray(batch.kv_lens))


@pytest.mark.slow
def test_a_decode_row_equals_the_row_of_a_prefill_tile():
    """The decode is split over CTAs and joined by the second kernel, in a program for decodes; the tile walks all its KV."""
    chunk = Case("chunk", ((20, 200),), Heads(4, 1, 64), 16, "bfloat16", padding_tokens=0, padding_seqs=0)
    batch = build(chunk)
    planner = planner_of(chunk, batch, consumers=2)
    tile = attention(planner, chunk)(batch.arrays, planner.plan([20], [200]))
    decode = Case("decode", ((1, 200),), Heads(4, 1, 64), 16, "bfloat16", max_q_len=1)
    arrays = (batch.q[19:], batch.kv_pages, batch.page_table, jnp.array([0, 1], jnp.int32), batch.kv_lens)
    planner = planner_of(decode, Batch(*arrays, keys=(), values=()))
    packed = planner.plan([1], [200])
    assert planner.shape.unpack(packed)["groups"].tolist() == [[0, 0, 4]]
    assert attention(planner, decode)(arrays, packed)[0].tobytes() == tile[19].tobytes()


CAN = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": jnp.bfloat16}
CANNOT = (  # what of CAN is changed; the message
    ({"dtype": jnp.float32}, "float32: it has bfloat16 and float16"),
    ({"head_dim": 96}, "head_dim=96: it has 64 and 128"),
    ({"page_size": 8}, "page_size=8: it has 16, 32 and multiples of 64"),
    ({"num_query_heads": 256}, "128 query heads a KV head: it has up to 64"),
)


def test_what_mosaic_cannot_do_is_said():
    assert resolve_backend("mosaic_sm90", **CAN) == "mosaic_sm90"
    for change, message in CANNOT:
        with pytest.raises(NotImplementedError, match=f"mosaic_sm90 can't do {message}"):
            resolve_backend("mosaic_sm90", **{**CAN, **change})


def test_auto_is_mosaic_where_it_can_and_says_once_why_not(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    api._say_fallback.cache_clear()
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"), caplog.at_level(logging.WARNING, logger="jaxserve"):
        assert resolve_backend("auto", **CAN) == "mosaic_sm90" and not caplog.records
        for change, _ in CANNOT * 2:
            assert resolve_backend("auto", **{**CAN, **change}) == "xla"
        monkeypatch.setattr(gpu, "missing_for_sm90", lambda: "compute capability 9.0, found 8.0 (NVIDIA A100)")
        assert resolve_backend("auto", **CAN) == "xla"
    said = [record.getMessage() for record in caplog.records]
    lacks = [*(message for _, message in CANNOT), "a device: it needs compute capability 9.0, found 8.0 (NVIDIA A100)"]
    assert said[::2] == [f"attention runs on xla: mosaic_sm90 can't do {message}" for message in lacks]
    assert all(line.startswith("attention runs on xla: mosaic_portable can't do ") for line in said[1::2]), (
        "which nobody interprets"
    )


def test_auto_inside_jit_says_once_that_work_was_not_given(monkeypatch, caplog):
    batch = build(INTERPRETED[0])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    api._say_fallback.cache_clear()
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"), caplog.at_level(logging.WARNING, logger="jaxserve"):
        for max_q_len in (1, 2):
            jax.eval_shape(functools.partial(ragged_paged_attention, max_q_len=max_q_len), *batch.arrays)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "attention runs on xla: mosaic_sm90 can't do a call inside jit without work=: plan with host_planner"
    assert len(said) == 2 and "mosaic_portable" in said[1]


def test_work_of_other_shapes_is_refused():
    case = INTERPRETED[0]
    batch = build(case)
    planner = planner_of(case, batch)
    packed = jnp.asarray(planner.plan(np.diff(batch.cu_q_lens), batch.kv_lens))
    call = functools.partial(ragged_paged_attention, *batch.arrays, backend="mosaic_sm90")
    with pytest.raises(ValueError, match="work was planned for"):
        call(max_q_len=None, work=planner.work(packed))
    with pytest.raises(ValueError, match="work was planned for"):
        call(max_q_len=1, sliding_window=4, work=planner.work(packed))
    with pytest.raises(ValueError, match="inside jit, pass work="):
        jax.jit(lambda *arrays: ragged_paged_attention(*arrays, backend="mosaic_sm90"))(*batch.arrays)


def test_tiles_check_themselves():
    for wrong in ({"consumers": 5}, {"stages": 2}, {"chunk": 100}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Tiles(**{"consumers": 1, "stages": 3, **wrong})
    with pytest.raises(ValueError, match="shared memory"):
        Tiles(consumers=2, stages=4).check_smem(128)
    with pytest.raises(ValueError, match="shared memory"):
        Tiles(consumers=3, stages=3).check_smem(128)


def test_a_second_consumer_where_one_does_not_hold_every_query():
    for group, max_q_len in itertools.product((1, 2, 3, 4, 8, 9, 64), (1, 2, 4, 5, 7, 8, 9, 16, 64, 65, 2048)):
        tiles = choose_tiles(head_dim=128, group=group, max_q_len=max_q_len, device_kind="")
        assert (tiles.consumers == 2) == (max_q_len > tiles.consumer_tokens(group, max_q_len)), (group, max_q_len)
        wanted = min(4, -(-max_q_len // tiles.consumer_tokens(group, max_q_len)))
        assert choose_tiles(head_dim=64, group=group, max_q_len=max_q_len, device_kind="").consumers == wanted
    drafts = tile_candidates(AttentionBatch.make((64, 8, 128), [(5, 300)], num_pages=5))  # 40 rows
    assert drafts[0] == Tiles(consumers=1, stages=4) and all(tiles.consumers == 1 for tiles in drafts)


def test_tuned_tiles_override_the_heuristic(monkeypatch, tmp_path):
    tuned = {
        "head_dim=128 decode": {"consumers": 1, "stages": 3, "chunk": 1024},
        "head_dim=64 prefill": {"consumers": 1, "stages": 5},
    }
    (tmp_path / "nvidia_h100_tuned.json").write_text(json.dumps({"tiles": tuned, "about": {"by": "this test"}}))
    monkeypatch.setattr(tiles_file, "TUNED", tmp_path)
    choose = functools.partial(choose_tiles, group=4, device_kind="NVIDIA H100 tuned")
    assert choose(head_dim=128, max_q_len=16) == Tiles(consumers=1, stages=3, chunk=1024)
    assert choose(head_dim=64, max_q_len=17) == Tiles(consumers=1, stages=5)
    for head_dim, max_q_len in ((128, 17), (64, 16)):
        untuned = choose_tiles(head_dim=head_dim, max_q_len=max_q_len, group=4, device_kind="")
        assert choose(head_dim=head_dim, max_q_len=max_q_len) == untuned


def two_writers(turns: bool):
    """A kernel whose two warpgroups write one piece of shared memory: in turn, or in a race."""

    def body(out, smem, first_done):
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            smem[...] = jnp.zeros(smem.shape, smem.dtype)
            gpu.barrier_arrive(first_done)

        @pl.when(warpgroup == 1)
        def _():
            if turns:
                gpu.barrier_wait(first_done)
            smem[...] = jnp.ones(smem.shape, smem.dtype)
            if not turns:
                gpu.barrier_wait(first_done)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(smem, out)
            gpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((128,), jnp.float32)
    scratch = [gpu.SMEM(shape.shape, shape.dtype), gpu.Barrier()]
    return gpu.kernel(body, out_type=shape, grid={"cta": 1}, scratch_types=scratch, warpgroups=2)


@pytest.mark.skipif(ON_DEVICE, reason="nothing is interpreted")
def test_a_race_is_found_though_a_clean_kernel_follows():
    with pytest.raises(RuntimeError, match="no interpreted kernel has run"):
        gpu.races_found()
    assert (np.asarray(jax.jit(two_writers(turns=True))()) == 1).all()
    assert not gpu.races_found()
    jax.block_until_ready(jax.jit(two_writers(turns=False))())
    assert gpu.races_found()
    jax.block_until_ready(jax.jit(two_writers(turns=True))())
    assert gpu.races_found()

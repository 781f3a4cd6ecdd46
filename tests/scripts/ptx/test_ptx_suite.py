"""That what `ptx_check` runs is what ships: attention's rings and chunks, and the tiles of the fused matmul."""

import math

import pytest

from kernels.fused_matmul import cases as fused_cases
from kernels.fused_matmul.tiles import BLOCK_K
from kernels.fused_matmul.tiles import choose_tiles as choose_fused_tiles
from kernels.ragged_paged_attention.cases import HEADS
from kernels.ragged_paged_attention.mosaic_sm90.tiles import choose_tiles
from kernels.ragged_paged_attention.work_list import BLOCK
from scripts.ptx.agreement import BUCKETS, FUSED, FUSED_ROWS, fused_tilings
from scripts.ptx.agreement import HEADS as AGREEING
from scripts.ptx.attention import CHUNK, STAGES, AttentionPtx, ShippedPtx
from scripts.ptx.suite import FUSED_TILES, SHIPPED_CASES

NUM_CTAS = 3  # of a program, among which a decode is split
TOKENS = (1, 2, 8, 16, 24, 32, 64, 128, 512, 2048, 8192)


def _most_tokens(case):
    return case.max_q_len or sum(q_len for q_len, _ in case.seqs)


def test_every_ring_that_ships_is_run():
    shipped = [choose_tiles(head_dim=H, group=N // K, max_q_len=T, device_kind="") for N, K, H in HEADS.values() for T in TOKENS]
    cases = {(case.heads.H, ShippedPtx.tiles_of(case.heads, _most_tokens(case))) for case in SHIPPED_CASES}
    agreeing = {(heads.H, ShippedPtx.tiles_of(heads, tokens)) for heads in AGREEING for tokens in BUCKETS}
    assert {tiles for _, tiles in cases | agreeing} == set(shipped)
    assert {tiles.stages for _, tiles in cases} == {tiles.stages for tiles in shipped}
    assert {tiles.consumers for _, tiles in cases} == {tiles.consumers for tiles in shipped}


@pytest.mark.parametrize("case", SHIPPED_CASES, ids=lambda case: case.name)
def test_shipped_cases_go_twice_round_the_ring_and_past_two_chunks(case):
    tiles = ShippedPtx.tiles_of(case.heads, _most_tokens(case))
    longest = max(kv_len for _, kv_len in case.seqs)
    of_a_cta = longest / (NUM_CTAS if case.max_q_len == 1 else 1)
    assert of_a_cta > 2 * tiles.stages * BLOCK and longest > 2 * tiles.chunk
    cut = AttentionPtx.tiles_of(case.heads, _most_tokens(case))
    assert (cut.consumers, cut.stages, cut.chunk) == (tiles.consumers, STAGES, CHUNK)


@pytest.mark.parametrize("gated", [False, True])
def test_bits_are_compared_in_every_tile_that_132_sms_are_given(gated):
    compared = {tiles for rows, tiles in fused_tilings(gated=gated, few=False) if rows == FUSED_ROWS}
    alone = {tiles for rows, tiles in fused_tilings(gated=gated, few=False) if rows == 8}
    chosen = {
        T: {choose_fused_tiles(T, D, F, gated=gated, num_sms=132) for D in (576, 1024, 2560, 4096) for F in range(64, 32769, 320)}
        for T in TOKENS
    }
    assert set().union(*chosen.values()) <= compared and chosen[8] <= alone
    assert len(set().union(*chosen.values())) >= 6


@pytest.mark.parametrize("gated", [False, True])
def test_every_tile_of_the_compared_bits_goes_twice_round_the_ring_that_ships(gated):
    """One tile alone does: some thread blocks have no other."""
    short = [tiles for _, tiles in fused_tilings(gated=gated, few=False) if FUSED.D // BLOCK_K <= 2 * tiles.stages]
    assert not short


def test_each_kind_of_fused_matmul_goes_twice_round_the_ring_that_the_kernel_chooses():
    deep = set()
    for case in fused_cases.CASES:
        tiles = choose_fused_tiles(case.T, case.D, case.F, gated=case.gated, num_sms=NUM_CTAS)
        if case.D // BLOCK_K > 2 * tiles.stages:
            deep.add((case.norm, case.gated))
    assert deep == {(True, False), (True, True), (False, False)}


@pytest.mark.parametrize(("name", "tiles"), FUSED_TILES)
def test_fused_matmuls_in_a_short_ring_go_twice_round_it(name, tiles):
    (case,) = [case for case in fused_cases.CASES if case.name == name]
    of_a_cta = math.ceil(tiles.num_tiles(case.T, case.F) / NUM_CTAS)
    assert of_a_cta * (case.D // BLOCK_K) >= 2 * tiles.stages

"""Every backend of the grouped matmul against float64, the layout that they share against its promises, and the gradient."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import gpu
from kernels.grouped_matmul import (
    combine_rows,
    gather_rows,
    grouped_matmul,
    layout,
    mosaic_layout,
    mosaic_portable,
    mosaic_sm90,
    plan_groups,
)
from kernels.grouped_matmul.cases import CASES, LAYOUTS, TOLERANCE, build, expected
from tests.kernels.cpu_levels import AUTO
from tests.selection import chosen

NAMED = {case.name: case for case in CASES}
RUNS = [(case, backend) for case in CASES for backend in ("reference", "xla")]
RUNS += [(case, "cpu") for case in CASES if case.dtype != "float16" and AUTO == "cpu"]
RUNS += [(case, "mosaic_sm90") for case in CASES if case.dtype != "float32"]
QUICK = {"one_token", "nothing", "padding", "few_active", "bfloat16", "float16"}  # make test has these cases alone
QUICK_RUNS = [run if run[0].name in QUICK else pytest.param(*run, marks=pytest.mark.slow) for run in RUNS]


def products(batch, backend):
    """[T, k, F]: every token's products, taken out of the rows; zero for padding."""
    groups = plan_groups(batch.group_ids, [batch.w], num_tokens=batch.num_tokens, backend=backend)
    y = grouped_matmul(gather_rows(batch.x, groups), batch.w, groups, gated=batch.gated)
    return y.at[groups.row].get(mode="fill", fill_value=0)


def close(have, want, dtype):
    np.testing.assert_allclose(np.asarray(have, np.float64), want, rtol=0, atol=TOLERANCE[dtype] * max(np.abs(want).max(), 1))


@pytest.mark.parametrize(("case", "backend"), QUICK_RUNS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_products_are_right_and_nothing_else_is_read(case, backend):
    """Matrices that nobody chose, and padding tokens, are NaN."""
    batch = build(case)
    run = jax.jit(functools.partial(products, backend=backend))
    if backend != "mosaic_sm90":
        return close(run(batch), expected(batch), case.dtype)
    with gpu.interpreted(detect_races=True):
        close(run(batch), expected(batch), case.dtype)
        assert not gpu.races_found()


def test_the_cases_go_round_the_ring_twice():
    """Every slot is filled a third time, in tiles of either size: a fault in how it is freed shows then."""
    config = mosaic_sm90.Config()
    for rows in (64, 128):
        deep = [c.D for c in CASES if c.dtype != "float32" and mosaic_sm90.block_rows(c.T, c.k, c.E) == rows]
        assert max(deep) >= 3 * config.stages * config.block_k, rows


@functools.partial(jax.jit, static_argnames=("num_groups", "block_rows"))
def lay_out(ids, num_tokens, num_groups, block_rows):
    return layout.lay_out(ids, num_groups, num_tokens=num_tokens, block_rows=block_rows, backend="xla")


@pytest.mark.parametrize(
    ("case", "block_rows"),
    chosen(
        itertools.product(CASES, (8, 64)),
        quick=lambda case, block_rows: case.name in QUICK and block_rows == 8,
        in_ci=lambda case, block_rows: block_rows == (64, 8)[CASES.index(case) % 2] or case.name in QUICK,
    ),
    ids=lambda x: x if isinstance(x, int) else x.name,
)
def test_the_layout_keeps_its_promises(case, block_rows):
    batch = build(case)
    ids, T, k, E = np.asarray(batch.group_ids), case.T, case.k, case.E
    real = T if batch.num_tokens is None else int(batch.num_tokens)
    groups = lay_out(batch.group_ids, batch.num_tokens, E, block_rows)
    g = {f.name: np.asarray(getattr(groups, f.name)) for f in dataclasses.fields(groups)}
    M, W = layout.layout_sizes(T, k, E, block_rows)
    assert groups.num_rows == M and len(g["tile_row"]) == W

    # Every choice of a real token has a row in its group, in the order of the tokens; nobody else has one.
    np.testing.assert_array_equal(g["sizes"], [(ids[:real] == e).sum() for e in range(E)])
    assert (g["starts"] % layout.ROW_ALIGN == 0).all()
    for e in range(E):
        tokens = np.nonzero((ids[:real] == e).any(1))[0]
        np.testing.assert_array_equal(g["token"][g["starts"][e] : g["starts"][e] + len(tokens)], tokens)
    assert (g["token"] < T).sum() == real * k
    np.testing.assert_array_equal(g["token"][g["row"][:real]], np.repeat(np.arange(real), k).reshape(real, k))
    assert (g["row"][real:] >= M).all() and len(np.unique(g["row"])) == T * k

    # The tiles take every row once, their own group's, and reach nowhere past the end.
    n = int(g["num_tiles"])
    assert n <= W and (g["tile_rows"][:n] > 0).all() and not g["tile_rows"][n:].any()
    covered = [(g["tile_row"][i] + r, g["tile_group"][i]) for i in range(n) for r in range(g["tile_rows"][i])]
    owned = [(g["starts"][e] + r, e) for e in range(E) for r in range(g["sizes"][e])]
    assert sorted(covered) == sorted(owned)
    assert (np.diff(g["tile_row"][:n]) > 0).all()
    assert (g["tile_row"] % layout.ROW_ALIGN == 0).all() and (g["tile_row"] + block_rows <= M).all()


LAID_OUT = [case for case in CASES if case.dtype == "float32"] + [case for case in LAYOUTS if case.T < 100]


@pytest.mark.parametrize(
    ("case", "elsewhere"),
    chosen(
        itertools.product(LAID_OUT, (False, True)),
        quick=lambda case, _: case.name == "one_of_many",
        in_ci=lambda case, elsewhere: elsewhere == bool(LAID_OUT.index(case) % 2),
    ),
    ids=lambda x: x if isinstance(x, bool) else x.name,
)
def test_the_kernel_lays_out_the_same(case, elsewhere):
    """Every integer, and without races; elsewhere: every third choice is of a group that is not here."""
    batch = build(case)
    ids = batch.group_ids
    if elsewhere:
        ids = jnp.where(jnp.arange(ids.size).reshape(ids.shape) % 3 == 1, layout.ELSEWHERE, ids)
    options = {"num_tokens": batch.num_tokens, "block_rows": 64, "backend": "mosaic_sm90", "some_elsewhere": elsewhere}
    with gpu.interpreted(detect_races=True):
        have = jax.jit(lambda ids: mosaic_layout.lay_out(ids, case.E, **options))(ids)
        jax.block_until_ready(have)
        assert not gpu.races_found()
    chex.assert_trees_all_equal(have, layout.lay_out(ids, case.E, **options))


@pytest.mark.parametrize("sizes", [(8, 1, 5), (6, 3, 4), (24, 2, 3), (2, 2, 9)])
def test_rows_and_tiles_fit_the_worst_batch(sizes):
    """Random batches and the one in which the rows beyond each group's first all fall on one group."""
    T, k, E = sizes
    rng = np.random.default_rng(0)
    batches = [np.stack([rng.permutation(E)[:k] for _ in range(T)]) for _ in range(30)]
    batches.append(np.stack([np.roll(np.arange(E), -min(t, E - k))[:k] for t in range(T)]))
    M, W = layout.layout_sizes(T, k, E, 8)
    for ids in batches:
        used = sum(-(-(ids == e).sum() // 8) for e in range(E))
        assert used <= W and 8 * used <= M


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_row_does_not_depend_on_the_batch(backend):
    """The same token among other tokens, at another place, in tiles of one size: the same bits."""
    batch = build(NAMED["padding"])
    run = jax.jit(functools.partial(products, backend=backend))
    clean = dataclasses.replace(batch, w=jnp.nan_to_num(batch.w), x=jnp.nan_to_num(batch.x))
    first = np.asarray(run(clean))
    rng = np.random.default_rng(1)
    for move in (1, 7, 20):
        x = rng.standard_normal(clean.x.shape).astype(np.float32)
        ids = np.roll(np.asarray(clean.group_ids), 5, axis=0)
        x[move], ids[move] = clean.x[3], clean.group_ids[3]
        again = run(dataclasses.replace(clean, x=jnp.asarray(x), group_ids=jnp.asarray(ids)))
        np.testing.assert_array_equal(np.asarray(again)[move], first[3])


def test_rows_of_no_token_pass_nothing_back():
    """Whatever was computed from them: they hold the last token's vector, which is not theirs."""
    batch = build(NAMED["padding"])
    groups = plan_groups(batch.group_ids, [batch.w], num_tokens=batch.num_tokens, backend="xla")
    x = jnp.nan_to_num(batch.x)
    rows, vjp = jax.vjp(lambda x: gather_rows(x, groups), x)
    owned = np.asarray(groups.token) < len(x)
    np.testing.assert_array_equal(np.asarray(rows)[owned], np.asarray(x)[np.asarray(groups.token)[owned]])
    (dx,) = vjp(jnp.where(owned[:, None], jnp.ones_like(rows), jnp.nan))
    num_rows = np.bincount(np.asarray(groups.token)[owned], minlength=len(x))
    np.testing.assert_array_equal(np.asarray(dx), np.broadcast_to(num_rows[:, None], x.shape))


def mixture(x, w1, w2, weights, ids, num_tokens, backend):
    groups = plan_groups(ids, (w1, w2), num_tokens=num_tokens, backend=backend)
    hidden = jnp.tanh(grouped_matmul(gather_rows(x, groups), w1, groups))
    return combine_rows(grouped_matmul(hidden, w2, groups), groups, weights)


def test_gradients_are_those_of_a_dense_mixture():
    """A mixture of two matmuls, padding included, against autodiff of one-hot einsums."""
    batch, rng = build(NAMED["padding"]), np.random.default_rng(2)
    x, w1 = jnp.nan_to_num(batch.x), jnp.nan_to_num(batch.w)
    w2 = jnp.asarray(rng.standard_normal((w1.shape[0], w1.shape[2], w1.shape[1])) / 10, jnp.float32)
    weights, real = jnp.asarray(rng.random(batch.group_ids.shape), jnp.float32), NAMED["padding"].num_tokens or 0

    def dense(x, w1, w2, weights):
        hot = jax.nn.one_hot(batch.group_ids, w1.shape[0]) * weights[:, :, None]
        hot = (hot * (jnp.arange(len(x)) < real)[:, None, None]).sum(1)
        hidden = jnp.tanh(jnp.einsum("TD,EDF->TEF", x, w1, precision="highest"))
        return jnp.einsum("TEF,EFD,TE->TD", hidden, w2, hot, precision="highest")

    sparse = functools.partial(mixture, ids=batch.group_ids, num_tokens=batch.num_tokens, backend="xla")
    probe = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    have, want = (
        jax.jit(jax.value_and_grad(lambda *args, f=f: (f(*args) * probe).sum(), argnums=(0, 1, 2, 3)))(x, w1, w2, weights)
        for f in (sparse, dense)
    )
    np.testing.assert_allclose(have[0], want[0], rtol=1e-5)
    for a, b in zip(have[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.slow
def test_the_gradient_of_a_gated_kernel_is_that_of_xla():
    """The kernel keeps no products: they are computed again."""
    batch = build(NAMED["bfloat16_gated"])
    x, w = jnp.nan_to_num(batch.x), jnp.nan_to_num(batch.w)
    probe = jnp.asarray(np.random.default_rng(3).standard_normal((*batch.group_ids.shape, w.shape[2] // 2)), jnp.float32)

    def loss(x, w, backend):
        return (products(dataclasses.replace(batch, x=x, w=w), backend).astype(jnp.float32) * probe).sum()

    want = jax.jit(jax.grad(functools.partial(loss, backend="xla"), argnums=(0, 1)))(x, w)
    with gpu.interpreted():
        have = jax.jit(jax.grad(functools.partial(loss, backend="mosaic_sm90"), argnums=(0, 1)))(x, w)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_combine_weighs_in_float32_and_leaves_padding_zero():
    batch = build(NAMED["bfloat16"])
    weights = jnp.asarray(np.random.default_rng(0).random(batch.group_ids.shape), jnp.float32)

    @jax.jit
    def there_and_back(x, weights):
        groups = plan_groups(batch.group_ids, [batch.w], num_tokens=batch.num_tokens, backend="xla")
        return combine_rows(gather_rows(x, groups), groups, weights)

    out = np.asarray(there_and_back(batch.x, weights), np.float32)
    want = np.asarray(batch.x, np.float32) * np.asarray(weights).sum(1, keepdims=True)
    np.testing.assert_allclose(out[:20], want[:20], rtol=5e-3)
    assert not out[20:].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": jnp.zeros((3,), jnp.int32)}, ValueError, r"group_ids is int32\(3,\); must be int32\[T, k\]"),
        ({"ids": jnp.zeros((3, 2), jnp.int16)}, ValueError, "group_ids is int16"),
        ({"ids": jnp.zeros((3, 5), jnp.int32)}, ValueError, "5 choices a token among 4 groups"),
        (
            {"weights": [jnp.zeros((4, 64, 128)), jnp.zeros((5, 128, 64))]},
            ValueError,
            r"weights\[1\] is float32\(5, 128, 64\); must be float32\[E, D, F\] with E=4",
        ),
        ({"weights": [jnp.zeros((4, 64, 128), jnp.int8)]}, ValueError, "one dtype of"),
        ({"num_tokens": jnp.ones(2, jnp.int32)}, ValueError, "num_tokens is int32"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' must be one of auto, reference"),
        ({"backend": "mosaic_sm90"}, NotImplementedError, "mosaic_sm90 needs weights in bfloat16 or float16, found float32"),
        (
            {"backend": "mosaic_sm90", "weights": [jnp.zeros((4, 96, 128), jnp.bfloat16)]},
            NotImplementedError,
            "D a multiple of 64 and F of 128",
        ),
        (
            {"backend": "mosaic_sm90", "weights": [jnp.zeros((4, 64, 128), jnp.bfloat16)]},
            NotImplementedError,
            "mosaic_sm90 needs a GPU of compute capability 9.0, found cpu",
        ),
    ],
    ids=str,
)
def test_bad_plans_are_refused(change, error, message):
    given = {"ids": jnp.zeros((3, 2), jnp.int32), "weights": [jnp.zeros((4, 64, 128))]} | change
    with pytest.raises(error, match=message):
        plan_groups(given.pop("ids"), given.pop("weights"), **given)


def planned(ids, weights, **options):
    """What is planned, abstractly: this machine need not have the device."""
    return jax.eval_shape(lambda ids: plan_groups(ids, weights, **options), ids)


def test_auto_is_the_kernel_where_it_can_be():
    ids, small, whole = jnp.zeros((3, 1), jnp.int32), jnp.zeros((2, 8, 16), jnp.bfloat16), jnp.zeros((2, 64, 128), jnp.bfloat16)
    assert plan_groups(ids, [whole]).backend == AUTO
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):
        assert planned(ids, [whole]).backend == "mosaic_sm90"
        assert planned(ids, [whole, small]).backend == planned(ids, [whole.astype(jnp.float32)]).backend == "xla"


def test_auto_on_other_gpus_is_the_portable_kernel():
    ids, whole = jnp.zeros((3, 1), jnp.int32), jnp.zeros((2, 64, 128), jnp.bfloat16)
    with gpu.assume(gpu.Device(108, "NVIDIA A100-SXM4-80GB", (8, 0))):
        groups = planned(ids, [whole])
        assert (groups.backend, groups.block_rows) == ("mosaic_portable", mosaic_portable.ROWS)
        out = jax.eval_shape(grouped_matmul, jnp.zeros((groups.num_rows, 64), jnp.bfloat16), whole, groups)
        assert (out.shape, out.dtype) == ((groups.num_rows, 128), jnp.bfloat16)
        with pytest.raises(ValueError, match="tiles of 64 rows, these groups were planned for 128"):
            mosaic_portable.matmul(whole[0], whole, lay_out(ids, None, 2, 128))
        with pytest.raises(NotImplementedError, match="mosaic_portable needs weights .* D a multiple of 64 and F of 128"):
            plan_groups(ids, [whole[:, :, :64]], backend="mosaic_portable")
        for wrong in ({"block_columns": 96}, {"stages": 1}, {"stages": 8}):
            with pytest.raises(ValueError, match="block_columns=|stages=|needs 196608 bytes of shared memory"):
                mosaic_portable.Config(**wrong)
    with gpu.assume(gpu.Device(80, "Tesla V100", (7, 0))):
        assert plan_groups(ids, [whole]).backend == "xla"


def test_bad_products_are_refused():
    groups = lay_out(jnp.zeros((3, 1), jnp.int32), None, 2, 8)
    rows = jnp.zeros((groups.num_rows, 64))
    for x, w, message in (
        (
            rows[1:],
            jnp.zeros((2, 64, 128)),
            rf"x is float32\({groups.num_rows - 1}, 64\); must be \[M, D\] with M={groups.num_rows}",
        ),
        (rows, jnp.zeros((3, 64, 128)), "E=2 and D=64"),
        (rows, jnp.zeros((2, 32, 128)), "E=2 and D=64"),
        (rows, jnp.zeros((2, 64, 128), jnp.bfloat16), "must be the same"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_matmul(x, w, groups)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_rows": 96}, "block_rows=96 must be a multiple of 64"),
        ({"block_rows": 192}, "block_rows=192 must be a power of two"),
        ({"block_k": 32}, "block_k=32"),
        ({"stages": 0}, "stages=0"),
        ({"stages": 16}, "bytes of shared memory"),
    ],
    ids=str,
)
def test_tile_sizes_check_themselves(sizes, message):
    with pytest.raises(ValueError, match=message):
        mosaic_sm90.Config(**sizes)

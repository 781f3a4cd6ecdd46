"""Products that training computes in bfloat16, against float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.models import named_leaves, with_leaves
from jaxserve.models.layers import Fused
from jaxserve.training import draft_chains
from jaxserve.training.mixed_precision import MIXED, product
from kernels.fused_matmul.reference import fused_matmul
from tests.models import test_eagle, test_medusa
from tests.models.test_eagle import target


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def test_a_product_and_its_gradient_are_of_rounded_operands_and_exact_sums():
    x, weight, g = draw(40, 24), draw(24, 48), draw(40, 48)
    y, gradient = jax.vjp(product, jnp.asarray(x), jnp.asarray(weight))
    dx, dweight = gradient(jnp.asarray(g))
    for ours, expected in (
        (y, rounded(x) @ rounded(weight)),
        (dx, rounded(g) @ rounded(weight).T),
        (dweight, rounded(x).T @ rounded(g)),
    ):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("around", "gated"), [((), False), (("scale",), True), (("residual",), False), (("bias", "residual"), False), (("bias",), True)]
)
def test_what_stands_around_a_product(around, gated):
    x, weight = draw(9, 16), draw(16, 12)
    given = {name: draw(*shape) for name, shape in (("scale", (16,)), ("bias", (12,)), ("residual", (9, 12))) if name in around}
    x = rounded(x).astype(np.float32)
    operands = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight)  # as the states of a target in bfloat16 come
    ours = MIXED.matmul(*operands, **{k: jnp.asarray(v) for k, v in given.items()}, eps=0.5, gated=gated)
    assert ours.dtype == jnp.float32
    absent = dict.fromkeys(("scale", "bias", "residual"))
    expected = fused_matmul(x, weight, **(absent | given), eps=0.5, gated=gated)
    np.testing.assert_allclose(ours, expected, atol=0.02 * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("load", [lambda: test_eagle.load("eagle3"), test_medusa.load], ids=["eagle3", "medusa"])
def test_the_gradient_of_a_head_is_that_of_float32(load):
    head, rng = load(), np.random.default_rng(0)
    tokens, begins, ends = jnp.asarray(rng.integers(0, target().config.vocab_size, (2, 20))), jnp.array([5, 3]), jnp.array([20, 16])
    states = draft_chains.target_states(target(), head, tokens)
    fixed = {path: leaf for path, leaf in named_leaves(head).items() if path == "draft_ids"}
    weights = {path: leaf for path, leaf in named_leaves(head).items() if path not in fixed}

    def gradient(fused: Fused | None) -> dict[str, jax.Array]:
        loss = lambda weights: draft_chains.loss(  # noqa: E731
            with_leaves(head, weights | fixed), states, tokens, begins, ends, 3, fused
        )
        return jax.jit(jax.grad(loss))(weights)

    ours, exact = gradient(MIXED), gradient(None)
    for path, expected in exact.items():
        off = float(jnp.linalg.norm(ours[path] - expected) / jnp.linalg.norm(expected))
        assert 0 < off < 0.03, (path, off)

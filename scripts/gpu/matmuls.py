"""The fused matmul on the card at hand: its time beside XLA's, in every tile, and whether tiles agree in every bit.

Owns the matrices and the sweep. Both sides run a row of different weights one after the other, of more bytes than the L2 cache
holds, as a step does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.aot.kernels import FUSED
from scripts.gpu.device_rates import Rates, measure
from scripts.gpu.figures import Figures

MATRICES = FUSED | {"tiny": (128, 128, "gate")}  # the last one is a dry run's
TILED = ("0.6b qkv", "0.6b gate_up")  # of which every tile is timed
TOKENS = (8, 64, 256, 2048)
_BYTES = 256 << 20  # of the weights of a program
_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Rows:
    """What both sides multiply: rows [T, D], their norm's scale or what is added [T, F], and several matrices of one shape."""

    x: Any
    scale: Any
    residual: Any
    weights: tuple[Any, ...]
    gated: bool

    @classmethod
    def make(cls, name: str, num_rows: int, *, dry_run: bool) -> Rows:
        """Random ones; the rows of fewer are the first of more."""
        import jax
        import jax.numpy as jnp

        D, F, step = MATRICES[name]
        count = 2 if dry_run else max(2, _BYTES // (2 * D * F))
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.standard_normal((max(TOKENS), D))[:num_rows], jnp.bfloat16)
        is_residual = step == "residual"
        scale = None if is_residual else jnp.asarray(1 + 0.1 * rng.standard_normal(D), jnp.bfloat16)
        residual = jnp.asarray(rng.standard_normal((num_rows, F)), jnp.bfloat16) if is_residual else None
        draw = jax.jit(lambda key: (jax.random.normal(key, (D, F)) * D**-0.5).astype(jnp.bfloat16))
        return cls(x, scale, residual, tuple(draw(jax.random.key(i)) for i in range(count)), step == "gate")

    def program(self, matmul: Callable[..., Any]) -> Any:
        """One compiled program of all products; matmul: of `kernels.fused_matmul`'s backends."""
        import jax

        from jaxserve.execution.programs import GPU_COMPILER_OPTIONS

        @jax.jit  # outlined: one kernel is compiled, not one for each matrix
        def product(w, x, scale, residual):
            return matmul(x, w, scale, None, residual, eps=_EPS, gated=self.gated)

        arguments = self.weights, self.x, self.scale, self.residual
        lowered = jax.jit(lambda weights, *rest: [product(w, *rest) for w in weights]).lower(*arguments)
        on_gpu = jax.default_backend() == "gpu"
        return functools.partial(lowered.compile(GPU_COMPILER_OPTIONS if on_gpu else None), *arguments)


def matmuls(figures: Figures) -> None:
    """Each matrix at each number of rows: the kernel's time, XLA's in the same minute, the share of the card's rates; then every
    tile, and the bits of a row in all of them."""
    from kernels import gpu

    rates = measure(figures)
    names, tokens = (["tiny"], (8,)) if figures.dry_run else ([n for n in MATRICES if n != "tiny"], TOKENS)
    with gpu.interpreted() if figures.dry_run else contextlib.nullcontext():
        for T in tokens:
            for name in names:
                figures.attempt(f"matmul {name} T={T}", _against_xla, figures, rates, name, T)
        for name in names if figures.dry_run else TILED:
            figures.attempt(f"tiles {name}", _tiles, figures, name, tokens)


def _against_xla(figures: Figures, rates: Rates, name: str, T: int) -> None:
    from kernels.fused_matmul import mosaic_sm90, xla

    rows = Rows.make(name, T, dry_run=figures.dry_run)
    ours, theirs = (_seconds(figures, rows, rows.program(matmul)) for matmul in (mosaic_sm90.matmul, xla.matmul))
    D, F, _ = MATRICES[name]
    moved, done = 2 * D * F, 2 * T * D * F
    shares = {"of_copy_rate": moved / ours / rates.copy, "of_matmul_rate": done / ours / rates.matmul}
    figures.record(f"matmul {name} T={T}", 1e6 * ours, "us", xla_us=1e6 * theirs, to_xla=ours / theirs, **shares)


def _tiles(figures: Figures, name: str, tokens: tuple[int, ...]) -> None:
    """Every tile that fits, at the fewest rows and the most: its time and the estimate by which it was chosen or not. The bits of
    the first rows must be the same in all of them."""
    from kernels import gpu
    from kernels.fused_matmul import mosaic_sm90
    from kernels.fused_matmul.tiles import choose_tiles, fitting_tiles

    (D, F, step), outputs = MATRICES[name], {}
    gated = step == "gate"
    for T in dict.fromkeys((tokens[0], tokens[-1])):
        rows = Rows.make(name, T, dry_run=figures.dry_run)
        chosen = choose_tiles(T, D, F, gated=gated, num_sms=gpu.num_sms())
        for tiles in fitting_tiles(T, F, gated=gated):
            program = rows.program(functools.partial(mosaic_sm90.matmul, tiles=tiles))
            seconds = _seconds(figures, rows, program)
            estimate = tiles.cycles(T, D, F, gpu.num_sms())
            figures.record(f"tiles {name} T={T} {tiles}", 1e6 * seconds, "us", cycles=estimate, chosen=tiles == chosen)
            outputs[T, tiles] = np.asarray(program()[0])[: tokens[0]].tobytes()
    differ = len({*outputs.values()}) - 1
    figures.record(f"tiles {name}", len(outputs), "tilings", others=differ, verdict="FAIL" if differ else "pass")


def _seconds(figures: Figures, rows: Rows, program: Callable[[], Any]) -> float:
    """Of one product."""
    import jax

    return figures.seconds_per_call(lambda i: program(), jax.block_until_ready) / len(rows.weights)

"""The backends of each kernel, one row each. To add a backend, write its module and add its row.

Imports nothing outside the standard library before a backend is used, so that a command can offer the names without importing jax.
A row's module is imported when the backend is first used. What a module defines depends on the kernel:

Attention (`kernels.ragged_paged_attention`; shapes as in its api):
    lacks(*, num_query_heads, num_kv_heads, head_dim, page_size, dtype) -> str | None: what the backend or the device can't do.
    attend(q, kv_pages, page_table, cu_q_lens, kv_lens, *, scale, sliding_window, soft_cap, max_q_len, work) -> [T, N, H].
    plan_work(cu_q_lens, kv_lens, *, num_tokens, max_q_len): what the layers of a step share; its class names its `backend`. Takes
        fixed_tiles too where the row says so.
    make_planner(...), in place of plan_work, where the row says `plans_on_host`: arguments as `work_planner.WorkPlanner.make`.

Rotary write (`kernels.rotary_write`):
    lacks(*, head_dim, dtype) -> str | None: what the backend or the device can't do.
    rotary_write(qkv, kv_pages, cos, sin, slot_mapping, q_scale, k_scale, *, eps) -> (q [T, N, H], kv_pages).

Fused matmul (`kernels.fused_matmul`):
    lacks(*, depth, num_columns, gated, dtype) -> str | None: what the backend or the device can't do.
    matmul(x, w, scale, bias, residual, *, eps, gated) -> [T, F], or [T, F / 2]. Takes transposed and dtype too where the row says
        `any_layout`, and num_rows where it says `skips_padding`.

Grouped matmul (`kernels.grouped_matmul`):
    lacks(w) -> str | None: what these weights [E, D, F] or the device lack.
    block_rows(num_tokens, num_choices, num_groups) -> int: rows of a tile.
    matmul(x, w, groups) -> [M, F]. Takes gated=True too, -> [M, F / 2], where the row says so.
    lay_out(...), where the row says `lays_out`: arguments and result as of `layout.lay_out`, which lays out for the others.

All-reduce (`kernels.all_reduce`):
    lacks() -> str | None: what the device can't do.
    fits(shape, dtype, num_devices) -> bool: whether it is for such a message; "xla" sums others.
    all_reduce(x, *, axis, num_devices) -> x's shape.
"""

from __future__ import annotations

import contextvars
import dataclasses
import importlib
from collections.abc import Callable, Collection
from typing import Any

assumed_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("assumed_platform", default=None)


def current_platform() -> str:
    """The platform on which "auto" chooses: of JAX's default device, or the one that `gpu.assume` has set."""
    import jax

    return assumed_platform.get() or jax.default_backend()


@dataclasses.dataclass(frozen=True)
class Backend:
    """One row of a table."""

    name: str  # what users write
    module: Any  # a dotted name, imported at first use, or an object that has the functions
    automatic: bool = False  # whether "auto" may choose it
    platforms: tuple[str, ...] | None = None  # of JAX, on which "auto" considers it; None is every one
    plans_on_host: bool = False  # whether the work of a step is planned in numpy, before the step is dispatched
    fixed_tiles: bool = False  # whether plan_work takes fixed_tiles=True: of one size for every shape of a step
    fuses_gate: bool = False  # whether matmul takes gated=True
    any_layout: bool = False  # whether matmul takes transposed=True and dtype=
    skips_padding: bool = False  # whether matmul takes num_rows=: rows from there on are not computed
    adds_residuals: bool = False  # whether additions to the residual stream are always its own too
    row_exact: bool = False  # whether a row's bits depend on the row alone, whatever the shapes that a program is compiled for
    lays_out: bool = False  # whether a batch's layout is the module's own, in place of the one that all share
    for_host: bool = False  # compiled for CPUs: no card is asked about it
    plain_xla: bool = False  # no kernel of ours: "auto" may take it on a card where nothing has been qualified

    @property
    def functions(self) -> Any:
        """The module, imported."""
        return importlib.import_module(self.module) if isinstance(self.module, str) else self.module


class Backends:
    """A kernel's rows by name. "auto" prefers the rows that come later."""

    def __init__(self, *rows: Backend):
        self.rows: dict[str, Backend] = {row.name: row for row in rows}

    @property
    def names(self) -> tuple[str, ...]:
        """What a user may write: "auto" and the name of every row."""
        return ("auto", *self.rows)

    def __getitem__(self, name: str) -> Backend:
        """The row of a name. Raises ValueError as `check`, and for "auto", which is no row."""
        self.check(name)
        if name not in self.rows:
            raise ValueError(f"backend={name!r} must be resolved first, to one of {', '.join(self.rows)}")
        return self.rows[name]

    def check(self, backend: str) -> None:
        """Raises ValueError if `backend` is not one of `names`."""
        if backend not in self.names:
            raise ValueError(f"{backend=} must be one of {', '.join(self.names)}")

    def automatic(self, platform: str) -> list[Backend]:
        """The rows among which "auto" chooses on a JAX platform, the preferred one first."""
        return [row for row in reversed(self.rows.values()) if row.automatic and platform in (row.platforms or (platform,))]

    def resolve(self, backend: str, lacks: Callable[[Backend], str | None], left_out: Collection[str] = ()) -> str:
        """The row that runs: the one of that name, or for "auto" the preferred one that lacks nothing. lacks(row): what it can't
        do, in words. left_out: rows that "auto" must not take.

        Raises: ValueError as `check`; NotImplementedError where what is left lacks something.
        """
        self.check(backend)
        if backend != "auto":
            rows = [self.rows[backend]]
        else:
            rows = [row for row in self.automatic(current_platform()) if row.name not in left_out]
        found = {row.name: lacks(row) for row in rows}
        for name, lacking in found.items():
            if lacking is None:
                return name
        name, lacking = list(found.items())[-1]
        raise NotImplementedError(f"{name} can't do {lacking}; use backend='xla'")


ATTENTION = Backends(
    Backend("reference", "kernels.ragged_paged_attention.reference", plain_xla=True),
    Backend("xla", "kernels.ragged_paged_attention.xla", automatic=True, fixed_tiles=True, plain_xla=True),
    Backend(
        "cpu",
        "kernels.ragged_paged_attention.cpu",
        automatic=True,
        platforms=("cpu",),
        fixed_tiles=True,
        row_exact=True,
        for_host=True,
    ),
    Backend(
        "mosaic_portable",
        "kernels.ragged_paged_attention.mosaic_portable.attend",
        automatic=True,
        platforms=("gpu",),
        plans_on_host=True,
    ),
    Backend(
        "mosaic_sm90",
        "kernels.ragged_paged_attention.mosaic_sm90.attend",
        automatic=True,
        platforms=("gpu",),
        plans_on_host=True,
    ),
)
ROTARY_WRITE = Backends(
    Backend("xla", "kernels.rotary_write.xla", automatic=True, plain_xla=True),
    Backend("cpu", "kernels.rotary_write.cpu", automatic=True, platforms=("cpu",), row_exact=True, for_host=True),
    Backend("mosaic", "kernels.rotary_write.mosaic", automatic=True, platforms=("gpu",)),
)
FUSED_MATMUL = Backends(
    Backend("xla", "kernels.fused_matmul.xla", automatic=True, any_layout=True, plain_xla=True),
    Backend(
        "cpu",
        "kernels.fused_matmul.cpu",
        automatic=True,
        platforms=("cpu",),
        any_layout=True,
        skips_padding=True,
        adds_residuals=True,
        row_exact=True,
        for_host=True,
    ),
    Backend("mosaic_sm90", "kernels.fused_matmul.mosaic_sm90", automatic=True, platforms=("gpu",)),
)
ALL_REDUCE = Backends(  # "auto" takes no kernel of ours: no card has run it
    Backend("xla", "kernels.all_reduce.xla", automatic=True, plain_xla=True),
    Backend("in_order", "kernels.all_reduce.in_order", platforms=("cpu",), plain_xla=True),
    Backend("mosaic", "kernels.all_reduce.mosaic", platforms=("gpu",)),
)
GROUPED_MATMUL = Backends(
    Backend("reference", "kernels.grouped_matmul.reference", plain_xla=True),
    Backend("xla", "kernels.grouped_matmul.xla", automatic=True, plain_xla=True),
    Backend("cpu", "kernels.grouped_matmul.cpu", automatic=True, platforms=("cpu",), fuses_gate=True, for_host=True),
    Backend("mosaic_portable", "kernels.grouped_matmul.mosaic_portable", automatic=True, lays_out=True),
    Backend("mosaic_sm90", "kernels.grouped_matmul.mosaic_sm90", automatic=True, fuses_gate=True, lays_out=True),
)

"""How one array is cut over the devices of a mesh: along which axis, and what each device has of it, in which order.

Owns the way there and back on the host. Knows nothing of models: models/shards.py says which weight has which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.parallel.mesh import AXIS


@dataclass(frozen=True, eq=False)
class Layout:
    """Entry i of the cut array's axis is entry places[i] of the plain array's, or zeros where that is -1; the first
    len(places) / size of them are the first device's, and so on. An entry may have several places, whose values are equal then.

    axis: None: every device has the whole.
    """

    axis: int | None = None
    places: np.ndarray = field(default_factory=lambda: np.arange(0))  # i64[entries of all devices]

    @property
    def spec(self) -> PartitionSpec:
        """Where the cut array's axes lie on the mesh."""
        return PartitionSpec() if self.axis is None else PartitionSpec(*[None] * self.axis, AXIS)

    def shape(self, plain: tuple[int, ...]) -> tuple[int, ...]:
        """The cut array's, of all devices together."""
        return plain if self.axis is None else (*plain[: self.axis], len(self.places), *plain[self.axis + 1 :])

    @cached_property
    def is_plain(self) -> bool:
        """Whether the cut array is the plain one, each device having the next part of it."""
        return self.axis is None or (self.num_plain == len(self.places) and bool((np.diff(self.places) == 1).all()))

    @cached_property
    def num_plain(self) -> int:
        """Entries of the plain array along the axis."""
        return int(self.places.max()) + 1

    @property
    def filled(self) -> np.ndarray:
        """i32: `places`, with one past the plain array's end for zeros."""
        return np.where(self.places == -1, self.num_plain, self.places).astype(np.int32)

    def cut(self, x: np.ndarray) -> np.ndarray:
        """The plain array as it is cut."""
        if self.is_plain:
            return x
        cut = np.take(x, np.maximum(self.places, 0), self.axis)
        cut[(slice(None),) * (self.axis or 0) + (self.places == -1,)] = 0
        return cut

    def joined(self, x: np.ndarray) -> np.ndarray:
        """The plain array of a cut one."""
        if self.is_plain:
            return x
        _, first = np.unique(self.places, return_index=True)
        return np.take(x, first[-self.num_plain :], axis=self.axis)

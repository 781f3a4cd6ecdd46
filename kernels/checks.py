"""Checks of arguments at the kernels' and the models' entries: chex's assertions, raised as ValueErrors that name the argument.

They run while a program is traced and cost nothing when it runs. Shapes are written in axis letters, as in signatures.
"""

from __future__ import annotations

from typing import Any

import chex


class Shapes:
    """The sizes of axis letters in one call: given at first, or learned from the arguments in the order of their checks."""

    def __init__(self, **sizes: int):
        self.sizes: dict[str, int] = sizes

    def __getitem__(self, letter: str) -> int:
        return self.sizes[letter]

    def check(self, name: str, x: Any, axes: str, dtype: Any = None) -> None:
        """Checks an argument, and learns the sizes of letters that are new.

        Args:
            name: the argument's name, for the message.
            x: what was given: anything with a shape and a dtype, traced or abstract.
            axes: the wanted axes, such as "T N H" or "": a letter or name, a number, or a letter and 1, as in "S+1". No axis may
                have size 0. "... D" is any leading axes before D.
            dtype: the wanted dtype; None takes any.

        Raises ValueError with the argument's name, what is wanted (letters, and the sizes that are known) and what was given.
        """
        names = axes.split()
        wanted = tuple(... if axis == "..." else self._size(axis) for axis in names)
        try:
            chex.assert_shape(x, wanted)
            for axis in range(-sum(size is not ... for size in wanted), 0):
                chex.assert_axis_dimension_gt(x, axis, 0)
            if dtype is not None:
                chex.assert_type(x, dtype)
        except AssertionError as error:
            raise ValueError(self._message(name, x, names, dtype)) from error
        for axis, size in zip(reversed(names), reversed(x.shape), strict=False):
            if axis.isidentifier():
                self.sizes.setdefault(axis, size)

    def _size(self, axis: str) -> int | None:
        """An axis' size; None where it is not known yet."""
        letter, _, more = axis.partition("+")
        size = int(letter) if letter.isdigit() else self.sizes.get(letter)
        return size if size is None else size + int(more or 0)

    def _message(self, name: str, x: Any, names: list[str], dtype: Any) -> str:
        wanted = "" if dtype is None else str(dtype.__name__ if isinstance(dtype, type) else dtype)
        letters = dict.fromkeys(axis.partition("+")[0] for axis in names)
        known = " and ".join(f"{letter}={self.sizes[letter]}" for letter in letters if letter in self.sizes)
        given = f"{x.dtype}{x.shape}" if hasattr(x, "shape") and hasattr(x, "dtype") else f"a {type(x).__name__}"
        must = f"must be {wanted}[{', '.join(names)}]{' with ' + known if known else ''}"
        return f"{name} is {given}; {must}, no axis of size 0" if 0 in getattr(x, "shape", ()) else f"{name} is {given}; {must}"

"""Which cases of a parametrised test `make test`, and which continuous integration runs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(keep: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Arguments for `parametrize`: values that `keep` does not want are marked slow; `make test-all` runs those too."""
    return [value if keep(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]


def exhaustive_unless(keep: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Arguments for `parametrize` of a slow test: values that `keep` does not want are marked exhaustive, which `.ci/run` leaves
    out and `make test-all` runs. Keep each value of each axis at least once."""
    return [value if keep(value) else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]

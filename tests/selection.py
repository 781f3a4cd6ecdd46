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


def chosen(cases: Iterable[tuple[Any, ...]], *, quick: Callable[..., Any], in_ci: Callable[..., Any]) -> list[Any]:
    """Arguments for `parametrize` of axes that are crossed: `make test` runs the cases that `quick` wants, `.ci/run` those that
    `in_ci` wants too, `make test-all` all of them. Both are called with a case's values. Keep each value of each axis in CI."""
    slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive

    def marked(case: tuple[Any, ...]) -> Any:
        return pytest.param(*case, marks=() if quick(*case) else (slow,) if in_ci(*case) else (slow, exhaustive))

    return [marked(case) for case in cases]

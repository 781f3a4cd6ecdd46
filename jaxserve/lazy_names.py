"""Imports at first use: the public names of a package, and modules that a command's --help can do without.

A package's stub `__init__.pyi` is the one list of its names: type checkers read it in place of `__init__.py`, and `attach` reads it
when the package is imported.
"""

from __future__ import annotations

import os.path  # not pathlib, whose import takes a third as long as jaxserve's
from collections.abc import Callable
from importlib import import_module
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package. file: its `__file__`, beside which the stub lies.

    Every line of the stub that begins with "from" must read `from MODULE import NAME as NAME`; other lines are skipped.

    Raises:
      FileNotFoundError: there is no stub.
      AttributeError (of `__getattr__`): the stub does not list the name.
    """
    with open(os.path.splitext(file)[0] + ".pyi", encoding="utf-8") as stub:
        rows = [line.split() for line in stub if line.startswith("from ")]
    home = {name: module for _, module, _, name, _, _ in rows}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return find, lambda: sorted(home), list(home)


class Late:
    """Stands in for a module, and imports it when an attribute is first asked for. Type checkers are given the module itself:

    if TYPE_CHECKING:
        import numpy as np
    else:
        np = Late("numpy")
    """

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._module), name)
        setattr(self, name, found)  # the next time it is an attribute of its own
        return found

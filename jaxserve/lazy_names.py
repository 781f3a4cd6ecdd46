"""Names of a package that are imported at first use, as its stub `__init__.pyi` lists them.

The stub is the one list: type checkers read it in place of `__init__.py`, and `attach` reads it when the package is imported.
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

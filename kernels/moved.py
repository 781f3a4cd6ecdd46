"""Where modules and names of kernels went. For one release an old one still works, and warns with the new one.

Of the standard library alone, like kernels/backends.py.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernels import backends

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc imports importlib.resources, which takes longer than this

_ATTENTION = "kernels.ragged_paged_attention"
MODULES: dict[str, str] = {  # old -> new
    f"{_ATTENTION}.planner": f"{_ATTENTION}.mosaic_sm90.planner",
    f"{_ATTENTION}.tiles": f"{_ATTENTION}.mosaic_sm90.tiles",
    f"{_ATTENTION}.softmax_state": f"{_ATTENTION}.mosaic_sm90.softmax_state",
    f"{_ATTENTION}.mosaic_combine": f"{_ATTENTION}.mosaic_sm90.combine",
}


def backends_of(module: str, table: str) -> Callable[[str], Any]:
    """A `__getattr__` for a kernel's package, which had the names of its backends as BACKENDS.

    table: the name of the kernel's table in kernels/backends.py.
    """

    def find(name: str) -> Any:
        if name != "BACKENDS":
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.BACKENDS", f"kernels.backends.{table}.names")
        return getattr(backends, table).names

    return find


class _Finder(Loader):
    """Finds the new module under the old name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        new = MODULES[module.__name__]
        sys.modules[module.__name__] = import_module(new)  # the import system takes what it finds here
        _warn(module.__name__, new)


def install() -> None:
    """Lets old modules be imported. Once a process is enough, and more do no harm."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now; the old name goes with the next release", DeprecationWarning, 3)

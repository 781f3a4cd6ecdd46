"""Commands of a checkout, for developers: `python -m scripts.NAME`. What users run is the jaxserve command."""

import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {  # scripts of before -> what they are called now
    "autotune": "jaxserve autotune",
    "bench_capacity": "jaxserve tune capacity",
    "bench_latency": "jaxserve bench latency",
    "bench_serve": "jaxserve bench serve",
    "bench_throughput": "jaxserve bench throughput",
    "chat": "jaxserve chat",
    "convert": "jaxserve convert",
    "generate": "jaxserve generate",
    "profile_steps": "jaxserve tune profile",
    "router": "jaxserve router",
    "serve": "jaxserve serve",
    "simulate": "jaxserve simulate",
    "tune_buckets": "jaxserve tune buckets",
    "tune_budget": "jaxserve tune budget",
    "verify_model": "jaxserve verify",
}


class _Moved(MetaPathFinder, InspectLoader):
    """Answers `python -m scripts.NAME` of a script that is a command now with what to type instead."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "scripts" and name in MOVED else None

    def get_source(self, fullname: str) -> str:
        now = MOVED[fullname.removeprefix("scripts.")]
        says = f"{fullname} is `{now}` now, with the same flags; the old name goes with the next release"
        return f"import sys\nprint({says!r}, file=sys.stderr)\nsys.exit(2)\n"

    def is_package(self, fullname: str) -> bool:
        return False


if not any(type(finder).__name__ == "_Moved" for finder in sys.meta_path):
    sys.meta_path.append(_Moved())

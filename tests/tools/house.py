"""The plan of the house: jaxserve's stations, and whether imports keep to their order.

    python -m tests.tools.house

prints every module with its lines, the circles of imports among modules, and the arrows from a lower station to a higher one. Every
import counts: at the top of a file, inside a function, behind TYPE_CHECKING, in the stub of a package (`__init__.pyi`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

# From the top of the house to its foundations. A station may import those below it, never one above it; stations on one floor do
# not know each other. A name is a package, or a module at the top of jaxserve/.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("training",),
    ("ray",),
    ("simulation",),
    ("routing",),
    ("serving",),
    ("llm",),
    ("engine",),
    ("qualification",),
    ("execution", "structured"),
    ("config",),
    ("speculative",),
    ("batching",),
    ("sampling",),
    ("scheduling",),
    ("step_times",),
    ("models", "buckets"),
    ("text", "workloads", "parallel", "hosts", "kv_store"),
    ("request",),
    ("outputs", "sampling_params"),
    ("structured_outputs",),
    ("moved", "lazy_names"),
)
ENTRANCE = "__init__"  # jaxserve/__init__.pyi names what users import, of every floor; of the stations only cli is a user


def modules(package: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module below a package's folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules among `known` that one of them imports, anywhere in its file."""
    found = set()
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        found |= {target for target in targets if target in known and target != name}
    return found


def graph(package: Path) -> dict[str, set[str]]:
    """Module -> the modules of the same package that it imports."""
    known = modules(package)
    return {
        name: set().union(*(imports(name, file, known) for file in (path, path.with_suffix(".pyi")) if file.exists()))
        for name, path in known.items()
    }


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in arrows.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            part = []
            while not part or part[-1] != node:
                part.append(stack.pop())
            if len(part) > 1:
                found.append(sorted(part))

    for node in arrows:
        if node not in index:
            visit(node)
    return found


def station(module: str) -> str:
    """`jaxserve.engine.engine` -> `engine`; jaxserve itself is the entrance."""
    return (module.split(".") + [ENTRANCE])[1]


def upward(arrows: Mapping[str, Iterable[str]], floors: Iterable[Iterable[str]] = FLOORS) -> Iterator[tuple[str, str]]:
    """Arrows that do not go down: (module, what it imports). Within a station every arrow is free, circles aside."""
    height = {name: -i for i, floor in enumerate(floors) for name in floor}
    for module, targets in arrows.items():
        for target in sorted(targets):
            here, there = station(module), station(target)
            if (
                here != there
                and here != ENTRANCE
                and (there == ENTRANCE and here != "cli" or there != ENTRANCE and height[there] >= height[here])
            ):
                yield module, target


MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60


def too_long(package: Path) -> list[str]:
    """Files of more than MAX_FILE_LINES lines and functions of more than MAX_FUNCTION_LINES, docstrings included: `path: lines` and
    `path::name: lines`, in order."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(package.parent).as_posix()
        if (count := len(text.splitlines())) > MAX_FILE_LINES:
            found.append(f"{name}: {count}")
        for node in ast.walk(ast.parse(text, filename=str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > MAX_FUNCTION_LINES:
                    found.append(f"{name}::{node.name}: {count}")
    return found


def main() -> None:
    package = ROOT / "jaxserve"
    arrows = graph(package)
    for name, path in modules(package).items():
        print(f"{len(path.read_text().splitlines()):5}  {name}")
    round_, up = circles(arrows), list(upward(arrows))
    for part in round_:
        print("circle:", " <-> ".join(part))
    for module, target in up:
        print("upward:", module, "->", target)
    print(f"{len(arrows)} modules, {len(round_)} circles, {len(up)} upward arrows")
    sys.exit(bool(round_ or up))


if __name__ == "__main__":
    main()

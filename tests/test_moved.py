"""Old names of public things answer with where they are now."""

import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import jaxserve
import scripts
from jaxserve import moved
from jaxserve.cli.main import COMMANDS
from kernels import backends
from kernels import moved as kernels_moved

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("engine", "Engine", "jaxserve.Engine"),
        ("buckets", "BucketPlan", "jaxserve.BucketPlan"),
        ("tokenizer", "Tokenizer", "jaxserve.Tokenizer"),
        ("model_loader", "random_model", "jaxserve.random_model"),
        ("structured.params", "StructuredOutputsParams", "jaxserve.StructuredOutputsParams"),
        ("request", "CompletionOutput", "jaxserve.CompletionOutput"),
        ("request", "SamplingParams", "jaxserve.SamplingParams"),
        ("scheduler", "Scheduler", "jaxserve.scheduling.scheduler.Scheduler"),
        ("simulation.step_time", "StepTimeModel", "jaxserve.step_times.fitted.StepTimeModel"),
        ("serving.router_policy", "ROUTING_POLICIES", "jaxserve.routing.policy.ROUTING_POLICIES"),
        *((old, name, f"jaxserve.{new}") for old, names in moved.RENAMED.items() for name, new in names.items()),
    ],
)
def test_an_old_name_works_and_warns_with_the_new_one(old, name, new):
    module = import_module(f"jaxserve.{old}")
    with pytest.warns(DeprecationWarning) as warned:
        found = getattr(module, name)
    assert str(warned[0].message) == f"jaxserve.{old}.{name} is {new} now; the old name goes with the next release"
    assert warned[0].filename == __file__
    path, _, last = new.rpartition(".")
    assert found is getattr(import_module(path), last)


@pytest.mark.parametrize(("old", "name"), [(old, name) for old, names in moved.GONE.items() for name in names])
def test_a_name_without_a_successor_says_what_to_use(old, name):
    with pytest.raises(AttributeError, match=f"jaxserve.{old}.{name} is gone: jaxserve.") as refused:
        getattr(import_module(f"jaxserve.{old}"), name)
    pkgutil.resolve_name(str(refused.value).split(": ")[1].split(" ")[0])  # what the message names is there


def test_what_never_was_there_is_refused_with_the_new_place():
    with pytest.raises(ImportError, match="cannot import name 'Tokeniser' from 'jaxserve.tokenizer'"):
        exec("from jaxserve.tokenizer import Tokeniser")
    with pytest.raises(AttributeError, match="no attribute 'Tokeniser'; see jaxserve.text.tokenizer"):
        import_module("jaxserve.tokenizer").Tokeniser  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        import_module("jaxserve.never_was")


@pytest.mark.parametrize("old", moved.MODULES)
def test_every_old_module_has_a_new_one(old):
    assert not (ROOT / "jaxserve" / f"{old.replace('.', '/')}.py").exists(), "a file of that name would hide the table's row"
    for home in moved.MODULES[old]:
        path = ROOT / "jaxserve" / home.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("old", moved.STAYED)
def test_modules_that_stayed_forward_what_left_them(old):
    module = import_module(f"jaxserve.{old}")
    for name, home in moved.STAYED[old].items():
        with pytest.warns(DeprecationWarning, match=f"jaxserve.{old}.{name} is "):
            assert getattr(module, name) is getattr(import_module(f"jaxserve.{home}"), name)


# ---- kernels


KERNEL_MODULES = {  # what was in kernels/ragged_paged_attention/, and one name of each
    "planner": "Planner",
    "tiles": "choose_tiles",
    "softmax_state": "join",
    "mosaic_combine": "combine",
}


@pytest.mark.parametrize("name", KERNEL_MODULES)
def test_an_old_module_of_kernels_is_the_new_one_and_warns(name, monkeypatch):
    package = "kernels.ragged_paged_attention"
    old, new = f"{package}.{name}", kernels_moved.MODULES[f"{package}.{name}"]
    monkeypatch.delitem(sys.modules, old, raising=False)
    monkeypatch.delattr(import_module(package), name, raising=False)
    with pytest.warns(DeprecationWarning) as warned:
        exec(f"from {package} import {name} as found", names := {})
    assert [str(w.message) for w in warned] == [f"{old} is {new} now; the old name goes with the next release"]
    assert warned[0].filename == "<string>", "the line that imports it"
    assert names["found"] is import_module(old) is import_module(new)
    assert getattr(import_module(new), KERNEL_MODULES[name]).__module__ == import_module(new).__name__ == new


def test_every_old_module_of_kernels_is_tried():
    assert set(kernels_moved.MODULES) == {f"kernels.ragged_paged_attention.{name}" for name in KERNEL_MODULES}


@pytest.mark.parametrize(("package", "table"), [("ragged_paged_attention", "ATTENTION"), ("grouped_matmul", "GROUPED_MATMUL")])
def test_the_names_of_a_kernels_backends_say_where_they_are(package, table):
    module = import_module(f"kernels.{package}")
    with pytest.warns(DeprecationWarning, match=f"kernels.{package}.BACKENDS is kernels.backends.{table}.names now") as warned:
        assert module.BACKENDS == getattr(backends, table).names
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match=f"module 'kernels.{package}' has no attribute 'FRONTENDS'"):
        module.FRONTENDS  # noqa: B018


# ---- commands


@pytest.mark.parametrize("name", scripts.MOVED)
def test_a_script_that_is_a_command_now_says_so(name):
    assert scripts.MOVED[name].removeprefix("jaxserve ") in COMMANDS
    assert not (ROOT / "scripts" / f"{name}.py").exists()


def test_an_old_script_ends_with_what_to_type():
    done = subprocess.run([sys.executable, "-m", "scripts.bench_serve", "--x"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        "scripts.bench_serve is `jaxserve bench serve` now, with the same flags; the old name goes with the next release\n"
    )


# ---- the names of jaxserve itself


@pytest.mark.parametrize("package", ["jaxserve", "jaxserve.models"])
def test_every_line_of_a_stub_is_public(package):
    """The stub is the one list. A type checker takes for public what is imported under its own name."""
    module = import_module(package)
    assert module.__file__ is not None
    lines = Path(module.__file__).with_suffix(".pyi").read_text().splitlines()
    listed = [line.split() for line in lines if line and line not in ("__all__: list[str]", "__version__: str")]
    assert all(words[0] == "from" and words[3] == words[5] for words in listed)
    assert module.__all__ == [words[3] for words in listed] and set(module.__all__) <= set(dir(module))
    for _, home, _, name, *_ in listed:
        assert getattr(module, name) is getattr(import_module(home), name)


def test_every_public_name_is_there():
    for name in jaxserve.__all__:
        assert getattr(jaxserve, name).__name__ == name
    assert "__version__" in dir(jaxserve) and jaxserve.__version__
    with pytest.raises(AttributeError, match="module 'jaxserve' has no attribute 'nothing'"):
        jaxserve.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]

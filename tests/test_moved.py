"""Old names of public things answer with where they are now."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import jaxserve
import scripts
from jaxserve import moved
from jaxserve.cli.main import COMMANDS

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
        ("scheduler", "Scheduler", "jaxserve.scheduling.scheduler.Scheduler"),
        ("simulation.step_time", "StepTimeModel", "jaxserve.step_times.fitted.StepTimeModel"),
        ("serving.router_policy", "ROUTING_POLICIES", "jaxserve.routing.policy.ROUTING_POLICIES"),
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
        if name not in vars(module):
            with pytest.warns(DeprecationWarning, match=f"jaxserve.{old}.{name} is "):
                assert getattr(module, name) is getattr(import_module(f"jaxserve.{home}"), name)


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


def test_the_type_checkers_names_are_the_tables():
    """The block that type checkers read and the table that imports go by say the same."""
    block = (ROOT / "jaxserve" / "__init__.py").read_text().partition("if TYPE_CHECKING:")[2].partition("_NAMES")[0]
    read = {}
    for line in block.splitlines():
        words = line.split()
        if words[:1] == ["from"]:
            assert words[3] == words[5], "an alias of its own name is public to a type checker"
            read[words[3]] = words[1].removeprefix("jaxserve.")
    assert read == jaxserve._HOME
    assert jaxserve.__all__ == list(jaxserve._HOME) and "__version__" in dir(jaxserve)


def test_every_public_name_is_there():
    for name in jaxserve.__all__:
        assert getattr(jaxserve, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'jaxserve' has no attribute 'nothing'"):
        jaxserve.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]

"""The pages: docs/api.md's examples run in their order, and every public name has its place there and complete annotations.

The site builds without a dead link. BUILD.md stays short, and what its map and its tables name is there.
"""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve
from jaxserve.cli.main import COMMANDS, FAMILIES
from tests.tools.house import FLOORS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    """Under python -W error, as one program, its lines where they are on the page."""
    lines, inside = [], False
    for line in PAGE.read_text().splitlines():
        lines.append(line if inside and line != "```" else "")
        inside = line == "```python" or (inside and line != "```")
    (tmp_path / "api.py").write_text("\n".join(lines))
    assert "assert" in "\n".join(lines)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # a half-written entry of another process would be a warning
    command = [sys.executable, "-W", "error", str(tmp_path / "api.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_examples_of_the_readme_run(tmp_path):
    """As they stand but for where the model lies: a model that counts letters, and its server. A trainer is theirs to bring."""
    import jaxserve
    from jaxserve.models.loading import load_model
    from tests import alphabet_model
    from tests.serving.http_server import serving

    folder = alphabet_model.save(tmp_path / "model", max_position_embeddings=1024)
    page = (ROOT / "README.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(examples) == 4
    trained = []
    names: dict = {
        "module": load_model(folder, dtype="float32").module,
        "batches": [["a", "b"]],
        "optimizer": None,
        "train_step": lambda *given: trained.append(given),
    }
    plan = jaxserve.BucketPlan(decode=(16,), mixed=((128, 16),), head_rows=(16,))
    served = jaxserve.LLM(folder, bucket_plan=plan, num_pages=64, max_model_len=256)
    with serving(served, names=("qwen3",)) as server:
        for example in examples:
            code = example.replace("Qwen/Qwen3-0.6B", str(folder)).replace("http://127.0.0.1:8000", server.url)
            exec(compile(code, "README.md", "exec"), names)
    assert len(trained) == 1 and isinstance(names["city"], names["City"])


SECTIONS = {  # heading -> what stands under it
    heading: text for heading, _, text in (part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:])
}


@pytest.mark.parametrize("name", jaxserve.__all__)
def test_every_public_class_has_a_section_with_an_example(name):
    (text,) = [text for heading, text in SECTIONS.items() if name in heading.split(", ")]
    (example, *_) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert "assert" in example


@pytest.mark.parametrize("name", jaxserve.__all__)
def test_public_methods_are_annotated_and_described(name):
    cls = getattr(jaxserve, name)
    assert inspect.getdoc(cls)
    bare = []
    for attribute, value in vars(cls).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if not inspect.isfunction(function) or (attribute.startswith("_") and attribute != "__init__"):
            continue
        if function.__qualname__.startswith("__create_fn__"):
            continue  # made by dataclass
        signature = inspect.signature(function)
        arguments = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        if any(p.annotation is inspect.Parameter.empty for p in arguments):
            bare.append(attribute)
        if attribute != "__init__" and signature.return_annotation is inspect.Signature.empty:
            bare.append(attribute)
    assert not bare


@pytest.mark.parametrize("page", ["README.md", "examples/README.md"])
def test_links_of_pages_outside_the_site(page):
    """To files of the checkout; what is an address elsewhere is not asked for."""
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
    local = [link for link in links if "://" not in link]
    assert local and not [link for link in local if not (ROOT / page).parent.joinpath(link).exists()]


def build_site(config: Path, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", f"--config-file={config}", f"--site-dir={folder}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_the_site_has_no_dead_link(tmp_path):
    """mkdocs.yml is strict: a link to a page, a file or a heading that is not there is an error."""
    done = build_site(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mermaid" in (tmp_path / "site" / "architecture.html").read_text()
    assert (tmp_path / "site" / "search" / "search_index.json").exists()


def test_a_dead_link_fails_the_build(tmp_path):
    """One page, with links of each kind that are not there."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "hooks.py").write_text((ROOT / "docs" / "hooks.py").read_text())
    links = "[page](gone.md) [outside](../benchmarks/gone.md) [heading](#gone)"
    (tmp_path / "docs" / "index.md").write_text(f"# One page\n\n{links}\n")
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = build_site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    for missing in ("'gone.md'", "'benchmarks/gone.md'", "'#gone'"):
        assert missing in done.stdout + done.stderr


def test_the_picture_has_the_stations_in_their_order():
    """The boxes of docs/architecture.md from top to bottom: the stations of tests/tools/house.py, then what lies beside them."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (picture,) = re.findall(r"^```mermaid\n(flowchart.*?)^```$", page, re.DOTALL | re.MULTILINE)
    labels = re.findall(r'^ *(?!subgraph)\w+\["([^":]+)(?::[^"]*)?"\]$', picture, re.MULTILINE)
    stations = [
        name for floor in FLOORS for name in floor if name not in ("__main__", "moved", "lazy_names")
    ]  # doors and signs, no rooms
    assert [name for label in labels for name in label.split(", ")] == [*stations, "kernels", "checkpoints"]


def commands_of(text: str) -> list[list[str]]:
    """Words behind `jaxserve` of every command on a page: lines of its blocks, indented or fenced, and code within its text.

    What was broken by a backslash is joined; a comment, a pipe or another command behind it is left out.
    """
    fenced = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    blocks = [line.strip() for block in fenced.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    prose = fenced.sub("", text)
    blocks += re.findall(r"^ {4,}(.*)$", prose.replace("\\\n", " "), re.MULTILINE)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^ {4,}.*$", "", prose, flags=re.MULTILINE))
    found = [re.match(r"(?:\w+=\S+ +)*jaxserve +(.*)", " ".join(code.split())) for code in blocks + inline]
    return [re.split(r" +(?:#|\||&)", match[1])[0].split() for match in found if match]


def command_of(words: list[str]) -> str | None:
    """The command that the words name: "" of a family's list or of all commands, None where there is no such command."""
    if words[0] in ("--help", "COMMAND", *FAMILIES) and set(words[1:]) <= {"--help", "COMMAND"}:
        return ""
    return next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)


def test_commands_on_the_pages_are_there_and_have_the_flags_that_they_are_given():
    """By the help of each command, which imports no jax."""
    pages = [ROOT / "README.md", ROOT / "BUILD.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*/README.md")]
    given: dict[str, set[str]] = {}
    for page in pages:
        for words in commands_of(page.read_text()):
            name = command_of(words)
            assert name is not None, f"{page.name}: jaxserve {' '.join(words)}"
            given.setdefault(name, set()).update(re.findall(r"(?:^| )--([\w-]+)", " ".join(words)))
    assert len(given) >= 14 and given.pop("") <= {"help"}
    for name, flags in given.items():
        command = [sys.executable, "-m", "jaxserve", *name.split(), "--help"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
        known = {"help", *re.findall(r"^ +--(?:\[no\])?(\w+)", text, re.MULTILINE)}
        switches = {f"no{flag}" for flag in re.findall(r"^ +--\[no\](\w+)", text, re.MULTILINE)}
        missing = {flag for flag in flags if flag.replace("-", "_") not in known | switches}
        assert not missing, f"jaxserve {name}"


def test_commands_are_found_wherever_they_stand_on_a_page():
    page = (
        "Say `jaxserve serve --a` or `jaxserve bench\nserve --b=1`, not `jaxserve.LLM`.\n\n    X=1 jaxserve chat --c \\\n"
        "        --d  # --e\n    cat x | jaxserve\n\n```sh\njaxserve router --f | less --g\n```\n"
    )
    found = [" ".join(words) for words in commands_of(page)]
    assert found == ["router --f", "chat --c --d", "serve --a", "bench serve --b=1"]
    assert command_of(["nothing"]) is None and command_of(["bench", "--help"]) == "" and command_of(["bench", "no"]) is None


BUILD = (ROOT / "BUILD.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_build_md_is_short():
    """It is read from top to bottom; what is longer belongs to docs/."""
    map_ = BUILD.partition("## Map of the code")[2].partition("\n## ")[0]
    assert len(BUILD.splitlines()) <= 250 and len(map_.splitlines()) <= 40


def test_contributing_names_what_ci_runs():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {job.name for job in (ROOT / ".ci").iterdir()} == set(re.findall(r"`\.ci/(\w+)`", text))
    named = set(re.findall(r"`make ([a-z-]+)`", text))
    assert named >= {"clients"} and named <= TARGETS


def test_the_map_names_what_is_there():
    """A row's first path is from the root; those after it lie in the same folder."""
    rows = re.findall(r"^\| (`[^|]*`) \|", BUILD.partition("## Map of the code")[2].partition("\n## ")[0], re.MULTILINE)
    assert len(rows) > 20
    missing = []
    for row in rows:
        first, *others = re.findall(r"`([^`]+)`", row)
        folder = (ROOT / first).parent
        missing += [path for path in (first, *others) if not ((ROOT / path).exists() or (folder / path).exists())]
    assert not missing


def test_every_command_of_build_md_is_there():
    """Targets of make, and modules of scripts/."""
    named = set(re.findall(r"`make ([a-z-]+)`", BUILD))
    assert named and named <= TARGETS
    section = BUILD.partition("For developers")[2].partition("\n## ")[0]
    scripts = {name for row in re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert scripts and all((ROOT / "scripts" / f"{name}.py").exists() for name in scripts)


def test_a_page_is_in_the_nav_once():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    assert len(pages) > 10
    assert len(set(pages)) == len(pages)


def test_every_field_of_the_other_apis_is_named():
    from jaxserve.serving.dialects.anthropic_protocol import MessagesRequest
    from jaxserve.serving.dialects.generate import GenerateRequest
    from jaxserve.serving.dialects.responses_protocol import ResponsesRequest

    page = (ROOT / "docs" / "apis.md").read_text()
    models = {
        "Anthropic's messages": MessagesRequest,
        "Responses": ResponsesRequest,
        "Token ids in, token ids out": GenerateRequest,
    }
    for title, model in models.items():
        section = re.sub(r"```.*?```", "", page.split(f"## {title}\n")[1].split("\n## ")[0], flags=re.DOTALL)
        named = {word for text in re.findall(r"`([^`]+)`", section) for word in re.findall(r"\w+", text)}
        told_by_the_example = {"model", "token_ids"} if "Token" in title else {"model"}
        assert not model.model_fields.keys() - named - told_by_the_example, title


def test_every_threat_has_its_test():
    """Each row of the tables names a test, and each test that it names is there."""
    rows = [line for line in (ROOT / "docs" / "threats.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| a client", "| ---"))]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"

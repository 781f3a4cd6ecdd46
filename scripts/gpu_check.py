"""What this project claims about a GPU, measured on the one at hand: the attention kernel, then the engine.

    python -m scripts.gpu_check --part=kernels      rates, parity, decode, prefill, mixed, peers, tuning, matmuls: 9 minutes
    python -m scripts.gpu_check --part=engine       steps, workload, transformers, start-up, graphs: 9 minutes at most
    python -m scripts.gpu_check --part=kernels --resume=FILE      what the run that wrote FILE had no time for
    python -m scripts.gpu_check --dry_run           both on a CPU with tiny shapes: every path, no figure that means anything

Needs an H100 or H200 and no network, and only jax, flax, chex, absl-py and numpy; torch and transformers are the peers where
they are installed. Every section runs in a process of its own with its own time limit, so that a crash or a hang costs one
section's remaining figures. They are written as JSON to benchmarks/results/<device>/ as sections end, with device, date, versions
and revision; a table closes the run. Whatever --sections says, a part begins with `device`.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import run_command
from scripts.gpu.figures import Figures, is_bad, is_skipped, is_unfinished, read_rows, value_of, write_rows

_PART = flags.DEFINE_enum("part", "all", ["kernels", "engine", "all"], "Which half; all runs one after the other.")
_SECTIONS = flags.DEFINE_list("sections", [], "Only these sections of the part, and device.")
_MINUTES = flags.DEFINE_float("minutes", 9, "Time of a part.")
_RESUME = flags.DEFINE_string("resume", None, "The file of an earlier run of this part: keep its figures, measure the rest.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Tiny shapes on a CPU.")
_OUT = flags.DEFINE_string("out", None, "The folder above <device>/: benchmarks/results, or a new temporary one for a dry run.")
_TORCH = flags.DEFINE_string("torch_python", sys.executable, "The Python with torch and transformers.")
_REVISION = flags.DEFINE_string("revision", None, "The code's commit, for a tree without git; else git is asked.")
_CHILD = flags.DEFINE_string("child", None, "The section that this process is; set by the parent.")
_ROWS = flags.DEFINE_string("child_rows", None, "Where a child writes its figures; set by the parent.")
_CAP = flags.DEFINE_float("cap", 60, "Seconds that a child has; set by the parent.")
_CACHE = flags.DEFINE_string("cache", "", "A child's compilation cache; set by the parent.")
_BORN = flags.DEFINE_float("born", 0, "When the parent started this child; set by the parent.")

_GRACE = 15.0  # seconds after its cap until a child is killed
_VERSION = "version "  # what a figure that is a package's version is called, before the package
_MODEL, _BIG, _DRY_MODEL = "qwen3-0.6b", "qwen3-8b", "tiny-qwen3"
_AOT = Path("benchmarks/results/aot.json")  # what aot_check found


@dataclasses.dataclass(frozen=True)
class Section:
    """One process.

    cap: seconds that it may take on a card; more where the part has time to spare.
    torch: it runs in the Python that has torch.
    dry: a dry run has it too.
    cached: programs that an earlier process compiled are not compiled again.
    by_point: its figures are independent, so that a run that goes on measures only those that are missing.
    """

    run: Callable[[Figures], None]
    cap: float
    torch: bool = False
    dry: bool = True
    cached: bool = True
    by_point: bool = False


@dataclasses.dataclass(frozen=True)
class Late:
    """A section's function by its name, `function` of `scripts.gpu.<module>`: imported only in the process that runs it."""

    module: str
    function: str

    def load(self) -> Callable[[Figures], None]:
        return getattr(importlib.import_module(f"scripts.gpu.{self.module}"), self.function)

    def __call__(self, figures: Figures) -> None:
        self.load()(figures)


def _engine(name: str, model: str = _MODEL, *args: Any) -> Callable[[Figures], None]:
    def run(figures: Figures) -> None:
        from scripts.gpu import engine as gpu_engine

        getattr(gpu_engine, name)(figures, _DRY_MODEL if figures.dry_run else model, *args)

    return run


def _device(figures: Figures) -> None:
    """Which card this is, in whose company."""
    import jax

    from scripts.gpu.device_rates import measure

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    figures.record("device", device.device_kind, "", platform=device.platform, memory=stats.get("bytes_limit", 0))
    names = (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "flax",
        "numpy",
        "torch",
        "transformers",
        "nvidia-cuda-nvcc",
    )
    for name in names:
        try:
            figures.record(f"{_VERSION}{name}", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            figures.record(f"{_VERSION}{name}", None, "absent")
    if figures.dry_run:
        measure(figures)
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm", "--format=csv,noheader"]
    figures.attempt(
        "driver", lambda: figures.record("driver", subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip())
    )
    measure(figures)


def _first_token(model: str) -> Callable[[Figures], None]:
    def run(figures: Figures) -> None:
        from scripts.gpu import engine as gpu_engine

        gpu_engine.first_token(figures, _DRY_MODEL if figures.dry_run else model, _CACHE.value, _BORN.value)

    return run


def _startup(child: str) -> Callable[[Figures], None]:
    """The same script twice, with an empty compilation cache and with the one that the first left; FAIL if that is of no use."""

    def run(figures: Figures) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # For all of the child: its weights are made before the engine sets a cache. Whatever the environment says, all is kept.
            cache = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/jax", "JAX_ENABLE_COMPILATION_CACHE": "true"}
            cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            for label in ("cold", "warm"):
                rows = Path(folder) / f"{label}.rows"
                more = [f"--cache={folder}/jax", f"--born={time.time()}"]
                end = run_child(child, nested_cap(figures), rows, figures.dry_run, more, cache)
                found = [r for r in read_rows(rows) if r["name"] == "first token"]
                if not found:
                    figures.record(f"start to first token, {label}", None, "error", why=end)
                    return
                row = {k: v for k, v in found[0].items() if k not in ("section", "name", "value", "unit")}
                verdict = "FAIL" if label == "warm" and not row["from_cache"] else "pass"
                figures.record(f"start to first token, {label}", found[0]["value"], "s", verdict=verdict, **row)

    return run


# When XLA updates a graph's addresses. With those that skip some, the whole process has an allocator that maps memory itself.
UPDATE_MODES = ("ALWAYS_UPDATE", "SKIP_TEMP", "SKIP_PROFILED")


def _graph_updates(figures: Figures) -> None:
    """Runs a child for each mode, with XLA's log on, in a file that both read."""
    for number, mode in enumerate(UPDATE_MODES):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            environment = {
                "TF_CPP_MIN_LOG_LEVEL": "0",
                "TF_CPP_VMODULE": "command_buffer_thunk=3,gpu_command_buffer=3",
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_command_buffer_update_mode={mode}".strip(),
            }
            rows = Path(folder) / "rows"
            cap = nested_cap(figures) / (len(UPDATE_MODES) - number)
            end = run_child("count_graph_updates", cap, rows, figures.dry_run, [f"--cache={log}"], environment, log)
            for row in read_rows(rows):
                kept = {k: v for k, v in row.items() if k not in ("section", "name")}
                figures.record(f"{row['name']}, {mode}", **kept)
            if not read_rows(rows):
                figures.record(f"graph updates, {mode}", None, "error", why=end)


def _count_graph_updates(figures: Figures) -> None:
    from scripts.gpu import engine as gpu_engine

    gpu_engine.graph_updates(figures, _DRY_MODEL if figures.dry_run else _MODEL, Path(_CACHE.value))


FIRST = {"device": Section(_device, 40)}  # of every part: its results go to a folder of the card
PARTS: dict[str, dict[str, Section]] = {
    "kernels": {
        "parity": Section(Late("parity", "parity"), 150, by_point=True),
        "decode": Section(Late("attention", "decode"), 120, by_point=True),
        "prefill": Section(Late("attention", "prefill"), 70, by_point=True),
        "mixed": Section(Late("attention", "mixed"), 30, by_point=True),
        "cudnn": Section(Late("peers", "cudnn"), 40, by_point=True),
        "tune": Section(Late("attention", "tune"), 80),
        "matmuls": Section(Late("matmuls", "matmuls"), 80, by_point=True),
        "torch": Section(Late("peers", "torch_attention"), 60, torch=True, by_point=True),
    },
    "engine": {
        "steps_0.6b": Section(_engine("steps"), 90, by_point=True),
        "workload": Section(_engine("workload"), 100),
        "startup": Section(_startup("first_token"), 100),
        "steps_8b": Section(_engine("steps", _BIG, (1, 32, 64, 128)), 100, dry=False, by_point=True),  # the code of steps_0.6b
        "graph_updates": Section(_graph_updates, 90),
        "thunks": Section(_engine("thunks", _MODEL, _AOT), 40, cached=False),  # XLA dumps only what it compiles
        "transformers": Section(Late("peers", "transformers_generate"), 100, torch=True),
        "startup_8b": Section(_startup("first_token_8b"), 100, dry=False),  # where time is left, and the same code as startup
        "thunks_8b": Section(_engine("thunks", _BIG, _AOT), 40, dry=False, cached=False),
    },
}
HIDDEN = {
    "first_token": Section(_first_token(_MODEL), 90),
    "first_token_8b": Section(_first_token(_BIG), 90),
    "count_graph_updates": Section(_count_graph_updates, 60),
}
SECTIONS = {**FIRST, **PARTS["kernels"], **PARTS["engine"], **HIDDEN}


def nested_cap(figures: Figures) -> float:
    """Seconds of a process that a section starts: it is killed, if need be, before the section is."""
    return max(0.0, figures.seconds_left - _GRACE)


def child_environment(cached: bool) -> dict[str, str]:
    """Ours, and one compilation cache for all sections and for the next run: the environment's where it names one, else jaxserve's
    own."""
    from jaxserve.execution.compilation import cache_folder

    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(cache_folder() / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    return {**cache, **os.environ, **({} if cached else {"JAX_ENABLE_COMPILATION_CACHE": "false"})}


def run_child(
    name: str,
    cap: float,
    rows: Path,
    dry_run: bool,
    more: list[str] | None = None,
    env: dict[str, str] | None = None,
    log: Path | None = None,
) -> str:
    """Runs a section in a process of its own; how it ended, in words. log: where its standard error goes, else with ours.

    A section's process leads a process group, in which those that it starts itself stay: it is killed with them.
    """
    python = _TORCH.value if SECTIONS[name].torch else sys.executable
    command = [
        python,
        "-W",
        "ignore",
        "-m",
        "scripts.gpu_check",
        f"--child={name}",
        f"--child_rows={rows}",
        f"--cap={cap}",
        *(more or []),
    ]
    environment = {**child_environment(SECTIONS[name].cached), **(env or {})}
    if dry_run:
        command.append("--dry_run")
        environment["JAX_PLATFORMS"] = "cpu"
    errors = log.open("w") if log else None
    nested = bool(_CHILD.value)
    child = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=not nested)
    try:
        code = child.wait(cap + _GRACE)
        return "done" if code == 0 else f"exit {code}"
    except subprocess.TimeoutExpired:
        if nested:
            child.kill()
        else:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"killed {cap + _GRACE:.0f} s after its start"
    finally:
        if errors:
            errors.close()


def chosen_parts() -> list[str]:
    """Those of --part that have one of --sections."""
    parts = list(PARTS) if _PART.value == "all" else [_PART.value]
    return [part for part in parts if not _SECTIONS.value or {**FIRST, **PARTS[part]}.keys() & set(_SECTIONS.value)]


def cap_of(name: str, todo: dict[str, Section], left: float) -> float:
    """Seconds of a section of those that are still to run: its own cap, or more where they all have time to spare."""
    spare = max(1.0, left / sum(section.cap for section in todo.values()))
    return min(todo[name].cap * spare, left)


def run_part(part: str, folder: Path, above: Path, earlier: dict[str, Any] | None = None) -> tuple[list[dict[str, Any]], Path]:
    """`device`, then all sections of a part, as long as its time lasts; its figures, and their file, which is written as each ends,
    with what an earlier run found of those still to come.

    folder: for the sections' own files. above: where the folder of the card is, or is made. earlier: what an earlier run wrote.
    UsageError if that was on another card.
    """
    start, rows, path = time.perf_counter(), [], above
    sections = {n: s for n, s in PARTS[part].items() if not _SECTIONS.value or n in _SECTIONS.value}
    sections = {n: s for n, s in {**FIRST, **sections}.items() if s.dry or not _DRY_RUN.value}
    before: dict[str, list[dict[str, Any]]] = {name: [] for name in sections}
    for row in earlier["figures"] if earlier else []:
        if row["section"] in sections.keys() - FIRST.keys():
            before[row["section"]].append(row)
    todo = {n: s for n, s in sections.items() if not before[n] or any(map(is_unfinished, before[n]))}
    for name in sections:
        if name in todo:
            left = 60 * _MINUTES.value - (time.perf_counter() - start) - _GRACE
            rows += _run_section(name, folder, cap_of(name, todo, left), before[name])
            del todo[name]
        else:
            rows += before[name]
        if name in FIRST and earlier:
            if earlier["device"] != value_of(rows, "device"):
                raise app.UsageError(f"--resume={_RESUME.value} is of {earlier['device']}, this is {value_of(rows, 'device')}")
            rows += earlier_rates(earlier)
        del before[name]
        path = write(part, rows + list(itertools.chain(*before.values())), above)
    return rows, path


def earlier_rates(earlier: dict[str, Any]) -> list[dict[str, Any]]:
    """An earlier run's rates of the card, under its date: what the percentages that are kept of it are of."""
    rates = [r for r in earlier["figures"] if r["section"] in FIRST and r["unit"] and isinstance(r["value"], int | float)]
    return [r if " of " in r["name"] else {**r, "name": f"{r['name']} of {earlier['date']}"} for r in rates]


def _run_section(name: str, folder: Path, cap: float, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A section's figures, those of an earlier run that stand among them, and how it ended."""
    path, began = folder / f"{name}.rows", time.perf_counter()
    kept = [r for r in before if SECTIONS[name].by_point and r["name"] != "status" and not is_unfinished(r)]
    if cap < 10:
        return [*kept, {"section": name, "name": "status", "value": "skipped", "unit": "", "why": "out of time"}]
    write_rows(path, kept)
    status = run_child(name, cap, path, _DRY_RUN.value)
    new, seconds = read_rows(path)[len(kept) :], round(time.perf_counter() - began, 1)
    print(f"[{name}] {status}, {seconds:.0f} s", flush=True)
    again = {r["name"] for r in new}
    ended = {"section": name, "name": "status", "value": status, "unit": "", "seconds": seconds}
    return [*(r for r in kept if r["name"] not in again), *new, ended]


def read_earlier(part: str) -> dict[str, Any] | None:
    """What --resume names. UsageError if it is of another part, revision or kind of run."""
    if not _RESUME.value:
        return None
    if not Path(_RESUME.value).is_file():
        raise app.UsageError(f"--resume={_RESUME.value}: there is no such file")
    earlier = json.loads(Path(_RESUME.value).read_text())
    ours = {"check": f"gpu {part}", "revision": code_revision(), "dry_run": _DRY_RUN.value}
    revision = ours["revision"]
    if not revision or revision.endswith("+"):
        raise app.UsageError(f"--resume needs to know the code, and {revision=}: commit, or give --revision")
    for name, value in ours.items():
        if earlier.get(name) != value:
            raise app.UsageError(f"--resume={_RESUME.value} has {name}={earlier.get(name)!r}, this run {value!r}")
    return earlier


def code_revision() -> str | None:
    from jaxserve.cli.common.provenance import revision

    return _REVISION.value or revision()


def device_name(rows: list[dict[str, Any]]) -> str:
    """A folder's name for the card: "h100" from "NVIDIA H100 80GB HBM3"."""
    kind = str(value_of(rows, "device") or "")
    for known in ("H100", "H200"):
        if known in kind.split():  # a GH200 is neither
            return known.lower()
    return kind.lower().replace(" ", "-") or "unknown"


def write(part: str, rows: list[dict[str, Any]], above: Path) -> Path:
    """The part's figures as JSON, beside what they depend on; some sections alone go to a file of their own."""
    folder = above / ("dry_run" if _DRY_RUN.value else device_name(rows))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("_".join(["gpu", part, *(name for name in {**FIRST, **PARTS[part]} if name in _SECTIONS.value)]) + ".json")
    about = {
        "check": f"gpu {part}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "revision": code_revision(),
        "device": value_of(rows, "device"),
        "python": sys.version.split()[0],
        "versions": {r["name"].removeprefix(_VERSION): r["value"] for r in rows if r["name"].startswith(_VERSION)},
        "dry_run": _DRY_RUN.value,
    }
    path.write_text(json.dumps({**about, "figures": rows}, indent=1) + "\n")
    return path


def failures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of what failed: errors, checks that did not pass, processes that did not end well, and parity that was not checked."""
    return [r for r in rows if is_bad(r) or is_skipped(r) and r["section"] == "parity"]


def summary(rows: list[dict[str, Any]]) -> str:
    """The table that closes a run: a line a figure that has a number, then what is unsupported, was skipped or failed."""
    good = [r for r in rows if isinstance(r["value"], int | float) and r["name"] != "status"]
    lacks = [r for r in rows if r["unit"] == "unsupported"]
    bad = failures(rows)
    skips = [r for r in rows if is_skipped(r) and r not in bad]
    lines = [f"{r['section']:14s} {r['name']:52s} {r['value']:12.4g} {r['unit']}" for r in good]
    lines += [f"{r['section']:14s} {r['name']:52s} {r['unit'] or r['value']}: {r.get('why', '')}" for r in [*lacks, *skips, *bad]]
    return "\n".join([*lines, f"{len(good)} figures, {len(lacks)} unsupported, {len(skips)} skipped, {len(bad)} failures"])


def main() -> None:
    if _CHILD.value:
        figures = Figures(_CHILD.value, Path(_ROWS.value or os.devnull), _CAP.value, _DRY_RUN.value)
        figures.attempt(_CHILD.value, SECTIONS[_CHILD.value].run, figures)
        return
    known = set(SECTIONS) - set(HIDDEN)
    if set(_SECTIONS.value) - known:
        raise app.UsageError(f"--sections={','.join(_SECTIONS.value)}: must be of {', '.join(sorted(known))}")
    if not chosen_parts():
        raise app.UsageError(f"--sections={','.join(_SECTIONS.value)}: none is of --part={_PART.value}")
    if _RESUME.value and _PART.value == "all":
        raise app.UsageError("--resume names the file of one part: say which with --part")
    failed, above = 0, Path(_OUT.value or (tempfile.mkdtemp() if _DRY_RUN.value else "benchmarks/results"))
    for part in chosen_parts():
        earlier = read_earlier(part)
        with tempfile.TemporaryDirectory() as folder:
            rows, path = run_part(part, Path(folder), above, earlier)
        print(summary(rows), flush=True)
        print(f"gpu_check {part}: {path}", flush=True)
        failed += len(failures(rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run_command(main)

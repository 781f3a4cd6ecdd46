"""What this project claims about a GPU, measured on the one at hand: the attention kernel, then the engine.

    python -m scripts.gpu_check --part=kernels      rates, parity, decode, prefill, mixed, peers, tuning: under 8 minutes
    python -m scripts.gpu_check --part=engine       steps, workload, transformers, start-up, graphs: under 8 minutes
    python -m scripts.gpu_check --dry_run           both on a CPU with tiny shapes: every path, no figure that means anything

Needs an H100 or H200 and no network, and of packages only jax, flax, absl-py and numpy; torch and transformers are the peers where
they are installed. Every section runs in a process of its own with its own time limit, so that a crash or a hang costs one
section's remaining figures. They are written as JSON to benchmarks/results/<device>/, with device, date, versions and revision; a
table closes the run. Whatever --sections says, a part begins with `device`.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
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

from scripts.gpu_figures import Figures, read_rows, value_of

_PART = flags.DEFINE_enum("part", "all", ["kernels", "engine", "all"], "Which half; all runs one after the other.")
_SECTIONS = flags.DEFINE_list("sections", [], "Only these sections of the part, and device.")
_MINUTES = flags.DEFINE_float("minutes", 7.5, "Time of a part.")
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
    """One process. cap: seconds it may take on a card; torch: it runs in the Python that has torch; dry: a dry run has it too."""

    run: Callable[[Figures], None]
    cap: float
    torch: bool = False
    dry: bool = True


def _attention(name: str) -> Callable[[Figures], None]:
    def run(figures: Figures) -> None:
        from scripts import gpu_attention

        getattr(gpu_attention, name)(figures)

    return run


def _peers(name: str) -> Callable[[Figures], None]:
    def run(figures: Figures) -> None:
        from scripts import gpu_peers

        getattr(gpu_peers, name)(figures)

    return run


def _engine(name: str, model: str = _MODEL, *args: Any) -> Callable[[Figures], None]:
    def run(figures: Figures) -> None:
        from scripts import gpu_engine

        getattr(gpu_engine, name)(figures, _DRY_MODEL if figures.dry_run else model, *args)

    return run


def _device(figures: Figures) -> None:
    """Which card this is, in whose company."""
    import jax

    from scripts.device_rates import measure

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
        from scripts import gpu_engine

        gpu_engine.first_token(figures, _DRY_MODEL if figures.dry_run else model, _CACHE.value, _BORN.value)

    return run


def _startup(child: str) -> Callable[[Figures], None]:
    """The same script twice, with an empty compilation cache and with the one that the first left."""

    def run(figures: Figures) -> None:
        with tempfile.TemporaryDirectory() as cache:
            for label in ("cold", "warm"):
                rows = Path(cache) / f"{label}.rows"
                end = run_child(
                    child, nested_cap(figures), rows, figures.dry_run, [f"--cache={cache}/jax", f"--born={time.time()}"]
                )
                found = [r for r in read_rows(rows) if r["name"] == "first token"]
                if not found:
                    figures.record(f"start to first token, {label}", None, "error", why=end)
                    return
                row = {k: v for k, v in found[0].items() if k not in ("section", "name", "value", "unit")}
                figures.record(f"start to first token, {label}", found[0]["value"], "s", **row)

    return run


def _graph_updates(figures: Figures) -> None:
    """Runs its child with XLA's log on, in a file that both read."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        environment = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3,gpu_command_buffer=3"}
        rows = Path(folder) / "rows"
        end = run_child("count_graph_updates", nested_cap(figures), rows, figures.dry_run, [f"--cache={log}"], environment, log)
        for row in read_rows(rows):
            figures.record(**{k: v for k, v in row.items() if k != "section"})
        if not read_rows(rows):
            figures.record("graph updates", None, "error", why=end)


def _count_graph_updates(figures: Figures) -> None:
    from scripts import gpu_engine

    gpu_engine.graph_updates(figures, _DRY_MODEL if figures.dry_run else _MODEL, Path(_CACHE.value))


FIRST = {"device": Section(_device, 40)}  # of every part: its results go to a folder of the card
PARTS: dict[str, dict[str, Section]] = {
    "kernels": {
        "parity": Section(_attention("parity"), 90),
        "decode": Section(_attention("decode"), 100),
        "prefill": Section(_attention("prefill"), 60),
        "mixed": Section(_attention("mixed"), 30),
        "cudnn": Section(_peers("cudnn"), 40),
        "tune": Section(_attention("tune"), 80),
        "torch": Section(_peers("torch_attention"), 60, torch=True),
    },
    "engine": {
        "steps_0.6b": Section(_engine("steps"), 90),
        "workload": Section(_engine("workload"), 100),
        "startup": Section(_startup("first_token"), 100),
        "steps_8b": Section(_engine("steps", _BIG, (1, 32, 64, 128)), 100, dry=False),  # the same code as steps_0.6b
        "graph_updates": Section(_graph_updates, 40),
        "thunks": Section(_engine("thunks", _MODEL, _AOT), 40),
        "transformers": Section(_peers("transformers_generate"), 100, torch=True),
        "startup_8b": Section(_startup("first_token_8b"), 100, dry=False),  # where time is left, and the same code as startup
        "thunks_8b": Section(_engine("thunks", _BIG, _AOT), 40, dry=False),
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
    environment = {**os.environ, **(env or {})}
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


def run_part(part: str, folder: Path) -> list[dict[str, Any]]:
    """`device`, then all sections of a part, each within its own cap and what is left of the part's time."""
    start, rows = time.perf_counter(), []
    sections = {n: s for n, s in PARTS[part].items() if not _SECTIONS.value or n in _SECTIONS.value}
    for name, section in {**FIRST, **sections}.items():
        left = 60 * _MINUTES.value - (time.perf_counter() - start) - _GRACE
        cap = min(section.cap, left)
        if _DRY_RUN.value and not section.dry:
            continue
        if cap < 10:
            rows.append({"section": name, "name": "status", "value": "skipped", "unit": "", "why": "out of time"})
            continue
        path, began = folder / f"{name}.rows", time.perf_counter()
        status = run_child(name, cap, path, _DRY_RUN.value)
        rows += read_rows(path)
        rows.append(
            {"section": name, "name": "status", "value": status, "unit": "", "seconds": round(time.perf_counter() - began, 1)}
        )
        print(f"[{name}] {status}, {time.perf_counter() - began:.0f} s", flush=True)
    return rows


def device_name(rows: list[dict[str, Any]]) -> str:
    """A folder's name for the card: "h100" from "NVIDIA H100 80GB HBM3"."""
    kind = str(value_of(rows, "device") or "")
    for known in ("H100", "H200"):
        if known in kind:
            return known.lower()
    return kind.lower().replace(" ", "-") or "unknown"


def write(part: str, rows: list[dict[str, Any]]) -> Path:
    """The part's figures as JSON, beside what they depend on; some sections alone go to a file of their own."""
    from scripts.engine_flags import revision

    above = _OUT.value or (tempfile.mkdtemp() if _DRY_RUN.value else "benchmarks/results")
    folder = Path(above) / ("dry_run" if _DRY_RUN.value else device_name(rows))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("_".join(["gpu", part, *(name for name in {**FIRST, **PARTS[part]} if name in _SECTIONS.value)]) + ".json")
    about = {
        "check": f"gpu {part}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "revision": _REVISION.value or revision(),
        "device": value_of(rows, "device"),
        "python": sys.version.split()[0],
        "versions": {r["name"].removeprefix(_VERSION): r["value"] for r in rows if r["name"].startswith(_VERSION)},
        "dry_run": _DRY_RUN.value,
    }
    path.write_text(json.dumps({**about, "figures": rows}, indent=1) + "\n")
    return path


def failures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of what failed: errors, checks that did not pass, processes that did not end well."""
    bad = [r for r in rows if r["unit"] in ("error", "FAIL") or r.get("verdict") == "FAIL"]
    return bad + [r for r in rows if r["name"] == "status" and r["value"] not in ("done", "skipped")]


def summary(rows: list[dict[str, Any]]) -> str:
    """The table that closes a run: a line a figure that has a number, then what is unsupported, was skipped or failed."""
    good = [r for r in rows if isinstance(r["value"], int | float) and r["name"] != "status"]
    lacks = [r for r in rows if r["unit"] == "unsupported"]
    skips = [r for r in rows if "skipped" in (r["unit"], r["value"])]
    bad = failures(rows)
    lines = [f"{r['section']:14s} {r['name']:52s} {r['value']:12.4g} {r['unit']}" for r in good]
    lines += [f"{r['section']:14s} {r['name']:52s} {r['unit'] or r['value']}: {r.get('why', '')}" for r in [*lacks, *skips, *bad]]
    return "\n".join([*lines, f"{len(good)} figures, {len(lacks)} unsupported, {len(skips)} skipped, {len(bad)} failures"])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if _CHILD.value:
        figures = Figures(_CHILD.value, Path(_ROWS.value or os.devnull), _CAP.value, _DRY_RUN.value)
        figures.attempt(_CHILD.value, SECTIONS[_CHILD.value].run, figures)
        return
    known = set(SECTIONS) - set(HIDDEN)
    if set(_SECTIONS.value) - known:
        raise app.UsageError(f"--sections={','.join(_SECTIONS.value)}: must be of {', '.join(sorted(known))}")
    if not chosen_parts():
        raise app.UsageError(f"--sections={','.join(_SECTIONS.value)}: none is of --part={_PART.value}")
    failed = 0
    for part in chosen_parts():
        with tempfile.TemporaryDirectory() as folder:
            rows = run_part(part, Path(folder))
        path = write(part, rows)
        print(summary(rows), flush=True)
        print(f"gpu_check {part}: {path}", flush=True)
        failed += len(failures(rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    app.run(main)

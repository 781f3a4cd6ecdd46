"""The tables and plots of benchmarks/sarathi: Sarathi-Serve's evaluation (Agrawal et al., OSDI 2024), simulated.

    python -m scripts.reproduce_sarathi --workers=2
    python -m scripts.reproduce_sarathi --sections=ablation,stalls --output=FOLDER
    python -m scripts.reproduce_sarathi --seeds=5 --precision=0.01 --workers=8 --output=FOLDER

Published figures stand beside ours. The schedulers compared are policies of the real scheduler on real page pools; time is an
analytic step-time model of the machines (jaxserve/step_times/analytic.py), none of whose constants comes from these figures.
Lengths are log-normal fits to the two published datasets. Writes one PNG a figure, tables.md and results.json (both after every
section), and trials.json, from which a run that broke off goes on: remove it to begin anew.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.finished import Finished
from jaxserve.cli.common.plots import figure
from jaxserve.cli.common.provenance import code_id, provenance, write_json
from scripts.reproduce.sarathi_sections import SECTIONS
from scripts.reproduce.sarathi_session import Session, processes

SEATS = 128  # of the largest contender
_SECTIONS = flags.DEFINE_list("sections", list(SECTIONS), "Which sections; the tables of others stay out of tables.md.")
_OUTPUT = flags.DEFINE_string("output", "benchmarks/sarathi", "Folder of the results.")
_REQUESTS = flags.DEFINE_integer(
    "num_requests", 2048, "Of a trial (the default: the artifact's), ten times a scheduler's seats or more.", lower_bound=10 * SEATS
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of lengths and arrivals.", lower_bound=1)
_PRECISION = flags.DEFINE_float("precision", 0.05, "Relative distance of neighbouring rates.")
_WORKERS = flags.DEFINE_integer("workers", 1, "Processes that serve trials; the results are the same.", lower_bound=1)
flags.register_validator("sections", lambda given: given and set(given) <= set(SECTIONS), f"choose from {', '.join(SECTIONS)}")


def main() -> None:
    folder, begin = Path(_OUTPUT.value), time.monotonic()
    settings = {"num_requests": _REQUESTS.value, "code": code_id()}
    try:
        figure()  # or the first section to draw would find, hours later, that it can't
        finished = Finished(folder / "trials.json", settings)
    except (ValueError, RuntimeError) as error:
        raise app.UsageError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    about = {"benchmark": "sarathi", **settings, "seeds": _SEEDS.value, "precision": _PRECISION.value, **provenance()}
    workers, parts, results, seconds = _WORKERS.value, [], {}, 0.0
    pool = processes(workers) if workers > 1 else contextlib.nullcontext()
    with pool as executor, tqdm(desc="runs", unit="run", mininterval=2) as progress:
        session = Session(folder, finished, progress, _SEEDS.value, _REQUESTS.value, _PRECISION.value, executor, workers)
        chosen = [name for name in SECTIONS if name in _SECTIONS.value]
        for i, name in enumerate(chosen, 1):
            progress.set_description(f"{name}, {i} of {len(chosen)}")
            title, section = SECTIONS[name]
            text, results[name] = section(session)
            parts.append(f"## {title}\n\n{text}")
            missing = [] if i == len(chosen) else [f"Not whole: {i} of {len(chosen)} sections."]
            (folder / "tables.md").write_text("\n\n".join(["# Tables", how_made(sys.argv[1:]), *missing, "\n".join(parts)]))
            seconds = time.monotonic() - begin  # of this run alone
            write_json(str(folder / "results.json"), {**about, "seconds": seconds, "sections": results})
    print(f"{folder}/tables.md, {len(finished.results)} trials, {seconds:.0f} s")


def how_made(given: list[str]) -> str:
    """The first line of tables.md, with the command's own flags."""
    command = shlex.join(["python", "-m", "scripts.reproduce_sarathi", *given])
    seeds = f"{_SEEDS.value} seeds, ± 95% intervals" if _SEEDS.value > 1 else "one seed, so that there are no intervals"
    trials = f"{_REQUESTS.value} requests a trial, neighbouring rates {100 * _PRECISION.value:g}% apart"
    return f"Written by `{command}`: {trials}; {seeds}, where a table does not say otherwise. Read README.md for what they mean."


if __name__ == "__main__":
    run_command(main)

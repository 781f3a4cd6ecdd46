"""The tables and plots of benchmarks/sarathi: Sarathi-Serve's evaluation (Agrawal et al., OSDI 2024), simulated.

    python -m scripts.reproduce_sarathi
    python -m scripts.reproduce_sarathi --sections=ablation,stalls --output=FOLDER
    python -m scripts.reproduce_sarathi --trial_seconds=1800 --seeds=5 --precision=0.01 --output=FOLDER      # hours

Published figures stand beside ours. The schedulers compared are policies of the real scheduler on real page pools; time is an
analytic step-time model of the machines (jaxserve/simulation/analytic.py), none of whose constants comes from these figures.
Lengths are log-normal fits to the two published datasets. Writes tables.md, one PNG a figure, results.json, and trials.json, from
which a run that broke off goes on: remove it to begin anew.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from scripts.engine_flags import provenance, revision, write_json
from scripts.finished import Finished
from scripts.sarathi_sections import SECTIONS, compute

_SECTIONS = flags.DEFINE_list("sections", list(SECTIONS), "Which sections; the tables of others stay out of tables.md.")
_OUTPUT = flags.DEFINE_string("output", "benchmarks/sarathi", "Folder of the results.")
_SECONDS = flags.DEFINE_float("trial_seconds", 120.0, "Virtual seconds of arrivals of a trial (the artifact: up to 1800).", 1.0)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of lengths and arrivals.", lower_bound=1)
_PRECISION = flags.DEFINE_float("precision", 0.05, "Relative distance of neighbouring rates.")
flags.register_validator("sections", lambda given: set(given) <= set(SECTIONS), f"choose from {', '.join(SECTIONS)}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    from scripts.sarathi_capacity import Search

    folder, start = Path(_OUTPUT.value), time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"trial_seconds": _SECONDS.value, "revision": revision()}
    try:
        finished = Finished(folder / "trials.json", settings)
    except ValueError as error:
        sys.exit(f"reproduce_sarathi: {error}")
    parts, results = [], {}
    with tqdm(desc="trials", unit="trial", mininterval=5) as progress:
        search = Search(finished, progress, _SEEDS.value, _SECONDS.value, _PRECISION.value)
        for name in SECTIONS:
            if name in _SECTIONS.value:
                progress.set_description(name)
                text, results[name] = compute(name, search, folder)
                parts.append(f"## {SECTIONS[name]}\n\n{text}")
    made = f"`python -m scripts.reproduce_sarathi`, {_SECONDS.value:g} s of arrivals a trial, {_SEEDS.value} seeds, ± 95% intervals"
    (folder / "tables.md").write_text(f"# Tables\n\nWritten by {made}. Read README.md for what they mean.\n\n" + "\n".join(parts))
    about = {"benchmark": "sarathi", **settings, "seeds": _SEEDS.value, "precision": _PRECISION.value, **provenance()}
    write_json(str(folder / "results.json"), {**about, "cpu_seconds": time.process_time() - start, "sections": results})
    print(f"{folder}/tables.md, {len(finished.results)} trials, {time.process_time() - start:.0f} s of CPU")


if __name__ == "__main__":
    app.run(main)

"""The tables and plots of benchmarks/literature: figures of Sarathi-Serve and of an engine's guide, by the analytic model.

    python -m scripts.reproduce_literature                        # five minutes on a busy machine
    python -m scripts.reproduce_literature --vidur=FOLDER         # also beside Vidur's kernel profiles (benchmarks/vidur)

Writes tables.md, results.json and a PNG a figure. Published figures stand beside ours; reproduce_sarathi has the capacities. The
page that reads them in order is benchmarks/literature/README.md.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.plots import figure
from jaxserve.cli.common.provenance import provenance, write_json
from scripts.reproduce import literature_costs, literature_drafts, literature_runs

# A section makes (Markdown, data) and leaves its plots in the folder that it is given.
SECTIONS: dict[str, tuple[str, Callable[..., tuple[str, dict[str, Any]]]]] = {
    "tail": ("Figure 1b: tail latency over load", literature_runs.tail),
    "throughput": ("Figure 3: throughput over the batch", literature_costs.throughput),
    "layer": ("Figure 4: a layer's parts", literature_costs.layer),
    "roofline": ("Figure 5, and B_sat: when a batch is enough", literature_costs.roofline),
    "tensor_parallel": ("Figure 6: linear operators by TP degree", literature_costs.tensor_parallel),
    "policies": ("Figure 7: one trace under four policies", literature_runs.policies),
    "pipeline": ("Figure 8: bubbles of a pipeline", literature_runs.pipeline),
    "falcon": ("Section 3.3: a step of Falcon-180B", literature_costs.falcon),
    "mixing": ("Figure 9: a whole prompt beside decodes", literature_costs.mixing),
    "capacities": ("Figures 10 and 12: Yi-34B's capacity", literature_runs.capacities),
    "nodes": ("Figure 13a: TP8 across nodes", literature_runs.nodes),
    "chunks": ("Figure 14: what chunks cost", literature_costs.chunks),
    "knobs": ("Token budget, and batch", literature_runs.knobs),
    "drafts": ("Drafts: EAGLE-3 on an H100", literature_drafts.drafts),
}
_OUTPUT = flags.DEFINE_string("output", "benchmarks/literature", "Folder of the results.")
_VIDUR = flags.DEFINE_string("vidur", None, "Folder of Vidur's kernel profiles; without it figure 6 has none beside it.")


def main() -> None:
    folder, begin, parts, results = Path(_OUTPUT.value), time.monotonic(), [], {}
    sections = dict(SECTIONS)
    try:
        figure()
        if _VIDUR.value is not None:
            vidur = Path(_VIDUR.value)
            if not vidur.is_dir():
                raise ValueError(f"--vidur={_VIDUR.value} is no folder")
            title, section = sections["tensor_parallel"]
            sections["tensor_parallel"] = title, functools.partial(section, vidur=vidur)
    except (ValueError, RuntimeError) as error:
        raise app.UsageError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, section) in tqdm(sections.items(), unit="section"):
        text, results[name] = section(folder)
        parts.append(f"## {title}\n\n{text}")
    command = "python -m scripts.reproduce_literature" + (" --vidur=FOLDER" if _VIDUR.value else "")
    about = f"Written by `{command}`: the analytic model and the simulator, no GPU. README.md says what they mean."
    (folder / "tables.md").write_text("\n\n".join(["# Tables", about, "\n".join(parts)]))
    seconds = time.monotonic() - begin
    write_json(str(folder / "results.json"), {"benchmark": "literature", **provenance(), "seconds": seconds, "sections": results})
    print(f"{folder}/tables.md, {seconds:.0f} s")


if __name__ == "__main__":
    run_command(main)

"""The quick figures of a revision, each beside the last one written down.

    python -m scripts.figures                                            # measures and compares; changes nothing
    python -m scripts.figures --only=padding,imports                     # a part of them
    python -m scripts.figures --append --plot=benchmarks/history.png     # also a line of benchmarks/history.jsonl (make figures)

host_step: microseconds that schedule, pack and update take a step of 256 decodes, median and least. cpu_step: milliseconds of a
decode step of 8 (tiny-qwen3) and its ratio to a bare jitted step by turns: the same weights, kernels and shapes in a loop that only
reads tokens. padding: percent of the tokens run that are padding, in five workloads under the engine's default plan, simulated.
compiles: programs that warm-up compiles, and compilations while a workload is served after it. imports: processor milliseconds of
`import jaxserve` beyond an empty interpreter's. Times are of this machine, busy or not; padding and compiles of any.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.plots import CAN_PLOT
from jaxserve.cli.common.provenance import revision, versions
from scripts.bench import history

NUM_STEPS = 60  # of each side of cpu_step
COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's event of a program that XLA compiled, or its cache had


def host_step() -> dict[str, float]:
    from scripts.bench.decode_steps import make_scheduler
    from scripts.bench_scheduler import NUM_WARM_UP, measure

    found = measure(make_scheduler(256, 16, True, "fcfs", NUM_WARM_UP + 501), 256, 500, 1)
    return {"host_step_us": found["total_us"], "host_step_least_us": found["total_min_us"]}


def engine_steps() -> dict[str, float]:
    """Of one engine, whose warm-up is counted: cpu_step and compiles."""
    import jax.monitoring

    from jaxserve import Engine, EngineConfig
    from jaxserve.cli.common.bench_models import bench_model
    from jaxserve.cli.common.timed_run import serve
    from jaxserve.workloads.workload import fixed
    from scripts.bench.bare_step import compare_step

    compilations = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024, warm_up="all")
    engine = Engine(bench_model("tiny-qwen3", "float32"), config, eos_token_ids=())
    num_warm_up = len(compilations)
    if not num_warm_up:
        raise RuntimeError(f"this jax reports no compilation as {COMPILED}: what it reports now has to be counted")
    serve(engine, fixed("short_long_mix"), seed=0)
    num_late = len(compilations) - num_warm_up
    step = compare_step(engine, 8, NUM_STEPS)
    return {
        "cpu_step_ms": step["engine_ms"],
        "cpu_step_over_bare": step["ratio"],
        "compiles_warm_up": engine.runner.programs.num_compiled,
        "compiles_serving": num_late,
    }


def padding() -> dict[str, float]:
    from jaxserve.buckets.plan import BucketPlan
    from jaxserve.scheduling.config import SchedulerConfig
    from jaxserve.simulation.replay import replay
    from jaxserve.step_times.analytic import Deployment
    from jaxserve.workloads.traffic import at_once, at_rate, log_normal
    from jaxserve.workloads.workload import fixed, random_lengths

    limits = SchedulerConfig(max_model_len=16384, max_num_batched_tokens=2048, max_num_seqs=64)
    plan = BucketPlan.default(limits.max_num_seqs, limits.max_num_batched_tokens)
    step_times, found = Deployment.named("qwen3-8b", "h100").step_times(), {}
    workloads = [fixed("equal_size"), fixed("short_long_mix"), at_once(random_lengths(128, 256, 128, 0.5))]
    rates = {"openchat_sharegpt4": 4.0, "arxiv_summarization": 2.0}
    workloads += [at_rate(log_normal(name, 128, 0), rate, 0) for name, rate in rates.items()]
    for workload in workloads:
        found[f"padding_{workload.name}_percent"] = 100 * replay(workload, plan, step_times, limits, 16384).padding.padding_share
    return found


def imports(times: int = 5) -> dict[str, float]:
    def least(code: str) -> float:
        command = [sys.executable, "-c", f"{code}\nimport time\nprint(time.process_time())"]
        return min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(times))

    return {"imports_jaxserve_ms": 1e3 * (least("import jaxserve") - least(""))}


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "host_step": host_step,
    "engine_steps": engine_steps,
    "padding": padding,
    "imports": imports,
}
TITLES = {
    "host_step": "host, us a step of 256",
    "imports": "import jaxserve, ms of processor",
    "padding": "padding, % of tokens run",
}
TITLES |= {
    "compiles": "programs compiled",
    "cpu_step_ms": "decode step of 8, CPU, ms",
    "cpu_step_over_bare": "decode step over a bare one",
}
_ONLY = flags.DEFINE_list("only", list(PARTS), f"Which of {', '.join(PARTS)}.")
_HISTORY = flags.DEFINE_string("history", "benchmarks/history.jsonl", "The lines to compare with.")
_APPEND = flags.DEFINE_boolean("append", False, "Add this run's line to them; of all figures only.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the lines, this run's too where it is added, into this PNG file.")
flags.register_validator("only", lambda given: given and set(given) <= set(PARTS), f"choose from {', '.join(PARTS)}")
flags.register_validator("plot", *CAN_PLOT)


def title_of(name: str) -> str:
    """The panel of a figure."""
    return next(title for start, title in TITLES.items() if name.startswith(start))


def main() -> None:
    if _APPEND.value and set(_ONLY.value) != set(PARTS):
        raise app.UsageError("--append adds a line of all figures; leave --only out")
    figures: dict[str, float] = {}
    load = round(os.getloadavg()[0], 1)  # before ours
    for name in tqdm([name for name in PARTS if name in _ONLY.value], leave=False):
        figures |= PARTS[name]()
    about = versions() | {"load": load}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = history.Line(now, revision(), {key: about[key] for key in history.MACHINE}, figures)
    path = Path(_HISTORY.value)
    lines, faults = history.read(path)
    for text in (*faults, *history.compared(line, lines)):
        print(text)
    if _APPEND.value:
        history.append(path, line)
        lines.append(line)
    if _PLOT.value is not None and lines:
        history.draw(lines, {name: title_of(name) for old in lines for name in old.figures}, Path(_PLOT.value))


if __name__ == "__main__":
    run_command(main)

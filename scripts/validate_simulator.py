r"""How far the simulator is from measurements: its step times' linear layers from kernel profiles, its replays from the engine.

    python -m scripts.validate_simulator --vidur=FOLDER --output=benchmarks/vidur
    python -m scripts.validate_simulator --step_times=steps.json --workload=random --num_requests=200 --random_input_len=256 \
        --random_output_len=64 --random_range_ratio=0.5 --request_rate=8 --rounds=3

The first compares the analytic step times with Vidur's profiles (data/profiling/compute of github.com/microsoft/vidur, gzip'd as
<gpu>_<model>_mlp.csv.gz), an operator at a time. The second replays a workload and serves it on this machine's engine, and exits
with 1 if throughput, median TTFT or P99 TBT differ by more than --tolerance. Where the file of --step_times does not exist,
`jaxserve tune profile` makes it first, with the same --model and limits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.provenance import provenance, write_json
from jaxserve.cli.common.simulated_machine import RATE, measure, plan_for, planning, read_machine
from jaxserve.cli.common.traffic_flags import read_traffic

_VIDUR = flags.DEFINE_string("vidur", None, "Folder of Vidur's profiles; nothing else is done then.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of the engine, of which the median counts.", lower_bound=1)
_TOLERANCE = flags.DEFINE_float("tolerance", 0.1, "Largest relative difference.", lower_bound=0.0)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
_OUTPUT = flags.DEFINE_string("output", None, "With --vidur: write tables.md and results.json into this folder.")
define_engine_flags(model="tiny-qwen3")

_PROFILE_FLAGS = ("model", "config", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages")


def compare_engine() -> dict[str, Any]:
    """{metric: {simulated, measured, rounds, error}} of one workload on the machine of --step_times."""
    path = engine_options()["step_times"]
    if path is None:
        raise ValueError("give --step_times, a profile of this machine (it is made if it isn't there), or --vidur")
    if not Path(path).exists():
        given = [f"--{name}={flags.FLAGS[name].value}" for name in _PROFILE_FLAGS if flags.FLAGS[name].present]
        if subprocess.run([sys.executable, "-m", "jaxserve.cli.tune.profile", f"--output={path}", *given]).returncode:
            raise ValueError(f"{path} is not there, and `jaxserve tune profile` could not make it")
    machine = read_machine()
    plan, seed = plan_for(machine.limits, machine.multiple), engine_options()["seed"]
    workload = read_traffic(flags.FLAGS.model, machine.limits.max_model_len, RATE.value, seed)
    with planning("simulated") as bar:
        simulated = metrics(machine.run(workload, plan, bar.update).times)
    runs = [metrics(measure(machine, plan, workload, seed + i, f"round {i + 1}").times) for i in range(_ROUNDS.value)]
    result = {}
    for name, predicted in simulated.items():
        rounds = [run[name] for run in runs]
        measured = float(np.median(rounds))
        result[name] = {
            "simulated": predicted,
            "measured": measured,
            "rounds": rounds,
            "error": predicted / measured - 1 if measured else float(predicted > 0),
        }
    return result


def metrics(times: Any) -> dict[str, float]:
    """Output tokens a second, median TTFT and P99 TBT in milliseconds."""
    return {
        "output_throughput": times.summary()["output_throughput"],
        "median_ttft_ms": 1e3 * float(np.median(times.seconds("ttft"))),
        "p99_tbt_ms": 1e3 * times.gap_quantile(0.99),
    }


@refuse_bad_input()
def main() -> None:
    if _VIDUR.value:
        from scripts.reproduce.vidur_profiles import compare, table, table_by_tp

        rows = compare(Path(_VIDUR.value))
        tables = f"{table(rows)}\n\nBy TP degree, with sign:\n\n{table_by_tp(rows)}"
        print(tables)
        result = {"benchmark": "validate_operators", "rows": rows, **provenance()}
        write_json(_JSON.value, result)
        if _OUTPUT.value:
            write_json(f"{_OUTPUT.value}/results.json", result)
            made = "Written by `python -m scripts.validate_simulator --vidur=FOLDER`. Read README.md for what they mean."
            Path(_OUTPUT.value, "tables.md").write_text(f"# Tables\n\n{made}\n\n{tables}\n")
        return
    if _OUTPUT.value:
        raise app.UsageError("--output is of --vidur; the engine's comparison goes to --json")
    errors = compare_engine()
    for name, row in errors.items():
        rounds = ", ".join(f"{x:.1f}" for x in row["rounds"])
        print(f"{name}: simulated {row['simulated']:.1f}, measured {row['measured']:.1f} ({rounds}), {100 * row['error']:+.1f}%")
    write_json(_JSON.value, {"benchmark": "validate_engine", "tolerance": _TOLERANCE.value, "metrics": errors, **provenance()})
    far = [name for name, row in errors.items() if abs(row["error"]) > _TOLERANCE.value]
    if far:
        raise app.UsageError(f"simulated and measured differ by more than {100 * _TOLERANCE.value:g}%: {', '.join(far)}")


if __name__ == "__main__":
    run_command(main)

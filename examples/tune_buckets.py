"""A bucket plan fitted to a trace, in virtual time: no device is used.

    python examples/tune_buckets.py STEPS.json [TRACE.csv]

STEPS.json is what `jaxserve tune profile` wrote of a machine; benchmarks/buckets/steps_tiny_qwen3.json is one. TRACE.csv has the
columns num_prefill_tokens,num_decode_tokens[,arrived_at]; without one, 200 random requests stand in for it. The real scheduler
serves the trace under three plans: the engine's own rule, the best powers of two, and the plan that was searched.
`jaxserve tune buckets` does the same at a shell, with plots, and can serve the trace for real.

What it imports are parts of jaxserve that are not public (`jaxserve.__all__` is): another release may have them elsewhere.
"""

import sys

from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.simulation.bucket_search import Caps
from jaxserve.simulation.tuning import Machine, tune_plan
from jaxserve.step_times.fitted import StepTimeModel
from jaxserve.workloads import workload as workloads

MAX_PROGRAMS = 16


def main(profile: str, trace: str | None) -> None:
    step_times = StepTimeModel.load(profile)
    about = step_times.about
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    machine = Machine(step_times, SchedulerConfig(**{n: about[n] for n in names}), about["num_pages"], about["multiple"])
    # by default prompts of 64 to 192 tokens and outputs of 8 to 24, all at once
    workload = workloads.trace(trace) if trace else workloads.random_lengths(200, 128, 16, range_ratio=0.5)
    tuned = tune_plan(workload, machine, Caps(MAX_PROGRAMS))
    for name, plan, run in (
        ("the engine's rule", tuned.default_plan, tuned.default_replay),
        ("powers of two", tuned.powers_plan, tuned.powers_replay),
        ("tuned", tuned.plan, tuned.replay),
    ):
        padding = run.padding.padding_share
        print(f"{name:18} {run.duration:7.2f} s, padding {padding:5.1%}, {plan.num_programs} programs, gain {tuned.gain(run):.2f}x")
    print(f"the tuned plan: {tuned.plan}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)

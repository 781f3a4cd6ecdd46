"""The machine that tuning plans for: a profile's step times with the engine's limits, and real runs on the same limits.

Everything comes from engine_options(): a flag, else --config's file, else the flag's default.
"""

from __future__ import annotations

import sys
from typing import Any

from absl import flags

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.engine_flags import engine_options, refuse_options

RATE = flags.DEFINE_float("request_rate", float("inf"), "Requests a second; inf: all at once.")
GOOD_ERROR = 0.1  # median on held-out steps, up to which a profile is planned with unasked
_MULTIPLE = flags.DEFINE_integer("multiple", None, "Bucket sizes are multiples of it; by default the profile's.", lower_bound=1)


def read_machine() -> Any:
    """A jaxserve.simulation.tuning.Machine from --step_times, with the profile's limits where the flags give none. ValueError if
    there is no profile, or it does not fit the flags."""
    given = engine_options()
    if given["step_times"] is None:
        raise ValueError("give --step_times, the JSON file that `jaxserve tune profile` wrote on this machine")
    return machine_of(given["step_times"], given)


def machine_of(profile: str, given: dict[str, Any]) -> Any:
    """The Machine of a profile's file. given: engine options, which win over the profile's limits. ValueError if it is of another
    model or of other devices; a line on stderr if it predicts badly."""
    from jaxserve.simulation.tuning import Machine
    from jaxserve.step_times.fitted import StepTimeModel

    refuse_options("steps with drafts have no predicted times; leave speculation off", "speculative_config")
    refuse_options("a profile's steps ran on one stage, in one group", "pipeline_parallel_size", "attention_groups")
    refuse_options("the pool is the profile's, or --num_pages", "gpu_memory_utilization")
    step_times = StepTimeModel.load(profile)
    about = step_times.about
    if about.get("model") not in (None, flags.FLAGS.model):
        raise ValueError(f"{profile} is of model {about['model']}, not --model={flags.FLAGS.model}: give that, or profile again")
    step_times.check_devices(given)
    error = about.get("held_out_error", {}).get("median", 0.0)
    if error > GOOD_ERROR:
        print(
            f"{profile} is off by {error:.0%} (median) on held-out steps: what is planned with it may not hold; profile again, on "
            "a quiet machine",
            file=sys.stderr,
        )
    if given["page_size"] not in (None, step_times.page_size):
        raise ValueError(f"page_size={given['page_size']} is not the profile's {step_times.page_size}; profile again")
    level = about.get("deterministic")
    if level is not None and given["deterministic"] not in ("auto", level):
        raise ValueError(f"deterministic={given['deterministic']!r} is not the profile's {level!r}; profile again")
    return Machine(
        step_times,
        limits_of(given, about),
        given["num_pages"] or about["num_pages"],
        _MULTIPLE.value or about["multiple"],
        given["tbt_slo_ms"] and given["tbt_slo_ms"] / 1e3,
        async_scheduling=given["async_scheduling"],
        prefix_caching=given["enable_prefix_caching"],
    )


def limits_of(given: dict[str, Any], profiled: dict[str, Any]) -> Any:
    """The SchedulerConfig of engine options, with a profile's limits where they give none. ValueError if neither has a
    max_model_len."""
    from jaxserve.scheduling.config import SchedulerConfig

    names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
    sizes = {name: given[name] or profiled.get(name) for name in names}
    if sizes["max_model_len"] is None:
        raise ValueError("give --max_model_len, which the engine and the workload are cut to")
    return SchedulerConfig(
        **{name: size for name, size in sizes.items() if size is not None},
        policy=given["batching_policy"],
        order=given["scheduling_policy"],
        chunked=given["enable_chunked_prefill"],
        mixed=given.get("enable_mixed_steps"),
        long_prefill_token_threshold=given.get("long_prefill_token_threshold") or 0,
    )


def plan_given() -> Any:
    """The BucketPlan that --bucket_plan or --config gives; None where neither does, and for the word "default".

    Raises:
      ValueError: it can't be read.
    """
    from jaxserve.buckets.plan import BucketPlan

    plan = engine_options()["bucket_plan"]
    if plan == "default":
        return None
    return BucketPlan.from_dict(plan) if isinstance(plan, dict) else plan and BucketPlan.load(plan)


def plan_for(limits: Any, multiple: int) -> Any:
    """The plan given, or the engine's default one for these limits (a SchedulerConfig)."""
    from jaxserve.buckets.plan import BucketPlan

    given = plan_given()
    return given or BucketPlan.default(limits.max_num_seqs, limits.max_num_batched_tokens, min_tokens=multiple)


def make_engine(
    limits: Any,
    plan: Any = None,
    num_pages: int | None = None,
    objective: float | None = None,
    page_size: int | None = None,
    deterministic: str | None = None,
) -> Any:
    """An engine of engine_options() with these limits (a SchedulerConfig), all programs compiled.

    plan, num_pages, page_size, deterministic: in the options' place; None keeps the options' own.
    objective: seconds that a step with decodes may take, by a dynamic budget from --step_times; None: none.
    """
    from jaxserve import Engine
    from jaxserve.config import engine_config

    own = {"num_pages": num_pages, "page_size": page_size, "deterministic": deterministic}
    options = engine_options() | {"warm_up": "all"} | {name: value for name, value in own.items() if value is not None}
    options["bucket_plan"] = plan or plan_given()
    options |= {name: getattr(limits, name) for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")}
    options |= {"batching_policy": limits.policy, "scheduling_policy": limits.order, "enable_chunked_prefill": limits.chunked}
    options |= {"enable_mixed_steps": limits.mixed, "long_prefill_token_threshold": limits.long_prefill_token_threshold}
    options |= {"tbt_slo_ms": 1e3 * objective} if objective else {"tbt_slo_ms": None, "step_times": None}
    model = bench_model(flags.FLAGS.model, str(options["dtype"]), limits.max_model_len)
    return Engine(model, engine_config(options), eos_token_ids=())


def measure(machine: Any, plan: Any, workload: Any, seed: int, name: str) -> Any:
    """A real run (open_loop.ServedRun) of the workload with the machine's limits and this plan, all programs compiled before."""
    from tqdm import tqdm

    from jaxserve.cli.common.open_loop import serve

    profile = machine.step_times
    engine = make_engine(
        machine.limits,
        plan,
        machine.num_pages,
        machine.objective,
        page_size=profile.page_size,
        deterministic=profile.about.get("deterministic"),
    )
    with tqdm(total=len(workload.requests), desc=name, mininterval=5) as bar:
        run = serve(engine, workload, seed, progress=bar)
    engine.close()
    return run


def planning(name: str, position: int | None = None) -> Any:
    """A progress bar of requests served in virtual time; its `update` is what replays tell. position: so many lines below another
    bar. How many replays a plan takes is not known before, so that it has no end."""
    from tqdm import tqdm

    return tqdm(desc=name, unit=" simulated requests", mininterval=5, position=position)

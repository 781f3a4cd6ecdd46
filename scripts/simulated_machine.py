"""The machine that tuning plans for: a profile's step times with the engine's limits, and real runs on the same limits."""

from __future__ import annotations

from typing import Any

from absl import flags
from tqdm import tqdm

from scripts.bench_models import bench_model
from scripts.engine_flags import engine_options

RATE = flags.DEFINE_float("request_rate", float("inf"), "Requests a second; inf: all at once.")
_MULTIPLE = flags.DEFINE_integer("multiple", None, "Bucket sizes are multiples of it; by default the profile's.", lower_bound=1)


def read_machine() -> Any:
    """A jaxserve.simulation.tuning.Machine from --step_times, with the profile's limits where the flags give none. ValueError if
    there is no profile, or it does not fit the flags."""
    given = engine_options()
    if given["step_times"] is None:
        raise ValueError("give --step_times, the JSON file that scripts.profile_steps wrote on this machine")
    return machine_of(given["step_times"], given)


def machine_of(profile: str, given: dict[str, Any]) -> Any:
    """The Machine of a profile's file. given: engine options, which win over the profile's limits."""
    from jaxserve.config import SchedulerConfig
    from jaxserve.simulation.step_time import StepTimeModel
    from jaxserve.simulation.tuning import Machine

    step_times = StepTimeModel.load(profile)
    about = step_times.about
    if given["page_size"] not in (None, step_times.page_size):
        raise ValueError(f"--page_size={given['page_size']} is not the profile's {step_times.page_size}; profile again")
    limits = SchedulerConfig(
        max_model_len=given["max_model_len"] or about["max_model_len"],
        max_num_batched_tokens=given["max_num_batched_tokens"] or about["max_num_batched_tokens"],
        max_num_seqs=given["max_num_seqs"] or about["max_num_seqs"],
        policy=given["batching_policy"],
        order=given["scheduling_policy"],
        chunked=given["enable_chunked_prefill"],
    )
    objective = given["tbt_slo_ms"] and given["tbt_slo_ms"] / 1e3
    return Machine(step_times, limits, given["num_pages"] or about["num_pages"], _MULTIPLE.value or about["multiple"], objective)


def make_engine(limits: Any, plan: Any, num_pages: int | None, objective: float | None = None, page_size: int | None = None) -> Any:
    """An engine of the flags with these limits (a SchedulerConfig) and this plan, all programs compiled. objective: seconds that a
    step with decodes may take, by a dynamic budget from --step_times. page_size: in the flag's place."""
    from jaxserve import Engine
    from jaxserve.llm import engine_config

    options = engine_options() | {"warm_up": "all", "bucket_plan": plan, "num_pages": num_pages, "batching_policy": limits.policy}
    options |= {name: getattr(limits, name) for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")}
    options |= {"long_prefill_token_threshold": limits.long_prefill_token_threshold}
    if page_size is not None:
        options["page_size"] = page_size
    options |= {"tbt_slo_ms": 1e3 * objective} if objective else {"tbt_slo_ms": None, "step_times": None}
    model = bench_model(flags.FLAGS.model, str(options["dtype"]), limits.max_model_len)
    return Engine(model, engine_config(options), eos_token_ids=())


def measure(machine: Any, plan: Any, workload: Any, seed: int, name: str) -> Any:
    """A real run (open_loop.ServedRun) of the workload with the machine's limits and this plan, all programs compiled before."""
    from scripts.open_loop import serve

    engine = make_engine(machine.limits, plan, machine.num_pages, machine.objective, machine.step_times.page_size)
    with tqdm(total=len(workload.requests), desc=name, mininterval=5) as bar:
        run = serve(engine, workload, seed, progress=bar)
    engine.close()
    return run

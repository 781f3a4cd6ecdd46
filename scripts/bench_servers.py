"""Our server against vLLM's, both on this CPU, under vLLM's own load generator, by turns.

    python -m scripts.bench_servers --vllm=.venv-vllm-cpu/bin/python --json=benchmarks/results/cpu/servers_vllm.json

scripts/bench_vllm_cpu.py says how to make vLLM's environment. Both servers run throughout, with the same weights and limits,
without a prefix cache; a turn loads one of them with `vllm bench serve`, while the other is idle. The client takes part of the same
cores, from both alike. Prompts are random texts, the same for both in a round, and every answer has its full length. Printed are
medians of the rounds, and ours over theirs: of requests a second more is better, of TTFT and TPOT less. It takes 7 minutes on two
cores. With --tiny the model takes so little that the servers themselves are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from jaxserve.cli.common.command import run_command
from scripts.bench import tiny_checkpoint
from scripts.bench.server_turns import FIGURES, num_prompts, row, table

_VLLM = flags.DEFINE_string("vllm", None, "A Python with vllm-cpu (see scripts/bench_vllm_cpu.py).", required=True)
_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder or a GGUF file; by default the demo's model.")
_TINY = flags.DEFINE_bool(
    "tiny", False, "Serve four layers of random weights with the model's tokenizer (bench/tiny_checkpoint.py)."
)
_STREAMS = flags.DEFINE_list("streams", ["1", "8", "64"], "Requests at a time, one row of the table each.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each server in each row.", lower_bound=1)
_INPUT_LEN = flags.DEFINE_integer("input_len", 64, "Tokens of a prompt.", lower_bound=1)
_OUTPUT_LEN = flags.DEFINE_integer("output_len", 32, "Tokens of an answer.", lower_bound=2)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and activations.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

_NAME = "bench"  # what both servers call the model
# `vllm bench serve`: the command itself asks for the version of a distribution named vllm, which vllm-cpu is not.
_CLIENT = (
    "from vllm.benchmarks.serve import add_cli_args, main; from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
_PAUSE = 1.0  # seconds before each turn: worker threads spin for a while after theirs


def huggingface_folder(model: str, folder: Path) -> Path:
    """A folder that vLLM reads: the model's own, or `folder` with what `jaxserve convert` makes of a GGUF file."""
    if Path(model, "config.json").is_file():
        return Path(model)
    convert = [sys.executable, "-m", "jaxserve.cli.convert"]
    for source, output in ((model, folder / "orbax"), (folder / "orbax", folder / "hf")):
        subprocess.run([*convert, f"--model={source}", f"--output={output}"], check=True, stdin=subprocess.DEVNULL)
    return folder / "hf"


def vllm_environment() -> dict[str, str]:
    """Variables of vLLM's processes: all cores, a small cache, nothing from a network."""
    given = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return given | dict(os.environ)


def server_flags(most: int) -> list[str]:
    """What both servers are started with. most: requests at a time."""
    longest = max(256, 2 * (_INPUT_LEN.value + _OUTPUT_LEN.value))  # a random text may be read as more tokens than were drawn
    limits = [f"--max-model-len={longest}", f"--max-num-seqs={most}", "--max-num-batched-tokens=2048"]
    return [f"--served-model-name={_NAME}", f"--dtype={_DTYPE.value}", *limits, "--no-enable-prefix-caching"]


def turn(url: str, tokenizer: Path, streams: int, seed: int, folder: Path) -> dict[str, float]:
    """The client's figures of one turn. Raises RuntimeError if a request failed."""
    time.sleep(_PAUSE)
    count, result = num_prompts(streams), folder / "turn.json"
    command = [_VLLM.value, "-c", _CLIENT, "--backend=openai", f"--base-url={url}"]
    command += [f"--model={tokenizer}", f"--served-model-name={_NAME}", "--dataset-name=random", f"--seed={seed}"]
    command += [f"--random-input-len={_INPUT_LEN.value}", f"--random-output-len={_OUTPUT_LEN.value}", "--ignore-eos"]
    command += [f"--num-prompts={count}", f"--max-concurrency={streams}", "--temperature=0", "--disable-tqdm"]
    command += ["--percentile-metrics=ttft,tpot", "--metric-percentiles=99"]
    command += ["--save-result", f"--result-dir={folder}", f"--result-filename={result.name}"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=vllm_environment())
    found = json.loads(result.read_text())
    if found["completed"] != count or found["total_output_tokens"] != count * _OUTPUT_LEN.value:
        raise RuntimeError(f"{url}: {found['completed']} of {count} requests, {found['total_output_tokens']} tokens: {found}")
    return {name: found[name] for name in FIGURES}


def main() -> None:
    if not _STREAMS.value or not all(text.isdecimal() and int(text) for text in _STREAMS.value):
        raise app.UsageError(f"--streams={','.join(_STREAMS.value)} must be whole numbers above 0, such as 1,8,64")
    from jaxserve.cli.common.http_load import server_process
    from jaxserve.cli.common.provenance import provenance, write_json
    from scripts.fetch_demo_model import fetch

    version = subprocess.run(
        [_VLLM.value, "-c", "import vllm; print(vllm.__version__)"], check=True, capture_output=True, text=True
    )
    all_streams, rows = [int(text) for text in _STREAMS.value], []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = huggingface_folder(_MODEL.value or str(fetch()), folder)
        if _TINY.value:
            model = tiny_checkpoint.save_with_tokenizer(folder / "tiny", model)
        both = server_flags(max(all_streams))
        ours = stack.enter_context(
            server_process("jaxserve.cli.serve", f"--model={model}", *both, "--noaccess_log", "--warm_up=all")
        )
        named = {"python": _VLLM.value, "env": vllm_environment()}
        theirs = stack.enter_context(server_process("vllm.entrypoints.openai.api_server", f"--model={model}", *both, **named))
        servers = {"jaxserve": ours[0], "vllm": theirs[0]}
        for url in servers.values():
            turn(url, model, 1, 0, folder)  # what is compiled or allocated at a first request is not measured
        for streams in all_streams:
            turns: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for seed in range(_ROUNDS.value):
                for name, url in servers.items():
                    turns[name].append(turn(url, model, streams, 1 + seed, folder))
                    print(f"{streams} streams, {name}: {turns[name][-1]['request_throughput']:.2f} requests/s", file=sys.stderr)
            rows.append(row(streams, turns))
    print(table(rows), file=sys.stderr if _JSON.value == "-" else sys.stdout)
    write_json(_JSON.value, {**provenance(), "vllm": version.stdout.split()[-1], "rows": rows})


if __name__ == "__main__":
    run_command(main)

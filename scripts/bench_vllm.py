"""vLLM's own load generator against our server: `vllm-rs bench serve`, its workloads `random` and `prefix_repetition`.

    python -m scripts.bench_vllm

Starts a server, or takes the one at --url. The client comes from vLLM's wheel (336 MB, once; nothing else of it is used) and is
kept in jaxserve's cache folder. What it prints is passed on; exits with 1 if a request failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

from jaxserve.cli.common.command import run_command
from scripts.fetch_demo_model import FetchError, PackagedModel, fetch

_MODEL = flags.DEFINE_string("model", None, "What is served: a folder or a GGUF file; by default the demo's model.")
_URL = flags.DEFINE_string("url", None, "A server that runs already; --model says where its tokenizer is.")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 32, "Requests of each workload.", lower_bound=1)
_CONCURRENCY = flags.DEFINE_integer("max_concurrency", 8, "Requests at once.", lower_bound=1)
_INPUT_LEN = flags.DEFINE_integer(
    "input_len", 128, "Tokens of a prompt; of prefix_repetition, half of them are its prefix.", lower_bound=2
)
_OUTPUT_LEN = flags.DEFINE_integer("output_len", 32, "Tokens of an output.", lower_bound=1)
_NUM_PREFIXES = flags.DEFINE_integer("num_prefixes", 4, "Prefixes of prefix_repetition.", lower_bound=1)
_SERVER_FLAGS = flags.DEFINE_multi_string("server_flag", [], "Passed on to `jaxserve serve`, as --server_flag=--max_num_seqs=8.")
_JSON = flags.DEFINE_string("json", None, "Write the client's results to this file.")

CLIENT = PackagedModel(
    requirement="vllm==0.33.0",
    wheel_sha256="4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
    member="vllm/vllm-rs",
    member_sha256="ee53a9eec77b858799f7526ad0f284df808d9350b8b4d6f1754583f9f8782c62",
    size="336 MB, Linux on x86-64",
)


def workloads() -> dict[str, list[str]]:
    """Name -> the client's flags."""
    prefix, output = _INPUT_LEN.value // 2, str(_OUTPUT_LEN.value)
    repeated = "--prefix-repetition-"
    return {
        "random": ["--random-input-len", str(_INPUT_LEN.value), "--random-output-len", output],
        "prefix_repetition": [
            *(repeated + "prefix-len", str(prefix), repeated + "suffix-len", str(_INPUT_LEN.value - prefix)),
            *(repeated + "num-prefixes", str(_NUM_PREFIXES.value), repeated + "output-len", output),
        ],
    }


def tokenizer_folder(model: str, folder: Path) -> Path:
    """A folder with the model's tokenizer.json: its own, or `folder`, for a GGUF file."""
    from jaxserve.text.tokenizer import Tokenizer

    if Path(model, "tokenizer.json").is_file():
        return Path(model)
    Tokenizer.from_id(model).backend.save(str(folder / "tokenizer.json"))
    return folder


def run(client: Path, url: str, tokenizer: Path, name: str, folder: Path) -> dict:
    """The client's results of one workload. Raises CalledProcessError if it fails."""
    flags_of_all = ["--base-url", url, "--tokenizer", str(tokenizer), "--num-prompts", str(_NUM_PROMPTS.value), "--ignore-eos"]
    flags_of_all += ["--max-concurrency", str(_CONCURRENCY.value), "--disable-tqdm", "--extra-body", '{"temperature": 0}']
    flags_of_all += ["--save-result", "--result-dir", str(folder), "--result-filename", f"{name}.json"]
    command = [str(client), "bench", "serve", "--dataset-name", name, *workloads()[name], *flags_of_all]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=os.environ | {"NO_COLOR": "1"})
    return json.loads((folder / f"{name}.json").read_text())


def main() -> None:
    from jaxserve.cli.common.http_load import server_process

    if _URL.value and _SERVER_FLAGS.value:
        raise app.UsageError("--server_flag is of a server that is started here, and --url names one that runs: give one of them")
    try:
        client, model = fetch(CLIENT), _MODEL.value or str(fetch())
    except (FetchError, OSError) as error:
        raise app.UsageError(str(error)) from error
    client.chmod(0o755)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokenizer = tokenizer_folder(model, folder)
        own = (f"--model={model}", "--served_model_name=model", "--noaccess_log", *_SERVER_FLAGS.value)
        url = _URL.value or stack.enter_context(server_process("jaxserve.cli.serve", *own))[0]
        results = {name: run(client, url, tokenizer, name, folder) for name in workloads()}
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(results, indent=1) + "\n")
    failed = {name: _NUM_PROMPTS.value - result["completed"] for name, result in results.items()}
    print(" ".join(f"{name}={_NUM_PROMPTS.value - n}/{_NUM_PROMPTS.value}" for name, n in failed.items()), "requests completed")
    sys.exit(any(failed.values()))


if __name__ == "__main__":
    run_command(main)

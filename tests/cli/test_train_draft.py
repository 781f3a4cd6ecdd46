"""jaxserve train-draft, from prompts to a head that the engine reads."""

import json
import subprocess
import sys

import pytest

from jaxserve.models import ModelConfig
from jaxserve.models.medusa import find_medusa, load_medusa
from tests import alphabet_model


@pytest.mark.slow
def test_a_run_writes_a_head_and_a_second_one_has_nothing_left_to_do(tmp_path):
    model, output, prompts = alphabet_model.save(tmp_path / "model"), tmp_path / "head", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in "abcdefgh"))
    flags = [f"--output={output}", f"--prompts={prompts}", "--method=medusa", "--num_drafts=2", "--num_eval=2", "--max_tokens=9"]
    command = [sys.executable, "-m", "jaxserve", "train-draft", str(model), *flags, "--length=24", "--steps=3", "--batch_size=2"]
    run = lambda *more: subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)  # noqa: E731
    done = run()
    assert done.returncode == 0, done.stderr
    assert "tokens a step; 3 steps in" in done.stdout and "of chains behind answers kept aside" in done.stdout
    files = find_medusa(output, ModelConfig.from_hf(model))
    assert files.config.num_heads == 2 and len(load_medusa(files.reader, files.config, "float32").heads) == 2
    (first, *_), *rest = [json.loads(line)["output"] for line in (output / "answers.jsonl").read_text().splitlines()]
    assert first == ord("A") + 1 and len(rest) == 7, "the chat template ends with an A"
    assert "tokens a step; 0 steps in" in run().stdout
    for more, message in (
        (["--seed=1"], "has checkpoints of another run (seed=0 there, 1 now)"),
        (["--num_eval=8"], "leaves nothing"),
    ):
        done = run(*more)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr

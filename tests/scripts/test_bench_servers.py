"""scripts.bench_servers: what it says of turns. That it runs, only a machine with vLLM can tell."""

import json

import pytest

from jaxserve import LLM, BucketPlan, SamplingParams
from scripts.bench import tiny_checkpoint
from scripts.bench.server_turns import FIGURES, num_prompts, row, table
from tests import alphabet_model


def figures(requests: float, ms: float) -> dict[str, float]:
    return {"request_throughput": requests, **dict.fromkeys(FIGURES[1:], ms)}


def test_medians_of_each_server_and_ours_over_theirs():
    turns = {
        "jaxserve": [figures(3.0, 20.0), figures(9.0, 10.0), figures(6.0, 90.0)],
        "vllm": [figures(4.0, 40.0), figures(1.0, 80.0), figures(5.0, 10.0)],
    }
    made = row(8, turns)
    assert made["jaxserve"] == figures(6.0, 20.0) and made["vllm"] == figures(4.0, 40.0) and made["turns"] == turns
    assert made["ratios"] == pytest.approx(figures(1.5, 0.5))
    assert table([made]).splitlines()[2].startswith("| 8 | 6 / 4 (1.50x) | 20 / 40 (0.50x) |")


@pytest.mark.slow
def test_the_tiny_model_has_another_models_tokenizer(tmp_path):
    """And answers with its vocabulary, as many tokens as asked for."""
    other = alphabet_model.save(tmp_path / "other")
    folder = tiny_checkpoint.save_with_tokenizer(tmp_path / "tiny", other)
    config = json.loads((folder / "config.json").read_text())
    theirs = json.loads((other / "config.json").read_text())
    assert config["vocab_size"] == theirs["vocab_size"] and config["num_hidden_layers"] == 4
    plan = BucketPlan(mixed=((32, 2),), head_rows=(2,))
    llm = LLM(folder, bucket_plan=plan, num_pages=16, page_size=16, max_model_len=64, max_num_seqs=2, compilation_cache_dir="")
    (output,) = llm.generate("tea", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert output.prompt_token_ids == alphabet_model.ids("tea") and len(output.outputs[0].token_ids) == 5


def test_a_turn_has_several_requests_for_each_stream():
    assert [num_prompts(n) for n in (1, 8, 64, 256)] == [8, 64, 128, 512]

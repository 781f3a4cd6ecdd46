"""A real model through the whole library: SmolLM2-135M's greedy answers against transformers' own on the same weights."""

import json
from pathlib import Path

import pytest

from jaxserve import LLM, BucketPlan, SamplingParams
from tests.real_files import smollm2_gguf

OPTIMISED = True
CASES = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_greedy.json").read_text())["cases"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_greedy_tokens_equal_transformers(dtype):
    """Four chats in one batch: mixed prefill, then decodes, one of them to its end before the others."""
    plan = BucketPlan(decode=(4,), mixed=((160, 4),), head_rows=(4,))
    llm = LLM(smollm2_gguf(), dtype=dtype, bucket_plan=plan, max_model_len=128)
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in CASES]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    for case, output in zip(CASES, outputs, strict=True):
        golden = case[dtype]
        assert output.outputs[0].token_ids == golden["token_ids"], f"{case['prompt']}: the least gap is {golden['min_gap']}"
        assert llm.get_tokenizer().encode_chat([{"role": "user", "content": case["prompt"]}]) == case["prompt_token_ids"]

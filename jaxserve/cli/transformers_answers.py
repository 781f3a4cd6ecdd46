"""What transformers answers to given prompts, saved for `jaxserve verify` to compare with.

A program of its own, for a Python that has numpy, torch and transformers and need have nothing of ours: it imports no other file of
jaxserve. It reads one JSON object from stdin: model (a folder or a GGUF file), dtype, prompts (a list of lists of token ids),
max_tokens, and out, the .npz file to write. That holds, for P prompts one after the other:
    prompts i32[tokens], prompt_lens i32[P], logits f32[tokens, V], greedy i32[P, max_tokens] (eos ids not heeded), and gaps
    f32[P, max_tokens], by how much each greedy token's logit was ahead of the second best.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def load(path: str, dtype: str) -> Any:
    """transformers' model of a folder or a GGUF file; dtype "auto": the checkpoint's own, float32 for GGUF."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    if Path(path).suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto" if dtype == "auto" else getattr(torch, dtype))
    from transformers import GgufConfig  # pyright: ignore[reportMissingImports]

    return AutoModelForCausalLM.from_pretrained(
        str(Path(path).parent),
        gguf_file=Path(path).name,
        dtype=getattr(torch, "float32" if dtype == "auto" else dtype),
        quantization_config=GgufConfig(dequantize=True),  # weights left packed would be unpacked in every matmul
    )


def decoding_greedily(model: Any) -> Any:
    """The model with no sampling and no end of its own."""
    from transformers import GenerationConfig  # pyright: ignore[reportMissingImports]

    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.eval()


def answer(model: Any, prompt: list[int], max_tokens: int) -> tuple[np.ndarray, list[int], list[float]]:
    """(logits f32[len, V] of the prompt, greedy tokens, gaps)."""
    import torch  # pyright: ignore[reportMissingImports]

    tokens, gaps = [], []
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        logits = out.logits[0].float().numpy()
        for _ in range(max_tokens):
            best = out.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            out = model(best.indices[None, :1], past_key_values=out.past_key_values, use_cache=True)
    return logits, tokens, gaps


def write_answers() -> None:
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    logging.disable_progress_bar()
    asked = json.load(sys.stdin)
    prompts, model = asked["prompts"], decoding_greedily(load(asked["model"], asked["dtype"]))
    logits, greedy, gaps = zip(*(answer(model, prompt, asked["max_tokens"]) for prompt in prompts), strict=True)
    np.savez(
        asked["out"],
        prompts=np.concatenate(prompts).astype(np.int32),
        prompt_lens=np.array([len(prompt) for prompt in prompts], np.int32),
        logits=np.concatenate(logits),
        greedy=np.array(greedy, np.int32),
        gaps=np.array(gaps, np.float32),
    )


if __name__ == "__main__":
    write_answers()

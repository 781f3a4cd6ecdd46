"""What transformers says to given prompts, saved for `jaxserve.cli.verify` to compare with. Needs torch and transformers, not jax.

    python -m jaxserve.cli.transformers_answers --model=FOLDER --prompts=prompts.json --out=answers.npz

--prompts is a JSON list of lists of token ids. The file holds, for P prompts one after the other:
    prompts i32[tokens], prompt_lens i32[P], logits f32[tokens, V], greedy i32[P, max_tokens] (eos ids not heeded), and gaps
    f32[P, max_tokens], by how much each greedy token's logit was ahead of the second best.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from scripts.bench_transformers import make_model

_PROMPTS = flags.DEFINE_string("prompts", None, "A JSON file of prompts.", required=True)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 32, "Greedy tokens of each prompt.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Where to write.", required=True)


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


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    prompts = json.loads(Path(_PROMPTS.value).read_text())
    model = make_model(flags.FLAGS.model, flags.FLAGS.dtype)
    logits, greedy, gaps = zip(*(answer(model, prompt, _MAX_TOKENS.value) for prompt in prompts), strict=True)
    np.savez(
        _OUT.value,
        prompts=np.concatenate(prompts).astype(np.int32),
        prompt_lens=np.array([len(prompt) for prompt in prompts], np.int32),
        logits=np.concatenate(logits),
        greedy=np.array(greedy, np.int32),
        gaps=np.array(gaps, np.float32),
    )


if __name__ == "__main__":
    app.run(main)

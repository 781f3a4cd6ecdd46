"""Writes generation.json: what transformers generates from the tiny checkpoints beside this file, by logits processors and beams.

    python tests/goldens/make_generation_goldens.py

Needs torch and transformers (5.23.0 was used), not jaxserve. CASES are arguments of `generate`; a token id may be
written as ("greedy", i), the i-th token that the plain search finds, so that what is forbidden or penalised is what
would have come. Only prompts are kept whose every step, in every case, has its two best scores MIN_GAP apart, so that
no rounding decides.
"""
# pyright: reportMissingImports=false

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
NAMES = ("qwen3_tied", "llama")
NUM_NEW, NUM_BEAMS, MIN_GAP = 16, 4, 2e-3
CASES = {
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"sequence_bias": [[[("greedy", 0)], -4.0], [[5], 2.5], [[90], 3.0]]},
    "bad_words": {
        "bad_words_ids": [[("greedy", 1)], [("greedy", 3), ("greedy", 4)], [("greedy", 5), ("greedy", 6), ("greedy", 7)]]
    },
    "allowed": {"suppress_tokens": list(range(60, 160))},
    "all": {
        "repetition_penalty": 1.2,
        "sequence_bias": [[[("greedy", 2)], 1.5], [[7], 2.0]],
        "bad_words_ids": [[("greedy", 0), ("greedy", 1)], [("greedy", 4)]],
        "suppress_tokens": list(range(140, 160)),
    },
}


def resolve(value, greedy):
    """`value` with the tokens of the plain search filled in."""
    if isinstance(value, tuple):
        return greedy[value[1]]
    return [resolve(x, greedy) for x in value] if isinstance(value, list) else value


@torch.no_grad()
def generate(model, prompt, **settings):
    """(new tokens, least gap between the two best scores of a step)."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    gaps = [float(best[0] - best[1]) for best in (scores[0].topk(2).values for scores in out.scores)]
    return out.sequences[0, len(prompt) :].tolist(), min(gaps)


@torch.no_grad()
def beams(model, prompt):
    """The NUM_BEAMS best sequences, [tokens, sum of log-probabilities] each, best first."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        num_beams=NUM_BEAMS,
        num_return_sequences=NUM_BEAMS,
        length_penalty=0.0,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = out.sequences[:, len(prompt) :].tolist()
    return [[t, float(s)] for t, s in zip(tokens, out.sequences_scores, strict=True)]


def main() -> None:
    result = {"transformers": transformers.__version__, "models": {}}
    for name in NAMES:
        model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32).eval()
        model.generation_config = transformers.GenerationConfig()
        rng, kept = np.random.default_rng(11), []
        for _ in range(12):
            prompt = rng.integers(0, 160, int(rng.integers(3, 24))).tolist()
            greedy, gap = generate(model, prompt)
            entry = {"prompt": prompt, "greedy": greedy, "cases": {}}
            for case, given in CASES.items():
                settings = {key: resolve(value, greedy) for key, value in given.items()}
                tokens, case_gap = generate(model, prompt, **settings)
                gap = min(gap, case_gap)
                entry["cases"][case] = {"settings": settings, "tokens": tokens}
            entry["beams"] = beams(model, prompt)
            sums = [s for _, s in entry["beams"]]
            print(name, len(prompt), f"gap {gap:.4f}", sum(c["tokens"] != greedy for c in entry["cases"].values()), sums)
            if gap >= MIN_GAP and min(a - b for a, b in zip(sums, sums[1:], strict=False)) > MIN_GAP:
                kept.append(entry)
        result["models"][name] = kept[:4]
    (HERE / "generation.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

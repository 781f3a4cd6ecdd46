"""Makes the golden of Medusa heads: small random heads for the golden `llama`, laid out as published ones, and what they say.

Run it as make_goldens.py, in the same environment, after that. The heads are written here in torch from the paper (Medusa,
2401.10774, section 2.1.1) and the names of its authors' checkpoints. In the folder `medusa` are
    config.json, medusa_lm_head.pt
    expected.npz    tokens i32[T]; logits f32[heads, T, V], of each head behind each token
    tensors.pt      what other files of torch hold: several dtypes, two tensors in one storage, a scalar, a parameter
    tensors.npz     the same, bfloat16 as float32
"""
# pyright: reportMissingImports=false

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
T, HEADS, LAYERS = 24, 3, 2


def head_weights(k: int, D: int, V: int, rng: torch.Generator) -> OrderedDict[str, torch.Tensor]:
    weights = OrderedDict()
    for i in range(LAYERS):
        weights[f"{k}.{i}.linear.weight"] = 1.5 / D**0.5 * torch.randn(D, D, generator=rng)
        weights[f"{k}.{i}.linear.bias"] = 0.3 * torch.randn(D, generator=rng)
    weights[f"{k}.{LAYERS}.weight"] = 2 / D**0.5 * torch.randn(V, D, generator=rng)
    return weights


def head_logits(weights: dict[str, torch.Tensor], k: int, x: torch.Tensor) -> torch.Tensor:  # [T, D] -> [T, V]
    for i in range(LAYERS):
        x = x + F.silu(F.linear(x, weights[f"{k}.{i}.linear.weight"], weights[f"{k}.{i}.linear.bias"]))
    return F.linear(x, weights[f"{k}.{LAYERS}.weight"])


def save_other_tensors(folder: Path, rng: torch.Generator) -> None:
    whole = torch.randn(6, 4, generator=rng)
    tensors = {
        "float32": whole,
        "a part of it": whole[2:5],
        "float16": torch.randn(3, generator=rng).half(),
        "bfloat16": torch.nn.Parameter(torch.randn(2, 5, generator=rng).bfloat16()),
        "int64": torch.tensor([[-3, 2**40]]),
        "bool": torch.tensor([True, False]),
        "a scalar": torch.tensor(7, dtype=torch.int32),
        "empty": torch.zeros(0, 4),
    }
    torch.save(tensors, folder / "tensors.pt")
    floats = {name: x.float() if x.dtype == torch.bfloat16 else x for name, x in tensors.items()}
    np.savez(folder / "tensors.npz", **{name: x.detach().numpy() for name, x in floats.items()})


@torch.no_grad()
def main() -> None:
    target = AutoModelForCausalLM.from_pretrained(HERE / "llama", dtype=torch.float32).eval()
    D, V = target.config.hidden_size, target.config.vocab_size
    rng = torch.Generator().manual_seed(60)
    weights: OrderedDict[str, torch.Tensor] = OrderedDict()
    for k in range(HEADS):
        weights.update(head_weights(k, D, V, rng))
    tokens = torch.randint(8, V, (T,), generator=rng)
    hidden = target(tokens[None], output_hidden_states=True).hidden_states[-1][0]  # behind the final norm
    logits = torch.stack([head_logits(weights, k, hidden) for k in range(HEADS)])
    best = logits.topk(2).values
    folder = HERE / "medusa"
    folder.mkdir(exist_ok=True)
    said = {"_name_or_path": "llama", "base_model_name_or_path": "llama", "medusa_num_heads": HEADS, "medusa_num_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n")
    torch.save(weights, folder / "medusa_lm_head.pt")
    np.savez(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())
    save_other_tensors(folder, rng)
    print("medusa", "least gap", float((best[..., 0] - best[..., 1]).min()))


if __name__ == "__main__":
    main()

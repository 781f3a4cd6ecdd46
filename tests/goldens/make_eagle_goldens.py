"""Makes the goldens of EAGLE heads: small random heads for the golden `llama`, laid out as published ones, and what they say.

Run it as make_goldens.py, in the same environment, after that. The heads are written here in torch from the papers (EAGLE,
2401.15077, section 4; EAGLE-3, 2503.01840, section 3) and the layout of their authors' checkpoints. One folder a head: `eagle1`,
`eagle3` (its authors' names, a head over a part of the vocabulary) and `eagle3_speculators` (the names and config of vLLM's
speculators, with an embedding of its own and the norm before the residual), each with
    config.json, model.safetensors
    expected.npz    tokens i32[T]; logits f32[T - 1, draft vocabulary], of each pair of a hidden state and the next token;
                    starts i32[n] and drafts i32[n, K]: for the first start + 1 of `tokens`, of which the last has no state yet, the
                    tokens that a greedy chain of drafts says; gaps f32[n, K]: best logit less second-best
"""
# pyright: reportMissingImports=false

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
T, K, STARTS = 24, 5, (1, 2, 7, 12, 22)
HEADS, KV_HEADS, HEAD_DIM, FFN, EPS, THETA = 4, 2, 12, 56, 1e-5, 50_000.0
DRAFT_VOCAB, LAYERS = 96, (0, 1, 1)


class Head:
    """The weights by their published names, and the forward of a whole sequence of pairs."""

    def __init__(self, version: int, speculators: bool, target: torch.nn.Module, rng: torch.Generator):
        D, V = target.config.hidden_size, target.config.vocab_size
        self.version, self.target, self.norm_first = version, target, speculators
        self.prefix = "midlayer" if version == 3 and not speculators else "layers.0"
        wide = 2 * D if version == 3 else D
        shapes = {
            "fc.weight": (D, 3 * D if version == 3 else 2 * D),
            f"{self.prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, wide),
            f"{self.prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, wide),
            f"{self.prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, wide),
            f"{self.prefix}.self_attn.o_proj.weight": (D, HEADS * HEAD_DIM),
            f"{self.prefix}.mlp.gate_proj.weight": (FFN, D),
            f"{self.prefix}.mlp.up_proj.weight": (FFN, D),
            f"{self.prefix}.mlp.down_proj.weight": (D, FFN),
            f"{self.prefix}.post_attention_layernorm.weight": (D,),
        }
        if version == 1:
            shapes["fc.bias"] = (D,)
        else:
            shapes |= {f"{self.prefix}.{name}.weight": (D,) for name in ("input_layernorm", "hidden_norm")}
            shapes |= {"norm.weight": (D,), "lm_head.weight": (DRAFT_VOCAB, D)}
        if speculators:
            shapes["embed_tokens.weight"] = (V, D)
        self.weights = {name: self._random(shape, rng) for name, shape in shapes.items()}
        if version == 3:
            ids = torch.randperm(V, generator=rng)[:DRAFT_VOCAB].sort().values
            self.weights["d2t"] = ids - torch.arange(DRAFT_VOCAB)
            self.weights["t2d"] = torch.isin(torch.arange(V), ids)

    @staticmethod
    def _random(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
        if len(shape) == 1:
            return 0.3 + 1.5 * torch.rand(shape, generator=rng)
        return 1.3 / shape[-1] ** 0.5 * torch.randn(shape, generator=rng)

    def __call__(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:  # [n], [n, D] -> [n, D]
        """The layer's output for pairs (feature i, token i), the first at position 0."""
        w = self.weights
        embedding = w.get("embed_tokens.weight", self.target.model.embed_tokens.weight)[tokens]
        if self.version == 3:
            normed = rms(features, w[f"{self.prefix}.hidden_norm.weight"])
            residual = normed if self.norm_first else features
            x = torch.cat([rms(embedding, w[f"{self.prefix}.input_layernorm.weight"]), normed], -1)
        else:
            residual = x = F.linear(torch.cat([embedding, features], -1), w["fc.weight"], w["fc.bias"])
        q, k, v = (F.linear(x, w[f"{self.prefix}.self_attn.{name}_proj.weight"]).view(len(x), -1, HEAD_DIM) for name in "qkv")
        q, k = rotate(q), rotate(k)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        o = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).reshape(len(x), -1)
        x = residual + F.linear(o, w[f"{self.prefix}.self_attn.o_proj.weight"])
        normed = rms(x, w[f"{self.prefix}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"{self.prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.version == 1:
            return self.target.lm_head(x)
        return F.linear(rms(x, self.weights["norm.weight"]), self.weights["lm_head.weight"])

    def token(self, draft_id: int) -> int:
        return draft_id + int(self.weights["d2t"][draft_id]) if self.version == 3 else draft_id

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of the target, a row a token."""
        states = self.target(tokens[None], output_hidden_states=True).hidden_states  # the input of each layer, then the normed end
        if self.version == 1:
            return states[-1][0]
        return F.linear(torch.cat([states[i][0] for i in LAYERS], -1), self.weights["fc.weight"])


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: torch.Tensor) -> torch.Tensor:  # [n, heads, H]
    angles = torch.arange(len(x))[:, None] * THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


@torch.no_grad()
def expect(head: Head, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    features, drafts, gaps = head.features(tokens), [], []
    for start in STARTS:
        pairs, states = tokens[1 : start + 1], features[:start]
        for _ in range(K):
            out = head(pairs, states)[-1]
            logits = head.logits(out)
            best = logits.topk(2).values
            gaps.append(float(best[0] - best[1]))
            drafts.append(head.token(int(logits.argmax())))
            pairs, states = torch.cat([pairs, torch.tensor(drafts[-1:])]), torch.cat([states, out[None]])
    logits = head.logits(head(tokens[1:], features[:-1]))
    return {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.numpy(),
        "starts": np.array(STARTS, np.int32),
        "drafts": np.array(drafts, np.int32).reshape(len(STARTS), K),
        "gaps": np.array(gaps, np.float32).reshape(len(STARTS), K),
    }


def config(head: Head, speculators: bool) -> dict:
    target = head.target.config
    layer = {
        "hidden_size": target.hidden_size, "intermediate_size": FFN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "rope_theta": THETA, "hidden_act": "silu",
        "max_position_embeddings": 64, "vocab_size": target.vocab_size, "model_type": "llama", "torch_dtype": "float32",
    }  # fmt: skip
    if head.version == 1:
        return {"architectures": ["LlamaForCausalLM"], "bias": True, **layer}
    said = {"draft_vocab_size": DRAFT_VOCAB}
    if not speculators:
        aux = {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True}
        return {"architectures": ["LlamaForCausalLMEagle3"], **said, "eagle_config": aux, **layer}
    said |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": True}
    said |= {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "target_hidden_size": None, "transformer_layer_config": layer}
    return said


def main() -> None:
    target = AutoModelForCausalLM.from_pretrained(HERE / "llama", dtype=torch.float32).eval()
    for seed, (name, version, speculators) in enumerate(
        (("eagle1", 1, False), ("eagle3", 3, False), ("eagle3_speculators", 3, True))
    ):
        rng = torch.Generator().manual_seed(40 + seed)
        head = Head(version, speculators, target, rng)
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        save_file(head.weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config(head, speculators), indent=1) + "\n")
        tokens = torch.randint(8, target.config.vocab_size, (T,), generator=rng)
        expected = expect(head, tokens)
        np.savez(folder / "expected.npz", **expected)
        print(name, "least gap", expected["gaps"].min())


if __name__ == "__main__":
    main()

"""Makes the goldens beside this file: tiny random checkpoints, and what transformers computes from them in float32.

Run it in an environment of its own (Python 3.11 or later; it must not have jax, whose directory name `kernels` and
versions it would meet otherwise), from the root of the checkout; it takes about a minute and rewrites every golden:

    pip install "torch==2.13.0" "transformers==5.23.0" numpy safetensors     # the CPU build of torch
    python tests/goldens/make_goldens.py

One folder a checkpoint, as transformers saves it (config.json, generation_config.json, model.safetensors), with
    config_v4.json      the same config with the key names of transformers 4 (rope_scaling, rope_theta, torch_dtype)
    expected.npz        see `expect`
    <variant>/          config.json, config_v4.json and expected.npz of the same weights under another rope type
rope_frequencies.json holds what transformers' rope functions give for the settings of public models, index.json the
folders of every golden and the versions that made them.

The weights are chosen so that a mistake shows: norm weights between 0.3 and 2.5 with either sign, biases far from zero,
head_dim other than hidden_size / num_heads, odd ratios of query to KV heads. They are rounded to the dtype they are
stored in before transformers sees them, so both sides compute from the same numbers.
"""
# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).resolve().parent
PROMPT_LENS = (1, 7, 19, 40)
NUM_NEW = 24
MIN_GAP = 1e-3  # least difference between the two best logits of a greedy step; float32 backends differ by about 1e-5

SIZES = {
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
    "bos_token_id": 3,
    "pad_token_id": 0,
}

CHECKPOINTS = {
    "qwen3_tied": {
        "config": transformers.Qwen3Config(
            **SIZES | {"eos_token_id": [7, 11]},
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
        "generation": {"eos_token_id": [11, 7], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        "dtype": torch.bfloat16,
        "seed": 1,
    },
    "qwen3_windows": {  # untied, every layer_type, biases on q, k, v and o
        "config": transformers.Qwen3Config(
            **SIZES,
            hidden_size=40,
            intermediate_size=72,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=8,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        "generation": {},
        "dtype": torch.bfloat16,
        "seed": 2,
    },
    "qwen2": {  # tied, window from layer 2 on
        "config": transformers.Qwen2Config(
            **SIZES,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
        "generation": {"do_sample": True, "repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
        "dtype": torch.bfloat16,
        "seed": 3,
    },
    "llama": {  # untied, biases everywhere
        "config": transformers.LlamaConfig(
            **SIZES,
            hidden_size=40,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        "generation": {"do_sample": False},
        "dtype": torch.float32,
        "seed": 14,
        "variants": {
            "rope_linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
            "rope_llama3": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 0.5,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "rope_yarn": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "rope_yarn_mscale": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 4.0,
                "beta_slow": 0.25,
                "mscale": 0.8,
                "mscale_all_dim": 0.2,
                "truncate": False,
            },
            "rope_yarn_factor": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "attention_factor": 1.5,
                "original_max_position_embeddings": 32,
            },
        },
    },
    "mistral": {  # untied, a window on every layer
        "config": transformers.MistralConfig(
            **SIZES,
            hidden_size=32,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=12,
            sliding_window=7,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        "generation": {},
        "dtype": torch.float16,
        "seed": 5,
    },
    "qwen3_moe": {  # untied, a dense layer among the sparse, routing weights that sum to 1
        "config": transformers.Qwen3MoeConfig(
            **SIZES,
            hidden_size=40,
            intermediate_size=72,
            moe_intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
        "generation": {},
        "dtype": torch.bfloat16,
        "seed": 6,
    },
    "qwen3_moe_tied": {  # tied, every second layer sparse, weights as they are, biases, a window on every layer, fused experts
        "config": transformers.Qwen3MoeConfig(
            **SIZES,
            hidden_size=48,
            intermediate_size=64,
            moe_intermediate_size=20,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=5,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=9,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        "generation": {},
        "dtype": torch.float32,
        "seed": 8,
        "save": {"save_original_format": False},
    },
}


ROPE_SETTINGS = {  # of public models, and one for each optional field
    "Qwen3": (128, {"rope_type": "default", "rope_theta": 1_000_000.0}),
    "Llama-3.2-1B": (
        64,
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "deepseek-coder-6.7b": (128, {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0}),
    "Qwen3 at 131072": (
        128,
        {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "yarn, original length by default": (
        64,
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0},
    ),
    "yarn, not truncated, betas": (
        64,
        {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn, mscale": (
        64,
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn, mscale without mscale_all_dim": (
        64,
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "mscale": 0.5,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn, ramp of no width": (
        16,
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "beta_fast": 64.0,
            "beta_slow": 64.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
}


def rope_frequencies() -> list[dict]:
    """For each of ROPE_SETTINGS a config.json's worth of keys, and transformers' inv_freq and attention factor."""
    rows = []
    for name, (head_dim, rope) in ROPE_SETTINGS.items():
        heads = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim}
        sizes = {"vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 131072}
        config = transformers.LlamaConfig(**heads, **sizes, rope_parameters=dict(rope))
        module = LlamaRotaryEmbedding(config)
        written = {"architectures": ["LlamaForCausalLM"], **heads, **sizes, "rope_parameters": rope}
        inv_freq = [float(f) for f in module.inv_freq]
        rows.append({"name": name, "config": written, "inv_freq": inv_freq, "factor": float(module.attention_scaling)})
    return rows


def randomize(model: torch.nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Weights normal(0, 1.3 / sqrt(in)), biases normal(0, 0.5), embeddings normal(0, 1), tied ones normal(0, 0.25),
    norm weights as said above."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                value = 0.3 + 2.2 * torch.rand(p.shape, generator=rng)
                value *= torch.where(torch.rand(p.shape, generator=rng) < 0.2, -1.0, 1.0)
            else:
                std = 1.3 / p.shape[-1] ** 0.5
                if name.endswith(".bias"):
                    std = 0.5
                elif "embed_tokens" in name:
                    std = 0.25 if model.config.tie_word_embeddings else 1.0
                value = std * torch.randn(p.shape, generator=rng)
            p.copy_(value.to(dtype).float())


@torch.no_grad()
def expect(model: torch.nn.Module, vocab_size: int) -> dict[str, np.ndarray]:
    """What expected.npz holds, for the prompts of PROMPT_LENS:

    prompts       int32[sum of lengths], one after the other
    prompt_lens   int32[prompts]
    logits        float32[sum of lengths, V], of every prompt position
    greedy        int32[prompts, NUM_NEW], the greedy continuation, whatever the eos ids; every step a whole forward, no
    cache gaps          float32[prompts, NUM_NEW], best logit less second-best at each step: below it, a difference
    decides nothing
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, n).astype(np.int32) for n in PROMPT_LENS]
    logits, greedy, gaps = [], [], []
    for prompt in prompts:
        ids = torch.from_numpy(prompt)[None].long()
        logits.append(model(ids, use_cache=False).logits[0].numpy())
        tokens, gap = [], []
        for _ in range(NUM_NEW):
            best = model(ids, use_cache=False).logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gap.append(float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[None, :1]], dim=1)
        greedy.append(tokens)
        gaps.append(gap)
    return {
        "prompts": np.concatenate(prompts),
        "prompt_lens": np.array(PROMPT_LENS, np.int32),
        "logits": np.concatenate(logits),
        "greedy": np.array(greedy, np.int32),
        "gaps": np.array(gaps, np.float32),
    }


def v4_style(config: dict) -> dict:
    """The key names that transformers 4 wrote."""
    renamed = {
        "torch_dtype": config["dtype"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
    }
    if "num_local_experts" in config:
        renamed["num_experts"] = config["num_local_experts"]
    return renamed | {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype", "layer_types", "num_local_experts")}


def write_golden(folder: Path, model: torch.nn.Module, config: dict, keep_layer_types: bool) -> None:
    old = v4_style(config)
    if keep_layer_types:
        old["layer_types"] = config["layer_types"]
    rope = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
    if rope["rope_type"] != "default":
        old["rope_scaling"] = rope
    for name, content in (("config.json", config), ("config_v4.json", old)):
        (folder / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    expected = expect(model, config["vocab_size"])
    np.savez_compressed(folder / "expected.npz", **expected)  # pyright: ignore[reportArgumentType]
    distinct = [len(set(row.tolist())) for row in expected["greedy"]]
    print(f"{folder.relative_to(HERE)}: smallest gap {expected['gaps'].min():.4f}, distinct greedy tokens {distinct}")
    if expected["gaps"].min() < MIN_GAP:
        raise SystemExit(f"a greedy step is a near tie (gap < {MIN_GAP}); choose another seed for it")


def load_model(folder: Path, **changes) -> torch.nn.Module:
    """Read back from the files, so that what is tested is what was written."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **changes)
    return model.eval()


def main() -> None:
    if "jax" in sys.modules:
        raise SystemExit("make_goldens.py must be independent of jax")
    torch.set_num_threads(1)
    index = {}
    for name, spec in CHECKPOINTS.items():
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        model = AutoModelForCausalLM.from_config(spec["config"], attn_implementation="eager")
        randomize(model, spec["dtype"], spec["seed"])
        model.generation_config = GenerationConfig(**{"eos_token_id": spec["config"].eos_token_id} | spec["generation"])
        model.to(spec["dtype"]).save_pretrained(folder, **spec.get("save", {}))
        config = json.loads((folder / "config.json").read_text())
        keep_layer_types = "sliding_attention" in config.get("layer_types", ()) and config["max_window_layers"] >= 28
        write_golden(folder, load_model(folder), config, keep_layer_types)
        index[name] = {"folder": name, "weights": name}
        for variant, rope in spec.get("variants", {}).items():
            sub = folder / variant
            sub.mkdir(exist_ok=True)
            changed = config | {"rope_parameters": rope}
            write_golden(sub, load_model(folder, rope_parameters=rope), changed, keep_layer_types)
            index[f"{name}_{variant}"] = {"folder": f"{name}/{variant}", "weights": name}
    (HERE / "rope_frequencies.json").write_text(json.dumps(rope_frequencies(), indent=1) + "\n")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    (HERE / "index.json").write_text(json.dumps({"versions": versions, "goldens": index}, indent=1) + "\n")


if __name__ == "__main__":
    main()

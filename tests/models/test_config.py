import dataclasses
import json
import subprocess
import sys

import pytest

from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.generation_defaults import GenerationDefaults
from jaxserve.models.registry import ARCHITECTURES
from tests.goldens.golden import NAMES, load_golden
from tests.models.weight_counts import num_weights

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}

QWEN3_FAMILY = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def qwen3(hidden_size, intermediate_size, num_layers, num_heads, tied):
    return QWEN3_FAMILY | {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "max_window_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": tied,
    }


# config.json of public models (the keys that matter), and their known parameter counts; a tied embedding once.
PUBLIC = {
    "Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, True), 596_049_920),
    "Qwen3-4B": (qwen3(2560, 9728, 36, 32, True), 4_022_468_096),
    "Qwen3-8B": (qwen3(4096, 12288, 36, 32, False), 8_190_735_360),
    "Qwen3-32B": (qwen3(5120, 25600, 64, 64, False), 32_762_123_264),
    "Qwen3-30B-A3B": (
        qwen3(2048, 6144, 48, 32, False)
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
        30_532_122_624,
    ),
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        494_032_768,
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_have_their_known_parameter_counts(name):
    hf, published = PUBLIC[name]
    assert num_weights(ModelConfig.from_hf(hf)) == published


def test_every_field_of_a_public_config():
    config = ModelConfig.from_hf(PUBLIC["Llama-3.2-1B"][0])
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig("llama3", theta=500_000.0, factor=32.0, original_max_position_embeddings=8192),
        sliding_windows=(None,) * 16,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )


@pytest.mark.parametrize("name", NAMES)
def test_key_names_of_transformers_4_and_5_mean_the_same(name):
    golden = load_golden(name)
    new, old = json.loads(golden.config_path.read_text()), json.loads(golden.config_v4_path.read_text())
    assert "rope_parameters" in new and "rope_parameters" not in old and "dtype" not in old
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(old)


QWEN3_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6}


@pytest.mark.parametrize(
    ("changes", "sparse_layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [1, 3]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ({"decoder_sparse_step": 3}, (2,)),
        ({"num_experts": 0}, ()),
    ],
    ids=str,
)
def test_which_layers_are_sparse(changes, sparse_layers):
    config = ModelConfig.from_hf(QWEN3_MOE | {"num_experts_per_tok": 2} | changes)
    assert config.sparse_layers == sparse_layers
    assert config.num_kv_heads == 4 and config.moe_intermediate_size == 768 and not config.norm_topk_prob


def test_a_window_of_a_sparse_model_is_every_layers():
    said = QWEN3_MOE | {"num_experts_per_tok": 2, "sliding_window": 9, "max_window_layers": 2}
    assert ModelConfig.from_hf(said).sliding_windows == (None,) * 4
    assert ModelConfig.from_hf(said | {"use_sliding_window": True}).sliding_windows == (9,) * 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_token=7 must lie in 1 to num_experts=6"),
        ({"num_experts_per_tok": 0}, "num_experts_per_token=0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ],
    ids=str,
)
def test_experts_that_cannot_be_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf(QWEN3_MOE | {"num_experts_per_tok": 2} | changes)


def test_from_hf_takes_a_dict_a_file_and_a_folder():
    golden = load_golden("qwen2")
    hf = json.loads(golden.config_path.read_text())
    assert ModelConfig.from_hf(golden.config_path) == ModelConfig.from_hf(golden.weights) == ModelConfig.from_hf(hf)
    assert ModelConfig.from_hf(str(golden.weights)).num_heads == 6
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_hf(golden.weights.parent)


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        # what hard-wires what
        (
            LLAMA,
            {
                "qk_norm": False,
                "qkv_bias": False,
                "o_bias": False,
                "mlp_bias": False,
                "architecture": "LlamaForCausalLM",
            },
        ),
        (LLAMA | {"attention_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
        (LLAMA | {"mlp_bias": True}, {"qkv_bias": False, "o_bias": False, "mlp_bias": True}),
        (MISTRAL | {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": False, "o_bias": False, "mlp_bias": False}),
        (QWEN2, {"qkv_bias": True, "o_bias": False, "qk_norm": False}),
        (QWEN2 | {"attention_bias": False}, {"qkv_bias": True, "o_bias": False}),
        (QWEN3, {"qkv_bias": False, "o_bias": False, "qk_norm": True, "head_dim": 16}),
        (QWEN3 | {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
        # defaults of the config classes
        (LLAMA, {"num_kv_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": None}),
        (LLAMA | {"head_dim": None, "num_key_value_heads": None}, {"num_kv_heads": 4, "head_dim": 8}),
        (LLAMA | {"head_dim": 6, "num_key_value_heads": 1}, {"num_kv_heads": 1, "head_dim": 6}),
        ({k: v for k, v in QWEN3.items() if k != "head_dim"}, {"head_dim": 128}),
        (MISTRAL | {"num_attention_heads": 16}, {"num_kv_heads": 2}),
        (LLAMA | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16}, {"num_kv_heads": 8}),
        (LLAMA | {"architectures": None, "model_type": "qwen2", "num_key_value_heads": 2}, {"qkv_bias": True}),
        (LLAMA | {"tie_word_embeddings": True, "hidden_act": "swish"}, {"tie_word_embeddings": True}),
        # token ids and dtypes
        (LLAMA, {"eos_token_ids": (), "bos_token_id": None, "pad_token_id": None}),
        (LLAMA | {"eos_token_id": 0, "bos_token_id": 5, "pad_token_id": 6}, {"eos_token_ids": (0,), "bos_token_id": 5}),
        (LLAMA | {"eos_token_id": [3, 1]}, {"eos_token_ids": (3, 1)}),
        (LLAMA | {"torch_dtype": "float16"}, {"dtype": "float16"}),
        (LLAMA | {"torch_dtype": "float16", "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        # values of foreign keys that change nothing
        (LLAMA | {"quantization_config": None, "num_experts": 0, "partial_rotary_factor": 1.0}, {"num_layers": 4}),
        # sliding windows
        (LLAMA | {"sliding_window": 5}, {"sliding_windows": (None,) * 4}),
        (MISTRAL | {"sliding_window": 5}, {"sliding_windows": (5,) * 4}),
        (MISTRAL | {"sliding_window": None}, {"sliding_windows": (None,) * 4}),
        (MISTRAL, {"sliding_windows": (4096,) * 4}),
        (
            MISTRAL | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
            {"sliding_windows": (None, 5, None, 5)},
        ),
        (QWEN2 | {"sliding_window": 5, "max_window_layers": 1}, {"sliding_windows": (None,) * 4}),
        (
            QWEN2 | {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
            {"sliding_windows": (None, 5, 5, 5)},
        ),
        (QWEN2 | {"sliding_window": 5, "use_sliding_window": True}, {"sliding_windows": (None,) * 4}),
        (
            QWEN3
            | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
            | {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
            {"sliding_windows": (5, None, None, 5)},
        ),
        (QWEN3 | {"layer_types": ["full_attention"] * 4}, {"sliding_windows": (None,) * 4}),
    ],
)
def test_from_hf(hf, expected):
    config = ModelConfig.from_hf(hf)
    assert {name: getattr(config, name) for name in expected} == expected


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        ({}, RopeConfig(original_max_position_embeddings=256)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5, original_max_position_embeddings=256)),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            RopeConfig(theta=5e5, original_max_position_embeddings=256),
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            RopeConfig("linear", theta=5e5, factor=2.0, original_max_position_embeddings=256),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig("linear", factor=2, original_max_position_embeddings=256),
        ),
        ({"rope_scaling": YARN}, RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": None, "beta_fast": None}},
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=256),
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 128},
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=128),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32}},
            RopeConfig("yarn", factor=8.0, original_max_position_embeddings=32),
        ),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.5, "mscale": 0.5, "mscale_all_dim": 0.7, "truncate": False}}
            | {"partial_rotary_factor": 1.0},
            RopeConfig(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                attention_factor=1.5,
                mscale=0.5,
                mscale_all_dim=0.7,
                truncate=False,
            ),
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2}},
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16, beta_slow=2),
        ),
    ],
)
def test_rope_from_hf(hf, expected):
    assert ModelConfig.from_hf(LLAMA | hf).rope == expected


@pytest.mark.parametrize(
    ("hf", "named"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"architectures": None}, "None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.*awq"),
        ({"compression_config": {"format": "x"}}, "compression_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rotary_pct": 0.25}, "rotary_pct"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"n_routed_experts": 64}, "n_routed_experts"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"logit_scale": 0.0625}, "logit_scale"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"attention_multiplier": 0.0078}, "attention_multiplier"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ({"dual_chunk_attention_config": {"chunk_size": 1024}}, "dual_chunk_attention_config"),
        ({"use_mrope": True}, "use_mrope"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(hf, named):
    with pytest.raises(NotImplementedError, match=named) as error:
        ModelConfig.from_hf(LLAMA | hf)
    assert any(word in str(error.value) for word in ("supported: ", "is supported", "is not supported", "known: "))


def test_an_unknown_architecture_is_told_which_are_known():
    with pytest.raises(NotImplementedError) as error:
        ModelConfig.from_hf(LLAMA | {"architectures": ["Gemma3ForCausalLM"]})
    assert all(name in str(error.value) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("hf", "named"),
    [
        ({"vocab_size": None, "hidden_size": None}, "vocab_size, hidden_size"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"vocab_size": "5"}, "vocab_size='5' in the config of LlamaForCausalLM must be an integer"),
        ({"hidden_size": 64.5}, "hidden_size=64.5 .*must be an integer"),
        ({"num_key_value_heads": 0}, "num_kv_heads=0 must be at least 1"),
        ({"eos_token_id": "a"}, "eos_token_id='a' must be a token id"),
        ({"eos_token_id": [1, None]}, "eos_token_id=.* must be a token id"),
        ({"rope_scaling": [1]}, r"rope_scaling or rope_parameters must be an object, found \[1\]"),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": -3},
            "sliding_window=-3",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for num_hidden_layers=4"),
        ({"layer_types": ["sliding_attention"] * 4}, "no sliding_window is active"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor, found -1.0"),
        ({"rope_theta": -1.0}, "positive theta"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "low_freq_factor < high_freq_factor",
        ),
    ],
)
def test_nonsense_is_refused_with_the_value(hf, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf(LLAMA | hf)


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[1]", "must hold a JSON object, found a list")])
def test_a_file_that_holds_no_object_is_named(tmp_path, text, message):
    for name, read in (("config.json", ModelConfig.from_hf), ("generation_config.json", GenerationDefaults.from_hf)):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} {message}"):
            read(tmp_path)


def test_sliding_windows_must_match_the_layers():
    config = ModelConfig.from_hf(LLAMA)
    with pytest.raises(ValueError, match="sliding_windows has 1 entries for num_layers=4"):
        dataclasses.replace(config, sliding_windows=(None,))


def test_reading_configs_does_not_import_jax():
    code = "import sys; from jaxserve.models import ModelConfig, GenerationDefaults; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"

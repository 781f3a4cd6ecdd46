"""GGUF files as Hugging Face checkpoints: names, row order, config, tokenizer, and what is refused."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from checkpoints.gguf import (
    GGUFReader,
    generation_config,
    hf_config,
    tokenizer_config,
    tokenizer_json,
    unpermute,
)
from checkpoints.weights import Source, WeightsError, load_weights
from jaxserve.models import named_leaves
from jaxserve.models.loading import load_model
from jaxserve.text.tokenizer import Tokenizer
from tests.checkpoints.gguf_files import SIZES, SPECIALS, vocabulary, write_gguf
from tests.real_files import smollm2_gguf

GOLDENS = Path(__file__).parents[1] / "goldens"

ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
MLP = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def huggingface_names(arch: str, tied: bool) -> dict[str, str]:
    """Hugging Face name -> GGUF name of the whole model, as transformers' modeling files name their parameters."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names |= {} if tied else {"lm_head.weight": "output.weight"}
    for i in range(SIZES["layers"]):
        ours, theirs = f"model.layers.{i}", f"blk.{i}"
        names |= {f"{ours}.self_attn.{a}.weight": f"{theirs}.{b}.weight" for a, b in ATTENTION.items()}
        if arch == "qwen3moe":
            names |= {f"{ours}.mlp.gate.weight": f"{theirs}.ffn_gate_inp.weight"}
            for e in range(SIZES["experts"]):
                names |= {f"{ours}.mlp.experts.{e}.{a}.weight": f"{theirs}.{b}_exps.weight" for a, b in MLP.items()}
        else:
            names |= {f"{ours}.mlp.{a}.weight": f"{theirs}.{b}.weight" for a, b in MLP.items()}
        names |= {f"{ours}.input_layernorm.weight": f"{theirs}.attn_norm.weight"}
        names |= {f"{ours}.post_attention_layernorm.weight": f"{theirs}.ffn_norm.weight"}
        if arch == "qwen2":
            names |= {f"{ours}.self_attn.{x}_proj.bias": f"{theirs}.attn_{x}.bias" for x in "qkv"}
        if arch in ("qwen3", "qwen3moe"):
            names |= {f"{ours}.self_attn.{x}_norm.weight": f"{theirs}.attn_{x}_norm.weight" for x in "qk"}
    return names


def tensor_of(key: str, name: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """What a file with these tensors holds under Hugging Face's name."""
    return tensors[name][int(key.split(".")[5])] if "_exps" in name else tensors[name]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_presents_huggingface_names_and_values(tmp_path, arch, tied):
    tensors = write_gguf(tmp_path / "m.gguf", arch, tied=tied)
    reader = GGUFReader(tmp_path / "m.gguf")
    names = huggingface_names(arch, tied)
    assert set(reader.keys()) == set(names)
    for key, name in names.items():
        tensor = tensor_of(key, name, tensors)
        assert reader.shape(key) == tensor.shape and reader.dtype(key) == "float32"
        if arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            assert sorted(map(tuple, reader.read(key))) == sorted(map(tuple, tensors[name]))  # the same rows, moved
            assert not np.array_equal(reader.read(key), tensors[name])
        else:
            np.testing.assert_array_equal(reader.read(key), tensor)
    config = hf_config(reader)
    assert config["tie_word_embeddings"] is tied
    assert config["architectures"] == [
        {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3moe": "Qwen3Moe"}[arch] + "ForCausalLM"
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_a_mixture_of_experts_is_the_same_model_from_gguf_and_safetensors(tmp_path, tied):
    """One layer's experts quantised, decoded expert by expert."""
    up = np.random.default_rng(3).standard_normal((SIZES["experts"], SIZES["expert_ffn"], SIZES["hidden"])).astype(np.float32)
    quantised = {"blk.1.ffn_up_exps.weight": (gguf.quantize(up, Q8_0), Q8_0)}
    tensors = write_gguf(tmp_path / "m.gguf", "qwen3moe", tied=tied, tensors=quantised)
    tensors["blk.1.ffn_up_exps.weight"] = gguf.dequantize(*tensors["blk.1.ffn_up_exps.weight"])
    named = {key: tensor_of(key, name, tensors) for key, name in huggingface_names("qwen3moe", tied).items()}
    (tmp_path / "folder").mkdir()
    save_file({key: np.ascontiguousarray(x) for key, x in named.items()}, tmp_path / "folder/model.safetensors")
    config = hf_config(GGUFReader(tmp_path / "m.gguf"))
    (tmp_path / "folder/config.json").write_text(json.dumps(config))
    assert config["model_type"] == "qwen3_moe" and config["norm_topk_prob"] is True and config["num_experts_per_tok"] == 2
    there, here = (load_model(tmp_path / x, skip_tokenizer_init=True, dtype="float32").module for x in ("m.gguf", "folder"))
    assert there.config.sparse_layers == (0, 1) and there.config == replace(here.config, eos_token_ids=there.config.eos_token_ids)
    leaves = named_leaves(here)
    for path, leaf in named_leaves(there).items():
        np.testing.assert_array_equal(leaf, leaves.pop(path), err_msg=path)
    assert not leaves


def rotated(
    x: np.ndarray,  # f64[heads, H]
    position: int,
    adjacent: bool,
) -> np.ndarray:  # f64[heads, H]
    """RoFormer's rotation of the pairs (2i, 2i+1), llama.cpp's for llama files, or (i, i + H/2), Hugging Face's."""
    H = x.shape[-1]
    angle = position * 10000.0 ** (-np.arange(H // 2) * 2 / H)
    a, b = (x[:, 0::2], x[:, 1::2]) if adjacent else (x[:, : H // 2], x[:, H // 2 :])
    out = np.empty_like(x)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if adjacent else (slice(0, H // 2), slice(H // 2, None))
    out[:, first] = a * np.cos(angle) - b * np.sin(angle)
    out[:, second] = b * np.cos(angle) + a * np.sin(angle)
    return out


def test_rows_of_llama_give_the_same_attention_scores_under_huggingface_rotation(tmp_path):
    tensors = write_gguf(tmp_path / "m.gguf", "llama")
    reader = GGUFReader(tmp_path / "m.gguf")
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, SIZES["hidden"]))
    group = SIZES["heads"] // SIZES["kv_heads"]

    def scores(q_rows, k_rows, adjacent):
        q = rotated((q_rows.astype(np.float64) @ x).reshape(SIZES["heads"], -1), 7, adjacent)
        k = rotated((k_rows.astype(np.float64) @ y).reshape(SIZES["kv_heads"], -1), 3, adjacent)
        return np.einsum("nh,nh->n", q, np.repeat(k, group, axis=0))

    expected = scores(tensors["blk.1.attn_q.weight"], tensors["blk.1.attn_k.weight"], adjacent=True)
    read = [reader.read(f"model.layers.1.self_attn.{x}_proj.weight") for x in "qk"]
    np.testing.assert_allclose(scores(*read, adjacent=False), expected, rtol=1e-12)


def test_unpermute_moves_whole_rows_and_biases_alike():
    halves = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # rows of one head as they stand in the file, by Hugging Face's numbers
    in_file = np.concatenate([halves, 8 + halves])
    assert unpermute(in_file, 2).tolist() == list(range(16))
    assert unpermute(np.stack([in_file, -in_file], axis=1), 2).tolist() == [[i, -i] for i in range(16)]


def test_biases_of_llama_are_moved_too(tmp_path):
    rows = np.concatenate([8 * head + np.array([0, 4, 1, 5, 2, 6, 3, 7]) for head in range(4)]).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", "llama", tensors={"blk.0.attn_q.bias": rows})
    reader = GGUFReader(tmp_path / "m.gguf")
    assert reader.read("model.layers.0.self_attn.q_proj.bias").tolist() == list(range(32))
    assert hf_config(reader)["attention_bias"] is True


def test_quantised_rows_are_moved_after_decoding_and_stream_through_load_weights(tmp_path):
    q = np.random.default_rng(2).standard_normal((32, 32)).astype(np.float32)
    blocks = gguf.quantize(q, gguf.GGMLQuantizationType.Q8_0)
    write_gguf(tmp_path / "m.gguf", tensors={"blk.0.attn_q.weight": (blocks, gguf.GGMLQuantizationType.Q8_0)})
    reader, key = GGUFReader(tmp_path / "m.gguf"), "model.layers.0.self_attn.q_proj.weight"
    assert reader.dtype(key) == "float32" and reader.shape(key) == (32, 32)
    # Q8_0 rounds a block to 127ths of its largest value, and that scale to half precision.
    bound = np.abs(q).max(axis=1, keepdims=True) * (1 / 254 + 2**-11)
    order = np.concatenate([8 * head + np.array([0, 2, 4, 6, 1, 3, 5, 7]) for head in range(4)])
    assert (np.abs(reader.read(key) - q[order]) <= bound[order]).all()
    loaded = load_weights(
        reader,
        {"q": jax.ShapeDtypeStruct((32, 32), jax.numpy.float32)},
        {"q": Source((key,), lambda arrays: arrays[0].T)},
        ignore=(".*norm.*", ".*embed.*", ".*_proj.*"),
    )
    np.testing.assert_array_equal(loaded["q"], reader.read(key).T)


def test_unknown_tensors_keep_their_names_and_are_reported(tmp_path):
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32), "mm.0.weight": np.zeros(4, np.float32)}
    write_gguf(tmp_path / "m.gguf", tensors=extra)
    with pytest.raises(WeightsError, match=r"(?s)unused: blk\.0\.attn_sinks\.weight \(4,\).*unused: mm\.0\.weight \(4,\)"):
        load_weights(GGUFReader(tmp_path / "m.gguf"), {}, {})


def test_config(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata={"qwen3.rope.freq_base": 1e6, "tokenizer.ggml.padding_token_id": 3})
    assert hf_config(GGUFReader(tmp_path / "m.gguf")) == {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": len(vocabulary()[0]),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,  # not 9.999999974752427e-07, which the file's float32 widens to
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 3,
        "dtype": "float32",
    }


def test_config_defaults_and_head_size(tmp_path):
    D, H = SIZES["hidden"], 16
    tensors = {
        f"blk.{i}.attn_{x}.weight": np.ones((n * H, D), np.float32) for i in (0, 1) for x, n in (("q", 4), ("k", 4), ("v", 4))
    }
    tensors |= {f"blk.{i}.attn_output.weight": np.ones((D, 4 * H), np.float32) for i in (0, 1)}
    tensors |= {"token_embd.weight": np.ones((300, D), np.float16)}
    absent = {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None, "tokenizer.ggml.bos_token_id": None}
    lengths = {"llama.attention.key_length": H, "llama.attention.value_length": H, "llama.rope.dimension_count": H}
    write_gguf(tmp_path / "m.gguf", tensors=tensors, metadata=absent | lengths)
    config = hf_config(GGUFReader(tmp_path / "m.gguf"))
    assert config["head_dim"] == H and config["num_key_value_heads"] == 4 and config["rope_theta"] == 10000.0
    assert config["vocab_size"] == 300 and config["dtype"] == "float16" and "bos_token_id" not in config


def test_dtype_of_a_quantised_model_is_left_open(tmp_path):
    embedding = gguf.quantize(np.ones((300, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    write_gguf(tmp_path / "m.gguf", tensors={"token_embd.weight": (embedding, gguf.GGMLQuantizationType.Q8_0)})
    config = hf_config(GGUFReader(tmp_path / "m.gguf"))
    assert "dtype" not in config and config["vocab_size"] == 300


@pytest.mark.parametrize(
    "metadata, expected",
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # llama.cpp's default type
        ({"rope.scale_linear": 8.0}, {"rope_type": "linear", "factor": 8.0}),  # of old files
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32768,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, expected):
    write_gguf(tmp_path / "m.gguf", "qwen2", metadata={f"qwen2.{key}": value for key, value in metadata.items()})
    assert hf_config(GGUFReader(tmp_path / "m.gguf"))["rope_scaling"] == expected


def llama3_divisors(factor: float, low: float, high: float, context: int) -> np.ndarray:
    """What convert_hf_to_gguf.py writes, frequency by frequency as Meta's apply_scaling goes through them."""
    divisors = []
    for i in range(64):
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / 128)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_found_again_from_its_divisors(tmp_path, factor):
    tensors = {"rope_freqs.weight": llama3_divisors(factor, 1.0, 4.0, 8192)}
    write_gguf(tmp_path / "m.gguf", tensors=tensors, metadata={"llama.rope.freq_base": 500000.0})
    reader = GGUFReader(tmp_path / "m.gguf")
    assert "rope_freqs.weight" not in reader.keys()
    assert hf_config(reader)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_divisors_that_are_not_llama3s(tmp_path):
    for divisors in (
        llama3_divisors(8.0, 1.0, 4.0, 4096),
        llama3_divisors(8.0, 1.0, 2.0, 8192),
        np.array([1, 2, 3, 4], np.float32),
    ):
        write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors}, metadata={"llama.rope.freq_base": 500000.0})
        with pytest.raises(WeightsError, match="rope_freqs.weight is not Llama 3's rope scaling"):
            hf_config(GGUFReader(tmp_path / "m.gguf"))
    write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    assert hf_config(GGUFReader(tmp_path / "m.gguf"))["rope_scaling"] is None


@pytest.mark.parametrize(
    "metadata, says",
    [
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window=4096 is not supported"),
        ({"llama.expert_gating_func": 2}, "llama.expert_gating_func=2 is not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale=0.5 is not supported"),
        ({"llama.attention.value_length": 4}, "attention.value_length=4 must equal the head size 8"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4 must equal the head size 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope scaling 'longrope' is not supp"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor is not supported"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon must be one number, found None"),
        ({"llama.block_count": None}, "llama.block_count must be one number, found None"),
        ({"llama.attention.head_count": [4, 2]}, r"llama.attention.head_count must be one number, found \[4, 2\]"),
    ],
)
def test_refuses_what_it_cannot_express(tmp_path, metadata, says):
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(WeightsError, match=says):
        hf_config(GGUFReader(tmp_path / "m.gguf"))


def test_refuses_a_file_without_a_model(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    reader = GGUFReader(tmp_path / "m.gguf")
    del reader._names["model.embed_tokens.weight"]  # as in a file of an adapter, or of a vocabulary alone
    with pytest.raises(WeightsError, match=r"m\.gguf has no token_embd\.weight"):
        hf_config(reader)


def test_refuses_other_architectures_and_parts(tmp_path):
    write_gguf(tmp_path / "m.gguf", "gemma3")
    with pytest.raises(WeightsError, match="is of architecture 'gemma3'; supported: llama, qwen2, qwen3, qwen3moe"):
        GGUFReader(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", metadata={"split.count": 3})
    with pytest.raises(WeightsError, match="is one of 3 parts: join them"):
        GGUFReader(tmp_path / "m.gguf")


def test_generation_config(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0}
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    write_gguf(tmp_path / "m.gguf", metadata=ends | sampling)
    assert generation_config(GGUFReader(tmp_path / "m.gguf")) == {
        "bos_token_id": 1,
        "eos_token_id": [0, 1],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "do_sample": True,
    }
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.padding_token_id": 3})
    assert generation_config(GGUFReader(tmp_path / "m.gguf")) == {"eos_token_id": [0], "pad_token_id": 3}


def build(path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(GGUFReader(path))))


# What each pre-tokenizer makes of one text; from the regular expressions' own definitions (GPT-2's and cl100k's), by hand.
SPLITS = {
    "smollm": ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "ĠX", "Ġ;-)", "Ċ", "Ċ", "IT", "'", "S"],
    "qwen2": ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "ĠX", "Ġ;-)ĊĊ", "IT", "'S"],
    "llama-bpe": ["It", "'s", "Ġ", "123", "4", "Ġ", "ĠX", "Ġ;-)ĊĊ", "IT", "'S"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_pre_tokenizers_split_as_defined(tmp_path, pre):
    write_gguf(tmp_path / "m.gguf", pre=pre)
    backend = build(tmp_path / "m.gguf")
    pieces = backend.pre_tokenizer.pre_tokenize_str("It's 1234  X ;-)\n\nIT'S")
    assert [piece for piece, _ in pieces] == SPLITS[pre]


def test_smollm_splits_as_its_published_tokenizer_does(tmp_path):
    # SmolLM2's tokenizer.json has these two; the GGUF name stands for them.
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    write_gguf(tmp_path / "m.gguf")
    ours = build(tmp_path / "m.gguf").pre_tokenizer
    for text in ("a 12  b\n\t c's ½ ²³ ٣٤ Ⅻ x1y22 ", "  lead 3.14\r\n\r\n'tis don't DON'T", "漢字12かな 🙂9 é\u0301 \u00a0\u3000x"):
        assert [p for p, _ in ours.pre_tokenize_str(text)] == [p for p, _ in published.pre_tokenize_str(text)]


def test_encodes_with_merges_and_keeps_special_tokens_whole(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    backend = build(tmp_path / "m.gguf")
    encode = lambda text: backend.encode(text).tokens  # noqa: E731
    assert encode("hello w") == ["hello", "Ġw"]
    assert encode("1234") == ["1", "2", "3", "4"]  # split before the merges could join them
    assert encode("a<|turn|>b<tool>c<|end|>") == ["a", "<|turn|>", "b", "<tool>", "c", "<|end|>"]
    assert encode("[PAD]") == ["[", "P", "A", "D", "]"] and backend.token_to_id("[PAD]") is None  # unused tokens are no tokens
    assert encode(" world") == ["Ġwo", "r", "l", "d"]
    flags = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    assert flags == {SPECIALS[0]: True, SPECIALS[1]: True, SPECIALS[2]: False}
    tokens = vocabulary()[0]
    assert {token: backend.token_to_id(token) for token in tokens if token != "[PAD]"} == {
        token: i for i, token in enumerate(tokens) if token != "[PAD]"
    }
    assert backend.decode(backend.encode("hello 🙂 wörld\n").ids) == "hello 🙂 wörld\n"


def test_llama_bpe_takes_whole_words_and_adds_bos(tmp_path):
    write_gguf(tmp_path / "m.gguf", pre="llama-bpe")
    backend = build(tmp_path / "m.gguf")
    assert backend.encode(" world 12").tokens == ["<|turn|>", "Ġworld", "Ġ", "12"]
    assert backend.encode(" world", add_special_tokens=False).tokens == ["Ġworld"]


def test_qwen2_normalises(tmp_path):
    write_gguf(tmp_path / "m.gguf", pre="qwen2")
    assert build(tmp_path / "m.gguf").encode("e\u0301").tokens == ["Ã", "©"]


@pytest.mark.parametrize(
    "pre, metadata, expected",
    [
        ("smollm", {"tokenizer.ggml.add_bos_token": True}, ["<|turn|>", "x"]),
        ("smollm", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, ["<|turn|>", "x", "<|end|>"]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, ["x"]),
        ("llama-bpe", {"tokenizer.ggml.bos_token_id": None}, ["x"]),
    ],
)
def test_bos_and_eos_are_added_where_the_file_says(tmp_path, pre, metadata, expected):
    write_gguf(tmp_path / "m.gguf", pre=pre, metadata=metadata)
    assert build(tmp_path / "m.gguf").encode("x").tokens == expected


def test_refuses_other_vocabularies(tmp_path):
    write_gguf(tmp_path / "m.gguf", pre="tekken")
    with pytest.raises(WeightsError, match="has the pre-tokenizer 'tekken'; supported: smollm, qwen2, llama-bpe"):
        tokenizer_json(GGUFReader(tmp_path / "m.gguf"))
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.model": "llama"})
    with pytest.raises(WeightsError, match="vocabulary of kind 'llama'; only byte-level BPE"):
        tokenizer_json(GGUFReader(tmp_path / "m.gguf"))
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.merges": None})
    with pytest.raises(WeightsError, match="has no tokenizer.ggml.merges"):
        tokenizer_json(GGUFReader(tmp_path / "m.gguf"))


def test_tokenizer_config(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    assert tokenizer_config(GGUFReader(tmp_path / "m.gguf")) == {"bos_token": "<|turn|>", "eos_token": "<|end|>"}
    one = {"tokenizer.chat_template": "plain"}
    write_gguf(tmp_path / "m.gguf", metadata=one)
    assert tokenizer_config(GGUFReader(tmp_path / "m.gguf"))["chat_template"] == "plain"
    more = one | {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "with tools"}
    write_gguf(tmp_path / "m.gguf", metadata=more)
    assert tokenizer_config(GGUFReader(tmp_path / "m.gguf"))["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]


def test_real_weights_are_transformers_own_bit_for_bit():
    golden = json.loads((GOLDENS / "smollm2_weights.json").read_text())
    reader = GGUFReader(smollm2_gguf())
    assert len(reader.keys()) == golden["num_tensors"]
    shapes = {name: (tuple(shape), digest) for name, shape, digest in golden["tensors"]}
    whole = hashlib.sha256()
    for name in sorted(reader.keys()):
        data = reader.read(name).astype(np.float32, copy=False).tobytes()
        whole.update(data)
        if name in shapes:
            assert (reader.shape(name), hashlib.sha256(data).hexdigest()[:16]) == shapes.pop(name), name
    assert shapes == {} and whole.hexdigest() == golden["all"]


def test_real_prompts_are_those_of_the_greedy_golden():
    golden = json.loads((GOLDENS / "smollm2_greedy.json").read_text())
    tokenizer = Tokenizer.from_gguf(smollm2_gguf())
    assert generation_config(GGUFReader(smollm2_gguf()))["eos_token_id"] == [golden["eos_token_id"]]
    for case in golden["cases"]:
        assert tokenizer.encode_chat([{"role": "user", "content": case["prompt"]}]) == case["prompt_token_ids"]
        assert tokenizer.decode(case["float32"]["token_ids"]) == case["float32"]["text"]

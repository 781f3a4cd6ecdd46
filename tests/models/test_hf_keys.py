import dataclasses
import itertools
import re

import numpy as np
import pytest

from checkpoints.huggingface import SafetensorsReader
from jaxserve.models import Decoder, ModelConfig, ignorable_keys, key_table, named_leaves
from tests.goldens.golden import NAMES, load_golden

SWITCHES = ("tie_word_embeddings", "qk_norm", "qkv_bias", "o_bias", "mlp_bias")


@pytest.mark.parametrize("values", [*itertools.product([False, True], repeat=len(SWITCHES))])
def test_the_table_has_the_paths_and_shapes_of_the_module(values):
    config = ModelConfig.from_hf(load_golden("llama").config_path)
    config = dataclasses.replace(config, **dict(zip(SWITCHES, values, strict=True)))
    assert key_table(config).keys() == named_leaves(Decoder.abstract(config)).keys()


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_a_checkpoint_is_used_once_and_fits(name):
    golden = load_golden(name)
    config = ModelConfig.from_hf(golden.config_path)
    reader = SafetensorsReader(golden.weights)
    table = key_table(config, reader.keys())
    used = [key for source in table.values() for key in source.keys]
    assert len(used) == len(set(used)) and set(used) == set(reader.keys())
    for path, leaf in named_leaves(Decoder.abstract(config)).items():
        source = table[path]
        assert source.convert([reader.read(key) for key in source.keys]).shape == leaf.shape, path


def test_kernels_are_transposed_and_fused_in_order():
    config = ModelConfig.from_hf(load_golden("llama").config_path)  # D 40, N 5, K 1, H 16, F 72
    table = key_table(config)
    rng = np.random.default_rng(0)

    def draw(*rows):
        return [rng.normal(size=(n, 40)).astype(np.float32) for n in rows]

    qkv = table["layers/1/attention/qkv_proj/kernel"]
    assert qkv.keys == tuple(f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv")
    q, k, v = draw(80, 16, 16)
    fused, x = qkv.convert([q, k, v]), rng.normal(size=40)
    np.testing.assert_allclose(x @ fused, np.concatenate([q @ x, k @ x, v @ x]), rtol=1e-6)

    gate_up = table["layers/0/mlp/gate_up_proj/kernel"]
    assert gate_up.keys == ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    gate, up = draw(72, 72)
    np.testing.assert_allclose(x @ gate_up.convert([gate, up]), np.concatenate([gate @ x, up @ x]), rtol=1e-6)

    biases = table["layers/0/attention/qkv_proj/bias"].convert([np.full(80, 1.0), np.full(16, 2.0), np.full(16, 3.0)])
    np.testing.assert_array_equal(biases, np.repeat([1.0, 2.0, 3.0], [80, 16, 16]))


def test_experts_are_stacked_and_transposed():
    config = ModelConfig.from_hf(load_golden("qwen3_moe").config_path)  # D 40, F 24, 6 experts; layer 1 is dense
    table = key_table(config)
    assert "layers/1/mlp/router/kernel" not in table and "layers/1/mlp/gate_up_proj/kernel" in table
    rng = np.random.default_rng(0)
    gates, ups, x = rng.normal(size=(6, 24, 40)), rng.normal(size=(6, 24, 40)), rng.normal(size=40)
    gate_up = table["layers/2/mlp/gate_up_proj/kernel"]
    names = [f"model.layers.2.mlp.experts.{e}.{name}_proj.weight" for e in range(6) for name in ("gate", "up")]
    assert list(gate_up.keys) == names
    stacked = gate_up.convert([array for pair in zip(gates, ups, strict=True) for array in pair])
    np.testing.assert_allclose(x @ stacked, np.concatenate([gates @ x, ups @ x], axis=1), rtol=1e-6)
    down = table["layers/2/mlp/down_proj/kernel"]
    assert down.keys == tuple(f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in range(6))
    np.testing.assert_array_equal(down.convert(list(gates)), gates.swapaxes(1, 2))
    for source, faulty in ((down, [*gates[:5], gates[5][:1]]), (gate_up, [gates[0], ups[0][:1]])):
        with pytest.raises(ValueError, match="different shapes"):  # where assignment alone would spread the one row
            source.convert(faulty)

    fused = key_table(config, {"model.layers.0.mlp.experts.gate_up_proj"})
    assert fused["layers/0/mlp/gate_up_proj/kernel"].keys == ("model.layers.0.mlp.experts.gate_up_proj",)
    assert fused["layers/0/mlp/down_proj/kernel"].keys == ("model.layers.0.mlp.experts.down_proj",)


@pytest.mark.parametrize(
    ("key", "tied", "ignored"),
    [
        ("model.layers.17.self_attn.rotary_emb.inv_freq", False, True),
        ("model.rotary_emb.inv_freq", False, True),
        ("lm_head.weight", True, True),
        ("lm_head.weight", False, False),
        ("lm_head.weight_scale", True, False),
        ("model.layers.0.self_attn.q_norm.weight", True, False),
        ("model.layers.0.self_attn.q_proj.bias", True, False),
    ],
)
def test_ignorable_keys(key, tied, ignored):
    config = ModelConfig.from_hf(load_golden("llama").config_path)
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    assert any(re.fullmatch(pattern, key) for pattern in ignorable_keys(config)) == ignored

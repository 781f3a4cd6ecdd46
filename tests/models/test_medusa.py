"""Medusa heads against torch's forward of the same checkpoint (tests/goldens/make_medusa_goldens.py), and what does not fit."""

import json
import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.torch_file import TorchReader
from checkpoints.weights import WeightsError
from jaxserve.models.layers import Fused, causal_attention
from jaxserve.models.medusa import MedusaConfig, MedusaHeads, find_medusa, load_medusa
from tests.goldens.golden import ATOL, HERE
from tests.models.test_eagle import fused, target

FOLDER = HERE / "medusa"


def load(folder=FOLDER, dtype: str = "float32") -> MedusaHeads:
    files = find_medusa(folder, target().config)
    return load_medusa(files.reader, files.config, dtype)


def tensors() -> dict[str, np.ndarray]:
    reader = TorchReader(FOLDER / "medusa_lm_head.pt")
    return {key: reader.read(key) for key in reader.keys()}


def save(folder, weights: dict[str, np.ndarray], **config) -> None:
    hf = json.loads((FOLDER / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(hf))
    save_file({name: np.ascontiguousarray(x) for name, x in weights.items()}, folder / "medusa_lm_head.safetensors")


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_logits_are_torchs(form, tmp_path):
    if form == "safetensors":
        save(tmp_path, tensors())
    heads = load(FOLDER if form == "pt" else tmp_path)
    with np.load(FOLDER / "expected.npz") as expected:
        logits = expected["logits"]
    np.testing.assert_allclose(logits_of(heads), logits, atol=ATOL, rtol=0)


def logits_of(heads: MedusaHeads, fused: Fused | None = None) -> np.ndarray:
    """f32[heads, T, n] behind the tokens of the golden."""
    with np.load(FOLDER / "expected.npz") as expected:
        tokens = expected["tokens"]
    model = target()
    x, rope = model.embed(jnp.asarray(tokens)[None]), model.rope(jnp.arange(len(tokens)))
    for layer in model.layers:
        x, _ = layer(x, rope, lambda q, k, v: (causal_attention(q, k, v), None))
    return np.stack([heads.logits(k, model.final_norm(x[0]), fused) for k in range(len(heads.heads))])


@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_heads_laid_out_for_a_cpu_say_the_same(backend):
    heads = load()
    heads.transpose()
    with np.load(FOLDER / "expected.npz") as expected:
        np.testing.assert_allclose(logits_of(heads, fused(backend)), expected["logits"], atol=ATOL, rtol=0)


VLLM = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True}


def save_as_vllm(folder, prefix: str = "", tokens: np.ndarray | None = None, **config) -> dict[str, np.ndarray]:
    """The golden's heads under the names of vLLM's module. tokens: that they know."""
    weights = {}
    for name, x in tensors().items():
        k, i, *rest = name.split(".")
        weights[f"{prefix}blocks.{k}.layers.{i}.{rest[-1]}" if "linear" in rest else f"{prefix}lm_heads.{k}.weight"] = x
    if tokens is not None:
        weights["token_map"] = tokens.astype(np.int64)
    (folder / "config.json").write_text(json.dumps(VLLM | config))
    save_file({name: np.ascontiguousarray(x) for name, x in weights.items()}, folder / "model.safetensors")
    return weights


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_heads_for_vllm_are_the_same(prefix, tmp_path):
    save_as_vllm(tmp_path, prefix)
    with np.load(FOLDER / "expected.npz") as expected:
        np.testing.assert_allclose(logits_of(load(tmp_path)), expected["logits"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("stored", ["all", "known"])
def test_heads_for_vllm_that_know_a_part_of_the_vocabulary(stored, tmp_path):
    tokens = np.random.default_rng(0).permutation(160)[:50]
    weights = save_as_vllm(tmp_path, tokens=tokens, truncated_vocab_size=50)
    if stored == "known":
        weights |= {name: x[tokens] for name, x in weights.items() if name.startswith("lm_heads.")}
        save_file({name: np.ascontiguousarray(x) for name, x in weights.items()}, tmp_path / "model.safetensors")
    heads = load(tmp_path)
    known = np.sort(tokens)
    assert heads.draft_ids is not None and heads.draft_ids[...].tolist() == known.tolist()
    with np.load(FOLDER / "expected.npz") as expected:
        np.testing.assert_allclose(logits_of(heads), expected["logits"][..., known], atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_heads_for_vllm_that_share_a_matrix_have_no_bias_unless_said(name, tmp_path):
    weights = save_as_vllm(tmp_path, original_lm_head=True, medusa_fc_bias=False)
    shared = weights["lm_heads.0.weight"]
    weights = {key: x for key, x in weights.items() if "lm_heads" not in key and not key.endswith("bias")} | {name: shared}
    save_file({key: np.ascontiguousarray(x) for key, x in weights.items()}, tmp_path / "model.safetensors")
    heads = load(tmp_path)
    assert heads.config.shared_head and not heads.config.fc_bias
    x, expected = np.random.default_rng(0).normal(size=40).astype(np.float32), []
    for k in range(3):
        y = x
        for i in range(2):
            z = weights[f"blocks.{k}.layers.{i}.weight"] @ y
            y = y + z / (1 + np.exp(-z))
        expected.append(shared @ y)
    np.testing.assert_allclose([heads.logits(k, jnp.asarray(x)) for k in range(3)], expected, atol=ATOL, rtol=0)


def test_all_that_does_not_fit_of_heads_for_vllm_is_listed(tmp_path):
    tokens = np.arange(50)
    weights = save_as_vllm(tmp_path, tokens=tokens[:49], truncated_vocab_size=50, medusa_fc_bias=False)
    weights["lm_heads.1.weight"] = weights["lm_heads.1.weight"][:70]
    del weights["blocks.2.layers.1.weight"]
    save_file({key: np.ascontiguousarray(x) for key, x in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as raised:
        load(tmp_path)
    parts = (
        "(9 problems)",
        "token_map is int64[49], not integers [50]",
        "missing: blocks.2.layers.1.weight",
        "lm_heads.1.weight (70",
    )
    for part in (*parts, "unused: blocks.0.layers.1.bias"):
        assert part in str(raised.value)
    wrongs: tuple[tuple[dict[str, Any], str], ...] = (
        ({"truncated_vocab_size": 161}, "its truncated_vocab_size is 161, which must be an integer of at most 160"),
        ({"num_heads": 0}, "its num_heads is 0, which must be an integer of at least 1"),
    )
    for wrong, message in wrongs:
        save_as_vllm(tmp_path, **wrong)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    save_as_vllm(tmp_path, logit_scale=0.5)
    with pytest.raises(NotImplementedError, match="logit_scale=0.5 of Medusa heads"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"medusa_num_heads": None}, "its medusa_num_heads is None, which must be an integer of at least 1"),
        ({"medusa_num_heads": 0, "medusa_num_layers": "1"}, "its medusa_num_heads is 0.*; its medusa_num_layers is '1'"),
        ({"hidden_size": 64, "vocab_size": 7}, "their hidden_size is 64, the target's 40; their vocab_size is 7, the target's 160"),
    ],
)
def test_heads_for_another_target_are_refused_before_their_weights_are_read(changes, message):
    hf = json.loads((FOLDER / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        MedusaConfig.from_hf(hf | changes, target().config)


def test_all_tensors_that_do_not_fit_are_listed(tmp_path):
    weights = tensors()
    del weights["0.1.linear.bias"]
    weights["1.2.weight"] = weights["1.2.weight"][:100]
    weights["2.0.linear.gate"] = weights["2.0.linear.bias"]
    save(tmp_path, weights)
    with pytest.raises(WeightsError) as raised:
        load(tmp_path)
    for part in ("does not fit 3 Medusa heads (3 problems)", "missing: 0.1.linear.bias", "1.2.weight (100, 40)", "2.0.linear.gate"):
        assert part in str(raised.value)


def test_heads_beyond_their_number_are_left_out(tmp_path, caplog):
    save(tmp_path, tensors(), medusa_num_heads=2)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assert len(load(tmp_path).heads) == 2
    assert "of Medusa heads 2 are used, as medusa_num_heads says; the file has 3" in caplog.text
    save(tmp_path, tensors(), medusa_num_heads=4)
    with pytest.raises(WeightsError, match="missing: 3.0.linear.weight"):
        load(tmp_path)


def test_a_folder_without_heads_says_so(tmp_path):
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    with pytest.raises(WeightsError, match="no safetensors file"):
        load(tmp_path)

"""Medusa heads against torch's forward of the same checkpoint (tests/goldens/make_medusa_goldens.py), and what does not fit."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.torch_file import TorchReader
from checkpoints.weights import WeightsError
from jaxserve.models.layers import causal_attention
from jaxserve.models.medusa import MedusaConfig, MedusaHeads, find_medusa, load_medusa
from tests.goldens.golden import ATOL, HERE
from tests.models.test_eagle import target

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
    heads, model = load(FOLDER if form == "pt" else tmp_path), target()
    with np.load(FOLDER / "expected.npz") as expected:
        tokens, logits = expected["tokens"], expected["logits"]
    x, rope = model.embed(jnp.asarray(tokens)[None]), model.rope(jnp.arange(len(tokens)))
    for layer in model.layers:
        x, _ = layer(x, rope, lambda q, k, v: (causal_attention(q, k, v), None))
    found = [head(model.final_norm(x[0])) for head in heads.heads]
    np.testing.assert_allclose(np.stack(found), logits, atol=ATOL, rtol=0)


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

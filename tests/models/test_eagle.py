"""EAGLE heads against torch's forward of the same checkpoints (tests/goldens/make_eagle_goldens.py), and what does not fit."""

import functools
import json
import shutil
import zipfile
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.weights import WeightsError
from jaxserve.models import ModelConfig, named_leaves
from jaxserve.models.eagle import EagleConfig, EagleHead, find_eagle, load_eagle
from jaxserve.models.layers import Fused, causal_attention
from jaxserve.models.loading import load_model
from kernels.cpu import library
from kernels.fused_matmul import fused_matmul
from tests.goldens.golden import ATOL, HERE
from tests.selection import slow_unless

VERSIONS = {"eagle1": 1, "eagle3": 3, "eagle3_speculators": 3}


@functools.cache
def target():
    return load_model(HERE / "llama", skip_tokenizer_init=True).module


def load(name: str, folder=HERE) -> EagleHead:
    files = find_eagle(folder / name, target().config, version=VERSIONS[name])
    return load_eagle(files.reader, files.config, "float32")


def features(head: EagleHead, tokens: np.ndarray) -> jnp.ndarray:
    model, states = target(), []
    x, rope = model.embed(jnp.asarray(tokens)[None]), model.rope(jnp.arange(len(tokens)))
    for layer in model.layers:
        states.append(x[0])
        x, _ = layer(x, rope, lambda q, k, v: (causal_attention(q, k, v), None))
    if head.config.version == 1:
        return head.feature(model.final_norm(x[0]))
    return head.feature(jnp.concatenate([states[i] for i in head.config.hidden_layers], -1))


def fused(backend: str | None) -> Fused | None:
    """What computes a head's matmuls; None: the modules themselves."""
    if backend == "cpu" and (lacks := library.lacks()):
        pytest.skip(lacks)
    return None if backend is None else Fused(functools.partial(fused_matmul, backend=backend), any_layout=True)


@pytest.mark.parametrize("backend", [None, "xla", "cpu"])
@pytest.mark.parametrize("name", slow_unless(lambda name: name == "eagle3", list(VERSIONS)))
def test_logits_are_torchs(name, backend):
    head = load(name)
    if backend is not None:
        head.transpose()
    with np.load(HERE / name / "expected.npz") as expected:
        tokens, logits = expected["tokens"], expected["logits"]
    model, pairs = target(), jnp.asarray(tokens[1:])
    embedded = (head.embed_tokens or model.embed_tokens)(pairs)
    rope = head.rope(jnp.arange(len(pairs)))
    attend = lambda q, k, v: (causal_attention(q[None], k[None], v[None])[0], None)  # noqa: E731
    x, _ = head(embedded, features(head, tokens)[:-1], rope, attend, fused(backend))
    found = model.logits(x) if head.lm_head is None else head.draft_logits(x, fused(backend))
    np.testing.assert_allclose(np.asarray(found), logits, atol=ATOL, rtol=0)
    assert head.config.has_embedding == (name == "eagle3_speculators")


def test_the_layers_that_are_read():
    config = ModelConfig.from_hf(HERE / "llama")
    deep = replace(config, num_layers=32, sliding_windows=(None,) * 32)
    hf = json.loads((HERE / "eagle3" / "config.json").read_text())
    assert EagleConfig.from_hf(hf, deep, version=3).hidden_layers == (0, 1, 1)
    del hf["eagle_config"]
    assert EagleConfig.from_hf(hf, deep, version=3).hidden_layers == (2, 16, 29), "as its authors"
    with pytest.raises(ValueError, match=r"it reads the inputs of layers \[2, 1, -1\]: must be 3 of the target's 2"):
        EagleConfig.from_hf(hf, config, version=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200}, "its vocab_size is 200, the target's 160"),
        ({"hidden_size": 64}, "its hidden_size is 64, the target's hidden_size 40"),
        ({"target_hidden_size": 80, "vocab_size": 7}, "its vocab_size is 7, the target's 160; its target_hidden_size is 80"),
        ({"draft_vocab_size": 161}, r"its draft_vocab_size=161 must be in \[1, 160\]"),
    ],
)
def test_a_head_for_another_target_is_refused_before_its_weights_are_read(changes, message):
    hf = json.loads((HERE / "eagle3" / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        EagleConfig.from_hf(hf | changes, target().config, version=3)
    with pytest.raises(NotImplementedError, match="num_hidden_layers=2 in an EAGLE head"):
        EagleConfig.from_hf(hf | {"num_hidden_layers": 2}, target().config, version=3)


def test_all_tensors_that_do_not_fit_are_listed(tmp_path):
    shutil.copytree(HERE / "eagle3", tmp_path / "eagle3")
    tensors = load_file(tmp_path / "eagle3" / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :80]
    tensors["another.weight"] = tensors["norm.weight"]
    tensors["d2t"][3] = 1000
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "eagle3" / "model.safetensors")
    with pytest.raises(WeightsError) as raised:
        load("eagle3", tmp_path)
    for part in (
        "4 problems",
        "midlayer.hidden_norm.weight",
        "fc.weight",
        "another.weight",
        "d2t does not name 96 different tokens",
    ):
        assert part in str(raised.value)
    (tmp_path / "eagle3" / "model.safetensors").unlink()
    (tmp_path / "eagle3" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="pytorch_model.bin is not an archive of torch.save"):
        load("eagle3", tmp_path)


SPECULATORS = {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": True}


def test_eagle1_heads_of_speculators_are_the_same(tmp_path):
    """Their names for the tensors of the head whose logits are torch's, and its config within theirs. A head with norms of its own,
    which would need another forward, is refused by its config, and by a tensor where the config does not say so."""
    (tmp_path / "eagle1").mkdir()
    config, tensors = json.loads((HERE / "eagle1" / "config.json").read_text()), load_file(HERE / "eagle1" / "model.safetensors")
    said = {"architectures": ["EagleSpeculator"], **SPECULATORS, "transformer_layer_config": config}
    (tmp_path / "eagle1" / "config.json").write_text(json.dumps(said))
    names = {name: name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.") for name in tensors}
    assert {"fusion_fc.weight", "fusion_fc.bias", "transformer.mlp.up_proj.weight"} <= set(names.values())
    theirs = {names[name]: x for name, x in tensors.items()}
    save_file(theirs, tmp_path / "eagle1" / "model.safetensors")
    found, wanted = (named_leaves(load("eagle1", folder)) for folder in (tmp_path, HERE))
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf)
    save_file(theirs | {"embedding_layernorm.weight": np.ones(40, np.float32)}, tmp_path / "eagle1" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"embedding_layernorm\.weight"):
        load("eagle1", tmp_path)
    with pytest.raises(NotImplementedError, match="layernorms=true in an EAGLE-1 head of speculators"):
        EagleConfig.from_hf(said | {"layernorms": True}, target().config, version=1)
    with pytest.raises(ValueError, match="speculators_model_type='eagle' of this head is not that of an EAGLE-3 head, 'eagle3'"):
        EagleConfig.from_hf(said, target().config, version=3)


def save_pickled(path, tensors: dict[str, np.ndarray]) -> None:
    """What torch.save writes of a state dict, in pickle's text protocol: each tensor in a storage of its own."""
    kinds = {"float32": "FloatStorage", "int64": "LongStorage", "bool": "BoolStorage"}
    ints = lambda numbers: "(" + "".join(f"I{n}\n" for n in numbers) + "t"  # noqa: E731
    entries = []
    with zipfile.ZipFile(path, "w") as archive:
        for i, (name, x) in enumerate(tensors.items()):
            storage = f"(S'storage'\nctorch\n{kinds[str(x.dtype)]}\nS'{i}'\nS'cpu'\nI{x.size}\ntQ"
            strides = [int(np.prod(x.shape[axis + 1 :])) for axis in range(x.ndim)]
            entries.append(f"S'{name}'\nctorch._utils\n_rebuild_tensor_v2\n({storage}I0\n{ints(x.shape)}{ints(strides)}I00\nNtRs")
            archive.writestr(f"a/data/{i}", np.ascontiguousarray(x).tobytes())
        archive.writestr("a/data.pkl", "(d" + "".join(entries) + ".")


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_heads_that_torch_pickled_are_the_same(name, tmp_path):
    """As their authors publish them."""
    (tmp_path / name).mkdir()
    shutil.copy(HERE / name / "config.json", tmp_path / name)
    save_pickled(tmp_path / name / "pytorch_model.bin", load_file(HERE / name / "model.safetensors"))
    found, wanted = (named_leaves(load(name, folder)) for folder in (tmp_path, HERE))
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf)

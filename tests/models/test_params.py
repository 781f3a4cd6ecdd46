"""Trees of trainers' shapes and names become the weights that a loader makes of the same tensors, and are shared where they fit."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import meta

from checkpoints.huggingface import SafetensorsReader
from jaxserve.execution.compilation import compile_counts
from jaxserve.models import Decoder, ModelConfig, named_leaves, transpose_kernels
from jaxserve.models.adoption import common_dtype, fit, flat_weights, placed
from jaxserve.models.loading import adopt_model, load_weights
from tests.dummy import CONFIG, dummy_model
from tests.goldens.golden import load_golden

GOLDENS = ("qwen3_tied", "qwen2", "mistral")  # with tied embeddings and q, k norms; with biases; with neither


def tensors_of(name: str) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    golden = load_golden(name)
    reader = SafetensorsReader(golden.weights)
    return ModelConfig.from_hf(golden.config_path), {key: reader.read(key) for key in reader.keys()}


def by_heads(config: ModelConfig, name: str, x: np.ndarray) -> np.ndarray:
    """A torch projection as an einsum weight: q, k, v [D, heads, H], o [heads, H, D]."""
    if name == "o":
        return x.T.reshape(config.num_heads, config.head_dim, config.hidden_size)
    return x.T.reshape(config.hidden_size, -1, config.head_dim)


class Leaf(nnx.Module):
    def __init__(self, name: str, x: np.ndarray):
        setattr(self, name, nnx.Param(jnp.asarray(x)))


class Tunix(nnx.Module):
    """The parameters of tunix's models, under their names, in their shapes."""

    def __init__(self, config: ModelConfig, tensors: dict[str, np.ndarray]):
        self.embedder = Leaf("input_embedding", tensors["model.embed_tokens.weight"])
        self.layers = nnx.List([self._layer(config, tensors, f"model.layers.{i}") for i in range(config.num_layers)])
        self.final_norm = Leaf("w", tensors["model.norm.weight"])
        if not config.tie_word_embeddings:
            self.lm_head = Leaf("w", tensors["lm_head.weight"].T)

    @staticmethod
    def _layer(config: ModelConfig, tensors: dict[str, np.ndarray], at: str) -> nnx.Module:
        layer, attn, mlp = (nnx.Module() for _ in range(3))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, norm, Leaf("w", tensors[f"{at}.{norm}.weight"]))
        for x in "qkvo":
            setattr(attn, f"{x}_proj", Leaf("w", by_heads(config, x, tensors[f"{at}.self_attn.{x}_proj.weight"])))
            if f"{at}.self_attn.{x}_proj.bias" in tensors:
                setattr(attn, f"{x}_bias", nnx.Param(jnp.asarray(tensors[f"{at}.self_attn.{x}_proj.bias"])))
        for x in "qk":
            if config.qk_norm:
                setattr(attn, f"{x}_norm", Leaf("w", tensors[f"{at}.self_attn.{x}_norm.weight"]))
        for x in ("gate", "up", "down"):
            setattr(mlp, f"{x}_proj", Leaf("kernel", tensors[f"{at}.mlp.{x}_proj.weight"].T))
        for name, part in (("attn", attn), ("mlp", mlp)):
            setattr(layer, name, part)
        return layer


def linen(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Linen variables as of a module named after transformers': layers_0, kernels [in, out], one of them boxed for sharding."""
    tree: dict[str, Any] = {}
    for key, x in tensors.items():
        *parents, name = key.replace("layers.", "layers_").split(".")
        if name == "weight" and x.ndim == 2:
            x, name = (x, "embedding") if parents[-1] == "embed_tokens" else (x.T, "kernel")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = meta.Partitioned(jnp.asarray(x), names=(None,) * x.ndim) if parents[-1] == "down_proj" else jnp.asarray(x)
    return {"params": tree}


def torch(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    return dict(tensors)


@pytest.mark.parametrize("tree", [Tunix, linen, torch], ids=["tunix", "linen", "torch"])
@pytest.mark.parametrize("name", GOLDENS)
def test_known_names_make_what_the_loader_makes(name, tree):
    config, tensors = tensors_of(name)
    expected = named_leaves(load_weights(SafetensorsReader(load_golden(name).weights), config))
    adopted = adopt_model(tree(config, tensors), config)
    leaves = named_leaves(adopted.module)
    chex.assert_trees_all_equal(leaves, expected, strict=True)


def test_experts_of_tunix():
    """Gate and up apart, all experts' in one array each, with no module around it."""
    golden = load_golden("qwen3_moe")
    config = ModelConfig.from_hf(golden.config_path)
    expected = named_leaves(load_weights(SafetensorsReader(golden.weights), config))
    tree, F = {}, config.moe_intermediate_size
    for path, x in expected.items():
        if x.ndim == 3 and "gate_up" in path:
            mlp = path.removesuffix("/gate_up_proj/kernel")
            tree |= {f"{mlp}/gate_proj": x[..., :F], f"{mlp}/up_proj": x[..., F:]}
        else:
            tree[path.removesuffix("/kernel") if x.ndim == 3 else path] = x
    assert "layers/0/mlp/down_proj" in tree
    chex.assert_trees_all_equal(named_leaves(adopt_model(tree, config).module), expected, strict=True)


def test_our_own_module_is_taken_as_it_is():
    model = dummy_model()
    for params in (model, nnx.state(model), dict(named_leaves(model)), {"params": named_leaves(model)}):
        adopted = adopt_model(params, None if params is model else CONFIG)
        assert adopted.config == CONFIG
        for path, x in named_leaves(adopted.module).items():
            assert x is named_leaves(model)[path], path


@pytest.mark.parametrize("name", GOLDENS)
def test_transposed_kernels_are_shared_and_refilled(name):
    """What one engine laid out for a CPU another takes as it is; a trainer's [in, out] fills the same leaves."""
    config, tensors = tensors_of(name)
    plain = named_leaves(load_weights(SafetensorsReader(load_golden(name).weights), config))
    module = transpose_kernels(load_weights(SafetensorsReader(load_golden(name).weights), config))
    leaves = named_leaves(module)
    turned = {path for path in leaves if path.endswith("/weight")}
    assert len(turned) >= 2 * config.num_layers + (not config.tie_word_embeddings) and transpose_kernels(module) is module
    for path in leaves:
        expected = plain[path.replace("/weight", "/kernel")]
        np.testing.assert_array_equal(leaves[path], expected.T if path in turned else expected, err_msg=path)
    for params in (module, leaves, {"params": leaves}):
        adopted = named_leaves(adopt_model(params, config).module)
        assert adopted.keys() == leaves.keys() and all(adopted[path] is leaves[path] for path in leaves)
    abstract = named_leaves(transpose_kernels(Decoder.abstract(config, "float32")))
    for tree in (plain, torch(config, tensors), Tunix(config, tensors)):
        refilled = placed(fit(tree, config, abstract), jax.devices()[0])
        for path, x in zip(abstract, refilled, strict=True):
            np.testing.assert_array_equal(x, leaves[path], err_msg=path)


def test_placement_on_a_mesh_of_one_device_is_no_reason_to_copy():
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec())
    leaves = {path: jax.device_put(x, sharding) for path, x in named_leaves(dummy_model()).items()}
    for path, x in named_leaves(adopt_model(leaves, CONFIG).module).items():
        assert x.unsafe_buffer_pointer() == leaves[path].unsafe_buffer_pointer(), path


def test_dtypes_are_cast_and_numpy_is_copied():
    host = {path: np.array(x) for path, x in named_leaves(dummy_model()).items()}
    leaves = named_leaves(adopt_model(host, CONFIG, dtype="bfloat16").module)
    chex.assert_trees_all_equal(leaves, named_leaves(dummy_model("bfloat16")), strict=True)
    same = named_leaves(adopt_model(host, CONFIG).module)
    for x in host.values():
        x[...] = 77.0
    chex.assert_trees_all_equal(same, named_leaves(dummy_model()), strict=True)
    mixed = host | {"final_norm/scale": jnp.ones(CONFIG.hidden_size, jnp.bfloat16)}
    with pytest.raises(ValueError, match="dtypes are bfloat16, float32: give dtype="):
        common_dtype(mixed)
    assert common_dtype(host) == "float32"


def test_a_second_tree_of_the_same_shapes_compiles_nothing():
    config, tensors = tensors_of("qwen3_tied")
    abstract = named_leaves(Decoder.abstract(config, "bfloat16"))
    trees = [{key: jnp.asarray(x + i) for key, x in tensors.items()} for i in range(2)]

    def convert(tree):
        return list(placed(fit(tree, config, abstract), jax.devices()[0]))

    first = convert(trees[0])
    before = compile_counts().programs
    second = convert(trees[1])
    assert compile_counts().programs == before
    assert not np.array_equal(np.asarray(first[0], np.float32), np.asarray(second[0], np.float32))


def test_every_misfit_is_listed():
    leaves = named_leaves(dummy_model())
    donated = jnp.zeros_like(leaves["layers/1/mlp/down_proj/kernel"])
    donated.delete()
    abstract = Decoder.abstract(CONFIG, "float32")
    wrong = dict(leaves) | {
        "layers/0/attention/o_proj/kernel": jnp.zeros((3, 5)),
        "layers/1/mlp_norm/scale": jnp.ones(CONFIG.hidden_size, jnp.int32),
        "layers/1/mlp/down_proj/kernel": donated,
        "layers/1/attention_norm/scale": "nothing",
        "lm_head/kernel": named_leaves(abstract)["lm_head/kernel"],
        "layers/0/attention/qkv_proj/kernel_lora_a": jnp.zeros(3),
        "layers/1/attn/q_norm/w": leaves["layers/1/attention/q_norm/scale"],
    }
    del wrong["final_norm/scale"], wrong["layers/0/mlp/gate_up_proj/kernel"]
    wrong["layers/0/mlp/up_proj/kernel"] = jnp.zeros((32, 48))
    with pytest.raises(ValueError) as error:
        fit(wrong, CONFIG, named_leaves(abstract))
    first, *lines = str(error.value).splitlines()
    assert first == "the weights do not fit the model (9 problems):"
    for line, expected in zip(
        sorted(lines),
        [
            "deleted: layers/1/mlp/down_proj/kernel was donated",
            "dtype: layers/1/mlp_norm/scale is int32; only bfloat16, float16, float32",
            "missing: final_norm/scale [32]",
            "missing: layers/0/mlp/gate_proj/kernel [32, 48]",
            "shape: layers/0/attention/o_proj/kernel is [3, 5], not [32, 32] or [4, 8, 32]",
            "twice: layers/1/attn/q_norm/w and layers/1/attention/q_norm/scale both stand for layers/1/attention/q_norm/scale",
            "type: layers/1/attention_norm/scale is a str",
            "type: lm_head/kernel is a ShapeDtypeStruct",
            "unknown: layers/0/attention/qkv_proj/kernel_lora_a",
        ],
        strict=True,
    ):
        assert line.strip().startswith(expected)


def test_a_traced_tree_is_refused():
    @jax.jit
    def inside(leaves):
        fit(leaves, CONFIG, named_leaves(Decoder.abstract(CONFIG, "float32")))

    with pytest.raises(ValueError, match="type: embed_tokens/embedding is a .*Tracer"):
        inside(dict(named_leaves(dummy_model())))


def test_paths_of_a_module_of_one_layer_deep():
    assert set(flat_weights(Leaf("w", np.zeros(3)))) == {"w"}
    with pytest.raises(ValueError, match="give config="):
        adopt_model(Leaf("w", np.zeros(3, np.float32)))

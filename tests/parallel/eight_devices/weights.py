"""Weights on several devices: read in parts, adopted, updated, put to sleep, saved and restored, always the ones of one device."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from checkpoints import orbax
from checkpoints.huggingface import SafetensorsReader
from jaxserve import LLM
from jaxserve.engine.engine import Engine
from jaxserve.execution.compilation import compile_counts
from jaxserve.models import Decoder, ModelConfig, named_leaves, transpose_kernels
from jaxserve.models.files import find_model
from jaxserve.models.loading import load_files, load_version_cut, load_weights, load_weights_cut
from jaxserve.models.shard_placement import plain_weights, shard_model
from jaxserve.models.shards import ModelShards, ShardedModel
from jaxserve.parallel.mesh import make_mesh
from tests.dummy import SETTINGS, Ask, dummy_model
from tests.goldens.golden import load_golden
from tests.parallel.models import GREEDY, MODELS, PROMPTS, answers, assert_like_one_device, engine_of
from tests.selection import slow_unless

ASKS = [Ask(prompt, GREEDY) for prompt in PROMPTS[:2]]
GOLDENS = [("qwen3_tied", 4), ("qwen2", 2), ("mistral", 8), ("qwen3_moe", 4), ("qwen3_moe_tied", 2)]


def shards_of(config: ModelConfig, tp: int) -> ModelShards:
    mesh = make_mesh(tp)
    assert mesh is not None
    return ModelShards(config, mesh)


def assert_equal(found: ShardedModel, expected: ShardedModel) -> None:
    assert found.weights.keys() == expected.weights.keys()
    for path, weight in found.weights.items():
        other = expected.weights[path]
        assert (weight.dtype, weight.sharding) == (other.dtype, other.sharding), path
        np.testing.assert_array_equal(np.asarray(weight), np.asarray(other), err_msg=path)


class NoParts:
    """A reader of whole tensors alone, as GGUF's."""

    def __init__(self, reader: SafetensorsReader):
        self.keys, self.shape, self.dtype, self.read = reader.keys, reader.shape, reader.dtype, reader.read


class Watched(SafetensorsReader):
    """Counts the numbers that are read."""

    count = 0

    def read(self, key: str) -> np.ndarray:
        x = super().read(key)
        self.count += x.size
        return x

    def read_part(self, key: str, axis: int, start: int, stop: int) -> np.ndarray:
        x = super().read_part(key, axis, start, stop)
        self.count += x.size
        return x


@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_unless(lambda x: x[0] != "mistral", GOLDENS), ids=str)
def test_what_is_read_in_parts_is_the_whole_cut(case, transposed):
    name, tp = case
    golden = load_golden(name)
    reader, config = Watched(golden.weights), ModelConfig.from_hf(golden.config_path)
    shards = shards_of(config, tp)
    found = load_weights_cut(reader, shards, dtype="float32", transposed=transposed)
    total = sum(int(np.prod(reader.shape(key))) for key in reader.keys())
    copies = -(-tp // config.num_kv_heads)
    assert reader.count <= total * (1 if copies == 1 else 1.5), "but for repeated KV heads nothing is read twice"
    expected = shard_model(load_weights(reader, config, dtype="float32", transposed=transposed), shards)
    assert_equal(found, expected)
    assert_equal(load_weights_cut(NoParts(reader), shards, dtype="float32", transposed=transposed), expected)


@pytest.mark.parametrize("name", MODELS)
def test_cut_and_joined_again(name):
    model = dummy_model(config=MODELS[name])
    for tp in (2, 8):
        leaves = named_leaves(model)
        for path, weight in plain_weights(shard_model(model, shards_of(MODELS[name], tp))):
            np.testing.assert_array_equal(weight, np.asarray(leaves[path]), err_msg=path)


@pytest.mark.parametrize("name", ["odd_groups_tied", pytest.param("experts", marks=pytest.mark.slow)])
def test_a_checkpoint_of_four_devices_is_restored_on_two_and_on_one(tmp_path: Path, name):
    model = dummy_model(config=MODELS[name])
    saved = orbax.save(tmp_path / "checkpoint", dict(plain_weights(shard_model(model, shards_of(MODELS[name], 4)))))
    for transposed in (False, True):
        one = transpose_kernels(Decoder.abstract(MODELS[name], "float32")) if transposed else model
        shards = shards_of(MODELS[name], 2)
        found = load_version_cut(saved, shards, dtype="float32", transposed=transposed)
        assert one.is_transposed == found.module.is_transposed
        assert_equal(found, shard_model(dummy_model(config=MODELS[name], transposed=transposed), shards))
    whole = orbax.load(saved, named_leaves(Decoder.abstract(MODELS[name], "float32")))
    assert all((np.asarray(whole[path]) == np.asarray(leaf)).all() for path, leaf in named_leaves(model).items())


@pytest.mark.slow
def test_an_llm_reads_and_answers_on_four_devices():
    folder = load_golden("qwen3_moe").weights
    options: dict[str, Any] = {**SETTINGS, "num_pages": 64, "max_model_len": 48, "dtype": "float32"}
    found = []
    for tp in (1, 4):
        llm = LLM(folder, skip_tokenizer_init=True, tensor_parallel_size=tp, **options)
        outputs = llm.generate([{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": [3]}], GREEDY, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert llm.describe().tensor_parallel_size == tp
    assert found[0] == found[1]


@pytest.mark.slow
def test_new_weights_come_from_anywhere_and_compile_once():
    config = MODELS["odd_groups_tied"]
    engine = engine_of(dummy_model(config=config), 4)
    first = answers(engine, ASKS)
    other = jax.tree.map(lambda x: x * 1.25, named_leaves(dummy_model(config=config)))
    of_one = engine_of(dummy_model(config=config), 1)
    of_one.update_params(other)
    expected = answers(of_one, ASKS)
    engine.update_params(other)
    assert_like_one_device(answers(engine, ASKS), expected)
    before = compile_counts().programs
    engine.update_params(named_leaves(dummy_model(config=config)))
    assert answers(engine, ASKS) == first
    engine.update_params({path: np.asarray(x) for path, x in other.items()})
    assert compile_counts().programs == before
    assert_like_one_device(answers(engine, ASKS), expected)
    with pytest.raises(ValueError, match="the weights do not fit the model"):
        engine.update_params({path: x[:-1] for path, x in other.items()})
    for wrong in (
        shard_model(dummy_model(config=config), shards_of(config, 2)),
        shard_model(dummy_model(), shards_of(MODELS["gqa"], 4)),
    ):
        with pytest.raises(ValueError, match="cut for other devices or another model"):
            engine.update_params(wrong)
    engine.update_params(shard_model(dummy_model(config=config), shards_of(config, 4)))
    assert answers(engine, ASKS) == first


@pytest.mark.slow
def test_weights_come_back_from_sleep():
    engine = engine_of(dummy_model(), 2)
    first = answers(engine, ASKS)
    for level in (1, 2):
        engine.sleep(level)
        assert not any(isinstance(x, jax.Array) for x in engine.runner.programs.functions.weights)
        engine.wake_up()
        if level == 2:
            engine.update_params(dummy_model())
        assert answers(engine, ASKS) == first
    assert engine.runner.programs.functions.weights[0].sharding.device_set == set(jax.devices()[:2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_trainers_arrays_are_used_as_they_lie_where_they_lie_so(kind, caplog):
    caplog.set_level("INFO", logger="jaxserve")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("tp", "fsdp"), axis_types=(kind, kind))
    mesh = Mesh(mesh.devices[:, :1], ("tp", "fsdp"), axis_types=(kind, kind))
    leaves: dict[str, jax.Array] = {}
    for path, leaf in named_leaves(dummy_model()).items():
        spec = PartitionSpec()
        if path.endswith(("o_proj/kernel", "down_proj/kernel")):
            spec = PartitionSpec("tp")
        elif path.endswith("qkv_proj/kernel"):
            spec = PartitionSpec("fsdp", "tp")
        leaves[path] = jax.device_put(leaf, NamedSharding(mesh, spec))
    llm = LLM.from_params(leaves, MODELS["gqa"], mesh=mesh, **{**SETTINGS, "num_pages": 64})
    held = dict(zip(llm.engine.runner.programs.functions.paths, llm.engine.runner.programs.functions.weights, strict=True))
    shared = {path for path, leaf in leaves.items() if held[path] is leaf}
    assert shared == {path for path in leaves if path.endswith(("o_proj/kernel", "down_proj/kernel", "scale"))}
    assert f"{len(leaves) - len(shared)} of {len(leaves)} weights were copied to lie as 2 devices need them" in caplog.text
    assert_like_one_device(answers(llm.engine, ASKS), answers(engine_of(dummy_model(), 1), ASKS))


def test_read_weights_are_cut_and_used_as_they_are(tmp_path: Path):
    golden = load_golden("qwen3_tied")
    loaded = load_files(find_model(golden.weights), skip_tokenizer_init=True, dtype="float32")
    assert isinstance(loaded.module, Decoder)
    engine = engine_of(loaded.module, 2, max_model_len=48, dtype="float32")
    read = engine.read_weights(golden.weights)
    assert isinstance(read, ShardedModel)
    engine.update_params(read)
    functions = engine.runner.programs.functions
    assert all(x is read.weights[path] for path, x in zip(functions.paths, functions.weights, strict=True))
    assert isinstance(engine, Engine) and jnp.float32 == functions.dtype

"""jaxserve.cli.convert: Hugging Face and GGUF to Orbax and back, bit for bit; and what `LLM` makes of the result."""

import dataclasses
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from checkpoints import orbax
from checkpoints.gguf import GGUFReader
from checkpoints.huggingface import SafetensorsReader
from jaxserve import LLM, BucketPlan, SamplingParams
from jaxserve.models import named_leaves
from jaxserve.models.loading import load_model
from tests import alphabet_model
from tests.alphabet_model import after, ids
from tests.checkpoints.gguf_files import write_gguf
from tests.goldens.golden import load_golden
from tests.selection import slow_unless

ROOT = Path(__file__).parents[2]


def convert(*given: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxserve.cli.convert", *map(str, given)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def tensors(reader) -> dict[str, np.ndarray]:
    return {key: reader.read(key) for key in reader.keys()}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, x in found.items():
        assert (x.dtype, x.shape) == (expected[key].dtype, expected[key].shape), key
        np.testing.assert_array_equal(x.view(np.uint8), expected[key].view(np.uint8), err_msg=key)


@pytest.fixture
def folder(tmp_path) -> Path:
    """bfloat16 weights, but for norms in float32: both dtypes come through."""
    import ml_dtypes

    kept = {k: x if x.ndim == 1 else x.astype(ml_dtypes.bfloat16) for k, x in alphabet_model.weights().items()}
    return alphabet_model.save(tmp_path / "original", tensors=kept, torch_dtype="float32")


@pytest.mark.slow
def test_hugging_face_to_orbax_and_back(tmp_path, folder):
    done = convert(f"--model={folder}", f"--output={tmp_path / 'orbax'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'orbax' / '1'}: ")
    done = convert(f"--model={tmp_path / 'orbax'}", f"--output={tmp_path / 'back'}", "--max_shard_gb=2e-5")
    assert done.returncode == 0, done.stderr
    assert_equal(tensors(SafetensorsReader(tmp_path / "back")), tensors(SafetensorsReader(folder)))
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        for made in (tmp_path / "orbax" / "1", tmp_path / "back"):
            assert (made / name).read_bytes() == (folder / name).read_bytes(), name

    done = convert(f"--model={tmp_path / 'orbax'}", f"--output={tmp_path / 'back'}")
    assert done.returncode == 1 and done.stderr.startswith(f"jaxserve convert: {tmp_path / 'back'} exists and is not empty")
    assert "Traceback" not in done.stderr

    plan = BucketPlan(decode=(2,), mixed=((8, 2),), head_rows=(2,))
    llm = LLM(tmp_path / "orbax", num_pages=16, bucket_plan=plan, compilation_cache_dir="")
    (output,) = llm.generate("tea", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert output.outputs[0].token_ids == ids(after("tea", 4))
    assert llm.engine.runner.programs.functions.dtype == np.float32


@pytest.mark.slow
def test_a_dtype_asked_for_is_in_the_config_too(tmp_path, folder):
    done = convert(f"--model={folder}", f"--output={tmp_path / 'half'}", "--dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "half" / "1" / "config.json").read_text())
    assert said["dtype"] == "bfloat16" and "torch_dtype" not in said
    loaded = load_model(tmp_path / "half")
    expected = load_model(folder, dtype="bfloat16")
    assert loaded.config.dtype == "bfloat16" and loaded.defaults == expected.defaults
    for path, x in named_leaves(loaded.module).items():
        np.testing.assert_array_equal(x, named_leaves(expected.module)[path], err_msg=path)


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen2", "llama", "qwen3_moe"])
def test_every_kind_of_weight_goes_there_and_back(name, tmp_path):
    """Biases, q and k norms, tied embeddings, experts."""
    from checkpoints import convert as steps
    from jaxserve.models import Decoder, ModelConfig, hf_tensors, ignorable_keys, key_table

    golden = load_golden(name)
    config, reader = ModelConfig.from_hf(golden.config_path), SafetensorsReader(golden.weights)
    table = key_table(config, reader.keys())
    abstract = steps.stored_dtypes(reader, named_leaves(Decoder.abstract(config)), table)
    version = steps.to_orbax(reader, abstract, table, tmp_path / "orbax", {}, ignore=ignorable_keys(config))
    steps.to_huggingface(version, lambda path, x: hf_tensors(config, path, x), tmp_path / "back")
    assert_equal(tensors(SafetensorsReader(tmp_path / "back")), tensors(reader))


@pytest.mark.parametrize("quantised", slow_unless(bool, [False, True]))
def test_gguf_to_orbax(tmp_path, quantised):
    """What is quantised becomes bfloat16; the tokenizer and the defaults are those of the file."""
    import gguf

    path, kind, rng = tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0, np.random.default_rng(0)
    shapes = {"token_embd.weight": (vocabulary_size_of(tmp_path), 32), "blk.1.ffn_gate.weight": (64, 32)}
    data = {name: gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind) for name, shape in shapes.items()}
    write_gguf(path, "llama", tensors={name: (x, kind) for name, x in data.items()} if quantised else None)
    done = convert(f"--model={path}", f"--output={tmp_path / 'orbax'}")
    assert done.returncode == 0, done.stderr
    made, expected = load_model(tmp_path / "orbax"), load_model(path)
    said = dataclasses.replace(expected.config, dtype="bfloat16" if quantised else "float32")
    assert (made.config, made.defaults) == (said, expected.defaults)
    leaves = named_leaves(made.module)
    for name, x in named_leaves(expected.module).items():
        assert leaves[name].dtype == x.dtype == ("bfloat16" if quantised else "float32")
        np.testing.assert_array_equal(leaves[name], x, err_msg=name)
    text = "hello world 1234 's\n\nå®<|turn|>"
    assert made.tokenizer is not None and expected.tokenizer is not None
    assert made.tokenizer.encode(text) == expected.tokenizer.encode(text)
    assert made.tokenizer.special_tokens == expected.tokenizer.special_tokens
    assert made.tokenizer.chat_templates == expected.tokenizer.chat_templates


@pytest.mark.slow
def test_the_first_layers_alone(tmp_path):
    """They are the original's, and so is what lies around them."""
    tensors = alphabet_model.weights(num_layers=3)
    tensors |= {f"model.layers.{i}.mlp.up_proj.weight": tensors[f"model.layers.{i}.mlp.up_proj.weight"] + i for i in range(3)}
    folder = alphabet_model.save(tmp_path / "original", tensors=tensors, num_hidden_layers=3)
    done = convert(f"--model={folder}", f"--output={tmp_path / 'draft'}", "--num_layers=2")
    assert done.returncode == 0, done.stderr
    made, whole = load_model(tmp_path / "draft"), load_model(folder)
    assert made.config == dataclasses.replace(whole.config, num_layers=2, sliding_windows=whole.config.sliding_windows[:2])
    kept, leaves = named_leaves(made.module), named_leaves(whole.module)
    assert kept.keys() == {path for path in leaves if not path.startswith("layers/2/")}
    for path, x in kept.items():
        np.testing.assert_array_equal(x, leaves[path], err_msg=path)
    assert made.tokenizer is not None and whole.tokenizer is not None
    assert made.tokenizer.vocab_size == whole.tokenizer.vocab_size
    done = convert(f"--model={folder}", f"--output={tmp_path / 'more'}", "--num_layers=99")
    assert done.returncode == 1 and "--num_layers=99: " in done.stderr and not (tmp_path / "more").exists()


def vocabulary_size_of(folder: Path) -> int:
    write_gguf(folder / "plain.gguf", "llama")
    return GGUFReader(folder / "plain.gguf").shape("model.embed_tokens.weight")[0]


def test_a_hugging_face_folder_is_written_a_shard_at_a_time(tmp_path):
    """The copies, which numpy reports to tracemalloc, are at no time those of the whole model."""
    from checkpoints import convert as steps

    leaves = {f"layers/{i}/kernel": np.full((512, 256), i, np.float32) for i in range(24)}  # 0.5 MiB each
    version = orbax.save(tmp_path / "orbax", leaves)

    def transposed(path, x):
        tracemalloc.start()  # what was read before is not counted; again is no harm
        return {path: x.T}

    steps.to_huggingface(version, transposed, tmp_path / "back", max_shard_bytes=2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2**20 <= peak < 5 * 2**20
    assert_equal(tensors(SafetensorsReader(tmp_path / "back")), {path: np.ascontiguousarray(x.T) for path, x in leaves.items()})


@pytest.mark.slow
def test_what_makes_no_sense_is_refused(tmp_path, folder):
    weights = folder / "model.safetensors"
    for name in ("bare", "odd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights.read_bytes())
    (tmp_path / "odd" / "config.json").write_text('{"architectures": ["Mamba"]}')
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    for given, message in (
        ("nothing", "is not a file or folder here"),
        ("bare", "has no config.json"),
        ("odd", "Mamba"),
        ("model.gguf", "is not a GGUF file"),
    ):
        done = convert(f"--model={tmp_path / given}", f"--output={tmp_path / 'out'}")
        assert done.returncode == 1 and done.stderr.startswith("jaxserve convert: ") and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
    done = convert(f"--model={folder}", f"--output={tmp_path / 'out'}", "--max_shard_gb=1")
    assert done.returncode == 1 and "--max_shard_gb is for Hugging Face folders" in done.stderr
    version = orbax.save(tmp_path / "orbax", {"kernel": np.zeros(3, np.float32)})
    for flag, message in (
        ("--keep=2", "--keep is for Orbax's versions"),
        ("--dtype=float32", "--dtype is for conversions to Orbax"),
        ("--num_layers=1", "--num_layers is for conversions to Orbax"),
    ):
        done = convert(f"--model={version}", f"--output={tmp_path / 'out'}", flag)
        assert done.returncode == 1 and message in done.stderr and not (tmp_path / "out").exists()

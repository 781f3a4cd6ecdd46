"""From a model's name to module, defaults and tokenizer; what is wrong with a checkpoint is said, all at once."""

import numpy as np
import pytest

from checkpoints.weights import WeightsError
from jaxserve.models import ModelConfig, named_leaves, transpose_kernels
from jaxserve.models.files import find_model
from jaxserve.models.loading import load_model, random_model
from jaxserve.text.tokenizer import Tokenizer
from tests import alphabet_model
from tests.alphabet_model import BOS, CONFIG, EOS, SPECIALS, ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return alphabet_model.save(
        tmp_path_factory.mktemp("alphabet"), generation_config={"temperature": 0.5, "eos_token_id": [256, 258]}
    )


def test_a_folder(folder):
    loaded = load_model(folder)
    assert loaded.config == ModelConfig.from_hf(CONFIG) and loaded.module.config == loaded.config
    assert loaded.defaults.temperature == 0.5 and loaded.defaults.eos_token_ids == (256, 258)
    assert loaded.tokenizer is not None and loaded.tokenizer.encode("né") == ids("né")
    assert loaded.tokenizer.special_tokens == {"eos_token": EOS, "bos_token": BOS}
    embedding = named_leaves(loaded.module)["embed_tokens/embedding"]
    np.testing.assert_array_equal(embedding, alphabet_model.weights()["model.embed_tokens.weight"])


def test_eos_comes_from_the_config_where_there_are_no_generation_defaults(tmp_path):
    folder = alphabet_model.save(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    assert load_model(str(folder), skip_tokenizer_init=True).defaults.eos_token_ids == (SPECIALS[EOS],)


@pytest.mark.parametrize(
    ("saved", "asked", "got"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        (None, "auto", "bfloat16"),
        ("float32", "float16", "float16"),
    ],
)
def test_dtype(tmp_path, saved, asked, got):
    folder = alphabet_model.save(tmp_path / "model", torch_dtype=saved)
    module = load_model(folder, dtype=asked, skip_tokenizer_init=True).module
    assert {str(leaf.dtype) for leaf in named_leaves(module).values()} == {got}


@pytest.mark.parametrize("tied", [False, True])
def test_kernels_are_loaded_transposed_as_they_are_transposed_later(tmp_path, tied):
    saved = alphabet_model.save(tmp_path / "model", tie_word_embeddings=tied)
    here = named_leaves(load_model(saved, transposed=True, skip_tokenizer_init=True).module)
    later = named_leaves(transpose_kernels(load_model(saved, skip_tokenizer_init=True).module))
    assert list(here) == list(later) and ("lm_head/weight" in here) != tied and "layers/0/attention/qkv_proj/weight" in here
    for path in here:
        np.testing.assert_array_equal(here[path], later[path], err_msg=path)


def test_a_wrong_dtype_is_refused(folder):
    for dtype in ("int8", "fp16", ""):
        with pytest.raises(ValueError, match=f"dtype={dtype!r} must be one of auto, bfloat16, float16, float32"):
            load_model(folder, dtype=dtype)
    with pytest.raises(ValueError, match="dtype='auto' must be one of bfloat16"):
        random_model(CONFIG, dtype="auto")


def test_all_missing_extra_and_misshapen_tensors_are_listed(tmp_path):
    tensors = alphabet_model.weights()
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((3, 3), np.float32)
    tensors["model.layers.1.surplus.weight"] = np.zeros(1, np.float32)
    with pytest.raises(WeightsError) as error:
        load_model(alphabet_model.save(tmp_path / "model", tensors=tensors))
    for name in ("missing: model.norm", "missing: model.layers.0.mlp.up_proj", "self_attn.k_proj", "layers.1.surplus"):
        assert name in str(error.value)


def test_an_architecture_that_is_not_supported_is_named(tmp_path):
    folder = alphabet_model.save(tmp_path / "model", architectures=["MambaForCausalLM"])
    with pytest.raises(NotImplementedError, match="MambaForCausalLM; supported: LlamaForCausalLM"):
        load_model(folder)


def test_names_that_lead_nowhere(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="no/such/model/here"):
        load_model("no/such/model/here")
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
        load_model(tmp_path / "missing.gguf")
    with pytest.raises((FileNotFoundError, ValueError), match="config.json"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="no/such/tokenizer/here"):
        load_model(folder, tokenizer="no/such/tokenizer/here")
    with pytest.raises(ValueError, match="revision='main' needs a Hugging Face id"):
        load_model(folder, revision="main")


def test_tokenizers(tmp_path, folder):
    bare = alphabet_model.save(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ValueError, match=r"bare has no tokenizer.json.*\(give tokenizer=, or skip_tokenizer_init=True"):
        load_model(bare)
    assert load_model(bare, skip_tokenizer_init=True).tokenizer is None
    given = Tokenizer(alphabet_model.backend())
    assert load_model(bare, tokenizer=given).tokenizer is given
    there = load_model(bare, tokenizer=folder).tokenizer
    assert there is not None and there.eos_token_id == SPECIALS[EOS]
    with pytest.raises(ValueError, match="skip_tokenizer_init=True contradicts tokenizer="):
        load_model(bare, tokenizer=given, skip_tokenizer_init=True)


def test_a_fingerprint_tells_checkpoints_of_one_shape_apart(tmp_path):
    """Copies have the same, wherever they lie; one byte at a file's end, or another file's name, make another."""
    weights = alphabet_model.weights()
    one, copy = (find_model(alphabet_model.save(tmp_path / name, tensors=weights)) for name in ("one", "copy"))
    assert one.fingerprint() == copy.fingerprint() and len(one.fingerprint()) == 12
    file = next(copy.path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert one.fingerprint() != copy.fingerprint()


def test_a_digest_reads_every_byte(tmp_path):
    """Two checkpoints that differ in one byte between a fingerprint's samples have one fingerprint and two digests."""
    tensors = {**alphabet_model.weights(), "unused": np.zeros(1 << 17, np.float32)}
    one, copy = (find_model(alphabet_model.save(tmp_path / name, tensors=tensors)) for name in ("one", "copy"))
    assert one.digest() == copy.digest() and len(one.digest()) == 64
    file = next(copy.path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 6] ^= 1
    file.write_bytes(content)
    assert one.fingerprint() == copy.fingerprint() and one.digest() != copy.digest()

import json

import pytest

from jaxserve.models.generation_defaults import GenerationDefaults
from jaxserve.sampling_params import SamplingParams
from tests.goldens.golden import load_golden


def write(folder, config, generation):
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return GenerationDefaults.from_hf(folder)


def test_qwen3_has_two_eos_ids_and_recommends_sampling():
    defaults = GenerationDefaults.from_hf(load_golden("qwen3_tied").weights)
    assert defaults.eos_token_ids == (11, 7)  # the order of generation_config.json, not of config.json
    assert defaults.bos_token_id == 3 and defaults.pad_token_id == 0  # only config.json has these
    assert defaults.sampling() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert SamplingParams(**defaults.sampling()).top_k == 20


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, ((5,), None, None)),
        ({"eos_token_id": [5, 6], "bos_token_id": 1}, {}, ((5, 6), 1, None)),
        ({"eos_token_id": 5}, {"eos_token_id": 0, "pad_token_id": 4}, ((0,), None, 4)),
        (None, {"eos_token_id": [8], "bos_token_id": 0}, ((8,), 0, None)),
        ({"eos_token_id": 5, "bos_token_id": 1}, {"eos_token_id": None, "bos_token_id": 2}, ((5,), 2, None)),
        (None, None, ((), None, None)),
    ],
)
def test_token_ids(tmp_path, config, generation, expected):
    defaults = write(tmp_path, config, generation)
    assert (defaults.eos_token_ids, defaults.bos_token_id, defaults.pad_token_id) == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"do_sample": True}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}, {"temperature": 0.0}),
        ({"do_sample": False, "max_new_tokens": 8}, {"temperature": 0.0, "max_tokens": 8}),
        ({"temperature": 0.7, "top_k": 0}, {"temperature": 0.7, "top_k": 0}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05},
        ),
        ({"max_length": 4096}, {}),
    ],
)
def test_sampling(tmp_path, generation, expected):
    assert write(tmp_path, {}, generation).sampling() == expected


def test_from_dicts_is_from_hf_without_files():
    folder = load_golden("qwen3_tied").weights
    dicts = [json.loads((folder / name).read_text()) for name in ("generation_config.json", "config.json")]
    assert GenerationDefaults.from_dicts(*dicts) == GenerationDefaults.from_hf(folder)


def test_what_is_not_applied_is_named(tmp_path):
    neutral = {
        "num_beams": 1,
        "typical_p": 1.0,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": None,
        "bad_words_ids": [],
    }
    assert write(tmp_path, {}, neutral).not_applied == ()
    said = {"num_beams": 4, "suppress_tokens": [3], "guidance_scale": 1.5, "top_p": 0.5}
    assert set(write(tmp_path, {}, said).not_applied) == {"num_beams", "suppress_tokens", "guidance_scale"}


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        GenerationDefaults.from_hf(tmp_path / "nowhere")

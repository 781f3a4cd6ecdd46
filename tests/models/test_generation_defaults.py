"""What a checkpoint recommends for generating with it: taken, or named as not applied; held against transformers' reading."""

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


# Fields of transformers' GenerationConfig that leave the tokens of one greedy or sampled continuation as they are: how it is
# computed, what else comes back, drafts, and what the engine bounds itself.
NO_EFFECT = {
    *("max_length", "max_time", "early_stopping", "num_return_sequences", "renormalize_logits", "remove_invalid_values"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "speculation_type"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("decoder_start_token_id", "encoder_no_repeat_ngram_size"),  # of encoder-decoder models
    "token_healing",  # changes the prompt, which is the caller's
    "transformers_version",
    "_from_model_config",
}


def test_every_field_of_generation_config_is_taken_or_named_or_has_no_effect():
    from transformers import GenerationConfig

    asked = {name: "asked" for name in GenerationConfig().to_dict() if name not in NO_EFFECT and "token_id" not in name}
    defaults = GenerationDefaults.from_dicts(asked, {})
    taken = {name for name in asked if getattr(defaults, name, None) == "asked"}
    left_out = asked.keys() - taken - set(defaults.not_applied) - {"forced_bos_token_id", "forced_eos_token_id"}
    assert len(taken) == 7 and not left_out
    assert set(defaults.not_applied) <= asked.keys()


def test_the_values_are_those_that_transformers_reads(tmp_path):
    from transformers import GenerationConfig

    says = {"eos_token_id": [8, 9], "bos_token_id": 1, "do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}
    defaults = write(tmp_path, {}, says | {"min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 7})
    theirs = GenerationConfig.from_pretrained(tmp_path, local_files_only=True)
    assert list(defaults.eos_token_ids) == theirs.eos_token_id and defaults.bos_token_id == theirs.bos_token_id
    for name in ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "pad_token_id"):
        assert getattr(defaults, name) == getattr(theirs, name)

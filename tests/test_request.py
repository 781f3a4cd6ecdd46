"""SamplingParams: what is accepted, refused and normalised; when a request ends."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jaxserve.request import Request, StoredPrefix
from jaxserve.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_PATTERN_SIZE,
    RepetitionDetectionParams,
    SamplingParams,
)

GOOD = [
    {},
    {"temperature": 0},
    {"temperature": 1e-30},
    {"temperature": 100},
    {"temperature": np.float32(0.5)},
    {"top_p": 1e-6},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 10**9},
    {"top_k": np.int64(5)},
    {"min_p": 1.0},
    {"n": np.int32(3)},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"seed": np.uint64(2**64 - 1)},
    {"max_tokens": None},
    {"max_tokens": 1},
    {"max_tokens": None, "min_tokens": 10**6},
    {"min_tokens": 16},
    {"stop": "x"},
    {"stop": ["x", "yz"]},
    {"stop": []},
    {"stop_token_ids": [0, np.int64(7)]},
    {"stop_token_ids": None},
    {"logprobs": 0},
    {"logprobs": MAX_LOGPROBS},
    {"detokenize": False},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": np.float32(0.5)},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100},
    {"logit_bias": {}, "bad_words": [], "bad_words_token_ids": (), "allowed_token_ids": None},
    {"logit_bias": {np.int64(3): 100, 0: -100.0}},
    {"allowed_token_ids": [1, 1, np.int32(2)]},
    {"bad_words": ["x", " y z"]},
    {"bad_words_token_ids": [[1], (2, np.int64(3))]},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": MAX_LOGPROBS},
    {"repetition_detection": {"max_pattern_size": np.int32(4), "min_count": 2}},
    {"repetition_detection": RepetitionDetectionParams(max_pattern_size=MAX_PATTERN_SIZE, min_pattern_size=3, min_count=5)},
]
BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "0.7"),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_p", [0.9]),
    ("top_k", -2),
    ("top_k", 5.0),
    ("top_k", False),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", "0"),
    ("n", 0),
    ("n", 1.0),
    ("n", True),
    ("n", None),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("seed", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", True),
    ("max_tokens", "16"),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than the default max_tokens
    ("min_tokens", None),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", b"x"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 7),
    ("stop_token_ids", "7"),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("logprobs", True),
    ("ignore_eos", 1),
    ("ignore_eos", "no"),
    ("include_stop_str_in_output", None),
    ("skip_special_tokens", 0),
    ("detokenize", "yes"),
    ("presence_penalty", 2.1),
    ("presence_penalty", None),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", True),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 0.0099),  # the device holds float32, where 1e-60 would be 0
    ("repetition_penalty", 100.1),
    ("repetition_penalty", math.inf),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {5: None}),
    ("logit_bias", [5]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", ["1"]),
    ("allowed_token_ids", 3),
    ("bad_words", "word"),
    ("bad_words", ["ok", ""]),
    ("bad_words", [" "]),
    ("bad_words", [3]),
    ("bad_words_token_ids", [3]),
    ("bad_words_token_ids", [[]]),
    ("bad_words_token_ids", [[2**31]]),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", True),
    ("logprob_token_ids", 3),
    ("logprob_token_ids", "ab"),
    ("logprob_token_ids", [1, -1]),
    ("logprob_token_ids", [2**31]),
    ("logprob_token_ids", [True]),
    ("repetition_detection", 3),
]
TOO_MUCH = [
    (
        "logit_bias",
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
        f"{MAX_LOGIT_BIAS + 1} entries must have at most {MAX_LOGIT_BIAS}",
    ),
    ("logprob_token_ids", [1] * (MAX_LOGPROB_TOKEN_IDS + 1), f"{MAX_LOGPROB_TOKEN_IDS + 1} token ids must have at most"),
    ("bad_words_token_ids", [[1]] * (MAX_BAD_WORDS + 1), f"{MAX_BAD_WORDS + 1} token sequences"),
    ("bad_words_token_ids", [[1] * (MAX_BAD_WORD_TOKENS + 1)], f"longest of {MAX_BAD_WORD_TOKENS + 1} tokens"),
]
NO_PATTERNS = [
    ({"max_pattern_size": -1}, "max_pattern_size must be in"),
    ({"max_pattern_size": MAX_PATTERN_SIZE + 1, "min_count": 2}, "max_pattern_size must be in"),
    ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size must be in"),
    ({"min_pattern_size": 1}, "min_pattern_size must be in"),
    ({"max_pattern_size": 3}, "min_count must be >= 2"),
    ({"max_pattern_size": 3, "min_count": True}, "must be integers"),
    ({"max_pattern_size": 3, "count": 2}, "unknown fields count"),
]
NO_FORM = [
    ("structured_outputs", {"json": "{}", "regex": "a"}, "exactly one of"),
    ("structured_outputs", {"jsonn": "{}"}, "unknown fields jsonn"),
    ("structured_outputs", "a", "must be a StructuredOutputsParams"),
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_accepts(values):
    SamplingParams(**values)


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_refuses_and_names_parameter_and_value(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(f"{name}={value!r} must")


@pytest.mark.parametrize(("name", "value", "message"), TOO_MUCH, ids=lambda x: x if isinstance(x, str) else "")
def test_refuses_more_than_the_device_has_room_for(name, value, message):
    with pytest.raises(ValueError, match=f"^{name}.*{message}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("given", "message"), NO_PATTERNS, ids=str)
def test_refuses_patterns_that_no_output_could_have(given, message):
    with pytest.raises(ValueError, match=f"^repetition_detection: .*{message}"):
        SamplingParams(repetition_detection=given)


def test_no_pattern_is_no_detection():
    assert SamplingParams(repetition_detection={}).repetition_detection is None


@pytest.mark.parametrize(("name", "value", "message"), NO_FORM, ids=str)
def test_refuses_what_is_no_form_of_output(name, value, message):
    with pytest.raises(ValueError, match=f"^{name}.*{message}"):
        SamplingParams(**{name: value})


def test_every_parameter_has_a_bad_value_here():
    tried = {name for name, _ in BAD} | {name for name, _, _ in NO_FORM}
    assert tried == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("logprobs", [0, 1, 3, True, 2.0, -1])
def test_given_ids_come_in_place_of_the_likeliest(logprobs):
    with pytest.raises(ValueError, match=rf"^logprobs={logprobs} must be None or 2, the number of logprob_token_ids"):
        SamplingParams(logprob_token_ids=[5, 6], logprobs=logprobs)


def test_given_ids_ask_for_logprobs():
    ids: Any = np.arange(MAX_LOGPROB_TOKEN_IDS)
    many = SamplingParams(logprob_token_ids=ids, logprobs=MAX_LOGPROB_TOKEN_IDS)
    assert many.logprob_token_ids == tuple(range(128)) and many.returns_logprobs and hash(many) == hash(many.with_())
    assert SamplingParams(logprob_token_ids=[7]).returns_logprobs and SamplingParams(logprobs=0).returns_logprobs
    none = SamplingParams(logprob_token_ids=[])
    assert none.logprob_token_ids is None and not none.returns_logprobs


def test_an_unknown_parameter_is_named():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # pyright: ignore[reportCallIssue]


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="needs detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_values_become_plain_python():
    given: dict[str, Any] = {"n": np.int64(2), "temperature": np.float32(0.5), "seed": np.uint64(2**63), "max_tokens": np.int32(9)}
    params = SamplingParams(**given, top_k=-1, stop="end", stop_token_ids=[np.int64(3)])  # pyright: ignore[reportArgumentType]
    assert (params.n, params.temperature, params.top_k, params.seed) == (2, 0.5, 0, 2**63)
    assert params.stop == ("end",) and params.stop_token_ids == (3,) and params.max_tokens == 9
    kinds = [type(x) for x in (params.n, params.temperature, params.seed, params.max_tokens, *(params.stop_token_ids or ()))]
    assert kinds == [int, float, int, int, int]
    assert hash(params) == hash(params.with_())
    ids: dict[str, Any] = {"allowed_token_ids": np.arange(2), "bad_words_token_ids": [[np.int64(4)]]}
    edited = SamplingParams(logit_bias={np.int64(3): 1}, **ids)  # pyright: ignore[reportArgumentType]
    assert (edited.logit_bias, edited.allowed_token_ids, edited.bad_words_token_ids) == ({3: 1.0}, (0, 1), ((4,),))
    assert hash(edited) == hash(edited.with_())


def test_with_changes_a_copy_and_checks_it():
    params = SamplingParams(temperature=0.3, stop="x")
    changed = params.with_(max_tokens=99)
    assert (changed.temperature, changed.stop, changed.max_tokens, params.max_tokens) == (0.3, ("x",), 99, 16)
    with pytest.raises(ValueError, match="max_tokens=0"):
        params.with_(max_tokens=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("params", "output", "end"),
    [
        ({}, [5], None),
        ({}, [5, 2], ("stop", None)),  # 2 is eos
        ({"ignore_eos": True}, [5, 2], None),
        ({"stop_token_ids": [7]}, [5, 7], ("stop", 7)),
        ({"stop_token_ids": [2]}, [2], ("stop", None)),  # eos comes before an equal stop id
        ({"stop_token_ids": [2], "ignore_eos": True}, [2], ("stop", 2)),
        ({"min_tokens": 2}, [5, 2], None),
        ({"min_tokens": 2}, [5, 5, 2], ("stop", None)),
        ({"max_tokens": 3}, [5, 5, 5], ("length", None)),
        ({"max_tokens": 3}, [5, 5, 2], ("stop", None)),  # a stop comes before a length
    ],
)
def test_end(params, output, end):
    request = Request("r", [1, 2, 3], SamplingParams(**params), eos_token_ids=frozenset({2}))
    request.max_total_tokens = 3 + (request.params.max_tokens or 0)
    request.token_ids += output
    assert request.end() == end


def test_a_stored_prefix_as_text():
    prefix = StoredPrefix(12, bytes(range(32)))
    assert StoredPrefix.parse(str(prefix)) == prefix and str(prefix).startswith("12:0001")
    for text in (
        "",
        "12",
        "0:" + "00" * 32,
        "-1:" + "00" * 32,
        "1:" + "00" * 31,
        "1:" + "zz" * 32,
        "1:" + "00" * 33,
        "9" * 10 + ":" + "00" * 32,
    ):
        with pytest.raises(ValueError):
            StoredPrefix.parse(text)

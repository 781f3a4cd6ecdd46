"""Texts from token ids: stop strings (against a character-by-character search), what is held back, logprobs, samples."""

from itertools import accumulate

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxserve.outputs import Logprob, RequestMetrics, RequestOutput
from jaxserve.request import EngineOutput, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.text_outputs import TextOutputs
from jaxserve.text.tokenizer import Tokenizer

WORDS = ["a", "b", "c", "ab", "bc", "abc", "cab", "aabb", "Ã", "©"]  # the last two: the bytes of é
EOS = len(WORDS)


def tokenizer() -> Tokenizer:
    """A token a word, cut as the test likes, and a special </s>."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend)


TOKENIZER = tokenizer()


class Texts:
    """One request in a TextOutputs, and what it asked the engine to finish."""

    def __init__(self, n: int = 1, tokenizer: Tokenizer | None = TOKENIZER, prompt: tuple[int, ...] = (0,), **params):
        sampling = SamplingParams(n=n, max_tokens=None, **params)
        self.finished: list[tuple[Request, str, str]] = []
        self.texts = TextOutputs(tokenizer, lambda *args: self.finished.append(args))
        self.requests = [
            Request(
                f"r/{i}",
                list(prompt),
                sampling,
                eos_token_ids=frozenset([EOS]),
                sample_index=i,
                parent_id="r",
                metrics=RequestMetrics(float(i)),
            )
            for i in range(n)
        ]
        self.texts.add(self.requests, "the prompt")

    def put(self, *token_ids: int, sample: int = 0, reason: str | None = None, **given) -> RequestOutput | None:
        outputs = self.texts.process([EngineOutput(self.requests[sample], list(token_ids), finish_reason=reason, **given)])
        return outputs[0] if outputs else None

    def run(self, token_ids: list[int], cuts: int = 1) -> tuple[list[str], RequestOutput]:
        """The text after each step of `cuts` tokens, the last of which ends by length; stops where the sample ends."""
        seen: list[str] = []
        while True:
            step, token_ids = token_ids[:cuts], token_ids[cuts:]
            output = self.put(*step, reason=None if token_ids else "length")
            assert output is not None
            seen.append(output.outputs[0].text)
            if output.finished:
                return seen, output


def first_stop(token_ids: list[int], stops: list[str], min_tokens: int) -> tuple[str, int, int] | None:
    """The stop string that is complete first when characters come one by one; of several complete at once, the longest.

    Returns the string, where it starts, and the number of tokens up to its end. A character of the first min_tokens completes none.
    """
    lengths = [0, *accumulate(len(WORDS[i]) for i in token_ids)]
    text = "".join(WORDS[i] for i in token_ids)
    for end in range(1, len(text) + 1):
        num_tokens = next(n for n, length in enumerate(lengths) if length >= end)
        found = [s for s in stops if text[:end].endswith(s)]
        if found and num_tokens > min_tokens:
            stop = max(found, key=len)
            return stop, end - len(stop), num_tokens
    return None


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 7), min_size=1, max_size=14),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
    cuts=st.integers(1, 4),
)
def test_stop_strings_are_found_as_if_characters_came_one_by_one(tokens, stops, include, min_tokens, cuts):
    texts = Texts(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    seen, output = texts.run(tokens, cuts)
    sample, whole = output.outputs[0], "".join(WORDS[i] for i in tokens)
    expected = first_stop(tokens, stops, min_tokens)
    if expected is None:
        assert (sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason) == (whole, tokens, "length", None)
        assert not texts.finished
    else:
        stop, at, num_tokens = expected
        assert (sample.finish_reason, sample.stop_reason, sample.token_ids) == ("stop", stop, tokens[:num_tokens])
        assert sample.text == (whole[: at + len(stop)] if include else whole[:at])
        assert texts.finished == [(texts.requests[0], "stop", stop)]
    for earlier, later in zip(seen, seen[1:], strict=False):
        assert later.startswith(earlier), "text was shown and then taken back"


def test_what_may_become_a_stop_string_is_held_back():
    texts = Texts(stop=["bcbcX"])
    shown = [texts.put(0).outputs[0].text for _ in range(6)]  # type: ignore[union-attr]
    assert shown == ["", "", "", "", "a", "aa"]
    assert texts.put(0, reason="length").outputs[0].text == "a" * 7  # type: ignore[union-attr]


def test_nothing_is_held_back_where_the_stop_string_is_kept():
    texts = Texts(stop=["bcbcX"], include_stop_str_in_output=True)
    assert texts.put(3).outputs[0].text == "ab"  # type: ignore[union-attr]


def test_the_prompts_own_text_never_matches():
    texts = Texts(prompt=(0, 1), stop=["abc"])  # the prompt is "ab"
    assert texts.put(2, reason="length").outputs[0].finish_reason == "length"  # type: ignore[union-attr]


def test_output_after_a_stop_string_is_dropped():
    texts = Texts(stop=["c"])
    output = texts.put(0, 5, 1)
    assert output is not None and output.finished and output.outputs[0].token_ids == [0, 5] and output.outputs[0].text == "aab"
    assert texts.put(1) is None


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab</s>"),
        ({"skip_special_tokens": False}, "ab"),
    ],
)
def test_a_stop_token_is_among_the_ids_and_its_text_only_where_asked_for(params, text):
    texts = Texts(**params)
    texts.put(3)
    output = texts.put(EOS, reason="stop", stop_reason=None)
    assert output is not None and output.outputs[0].text == text
    assert output.outputs[0].token_ids == [3, EOS] and output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a</s>b")])
def test_special_tokens_in_the_middle(skip, text):
    assert Texts(skip_special_tokens=skip).run([0, EOS, 1])[1].outputs[0].text == text


def test_half_a_character_waits_for_the_other_half_and_is_replaced_at_the_end():
    e_acute = [8, 9]
    assert Texts().run([0, *e_acute, 1])[0] == ["a", "a", "aé", "aéb"]
    assert Texts().run([0, 8])[0] == ["a", "a\ufffd"]


@pytest.mark.parametrize("without", [{"detokenize": False}, {"tokenizer": None}])
def test_no_text_without_tokenizer_or_detokenize(without):
    texts = Texts(logprobs=0, **without)
    output = texts.put(0, reason="length", logprobs=[{0: Logprob(-1.0, 1)}])
    assert output is not None and output.outputs[0].text == "" and output.outputs[0].token_ids == [0]
    assert output.outputs[0].logprobs == [{0: Logprob(-1.0, 1, None)}]


def test_logprobs_get_their_text_and_add_up():
    texts = Texts(logprobs=1)
    texts.put(0, logprobs=[{0: Logprob(-1.5, 2), EOS: Logprob(-0.5, 1)}])
    output = texts.put(3, reason="length", logprobs=[{3: Logprob(-0.25, 1)}])
    assert output is not None
    assert output.outputs[0].logprobs == [
        {0: Logprob(-1.5, 2, "a"), EOS: Logprob(-0.5, 1, "</s>")},
        {3: Logprob(-0.25, 1, "ab")},
    ]
    assert output.outputs[0].cumulative_logprob == -1.75
    plain = Texts().put(0, reason="length")
    assert plain is not None and plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None


def test_tokens_that_logprobs_tell_again_are_decoded_once(monkeypatch):
    decoded: list[int] = []
    texts = Texts(tokenizer=(own := tokenizer()), logprob_token_ids=[1, 2, EOS])
    monkeypatch.setattr(own, "decode", lambda ids, **options: decoded.extend(ids) or Tokenizer.decode(own, ids, **options))
    for token in (0, 3, 0):
        output = texts.put(token, logprobs=[{i: Logprob(-1.0, 1) for i in (token, 1, 2, EOS)}])
        assert output is not None and output.outputs[0].logprobs is not None
        found = output.outputs[0].logprobs[-1]
        assert [x.decoded_token for x in found.values()] == [WORDS[token], "b", "c", "</s>"]
    assert sorted(decoded) == [0, 1, 2, 3, EOS]


def test_samples_grow_apart_and_the_request_ends_with_the_last():
    texts = Texts(n=3, stop=["c"])
    for i, request in enumerate(texts.requests):
        assert request.metrics is not None
        request.num_cached_tokens = 16 * i
        request.metrics.first_token_time, request.metrics.finished_time = 10.0 - i, 20.0 + i
        request.metrics.num_preemptions = i
    first = texts.put(0, sample=2)
    assert first is not None and [o.text for o in first.outputs] == ["", "", "a"] and not first.finished
    texts.put(5, sample=1)
    texts.put(0, 1, sample=0, reason="length")
    last = texts.put(1, sample=2, reason="length")
    assert last is not None and last is first and last.finished and [o.index for o in last.outputs] == [0, 1, 2]
    assert [(o.text, o.finish_reason, o.stop_reason) for o in last.outputs] == [
        ("ab", "length", None),
        ("ab", "stop", "c"),
        ("ab", "length", None),
    ]
    assert last.num_cached_tokens == 0 and last.prompt == "the prompt" and last.prompt_token_ids == [0]
    assert last.metrics == RequestMetrics(0.0, None, 8.0, 22.0, 3)


def test_an_error_keeps_the_text_so_far():
    texts = Texts()
    texts.put(3)
    output = texts.put(reason="error", stop_reason="NaN")
    assert output is not None and output.finished
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("ab", "error", "NaN")


def test_discarded_requests_are_forgotten():
    texts = Texts()
    texts.texts.discard(["r", "never there"])
    assert texts.put(0) is None

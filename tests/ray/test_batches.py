"""The class for Ray Data's map_batches, which needs no Ray: batches as Ray Data gives them."""

import numpy as np
import pytest

from jaxserve.ray import Generate
from tests import alphabet_model
from tests.alphabet_model import after, ids

ENGINE = {"page_size": 4, "num_pages": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32, "warm_up": "first_use"}
PARAMS = {"max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(alphabet_model.save(tmp_path_factory.mktemp("alphabet")))


@pytest.fixture(scope="module")
def generate(folder):
    return Generate(folder, PARAMS, engine=ENGINE)


@pytest.mark.slow
def test_texts_token_ids_and_chats(generate):
    texts = list("abcdefghij")
    out = generate({"prompt": np.array(texts, object), "id": np.arange(10)})
    assert out["generated_text"].tolist() == [after(text, 5) for text in texts] and out["id"].tolist() == list(range(10))
    assert out["generated_token_ids"].tolist() == [ids(after(text, 5)) for text in texts]
    assert set(out["finish_reason"]) == {"length"} and set(out["error"]) == {""}
    out = generate({"prompt_token_ids": np.array([[97, 98], [99, 100]])})
    assert out["generated_text"].tolist() == [after("b", 5), after("d", 5)]
    out = generate({"messages": [[{"role": "user", "content": "x"}], np.array([{"role": "user", "content": "y"}], object)]})
    assert out["generated_text"].tolist() == [after("A", 5)] * 2


@pytest.mark.slow
def test_rows_that_can_not_be_run_are_reported(generate):
    rows = np.empty(4, object)
    rows[:] = [[97], [], [5000], [98]]
    out = generate({"prompt_token_ids": rows})
    assert out["generated_text"].tolist() == [after("a", 5), "", "", after("b", 5)]
    assert out["finish_reason"].tolist() == ["length", "error", "error", "length"]
    assert [bool(error) for error in out["error"]] == [False, True, True, False] and "5000" in out["error"][2]


def test_what_is_wrong_is_said(folder, generate):
    with pytest.raises(ValueError, match="one of the columns prompt, prompt_token_ids, messages; it has text"):
        generate({"text": np.array(["a"], object)})
    with pytest.raises(ValueError, match="n=2 must be 1"):
        Generate(folder, {"n": 2}, engine=ENGINE)
    with pytest.raises(ValueError, match="temperature"):
        Generate(folder, {"temperature": -1}, engine=ENGINE)

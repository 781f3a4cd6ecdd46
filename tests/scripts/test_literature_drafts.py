"""Published gains of drafts beside the prediction: the arithmetic of what is read off the sources."""

import pytest

from scripts.reproduce.literature_drafts import drafts, shares
from scripts.reproduce.published import EAGLE3_OF_VLLM


def test_shares_add_up_to_the_published_lengths():
    found = shares()
    assert found == sorted(found, reverse=True) and len(found) == 7
    for k, (length, _) in EAGLE3_OF_VLLM.items():
        assert 1 + sum(found[:k]) == pytest.approx(length)


def test_every_published_row_stands_beside_ours(tmp_path):
    text, data = drafts(tmp_path)
    rows = data["rows"]
    assert len(rows) == 6 + 9 + 3 == text.count("\n") - 2
    first = rows[0]
    assert (first["num_drafts"], first["tokens"]) == (2, pytest.approx(2.36))
    assert first["published_step_ms"] == pytest.approx(4.32 * 2.36), "milliseconds a token times tokens a step"
    assert rows[-1]["published_step_ms"] == pytest.approx(1e3 * 32 * 17 / 9538)
    assert rows[-1]["draft_seconds"] == 0, "replayed drafts cost nothing"

"""States of answers that are kept in a file: those that the target has, for batches of any lengths; and the order of batches."""

import errno
import os
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import named_leaves, with_leaves
from jaxserve.models.loading import load_model
from jaxserve.training import draft_chains
from jaxserve.training.answer_states import Answer, AnswerStates, padded_lengths, shuffled_batches, usable
from tests import alphabet_model


def answers(num: int) -> list[Answer]:
    """Of 4 to 15 tokens."""
    rng = np.random.default_rng(0)
    of = lambda n: rng.integers(3, 29, n).tolist()  # noqa: E731
    return [Answer(of(rng.integers(2, 6)), of(rng.integers(2, 11))) for _ in range(num)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_model(alphabet_model.save(tmp_path_factory.mktemp("alphabet")), skip_tokenizer_init=True).module


def test_answers_are_cut_and_those_too_short_left_out():
    some = [Answer([1] * 3, [2] * 9), Answer([1] * 5, [2] * 9), Answer([1], [2]), Answer([1] * 4, [2, 3])]
    assert usable(some, 6) == [Answer([1] * 3, [2] * 3), Answer([1] * 4, [2, 3])]


def test_batches_are_padded_to_what_answers_have():
    some = [Answer([1] * 3, [2] * n) for n in (1, 2, 10, 11, 22, 24, 26, 31)]
    assert padded_lengths(some, 40) == [16, 32, 40]
    assert padded_lengths(some, 34) == [16, 32, 34], "no longer than the longest may be"
    assert padded_lengths(some[-1:] * 9, 40) == [40], "a program for each"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_the_file_are_those_of_each_answer_alone(dtype, tmp_path, tmp_path_factory):
    model = alphabet_model.save(tmp_path_factory.mktemp("alphabet"))
    target, some = load_model(model, dtype=dtype, skip_tokenizer_init=True).module, answers(11)
    head = draft_chains.new_eagle3(target, np.arange(20), 0, some[0].prompt)
    given = {"length": 16, "batch_size": 4, "path": tmp_path / "states", "most_bytes": 2**20}
    states, told = AnswerStates(target, head, some, **given), []
    states.compute(told.append)
    assert told == [4, 8, 11]
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for chosen in ([0, 1, 2, 3], [7, 4, 10, 9]):
        batch, hidden = AnswerStates(target, head, some, **given).batch(chosen)  # another run, that finds the file
        assert hidden.dtype == jnp.dtype(dtype) and batch.tokens.shape[1] in (8, 16)
        for row, found, end, i in zip(batch.tokens, hidden, batch.ends, chosen, strict=True):
            tokens = some[i].prompt + some[i].output
            assert row[:end].tolist() == tokens
            alone = draft_chains.hidden_states(target, head, jnp.array([tokens]))[0]
            np.testing.assert_allclose(found[:end].astype(np.float32), np.asarray(alone, np.float32), tolerance, tolerance)
            assert not found[end:].any()
    states.delete()
    assert not [*tmp_path.iterdir()]


def test_what_would_take_too_much_or_was_cut_short_is_not_read(target, tmp_path):
    some = answers(5)
    head = draft_chains.new_medusa(target, 2, 0)
    given = {"length": 16, "batch_size": 2, "path": tmp_path / "states"}
    none = AnswerStates(target, head, some, **given, most_bytes=100)
    none.compute()
    assert not none.kept and not [*tmp_path.iterdir()]
    kept = AnswerStates(target, head, some, **given, most_bytes=2**20)
    kept.compute()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for (batch, there), (_, anew) in ((kept.batch(chosen), none.batch(chosen)) for chosen in ([0, 4], [2, 1])):
        for row, end in enumerate(batch.ends):
            np.testing.assert_allclose(there[row, :end], anew[row, :end], 1e-5, 1e-5)
    file.write_bytes(whole[:-4])
    again = AnswerStates(target, head, some, **given, most_bytes=2**20)
    again.compute()
    assert file.read_bytes() == whole
    file.with_name("states.partial").write_bytes(b"begun")
    none.compute()
    assert not [*tmp_path.iterdir()], "nobody goes on from it"


def test_the_file_of_other_answers_or_another_target_is_not_read(target, tmp_path):
    """Of the same size, as all are where answers are cut to one length."""
    some, head = answers(5), draft_chains.new_medusa(target, 2, 0)
    others = [Answer(prompt[::-1], output) for prompt, output in some]
    leaves = named_leaves(target)
    path = next(path for path in leaves if "q_proj" in path or "qkv" in path)
    other_target = with_leaves(target, leaves | {path: leaves[path] * 1.5})
    given: dict[str, Any] = {"length": 16, "batch_size": 2, "path": tmp_path / "states", "most_bytes": 2**20}
    AnswerStates(target, head, some, **given).compute()
    for of, which in ((target, others), (other_target, some), (target, some)):
        states = AnswerStates(of, head, which, **given)
        states.compute()
        batch, hidden = states.batch([0, 3])
        alone = draft_chains.hidden_states(of, head, jnp.array(batch.tokens))
        for row, wanted, end in zip(hidden, np.asarray(alone), batch.ends, strict=True):
            np.testing.assert_allclose(row[:end], wanted[:end], 1e-5, 1e-5)


def test_a_full_disk_is_said(target, tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    head = draft_chains.new_medusa(target, 2, 0)
    states = AnswerStates(target, head, answers(5), length=16, batch_size=2, path=tmp_path / "states", most_bytes=2**20)
    with pytest.raises(OSError, match=r"states\.partial: .* GiB \(No space left on device\).* lower states_gib"):
        states.compute()
    assert not [*tmp_path.iterdir()]


def test_an_epoch_has_every_answer_once_in_batches_of_like_lengths():
    some = answers(103)
    batches = shuffled_batches(some, 4, (0, 0))
    assert batches.shape == (25, 4) and max(Counter(batches.ravel().tolist()).values()) == 1
    assert (batches != shuffled_batches(some, 4, (0, 1))).any() and (batches == shuffled_batches(some, 4, (0, 0))).all()
    spread = lambda rows: np.mean([np.ptp([some[i].length for i in row]) for row in rows])  # noqa: E731
    assert spread(batches) < 0.3 * spread(np.random.default_rng(0).permutation(103)[:100].reshape(25, 4))
    lengths = [max(some[i].length for i in row) for row in batches]
    assert lengths != sorted(lengths), "short ones do not all come first"
    assert shuffled_batches(some[:2], 4, (0, 0)).shape == (1, 4)

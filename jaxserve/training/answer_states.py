"""What a target makes of the answers that a head is trained on: computed once and kept in a file, or anew for each batch.

Owns the lengths to which batches are padded, and the file. The target never changes while a head learns, so from the second time on
an answer is read. Knows nothing of losses or optimizers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.models import Decoder, named_leaves, with_leaves
from jaxserve.training import draft_chains
from jaxserve.training.draft_chains import Head

LENGTHS = 4  # that batches are padded to: each is one more program


class Answer(NamedTuple):
    """A prompt and what the target answered, as token ids."""

    prompt: list[int]
    output: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


class Batch(NamedTuple):
    """B sequences, padded with zeros; of arrays of numpy, or of jax in what is compiled."""

    tokens: Any  # i32[B, S]
    begins: Any  # i32[B]: where each answer begins
    ends: Any  # i32[B]


def usable(answers: Sequence[Answer], length: int) -> list[Answer]:
    """Those with two tokens or more of the answer within so many tokens, which are cut to them."""
    return [
        Answer(prompt, output[: length - len(prompt)])
        for prompt, output in answers
        if len(prompt) + 2 <= length and len(output) > 1
    ]


def make_batch(answers: Sequence[Answer], length: int) -> Batch:
    tokens, begins, ends = np.zeros((len(answers), length), np.int32), [], []
    for row, answer in zip(tokens, answers, strict=True):
        row[: answer.length] = answer.prompt + answer.output
        begins.append(len(answer.prompt))
        ends.append(answer.length)
    return Batch(tokens, np.array(begins, np.int32), np.array(ends, np.int32))


def padded_lengths(answers: Sequence[Answer], length: int) -> list[int]:
    """What batches are padded to: the quartiles of these answers' lengths, all of at most `length` tokens, as the next multiples of
    8, or `length`."""
    shares = np.arange(1, LENGTHS + 1) / LENGTHS
    found = np.quantile([answer.length for answer in answers], shares, method="higher")
    return sorted({min(int(-(-n // 8) * 8), length) for n in found})


class AnswerStates:
    """Batches of answers with the target's states of them.

    Args:
      target: stays as it is.
      head: says which states it reads.
      answers: as `usable` gives them.
      length: tokens of the longest.
      batch_size: sequences of a batch.
      path: of the file; one of other answers or another target is written anew.
      most_bytes: of the file. What would be larger is not kept.
    """

    def __init__(
        self,
        target: Decoder,
        head: Head,
        answers: Sequence[Answer],
        *,
        length: int,
        batch_size: int,
        path: str | Path,
        most_bytes: int,
    ):
        self._answers, self._batch_size = answers, batch_size
        self._lengths = padded_lengths(answers, length)
        self._starts = np.cumsum([0, *(answer.length for answer in answers)])
        self._path = Path(path)
        self._leaves = named_leaves(target)
        run = lambda leaves, tokens: draft_chains.hidden_states(with_leaves(target, leaves), head, tokens)  # noqa: E731
        self._run = jax.jit(run)
        one = jax.eval_shape(run, self._leaves, jax.ShapeDtypeStruct((1, 1), np.int32))
        self._shape, self._dtype = (int(self._starts[-1]), one.shape[-1]), one.dtype
        self._size = self._shape[0] * self._shape[1] * one.dtype.itemsize  # bytes
        self.kept: bool = self._size <= most_bytes
        self._file: np.memmap | None = self._open(self._path, "r") if self.kept and self._is_ours() else None

    @functools.cached_property
    def _fingerprint(self) -> bytes:
        """Of the answers and the target (each weight's sum): what a whole file ends with."""
        found = hashlib.sha256(json.dumps([self._answers, list(self._shape), str(self._dtype)]).encode())
        for path, weight in self._leaves.items():
            found.update(f"{path} {weight.shape} {float(weight.astype('float32').sum())!r} ".encode())
        return found.digest()

    def _is_ours(self) -> bool:
        """Whether there is a whole file, of these answers and this target."""
        end = self._size + len(self._fingerprint)
        if not self._path.exists() or self._path.stat().st_size != end:
            return False
        with self._path.open("rb") as file:
            file.seek(self._size)
            return file.read() == self._fingerprint

    def _open(self, path: Path, mode: Any) -> np.memmap:
        """The file's rows; of bytes of a token, since numpy's files know no bfloat16."""
        return np.memmap(path, np.uint8, mode, shape=(self._shape[0], self._shape[1] * self._dtype.itemsize))

    def compute(self, report: Callable[[int], None] = lambda num: None) -> None:
        """Writes the file, if it is to be and is not there; one that was begun is begun anew. report: is told of how many answers
        it has the states. OSError if there is no room."""
        if not self.kept:
            return self.delete()  # what a run with more room has left
        if self._file is not None:
            return
        partial, order = self._reserve(), sorted(range(len(self._answers)), key=lambda i: self._answers[i].length)
        file = self._open(partial, "r+")
        for first in range(0, len(order), self._batch_size):
            chosen = order[first : first + self._batch_size]
            hidden = self._computed(self._padded(chosen))
            for i, rows in zip(chosen, hidden, strict=False):
                n = self._answers[i].length
                file[self._starts[i] : self._starts[i] + n] = rows[:n].view(np.uint8)
            report(first + len(chosen))
        file.flush()
        with partial.open("ab") as end:
            end.write(self._fingerprint)
        partial.replace(self._path)
        self._file = self._open(self._path, "r")

    def _reserve(self) -> Path:
        """A file of the whole size. (Written through a map where the disk is full, it would end the process.)"""
        partial = self._partial
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, self._size)
            except OSError as error:
                partial.unlink()
                raise OSError(
                    f"{partial}: the target's states of the answers take {self._size / 2**30:.2f} GiB ({error.strerror}): "
                    "make room, or give a lower states_gib, with which each step computes its own"
                ) from error
        return partial

    @property
    def _partial(self) -> Path:
        return self._path.with_name(self._path.name + ".partial")

    def delete(self) -> None:
        """Removes the file, whole or begun: nothing more is to be trained."""
        self._file = None
        for path in (self._path, self._partial):
            path.unlink(missing_ok=True)

    def _padded(self, chosen: Sequence[int] | np.ndarray) -> Batch:
        answers = [self._answers[i] for i in chosen]
        longest = max(answer.length for answer in answers)
        empty = [Answer([0], [])] * (self._batch_size - len(answers))
        return make_batch([*answers, *empty], next(n for n in self._lengths if n >= longest))

    def _computed(self, batch: Batch) -> np.ndarray:
        return np.asarray(self._run(self._leaves, batch.tokens))

    def batch(self, chosen: Sequence[int] | np.ndarray) -> tuple[Batch, np.ndarray]:  # with [B, S, W]
        """The answers of these numbers, padded to one of a few lengths, and the states of them (`draft_chains.hidden_states`),
        zero behind each one's end if they are kept."""
        batch = self._padded(chosen)
        if self._file is None:
            return batch, self._computed(batch)
        found = np.zeros((*batch.tokens.shape, self._shape[1]), self._dtype)
        for row, i in zip(found, chosen, strict=False):
            n = self._answers[i].length
            row[:n] = self._file[self._starts[i] : self._starts[i] + n].view(self._dtype)
        return batch, found


def shuffled_batches(answers: Sequence[Answer], batch_size: int, seed: tuple[int, int]) -> np.ndarray:  # i64[n, batch_size]
    """A random order of all answers in batches, of which each has answers of about one length: a random order is sorted by length
    16 batches at a time, and the batches of each 16 are shuffled. What fills no batch is left out, but one batch there is."""
    rng, together = np.random.default_rng(seed), 16 * batch_size
    order = rng.permutation(len(answers))
    order = order[: len(order) // batch_size * batch_size] if len(order) >= batch_size else np.resize(order, batch_size)
    found = []
    for first in range(0, len(order), together):
        some = sorted(order[first : first + together], key=lambda i: answers[i].length)
        found.append(rng.permutation(np.array(some).reshape(-1, batch_size)))
    return np.concatenate(found)

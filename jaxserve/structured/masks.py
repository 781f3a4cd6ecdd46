"""Which tokens each row of a step may sample, as bits: the state of sequences in their grammars, and the masks that follow from it.

Owns the matchers' bookkeeping and the mask buffers. Knows nothing of scheduling; who the rows are is the caller's business.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.sampling.edit_rows import num_mask_words
from jaxserve.speculative.proposer import NO_DRAFT
from jaxserve.structured.grammars import Grammar, words_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

ALL = -1  # a word of 32 allowed tokens
NO_DRAFTS: Mapping[int, Sequence[int]] = {}


class GrammarState:
    """Where one sequence stands in its grammar.

    num_tokens: output tokens that are in. forced: the tokens that must follow whatever the model says, often none; where the
    grammar forces bytes that several tokenisations spell, it is the tokenizer's own, and no other is allowed.
    forces=False: never any.
    """

    def __init__(self, grammar: Grammar, *, forces: bool = True):
        self.matcher: LLMatcher = grammar.matcher()
        self._forces = forces
        self.num_tokens: int = 0
        self.forced: list[int] = self._forced()

    def _forced(self) -> list[int]:
        return self.matcher.compute_ff_tokens() if self._forces and not self.matcher.is_stopped() else []

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes tokens in; returns how many the grammar allowed. The first that it does not, and those after it, stay out."""
        accepted = self.matcher.try_consume_tokens(list(token_ids))
        self.num_tokens += accepted
        self.forced = self._forced()
        return accepted

    def copy(self) -> GrammarState:
        """Another that stands here, and goes its own way."""
        other = copy.copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return self.matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """Whether nothing but an end may follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str:
        """Why the grammar can't go on, in llguidance's words, such as a limit of its own that was reached; "" while it can."""
        return words_of(self.matcher) if self.matcher.is_error() else ""


class MaskFiller:
    """Fills a step's masks in parallel.

    Args:
      vocab_size: V.
      max_rows: R, most rows of a step.
      num_buffers: steps that may be in flight with a buffer of theirs, and one more.
    """

    def __init__(self, vocab_size: int, max_rows: int, num_buffers: int = 3):
        from llguidance import LLExecutor

        self._executor = LLExecutor()
        self._buffers = [np.full((max_rows, num_mask_words(vocab_size)), ALL, np.int32) for _ in range(num_buffers)]
        self._used: list[list[int]] = [[] for _ in range(num_buffers)]  # rows of each buffer that aren't all ones
        self._next = 0

    def fill(self, states: dict[int, GrammarState], drafts: Mapping[int, Sequence[int]] = NO_DRAFTS) -> np.ndarray:
        """i32[R, ceil(V / 32)]: bit v % 32 of word v // 32 of row r says whether the row may sample token v; all ones where the row
        has no state. The buffer is filled again after num_buffers - 1 more calls.

        drafts: by the row of a state, those of the rows behind it, which get what may follow each of them. `states` stay where they
        are.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        places: dict[int, GrammarState | None] = {**states}
        for row, tokens in drafts.items():
            places |= _behind(row, states[row], tokens)
        buffer, used = self._buffers[self._next], self._used[self._next]
        buffer[[row for row in used if row not in places]] = ALL  # the others' rows are written as a whole
        used[:] = places
        self._next = (self._next + 1) % len(self._buffers)
        free = [(state.matcher, row) for row, state in places.items() if state is not None and not state.forced]
        if free:
            fill_next_token_bitmask_par(self._executor, free, buffer)
        for row, state in places.items():
            if state is None:
                buffer[row] = 0
            elif state.forced:
                _allow_only(buffer[row], state.forced[0])
        return buffer


def _behind(row: int, state: GrammarState, drafts: Sequence[int]) -> dict[int, GrammarState | None]:
    """Where the rows behind `row` stand, a draft each. None behind one that the grammar forbids, or that ends it: nothing may
    follow there, and whatever comes of such a row is dropped."""
    places: dict[int, GrammarState | None] = dict.fromkeys(range(row + 1, row + 1 + len(drafts)))
    for at, token in enumerate(drafts, row + 1):
        if token == NO_DRAFT:
            break
        state = state.copy()
        if not state.advance([token]) or state.ended or state.error:
            break
        places[at] = state
    return places


def _allow_only(words: np.ndarray, token: int) -> None:  # i32[ceil(V / 32)]
    words[:] = 0
    words[token // 32] = np.uint32(1 << token % 32).view(np.int32)

"""Which tokens each row of a step may sample, as bits: the states of sequences in their grammars, and the masks of these states.

Owns the matchers and the mask buffers. Knows nothing of scheduling or requests: the caller names the rows.
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
    """The state of one sequence in its grammar.

    num_tokens: output tokens that it has taken.
    forced: the tokens that must follow, often none. Where the grammar forces bytes that several tokenisations spell, these are the
        tokenizer's own tokens, and no others are allowed. Always empty with forces=False.
    """

    def __init__(self, grammar: Grammar, *, forces: bool = True):
        self.matcher: LLMatcher = grammar.matcher()
        self._forces = forces
        self.num_tokens: int = 0
        self.forced: list[int] = self._forced()

    def _forced(self) -> list[int]:
        return self.matcher.compute_ff_tokens() if self._forces and not self.matcher.is_stopped() else []

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes tokens, up to the first that the grammar does not allow. Returns how many it took."""
        accepted = self.matcher.try_consume_tokens(list(token_ids))
        self.num_tokens += accepted
        self.forced = self._forced()
        return accepted

    def mask(self) -> np.ndarray:  # i32[ceil(V / 32)]
        """The tokens that the grammar allows next, as `MaskFiller.fill` writes them."""
        return np.frombuffer(self.matcher.compute_bitmask(), np.int32)

    def copy(self) -> GrammarState:
        """An equal state, which then advances independently of this one."""
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
        """llguidance's message if the grammar can't continue, for example because a limit of the library was reached; else ""."""
        return words_of(self.matcher) if self.matcher.is_error() else ""


class MaskFiller:
    """Fills a step's masks in parallel.

    Args:
      vocab_size: V.
      max_rows: R, most rows of a step.
      num_buffers: one more than the steps that may be in flight, each of which uses a buffer.
    """

    def __init__(self, vocab_size: int, max_rows: int, num_buffers: int = 3):
        from llguidance import LLExecutor

        self._executor = LLExecutor()
        self._buffers = [np.full((max_rows, num_mask_words(vocab_size)), ALL, np.int32) for _ in range(num_buffers)]
        self._used: list[list[int]] = [[] for _ in range(num_buffers)]  # rows of each buffer that aren't all ones
        self._next = 0

    def fill(self, states: dict[int, GrammarState], drafts: Mapping[int, Sequence[int]] = NO_DRAFTS) -> np.ndarray:
        """i32[R, ceil(V / 32)]: bit v % 32 of word v // 32 of row r says whether the row may sample token v. Rows without a state
        have all bits set. The buffer is reused after num_buffers - 1 more calls.

        states: by row; they are not changed.
        drafts: by the row of a state. The rows after it get the masks after each of these drafts.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        places: dict[int, GrammarState | None] = {**states}
        for row, tokens in drafts.items():
            places |= _behind(row, states[row], tokens)
        buffer, used = self._buffers[self._next], self._used[self._next]
        buffer[[row for row in used if row not in places]] = ALL  # rows in `places` are overwritten below
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
    """The states of the rows after `row`, one for each draft. None after a draft that the grammar forbids, or that ends it: no
    token may follow there, and the result of such a row is dropped."""
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

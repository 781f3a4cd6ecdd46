"""Which tokens each row of a step may sample, as bits: the state of sequences in their grammars, and the masks that follow from it.

Owns the matchers' bookkeeping and the mask buffers. Knows nothing of scheduling; who the rows are is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.edit_rows import num_mask_words
from jaxserve.structured.grammars import Grammar, words_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

ALL = -1  # a word of 32 allowed tokens


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

    def rollback(self, num_tokens: int) -> None:
        """Back to where it stood `num_tokens` tokens ago."""
        assert num_tokens <= self.num_tokens and self.matcher.rollback(num_tokens), self.matcher.get_error()
        self.num_tokens -= num_tokens
        self.forced = self._forced()

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

    def fill(self, states: dict[int, GrammarState]) -> np.ndarray:
        """i32[R, ceil(V / 32)]: bit v % 32 of word v // 32 of row r says whether the row may sample token v; all ones where the row
        has no state. The buffer is filled again after num_buffers - 1 more calls."""
        from llguidance.numpy import fill_next_token_bitmask_par

        buffer, used = self._buffers[self._next], self._used[self._next]
        buffer[used] = ALL
        used[:] = states
        self._next = (self._next + 1) % len(self._buffers)
        free = [(state.matcher, row) for row, state in states.items() if not state.forced]
        if free:
            fill_next_token_bitmask_par(self._executor, free, buffer)
        for row, state in states.items():
            if state.forced:
                word, bit = divmod(state.forced[0], 32)
                buffer[row] = 0
                buffer[row, word] = np.uint32(1 << bit).view(np.int32)
        return buffer

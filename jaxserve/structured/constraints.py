"""Which unfinished requests have a grammar, and the state of each in its grammar.

Owns the wait for compilation and the states, from which it fills the masks of a step. The engine passes in the tokens that were
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.sampling import nothing_allowed
from jaxserve.sampling.nothing_allowed import NothingAllowedError, forbids
from jaxserve.speculative.proposer import NO_DRAFT
from jaxserve.structured.grammars import Grammar, GrammarError, outcome
from jaxserve.structured.masks import GrammarState, MaskFiller

if TYPE_CHECKING:
    from jaxserve.request import Request
    from jaxserve.scheduling.schedule import Schedule


class Constraints:
    """The constrained requests of one engine.

    Args:
      vocab_size: V.
      max_rows: most logits rows of a step.
      max_in_flight: most steps whose masks are in use at once.
    """

    def __init__(self, vocab_size: int, max_rows: int, max_in_flight: int = 2):
        self._vocab_size, self._max_rows, self._max_in_flight = vocab_size, max_rows, max_in_flight
        self._filler: MaskFiller | None = None  # made with the first grammar: it holds buffers and threads
        self._compiling: dict[Request, Future[Grammar]] = {}
        self._grammars: dict[Request, Grammar] = {}  # of requests without a state: a state takes memory, and many may wait
        self._states: dict[Request, GrammarState] = {}

    def __bool__(self) -> bool:
        """Whether any request has a grammar, compiled or not."""
        return bool(self._states or self._grammars or self._compiling)

    def __contains__(self, request: Request) -> bool:
        return request in self._states or request in self._grammars

    def add(self, request: Request, grammar: Future[Grammar]) -> None:
        """Constrains a request by `grammar`, which may still be compiling. `poll` returns the request when it is compiled."""
        self._compiling[request] = grammar

    def poll(self, timeout: float = 0.0) -> tuple[list[Request], list[tuple[Request, str]]]:
        """(requests whose grammar has been compiled, [(request, message)] of those whose grammar failed) since the last call.

        timeout: seconds to wait for a first one, if none is done.
        """
        if self._compiling and timeout:
            wait(self._compiling.values(), timeout, FIRST_COMPLETED)
        ready, failed = [], []
        for request, future in [(r, f) for r, f in self._compiling.items() if f.done()]:
            del self._compiling[request]
            try:
                self._grammars[request] = outcome(future)
                ready.append(request)
            except Exception as error:  # any failure of the compiler ends this request alone
                failed.append((request, str(error) if isinstance(error, GrammarError) else f"structured_outputs: {error!r}"))
        return ready, failed

    def constrains(self, schedule: Schedule) -> bool:
        """Whether a sample of this step needs a mask."""
        return bool(self._states or self._grammars) and any(request in self for request in schedule.requests)

    def masks(
        self,
        schedule: Schedule,
        proposed: np.ndarray | None = None,  # i32[max_num_seqs, K]: the drafts of each sequence row, where there are any
    ) -> np.ndarray:
        """i32[max_rows, ceil(V / 32)]: the masks of the step's logits rows, as `MaskFiller.fill` returns them.

        `advance` must have been given all tokens sampled before this step. Drafts of requests with forced tokens in flight are cut.
        """
        if self._filler is None:
            self._filler = MaskFiller(self._vocab_size, self._max_rows, self._max_in_flight + 1)
        rows = {r: row for r, row in schedule.logits_rows.by_request(schedule) if r in self and not r.finished}
        drafts: dict[int, list[int]] = {}
        for request, seq_row, q_len in schedule.decodes() if schedule.num_drafts else ():
            if q_len > 1 and request in rows:
                assert proposed is not None
                cut = [NO_DRAFT] * (q_len - 1)
                drafts[rows[request]] = cut if request.num_forced_in_flight else proposed[seq_row, : q_len - 1].tolist()
        return self._filler.fill({row: self._state(r) for r, row in rows.items()}, drafts)

    def _state(self, request: Request) -> GrammarState:
        if request not in self._states:
            # Where other parameters forbid tokens too, none is forced: together they could leave no token.
            self._states[request] = GrammarState(self._grammars.pop(request), forces=not forbids(request.params))
        return self._states[request]

    def why_nothing(self, request: Request) -> NothingAllowedError | None:
        """As nothing_allowed's, with the request's grammar where it has one; `advance` must have been given all of its output."""
        mask = self._state(request).mask() if request in self else None
        return nothing_allowed.why_nothing(request, self._vocab_size, mask)

    def advance(self, request: Request, token_ids: Sequence[int]) -> GrammarState:
        """Advances the request's state by these output tokens, and returns the state, which may have an error."""
        state = self._state(request)
        accepted = state.advance(token_ids)
        assert state.error or accepted == len(token_ids), f"{request.request_id}: {token_ids} sampled, {accepted} allowed"
        return state

    def discard(self, request: Request) -> None:
        """Forgets a request that has finished. Does nothing if it was never constrained."""
        for held in (self._states, self._grammars, self._compiling):
            held.pop(request, None)

    def clear(self) -> None:
        """Forgets all requests."""
        for held in (self._states, self._grammars, self._compiling):
            held.clear()


def check_start(request: Request, grammar: Grammar, vocab_size: int) -> None:
    """Raises NothingAllowedError for a request whose other parameters forbid every token with which its form can begin. One
    that has begun is not checked: what its parameters forbid by now says nothing of the form's beginning."""
    if forbids(request.params) and not request.num_output_tokens:
        nothing_allowed.check_something(request, vocab_size, GrammarState(grammar, forces=False).mask())

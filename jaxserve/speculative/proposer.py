"""What makes drafts: the one interface between a method of speculation and the step. Knows no method.

A method is a `Proposer`, named in config.METHODS and made by programs.make_proposer. N-grams: `propose` looks at the tokens alone.
Draft heads without attention: it also reads the hidden rows that the logits were made of. Draft models, and heads that attend over
the sequence: `read_body` runs their layers over the tokens (or hidden rows) of each step, prompts included, and keeps their KV in
pages of their own state, under the target's slots and page table, so that prefix hits and preemptions hold for it too; `propose`
then goes on from there, one draft at a time, and keeps the drafts' KV aside, as there may be no page for it yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from jaxserve.batching.context import StepContext
from jaxserve.sampling.sampler import SamplingRows

NO_DRAFT = -1  # a draft that is none: no sampled token equals it, so that it never stands
DRAFT_STREAM = 2  # of sampler.uniform: what drafts are drawn with, at the positions that they are for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What a head knows when it has sampled. R of its rows, one of which ends each sequence; the others' drafts are not used.

    hidden is what the row's logits were made of, the target's last hidden state before its final norm: what draft heads read.
    sampling has what each row was sampled with, `position` that of the token just sampled: draft j is for position + 1 + j. Draft
    j drawn with `uniform(replace(sampling, position=position + 1 + j), DRAFT_STREAM)` is independent of whether it will stand.
    """

    seq_rows: jax.Array  # i32[R]: the sequence row of each; S for padding
    num_tokens: jax.Array  # i32[R]: the sequence's tokens, the one just sampled included
    history: jax.Array  # i32[S, L]: token ids of each sequence; past num_tokens anything
    hidden: jax.Array  # [R, D]
    sampling: SamplingRows  # of R rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ran:
    """What a body has run: chunks of prompts, sampled tokens, and drafts, which may be refused: then another token comes to their
    position. B sequences in the step's bucket, S in the engine."""

    tokens: jax.Array  # i32[T]: token ids; 0 for padding and for a draft that is none
    seq_rows: jax.Array  # i32[B]: the sequence row of each; S for padding
    context: StepContext  # where they stand: positions, slots, the page table of these sequences, lengths
    hidden: jax.Array  # [T, D]: the target's last hidden states, before its final norm


class Proposer(Protocol):
    """Proposes what follows the tokens that a head has just sampled. Traced inside the head, so that the next step can be
    dispatched before anything is fetched. One that is to see every token, prompts included, is a `BodyReader`."""

    @property
    def num_drafts(self) -> int:
        """K: drafts that it proposes a sequence, the configuration's num_speculative_tokens."""
        ...

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn, and `propose` says from what; it is kept where acceptance is "rejection"."""
        ...

    def init_state(self) -> Any:
        """What it keeps on the device, as a pytree of arrays: a draft model's weights and pages; () for nothing. Called again
        after a sleep or a failed step; new arrays each time, since programs are given them for good (donated)."""
        ...

    def propose(self, state: Any, seen: Seen) -> tuple[Any, jax.Array, jax.Array | None]:
        """(the state; i32[R, K]: each row's drafts, the next token's first, NO_DRAFT where there is none; f32[R, K, V]: the
        probabilities that each draft was drawn with, given those before it, or None where `draws` is false)."""
        ...


@runtime_checkable
class BodyReader(Proposer, Protocol):
    """A proposer that also sees each step's body; traced at its end."""

    def read_body(self, state: Any, ran: Ran) -> Any:
        """The state, which is donated."""
        ...

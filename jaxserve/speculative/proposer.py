"""What makes drafts: the one interface between a method of speculation and the step. Knows no method.

A method is a `Proposer`, named in config.METHODS and made by programs.make_proposer. N-grams: `propose` looks at the tokens alone.
Draft heads without attention: it also reads the hidden rows that the logits were made of. Draft models, and heads that attend over
the sequence: `read_body` runs their layers over the tokens (or hidden rows) of each step, prompts included, and keeps their KV in
pages of their own state, under the target's slots and page table, so that prefix hits and preemptions hold for it too; `propose`
then goes on from there, one draft at a time, and keeps the drafts' KV aside, as there may be no page for it yet. Weights are apart
from the state: the programs are given them as they are given the target's, and return only the state anew.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    page_table: jax.Array  # i32[S, P]: the pages of each sequence, in which the tokens before the one just sampled have their slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ran:
    """What a body has run: chunks of prompts, sampled tokens, and drafts, which may be refused: then another token comes to their
    position. B sequences in the step's bucket, S in the engine."""

    tokens: jax.Array  # i32[T]: token ids; 0 for padding and for a draft that is none
    seq_rows: jax.Array  # i32[B]: the sequence row of each; S for padding
    context: StepContext  # where they stand: positions, slots, the page table of these sequences, lengths
    hidden: jax.Array  # [T, D]: the target's last hidden states, before its final norm
    layer_inputs: jax.Array | None  # [T, n * D]: the inputs of the proposer's n hidden_layers, side by side; None where n is 0
    logits_tokens: jax.Array  # i32[R]: which tokens the step's logits rows follow; 0 for padding
    work: Any = None  # what the host planned of its own attention, as StepContext.work; None where the device plans it


class WithoutWeights:
    """Of a proposer that computes with nothing but its state, which is the same for any number of pages."""

    weights: tuple[()] = ()
    abstract: tuple[()] = ()
    shared: tuple[()] = ()
    hidden_layers: tuple[()] = ()
    page_bytes: int = 0


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

    @property
    def weights(self) -> Sequence[Any]:
        """What it computes with, as it is; a list, whose entries a sleep moves to the host and back, or () for nothing."""
        ...

    @property
    def abstract(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of `weights`."""
        ...

    @property
    def shared(self) -> Sequence[int]:
        """Which of the target's weights, by their number in ModelFunctions, it takes too: they come behind its own."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of its state for each page of the target's pool."""
        ...

    def init_state(self) -> Any:
        """What it keeps on the device, as a pytree of arrays, such as pages; () for nothing. Called again after a sleep or a failed
        step; new arrays each time, since programs are given them for good (donated)."""
        ...

    def propose(self, weights: Any, state: Any, seen: Seen) -> tuple[Any, jax.Array, jax.Array | None]:
        """(the state; i32[R, K]: each row's drafts, the next token's first, NO_DRAFT where there is none; f32[R, K, V]: the
        probabilities that each draft was drawn with, given those before it, or None where `draws` is false)."""
        ...


@runtime_checkable
class BodyReader(Proposer, Protocol):
    """A proposer that also sees each step's body; traced at its end."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs it reads, in order."""
        ...

    def read_body(self, weights: Any, state: Any, ran: Ran) -> Any:
        """The state, which is donated."""
        ...

    def skip_body(self, state: Any, seq_rows: jax.Array, context: StepContext) -> Any:
        """The state, which is donated, behind a step of one token each that it did not read: what it would have kept of these
        tokens is nothing, not what stood there before. seq_rows: as `Ran`'s."""
        ...

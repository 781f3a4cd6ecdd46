"""What one step uploads: a single int32 array, and which slice of it holds what.

StepLayout is filled by the packer (numpy, on the host) and taken apart inside the compiled step. What a row of the device-resident
state already holds is not sent again: a decode's token and position come from there, and of the page table only the entries that
changed travel. Knows nothing of models or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxserve.buckets.plan import Bucket
from jaxserve.sampling import rows as sampling_rows

# A token id or start that the device knows: the row's last sampled token, the row's number of computed tokens. Below it, as a token
# id, the row's drafts: FROM_DEVICE - 1 is the first.
FROM_DEVICE = -1


@dataclass(frozen=True)
class StepLayout:
    """Where each field lies in the packed int32 array of one bucket.

    T tokens, S sequences, R = max_head_rows logits rows, U page-table updates. The first U that a step needs travel in the array,
    any further ones (long prefix hits) in update batches of their own before it. Padding: tokens 0, sequence rows max_num_seqs
    (past the state's end, so that writes drop), q_lens 0, page updates to row max_num_seqs, logits rows to sequence row
    max_num_seqs.

    planners: by sliding window of the model's layers, what plans the step's attention on the host (a `Planner` of the kernels);
    none where the backend plans on the device. draft_planners: the same of a model that drafts.
    num_groups: in which devices attend. Tokens and sequences are as many equal parts, with padding behind each; a group has a plan
    of its own, and its pages' numbers are its own too.
    """

    bucket: Bucket
    max_num_seqs: int
    page_size: int
    max_head_rows: int
    planners: Mapping[int | None, Any] = field(default_factory=dict, hash=False)
    num_groups: int = 1
    draft_planners: Mapping[int | None, Any] = field(default_factory=dict, hash=False)

    @cached_property
    def num_updates(self) -> int:
        """U: a step's own tokens touch at most this many new pages."""
        return self.bucket.seqs + self.bucket.tokens // self.page_size

    @cached_property
    def fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """name -> (where it lies, shape), in order."""
        T, S, R = self.bucket.tokens, self.bucket.seqs, self.max_head_rows
        shapes = {
            "token_ids": (T,),
            "seq_rows": (S,),
            "q_lens": (S,),
            "starts": (S,),
            "page_updates": (self.num_updates, 3),
            "logits_tokens": (R,),  # index among the step's T tokens of each logits row
            "logits_rows": (R,),  # the sequence row that each logits row samples for
            "sampling": (R, sampling_rows.NUM_COLUMNS),
        }
        groups = () if self.num_groups == 1 else (self.num_groups,)
        shapes |= {name: (*groups, planner.size) for name, planner in self.lists.items()}
        fields, offset = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            fields[name] = (slice(offset, offset + size), shape)
            offset += size
        return fields

    @cached_property
    def work(self) -> dict[int | None, tuple[str, Any]]:
        """sliding window -> (the field that holds its layers' work list, its planner)."""
        return {window: (f"work_{window}", planner) for window, planner in self.planners.items()}

    @cached_property
    def draft_work(self) -> dict[int | None, tuple[str, Any]]:
        """The same of the model that drafts. Where it would plan as the target does, they share the field."""
        return {
            window: self.work[window] if self.planners.get(window) == planner else (f"draft_work_{window}", planner)
            for window, planner in self.draft_planners.items()
        }

    @cached_property
    def lists(self) -> dict[str, Any]:
        """The planner of every field that holds a work list."""
        return dict([*self.work.values(), *self.draft_work.values()])

    @cached_property
    def size(self) -> int:
        return max(where.stop for where, _ in self.fields.values())

    @cached_property
    def padding(self) -> np.ndarray:
        """i32[size]: a step of nothing; the template that pack() copies."""
        packed = np.zeros(self.size, np.int32)
        views = self.unpack(packed)
        views["seq_rows"][:] = self.max_num_seqs
        views["page_updates"][:] = (self.max_num_seqs, 0, 0)
        views["logits_rows"][:] = self.max_num_seqs
        return packed

    def unpack(self, packed: Any) -> dict[str, Any]:
        """The fields of a packed array, numpy (views) or traced."""
        return {name: packed[where].reshape(shape) for name, (where, shape) in self.fields.items()}


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, ready to dispatch. `extra_page_updates` i32[m, 3] and `edit_rows` must reach the device before the step itself."""

    bucket: Bucket
    packed: np.ndarray  # i32[layout.size]
    head_rows: int  # logits rows of the head program, one of plan.head_rows; 0: no sequence samples, no head runs
    num_samples: int
    with_logprobs: bool
    extra_page_updates: np.ndarray
    edit_rows: list[np.ndarray]  # as EditLayout.pack makes them, one for each newly admitted request that edits its logits
    num_tokens: int
    token_starts: np.ndarray | None = None  # where the tokens of each entry of the schedule begin; None: one after the other
    score_spans: list[np.ndarray] = field(default_factory=list)  # as prompt_scores.pack_spans makes them
    proposes: bool = True  # whether the head verifies and makes drafts, where speculation is on
    is_read: bool = True  # whether what drafts reads the body, if it ever does

    @classmethod
    def padding(cls, layout: StepLayout, head_rows: int, with_logprobs: bool) -> StepInputs:
        """A step of nothing in one bucket, with a head of `head_rows` logits rows."""
        return cls(
            bucket=layout.bucket,
            packed=layout.padding,
            head_rows=head_rows,
            num_samples=head_rows,
            with_logprobs=with_logprobs,
            extra_page_updates=np.zeros((0, 3), np.int32),
            edit_rows=[],
            num_tokens=0,
        )

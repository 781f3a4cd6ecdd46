"""The fixed shapes that steps run in.

Owns BucketPlan (which shapes there are, as data: chosen by rule or by tuning, saved as JSON) and the choice of a bucket for a step.
Knows nothing of requests, models or compilation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_PROGRAMS = 24  # most programs a default plan compiles
HEAD_VARIANTS = 2  # tokens alone; tokens and logprobs
OTHER_PROGRAMS = 2  # the scoring of prompts, the state's update
DRAFT_SEQS = (1, 4, 16, 64)  # sequences of the default plan's buckets for drafts
_FORMAT = "jaxserve-bucket-plan-1"
_FIELDS = ("decode", "mixed", "head_rows", "draft")


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled shape: `tokens` query tokens of `seqs` sequences, none with more than `max_q_len` tokens."""

    tokens: int
    seqs: int
    max_q_len: int

    def holds(self, num_tokens: int, num_seqs: int, max_q_len: int) -> bool:
        """Whether a step of this demand can run here."""
        return num_tokens <= self.tokens and num_seqs <= self.seqs and max_q_len <= self.max_q_len

    def part(self, count: int) -> Bucket:
        """One of `count` equal parts of its tokens and sequences: what a group of devices attends for. Steps whose groups each fit
        it are those that fit the bucket with `count` times the largest group's demand."""
        if count == 1:
            return self
        tokens = self.tokens // count
        return Bucket(tokens, self.seqs // count, min(self.max_q_len, tokens))

    @property
    def is_mixed(self) -> bool:
        """Whether any sequence may bring all of its tokens."""
        return 1 < self.max_q_len == self.tokens

    def __str__(self) -> str:
        if self.is_mixed or self.max_q_len == 1:
            return f"{'mixed' if self.is_mixed else 'decode'}({self.tokens},{self.seqs})"
        return f"draft({self.seqs}x{self.max_q_len - 1})"


@dataclass(frozen=True)
class BucketPlan:
    """The set of shapes an engine compiles.

    decode: sequences of each decode-only bucket (as many tokens as sequences). mixed: (tokens, sequences) of the buckets that take
    any step. head_rows: logits rows of each head program, which comes in HEAD_VARIANTS variants. draft: (sequences, drafts) of the
    buckets whose sequences bring up to so many drafts each beside their last token; where speculation is off they stay empty, and a
    step of drafts that fits none of them runs in a mixed bucket. Body and head programs add up.

    Raises:
      ValueError: sizes that are not positive, that repeat, or a bucket with more sequences than tokens.
    """

    decode: tuple[int, ...] = ()
    mixed: tuple[tuple[int, int], ...] = ()
    head_rows: tuple[int, ...] = ()
    draft: tuple[tuple[int, int], ...] = ()
    buckets: tuple[Bucket, ...] = field(init=False, repr=False, compare=False)  # cheapest first

    def __post_init__(self) -> None:
        decode, rows, mixed = tuple(self.decode), tuple(self.head_rows), tuple(tuple(pair) for pair in self.mixed)
        draft = tuple(tuple(pair) for pair in self.draft)
        for name, pairs, what in (("mixed", mixed, "tokens, sequences"), ("draft", draft, "sequences, drafts")):
            if any(len(pair) != 2 for pair in pairs):
                raise ValueError(f"bucket plan: {name} buckets must be pairs ({what}), got {list(pairs)}")
        sides = {"mixed": tuple(x for pair in mixed for x in pair), "draft": tuple(x for pair in draft for x in pair)}
        for name, sizes in (("decode", decode), ("head_rows", rows), *sides.items()):
            if any(not isinstance(x, int) or isinstance(x, bool) or x < 1 for x in sizes):
                raise ValueError(f"bucket plan: {name} sizes must be integers >= 1, got {list(sizes)}")
        decode, rows, mixed, draft = tuple(sorted(decode)), tuple(sorted(rows)), tuple(sorted(mixed)), tuple(sorted(draft))
        for name, sizes in (("decode", decode), ("head_rows", rows), ("mixed", mixed), ("draft", draft)):
            if len(set(sizes)) != len(sizes):
                raise ValueError(f"bucket plan: {name} sizes repeat in {list(sizes)}")
        for t, s in mixed:
            if s > t:
                raise ValueError(f"bucket plan: mixed bucket ({t}, {s}) has more sequences than tokens")
        if not mixed:
            raise ValueError("bucket plan: at least one mixed bucket is needed to run a prompt")
        if not rows:
            raise ValueError("bucket plan: head_rows is empty; name at least one number of logits rows")
        buckets = [Bucket(s, s, 1) for s in decode] + [Bucket(t, s, t) for t, s in mixed]
        buckets += [Bucket(s * (1 + k), s, 1 + k) for s, k in draft if s > 1 or (1 + k, 1) not in mixed]
        buckets.sort(key=lambda b: (b.tokens, b.max_q_len > 1, b.seqs, b.max_q_len))
        made = {"decode": decode, "mixed": mixed, "head_rows": rows, "draft": draft, "buckets": tuple(buckets)}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @classmethod
    def default(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        min_tokens: int = 8,
        max_programs: int = MAX_PROGRAMS,
        num_drafts: int = 0,
        max_draft_tokens: int = 64,
    ) -> BucketPlan:
        """Powers of two from `min_tokens` to the budget, thinned until at most `max_programs` programs are left.

        num_drafts: speculation's. Buckets of so many drafts, and of half as many, come on top, as far as they have at most
          `max_draft_tokens` tokens: beyond, the device has enough to do without drafts.
        """
        room = max_programs - OTHER_PROGRAMS
        most = min(max_num_batched_tokens, max_draft_tokens)
        lengths = sorted({num_drafts, (num_drafts + 1) // 2} - {0})
        seqs = sorted({min(s, max_num_seqs) for s in DRAFT_SEQS})
        draft = tuple((s, k) for k in lengths for s in seqs if s * (1 + k) <= most)
        most_rows = max([max_num_seqs, *(s * (1 + k) for s, k in draft), 1 + num_drafts])
        for per_ladder in range(16, 1, -1):
            heads = _ladder(min_tokens, most_rows, max(2, (per_ladder + 1) // 2), min_tokens)
            decode = _ladder(min_tokens, max_num_seqs, per_ladder, min_tokens)
            low = min(max(4 * min_tokens, 16), max_num_batched_tokens)
            mixed = _ladder(low, max_num_batched_tokens, per_ladder, min_tokens)
            if len(decode) + len(mixed) + HEAD_VARIANTS * len(heads) <= room:
                break
        else:
            least = len(decode) + len(mixed) + HEAD_VARIANTS * len(heads) + OTHER_PROGRAMS
            raise ValueError(f"{max_programs=} is too few for the default plan of {max_num_seqs=}, which takes {least}: raise it")
        pairs = tuple((t, min(t, max(max_num_seqs, 1))) for t in mixed)
        return cls(decode=decode, mixed=pairs, head_rows=heads, draft=draft)

    @property
    def num_programs(self) -> int:
        """Programs that all of the plan compiles to: bodies, heads in every variant, and the others."""
        return len(self.buckets) + HEAD_VARIANTS * len(self.head_rows) + OTHER_PROGRAMS

    @property
    def max_head_rows(self) -> int:
        """R: logits rows that every body hands to its head."""
        return self.head_rows[-1]

    def select(self, num_tokens: int, num_seqs: int, max_q_len: int) -> Bucket:
        """The bucket with the fewest tokens that holds such a step. ValueError if none does."""
        for bucket in self.buckets:
            if bucket.holds(num_tokens, num_seqs, max_q_len):
                return bucket
        raise ValueError(f"no bucket holds {num_tokens} tokens of {num_seqs} sequences; the plan has {self}")

    def select_head_rows(self, num_rows: int) -> int:
        """The smallest head program for `num_rows` logits rows. ValueError if none is large enough."""
        for rows in self.head_rows:
            if num_rows <= rows:
                return rows
        raise ValueError(f"no head program holds {num_rows} logits rows; head_rows are {list(self.head_rows)}")

    def select_head(self, num_rows: int, with_logprobs: bool) -> tuple[int, bool]:
        """(logits rows, with log-probabilities or not) of the smallest head for this. ValueError as `select_head_rows`."""
        return self.select_head_rows(num_rows), with_logprobs

    def check(self, max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int = 0, num_groups: int = 1) -> None:
        """ValueError unless every step that a scheduler of these limits can make fits a bucket. num_drafts: 0 is no speculation.
        num_groups: of devices, into whose equal parts each bucket must divide."""
        odd = [str(b) for b in self.buckets if b.tokens % num_groups or b.seqs % num_groups]
        if odd:
            raise ValueError(
                f"attention_groups={num_groups} must divide the tokens and sequences of every bucket, and the plan has "
                f"{', '.join(odd)}: leave bucket_plan out, or change these"
            )
        fits = [t for t, s in self.mixed if s >= min(t, max_num_seqs)]
        seqs = max((s for t, s in self.mixed if t >= max_num_batched_tokens), default=0)
        if seqs and max(fits, default=0) < max_num_batched_tokens:
            raise ValueError(
                f"the bucket plan's mixed buckets of {max_num_batched_tokens} tokens or more hold at most {seqs} sequences, fewer "
                f"than max_num_seqs={max_num_seqs}: lower max_num_seqs to {seqs} or add a bucket "
                f"({max_num_batched_tokens}, {min(max_num_seqs, max_num_batched_tokens)})"
            )
        if max(fits, default=0) < max_num_batched_tokens:
            raise ValueError(
                f"the bucket plan holds steps of at most {max(fits, default=0)} tokens with {max_num_seqs} sequences, fewer than "
                f"max_num_batched_tokens={max_num_batched_tokens}: lower it (and max_num_seqs), or add a larger mixed bucket"
            )
        if self.max_head_rows < max_num_seqs:
            raise ValueError(
                f"head_rows go up to {self.max_head_rows}, fewer than max_num_seqs={max_num_seqs}: lower it or add a larger head"
            )
        if num_drafts and min(self.max_head_rows, max_num_batched_tokens) < 1 + num_drafts:
            raise ValueError(
                f"one sequence with num_speculative_tokens={num_drafts} takes {1 + num_drafts} tokens and logits rows, but "
                f"head_rows go up to {self.max_head_rows} and steps to {max_num_batched_tokens} tokens: raise them, or draft less"
            )
        if self.draft and not num_drafts:
            raise ValueError(
                f"the bucket plan has buckets for drafts ({list(self.draft)}) but speculation is off: set speculative_config"
            )

    def to_json(self, **about: Any) -> str:
        """JSON text of the plan; `about` is kept beside it (how it was made, for whom)."""
        plan: dict[str, Any] = {"decode": list(self.decode), "mixed": [list(p) for p in self.mixed]}
        plan["head_rows"] = list(self.head_rows)
        if self.draft:
            plan["draft"] = [list(p) for p in self.draft]
        return json.dumps({"format": _FORMAT, **plan, "about": about}, indent=1)

    def save(self, path: str | Path, **about: Any) -> None:
        """Writes `to_json` to a file; folders are made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(self.to_json(**about) + "\n")

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan of a JSON text written by `to_json`. ValueError names what is wrong with it."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as e:
            raise ValueError(f"bucket plan: not JSON: {e}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> BucketPlan:
        """The plan of what `to_json` writes, parsed. ValueError names what is wrong with it."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(
                f"bucket plan: 'format' must be {_FORMAT!r}, got {data.get('format') if isinstance(data, dict) else data!r}"
            )
        unknown = set(data) - {"format", *_FIELDS, "about"}
        if unknown:
            raise ValueError(f"bucket plan: unknown fields {sorted(unknown)}")
        try:
            return cls(**{name: tuple(data.get(name, ())) for name in _FIELDS})
        except TypeError as e:
            raise ValueError(
                f"bucket plan: decode and head_rows are lists of integers, mixed a list of pairs, like draft ({e})"
            ) from None

    @classmethod
    def load(cls, plan: BucketPlan | str | Path) -> BucketPlan:
        """A plan as it is, or read from a JSON file."""
        return plan if isinstance(plan, BucketPlan) else cls.from_json(Path(plan).read_text())

    def __str__(self) -> str:
        mixed = ", ".join(f"({t}, {s})" for t, s in self.mixed)
        draft = f", draft [{', '.join(f'{s}x{k}' for s, k in self.draft)}]" if self.draft else ""
        return f"decode {list(self.decode)}, mixed [{mixed}]{draft}, head rows {list(self.head_rows)}: {self.num_programs} programs"


def _ladder(low: int, high: int, count: int, multiple: int) -> tuple[int, ...]:
    """At most `count` sizes from low up to at least high, each a multiple of `multiple`, by powers of two; sizes are dropped from
    every other place, the smallest and the largest last."""
    up = lambda x: -(-x // multiple) * multiple  # noqa: E731
    sizes = [up(high)]
    step = 1 << max(0, (up(high) - 1).bit_length() - 1)
    while step >= low and step >= multiple:
        sizes.append(up(step))
        step //= 2
    sizes = sorted(set(sizes))
    while len(sizes) > max(2, count):
        gaps = [(sizes[i + 1] / sizes[i - 1], i) for i in range(1, len(sizes) - 1)]
        del sizes[min(gaps)[1]]
    return tuple(sizes)

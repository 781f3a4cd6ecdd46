"""The host's work list of one step of attention: which query tile walks which KV, and which CTA (thread block) runs it.

It cuts a ragged batch into items, balances them over CTAs, and packs them in the fixed-size int32 array that is uploaded. Pure
numpy: of an item it needs the cost, not the computation.

An item is one query tile of one sequence and one KV head. Every tile starts its softmax afresh at each multiple of `chunk`
positions and joins the chunks' results in order. A short query (at most `split_q_len` tokens) whose KV is long is cut at some of
these boundaries into items of whole chunks. Each chunk leaves a partial result; these are joined afterwards, in the same order
and with the same arithmetic. So the cut decides which CTA reads which pages, and changes no bit of the result: the planner may
choose it by the load.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

import numpy as np

# Of an item: sequence, first query token of the tile, first position / BLOCK, chunks if it is part of a split sequence, and the
# first of as many partial slots (-1: the item is all of its tile's KV, and ends the rows).
ITEM_FIELDS = 5
GROUP_FIELDS = 3  # sequence, first partial slot, number of slots
BLOCK = 64  # KV positions: the unit of `chunk`, of item starts and of cost
TAIL = 16  # positions: what is read of a sequence's last block is rounded up to these
ITEM_COST = 2  # blocks' worth of time that an item takes beside its blocks: query load, store, the ring running dry
SPLIT_SHARE = 4  # a sequence is split where it would take more than 1 / SPLIT_SHARE of a CTA's share of the step
MAX_RUN = 8  # chunks of an item of a split sequence: past that, what an item costs beside its blocks is small
LARGE_SHARE = 12  # items of more than 1 / LARGE_SHARE of a CTA's share are placed one by one
POUR_RANGE = 4
FEW_CHUNKS = 8


@dataclasses.dataclass(frozen=True)
class WorkShape:
    """Everything static about the work lists of one compiled shape. T tokens, S sequences, K KV heads.

    tile_tokens: most query tokens of an item. split_q_len: most query tokens of a sequence whose KV may be split over CTAs.
    chunk: positions between the boundaries at which the softmax starts afresh. max_kv_len: most positions of a sequence.

    Raises ValueError for sizes that are not positive, or a chunk that is not whole blocks.
    """

    num_tokens: int
    num_seqs: int
    max_q_len: int
    num_kv_heads: int
    max_kv_len: int
    num_ctas: int
    tile_tokens: int
    split_q_len: int
    chunk: int
    sliding_window: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (field.name == "sliding_window" and value is None) and (not isinstance(value, int) or value < 1):
                raise ValueError(f"work list: {field.name}={value!r} must be an integer of at least 1")
        if self.chunk % BLOCK:
            raise ValueError(f"work list: chunk={self.chunk} must be a multiple of {BLOCK} positions")
        if self.split_q_len > self.tile_tokens:
            raise ValueError(f"work list: split_q_len={self.split_q_len} must fit a tile of {self.tile_tokens} tokens")

    @cached_property
    def num_slots(self) -> int:
        """Partial results a KV head that a step may hold: all chunks of CTAs / K sequences, as one more is less than a CTA's share,
        or FEW_CHUNKS of each of twice as many, since what is left whole among sequences of few chunks fills CTAs unevenly. A
        sequence of one chunk is not split; one of up to four is cut too coarsely for an even load where there are few."""
        chunks, whole = -(-self.max_kv_len // self.chunk), -(-self.num_ctas // self.num_kv_heads)
        if chunks == 1:
            return 0
        return max(min(self.num_seqs, whole) * chunks, min(self.num_seqs, 2 * whole) * min(chunks, FEW_CHUNKS))

    @cached_property
    def num_groups(self) -> int:
        """Sequences a step may split: each holds two slots or more."""
        return min(self.num_seqs, self.num_slots // 2)

    @cached_property
    def num_items(self) -> int:
        """Items a KV head that any step of this shape fits."""
        owners = min(self.num_seqs, self.num_tokens)
        tiles = owners + (self.num_tokens - owners) // self.tile_tokens
        return min(tiles, self.num_seqs * -(-self.max_q_len // self.tile_tokens)) + self.num_slots

    @cached_property
    def fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """name -> (where it lies in the array, shape)."""
        shapes = {
            "items": (self.num_items, ITEM_FIELDS),
            "order": (self.num_items * self.num_kv_heads,),  # item * K + KV head, CTA by CTA, longest first
            "cta_start": (self.num_ctas + 1,),  # CTA c runs order[cta_start[c] : cta_start[c + 1]]
            "num_split": (1,),  # sequences that are split
            "groups": (max(1, self.num_groups), GROUP_FIELDS),  # of each of them
        }
        fields, offset = {}, 0
        for name, shape in shapes.items():
            fields[name] = (slice(offset, offset + math.prod(shape)), shape)
            offset += math.prod(shape)
        return fields

    @cached_property
    def size(self) -> int:
        """Length of the array: int32s a step uploads."""
        return self.fields["groups"][0].stop

    def unpack(self, packed: Any) -> dict[str, Any]:
        """The parts of the array, numpy (views) or traced."""
        return {name: packed[where].reshape(shape) for name, (where, shape) in self.fields.items()}


def plan(
    shape: WorkShape,
    q_lens: np.ndarray,  # i32[n], n <= S
    kv_lens: np.ndarray,  # i32[n], this step's tokens included
    *,
    least_kv_lens: np.ndarray | None = None,  # i32[n]
    out: np.ndarray | None = None,  # i32[shape.size]
) -> np.ndarray:  # i32[shape.size]
    """Plans one step. The device may find that a sequence's KV is shorter than planned: `kv_lens` are upper bounds.

    Args:
        least_kv_lens: lower bounds, which a sliding window starts from; None says that kv_lens are exact.
        out: an array to fill instead of a new one; all of it is written but what lies past the last item and the last group.

    Raises ValueError if the step does not fit the shape.
    """
    q_lens, kv_lens = np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)
    _check(shape, q_lens, kv_lens)
    packed = np.zeros(shape.size, np.int32) if out is None else out
    parts = shape.unpack(packed)
    least = kv_lens if least_kv_lens is None else np.asarray(least_kv_lens, np.int64)
    columns, cost, groups = _cut(shape, q_lens, kv_lens, least)
    parts["num_split"][0] = len(groups)
    parts["groups"][: len(groups)] = groups
    by_cost = (-cost).argsort(kind="stable")
    cost = cost[by_cost]
    items = parts["items"][: len(cost)]
    for column, values in enumerate(columns):
        items[:, column] = values[by_cost]
    order, parts["cta_start"][:] = _balance(cost.repeat(shape.num_kv_heads), shape.num_ctas)
    parts["order"][: len(order)] = order
    return packed


def loads(shape: WorkShape, packed: np.ndarray, q_lens: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:  # i64[num_ctas]
    """What each CTA of a planned step has to do, in blocks (of BLOCK positions) that it reads and ITEM_COST an item."""
    begin, stop, _ = _planned_extents(shape, packed, q_lens, kv_lens)
    cta = np.repeat(np.arange(shape.num_ctas), np.diff(shape.unpack(packed)["cta_start"]))
    return np.bincount(cta, stop - begin + ITEM_COST, minlength=shape.num_ctas).astype(np.int64)


def positions_read(shape: WorkShape, packed: np.ndarray, q_lens: np.ndarray, kv_lens: np.ndarray) -> int:
    """KV positions that a planned step loads, each counted once an item and KV head that reads it."""
    begin, stop, seq = _planned_extents(shape, packed, q_lens, kv_lens)
    end = np.minimum(stop * BLOCK, -(-np.asarray(kv_lens)[seq] // TAIL) * TAIL)
    return int(np.maximum(end - begin * BLOCK, 0).sum())


def positions_seen(shape: WorkShape, q_lens: np.ndarray, kv_lens: np.ndarray) -> int:
    """KV positions that the last token of each query tile sees, once a KV head: without a sliding window no plan of these tiles can
    read less."""
    q_lens, kv_lens = np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)
    tiles = -(-q_lens // shape.tile_tokens)
    # Of a sequence the last tile sees kv_len, the one before less by the last one's tokens, and each before that less by a tile.
    last = q_lens - (tiles - 1) * shape.tile_tokens
    less = np.maximum(tiles - 1, 0) * last + (tiles - 1) * (tiles - 2) // 2 * shape.tile_tokens * (tiles > 1)
    return shape.num_kv_heads * int((tiles * kv_lens - less).sum())


def _planned_extents(shape: WorkShape, packed, q_lens, kv_lens):
    """(begin, stop, seq) of every item of every KV head, CTA by CTA: the blocks that it reads, and its sequence; i64[n] each."""
    parts = shape.unpack(packed)
    order = parts["order"][: parts["cta_start"][-1]]
    seq, row, begin, chunks, _ = parts["items"][order // shape.num_kv_heads].astype(np.int64).T
    return *_extents(shape, seq, row, begin, chunks, np.asarray(q_lens), np.asarray(kv_lens)), seq


def _extents(shape: WorkShape, seq, row, begin, chunks, q_lens, kv_lens) -> tuple[np.ndarray, np.ndarray]:  # i64[n] each
    """(begin, stop) of the blocks that items read: from `begin`, or the sliding window's start, to what the tile's last row sees
    or, of a split sequence, `chunks` on."""
    q_len, kv_len = q_lens[seq], kv_lens[seq]
    stop = -(-(kv_len - q_len + np.minimum(q_len, row + shape.tile_tokens)) // BLOCK)
    stop = np.where(chunks > 0, np.minimum(stop, begin + chunks * (shape.chunk // BLOCK)), stop)
    if shape.sliding_window is not None:
        begin = np.maximum(begin, (kv_len - q_len + row - shape.sliding_window + 1) // BLOCK)
    return begin, np.maximum(stop, begin)


def _check(shape: WorkShape, q_lens: np.ndarray, kv_lens: np.ndarray) -> None:
    if q_lens.shape != kv_lens.shape or q_lens.ndim != 1 or len(q_lens) > shape.num_seqs:
        raise ValueError(
            f"{q_lens.shape=} and {kv_lens.shape=} must be alike, of at most {shape.num_seqs} sequences: plan for more"
        )
    if not len(q_lens):
        return
    if q_lens.min() < 0 or q_lens.max() > shape.max_q_len or q_lens.sum() > shape.num_tokens:
        raise ValueError(
            f"q_lens of {q_lens.min()} to {q_lens.max()}, {q_lens.sum()} in all: must be 0 to {shape.max_q_len}, "
            f"{shape.num_tokens} in all; make the planner for more tokens or a larger max_q_len, or give it a smaller step"
        )
    if kv_lens.max() > shape.max_kv_len:
        raise ValueError(
            f"a kv_len of {kv_lens.max()} is more than the {shape.max_kv_len} positions of a page-table row: "
            "make the planner with a larger max_kv_len"
        )


def _cut(shape: WorkShape, q_lens, kv_lens, least_kv_lens):
    """The items, heads aside: ((seq, row, begin in blocks, chunks, slot), cost in blocks), i64[n] each, and the groups."""
    chunk = shape.chunk // BLOCK
    blocks = -(-kv_lens // BLOCK)
    first = np.zeros_like(blocks)  # first chunk that a query of the sequence may see
    if shape.sliding_window is not None:
        first = np.maximum(least_kv_lens - q_lens - shape.sliding_window + 1, 0) // shape.chunk
    num_chunks = np.maximum(-(-blocks // chunk) - first, 1)
    count = -(-q_lens // shape.tile_tokens)
    split, run = _choose_split(shape, q_lens, blocks - first * chunk, num_chunks, count)
    chosen = split.nonzero()[0]
    sizes = num_chunks[chosen]
    groups = np.stack((chosen, sizes.cumsum() - sizes, sizes), axis=1)
    if len(chosen):  # into runs of `run` chunks; of the last one to two of these each item is half of what is left
        slots = np.zeros_like(blocks)
        slots[chosen] = groups[:, 1]
        whole_runs = np.maximum(num_chunks // run - 1, 0)
        rest = np.where(split, num_chunks - whole_runs * run, 0)
        count = np.where(split, whole_runs + np.frexp(rest)[1], count)
    end = count.cumsum()
    seq = np.arange(len(q_lens)).repeat(count)
    j = np.arange(len(seq)) - (end - count)[seq]  # run or tile number within the sequence
    row, begin, chunks, slot = j * shape.tile_tokens, first[seq] * chunk, np.zeros_like(seq), np.full_like(seq, -1)
    if len(chosen):
        at = split[seq].nonzero()[0]
        of, j = seq[at], j[at]
        half = j - whole_runs[of]
        left = rest[of] >> np.maximum(half, 0)  # chunks, before this item
        chunks[at] = np.where(half < 0, run, left - (left >> 1))
        start = np.where(half < 0, j * run, num_chunks[of] - left)  # in chunks, from the sequence's first
        row[at], slot[at] = 0, slots[of] + start
        begin[at] += start * chunk
    return (seq, row, begin, chunks, slot), _cost(shape, seq, row, begin, chunks, q_lens, kv_lens), groups


def _choose_split(shape: WorkShape, q_lens, blocks, num_chunks, tiles) -> tuple[np.ndarray, int]:  # (bool[n], chunks)
    """The sequences to split, and most chunks of an item of theirs: short queries whose KV would be too large a part of a CTA's
    share, longest first while slots last."""
    share = int(((blocks + ITEM_COST) * tiles).sum()) * shape.num_kv_heads / shape.num_ctas
    split = (blocks > share / SPLIT_SHARE) & (num_chunks > 1) & (q_lens > 0) & (q_lens <= shape.split_q_len)
    longest = split.nonzero()[0]
    if len(longest):
        longest = longest[(-blocks[longest]).argsort(kind="stable")]
        split[longest[num_chunks[longest].cumsum() > shape.num_slots]] = False
    return split, min(max(int(share / (SPLIT_SHARE * (shape.chunk // BLOCK))), 1), MAX_RUN)


def _cost(shape: WorkShape, *item) -> np.ndarray:  # i64[n]
    begin, stop = _extents(shape, *item)
    return stop - begin + ITEM_COST


def _balance(cost: np.ndarray, num_ctas: int) -> tuple[np.ndarray, np.ndarray]:  # (order i64[n], cta_start i64[num_ctas + 1])
    """Which items each CTA runs, longest first; cost i64[n] falls.

    Large items go by Graham's longest-processing-time rule, the largest that is left to the CTA with the least load, in rounds of
    as many as go to different CTAs. What remains is small beside a CTA's share and is poured, sizes within a factor of POUR_RANGE
    at a time, into the room below the level at which all CTAs would end alike.
    """
    n, rising = len(cost), cost[::-1]
    load = np.zeros(num_ctas)
    runs = []  # (first item, one past the last, their CTAs, or where each CTA's part ends)
    at = n - int(rising.searchsorted(cost.sum() / (LARGE_SHARE * num_ctas), "right"))
    i = 0
    while i < at:
        to = load.argsort(kind="stable")
        to = to[: min(int(load[to].searchsorted(load[to[0]] + cost[i], "right")), at - i)]
        load[to] += cost[i : i + len(to)]
        runs.append((i, i + len(to), to, None))
        i += len(to)
    while at < n:
        end = n - int(rising[: n - at].searchsorted(cost[at] / POUR_RANGE, "right"))
        part = cost[at:end]
        filled = part.cumsum()
        cuts = (filled - part / 2).searchsorted(_room(load, filled[-1]).cumsum())
        cuts[-1] = end - at
        load[0] += filled[cuts[0] - 1] if cuts[0] else 0
        load[1:] += _gaps(np.where(cuts > 0, filled[cuts - 1], 0))
        runs.append((at, end, None, cuts))
        at = end
    if len(runs) == 1 and runs[0][3] is not None:
        return np.arange(n), np.concatenate(([0], runs[0][3]))
    cta, numbers = np.empty(n, np.int16), np.arange(num_ctas, dtype=np.int16)  # 16 bits: numpy sorts them by radix
    for first, end, to, cuts in runs:
        cta[first:end] = to if cuts is None else numbers.repeat(np.concatenate((cuts[:1], _gaps(cuts))))
    return cta.argsort(kind="stable"), np.concatenate(([0], np.bincount(cta, minlength=num_ctas).cumsum()))


def _gaps(x: np.ndarray) -> np.ndarray:
    return x[1:] - x[:-1]  # np.diff takes four times as long


def _room(load: np.ndarray, amount: float) -> np.ndarray:  # f64[num_ctas]
    """What each CTA takes of `amount` so that those that take any end at one level."""
    ordered = np.sort(load)
    filled = ordered.cumsum()
    # Raising the k + 1 lowest CTAs to the highest of them takes below[k]; the level lies where that passes the amount.
    below = np.arange(1, len(load) + 1) * ordered - filled
    k = int(below.searchsorted(amount, "right"))
    return np.maximum((amount + filled[k - 1]) / k - load, 0)

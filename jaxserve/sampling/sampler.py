"""From logits to tokens, on the device: greedy or random, top-k, top-p, min-p, log-probabilities.

Owns the order in which logits are processed, the random draws and the device's view of a request's parameters. Knows
nothing of models, schedules or text. Everything here is a pure function, traced inside a larger jitted program.

The order is vLLM's:
  1. log-probabilities of the raw logits;
  2. suppressed ids (min_tokens) and the edits of logit_edits.py;
  3. the argmax of greedy rows;
  4. temperature, min_p, top_k, then top_p of what those left, which keeps the entry that crosses p;
  5. the draw.
Ties are in vocabulary order everywhere: of equal logits the lower id comes first, and top_k keeps exactly k entries.

A row's token depends only on its logits, its parameters and (seed, sample index, position). It does not depend on the row's place,
on other rows, or on the path that other rows make the program take. Two things make that exact:
  - Probabilities become integers, 2**30 for the likeliest, so that their sums are the same in any order. The exponential is
    computed in float64, far finer than that grid, since float32's last bit varies with a program's shapes.
  - Every path of a filter finds the same thing: the last entry that it keeps, in the order (logit down, id up). One inverse CDF in
    vocabulary order then draws for filtered and unfiltered rows alike.

The cost has four levels, and a batch pays for the highest that one of its rows needs:
  - greedy: block maxima;
  - random, or min_p: an exponential and an inverse CDF by blocks;
  - top_k or top_p: also the 256 likeliest entries, found by block maxima, which suffice if k <= 256 or if they hold the mass p;
  - rows for which these do not suffice: a sort of the vocabulary, which is counted (`Sampled.by_sort`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.row_tiles import MapRows, whole
from jaxserve.parallel.shard import ALONE, Shard
from jaxserve.sampling import across_shards
from jaxserve.sampling import rows as layout
from jaxserve.sampling.edit_rows import ALL_EDITS

BLOCK = 128  # vocabulary entries a block
NUM_CANDIDATES = 256  # likeliest entries that are looked at before the whole vocabulary is sorted
_UNIT = 2**30  # the integer weight of a row's likeliest entry
_MASS_UNIT = 2.0**44  # by which the likeliest entry counts in a sum of probabilities: as many as 2**19 - 1 such entries fit 63 bits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of each row; `unpack_rows` makes them from the host's array."""

    temperature: jax.Array  # f32[R]; 0 is greedy
    top_p: jax.Array  # f32[R]; 1 is off
    min_p: jax.Array  # f32[R]; 0 is off
    top_k: jax.Array  # i32[R]; 0 is off
    seed: jax.Array  # u32[R, 2]; low word, high word
    sample_index: jax.Array  # i32[R]
    position: jax.Array  # i32[R]; of the token being sampled
    suppress_until: jax.Array  # i32[R]; suppress_ids are forbidden at positions below this
    suppress_ids: jax.Array  # i32[R, M]; -1 where there is none
    edits: jax.Array  # i32[R]; bits of edit_rows: kinds of edit, and whether ids are given


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities in the raw distribution, before suppression, temperature and filters."""

    logprobs: jax.Array  # f32[R]; of the row's token
    ranks: jax.Array  # i32[R]; of the row's token, 1 is the likeliest
    top_ids: jax.Array  # i32[R, N]; likeliest first
    top_logprobs: jax.Array  # f32[R, N]
    given: jax.Array | None = None  # f32[R, k]; of ids that were given, if any were


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """One token a row."""

    tokens: jax.Array  # i32[R]; always a valid id, 0 where bad_logits
    bad_logits: jax.Array  # bool[R]; a NaN or +inf among the processed logits, or no finite one, or a block whose sum is none
    by_sort: jax.Array  # bool[R]; the row was not decided by its likeliest entries and made the batch sort the vocabulary
    logprobs: TokenLogprobs | None  # None where max_logprobs was 0


def unpack_rows(packed: jax.Array) -> SamplingRows:  # i32[R, NUM_COLUMNS] as rows.write_row fills it
    """The columns of the host's array, by name."""
    real = partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
    return SamplingRows(
        temperature=real(packed[:, layout.TEMPERATURE]),
        top_p=real(packed[:, layout.TOP_P]),
        min_p=real(packed[:, layout.MIN_P]),
        top_k=packed[:, layout.TOP_K],
        seed=lax.bitcast_convert_type(packed[:, layout.SEED_LOW : layout.SEED_HIGH + 1], jnp.uint32),
        sample_index=packed[:, layout.SAMPLE_INDEX],
        position=packed[:, layout.POSITION],
        suppress_until=packed[:, layout.SUPPRESS_UNTIL],
        suppress_ids=packed[:, layout.SUPPRESS_IDS : layout.NUM_COLUMNS],
        edits=packed[:, layout.EDITS],
    )


def pack_sampled(
    sampled: Sampled,
    delivered: jax.Array | None = None,  # bool[R]; of speculation
) -> jax.Array:  # i32[R, 2], or i32[R, 4 + 2N + MAX_LOGPROB_TOKEN_IDS] with logprobs
    """One small array to fetch; `rows.unpack_sampled` reads it."""
    flags = sampled.bad_logits * layout.FLAG_BAD_LOGITS + sampled.by_sort * layout.FLAG_BY_SORT
    if delivered is not None:
        flags += delivered * layout.FLAG_DELIVERED
    packed = [sampled.tokens[:, None], flags[:, None]]
    if (extra := sampled.logprobs) is not None:
        bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
        assert extra.given is not None, "columns of the given ids"
        packed += [bits(extra.logprobs)[:, None], extra.ranks[:, None], extra.top_ids, bits(extra.top_logprobs), bits(extra.given)]
    return jnp.concatenate(packed, axis=1)


def sample(
    logits: jax.Array,  # f32[R, V]
    rows: SamplingRows,
    *,
    max_logprobs: int = 0,
    given: jax.Array | None = None,
    edit: Callable[[jax.Array], jax.Array] | None = None,
    edit_wanted: jax.Array | None = None,
    draw: Callable[[jax.Array, SamplingRows, Shard], jax.Array] | None = None,
    map_rows: MapRows = whole,
    shard: Shard = ALONE,
) -> Sampled:
    """Samples one token for each row, by its own parameters. The order of operations is at the top of this file.

    A row whose logits are bad (see Sampled) is flagged, and does not change the other rows.

    max_logprobs: static. 0 leaves out log-probabilities, which cost about as much as a random draw. N > 0 gives the sampled
      token's, its rank, and the N likeliest (V if that is less). The tokens are the same either way.
    given: i32[R, k], ids whose log-probabilities are wanted too, where max_logprobs is not 0; None: no others.
    edit: f32[R, V] -> f32[R, V], such as `logit_edits.edit`, bound to the state that it reads.
    edit_wanted: bool[], whether to run `edit`. None: it runs if any row has edits.
    draw: draws the tokens of random rows from their filtered weights, in place of `draw_token`. Traced with 64-bit types enabled.
    map_rows: how exponentials and their sums are computed.
    shard: the device, where each has a part of the vocabulary, a multiple of BLOCK with -inf past the vocabulary's end. `logits`
      is its part, `edit` edits that part, and the results are the same on every device.

    Raises:
      TypeError: logits are not float32.
    """
    if logits.dtype != jnp.float32:
        raise TypeError(f"logits.dtype={logits.dtype} must be float32: ask the matmul for it (preferred_element_type)")
    with jax.named_scope("process_logits"):
        blocks = in_blocks(process_logits(logits, rows, edit, edit_wanted, shard), -jnp.inf)
    with jax.named_scope("greedy"):
        maxima = blocks.max(-1)
        bad = _with_nan(blocks)  # XLA:CPU's max may ignore a NaN
        highest, greedy, bad = across_shards.best(*first_highest(blocks, maxima), bad, blocks[0].size, shard)
        bad |= ~jnp.isfinite(highest)
    random = (rows.temperature > 0) & ~bad
    with jax.named_scope("draw"):
        drawn, by_sort = lax.cond(
            random.any(),
            lambda: _draw(blocks, maxima, None if shard.is_alone else highest, rows, random, draw or draw_token, map_rows, shard),
            lambda: (greedy, jnp.zeros_like(random)),
        )
    tokens = jnp.where(random, drawn, jnp.where(bad, 0, greedy))
    if not max_logprobs:
        return Sampled(tokens, bad, by_sort, None)
    with jax.named_scope("logprobs"):
        n = min(max_logprobs, logits.shape[1] * shard.size)
        return Sampled(tokens, bad, by_sort, token_logprobs(logits, tokens, n, given=given, map_rows=map_rows, shard=shard))


def process_logits(
    logits: jax.Array,  # f32[R, V]
    rows: SamplingRows,
    edit: Callable[[jax.Array], jax.Array] | None = None,
    edit_wanted: jax.Array | None = None,
    shard: Shard = ALONE,
) -> jax.Array:  # f32[R, V]
    """Applies what can change a greedy row's token: min_tokens, and the edits that rows have (see `sample`)."""
    R, V = logits.shape
    ids = rows.suppress_ids
    forbidden = (rows.position < rows.suppress_until)[:, None] & (ids >= 0)
    ids = jnp.where(forbidden, shard.own(ids, V), V)  # past the end: dropped
    logits = logits.at[jnp.arange(R, dtype=jnp.int32)[:, None], ids].set(-jnp.inf, mode="drop")
    if edit is None:
        return logits
    with jax.named_scope("edit"):
        return lax.cond(has_edits(rows) if edit_wanted is None else edit_wanted, edit, lambda x: x, logits)


def has_edits(rows: SamplingRows) -> jax.Array:
    """bool[]: whether any row edits its logits."""
    return ((rows.edits & ALL_EDITS) != 0).any()


def in_blocks(x: jax.Array, fill: float) -> jax.Array:  # [R, N] -> [R, ceil(N / BLOCK), BLOCK]
    """The vocabulary in blocks, its end padded with `fill`."""
    R, N = x.shape
    if N % BLOCK:
        x = jnp.pad(x, ((0, 0), (0, -N % BLOCK)), constant_values=fill)
    return x.reshape(R, -1, BLOCK)


def _take_block(blocks: jax.Array, block: jax.Array) -> jax.Array:  # [R, B, BLOCK], i32[R] -> [R, BLOCK]
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _with_nan(blocks: jax.Array) -> jax.Array:  # f32[R, B, BLOCK] -> bool[R]
    """Rows with a NaN. On a CPU a sum of blocks takes a third of the time of isnan, whose result XLA writes out. Rows with +inf may
    count too, and those of which a block's sum passes float32's largest number: in both directions, or upwards beside a -inf."""
    return jnp.isnan(blocks.sum(-1)).any(-1)


def first_highest(
    blocks: jax.Array,  # f32[R, B, BLOCK]
    maxima: jax.Array,  # f32[R, B]
) -> tuple[jax.Array, jax.Array]:
    """(the maximum f32[R], its id i32[R], the lowest on ties). On a CPU 3 to 7 times as fast as jnp.argmax, whose reduction is not
    vectorised. The maximum is looked up, since XLA would compute that of `maxima` from all logits again."""
    block = jnp.argmax(maxima, -1).astype(jnp.int32)
    place = jnp.argmax(_take_block(blocks, block), -1).astype(jnp.int32)
    return jnp.take_along_axis(maxima, block[:, None], axis=1)[:, 0], block * BLOCK + place


def _likeliest(blocks: jax.Array, maxima: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:  # f32[R, n], i32[R, n]
    """The n highest entries and their ids, in order (value down, id up), without a sort of the vocabulary. They lie in the n blocks
    that come first in the order (maximum down, block up). -0 counts as 0; top_k alone would place it behind 0."""
    R, B, _ = blocks.shape
    if n < B:
        _, chosen = lax.top_k(unsigned_zero(maxima), n)
        chosen = jnp.sort(chosen, -1)  # top_k gives ties in order of place: keep places in vocabulary order
        blocks = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    else:
        chosen = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32), (R, B))
    values, place = lax.top_k(unsigned_zero(blocks.reshape(R, -1)), n)
    return values, jnp.take_along_axis(chosen, place // BLOCK, 1) * BLOCK + place % BLOCK


def unsigned_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 0.0, x)


def _draw(
    logits: jax.Array,  # f32[R, B, BLOCK]
    maxima: jax.Array,  # f32[R, B]
    highest: jax.Array | None,  # f32[R]; of all devices; None: of these logits
    rows: SamplingRows,
    random: jax.Array,  # bool[R]; the other rows' results are not used
    draw: Callable[[jax.Array, SamplingRows, Shard], jax.Array],
    map_rows: MapRows,
    shard: Shard,
) -> tuple[jax.Array, jax.Array]:  # i32[R] tokens, bool[R] which rows needed the sort
    count = logits[0].size
    N = count * shard.size  # the vocabulary and its padding
    with jax.enable_x64(True):  # other dtypes below are spelled out or follow their operands
        highest = maxima.max(-1) if highest is None else highest
        weights = map_rows(_weights, logits, highest, jnp.where(random, rows.temperature, 1.0), rows.min_p)
        total = shard.sum(_cumulative(weights)[:, -1])
        k = jnp.where((rows.top_k > 0) & (rows.top_k < N), rows.top_k, N)
        filtered = random & ((k < N) | (rows.top_p < 1))
        value, last_id, by_sort = lax.cond(
            filtered.any(),
            lambda: _last_kept(logits, maxima, weights, total, k, rows.top_p, filtered, shard),
            lambda: (jnp.full_like(rows.top_p, -jnp.inf), jnp.full_like(k, N), jnp.zeros_like(filtered)),
        )
        ids = shard.ids(count).reshape(logits.shape[1:])
        value, last_id = value[:, None, None], last_id[:, None, None]
        kept = jnp.where((logits > value) | ((logits == value) & (ids <= last_id)), weights, 0)
        return draw(kept, rows, shard), by_sort


def draw_with_probs(logits: jax.Array, rows: SamplingRows, stream: int) -> tuple[jax.Array, jax.Array]:
    """(a token of each row i32[R], the probabilities f32[R, V] that it was drawn with): as `sample` draws from logits f32[R, V], by
    random numbers of `stream`. A greedy row's token has the probability 1."""
    V = logits.shape[1]
    blocks = in_blocks(process_logits(logits, rows), -jnp.inf)
    maxima = blocks.max(-1)
    _, greedy = first_highest(blocks, maxima)
    random = rows.temperature > 0
    weights, _ = _draw(blocks, maxima, None, rows, random, lambda kept, rows, shard: kept, whole, ALONE)
    with jax.enable_x64(True):
        tokens = jnp.where(random, invert_cdf(weights, uniform(rows, stream)), greedy)
        shares = weights.reshape(len(logits), -1)[:, :V].astype(jnp.float64) / weights.sum((1, 2), dtype=jnp.int64)[:, None]
        point = jnp.arange(V, dtype=jnp.int32)[None] == greedy[:, None]
        return tokens, jnp.where(random[:, None], shares, point.astype(jnp.float64)).astype(jnp.float32)


def draw_token(
    weights: jax.Array,  # i32[R, B, BLOCK]: of each token, 2**30 for the likeliest and 0 for what filters dropped
    rows: SamplingRows,
    shard: Shard = ALONE,
) -> jax.Array:  # i32[R]
    """Draws one token for each row, with probabilities in proportion to the weights."""
    return invert_cdf(weights, uniform(rows), shard)


def invert_cdf(
    weights: jax.Array,  # i32[R, B, BLOCK]
    at: jax.Array,  # f64[R]; in [0, 1)
    shard: Shard = ALONE,
) -> jax.Array:  # i32[R]
    """The token of each row at which the sum of weights, in vocabulary order, passes the share `at` of their total."""
    cumulative = _cumulative(weights)
    target = jnp.floor(at * shard.sum(cumulative[:, -1])).astype(jnp.int64)  # below the total, which is below 2**53
    return _locate_across(weights, cumulative, target, shard)


def _locate_across(weights: jax.Array, cumulative: jax.Array, target: jax.Array, shard: Shard) -> jax.Array:
    """`_locate` among the weights of all devices."""
    if shard.is_alone:
        return _locate(weights, cumulative, target)
    own, mine = across_shards.split_target(cumulative[:, -1], target, shard)
    return shard.sum(jnp.where(mine, _locate(weights, cumulative, own) + shard.start(weights[0].size), 0))


def _weights(
    logits: jax.Array,  # f32[R, B, BLOCK]
    highest: jax.Array,  # f32[R]
    temperature: jax.Array,  # f32[R]; above 0
    min_p: jax.Array,  # f32[R]
) -> jax.Array:  # i32[R, B, BLOCK]
    """Probabilities in units of 2**-30 of the likeliest; 0 below min_p."""
    inverse = 1.0 / temperature.astype(jnp.float64)
    below = (logits - highest[:, None, None]).astype(jnp.float64)  # at most 0: no temperature can overflow it
    relative = jnp.exp(below * inverse[:, None, None])
    return jnp.where(relative >= min_p[:, None, None], jnp.round(relative * _UNIT), 0.0).astype(jnp.int32)


def uniform(rows: SamplingRows, stream: int | None = None) -> jax.Array:  # f64[R], in [0, 1)
    """A random number for each row, keyed by its seed, sample index and position, not by its place in the batch. Numbers of
    different `stream`s are independent."""

    def one(seed, sample_index, position):
        key = jax.random.wrap_key_data(seed[::-1], impl="threefry2x32")  # jax.random.key(seed) of a 64-bit seed
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.bits(key if stream is None else jax.random.fold_in(key, stream), (2,), jnp.uint32)

    bits = jax.vmap(one)(rows.seed, rows.sample_index, rows.position)
    with jax.enable_x64(True):
        return bits[:, 0].astype(jnp.float64) * 2.0**-32 + (bits[:, 1] >> 11).astype(jnp.float64) * 2.0**-53


def _cumulative(weights: jax.Array) -> jax.Array:  # i32[R, B, BLOCK] -> i64[R, B]
    """Sums of the weights up to each block's end."""
    return jnp.cumsum(weights.sum(-1, dtype=jnp.int64), -1)


def _locate(
    weights: jax.Array,  # i32[R, B, BLOCK]
    cumulative: jax.Array,  # i64[R, B]
    target: jax.Array,  # i64[R]; 0 <= target < total
) -> jax.Array:  # i32[R]
    """The first place at which the sum of the weights up to and including it exceeds the target."""
    block = jnp.minimum((cumulative <= target[:, None]).sum(-1, dtype=jnp.int32), cumulative.shape[1] - 1)
    weights = _take_block(weights, block)
    before = jnp.take_along_axis(cumulative, block[:, None], 1) - weights.sum(-1, keepdims=True, dtype=jnp.int64)
    within = before + jnp.cumsum(weights.astype(jnp.int64), -1)
    return block * BLOCK + jnp.minimum((within <= target[:, None]).sum(-1, dtype=jnp.int32), BLOCK - 1)


def _last_kept(
    logits: jax.Array,  # f32[R, B, BLOCK]
    maxima: jax.Array,  # f32[R, B]
    weights: jax.Array,  # i32[R, B, BLOCK]; 0 where min_p dropped the entry
    total: jax.Array,  # i64[R]; of the weights
    k: jax.Array,  # i32[R]; B * BLOCK is off
    top_p: jax.Array,  # f32[R]
    filtered: jax.Array,  # bool[R]
    shard: Shard,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # f32[R], i32[R], bool[R]
    """(value, id) of the last entry that top_k and top_p keep, in the order (value down, id up), and which rows needed the sort. A
    row that is not filtered keeps all entries."""
    R, count = logits.shape[0], logits[0].size
    N = count * shard.size
    weights = weights.reshape(R, count)

    def cut(values, ids, ordered):
        n = ids.shape[1]  # all of the vocabulary or its likeliest
        ordered = in_blocks(jnp.where(jnp.arange(n, dtype=jnp.int32) < k[:, None], ordered, 0), 0)
        cumulative = _cumulative(ordered)
        held = cumulative[:, -1]
        target = _last_of(jnp.where(k < N, held, total), top_p)
        last = jnp.minimum(_locate(ordered, cumulative, target), n - 1)[:, None]
        decided = (k <= n) | (held == total) | ((k == N) & (held > target))
        value, last_id = jnp.take_along_axis(values, last, 1)[:, 0], jnp.take_along_axis(ids, last, 1)[:, 0]
        return jnp.where(filtered, value, -jnp.inf), jnp.where(filtered, last_id, N), filtered & ~decided

    def by_sort():
        ids = lax.broadcasted_iota(jnp.int32, (R, N), 1)
        negated, ids = lax.sort((-logits.reshape(R, N), ids), num_keys=1, is_stable=True)
        return cut(-negated, ids, jnp.take_along_axis(weights, ids, 1))[:2]

    def by_bisection():
        value, last_id = _last_across(logits.reshape(R, count), weights, total, k, top_p, shard)
        return jnp.where(filtered, value, -jnp.inf), jnp.where(filtered, last_id, N)

    values, ids = _likeliest(logits, maxima, min(NUM_CANDIDATES, count))
    ordered = jnp.take_along_axis(weights, ids, 1)
    values, ids, ordered = across_shards.likeliest(values, ids, (ordered,), min(NUM_CANDIDATES, N), count, shard)
    value, last_id, undecided = cut(values, ids, ordered)
    all_entries = by_sort if shard.is_alone else by_bisection
    value, last_id = lax.cond(undecided.any(), all_entries, lambda: (value, last_id))
    return value, last_id, undecided


def _last_of(mass: jax.Array, top_p: jax.Array) -> jax.Array:  # i64[R], f32[R] -> i64[R]
    """The place of the last unit of the mass that top_p keeps."""
    return jnp.maximum(jnp.ceil(top_p.astype(jnp.float64) * mass).astype(jnp.int64), 1) - 1


def _last_across(
    logits: jax.Array,  # f32[R, n]
    weights: jax.Array,  # i32[R, n]
    total: jax.Array,  # i64[R]
    k: jax.Array,  # i32[R]
    top_p: jax.Array,  # f32[R]
    shard: Shard,
) -> tuple[jax.Array, jax.Array]:  # f32[R], i32[R]
    """(value, id) of the last entry that top_k and top_p keep of a vocabulary that lies on several devices, without a sort."""
    count = logits.shape[1]
    keys, ids = across_shards.as_ordered(logits), shard.ids(count)

    def place(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(key, id) of the entry at which the sum passes the target, in the order (value down, id up)."""
        key, above = across_shards.threshold(keys, weights, target, shard)
        equal = in_blocks(jnp.where(keys == key[:, None], weights, 0), 0)
        return key, _locate_across(equal, _cumulative(equal), target - above, shard)

    key, last_id = place(jnp.ones_like(weights), k.astype(jnp.int64) - 1)
    key, last_id = key[:, None], last_id[:, None]
    limited = (k < count * shard.size)[:, None]
    dropped = limited & ((keys < key) | ((keys == key) & (ids > last_id)))
    weights = jnp.where(dropped, 0, weights)
    mass = jnp.where(limited[:, 0], shard.sum(weights.sum(1, dtype=jnp.int64)), total)
    key, last_id = place(weights, _last_of(mass, top_p))
    return across_shards.from_ordered(key), last_id


def log_of_mass(masses: jax.Array, shard: Shard = ALONE) -> jax.Array:  # [R, B] -> f32[R]
    """The logarithm of the sum of masses, each at most BLOCK, over all blocks of all devices. It is a sum of integers, units of
    2**-44 of the likeliest entry's mass, so that neither the order nor the blocks' devices count. NaN where a mass is. Traced
    with 64-bit types enabled. The sum must be at least about 1, and a vocabulary have less than 2**19 entries."""
    units = jnp.round(masses.astype(jnp.float64) * _MASS_UNIT).astype(jnp.int64)
    total, bad = shard.sum(jnp.stack([units.sum(-1), jnp.isnan(masses).any(-1).astype(jnp.int64)]))
    return jnp.where(bad > 0, jnp.nan, jnp.log(total.astype(jnp.float64) / _MASS_UNIT)).astype(jnp.float32)


def token_logprobs(
    logits: jax.Array,  # f32[R, V]
    tokens: jax.Array,  # i32[R]
    n: int,
    *,
    given: jax.Array | None = None,  # i32[R, k]
    with_top: jax.Array | None = None,  # bool[]; None is always
    dtype: Any = jnp.float64,
    map_rows: MapRows = whole,
    shard: Shard = ALONE,
) -> TokenLogprobs:
    """Log-probability and rank of each row's token, the n likeliest tokens, and log-probabilities of the given ids. shard: as
    `sample`.

    with_top: whether the likeliest are wanted; without it their values are not valid.
    dtype: of the exponentials. Their sums over blocks are float64 in any case. map_rows: how they are computed.
    """

    def masses(block: jax.Array, highest: jax.Array) -> jax.Array:
        return jnp.exp(block - highest[:, None]).sum(-1, dtype=dtype)

    V = logits.shape[1]
    blocks = in_blocks(logits, -jnp.inf)
    maxima = blocks.max(-1)
    highest = shard.max(maxima.max(-1))
    with jax.enable_x64(True):
        # Each block is a row: exponentials are computed in one shape then, however much of the vocabulary a device has.
        of_blocks = map_rows(masses, blocks.reshape(-1, BLOCK), jnp.repeat(highest, blocks.shape[1]))
        log_mass = log_of_mass(of_blocks.reshape(blocks.shape[:2]), shard)
    asked = tokens[:, None] if given is None else jnp.concatenate([tokens[:, None], given], 1)
    picked = shard.pick(logits, asked)
    chosen = picked[:, :1]
    ids = shard.ids(V)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < tokens[:, None]))

    def top() -> tuple[jax.Array, ...]:
        return across_shards.likeliest(*_likeliest(blocks, maxima, min(n, V)), (), n, V, shard)

    nothing = jnp.zeros((len(tokens), n), jnp.float32), jnp.zeros((len(tokens), n), jnp.int32)
    values, top_ids = top() if with_top is None else lax.cond(with_top, top, lambda: nothing)
    return TokenLogprobs(
        logprobs=chosen[:, 0] - highest - log_mass,
        ranks=1 + shard.sum(ahead.sum(-1, dtype=jnp.int32)),
        top_ids=top_ids,
        top_logprobs=values - highest[:, None] - log_mass[:, None],
        given=None if given is None else picked[:, 1:] - highest[:, None] - log_mass[:, None],
    )

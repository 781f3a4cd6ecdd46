"""Packing: random schedules against a slow model that writes each field value by value; and what the device makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batching.layout import StepLayout
from jaxserve.batching.packer import BatchPacker
from jaxserve.batching.work_lists import AHEAD
from jaxserve.buckets.plan import BucketPlan
from jaxserve.execution import body
from jaxserve.execution.device_state import RowState
from jaxserve.parallel.shard import ALONE
from jaxserve.request import Request
from jaxserve.sampling import rows as sampling_rows
from jaxserve.sampling.edit_rows import EditLayout
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.schedule import Schedule
from kernels.ragged_paged_attention.work_list import WorkShape, plan

MAX_SEQS, PAGE_SIZE, NUM_PAGES, PAGES_PER_SEQ = 8, 4, 50, 12
PLAN = BucketPlan(decode=(2, 4, 8), mixed=((12, 4), (24, 8), (40, 8)), head_rows=(3, 8))


EDITS = EditLayout(max_model_len=48, vocab_size=1000)


def layouts() -> dict:
    return {b: StepLayout(b, MAX_SEQS, PAGE_SIZE, PLAN.max_head_rows) for b in PLAN.buckets}


def random_request(rng: np.random.Generator, i: int) -> Request:
    params = SamplingParams(
        temperature=float(rng.random()),
        top_k=int(rng.integers(0, 50)),
        min_tokens=int(rng.integers(0, 3)),
        stop_token_ids=[5, 9],
        logprobs=1 if rng.random() < 0.2 else None,
        presence_penalty=1.5 if rng.random() < 0.2 else 0.0,
    )
    prompt = rng.integers(0, 1000, int(rng.integers(1, 48))).tolist()
    return Request(f"r{i}", prompt, params, seed=int(rng.integers(2**63)), sample_index=i % 3)


def random_schedule(rng: np.random.Generator, number: int) -> Schedule:
    """Decodes, then chunks (all their prompt, or part of it), at rows in any order, with any page updates."""
    num_decodes, num_chunks = int(rng.integers(0, 6)), int(rng.integers(0, 4))
    n = min(max(num_decodes + num_chunks, 1), MAX_SEQS)
    num_decodes = min(num_decodes, n)
    requests = [random_request(rng, 10 * number + i) for i in range(n)]
    starts, q_lens, samples = [], [], []
    for i, request in enumerate(requests):
        length = len(request.token_ids)
        start = length - 1 if i < num_decodes else int(rng.integers(0, length))
        q_len = 1 if i < num_decodes else int(rng.integers(1, min(length - start, 10) + 1))
        starts.append(start)
        q_lens.append(q_len)
        samples.append(start + q_len == length)
    num_updates = int(rng.integers(0, 40 if number % 5 == 0 else 4))
    places = rng.choice(MAX_SEQS * PAGES_PER_SEQ, num_updates, replace=False)
    updates = np.stack([places // PAGES_PER_SEQ, places % PAGES_PER_SEQ, rng.integers(0, NUM_PAGES, num_updates)], 1)
    return Schedule(
        step_id=number,
        requests=requests,
        rows=rng.permutation(MAX_SEQS)[:n].astype(np.intp),
        q_lens=np.array(q_lens, np.int32),
        starts=np.array(starts, np.int32),
        samples=np.array(samples, bool),
        generations=np.full(n, number),
        page_updates=updates.astype(np.int32),
        num_decodes=num_decodes,
        num_tokens=sum(q_lens),
        max_q_len=max(q_lens),
        least_starts=np.array(starts, np.int32) - number % 2 * np.minimum(starts, 3).astype(np.int32),
    )


def slow_pack(schedule: Schedule, tokens: int, seqs: int) -> tuple[list[int], list[list[int]]]:
    """(the packed array of a bucket of that size, the page updates that have no room in it), in plain Python."""
    n, flat = len(schedule.requests), []
    ids: list[int] = []
    ends = []
    for i, request in enumerate(schedule.requests):
        if i < schedule.num_decodes:
            ids.append(-1)
        else:
            ids += [request.token_ids[int(schedule.starts[i]) + j] for j in range(int(schedule.q_lens[i]))]
        ends.append(len(ids) - 1)
    flat += ids + [0] * (tokens - len(ids))
    flat += [int(row) for row in schedule.rows] + [MAX_SEQS] * (seqs - n)
    flat += [int(q) for q in schedule.q_lens] + [0] * (seqs - n)
    flat += [-1 if i < schedule.num_decodes else int(schedule.starts[i]) for i in range(n)] + [0] * (seqs - n)
    room = seqs + tokens // PAGE_SIZE
    updates = schedule.page_updates.tolist()
    for update in updates[:room] + [[MAX_SEQS, 0, 0]] * (room - len(updates)):
        flat += update
    sampling = [i for i in range(n) if schedule.samples[i]]
    rest = PLAN.max_head_rows - len(sampling)
    flat += [ends[i] for i in sampling] + [0] * rest
    flat += [int(schedule.rows[i]) for i in sampling] + [MAX_SEQS] * rest
    for i in sampling:
        request, table = schedule.requests[i], np.zeros((1, sampling_rows.NUM_COLUMNS), np.int32)
        about = {"seed": request.seed, "sample_index": request.sample_index, "num_prompt_tokens": request.num_prompt_tokens}
        sampling_rows.write_row(table, 0, request.params, **about, suppress_ids=request.stop_ids)
        flat += table[0].tolist()
    flat += [0] * (rest * sampling_rows.NUM_COLUMNS)
    return flat, updates[room:]


def test_random_schedules_against_the_slow_model():
    rng = np.random.default_rng(0)
    packer = BatchPacker(PLAN, layouts(), MAX_SEQS, EDITS)
    seen, extras = set(), 0
    for number in range(300):
        schedule = random_schedule(rng, number)
        assert packer.newcomers(schedule) == schedule.requests
        assert packer.newcomers(schedule) == []
        inputs = packer.pack(schedule)
        bucket = PLAN.select(schedule.num_tokens, schedule.num_seqs, schedule.max_q_len)
        packed, extra = slow_pack(schedule, bucket.tokens, bucket.seqs)
        assert inputs.bucket == bucket and inputs.packed.dtype == np.int32
        assert inputs.packed.tolist() == packed
        assert inputs.extra_page_updates.tolist() == extra
        extras += bool(extra)
        edited = [i for i, r in enumerate(schedule.requests) if r.params.presence_penalty]
        assert [row[0] for row in inputs.edit_rows] == schedule.rows[edited].tolist()
        for row, i in zip(inputs.edit_rows, edited, strict=True):
            request = schedule.requests[i]
            assert row[1 : 1 + len(request.token_ids)].tolist() == request.token_ids
            assert row[49:52].tolist() == np.array([1.5, 0, 1], np.float32).view(np.int32).tolist()
            assert row[52] == request.num_prompt_tokens
        sampling = [r for r, s in zip(schedule.requests, schedule.samples, strict=True) if s]
        assert inputs.num_samples == len(sampling) and inputs.num_tokens == sum(schedule.q_lens)
        assert inputs.head_rows == (PLAN.select_head_rows(len(sampling)) if sampling else 0)
        assert inputs.with_logprobs == any(r.params.logprobs is not None for r in sampling)
        seen.add((bucket, inputs.head_rows, inputs.with_logprobs))
    assert {b for b, *_ in seen} == set(PLAN.buckets) and {h for _, h, _ in seen} == {0, 3, 8} and extras > 10


def test_the_template_is_not_written_to():
    packer = BatchPacker(PLAN, layouts(), MAX_SEQS, EDITS)
    before = {b: layout.padding.copy() for b, layout in packer.layouts.items()}
    rng = np.random.default_rng(1)
    for number in range(20):
        schedule = random_schedule(rng, number)
        packer.newcomers(schedule)
        packer.pack(schedule)
    for b, layout in packer.layouts.items():
        np.testing.assert_array_equal(layout.padding, before[b])


def test_parameters_are_written_once_for_each_owner_of_a_row():
    rng = np.random.default_rng(2)
    packer = BatchPacker(PLAN, layouts(), MAX_SEQS, EDITS)
    first, second = random_schedule(rng, 5), random_schedule(rng, 6)
    while second.num_seqs < 2:
        second = random_schedule(rng, 6)
    packer.newcomers(first)
    packer.newcomers(second)
    second.generations = second.generations.copy()
    second.generations[1] += 1
    assert packer.newcomers(second) == [second.requests[1]]


def test_unpack_undoes_the_layout_for_numpy_and_for_traced_arrays():
    for layout in layouts().values():
        packed = np.arange(layout.size, dtype=np.int32)
        fields, traced = layout.unpack(packed), jax.jit(layout.unpack)(packed)
        assert list(fields) == list(layout.fields) and fields.keys() == traced.keys()
        np.testing.assert_array_equal(np.concatenate([x.ravel() for x in fields.values()]), packed)  # no gap, no overlap
        for name, x in fields.items():
            np.testing.assert_array_equal(traced[name], x)
            assert np.shares_memory(x, packed)


@pytest.fixture(scope="module")
def context():
    """What the device makes of a packed step: `body._context` compiled for one bucket, state in, everything out."""
    layout = StepLayout(PLAN.buckets[-1], MAX_SEQS, PAGE_SIZE, PLAN.max_head_rows)

    @jax.jit
    def run(packed, page_table, num_computed, last_tokens):
        unread = jnp.zeros((MAX_SEQS, 1), jnp.int32)  # history and edits
        rows = RowState(page_table, num_computed, last_tokens, unread, unread, None)
        fields = layout.unpack(packed)
        context, seq, _, after = body._context(layout, "reference", False, fields, NUM_PAGES, rows, ALONE)
        return context, body._tokens(fields, seq, rows), after.page_table, after.num_computed

    return layout, run


def test_the_device_reads_a_step_as_it_was_meant(context):
    """Positions, tokens, slots, lengths and tables of random steps, against the requests themselves. Of the state, only the rows
    that were scheduled change; padding touches nothing."""
    layout, run = context
    rng = np.random.default_rng(3)
    packer = BatchPacker(BucketPlan(mixed=PLAN.mixed[-1:], head_rows=PLAN.head_rows), {layout.bucket: layout}, MAX_SEQS, EDITS)
    T = layout.bucket.tokens
    for number in range(60):
        schedule = random_schedule(rng, number)
        page_table = np.stack([rng.permutation(NUM_PAGES)[:PAGES_PER_SEQ] for _ in range(MAX_SEQS)]).astype(np.int32)
        num_computed, last_tokens = rng.integers(0, 47, MAX_SEQS, dtype=np.int32), rng.integers(0, 1000, MAX_SEQS, dtype=np.int32)
        packer.newcomers(schedule)
        inputs = packer.pack(schedule)
        out = run(inputs.packed, jnp.array(page_table), jnp.array(num_computed), jnp.array(last_tokens))
        out, tokens, new_table, new_computed = jax.tree.map(np.asarray, out)

        for row, column, page in schedule.page_updates[: layout.num_updates].tolist():
            page_table[row, column] = page
        np.testing.assert_array_equal(new_table, page_table)
        at = 0
        for i, request in enumerate(schedule.requests):
            row, q_len = int(schedule.rows[i]), int(schedule.q_lens[i])
            is_decode = i < schedule.num_decodes
            start = int(num_computed[row]) if is_decode else int(schedule.starts[i])
            assert out.cu_q_lens[i] == at and out.kv_lens[i] == start + q_len
            np.testing.assert_array_equal(out.page_table[i], page_table[row])
            for position in range(start, start + q_len):
                assert out.positions[at] == position
                assert tokens[at] == (last_tokens[row] if is_decode else request.token_ids[position])
                slot = page_table[row, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                assert out.slot_mapping[at] == slot
                at += 1
            num_computed[row] = start + q_len
        np.testing.assert_array_equal(new_computed, num_computed)
        assert (out.cu_q_lens[schedule.num_seqs :] == at).all() and (out.kv_lens[schedule.num_seqs :] == 0).all()
        padding = out.slot_mapping[at:]
        assert (padding >= NUM_PAGES * PAGE_SIZE).all() and len(set(padding.tolist())) == T - at


def test_a_step_of_nothing_changes_nothing(context):
    layout, run = context
    page_table = jnp.arange(MAX_SEQS * PAGES_PER_SEQ, dtype=jnp.int32).reshape(MAX_SEQS, PAGES_PER_SEQ)
    num_computed = jnp.arange(MAX_SEQS, dtype=jnp.int32)
    out, _, new_table, new_computed = run(layout.padding, page_table, num_computed, num_computed)
    np.testing.assert_array_equal(new_table, page_table)
    np.testing.assert_array_equal(new_computed, num_computed)
    assert not out.kv_lens.any() and (out.slot_mapping >= NUM_PAGES * PAGE_SIZE).all()


class WorkPlanner:
    """What a layout asks of a planner, recording nothing and doing no more than its work list."""

    def __init__(self, shape: WorkShape):
        self.shape, self.size = shape, shape.size

    def plan(self, q_lens, kv_lens, least_kv_lens, out):
        return plan(self.shape, q_lens, kv_lens, least_kv_lens=least_kv_lens, out=out)


def test_work_lists_travel_with_the_step():
    """One for each sliding window, planned for the schedule's own lengths, of decodes alone some tokens ahead; padding
    has none."""

    def planners(bucket):
        tile = min(4, bucket.max_q_len)
        sizes = (bucket.tokens, bucket.seqs, bucket.max_q_len, 2, PAGE_SIZE * PAGES_PER_SEQ, 3, tile, 1, 64)
        return {window: WorkPlanner(WorkShape(*sizes, window)) for window in (None, 5)}

    all_layouts = {b: StepLayout(b, MAX_SEQS, PAGE_SIZE, PLAN.max_head_rows, planners(b)) for b in PLAN.buckets}
    packer, rng, lists = BatchPacker(PLAN, all_layouts, MAX_SEQS, EDITS), np.random.default_rng(5), set()
    for number in range(20):
        schedule = random_schedule(rng, number)
        packer.newcomers(schedule)
        inputs = packer.pack(schedule)
        layout = all_layouts[inputs.bucket]
        fields, plain = layout.unpack(inputs.packed), StepLayout(inputs.bucket, MAX_SEQS, PAGE_SIZE, PLAN.max_head_rows)
        np.testing.assert_array_equal(fields["sampling"], plain.unpack(inputs.packed[: plain.size])["sampling"])
        for window, (name, planner) in layout.work.items():
            least = schedule.least_starts + schedule.q_lens
            kv_lens = schedule.starts + schedule.q_lens
            if schedule.num_decodes == schedule.num_seqs:
                kv_lens = np.minimum(kv_lens + AHEAD, planner.shape.max_kv_len)
            want = plan(planner.shape, schedule.q_lens, kv_lens, least_kv_lens=least)
            np.testing.assert_array_equal(fields[name], want)
            assert planner.shape.sliding_window == window
            assert planner.shape.unpack(layout.unpack(layout.padding)[name])["cta_start"][-1] == 0
            lists.add(fields[name].tobytes())
    assert len(lists) > 10

"""Host time of a step with speculation: schedule, pack, update, and what drafts take beside them; nothing of a model or a device.

Every running request decodes in every step and verifies up to --num_drafts drafts. Outputs are made of phrases that recur, within a
request and between them, and a draft stands if it is what comes next. With "device" drafts come from there, right nine times in
ten; with "suffix" the host makes them. "drafts" is what is learnt of them, their counts, and with suffix the search for new ones.
Times are wall-clock microseconds, as scripts.bench_scheduler's; steps do not overlap.

    python -m scripts.bench_draft_host --num_running=256
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.provenance import provenance, write_json

_RUNNING = flags.DEFINE_list("num_running", ["64", "256"], "Running decodes.")
_METHODS = flags.DEFINE_list("methods", ["device", "suffix"], "Where drafts are made.")
_PAGES = flags.DEFINE_list("page_sizes", ["64", "16"], "Tokens of a page, each a case of its own; the engine's own choice is 64.")
_DRAFTS = flags.DEFINE_integer("num_drafts", 4, "Most drafts of a row.", lower_bound=1)
_STEPS = flags.DEFINE_integer("num_steps", 300, "Steps measured in each case.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

PARTS = ("schedule", "pack", "update", "drafts")
PROMPT_LEN, BUDGET, VOCAB = 200, 4096, 100_000
NUM_WARM_UP, NUM_PHRASES = 20, 2000


class Machine:
    """A scheduler with requests that decode, what an engine with drafts has beside it, and the outputs that come."""

    def __init__(self, method: str, num_running: int, num_drafts: int, num_steps: int, page_size: int):
        from jaxserve.batching.layout import StepLayout
        from jaxserve.batching.packer import BatchPacker
        from jaxserve.buckets.plan import BucketPlan
        from jaxserve.engine.stats import EngineStats
        from jaxserve.request import Request
        from jaxserve.sampling.edit_rows import EditLayout
        from jaxserve.sampling_params import SamplingParams
        from jaxserve.scheduling.config import SchedulerConfig
        from jaxserve.scheduling.page_pool import PagePool
        from jaxserve.scheduling.scheduler import Scheduler
        from jaxserve.speculative.config import SpeculativeConfig
        from jaxserve.speculative.draft_lengths import DraftLengths
        from jaxserve.speculative.suffix import SuffixDrafts

        self.rng, self.num_drafts, on_host = np.random.default_rng(2), num_drafts, method == "suffix"
        most = PROMPT_LEN + (1 + num_drafts) * (num_steps + num_drafts + 2)
        config = SchedulerConfig(max_model_len=most, max_num_seqs=num_running, max_num_batched_tokens=BUDGET)
        pool = PagePool(num_running * -(-most // page_size), page_size, True)
        n, k = num_running, num_drafts
        plan = BucketPlan(decode=(n,), mixed=((BUDGET, n),), head_rows=(n, n * (1 + k)), draft=((n, k),))
        layouts = {bucket: StepLayout(bucket, num_running, page_size, plan.max_head_rows, {}) for bucket in plan.buckets}
        self.packer = BatchPacker(plan, layouts, num_running, EditLayout(most, vocab_size=VOCAB))
        self.lengths = DraftLengths(plan, num_running, BUDGET, num_drafts, adaptive=False, on_host=on_host)
        self.scheduler = Scheduler(config, pool, draft_lengths=self.lengths)
        speculative = SpeculativeConfig(method="suffix", num_speculative_tokens=num_drafts)
        self.suffix = SuffixDrafts(speculative, num_running, most) if on_host else None
        self.stats = EngineStats()
        phrases = [self.rng.integers(10, VOCAB, self.rng.integers(4, 20)) for _ in range(NUM_PHRASES)]
        chosen = np.minimum(self.rng.zipf(1.3, (num_running, most // 4 + 1)), NUM_PHRASES) - 1
        self.texts = np.stack([np.concatenate([phrases[i] for i in row])[:most] for row in chosen]).astype(np.int32)
        for i, text in enumerate(self.texts):
            self.scheduler.add(Request(str(i), text[:PROMPT_LEN].tolist(), SamplingParams(max_tokens=None), arrival=float(i)))

    def sample(self, schedule: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, counts, new drafts), as a head brings them."""
        from jaxserve.speculative.proposer import NO_DRAFT

        k, rows = self.num_drafts, schedule.logits_rows
        tokens, counts = np.zeros((schedule.num_seqs, 1 + k), np.int32), np.zeros(schedule.num_seqs, np.int32)
        drafts = np.full((len(rows), k), NO_DRAFT, np.int32)
        for i, first in zip(rows.entries.tolist(), rows.firsts.tolist(), strict=True):
            request = schedule.requests[i]
            text, begin, planned = self.texts[int(request.request_id)], len(request.token_ids), 0
            tokens[i] = text[begin : begin + 1 + k]
            if i < schedule.num_decodes:
                planned = int(schedule.q_lens[i]) - 1
            right = self.lengths.proposed[schedule.rows[i], :planned] == tokens[i, :planned]
            counts[i] = 1 + (planned if right.all() else int(right.argmin()))
            if self.suffix is None:
                following = text[begin + counts[i] : begin + counts[i] + k]
                drafts[first + counts[i] - 1] = np.where(self.rng.random(k) < 0.9, following, 5)
        return tokens, counts, drafts

    def step(self) -> np.ndarray | None:  # f64[parts]
        """Seconds of each part of a step; None of one that is not decodes alone."""
        begun = time.perf_counter()
        schedule = self.scheduler.schedule()
        scheduled = time.perf_counter()
        assert schedule is not None
        self.packer.newcomers(schedule)
        self.packer.pack(schedule)
        packed = time.perf_counter()
        tokens, counts, drafts = self.sample(schedule)
        if not schedule.num_drafts:
            tokens = tokens[:, 0]
        sampled = time.perf_counter()
        undisturbed = self.scheduler.is_undisturbed(schedule)
        outcomes = self.lengths.take_tokens(schedule, tokens, counts if schedule.num_drafts else None, drafts, undisturbed)
        learnt = time.perf_counter()
        result = self.scheduler.update(schedule, tokens, counts if schedule.num_drafts else None)
        updated = time.perf_counter()
        if self.suffix is not None:
            self.suffix.propose(
                schedule, self.scheduler.rows, tokens, counts if schedule.num_drafts else None, self.lengths.proposed
            )
        if outcomes is not None:
            self.stats.add_drafts(schedule, outcomes, result, any_ended=bool(result.finished))
        ended = time.perf_counter()
        if schedule.num_decodes < schedule.num_seqs:
            return None
        return np.array([scheduled - begun, packed - scheduled, updated - learnt, learnt - sampled + ended - updated])


def measure(method: str, num_running: int, page_size: int) -> dict[str, Any]:
    machine = Machine(method, num_running, _DRAFTS.value, NUM_WARM_UP + _STEPS.value, page_size)
    for _ in range(NUM_WARM_UP):
        machine.step()
    times = [seconds for _ in range(_STEPS.value) if (seconds := machine.step()) is not None]
    columns = np.stack(times).T * 1e6
    found = {f"{part}_us": round(statistics.median(column), 1) for part, column in zip(PARTS, columns, strict=True)}
    totals, stats = columns.sum(0), machine.stats
    found |= {"total_us": round(statistics.median(totals), 1), "total_min_us": round(float(totals.min()), 1)}
    found |= {"p99_us": round(float(np.percentile(totals, 99)), 1), "num_steps": len(times)}
    shares = {"drafts_a_row": stats.num_draft_tokens / (len(times) + NUM_WARM_UP) / num_running}
    return {
        "method": method,
        "num_running": num_running,
        "page_size": page_size,
        **found,
        **shares,
        "draft_summary": stats.draft_summary,
    }


def main() -> None:
    cases = [(method, int(n), int(page)) for page in _PAGES.value for method in _METHODS.value for n in _RUNNING.value]
    results = [measure(*case) for case in tqdm(cases, leave=False, file=sys.stderr)]
    about = {"benchmark": "draft_host", "num_drafts": _DRAFTS.value, **provenance()}
    write_json(_JSON.value, {**about, "results": results})
    if _JSON.value == "-":
        return
    print("us a step, medians; the least and the 99th percentile of whole steps")
    columns = (*PARTS, "total", "total_min", "p99")
    print(f"{'drafts by':>9} {'page':>4} {'running':>7}" + "".join(f" {name:>9}" for name in columns))
    for r in results:
        print(
            f"{r['method']:>9} {r['page_size']:>4} {r['num_running']:>7}" + "".join(f" {r[f'{name}_us']:>9.1f}" for name in columns)
        )
        print(f"          {r['draft_summary']}")


if __name__ == "__main__":
    run_command(main)

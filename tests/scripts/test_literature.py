"""What the figures of the literature compute, against hand calculation and the data that they stand beside."""

import gzip
import string
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.buckets.plan import Bucket
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.workloads.workload import Workload, WorkloadRequest
from scripts.reproduce import literature_costs as costs
from scripts.reproduce import literature_runs as runs
from scripts.reproduce.measured_steps import MeasuredSteps
from scripts.reproduce.published import DECODE_MS, PREFILL_MS
from scripts.reproduce.sarathi_costs import stage_seconds, step_seconds
from scripts.reproduce.sarathi_setups import SETUPS, stages
from scripts.reproduce.timeline import Step, drawn, longest_gap, timeline

YI = SETUPS["yi-34b"].machine


class OneSecondAToken:
    """Step times by hand: a step lasts a second a token."""

    page_size: int = 16
    host_seconds: float = 0.0
    window: int | None = None

    def coefficients(self, bucket):
        return np.array([bucket.tokens, 0.0, 0.0])

    def body_seconds(self, bucket, kv_tokens=0, pairs=0):
        return bucket.tokens

    def head_seconds(self, rows):
        return 0.0

    def seconds(self, bucket, head_rows, kv_tokens, pairs):
        return float(bucket.tokens)


# A decodes when B comes, at 5 s: A's prompt of 4 ends at 4 s and its first decode at 5 s. B has six tokens of prompt.
TWO = Workload("two", (WorkloadRequest(4, 4, 0.0), WorkloadRequest(6, 2, 5.0)))


@pytest.mark.parametrize(
    ("policy", "budget", "steps", "ends", "gap"),
    [
        ("prefill_first", 16, ["Ap", "Ad", "Bp", "Ad Bd", "Ad"], [4, 5, 11, 13, 14], 8),
        ("orca", 16, ["Ap", "Ad", "Ad Bp", "Ad Bd"], [4, 5, 12, 14], 7),
        ("request_level", 16, ["Ap", "Ad", "Ad", "Ad", "Bp", "Bd"], [4, 5, 6, 7, 13, 14], 1),
        ("sarathi", 4, ["Ap", "Ad", "Ad Bp0", "Ad Bp1", "Bd"], [4, 5, 9, 13, 14], 4),
    ],
)
def test_the_four_policies_by_hand(policy, budget, steps, ends, gap):
    limits = SchedulerConfig(max_model_len=16, max_num_batched_tokens=budget, max_num_seqs=4, policy=policy)
    found = timeline(TWO, limits, OneSecondAToken())
    assert [str(step) for step in found] == steps
    assert [step.end for step in found] == ends
    assert longest_gap(found, "A") == gap


def test_figure_7_is_what_the_paper_draws():
    """vLLM holds up A and B behind whole prompts, Orca beside them, FasterTransformer lets C and D wait, Sarathi none of it."""
    (stage,) = stages(YI)
    found = {}
    for name, policy in runs.POLICIES.items():
        budget = runs.BUDGET if policy == "sarathi" else 2048
        limits = SchedulerConfig(max_model_len=2048, max_num_batched_tokens=budget, max_num_seqs=8, policy=policy)
        found[name] = timeline(runs.four_requests(), limits, stage)
    texts = {name: [str(step) for step in steps] for name, steps in found.items()}
    assert "Cp Dp" in texts["vLLM"] and "Ad Bd Cp Dp" in texts["Orca"]
    assert texts["FasterTransformer"].index("Cp Dp") > max(i for i, t in enumerate(texts["FasterTransformer"]) if "B" in t)
    assert texts["Sarathi-Serve"][:3] == ["Ap Bp", "Ad Bd", "Ad Bd Cp0"]
    assert all(step.decodes + step.chunk_tokens <= runs.BUDGET for step in found["Sarathi-Serve"])
    gaps = {name: longest_gap(steps, "AB") for name, steps in found.items()}
    assert gaps["FasterTransformer"] < gaps["Sarathi-Serve"] < gaps["Orca"] < gaps["vLLM"]
    for name, steps in found.items():  # one token a decode and one of the prompt
        decodes = Counter(part for step in steps for part in (f"{who}{what}" for who, what in step.parts.items()) if part[1] == "d")
        assert [decodes[f"{letter}d"] + 1 for letter in "ABCD"] == [output for _, output, _ in runs.FOUR], name


def test_timelines_have_letters():
    many = Workload("many", tuple(WorkloadRequest(1, 1) for _ in range(len(string.ascii_uppercase) + 1)))
    with pytest.raises(ValueError, match="27 requests, and 26 letters"):
        timeline(many, SchedulerConfig(max_model_len=16, max_num_batched_tokens=64, max_num_seqs=32), OneSecondAToken())


def test_drawn_counts_equal_steps():
    steps = [Step(0, 1, {"B": "d", "A": "d"}, 2, 0), Step(1, 2, {"A": "d", "B": "d"}, 2, 0), Step(2, 3, {"C": "p0"}, 0, 5)]
    assert drawn(steps) == "Ad Bd x2 \\| Cp0"
    assert longest_gap(steps, "AB") == 1


def test_chunks_before_the_last_one_are_no_tokens():
    """C's first token comes with its second chunk, at 4: its gap is the 2 s to its decode, not the 3 s from its first chunk."""
    ends, parts = (1.0, 4.0, 6.0), ("p0", "p1", "d")
    steps = [Step(end - 1, end, {"C": part}, int(part == "d"), int(part != "d")) for end, part in zip(ends, parts, strict=True)]
    assert longest_gap(steps, "C") == 2.0


def test_parts_of_a_layer_are_its_operators():
    (stage,) = stages(YI)
    found = costs.parts(YI, 64, kv_tokens=64 * 1024)
    whole = sum(stage.operators(64).values()) + stage.per_kv_token * 64 * 1024 / YI.model.num_layers
    assert sum(found.values()) == pytest.approx(whole) and min(found.values()) > 0
    assert found["linear"] == pytest.approx(sum(stage.operators(64)[op] for op in ("qkv", "o", "mlp_up", "mlp_down")))


def test_prompts_in_one_step():
    assert costs.prefill_step(YI, 1, 512) == pytest.approx(step_seconds(YI, 0, 0, 512))
    (stage,) = stages(YI)
    assert costs.prefill_step(YI, 3, 512) == pytest.approx(stage.seconds(Bucket(1536, 3, 512), 3, 0, 3 * 512 * 513 / 2))
    assert costs.prefill_step(YI, 3, 512) < 3 * costs.prefill_step(YI, 1, 512)


def test_saturation_is_where_flat_meets_slope():
    sizes = [1, 64, 128, 256, 512, 4096]
    assert costs.saturation_batch([max(2.0, T / 100) for T in sizes], sizes) == pytest.approx(200)


def test_measured_steps_are_the_measured_ones():
    """At the artifact's own steps they are its times; between two they lie between; beyond, what the model adds goes on."""
    (stage,) = stages(YI)
    steps = MeasuredSteps(stage)
    for n, ms in DECODE_MS.items():
        assert steps.seconds(Bucket(n, n, 1), n, 1024 * n, 0) == pytest.approx(ms / 1e3)
    for n, ms in PREFILL_MS.items():
        assert steps.seconds(Bucket(n, 1, n), 1, 0, n * (n + 1) / 2) == pytest.approx(ms / 1e3)
    low, mid, high = (steps.excess(Bucket(n, n, 1)) for n in (16, 24, 32))
    assert low < mid < high == steps.excess(Bucket(32, 32, 1))
    far, near = (steps.seconds(Bucket(4, 4, 1), 4, kv, 0) for kv in (4 * 8192, 4 * 1024))
    assert far - near == pytest.approx(stage.per_kv_token * 4 * 7168)
    bucket = Bucket(8, 8, 1)
    assert steps.coefficients(bucket) @ [1, 100, 7] == pytest.approx(steps.body_seconds(bucket, 100, 7))


def test_factors_by_hand():
    assert runs.factor_for(lambda f: f / 3, 2.0) == pytest.approx(6)
    assert runs.factor_for(lambda f: 5.0, 2.0) == pytest.approx(1)
    assert runs.factor_for(lambda f: 0.5, 2.0) == pytest.approx(1000)


@pytest.mark.parametrize("name", list(runs.NETWORKS))
def test_a_slower_network_turns_the_order(name):
    """At the factor for 1 both deployments take as long, and twice as slow is worse for the one that sums across nodes."""
    slower = runs.NETWORKS[name]
    assert (
        runs.across_ratio(slower(1.0), 32)
        < 1
        == pytest.approx(runs.across_ratio(slower(runs.factor_for(lambda f: runs.across_ratio(slower(f), 32), 1.0)), 32), rel=1e-3)
    )
    assert runs.across_ratio(slower(40.0), 32) > runs.across_ratio(slower(20.0), 32) > 1
    staged = [sum(stage_seconds(replace(runs.FALCON, network=slower(f)), 32, 2048)) for f in (1.0, 40.0)]
    assert staged[0] == staged[1], "a stage computes as long over any network"


def test_512_over_128_of_a_profile(tmp_path):
    """Of a profile whose linear operators take as many milliseconds as hundreds of tokens: 512 over 128 is 4."""
    columns = ["attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"]
    others = ["mlp_act", "attn_rope", "input_layernorm", "post_attention_layernorm", "add"]
    shape = {"use_gated_mlp": "True", "vocab_size": 100, "n_embd": 1024, "n_head": 8, "n_kv_head": 8, "n_expanded_embd": 4096}
    rows = [
        {**shape, "num_tokens": T, "num_tensor_parallel_workers": tp}
        | {f"time_stats.{c}.median": T / 100 for c in columns}
        | {f"time_stats.{c}.median": 1.0 for c in others}
        for T in (128, 512)
        for tp in (1, 2)
    ]
    with pytest.raises(ValueError, match="no profile a100_"):
        costs.measured_by_tp(tmp_path)
    with gzip.open(tmp_path / "a100_tiny_mlp.csv.gz", "wt") as file:
        file.write(",".join(rows[0]) + "\n" + "\n".join(",".join(map(str, row.values())) for row in rows))
    found = costs.measured_by_tp(tmp_path)
    assert [(row["profile"], row["tp"]) for row in found] == [("a100_tiny", 1), ("a100_tiny", 2)]
    assert np.allclose([row["measured"] for row in found], 4) and all(1 <= row["ours"] <= 4 for row in found)


@pytest.mark.slow
def test_sections_draw_and_say_what_they_found(tmp_path):
    """The quick ones: tables with their numbers, data for JSON, and a picture each."""
    for section in (
        costs.throughput,
        costs.layer,
        costs.roofline,
        costs.chunks,
        costs.mixing,
        costs.falcon,
        runs.policies,
        runs.pipeline,
    ):
        text, data = section(tmp_path)
        assert text.startswith("| ") and data
    text, data = costs.tensor_parallel(tmp_path)
    assert "were not given" in text and "vidur" not in data
    drawn_files = {path.name for path in tmp_path.glob("*.png")}
    assert {"throughput.png", "layer.png", "roofline.png", "timeline.png", "pipeline.png", "tensor_parallel.png"} <= drawn_files

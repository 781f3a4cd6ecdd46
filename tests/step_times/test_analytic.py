"""Analytic step times against hand calculation from datasheets, and where they must rise."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.buckets.plan import Bucket
from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.models.config import ModelConfig
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.simulation.replay import replay
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.fitted import StepTimes
from jaxserve.step_times.hardware import ETHERNET_100G, GPUS, KERNEL_SECONDS
from jaxserve.step_times.model_shapes import MODELS, ModelShape
from jaxserve.step_times.operators import all_reduce_seconds, matmul_seconds
from jaxserve.workloads.workload import Workload, WorkloadRequest

A100 = GPUS["a100-80gb"]
SETUPS = [("mistral-7b", "a100-80gb", 1), ("yi-34b", "a100-80gb", 2), ("llama2-70b", "a40", 4), ("qwen3-30b-a3b", "h100", 1)]


def num_weights(shape: ModelShape) -> int:
    return shape.num_layers * shape.layer_weights + (1 if shape.tied else 2) * shape.embedding_weights


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mistral-7b", 7.24), ("llama3.1-8b", 8.03), ("yi-34b", 34.4), ("llama2-70b", 69.0), ("falcon-180b", 180),
     ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("qwen3-32b", 32.8), ("qwen3-30b-a3b", 30.5)],
)  # fmt: skip
def test_published_sizes(name, billions):
    assert num_weights(MODELS[name]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_shape_of_a_config():
    hf = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
          "head_dim": 128,
          "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40_960,
          "tie_word_embeddings": True}  # fmt: skip
    config = ModelConfig.from_hf(hf)
    assert ModelShape.from_config(config, "qwen3-0.6b") == MODELS["qwen3-0.6b"]
    with pytest.raises(NotImplementedError, match="several kinds"):
        ModelShape.from_config(replace(config, sliding_windows=(None, 4096) * 14), "mixed")


def test_one_decode_by_hand():
    """Qwen3-8B on an H100: 36 layers and the head are read once at 0.78 of 3.35 TB/s; a layer is 13 kernels, a step 6 more;
    activations of one token and the page of KV are nothing beside."""
    times = Deployment.named("qwen3-8b", "h100").step_times(page_size=16)
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12_288
    weights = 2 * (36 * layer + 151_936 * 4096) / (0.78 * 3.35e12)
    launches = (36 * 13 + 6) * KERNEL_SECONDS
    assert times.seconds(Bucket(1, 1, 1), 1, 16, 0) == pytest.approx(weights + launches, rel=0.005)


def test_attention_by_hand():
    """A position of Mistral's KV is 2 x 8 x 128 bf16 a layer; a pair is 2 products of 128 in 32 heads."""
    times, bucket = Deployment.named("mistral-7b", "a100-80gb").step_times(), Bucket(64, 64, 1)
    kv = times.body_seconds(bucket, 10_000) - times.body_seconds(bucket)
    assert kv == pytest.approx(10_000 * 32 * 2 * 8 * 128 * 2 / (0.78 * 2.039e12))
    assert times.body_seconds(bucket, 0, 1e6) - times.body_seconds(bucket) == pytest.approx(
        1e6 * 32 * 4 * 32 * 128 / (0.6 * 312e12)
    )


@pytest.mark.parametrize(("model", "gpu", "tp"), SETUPS)
def test_monotone(model, gpu, tp):
    """More tokens, more KV, more pairs, more rows never take less; tiles make steps of it."""
    times = Deployment.named(model, gpu, tp).step_times()
    tokens = np.array([times.base_seconds(T) for T in range(1, 1200)])
    assert (np.diff(tokens) >= -1e-12).all() and tokens[-1] > 2 * tokens[0]
    bucket = Bucket(8, 8, 1)
    assert (np.diff(times.body_seconds(bucket, np.arange(0, 1000, 16), 5.0)) > 0).all()
    assert (np.diff([times.head_seconds(rows) for rows in range(200)]) >= 0).all() and times.head_seconds(0) == 0
    assert times.coefficients(bucket) @ [1, 160, 36] == pytest.approx(times.body_seconds(bucket, 160, 36))


def test_tile_quantisation():
    """One row more than two tiles takes a third row of tiles (published for one product: +32%); another 63 take nothing more."""
    at = [matmul_seconds(A100, T, 12_288, 4096) for T in (250, 256, 257, 320)]
    assert at[0] == pytest.approx(at[1], rel=0.01) and 1.25 < at[2] / at[1] < 1.5 and at[2] == pytest.approx(at[3], rel=0.01)
    assert matmul_seconds(A100, 2, 22_016, 4096) == pytest.approx(matmul_seconds(A100, 1, 22_016, 4096), rel=0.01)
    decode = Deployment.named("yi-34b", "a100-80gb", 2).step_times()
    assert decode.base_seconds(257) > 1.1 * decode.base_seconds(256)


def test_waves_by_hand():
    """108 tiles of 128 x 256 fill an A100 once. One more: 218 of 128 x 128 take three half waves, 436 of 64 x 128 five quarter ones
    at 0.9 of the rate, which is the least."""
    gpu = replace(A100, bandwidth=1e18)
    full = 2 * 128 * 256 * 108 * 8192 / (0.78 * 312e12)
    assert matmul_seconds(gpu, 128, 108 * 256, 8192) == pytest.approx(full + KERNEL_SECONDS)
    assert matmul_seconds(gpu, 128, 109 * 256, 8192) == pytest.approx(full * 5 / 4 / 0.9 + KERNEL_SECONDS)
    assert matmul_seconds(gpu, 128, 216 * 256, 8192) == pytest.approx(full * 2 + KERNEL_SECONDS)


def test_all_reduce():
    """Large: 2 (n - 1) / n of the bytes pass the slowest link. Small: latency, which grows with the ranks. One rank: nothing."""
    nvlink = (A100.nvlink,)
    assert all_reduce_seconds(1e9, 4, nvlink) == pytest.approx(1e9 * 1.5 / 240e9, rel=0.01)  # 12 links of 20 GB/s
    assert all_reduce_seconds(1e9, 4, (GPUS["h100"].nvlink,)) == pytest.approx(1e9 * 1.5 / 370.8e9, rel=0.01)  # 18 of 20.6
    assert all_reduce_seconds(1e9, 4, (A100.nvlink, ETHERNET_100G), 2) == pytest.approx(1e9 * 1.5 / 12e9, rel=0.01)
    assert all_reduce_seconds(1024, 8, nvlink) > all_reduce_seconds(1024, 2, nvlink) > 3e-6
    assert all_reduce_seconds(1e9, 1, nvlink) == 0


def test_all_reduce_latencies_by_hand():
    """As NCCL 2.20.5's ncclTopoTuneModel and ncclTopoGetAlgoTime work them out for LL, then for Simple, where it is the better."""
    pcie, ethernet, h100 = (A100.pcie,), (A100.pcie, ETHERNET_100G), (GPUS["h100"].nvlink,)
    assert all_reduce_seconds(0, 4, pcie) == pytest.approx((6.6 + 6 * 1.0) * 1e-6)
    # 14 steps, 4 of them between two nodes; inside a node a step waits for the host's 2 us.
    assert all_reduce_seconds(0, 8, ethernet, 2) == pytest.approx((6.6 + 10 * 2.0 + 4 * 2.7) * 1e-6)
    assert all_reduce_seconds(1e8, 8, ethernet, 2) == pytest.approx(1.4 * (8.4 + 10 * 6.0 + 4 * 14.0) * 1e-6 + 1e8 * 14 / 8 / 12e9)
    # A GPU a node: every step is between nodes.
    assert all_reduce_seconds(0, 2, ethernet, 2) == pytest.approx((6.6 + 2 * 2.7) * 1e-6)
    # LL has a quarter of the rate, or 87.7 GB/s where that is less.
    assert all_reduce_seconds(4e5, 8, h100) == pytest.approx((6.6 + 14 * 0.6) * 1e-6 + 4e5 * 14 / 8 / 87.7e9)
    assert all_reduce_seconds(4e4, 8, pcie) == pytest.approx((6.6 + 14 * 1.0) * 1e-6 + 4e4 * 14 / 8 / (24e9 / 4))


def test_parallelism_cuts():
    """TP 2 halves a GPU's weights and costs all-reduces; PP 2 halves each stage and sends between; nodes make both dearer."""
    one, two = Deployment.named("yi-34b", "a100-80gb"), Deployment.named("yi-34b", "a100-80gb", 2)
    assert two.weight_bytes(0) == one.weight_bytes(0) / 2
    whole, half = one.step_times().base_seconds(2048), two.step_times().base_seconds(2048)
    assert whole / 2 < half - 60 * 2 * two.all_reduce_seconds(2048) < whole / 2 * 1.1
    staged = Deployment.named("yi-34b", "a100-80gb", 2, 2)
    first, last = staged.stages()
    assert staged.layers == (30, 30) and first.base_seconds(64) == pytest.approx(two.step_times().base_seconds(64) / 2, rel=0.01)
    assert first.head_seconds(8) == 0 < last.head_seconds(8)
    apart = Deployment.named("yi-34b", "a100-80gb", 2, 2, gpus_per_node=2)
    assert apart.send_seconds(512) > 10 * staged.send_seconds(512)
    four = Deployment.named("yi-34b", "a100-80gb", 1, 4, gpus_per_node=2)
    assert four.send_seconds(512, 0) == four.send_seconds(512, 2) == staged.send_seconds(512)
    assert four.send_seconds(512, 1) == apart.send_seconds(512)
    across = Deployment.named("yi-34b", "a100-80gb", 4, gpus_per_node=2)
    assert across.all_reduce_seconds(512) > 10 * Deployment.named("yi-34b", "a100-80gb", 4).all_reduce_seconds(512)
    pairs = Deployment.named("llama2-70b", "a40", 2), Deployment.named("llama2-70b", "a40", 4)
    assert pairs[1].all_reduce_seconds(4096) > 2 * pairs[0].all_reduce_seconds(4096)  # NVLink joins two A40s, PCIe more


def test_experts_that_nobody_chose_are_not_read():
    times = Deployment.named("qwen3-30b-a3b", "h100").step_times()
    one, many = times.operators(1)["mlp_up"], times.operators(512)["mlp_up"]
    assert one == pytest.approx(8 * 2 * 768 * 2048 * 2 / (0.78 * 3.35e12) + KERNEL_SECONDS, rel=0.02)
    assert many / one == pytest.approx(128 / 8, rel=0.4)


def test_kv_pages():
    """80e9 x 0.9 bytes less 14.5e9 of weights, by 128 KiB a token: a little less for activations."""
    pages = Deployment.named("mistral-7b", "a100-80gb").num_pages(16, 2048)
    assert 0.98 < pages * 16 / ((72e9 - 2 * num_weights(MODELS["mistral-7b"])) / 131_072) < 1
    with pytest.raises(ValueError, match="leave no room for KV; raise tp or pp"):
        Deployment.named("falcon-180b", "a100-80gb", 4).num_pages(16, 2048)


def test_bad_deployments():
    with pytest.raises(ValueError, match="'gpt-5' is not known; choose from mistral-7b"):
        Deployment.named("gpt-5", "h100")
    with pytest.raises(ValueError, match="56 heads.*not cut evenly by tp=3"):
        Deployment.named("yi-34b", "h100", 3)
    with pytest.raises(ValueError, match="use stages"):
        Deployment.named("yi-34b", "h100", 1, 2).step_times()


def test_replay_of_an_analytic_machine():
    """A decode after a prompt of 300: the first step computes the prompt, each later one reads 19 or 20 pages of 16."""
    times: StepTimes = Deployment.named("mistral-7b", "a100-80gb").step_times(page_size=16, host_seconds=0.0)
    limits = SchedulerConfig(max_model_len=8192, max_num_batched_tokens=512, max_num_seqs=32)
    work = Workload("one", (WorkloadRequest(300, 6),))
    run = replay(work, UnpaddedPlan(512, 32), times, limits, 1000)
    decode = times.base_seconds(1) + times.head_seconds(1)
    by_hand = [times.base_seconds(300) + times.per_pair * 300 * 301 / 2 + times.head_seconds(1)]
    by_hand += [decode + times.per_kv_token * 16 * pages for pages in (19, 19, 19, 19, 20)]
    assert run.seconds == pytest.approx(by_hand) and run.padding.padded_tokens == 0
    assert run.times.scheduled == pytest.approx([0.0])


def test_window_limits_what_attention_reads():
    """Past 4096 positions a decode of Mistral costs no more, and a chunk's queries see 4096 keys each."""
    times = Deployment.named("mistral-7b", "a100-80gb").step_times(page_size=16, host_seconds=0.0)
    limits = SchedulerConfig(max_model_len=16_384, max_num_batched_tokens=2048, max_num_seqs=4)
    run = replay(Workload("long", (WorkloadRequest(8192, 8),)), UnpaddedPlan(2048, 4), times, limits, 2000)
    keys = np.minimum(np.arange(1, 8193), 4096).reshape(4, 2048).sum(axis=1)
    assert run.demands.pairs[:4].tolist() == keys.tolist()
    assert set(run.demands.kv_tokens[4:].tolist()) == {4096}


def test_dynamic_budget_of_an_unpadded_plan():
    """The budget is the largest multiple of 64 that an objective allows; with it no step with decodes takes longer, chunks beyond
    the window included."""
    times = Deployment.named("mistral-7b", "a100-80gb").step_times(page_size=16, host_seconds=0.0)
    limits = SchedulerConfig(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=32)
    work = Workload("many", tuple(WorkloadRequest(6000, 30, 0.4 * i) for i in range(20)))
    run = replay(work, UnpaddedPlan(2048, 32), times, limits, 5000, objective=0.05)
    mixed = (run.demands.decodes > 0) & (run.demands.max_q_len > 1)
    assert mixed.sum() > 50 and run.seconds[mixed].max() <= 0.05 and run.demands.tokens[mixed].max() >= 384

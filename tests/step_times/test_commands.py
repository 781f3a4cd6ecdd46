"""Modelled counts of commands against what was compiled, and the time of a step in the engine's own commands by hand."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.buckets.plan import Bucket
from jaxserve.step_times.analytic import HOST_SECONDS, Deployment
from jaxserve.step_times.commands import Commands, EnginePrograms, programs_of
from jaxserve.step_times.hardware import GPUS, HOST_LAUNCH_SECONDS, KERNEL_SECONDS, LAUNCH_SECONDS
from jaxserve.step_times.model_shapes import MODELS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMPILED = [r for name in ("aot_tp", "aot_groups") for r in json.loads((RESULTS / f"{name}.json").read_text())["results"]]
STAGED = json.loads((RESULTS / "aot_pp.json").read_text())["results"]
SUMS = ("AllReduce", "AllGather")
MARKS = ("AsyncStart", "AsyncDone", "PartitionId")  # of a thunk sequence, that start no kernel


def name_of(result: dict) -> str:
    how = (result.get(name, "") for name in ("model", "target", "tensor_parallel_size", "graph_collectives"))
    return ", ".join(map(str, (*how, groups_of(result))))


def groups_of(result: dict) -> int:
    return result.get("attention_groups", 1)  # aot_tp.json is older than they are


@pytest.mark.parametrize("result", COMPILED, ids=name_of)
def test_counts_are_those_of_the_compiled_body(result):
    """The body of 8 decodes a group: its sums exactly, its graphs and commands nearly."""
    model, tp, groups = MODELS[result["model"]], result["tensor_parallel_size"], groups_of(result)
    body, outside = result["programs"][0], Counter(result["programs"][0]["outside_graphs"])
    assert body["name"] == f"body decode({8 * groups},{8 * groups})" and not result["faults"]
    programs = EnginePrograms(result["graph_collectives"])
    modelled = programs.body(model, model.num_layers, tp, has_embedding=True, attention_groups=groups)
    sums = sum(body["commands"].get(kind, 0) for kind in SUMS)
    kernels = body["graph_commands"] + sum(outside.values()) - sums - sum(body["commands"].get(kind, 0) for kind in MARKS)
    assert modelled.sums == sums and abs(modelled.graphs - body["graphs"]) <= 1
    assert modelled.nodes + modelled.outside == pytest.approx(kernels, rel=0.03)
    alone = sum(outside[kind] for kind in outside if kind not in (*SUMS, *MARKS))
    assert modelled.outside == pytest.approx(alone, abs=0.03 * kernels)


@pytest.mark.parametrize("result", STAGED, ids=name_of)
def test_counts_are_those_of_the_compiled_stages(result):
    """The bodies of 8 decodes of the first stage and the last one."""
    model, tp, pp = MODELS[result["model"]], result["tensor_parallel_size"], result["pipeline_parallel_size"]
    layers = Deployment.named(result["model"], result["target"], tp, pp).layers
    bodies = [p for p in result["programs"] if p["name"].startswith("body decode(8,8) of stage")]
    assert len(bodies) == pp == 2
    for stage, body in enumerate(bodies):
        modelled = EnginePrograms().body(model, layers[stage], tp, has_embedding=stage == 0, has_head=stage == 1)
        outside = Counter(body["outside_graphs"])
        kernels = body["graph_commands"] + sum(n for kind, n in outside.items() if kind not in (*SUMS, *MARKS))
        assert modelled.sums == sum(outside[kind] for kind in SUMS) and abs(modelled.graphs - body["graphs"]) <= 2
        assert modelled.nodes + modelled.outside == pytest.approx(kernels, rel=0.03)


@pytest.mark.parametrize("result", COMPILED, ids=name_of)
def test_weights_of_a_device_are_those_of_the_compiled_engine(result):
    tp = result["tensor_parallel_size"]
    modelled = Deployment.named(result["model"], result["target"], tp, attention_groups=groups_of(result)).weight_bytes(0)
    assert modelled == pytest.approx(result["memory"]["weights"], rel=0.001)


def test_counts_by_hand():
    """Qwen3-8B, 36 layers of 6 + 3 commands and 22 beside them, on two devices; on one, of 5 + 2."""
    model = MODELS["qwen3-8b"]
    apart, within = (EnginePrograms(graphs).body(model, 36, 2, has_embedding=True) for graphs in (False, True))
    # The three commands of an MLP are too few for a graph; each attention is one, and what is before and behind the layers.
    assert apart == Commands(graphs=38, nodes=36 * 6 + 22, outside=36 * 3, sums=73, launches=38 + 108 + 73)
    assert within == Commands(graphs=1, nodes=36 * 9 + 22, outside=0, sums=73, launches=1)
    assert EnginePrograms().body(model, 36, 1, has_embedding=True) == Commands(1, 36 * 7 + 22, 0, 0, 1)
    assert EnginePrograms().body(model, 18, 2, has_embedding=False).sums == 36
    assert EnginePrograms().body(model, 18, 1, has_head=False).nodes == 18 * 7 + 14, "the rows of the head are the last stage's"
    grouped = EnginePrograms(True).body(model, 36, 2, has_embedding=True, attention_groups=2)
    assert grouped == replace(within, nodes=36 * 11 + 22), "a group's rows are taken out, and put among zeros"
    with pytest.raises(ValueError, match="graph_collectives=True is of several devices, and tensor_parallel_size=1"):
        programs_of(1, True)


@pytest.mark.parametrize("graphs", [False, True])
def test_what_commands_cost_by_hand(graphs):
    """On a GPU that does any work in no time, whose links have latencies alone, a step is commands, launches and sums."""
    gpu = replace(GPUS["h100"], flops=1e30, bandwidth=1e30)
    times = Deployment(MODELS["qwen3-8b"], gpu, 8, programs=EnginePrograms(graphs)).step_times()
    a_sum = 6.6e-6 + 14 * 0.6e-6  # of almost no bytes, by NCCL's protocol LL over 8 GPUs
    launches = 1 if graphs else 38 + 108 + 73
    body = (36 * 9 + 22) * KERNEL_SECONDS + launches * LAUNCH_SECONDS + 73 * a_sum
    head = 30 * KERNEL_SECONDS + (1 if graphs else 3) * LAUNCH_SECONDS + 6.6e-6 + 7 * 0.6e-6  # one gathering
    a_byte = 8 * 4096 * 2 * 14 / 8 / 87.7e9  # of 8 tokens' rows
    assert times.base_seconds(8) == pytest.approx(body + 73 * a_byte, rel=1e-6)
    assert times.head_seconds(1) == pytest.approx(head, rel=1e-3)
    host = HOST_LAUNCH_SECONDS * (launches + (1 if graphs else 3))
    assert times.host_seconds == pytest.approx(HOST_SECONDS + host)
    assert times.num_kernels == 13


def test_stages_share_the_commands():
    """Each stage has its own body; the first has the embedding's sum, the last the head."""
    first, last = Deployment(MODELS["qwen3-8b"], GPUS["h100"], 2, 2, programs=EnginePrograms()).stages()
    assert first.commands is not None and last.commands is not None
    assert (first.commands.sums, last.commands.sums) == (37, 36) and first.commands.graphs == last.commands.graphs + 1
    assert first.head_seconds(8) == 0 < last.head_seconds(8)


def test_systems_of_publications_keep_a_kernel_an_operator():
    """Without an engine's programs nothing of all this is in a step."""
    times = Deployment.named("qwen3-8b", "h100", 8).step_times()
    assert times.commands is None and times.host_seconds == HOST_SECONDS
    ours = Deployment.named("qwen3-8b", "h100", 8, programs=EnginePrograms()).step_times()
    assert ours.seconds(Bucket(8, 8, 1), 8, 800, 0) != times.seconds(Bucket(8, 8, 1), 8, 800, 0)


def test_groups_of_attention_by_hand():
    """Qwen3-235B-A22B on 8 GPUs: each of 4 KV heads lies twice. Two groups of 4 hold each once, read half of the positions each and
    have twice the attention's weights."""
    one, two = (Deployment.named("qwen3-235b-a22b", "h200", 8, attention_groups=groups) for groups in (1, 2))
    assert one.kv_heads == two.kv_heads == 1 and (one.attention_tp, two.attention_tp) == (8, 4)
    attention = 94 * 4096 * 128 * 2 * (64 + 4) * 2  # bytes of all of it
    copies = 94 * 4096 * 128 * 2 * 4 * 2  # of the KV projections, which one group of 8 has twice
    assert two.weight_bytes(0) - one.weight_bytes(0) == pytest.approx(attention / 4 - (attention + copies) / 8)
    assert two.step_times().per_kv_token == one.step_times().per_kv_token / 2
    pages = [d.num_pages(64, 2048) for d in (one, two)]
    assert 1.8 < pages[1] / pages[0] < 2
    row = 4096 * 2 / 87.7e9  # seconds a step of a ring sends a token's row in, by LL
    for each in (one, two):  # a layer sums the rows of all groups over all GPUs, twice
        assert each.step_times().operators(8)["all_reduce"] == pytest.approx(2 * (15e-6 + 14 / 8 * 8 * row))
    with pytest.raises(ValueError, match="attention_groups=3 must divide tp=8"):
        Deployment.named("qwen3-235b-a22b", "h200", 8, attention_groups=3)

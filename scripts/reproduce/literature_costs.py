"""Sections of reproduce_literature that ask step times alone: prefill against decode, a layer's parts, TP degrees, saturation.

Owns these comparisons. No request is scheduled here; literature_runs.py has those that schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.buckets.plan import Bucket
from jaxserve.cli.common.tables import table
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.hardware import GPUS
from jaxserve.step_times.model_shapes import MODELS
from jaxserve.step_times.operators import BYTES
from scripts.reproduce.published import CHUNKED_MS, DECODE_MS, PREFILL_MS, SPLIT_MS
from scripts.reproduce.sarathi_costs import DECODE_BATCH, DECODE_KV, prompt_seconds, step_seconds
from scripts.reproduce.sarathi_plots import lines
from scripts.reproduce.sarathi_setups import A100_PCIE, SETUPS, deployment, stages

MATMULS = ("qkv", "o", "mlp_up", "mlp_down")
MISTRAL, YI, FALCON = (SETUPS[name].machine for name in ("mistral-7b", "yi-34b", "falcon-180b"))


def prefill_step(machine: Deployment, num_prompts: int, length: int) -> float:
    """Seconds of a step of so many whole prompts, on a machine of one stage."""
    (stage,) = stages(machine)
    return stage.seconds(Bucket(num_prompts * length, num_prompts, length), num_prompts, 0, num_prompts * length * (length + 1) / 2)


def throughput(folder: Path) -> tuple[str, dict[str, Any]]:
    """Tokens a second of prefills and of decodes, each alone, over the batch; and step times beside the artifact's."""
    batches, length = (1, 2, 4, 8, 16, 32, 64, 128), 1024
    prefill = [b * length / prefill_step(MISTRAL, b, length) for b in batches]
    decode = [b / step_seconds(MISTRAL, b, length) for b in batches]
    curves = {"prefill over a batch of 1": prefill, "decode over a batch of 1": decode}
    relative = {name: [v / values[0] for v in values] for name, values in curves.items()}
    lines(batches, relative, folder / "throughput.png", "batch", "throughput over a batch of 1", "Mistral-7B on an A100", log=True)
    rows = [[b, p, p / prefill[0], d, d / decode[0]] for b, p, d in zip(batches, prefill, decode, strict=True)]
    head = ("batch", "prefill (tokens/s)", "over 1", "decode (tokens/s)", "over 1")
    measured = [["decodes", b, ms, 1e3 * step_seconds(YI, b, length)] for b, ms in DECODE_MS.items()]
    measured += [["tokens of a prompt", n, ms, 1e3 * prefill_step(YI, 1, n)] for n, ms in PREFILL_MS.items()]
    measured = [[*row, row[3] / row[2]] for row in measured]
    text = table(head, rows) + "\nYi-34B, TP2, a step in ms; measured is the artifact's:\n\n"
    text += table(("a step of", "", "measured", "ours", "ours over it"), measured)
    return text, {"batches": batches, "prefill": prefill, "decode": decode, "yi-34b": measured}


def parts(machine: Deployment, num_tokens: int, kv_tokens: float = 0, pairs: float = 0) -> dict[str, float]:
    """Seconds of one layer's linear operators, attention and everything else, on a machine of one stage."""
    (stage,) = stages(machine)
    operators, num_layers = stage.operators(num_tokens), machine.model.num_layers
    linear = sum(operators[name] for name in MATMULS)
    attention = operators["attention_launches"] + (stage.per_kv_token * kv_tokens + stage.per_pair * pairs) / num_layers
    return {"linear": linear, "attention": attention, "other": sum(operators.values()) - linear - operators["attention_launches"]}


def layer(folder: Path) -> tuple[str, dict[str, Any]]:
    """A layer's time by linear operators, attention and the rest, of prompts and of decodes over 1k."""
    from jaxserve.cli.common.plots import figure, save

    prompts, batches = [2**i for i in range(7, 15)], [2**i for i in range(8)]
    cases = {"prompt": {n: parts(MISTRAL, n, pairs=n * (n + 1) / 2) for n in prompts}}
    cases["decodes"] = {n: parts(MISTRAL, n, kv_tokens=1024 * n) for n in batches}
    made, axes = figure(1, 2)
    for axis, (kind, found) in zip(axes[0], cases.items(), strict=True):
        base = np.zeros(len(found))
        for name in ("linear", "attention", "other"):
            share = np.array([100 * p[name] / sum(p.values()) for p in found.values()])
            axis.bar([str(n) for n in found], share, bottom=base, label=name)
            base += share
        axis.set(
            xlabel="tokens of a prompt" if kind == "prompt" else "decodes over 1k", ylabel="% of a layer", title="Mistral-7B, A100"
        )
        axis.legend(fontsize=7)
    save(made, folder / "layer.png")
    rows = [
        [kind, n, 1e6 * sum(p.values()), *(100 * v / sum(p.values()) for v in p.values())]
        for kind, f in cases.items()
        for n, p in f.items()
    ]
    text = table(("", "tokens", "a layer (us)", "linear (%)", "attention (%)", "other (%)"), rows)
    one, many = cases["decodes"][1]["linear"], cases["prompt"][128]["linear"]
    text += f"\nThe linear operators of a prompt of 128 tokens take {many / one:.3g} times those of one decode.\n"
    ours = {"4 decodes at 1k": (4, {"kv_tokens": 4 * 1024}), "a prompt of 1024": (1024, {"pairs": 1024 * 1025 / 2})}
    split, data = [], {}
    for name, (step, linear, attention) in SPLIT_MS.items():
        num_tokens, attended = ours[name]
        own = {part: 1e3 * YI.model.num_layers * s for part, s in parts(YI, num_tokens, **attended).items()}
        split.append([name, linear, own["linear"], attention, own["attention"], step - linear - attention, own["other"]])
        data[name] = own
    head = ("Yi-34B, TP2, ms", "linear, measured", "ours", "attention, measured", "ours", "the rest, measured", "ours")
    return text + "\n" + table(head, split), {"mistral-7b": cases, "yi-34b": data}


def tensor_parallel(folder: Path, vidur: Path | None = None) -> tuple[str, dict[str, Any]]:
    """LLaMA2-70B's linear operators over tokens by TP degree, and how flat they are from 128 to 512 tokens; the same of Vidur's
    profiles, where their folder is given."""
    sizes = [2**i for i in range(5, 13)]
    found = {tp: stages(deployment("llama2-70b", A100_PCIE, tp, 1, 8))[0] for tp in (1, 2, 4, 8)}
    ms = {
        tp: [1e3 * MODELS["llama2-70b"].num_layers * sum(s.operators(T)[op] for op in MATMULS) for T in sizes]
        for tp, s in found.items()
    }
    curves = {f"TP{tp}": values for tp, values in ms.items()}
    lines(sizes, curves, folder / "tensor_parallel.png", "tokens", "ms of linear operators", "LLaMA2-70B on A100s", log=True)
    at = {T: i for i, T in enumerate(sizes)}
    rows = [[f"TP{tp}", *(v[at[T]] for T in (128, 256, 512, 1024, 2048)), v[at[512]] / v[at[128]]] for tp, v in ms.items()]
    text = table(("LLaMA2-70B, ms", "128", "256", "512", "1024", "2048", "512 over 128"), rows)
    data: dict[str, Any] = {"tokens": sizes, "ms": curves}
    if vidur is None:
        text += "\nVidur's profiles were not given, and stand not beside it.\n"
    else:
        data["vidur"] = measured_by_tp(vidur)
        rows = [[row["profile"], f"TP{row['tp']}", row["measured"], row["ours"]] for row in data["vidur"]]
        text += "\n512 tokens over 128, measured by Vidur and of our model:\n\n" + table(("profile", "", "measured", "ours"), rows)
    return text, data


def measured_by_tp(folder: Path) -> list[dict[str, Any]]:
    """For each profile on A100s and TP degree: the linear operators' time at 512 tokens over that at 128, measured and ours.
    ValueError as of vidur_profiles."""
    from scripts.reproduce.vidur_profiles import times_of

    rows = []
    for path in sorted(folder.glob("a100_*_mlp.csv.gz")):
        tokens, degrees, measured, predicted = times_of(path)
        for tp in np.unique(degrees):
            row: dict[str, Any] = {"profile": path.name.removesuffix("_mlp.csv.gz"), "tp": int(tp)}
            for name, times in (("measured", measured), ("ours", predicted)):
                total = np.sum([times[op] for op in MATMULS], axis=0)
                at = [float(total[(degrees == tp) & (tokens == T)][0]) for T in (128, 512)]
                row[name] = at[1] / at[0]
            rows.append(row)
    if not rows:
        raise ValueError(f"no profile a100_<model>_mlp.csv.gz in {folder}")
    return rows


def saturation_batch(seconds: Sequence[float], sizes: Sequence[int]) -> float:
    """The batch at which a flat line at the first time meets a line through zero and the last time."""
    return seconds[0] / (seconds[-1] / sizes[-1])


def roofline(folder: Path) -> tuple[str, dict[str, Any]]:
    """A step of Qwen3-8B over its decodes on three GPUs, FLOPs a byte, and B_sat: the batch at which reading weights takes as long
    as computing with them."""
    sizes, rows, curves, data = [2**i for i in range(13)], [], {}, {}
    model = MODELS["qwen3-8b"]
    shapes = [((model.num_heads + 2 * model.num_kv_heads) * model.head_dim, model.hidden_size)]
    shapes += [(model.hidden_size, model.num_heads * model.head_dim), (2 * model.ffn_size, model.hidden_size)]
    shapes += [(model.hidden_size, model.ffn_size)]
    intensity = [sum(2 * T * n * k for n, k in shapes) / sum(BYTES * (n * k + T * (n + k)) for n, k in shapes) for T in sizes]
    for gpu in ("a100-80gb", "h100", "h200"):
        machine = deployment("qwen3-8b", GPUS[gpu], 1, 1, 8)
        linear = [sum(stages(machine)[0].operators(T)[op] for op in MATMULS) for T in sizes]
        step = [1e3 * step_seconds(machine, b, 1024) for b in sizes[:9]]
        balance = GPUS[gpu].flops / GPUS[gpu].bandwidth
        met = float(np.interp(balance, intensity, sizes))
        modelled = saturation_batch(linear, sizes)
        curves[f"{gpu}: linear operators"] = [1e3 * model.num_layers * s for s in linear]
        rows.append([gpu, balance, met, modelled, step[0], step[5], step[8], 1e3 * 256 / step[8]])
        data[gpu] = {"balance": balance, "intensity_meets": met, "b_sat": modelled, "linear_ms": curves[f"{gpu}: linear operators"]}
    lines(sizes, curves, folder / "roofline.png", "tokens of a step", "ms", "Qwen3-8B, linear operators", log=True)
    lines(
        sizes,
        {"FLOPs a byte": intensity},
        folder / "intensity.png",
        "tokens of a step",
        "FLOPs a byte",
        "Qwen3-8B, linear",
        log=True,
    )
    head = ("GPU", "FLOPs a byte, datasheet", "batch with as many", "B_sat of the model", "step of 1 at 1k (ms)", "of 32", "of 256")
    return table((*head, "tokens/s at 256"), rows), data | {"tokens": sizes, "flops_a_byte": intensity}


def chunks(folder: Path) -> tuple[str, dict[str, Any]]:
    """What chunks cost a prompt of Yi-34B, beside the artifact's times."""
    rows, data = [], {}
    for length, measured in CHUNKED_MS.items():
        whole = prompt_seconds(YI, length, length)
        for chunk in (512, 1024, 2048):
            ours = prompt_seconds(YI, length, chunk)
            theirs = 100 * (measured[chunk] / measured[16384] - 1)
            rows.append([length, chunk, theirs, 100 * (ours / whole - 1), measured[chunk], 1e3 * ours])
            data[f"{length}, {chunk}"] = {"measured": theirs, "ours": 100 * (ours / whole - 1)}
    head = ("prompt", "chunk", "more, measured (%)", "ours (%)", "measured (ms)", "ours (ms)")
    return table(head, rows), data


def mixing(folder: Path) -> tuple[str, dict[str, Any]]:
    """A whole prompt beside 8 decodes over decodes alone: ours, ours over the artifact's time of the decodes, and the artifact's
    prompt over its decodes. 8 decodes at 4k of ours, at 1k of theirs."""
    rows, data = [], {}
    for prompt in (1024, 2048, 4096, 8192, 16384):
        both, alone = (1e3 * step_seconds(YI, 8, DECODE_KV, p) for p in (prompt, 0))
        data[str(prompt)] = [both / alone, both / DECODE_MS[8], PREFILL_MS[prompt] / DECODE_MS[8]]
        rows.append([prompt, *data[str(prompt)]])
    return table(("prompt", "ours", "ours over their decodes", "their prompt over their decodes"), rows), data


def falcon(folder: Path) -> tuple[str, dict[str, Any]]:
    """Falcon-180B's step of 32 decodes: ours, and with what a layer of Yi-34B took beyond our model where it was measured."""
    ours = 1e3 * step_seconds(FALCON, DECODE_BATCH, DECODE_KV)
    step, linear, attention = SPLIT_MS["4 decodes at 1k"]
    beyond = {
        "a step of 4, measured less ours": DECODE_MS[4] - 1e3 * step_seconds(YI, 4, 1024),
        "the rest of a step of 4 (neither linear nor attention) in the other file": step - linear - attention,
        "a step of 32, measured less ours": DECODE_MS[32] - 1e3 * step_seconds(YI, 32, 1024),
    }
    rows, data = [["our model", None, ours, 200]], {"ours": ours}
    for name, ms in beyond.items():
        each = ms / YI.model.num_layers
        rows.append([f"and {name}", each, ours + FALCON.model.num_layers * each, 200])
        data[name] = ours + FALCON.model.num_layers * each
    return table(("Falcon-180B, 32 decodes at 4k", "ms a layer of Yi-34B", "a step (ms)", "published, about"), rows), data

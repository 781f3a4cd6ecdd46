"""Trees of drafts against chains: what each would bring with a head, by its measured ranks, and what that is worth where rows cost.

    python -m scripts.bench_trees --target=MODEL --head=smollm2-eagle3 --answers=smollm2-eagle3/answers.jsonl --num_eval=48 \\
        --row_ms=1:11.0,8:16.0,32:33.3 --draft_ms=0.9

No tree is verified here. Along answers that the head was not trained on, it is asked for the next tokens at every place, given the
answer's own ones; the ranks of these tokens say how far any tree would have stood. Tokens a step are those of a walk along each
answer: drafts that stand pass places by, so that steps begin more often where drafts are wrong. Trees have a fixed shape, as
Medusa's and EAGLE-1's: the best one of so many candidates is chosen along half of the answers and measured along the others. That a
tree needs a mask in attention, and its KV moved, is taken to cost nothing.

What steps cost is the simulator's for --model on --gpu (jaxserve simulate --speculative), and with --row_ms what a machine was
measured to take for steps of so many rows, straight lines between. --draft_ms is of one depth of drafts, whatever its width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.provenance import provenance, write_json

_TARGET = flags.DEFINE_string("target", None, "The model that the head is for.", required=True)
_HEAD = flags.DEFINE_string("head", None, "The folder of the head.", required=True)
_METHOD = flags.DEFINE_enum("method", "eagle3", ["eagle3", "medusa"], "What the head is.")
_ANSWERS = flags.DEFINE_string("answers", None, "The target's answers, as train-draft keeps them.", required=True)
_EVAL = flags.DEFINE_integer("num_eval", 48, "The last so many of them are used: those that were not trained on.", lower_bound=2)
_LENGTH = flags.DEFINE_integer("length", 224, "Tokens of a prompt and its answer; what is longer is cut.", lower_bound=8)
_DEPTH = flags.DEFINE_integer("depth", 5, "Drafts behind each other; of Medusa its heads at most.", lower_bound=1)
_NODES = flags.DEFINE_list("num_nodes", "2,3,4,6,8,12,16,24,32,48,63".split(","), "Candidates of trees.")
_BATCHES = flags.DEFINE_list("batches", ["1", "2", "4", "8", "32"], "Sequences that decode.")
_MODEL = flags.DEFINE_string("model", "qwen3-8b", "Whose steps are modelled: a name of jaxserve/step_times/model_shapes.py.")
_GPU = flags.DEFINE_string("gpu", "h100", "One of jaxserve/step_times/hardware.py's.")
_CONTEXT = flags.DEFINE_integer("context_len", 1024, "Tokens of each sequence there.", lower_bound=1)
_ROW_MS = flags.DEFINE_list("row_ms", None, "Measured milliseconds of a step by its rows, such as 1:11.0,8:16.0.")
_DRAFT_MS = flags.DEFINE_float("draft_ms", 0.0, "With --row_ms: of one depth of drafts.", lower_bound=0.0)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

KS = (1, 2, 3, 5, 10)
Factor = Callable[[int, list[float], list[int]], float]  # (batch, shares, widths) -> output tokens a second over those without


def measured_ranks() -> tuple[np.ndarray, np.ndarray]:
    """i32[chains, depth] of the head, and which answer each is of, i64[chains]."""
    from jaxserve.models.eagle import find_eagle, load_eagle
    from jaxserve.models.loading import load_model
    from jaxserve.models.medusa import find_medusa, load_medusa
    from jaxserve.training.answers import read_answers
    from jaxserve.training.draft_trainer import rank_answers

    target, dtype = load_model(_TARGET.value, skip_tokenizer_init=True).module, "float32"
    if _METHOD.value == "medusa":
        files = find_medusa(_HEAD.value, target.config)
        if _DEPTH.value > files.config.num_heads:
            raise ValueError(f"--depth={_DEPTH.value}: {_HEAD.value} has {files.config.num_heads} heads, each makes one draft")
        head: Any = load_medusa(files.reader, files.config, dtype)
    else:
        files = find_eagle(_HEAD.value, target.config, version=3)
        head = load_eagle(files.reader, files.config, dtype)
    answers = read_answers(_ANSWERS.value)[-_EVAL.value :]
    if not answers:
        raise ValueError(f"--answers={_ANSWERS.value} has no answers")
    return rank_answers(target, head, answers, _DEPTH.value, length=_LENGTH.value, batch_size=4)


def modelled() -> Factor:
    from jaxserve.simulation.speculation import predict
    from jaxserve.step_times.analytic import Deployment
    from jaxserve.step_times.commands import programs_of

    deployment = Deployment.named(_MODEL.value, _GPU.value, programs=programs_of(1, False))
    return lambda batch, shares, widths: predict(deployment, _METHOD.value, batch, _CONTEXT.value, shares, widths).factor


def measured(points: list[tuple[int, float]], draft_ms: float) -> Factor:
    """points: (rows, milliseconds of a step), of more and more rows. Beyond the last it goes on as between the last two."""
    rows, ms = map(np.array, zip(*points, strict=True))
    slope = (ms[-1] - ms[-2]) / (rows[-1] - rows[-2])

    def step(n: int) -> float:
        return float(np.interp(n, rows, ms) + max(0, n - rows[-1]) * slope)

    return lambda batch, shares, widths: (
        (1 + sum(shares)) * step(batch) / (step(batch * (1 + sum(widths))) + draft_ms * len(widths))
    )


def read_points() -> list[tuple[int, float]] | None:
    """--row_ms. UsageError if it is none."""
    if _ROW_MS.value is None:
        return None
    try:
        points = [(int(rows), float(ms)) for rows, _, ms in (point.partition(":") for point in _ROW_MS.value)]
    except ValueError:
        points = []
    rows = [n for n, _ in points]
    if len(points) < 2 or rows != sorted(set(rows)) or rows[0] != 1 or min(ms for _, ms in points) <= 0:
        raise app.UsageError(f"--row_ms={','.join(_ROW_MS.value)}: two ROWS:MILLISECONDS or more, of 1 row first, then of more")
    return points


def integers(name: str, given: list[str]) -> list[int]:
    if not given or not all(x.isdecimal() and int(x) > 0 for x in given):
        raise app.UsageError(f"--{name}={','.join(given)} must be integers above 0")
    return [int(x) for x in given]


def compare(
    ranks: np.ndarray, answers: np.ndarray, nodes: list[int], batches: list[int], factors: dict[str, Factor]
) -> dict[str, Any]:
    """All tables. answers: i64[chains], of each row of ranks."""
    from jaxserve.simulation.draft_trees import best_tree_of_steps, chain, hits

    first, depth = answers < np.median(answers), ranks.shape[1]
    seen, of = ranks[~first], answers[~first]
    chains = [chain(k) for k in range(1, depth + 1)]
    trees = [tree for tree in (best_tree_of_steps(ranks[first], answers[first], n) for n in nodes) if tree.paths]
    if not trees:
        raise ValueError(f"at none of {int(first.sum())} places is the answer's token among the likeliest of the head: train it")
    shapes = {"chain": chains, "tree": trees}
    shares = {kind: [tree.shares(seen[tree.steps(seen, of)]) for tree in some] for kind, some in shapes.items()}
    tokens = {kind: [1 + sum(each) for each in some] for kind, some in shares.items()}
    best = []
    for machine, factor in factors.items():
        for batch in batches:
            row: dict[str, Any] = {"machine": machine, "batch": batch}
            for kind, some in shapes.items():
                found = [factor(batch, each, tree.widths) for tree, each in zip(some, shares[kind], strict=True)]
                at = int(np.argmax(found))
                row |= {f"{kind}_drafts": len(some[at].paths), f"{kind}_tokens": tokens[kind][at], f"{kind}_speedup": found[at]}
            best.append(row | {"tree_over_chain": row["tree_speedup"] / row["chain_speedup"]})
    sizes = [{"drafts": len(tree.paths), "widths": tree.widths, "tokens": n} for tree, n in zip(trees, tokens["tree"], strict=True)]
    of_chains = [{"drafts": k + 1, "tokens": n} for k, n in enumerate(tokens["chain"])]
    about = {"num_places": len(ranks), "hits": hits(ranks, KS), "ks": KS}
    return {**about, "chains": of_chains, "trees": sizes, "best": best}


def report(result: dict[str, Any]) -> None:
    print(f"{result['num_places']} places of answers. Share of tokens among the k likeliest of the head, at each depth:")
    print("depth " + " ".join(f"{f'k={k}':>7}" for k in KS))
    for depth, shares in enumerate(result["hits"], 1):
        print(f"{depth:>5} " + " ".join(f"{100 * share:>6.1f}%" for share in shares))
    print("tokens a sequence and step, of chains and of the best trees, by drafts that are verified (trees: by depth)")
    for row in result["chains"]:
        print(f"chain of {row['drafts']:>3}: {row['tokens']:.2f}")
    for row in result["trees"]:
        print(f"tree of  {row['drafts']:>3}: {row['tokens']:.2f}  ({', '.join(map(str, row['widths']))})")
    print("the best chain and the best tree of these, by speed over no drafts")
    print(f"{'machine':<16} {'batch':>5} {'chain of':>9} {'speed-up':>9} {'tree of':>8} {'speed-up':>9} {'tree over chain':>16}")
    for r in result["best"]:
        chain, tree = (f"{r[f'{kind}_drafts']:>8} {r[f'{kind}_speedup']:>9.2f}" for kind in ("chain", "tree"))
        print(f"{r['machine']:<16} {r['batch']:>5}  {chain} {tree} {r['tree_over_chain']:>15.2f}x")


def main() -> None:
    points = read_points()
    nodes, batches = integers("num_nodes", _NODES.value), integers("batches", _BATCHES.value)
    with refuse_bad_input():
        factors = {f"{_MODEL.value}, {_GPU.value}": modelled()}
        if points is not None:
            factors["measured steps"] = measured(points, _DRAFT_MS.value)
        result = compare(*measured_ranks(), nodes, batches, factors)
    if _JSON.value != "-":
        report(result)
    about = {"benchmark": "trees", "method": _METHOD.value, "row_ms": points, "draft_ms": _DRAFT_MS.value}
    write_json(_JSON.value, {**about, "context_len": _CONTEXT.value, **result, **provenance()})


if __name__ == "__main__":
    run_command(main)

"""What turns of two servers come to, ours and vLLM's: how long a turn is, medians, ratios, a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FIGURES = ("request_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")  # of the client's result


def num_prompts(streams: int) -> int:
    """Requests of a turn: enough that its beginning and its end, where fewer run, count little, and that it ends soon."""
    return min(8 * streams, max(128, 2 * streams))


def row(streams: int, turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians of each server's turns, and of each figure ours over theirs."""
    medians = {
        server: {name: statistics.median(one[name] for one in its_turns) for name in FIGURES} for server, its_turns in turns.items()
    }
    ratios = {name: medians["jaxserve"][name] / medians["vllm"][name] for name in FIGURES}
    return {"streams": streams, "num_prompts": num_prompts(streams), **medians, "ratios": ratios, "turns": turns}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown: a figure's cell is ours / theirs (ratio)."""
    titles = ("requests/s", "TTFT ms, median", "TTFT ms, P99", "TPOT ms, median", "TPOT ms, P99")
    lines = [f"| streams | {' | '.join(titles)} |", f"|{' --- |' * (1 + len(titles))}"]
    for one in rows:
        cells = [f"{one['jaxserve'][x]:.3g} / {one['vllm'][x]:.3g} ({one['ratios'][x]:.2f}x)" for x in FIGURES]
        lines.append(f"| {one['streams']} | {' | '.join(cells)} |")
    return "\n".join(lines)

"""scripts.bench_servers: what it says of turns. That it runs, only a machine with vLLM can tell."""

import pytest

from scripts.bench.server_turns import FIGURES, num_prompts, row, table


def figures(requests: float, ms: float) -> dict[str, float]:
    return {"request_throughput": requests, **dict.fromkeys(FIGURES[1:], ms)}


def test_medians_of_each_server_and_ours_over_theirs():
    turns = {
        "jaxserve": [figures(3.0, 20.0), figures(9.0, 10.0), figures(6.0, 90.0)],
        "vllm": [figures(4.0, 40.0), figures(1.0, 80.0), figures(5.0, 10.0)],
    }
    made = row(8, turns)
    assert made["jaxserve"] == figures(6.0, 20.0) and made["vllm"] == figures(4.0, 40.0) and made["turns"] == turns
    assert made["ratios"] == pytest.approx(figures(1.5, 0.5))
    assert table([made]).splitlines()[2].startswith("| 8 | 6 / 4 (1.50x) | 20 / 40 (0.50x) |")


def test_a_turn_has_several_requests_for_each_stream():
    assert [num_prompts(n) for n in (1, 8, 64, 256)] == [8, 64, 128, 512]

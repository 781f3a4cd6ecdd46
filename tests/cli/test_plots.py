"""Plots are drawn as PNG files, and say which extra they need where it is missing."""

import sys

import numpy as np
import pytest

from jaxserve.cli.common import plots


def test_missing_extra(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails as where it is not installed
    with pytest.raises(RuntimeError, match=r"\.\[plots\]"):
        plots.figure()
    assert not plots.can_plot("x.png") and plots.can_plot(None)


def test_every_axis_has_a_label(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[plots]')")
    made = []
    keep = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (made.append(figure), keep(figure, path)))
    times = {f"{n}_{m}_ms": 5.0 for n in ("median", "p99") for m in ("ttft", "tpot")}
    results = [{"request_rate": r, "output_throughput": 10.0 * r, **times} for r in (1.0, 2.0)]
    plots.latency_throughput(results, tmp_path / "a.png", "x")
    few = {"median_ttft_ms": 5.0, "median_tpot_ms": None, "median_itl_ms": 4.0, "p99.9_itl_ms": 6.0, "p75_itl_ms": 5.0}
    results = [{"request_rate": r, "output_throughput": 10.0 * r, **few} for r in (1.0, 2.0)]
    plots.latency_throughput(results, tmp_path / "g.png", "x")
    shown = [(a.get_ylabel(), [line.get_label() for line in a.lines]) for a in made[-1].axes]
    assert shown == [("TTFT (ms)", ["median"]), ("ITL (ms)", ["median", "p99.9"])], "what was asked for, and nothing else"
    with pytest.raises(ValueError, match="no metric of the results can be drawn"):
        plots.latency_throughput([{"request_rate": 1.0, "output_throughput": 1.0}], tmp_path / "h.png", "x")
    begins = np.arange(50.0) + 100.0 * (np.arange(50) >= 20)  # with nothing to serve for 100 s
    steps = np.stack([begins, begins + 0.5, np.arange(50) % 7 * 10, np.ones(50)], axis=1)
    plots.step_timeline(steps, tmp_path / "b.png", "x", seconds=400.0)
    drawn = np.asarray(made[-1].axes[0].collections[0].get_offsets())
    assert drawn == pytest.approx(np.stack([steps[:, 1], np.full(50, 500.0)], axis=1)), "idle time is no step's"
    plan = {"tokens": [8, 16], "padding_share": 0.1, "seconds": 3.0, "measured_seconds": 3.1}
    plots.plan_comparison(np.arange(1, 60), {"default": plan, "tuned": plan}, tmp_path / "c.png", "x", "mean latency")
    assert made[-1].axes[2].get_ylabel() == "mean latency (s)" and made[-1].axes[2].get_title() == "mean latency"
    assert made[-1].get_suptitle() == "x" and made[-1].axes[2].get_legend() is None, "a legend in the axes covers bars"
    assert [text.get_text() for text in made[-1].legends[0].get_texts()] == ["predicted", "measured"]
    row = {"budget": 64, "gap_ms": 5.0, "mean_ttft_ms": 9.0}
    plots.budgets([row, row | {"budget": 128}], 6.0, tmp_path / "d.png", "x")
    assert all(axis.get_xlabel() == "token budget (tokens a step)" for axis in made[-1].axes)
    capacity = {"policy": "sarathi", "slo_ms": 50.0, "mean": 3.0, "half_width": float("nan")}
    plots.capacities([capacity, capacity | {"policy": "orca", "half_width": 0.5}], tmp_path / "e.png", "x")
    assert len(made[-1].axes[0].collections) == 1, "one seed has no error bar"
    plots.policies({"mix, 2": {"orca": {"ttft": 1.0}}, "mix, 4": {"orca": {"ttft": 2.0}}}, ["ttft"], tmp_path / "f.png")
    assert len(list(tmp_path.glob("*.png"))) == len(made) == 7
    for figure in made:
        for axis in figure.axes:
            colorbar = axis.get_label() == "<colorbar>"
            assert colorbar or (axis.get_xlabel() and axis.get_ylabel()), "an axis has no label"

"""The parts of gpu_check that decide what a figure means: floors, references, and what becomes of a failure."""

import datetime
import functools
import json
import types
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from absl import app
from absl.testing import flagsaver

from kernels import gpu
from kernels.ragged_paged_attention import ragged_paged_attention
from kernels.ragged_paged_attention.cases import CASES, TOLERANCE, build
from scripts import gpu_check
from scripts.gpu import parity as gpu_parity
from scripts.gpu.attention import HEADS, Batch, Variant, best_tiles, decode_points, prefill_points, tile_candidates, tune
from scripts.gpu.engine import decoding, random_engine, step_bytes, step_flops, target_for
from scripts.gpu.figures import Figures, read_rows, value_of, write_rows
from scripts.gpu.parity import dense_attention
from scripts.gpu_check import FIRST, HIDDEN, PARTS, SECTIONS, Late, chosen_parts, device_name, read_earlier, run_part, summary
from tests.selection import slow_unless


def test_what_fails_is_a_figure_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "rows"
    figures = Figures("it", path, cap=60, dry_run=True)

    def broken():
        raise RuntimeError("no such kernel")

    def unsupported():
        raise NotImplementedError("needs sm_90")

    assert figures.attempt("one", broken) is None
    assert figures.attempt("two", unsupported) is None
    assert figures.attempt("three", lambda: 3) == 3
    figures.record("four", 4.0, "ms")
    late = Figures("it", path, cap=1, dry_run=True)
    assert late.attempt("five", lambda: 5) is None
    with path.open("a") as file:
        file.write('{"section": "it", "na')  # a crash
    rows = read_rows(path)
    assert [(r["name"], r["unit"]) for r in rows] == [("one", "error"), ("two", "unsupported"), ("four", "ms"), ("five", "skipped")]
    assert "RuntimeError: no such kernel" in rows[0]["why"] and "in broken" in rows[0]["traceback"]
    assert value_of(rows, "four") == 4.0 and value_of(rows, "six") is None
    assert read_rows(tmp_path / "never written") == []
    text = summary([*rows, {"section": "it", "name": "status", "value": "exit -11", "unit": ""}])
    assert text.endswith("1 figures, 1 unsupported, 1 skipped, 2 failures") and "exit -11" in text and "no such kernel" in text


def test_every_section_named_late_has_its_function():
    late = {name: section.run for name, section in SECTIONS.items() if isinstance(section.run, Late)}
    assert {"parity", "decode", "prefill", "mixed", "cudnn", "tune", "torch", "transformers"} <= set(late)
    for name, run in late.items():
        assert callable(run.load()), name


def test_seconds_per_call_counts_every_call():
    figures, calls, waits = Figures("it", None, cap=60, dry_run=True), [], []
    assert figures.seconds_per_call(calls.append, waits.append) > 0
    assert calls == [0, 1, 2, 0, 1, 0, 1], "three to warm up, then two batches of two"
    assert len(waits) == 3 + 2, "one wait a batch"


@pytest.mark.parametrize("case", slow_unless(lambda case: case in CASES[::12], CASES[::4]), ids=lambda case: case.name)
def test_dense_attention_is_what_the_reference_computes(case):
    batch = build(case)
    want = np.asarray(
        jax.jit(lambda *a: ragged_paged_attention(*a, backend="reference", **case.options))(*batch.arrays), np.float64
    )
    got = dense_attention(case, batch)
    np.testing.assert_allclose(got, want[: len(got)], rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])


def test_work_of_a_batch():
    seqs = [(1, 70), (5, 9), (0, 64)]
    batch = Batch.make((4, 2, 16), seqs, num_pages=6)
    assert batch.kv_bytes == (70 + 9) * 2 * 2 * 16 * 2, "keys and values of every KV head, two bytes each; no query, no read"
    pairs = sum(sum(kv - q + i + 1 for i in range(q)) for q, kv in seqs)
    assert batch.flops == pairs * 4 * (2 * 16 + 2 * 16), "a multiply and an add for q @ k and for p @ v, of every query head"
    table = np.asarray(batch.arrays[1])
    used = [*table[0, :2], *table[1, :1], *table[2, :1]]
    assert len(set(used)) == 4, "no page twice where the pool has enough"


def test_pages_that_sequences_share_lie_elsewhere_in_each():
    batch = Batch.make((4, 2, 16), [(1, 64 * 4)] * 6, num_pages=4, max_kv_len=64 * 7)
    rows = np.asarray(batch.arrays[1])
    assert rows.shape == (6, 7) and (np.sort(rows[:, :4]) == np.arange(4)).all()
    assert len({row.tobytes() for row in rows}) > 1


@pytest.mark.parametrize(("seqs", "first", "consumers"), [([(1, 300)] * 2, (1, 8), {1}), ([(256, 300)], (4, 5), {1, 2, 3, 4})])
def test_tile_candidates_begin_with_the_untuned_one(seqs, first, consumers):
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):
        found = tile_candidates(Batch.make((4, 2, 64), seqs, num_pages=10))
    assert (found[0].consumers, found[0].stages) == first and len(found) == len(set(found))
    assert {tiles.consumers for tiles in found} == consumers


@pytest.mark.parametrize("broken", [None, "raises", "negative"])
def test_tiles_are_chosen_only_when_all_were_timed(broken):
    figures, batch = Figures("tune", None, 60, False), Batch.make((4, 2, 64), [(1, 300)], num_pages=10)
    tune = functools.partial(gpu.assume_sm90, 132, "NVIDIA H100 80GB HBM3")
    with tune():
        last = tile_candidates(batch)[-1]

    class Timed:
        q, arrays, max_q_len, planner = batch.q, batch.arrays, batch.max_q_len, batch.planner

        def seconds(self, figures, tiles):
            if tiles == last and broken == "raises":
                raise RuntimeError("no launch")
            return {None: 1e-6, "raises": 1.0, "negative": -1e-6}[broken] if tiles == last else 1e-5 * tiles.stages

    with tune():
        assert best_tiles(figures, cast(Batch, Timed()), "it") == (None if broken else last)
    assert (figures.rows[-1]["unit"] == "skipped") == bool(broken)


def test_where_the_kernel_has_no_table_nothing_is_tuned(monkeypatch):
    figures = Figures("tune", None, 60, False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with gpu.assume(gpu.Device(108, "NVIDIA A100-SXM4-80GB", (8, 0))):
        tune(figures)
    (row,) = figures.rows
    assert (row["name"], row["unit"]) == ("tuned tiles", "unsupported") and "mosaic_portable runs" in row["why"]


@pytest.mark.slow
def test_more_requests_than_run_at_once_are_no_decode_step():
    engine = random_engine("tiny-qwen3", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    with pytest.raises(ValueError, match="batch=3 .* max_num_seqs=2"):
        decoding(engine, 3, 20, seed=0)
    inputs, kv_tokens = decoding(engine, 2, 20, seed=0)
    assert inputs.num_samples == 2 and kv_tokens > 2 * 4
    engine.runner.fetch(engine.runner.dispatch(inputs))


def test_floor_of_a_step():
    engine = random_engine("tiny-qwen3", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    assert step_bytes(engine, 0) == 4_197_120 * 4, "every weight, the tied embedding once"
    assert step_bytes(engine, 10) - step_bytes(engine, 0) == 10 * 4 * 2 * 2 * 64 * 4, "layers, k and v, heads, head_dim, float32"
    matmuls = 4 * (256 * 512 + 256 * 256 + 256 * 1536 + 768 * 256)
    norms = 4 * (2 * 256 + 2 * 64)
    assert step_flops(engine, 3) == 2 * 3 * (matmuls + norms)


def test_results_go_to_a_folder_of_the_card():
    assert device_name([{"name": "device", "value": "NVIDIA H100 80GB HBM3"}]) == "h100"
    assert device_name([{"name": "device", "value": "NVIDIA H200"}]) == "h200"
    assert device_name([{"name": "device", "value": "NVIDIA GH200 480GB"}]) == "nvidia-gh200-480gb"
    assert device_name([]) == "unknown"


@pytest.mark.parametrize("only", [[], ["thunks", "decode"]])
@pytest.mark.parametrize("part", PARTS)
def test_every_part_says_which_card_it_ran_on(part, only, tmp_path, monkeypatch):
    ran = []

    def run_section(name, cap, path, dry_run):
        ran.append(name)
        if name == "device":
            figures = Figures(name, path, cap, dry_run=True)
            SECTIONS[name].run(figures)
        return "done"

    monkeypatch.setattr(gpu_check, "run_child", run_section)
    with flagsaver.as_parsed(sections=",".join(only), revision="abc", minutes="9", dry_run="false"):
        _, path = run_part(part, tmp_path, tmp_path)
    assert ran == ["device", *(name for name in PARTS[part] if not only or name in only)]
    folder = jax.devices()[0].device_kind.lower().replace(" ", "-")
    name = "_".join(["gpu", part, *(ran[1:] if only else [])])
    assert path == tmp_path / folder / f"{name}.json"
    result = json.loads(path.read_text())
    assert result["device"] == jax.devices()[0].device_kind and result["revision"] == "abc"
    assert result["versions"]["jax"] == jax.__version__ and "torch" in result["versions"]
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(result["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=5)


@pytest.mark.parametrize(
    ("part", "ended", "num_failures"), [("engine", "done", 0), ("engine", "exit 1", 1), ("kernels", "done", 1)]
)
def test_what_there_was_no_time_for_is_no_failure_but_parity(part, ended, num_failures, tmp_path, monkeypatch, capsys):
    clock = [0.0]

    def run_device(name, cap, path, dry_run):
        clock[0] += 440.0
        return ended

    monkeypatch.setattr(gpu_check, "run_child", run_device)
    monkeypatch.setattr(gpu_check, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    flags = {"child": "", "dry_run": "false", "part": part, "sections": "", "resume": "", "revision": "abc", "minutes": "7.5"}
    with flagsaver.as_parsed(out=str(tmp_path), **flags):
        with pytest.raises(SystemExit) as raised:
            gpu_check.main()
    assert raised.value.code == (num_failures > 0)
    *_, last, _ = capsys.readouterr().out.splitlines()
    assert last == f"0 figures, 0 unsupported, {len(PARTS[part]) - (part == 'kernels')} skipped, {num_failures} failures"
    rows = json.loads((tmp_path / "unknown" / f"gpu_{part}.json").read_text())["figures"]
    assert [r["value"] for r in rows] == [ended] + ["skipped"] * len(PARTS[part])


def _row(section: str, name: str, value: Any = 1.0, unit: str = "us", **more: Any) -> dict[str, Any]:
    return {"section": section, "name": name, "value": value, "unit": unit, **more}


def test_parity_that_was_not_finished_is_a_failure():
    rows = [_row("parity", "bits 8b", None, "skipped", why="out of time"), _row("decode", "decode 8b", None, "skipped")]
    assert gpu_check.failures(rows) == rows[:1]
    assert summary(rows).endswith("0 figures, 0 unsupported, 1 skipped, 1 failures")


def test_the_page_says_how_long_the_caps_of_a_part_are_together():
    kernels, engine = (sum(section.cap for section in [*FIRST.values(), *PARTS[part].values()]) for part in ("kernels", "engine"))
    page = " ".join((Path(__file__).parents[2] / "docs" / "verification.md").read_text().split())
    assert f"With `device` the caps of `kernels` add up to {kernels} s and those of `engine` to {engine} s" in page


@pytest.mark.parametrize(
    ("sections", "minutes", "caps"),
    [
        ("decode", "9", {"device": 131.25, "decode": 525.0}),
        ("decode,prefill", "9", {"device": 91.3, "decode": 331.6, "prefill": 525.0}),
        ("decode", "2", {"device": 40.0, "decode": 105.0}),
        ("", "9", {"device": 40.0, "parity": 150.0}),
        ("", "30", {"device": 106.6, "parity": 425.0}),
    ],
)
def test_time_to_spare_goes_to_the_sections_that_are_left(sections, minutes, caps, tmp_path, monkeypatch):
    asked = {}

    def run_child(name, cap, path, dry_run):
        asked[name] = round(cap, 1)
        return "done"

    monkeypatch.setattr(gpu_check, "run_child", run_child)
    monkeypatch.setattr(gpu_check, "time", types.SimpleNamespace(perf_counter=lambda: 0.0))
    with flagsaver.as_parsed(sections=sections, minutes=minutes, dry_run="false", revision="abc"):
        run_part("kernels", tmp_path, tmp_path)
    assert {name: asked[name] for name in caps} == pytest.approx(caps, abs=0.1)


def only_the_device(run_section):
    def run(name, *args):
        if name != "device":
            raise KeyboardInterrupt
        return run_section(name, *args)

    return run


def test_a_run_goes_on_where_an_earlier_one_stopped(tmp_path, monkeypatch):
    done = {name: _row(name, "status", "done", "") for name in PARTS["kernels"]}
    earlier = {
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-01-02",
        "figures": [
            _row("device", "copy bandwidth", 3000.0, "GB/s"),
            *(_row("device", "device", "NVIDIA H100 80GB HBM3", ""), done["parity"] | {"value": "exit 1"}),
            *(
                _row("parity", "one", verdict="FAIL"),
                _row("parity", "two", None, "skipped"),
                _row("parity", "three", None, "error"),
            ),
            *(_row("parity", "tally", 1), _row("decode", "decode 8b"), done["decode"]),
            *(_row("tune", "tiles a"), _row("tune", "tiles b", None, "skipped"), done["tune"]),
        ],
    }
    found, kind = {}, ["NVIDIA H100 80GB HBM3"]

    def run_child(name, cap, path, dry_run):
        found[name] = [r["name"] for r in read_rows(path)]
        figures = Figures(name, path, cap, dry_run=True)
        if name == "device":
            figures.record("device", kind[0], "")
        for title in ("one", "two"):
            figures.attempt(title, figures.record, title, 2.0, "us")
        figures.record("tally", 2)
        return "done"

    monkeypatch.setattr(gpu_check, "run_child", run_child)
    flags = {"dry_run": "false", "resume": "it", "revision": "abc", "minutes": "9", "sections": "parity,decode,tune,mixed"}
    with flagsaver.as_parsed(**flags):
        rows, path = run_part("kernels", tmp_path, tmp_path, earlier)
        kind[0] = "NVIDIA H200"
        (tmp_path / "other").mkdir()
        with pytest.raises(app.UsageError, match="is of NVIDIA H100 80GB HBM3, this is NVIDIA H200"):
            run_part("kernels", tmp_path / "other", tmp_path, earlier)
        assert json.loads(path.read_text())["figures"] == rows, "another card's run overwrites nothing"
        kind[0] = "NVIDIA H100 80GB HBM3"
        monkeypatch.setattr(gpu_check, "_run_section", only_the_device(gpu_check._run_section))
        with pytest.raises(KeyboardInterrupt):
            run_part("kernels", tmp_path, tmp_path, earlier)
        assert _row("decode", "decode 8b") in json.loads(path.read_text())["figures"], "what was not reached is not lost"
    assert list(found) == ["device", "parity", "mixed", "tune"], "of decode nothing was missing"
    assert found["parity"] == ["one", "tally"] and found["tune"] == [], "the times of a tuning belong together"
    parity = [(r["name"], r["value"]) for r in rows if r["section"] == "parity"]
    assert parity == [("one", 1.0), ("two", 2.0), ("tally", 2), ("status", "done")]
    assert _row("decode", "decode 8b") in rows
    assert _row("device", "copy bandwidth of 2026-01-02", 3000.0, "GB/s") in rows, "what the figures that are kept are of"


def test_only_a_run_of_this_code_is_gone_on_with(tmp_path, monkeypatch):
    path = tmp_path / "gpu_kernels.json"
    path.write_text(json.dumps({"check": "gpu kernels", "revision": "abc", "dry_run": False, "figures": []}))
    with flagsaver.as_parsed(resume=str(path), revision="abc", dry_run="false"):
        assert read_earlier("kernels") is not None
        with pytest.raises(app.UsageError, match="check='gpu kernels', this run 'gpu engine'"):
            read_earlier("engine")
    with flagsaver.as_parsed(resume=str(path), revision="abd", dry_run="false"):
        with pytest.raises(app.UsageError, match="revision='abc', this run 'abd'"):
            read_earlier("kernels")
    for revision in ("abc+", ""):
        monkeypatch.setattr("jaxserve.cli.common.provenance.revision", lambda revision=revision: revision or None)
        with flagsaver.as_parsed(resume=str(path), revision="", dry_run="false"):
            with pytest.raises(app.UsageError, match="commit, or give --revision"):
                read_earlier("kernels")
    with flagsaver.as_parsed(resume=str(tmp_path / "nothing")):
        with pytest.raises(app.UsageError, match="no such file"):
            read_earlier("kernels")


def test_sections_share_a_compilation_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    started = []

    class Child:
        def __init__(self, command, env, **options):
            started.append(env)

        def wait(self, seconds):
            return 0

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Child)
    with flagsaver.as_parsed(child=""):
        for name in ("decode", "thunks"):
            assert gpu_check.run_child(name, 1, tmp_path / "rows", False) == "done"
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/theirs")
        gpu_check.run_child("decode", 1, tmp_path / "rows", False)
    own, uncached, theirs = started
    assert own["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "xla") and theirs["JAX_COMPILATION_CACHE_DIR"] == "/theirs"
    assert "JAX_ENABLE_COMPILATION_CACHE" not in own and uncached["JAX_ENABLE_COMPILATION_CACHE"] == "false"


@pytest.mark.parametrize(
    ("part", "sections", "parts"),
    [
        ("all", "", ["kernels", "engine"]),
        ("all", "decode", ["kernels"]),
        ("all", "decode,thunks", ["kernels", "engine"]),
        ("engine", "decode", []),
        ("engine", "device", ["engine"]),
    ],
)
def test_a_part_without_any_of_the_sections_is_not_run(part, sections, parts):
    with flagsaver.as_parsed(part=part, sections=sections):
        assert chosen_parts() == parts


@pytest.mark.parametrize(("section", "child"), [("startup", "first_token"), ("startup_8b", "first_token_8b")])
@pytest.mark.parametrize("hits", [0, 7])
def test_a_start_is_timed_twice_with_one_cache(section, child, hits, monkeypatch):
    started = []

    def first_token(name, cap, rows, dry_run, more, env):
        started.append((name, more[0], env))
        from_cache = hits if len(started) == 2 else 0
        Figures(name, rows, cap, dry_run).record("first token", 1.5 * len(started), "s", from_cache=from_cache)
        return "done"

    monkeypatch.setattr(gpu_check, "run_child", first_token)
    figures = Figures(section, None, 60, dry_run=False)
    SECTIONS[section].run(figures)
    assert [name for name, *_ in started] == [child] * 2 and child in HIDDEN
    assert started[0] == started[1] and started[0][1].startswith("--cache=/")
    cache = started[0][2]["JAX_COMPILATION_CACHE_DIR"]
    assert started[0][1] == f"--cache={cache}", "what is compiled before the engine is made is cold too"
    rows = [(r["name"], r["value"], r["from_cache"], r["verdict"]) for r in figures.rows]
    warm = ("start to first token, warm", 3.0, hits, "pass" if hits else "FAIL")
    assert rows == [("start to first token, cold", 1.5, 0, "pass"), warm]


@pytest.mark.parametrize(
    ("kind", "target", "assumed"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", ""),
        ("NVIDIA H200", "h200", ""),
        ("NVIDIA H100 PCIe", "h100", "NVIDIA H100 PCIe is taken for NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 NVL", "h100", "NVIDIA H100 NVL is taken for NVIDIA H100 80GB HBM3"),
        ("NVIDIA H200 NVL", "h200", "NVIDIA H200 NVL is taken for NVIDIA H200"),
    ],
)
def test_cards_of_a_family_have_its_target(kind, target, assumed):
    assert target_for(kind) == (target, {"assumed": assumed} if assumed else {})
    with pytest.raises(ValueError, match="GH200"):
        target_for("NVIDIA GH200 480GB")


def test_what_says_most_is_measured_first():
    points = decode_points()
    assert len(set(points)) == len(points) == 6 * 5
    assert {kv_len for _, kv_len in points[:4]} == {4096} and min(B for B, _ in points[:4]) == 32
    assert max(points.index((B, 4096)) for B in (32, 64, 128, 256)) < points.index((8, 4096))
    assert [q_len for q_len, _ in prefill_points()[:3]] == [8192, 16384, 32768]


def test_parity_begins_with_a_large_batch_and_bits_of_every_head_shape(monkeypatch):
    ran = []
    for name in ("_parity_large", "_bits"):
        monkeypatch.setattr(gpu_parity, name, lambda figures, title, heads, *_, name=name: ran.append((name, heads, title)))
    monkeypatch.setattr(gpu_parity, "_parity_cases", lambda figures: ran.append(("_parity_cases", "", "")))
    gpu_parity.parity(Figures("parity", None, 60, dry_run=False))
    assert [(name, heads) for name, heads, _ in ran[: 2 * len(HEADS)]] == [
        *(("_parity_large", heads) for heads in HEADS),
        *(("_bits", heads) for heads in HEADS),
    ]
    titles = [title for *_, title in ran]
    assert len(set(titles)) == len(titles)
    for option in ("split_q_len=5", "sliding_window=", "soft_cap=", "dtype=float16", "page_size=16", "page_size=128", "smollm2"):
        assert any(option in title for title in titles), option


def test_cases_that_a_backend_is_not_meant_for_do_not_count(monkeypatch):
    cases = [CASES[0], next(case for case in CASES if case.dtype == "float32")]
    monkeypatch.setattr(gpu_parity, "backend", lambda: "mosaic_sm90")
    ran = []

    def passes(figures, title, case, which):
        ran.append(case.name)
        figures.record(title, 0.0, "", verdict="pass")

    def cannot(figures, title, case, which):
        raise NotImplementedError("it should")

    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):
        for run, verdict in ((passes, "pass"), (cannot, "FAIL")):
            figures = Figures("parity", None, 60, dry_run=False)
            monkeypatch.setattr(gpu_parity, "_parity_case", run)
            gpu_parity._parity_cases(figures, cases)
            tally = figures.rows[-1]
            assert (tally["unit"], tally["verdict"]) == ("of 1 supported, 1 not meant for this backend", verdict)
    assert ran == [cases[0].name]


def test_a_variant_reaches_the_planner_and_the_arrays():
    variant = Variant(dtype="float16", page_size=16, sliding_window=40, soft_cap=2.0, split_q_len=3)
    batch = Batch.make((4, 2, 64), [(3, 50), (1, 17)], num_pages=8, variant=variant)
    assert batch.q.dtype == batch.arrays[0].dtype == "float16" and batch.arrays[0].shape[3] == 16
    assert batch.arrays[1].shape == (2, 4), "50 positions are 4 pages of 16"
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):
        shape = batch.planner().shape
        assert batch.part(0, 3).planner().shape.split_q_len == 3
    assert (shape.split_q_len, shape.sliding_window, shape.max_kv_len) == (3, 40, 64)
    assert str(variant) == " dtype=float16 page_size=16 sliding_window=40 soft_cap=2.0 split_q_len=3" and str(Variant()) == ""


def test_a_large_batch_of_a_variant_is_held_against_the_reference():
    figures, variant = Figures("parity", None, 60, dry_run=True), Variant(page_size=16, sliding_window=20, soft_cap=2.0)
    gpu_parity._parity_large(figures, "it", "tiny", 2, 3, 70, variant)
    assert figures.rows[-1]["verdict"] == "pass" and figures.rows[-1]["value"] < 1e-2


def test_what_an_earlier_run_left_stands(tmp_path):
    write_rows(tmp_path / "rows", [_row("it", "one", 1.0)])
    figures = Figures("it", tmp_path / "rows", 60, dry_run=True)
    assert figures.attempt("one", lambda: 5) is None and figures.attempt("two", lambda: 5) == 5
    figures.record("two", 2.0)
    assert [r["name"] for r in read_rows(tmp_path / "rows")] == ["one", "two"] == [r["name"] for r in figures.rows]


def test_sections_have_names_of_their_own():
    names = [name for part in (FIRST, *PARTS.values(), HIDDEN) for name in part]
    assert len(names) == len(set(names)) == len(SECTIONS) and json.dumps(names)

"""The parts of gpu_check that decide what a figure means: floors, references, and what becomes of a failure."""

import datetime
import functools
import json
import types
from typing import cast

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from kernels import gpu
from kernels.ragged_paged_attention import ragged_paged_attention
from kernels.ragged_paged_attention.cases import CASES, TOLERANCE, build
from scripts import gpu_check
from scripts.gpu_attention import Batch, best_tiles, dense_attention, tile_candidates
from scripts.gpu_check import FIRST, HIDDEN, PARTS, SECTIONS, chosen_parts, device_name, run_part, summary, write
from scripts.gpu_engine import decoding, random_engine, step_bytes, step_flops
from scripts.gpu_figures import Figures, read_rows, value_of


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


def test_seconds_per_call_counts_every_call():
    figures, calls, waits = Figures("it", None, cap=60, dry_run=True), [], []
    assert figures.seconds_per_call(calls.append, waits.append) > 0
    assert calls == [0, 1, 2, 0, 1, 0, 1], "three to warm up, then two batches of two"
    assert len(waits) == 3 + 2, "one wait a batch"


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
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


@pytest.mark.parametrize(("seqs", "first", "consumers"), [([(1, 300)] * 2, (1, 8), {1}), ([(256, 300)], (2, 6), {1, 2})])
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
    with flagsaver.as_parsed(sections=",".join(only), out=str(tmp_path), revision="abc", minutes="7.5", dry_run="false"):
        path = write(part, run_part(part, tmp_path))
    assert ran == ["device", *(name for name in PARTS[part] if not only or name in only)]
    folder = jax.devices()[0].device_kind.lower().replace(" ", "-")
    name = "_".join(["gpu", part, *(ran[1:] if only else [])])
    assert path == tmp_path / folder / f"{name}.json"
    result = json.loads(path.read_text())
    assert result["device"] == jax.devices()[0].device_kind and result["revision"] == "abc"
    assert result["versions"]["jax"] == jax.__version__ and "torch" in result["versions"]
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(result["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=5)


@pytest.mark.parametrize(("ended", "num_failures"), [("done", 0), ("exit 1", 1)])
def test_what_there_was_no_time_for_is_no_failure(ended, num_failures, tmp_path, monkeypatch, capsys):
    clock = [0.0]

    def run_device(name, cap, path, dry_run):
        clock[0] += 440.0
        return ended

    monkeypatch.setattr(gpu_check, "run_child", run_device)
    monkeypatch.setattr(gpu_check, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    flags = {"child": "", "dry_run": "false", "part": "kernels", "sections": "", "revision": "abc", "minutes": "7.5"}
    with flagsaver.as_parsed(out=str(tmp_path), **flags):
        with pytest.raises(SystemExit) as raised:
            gpu_check.main([""])
    assert raised.value.code == num_failures
    *_, last, _ = capsys.readouterr().out.splitlines()
    assert last == f"0 figures, 0 unsupported, {len(PARTS['kernels'])} skipped, {num_failures} failures"
    rows = json.loads((tmp_path / "unknown" / "gpu_kernels.json").read_text())["figures"]
    assert [r["value"] for r in rows] == [ended] + ["skipped"] * len(PARTS["kernels"])


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
def test_a_start_is_timed_twice_with_one_cache(section, child, monkeypatch):
    started = []

    def first_token(name, cap, rows, dry_run, more):
        started.append((name, more[0]))
        Figures(name, rows, cap, dry_run).record("first token", 1.5 * len(started), "s", from_cache=7)
        return "done"

    monkeypatch.setattr(gpu_check, "run_child", first_token)
    figures = Figures(section, None, 60, dry_run=False)
    SECTIONS[section].run(figures)
    assert [name for name, _ in started] == [child] * 2 and child in HIDDEN
    assert started[0] == started[1] and started[0][1].startswith("--cache=/")
    rows = [(r["name"], r["value"], r["from_cache"]) for r in figures.rows]
    assert rows == [("start to first token, cold", 1.5, 7), ("start to first token, warm", 3.0, 7)]


def test_sections_have_names_of_their_own():
    names = [name for part in (FIRST, *PARTS.values(), HIDDEN) for name in part]
    assert len(names) == len(set(names)) == len(SECTIONS) and json.dumps(names)

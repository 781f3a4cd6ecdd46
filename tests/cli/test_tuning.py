"""The chain from a profile to a plan in use: tune profile, tune buckets, tune budget, bench serve. Their numbers fit each other;
how large they are is no test's business."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jaxserve import BucketPlan
from jaxserve.engine.resolution import model_shape
from jaxserve.models import ModelConfig
from jaxserve.step_times.fitted import StepTimeModel
from kernels.cpu import library
from tests import alphabet_model
from tests.cli.commands import MODULES

ROOT = Path(__file__).parents[2]
PLOTS = importlib.util.find_spec("matplotlib") is not None  # an extra
LIMITS = ("--max_num_seqs=4", "--max_num_batched_tokens=32", "--max_model_len=64", "--num_pages=32", "--page_size=16")
LEVEL, OTHER = ("always", "bucket") if library.lacks() is None else ("bucket", "always")  # what auto is, and what it is not

pytestmark = pytest.mark.slow  # commands on a real engine; tests/simulation/test_tuning.py has the tuning itself


def plot(path: Path) -> list[str]:
    return [f"--plot={path}"] if PLOTS else []


def run(work: Path, script: str, *given: str, model: bool = True) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAXSERVE_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", MODULES[script], *([f"--model={work / 'model'}"] if model else []), *given]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model, a trace, and a profile of the one for the other."""
    work = tmp_path_factory.mktemp("tuning")
    alphabet_model.save(work / "model", tokenizer=False)
    rows = [f"{i * 0.01},{5 + 7 * i % 40},{1 + i % 9}" for i in range(20)]
    (work / "trace.csv").write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows, "1.0,60,6"]))
    flags = ["--rounds=1", "--held_out=3", "--min_seconds=0.005", f"--output={work / 'steps.json'}"]
    done = run(work, "tune profile", *LIMITS, *flags)
    assert done.returncode == 0, done.stderr
    return work


def test_profile(work):
    model = StepTimeModel.load(work / "steps.json")
    about = model.about
    assert {t.max_q_len == 1 for t in model.times} == {True, False} and model.max_tokens == 32
    assert all(t.base > 0 and t.compile_seconds > 0 for t in model.times) and model.host_seconds > 0
    assert about["held_out_error"]["num_points"] == 3 and about["held_out_error"]["median"] >= 0
    assert {"revision", "device", "jax", "seed", "flags"} <= set(about) and about["flags"]["rounds"] == 1
    assert about["fitted"] == {"date": about["date"], "revision": about["revision"]} and about["cpu_cores"] == os.cpu_count()
    assert about["model_shape"] == model_shape(ModelConfig.from_hf(alphabet_model.CONFIG))
    assert about["deterministic"] == LEVEL
    assert about["tensor_parallel_size"] == 1 and about["graph_collectives"] is False
    assert {p["head_rows"] for p in about["points"]} > {0} and all(p["head_rows"] for p in about["held_out"])


def test_points_fitted_anew(work):
    """Without measuring: what an earlier fit made of them does not count, when they were measured stays."""
    text = json.loads((work / "steps.json").read_text())
    spoilt = text | {"times": [t | {"base": 1.0} for t in text["times"]], "about": text["about"] | {"date": "2001-02-03"}}
    (work / "spoilt.json").write_text(json.dumps(spoilt))
    points, anew = f"--points={work / 'spoilt.json'}", work / "anew.json"
    done = run(work, "tune profile", points, f"--output={anew}", model=False)
    assert done.returncode == 0 and "fitted anew from" in done.stderr, done.stderr
    measured, again = StepTimeModel.load(work / "steps.json"), StepTimeModel.load(anew)
    assert again == measured and again.about["held_out_error"] == measured.about["held_out_error"]
    assert again.about["date"] == "2001-02-03" < again.about["fitted"]["date"]
    assert again.about["points"] == measured.about["points"] and again.about["flags"] == measured.about["flags"]
    done = run(work, "tune profile", points, "--max_num_seqs=4", "--rounds=2", model=False)
    assert done.returncode == 1 and "--rounds, --max_num_seqs: nothing is measured" in done.stdout + done.stderr


@pytest.mark.slow
def test_plan_is_tuned_measured_and_served(work):
    traffic = ["--workload=trace", f"--dataset_path={work / 'trace.csv'}", "--max_model_len=64"]
    plan, path = work / "plan.json", work / "tuned.json"
    given = [f"--step_times={work / 'steps.json'}", "--max_programs=10", "--measure=2", f"--output={plan}", f"--json={path}"]
    done = run(work, "tune buckets", *traffic, *given, *plot(work / "plans.png"))
    assert done.returncode == 0, done.stderr
    assert "TPOT" not in done.stdout and (work / "plans.png").exists() == PLOTS
    assert "60 simulated requests" in done.stderr  # at once: a round, and powers of two twice
    assert "the profile's error on held-out steps: median" in done.stdout
    result = json.loads(path.read_text())
    rows = result["plans"]
    assert set(rows) == {"default", "powers", "tuned"} and result["workload"].startswith("trace: 20 requests")
    for row in rows.values():
        runs = row["measured"]
        assert row["num_programs"] <= 10 and [measured["completed"] for measured in runs] == [20] * 2
        # All at once, the steps of the real run are those that were predicted.
        assert all(measured["padding_share"] == pytest.approx(row["padding_share"]) for measured in runs)
        assert row["measured_seconds"] == pytest.approx(sum(measured["duration"] for measured in runs) / 2)  # the median of two
        ours = rows["tuned"]["measured"]
        assert row["measured_gains"] == [runs[i]["duration"] / ours[i]["duration"] for i in range(2)], "by turns"
        assert row["measured_gain"] == pytest.approx(sum(row["measured_gains"]) / 2)
    assert rows["tuned"]["predicted_gain"] == 1 and rows["powers"]["predicted_gain"] > 0.95  # padding has a price beside time
    assert str(BucketPlan.load(plan)) == rows["tuned"]["plan"]
    about = json.loads(plan.read_text())["about"]
    assert {"revision", "device", "jax", "seed", "max_programs"} <= set(about) and about["flags"]["measure"] == 2

    path = work / "serve.json"
    rates = ["--request_rate=200,inf", "--goodput=ttft:60000", "--max_num_seqs=4", "--num_pages=32", "--page_size=16"]
    done = run(work, "bench serve", *traffic, *rates, f"--bucket_plan={plan}", f"--json={path}", *plot(work / "serve"))
    assert done.returncode == 0, done.stderr
    assert len(list(work.glob("serve_*.png"))) == 2 * PLOTS
    result = json.loads(path.read_text())
    assert [r["request_rate"] for r in result["results"]] == [200.0, "inf"]
    for r in result["results"]:
        assert r["completed"] == 20 and r["total_output_tokens"] == sum(1 + i % 9 for i in range(20))
        assert r["request_goodput"] == pytest.approx(r["request_throughput"]) == pytest.approx(20 / r["duration"])
        assert 0 < r["median_ttft_ms"] <= r["p99_e2el_ms"]
    assert result["results"][1]["padding_share"] == pytest.approx(rows["tuned"]["padding_share"])


@pytest.mark.slow
def test_budget(work):
    steps = json.loads((work / "steps.json").read_text())
    # What a step costs whatever is in it: then the larger budget is the better one, and not the machine's mood decides.
    flat = {"times": [t | {"base": 1e-3, "per_kv_token": 0, "per_pair": 0} for t in steps["times"]], "host_seconds": 0}
    (work / "flat.json").write_text(json.dumps(steps | flat | {"heads": [[rows, 0] for rows, _ in steps["heads"]]}))
    given = [f"--step_times={work / 'flat.json'}", "--workload=trace", f"--dataset_path={work / 'trace.csv'}"]
    path = work / "budget.json"
    flags = ["--arrivals_from_trace", "--budgets=16,20,32", "--tbt_slo_ms=60000", "--dynamic=1"]
    flags += [f"--json={path}", f"--table={work / 'budgets.md'}"]
    done = run(work, "tune budget", *given, *flags, *plot(work / "budgets.png"))
    assert done.returncode == 0, done.stderr
    assert (work / "budgets.png").exists() == PLOTS
    result = json.loads(path.read_text())
    assert result["budget"] == 32 and [r["budget"] for r in result["tried"]] == [16, 20, 32]
    assert "budget 20 runs in the bucket of 32" in done.stdout and "budget 32 runs" not in done.stdout
    assert result["dynamic"][0]["fixed"]["budget"] == 32
    text = (work / "budgets.md").read_text()
    firsts = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert firsts[:5] == ["budget", "---", "16", "20", "32 (chosen)"]
    assert "| 0 | fixed, 32 |" in text and "| 0 | dynamic |" in text
    none = flat | {"times": [t | {"base": 1e-9} for t in flat["times"]]}
    (work / "fast.json").write_text(json.dumps(steps | none | {"heads": [[rows, 0] for rows, _ in steps["heads"]]}))
    few = [f"--step_times={work / 'fast.json'}", "--budgets=16", "--tbt_slo_ms=0.01", "--dynamic=1", "--measure", f"--json={path}"]
    done = run(work, "tune budget", *given[1:], "--arrivals_from_trace", *few, f"--table={work / 'budgets.md'}")
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["dynamic"][0]["fixed"]["budget"] == 16, "the budgets asked for are those compared"
    assert result["tbt_slo_ms"] == 0.01 < result["measured"]["gap_ms"] and result["measured"]["holds"] is False
    for text in (done.stdout, (work / "budgets.md").read_text()):
        assert "so the objective of 0.01 ms does NOT hold" in text
    done = run(work, "tune budget", *given, "--tbt_slo_ms=0.0001")
    assert done.returncode and "no token budget keeps P99" in done.stderr


@pytest.mark.slow
def test_runs_of_an_earlier_result(work):
    """They stand beside a plan that is made again, if it is the same one; and an objective that no step meets is warned of."""
    given = [f"--step_times={work / 'steps.json'}", "--workload=trace", f"--dataset_path={work / 'trace.csv'}", "--max_programs=10"]
    first, again, output = work / "first.json", work / "again.json", f"--output={work / 'again' / 'plan.json'}"
    done = run(work, "tune buckets", *given, output, "--tbt_slo_ms=0.001")
    assert done.returncode == 0 and done.stderr.count("so every such step is late") == 1, done.stderr
    done = run(work, "tune buckets", *given, output, f"--json={first}")
    assert done.returncode == 0 and "every such step" not in done.stderr, done.stderr
    done = run(work, "tune buckets", *given, output, f"--measured={first}")
    assert done.returncode == 1 and "first.json holds no measured run" in done.stderr
    result = json.loads(first.read_text())
    for name, seconds in (("default", (6.0, 4.0, 3.0)), ("powers", (2.0, 2.0, 2.0)), ("tuned", (2.0, 1.0, 4.0))):
        result["plans"][name]["measured"] = [{"duration": each} for each in seconds]
    first.write_text(json.dumps(result | {"device": "another"}))
    table, taken = f"--table={work / 'again.md'}", f"--measured={first}"
    done = run(work, "tune buckets", *given, output, taken, table, f"--json={again}")
    assert done.returncode == 0, done.stderr
    found = json.loads(again.read_text())
    rows = found["plans"]
    assert rows["default"]["measured_gains"] == [3.0, 4.0, 0.75] and rows["default"]["measured_gain"] == 3.0
    assert rows["default"]["measured_seconds"] == 4.0 and found["measured"]["device"] == "another" != found["device"]
    (line,) = (line for line in (work / "again.md").read_text().splitlines() if line.startswith("| default"))
    off = 3.0 / rows["default"]["predicted_gain"] - 1
    assert line.endswith(f"| 4.00 s | 3.00 (0.75 to 4.00) | {off:+.0%} |")
    done = run(work, "tune buckets", *given, output, taken, "--request_rate=40")
    assert done.returncode == 1 and "first.json is of another request_rate: inf, not 40.0" in done.stderr
    result["plans"]["powers"]["plan"] = "another plan"
    first.write_text(json.dumps(result))
    done = run(work, "tune buckets", *given, output, taken)
    assert done.returncode == 1 and "first.json is of another powers: another plan, not decode" in done.stderr
    first.write_text("{}")
    done = run(work, "tune buckets", *given, output, taken)
    assert done.returncode == 1 and "first.json is no result of `jaxserve tune buckets`" in done.stderr
    done = run(work, "tune buckets", *given, output, taken, "--measure=1")
    assert done.returncode == 1 and "--measure: nothing is measured with --measured" in done.stdout + done.stderr


def test_over_time_the_table_has_tpot(work):
    given = [f"--step_times={work / 'steps.json'}", "--workload=trace", f"--dataset_path={work / 'trace.csv'}"]
    over_time = ["--request_rate=40", f"--output={work / 'over_time.json'}", f"--table={work / 'table.md'}"]
    done = run(work, "tune buckets", *given, *over_time, "--max_programs=10", f"--json={work / 'over_time_found.json'}")
    assert done.returncode == 0, done.stderr
    *lines, _, below, _, bound = (work / "table.md").read_text().splitlines()
    heads, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert heads == ["plan", "programs", "padding", "predicted", "predicted gain", "predicted requests/s", "predicted TPOT"]
    assert [row[0] for row in rows] == ["default", "powers", "tuned"] and all(row[6].endswith(" ms") for row in rows)
    search = json.loads((work / "over_time_found.json").read_text())["search"]
    assert f"{search['fixed_log_gain']:.3f} by the default's demand log alone, {search['in_loop_gain']:.3f} with" in below
    assert below in done.stdout and bound in done.stdout
    assert f"at most {100 * search['gap']:.2f}% above the best set of {search['num_candidates']} candidates" in bound
    assert all(cell in done.stdout for row in rows for cell in row)


@pytest.mark.slow
def test_options_are_those_of_the_simulation(work):
    """What changes a measured run changes the predicted one: waiting for each step's tokens, prefixes computed again; and the plan
    and objective of a file of options."""
    path, base = work / "options.json", [f"--step_times={work / 'steps.json'}", "--budgets=32"]
    base += ["--workload=shared_prefix", "--prefix_len=32", "--random_input_len=4", "--random_output_len=8", "--num_prefixes=2"]

    def tried(*given: str) -> dict:
        done = run(work, "tune budget", *base, *given, f"--json={path}")
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text())

    first = tried("--tbt_slo_ms=60000")["tried"][0]["mean_e2el_ms"]
    for flag in ("--noasync_scheduling", "--noenable_prefix_caching"):
        assert abs(tried("--tbt_slo_ms=60000", flag)["tried"][0]["mean_e2el_ms"] / first - 1) > 1e-3
    plan = BucketPlan(mixed=((12, 4), (32, 4)), head_rows=(4,))
    options = {"bucket_plan": json.loads(plan.to_json()), "tbt_slo_ms": 50_000}
    (work / "options_file.json").write_text(json.dumps(options))
    chosen = tried(f"--config={work / 'options_file.json'}")
    assert chosen["plan"] == str(plan)


@pytest.mark.slow
def test_a_bad_profile_is_not_used_unasked(work):
    """One of another model never; one that mispredicts not without a word."""
    text = json.loads((work / "steps.json").read_text())
    given = [
        f"--step_times={work / 'other.json'}",
        "--workload=trace",
        f"--dataset_path={work / 'trace.csv'}",
        "--tbt_slo_ms=60000",
    ]

    def told(**about: Any) -> subprocess.CompletedProcess:
        (work / "other.json").write_text(json.dumps(text | {"about": text["about"] | about}))
        return run(work, "tune budget", *given)

    done = told(model="another", held_out_error={"median": 0.3})
    assert done.returncode == 1 and f"other.json is of model another, not --model={work / 'model'}" in done.stderr
    done = told(held_out_error={"median": 0.3})
    assert done.returncode == 0 and done.stderr.count("is off by 30% (median) on held-out steps") == 1
    done = told(held_out_error={"median": 0.09})
    assert done.returncode == 0 and "is off by" not in done.stderr


STEPS, TRACE = "--step_times={work}/steps.json", ("--workload=trace", "--dataset_path={work}/{name}.csv")
BAD = [
    ("tune buckets", (STEPS, *TRACE), "bad", "jaxserve tune buckets: no request of bad fits max_model_len=64"),
    ("tune buckets", (STEPS, *TRACE), "empty", "empty.csv has no request: give a file with a line for each"),
    ("tune buckets", (STEPS, *TRACE, "--num_requests=50"), "trace", "trace.csv has 21 requests, 50 were asked for"),
    ("tune buckets", (STEPS, *TRACE, f"--deterministic={OTHER}"), "", f"deterministic={OTHER!r} is not the profile's {LEVEL!r}"),
    ("tune buckets", (STEPS, *TRACE, "--tp=2"), "", "measured with tensor_parallel_size=1, not 2: give tensor_parallel_size=1"),
    ("tune buckets", (STEPS, '--speculative_config={{"method": "ngram"}}'), "", "--speculative_config: steps with drafts"),
    ("tune buckets", (STEPS, "--config={work}/drafts.json"), "", "speculative_config of --config: steps with drafts"),
    ("tune buckets", (STEPS, "--bucket_plan=x"), "", "--bucket_plan: a plan is made here"),
    ("tune budget", ("--tbt_slo_ms=9",), "", "jaxserve tune budget: give --step_times"),
    ("tune buckets", (STEPS, *TRACE, "--arrivals_from_trace"), "endless", "endless.csv:3: arrived_at=inf must be a finite number"),
    (
        "tune buckets",
        (STEPS, "--max_programs=5"),
        "",
        "max_programs=5 is too few for the default plan of max_num_seqs=4, which takes",
    ),
    (
        "tune buckets",
        (STEPS, *TRACE, "--max_temp_mib=0.001"),
        "trace",
        "MiB of temporary memory, more than the 0.000999451 MiB allowed",
    ),
    ("tune budget", (STEPS, "--tbt_slo_ms=-5"), "", "jaxserve tune budget: flag --tbt_slo_ms=-5.0: must be milliseconds above 0"),
    ("tune budget", (STEPS, "--tbt_slo_ms=9", "--budgets=abc"), "", "must be numbers, 1 or more"),
    ("tune budget", (STEPS, "--tbt_slo_ms=9", "--dynamic=5"), "", "--dynamic=5 compares seeds of arrivals"),
    ("validate_simulator", (), "", "python -m scripts.validate_simulator: give --step_times"),
    ("validate_simulator", (STEPS, "--arrivals_from_trace"), "", "--arrivals_from_trace means nothing to --workload=short_long"),
    ("validate_simulator", (STEPS, "--arrivals_from_trace", *TRACE), "timeless", "timeless.csv has no times; give it a column"),
    ("bench serve", ("--burstiness=0.5",), "", "jaxserve bench serve: --burstiness=0.5 is of the gaps"),
    ("bench serve", ("--config={work}/short.json", *TRACE), "bad", "jaxserve bench serve: no request of bad fits max_model_len=32"),
    (
        "bench serve",
        ("--workload=random", "--max_num_seqs=4", "--max_num_batched_tokens=32", "--num_pages=40", "--bucket_plan={work}/one.json"),
        "",
        "more than max_model_len=256: raise it",
    ),
    ("bench serve", ("--metric_percentiles=50,101",), "", "must be numbers from 0 to 100"),
    ("bench serve", ("--request_rate=2,abc",), "", "flag --request_rate=['2', 'abc']: must be numbers above 0, or inf"),
    ("bench serve", ("--metric_percentiles=median",), "", "must be numbers from 0 to 100"),
    (
        "bench serve",
        ("--base_url=http://127.0.0.1:9", "--num_pages=4"),
        "",
        "--num_pages: is of an engine, and --base_url makes none",
    ),
    ("bench serve", ("--base_url=http://127.0.0.1:9",), "", "--model: the server at --base_url has its own"),
    ("bench serve", ("--vocab_size=9",), "", "--vocab_size: is of the server at --base_url"),
    ("tune profile", ("--points={work}/steps.json",), "", "--model: nothing is measured with --points"),
    (
        "tune profile",
        ("--max_num_seqs=64", "--max_num_batched_tokens=32"),
        "",
        "jaxserve tune profile: max_num_seqs=64 must not exceed",
    ),
]


@pytest.mark.parametrize(("script", "given", "name", "message"), BAD, ids=lambda x: None if isinstance(x, tuple) else x)
def test_mistakes_end_with_one_line(work, script, given, name, message):
    columns = "num_prefill_tokens,num_decode_tokens\n"
    for file, text in {
        "bad.csv": columns + "400,5\n",
        "empty.csv": columns,
        "endless.csv": "arrived_at," + columns + "0,4,5\ninf,4,5\n",
        "timeless.csv": columns + "4,5\n" * 2,
        "drafts.json": json.dumps({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        "short.json": json.dumps({"max_model_len": 32}),
        "one.json": BucketPlan(mixed=((32, 4),), head_rows=(4,)).to_json(),
    }.items():
        (work / file).write_text(text)
    done = run(work, script, *(flag.format(work=work, name=name) for flag in given))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert message in done.stderr + done.stdout


@pytest.mark.slow
def test_server_of_the_same_options(work):
    """--against_server hands on the engine's options and a file of them, and nothing else."""
    alphabet_model.save(work / "served")
    options = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 32, "page_size": 16}
    options |= {"bucket_plan": json.loads(BucketPlan(mixed=((32, 4),), head_rows=(4,)).to_json())}
    (work / "same.json").write_text(json.dumps(options | {"long_prefill_token_threshold": 8}))
    given = [f"--config={work / 'same.json'}", f"--model={work / 'served'}", "--num_pages=30", "--noenable_prefix_caching"]
    traffic = ["--workload=random", "--num_prompts=4", "--random_input_len=8", "--random_output_len=4", "--rounds=1"]
    code = "import sys\nfrom jaxserve.cli.bench import serve\nserve.flags.FLAGS(sys.argv)\nprint(serve.server_flags())"
    told = subprocess.run([sys.executable, "-c", code, *given, *traffic], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert sorted(ast.literal_eval(told.stdout)) == sorted(given), told.stderr
    done = run(work, "bench serve", *given, "--against_server", *traffic)
    assert done.returncode == 0 and "of the engine in process" in done.stdout, done.stderr


@pytest.mark.slow
def test_simulation_beside_the_engine(work):
    """Three figures of one workload, simulated and served; none differs by nothing, which the exit status says."""
    path, given = work / "errors.json", [f"--step_times={work / 'steps.json'}", "--rounds=1", "--max_model_len=64", "--tolerance=0"]
    traffic = ["--workload=trace", f"--dataset_path={work / 'trace.csv'}", "--request_rate=40", f"--json={path}"]
    done = run(work, "validate_simulator", *given, *traffic)
    assert done.returncode == 1 and done.stdout.count("simulated") == 3, done.stderr
    assert "differ by more than 0%: output_throughput, median_ttft_ms, p99_tbt_ms" in done.stderr
    metrics = json.loads(path.read_text())["metrics"]
    for row in metrics.values():
        assert row["measured"] == row["rounds"][0] > 0
        assert row["error"] == pytest.approx(row["simulated"] / row["measured"] - 1)


class OtherServer(BaseHTTPRequestHandler):
    """A server of completions that is not ours: under a path, with a model that must be named, spaces in its JSON, a chunk in two
    writes, and nothing at /tokenizer_info."""

    asked: list[dict[str, Any]] = []

    def do_GET(self):
        found = self.path == "/some/path/v1/models"
        text = json.dumps({"object": "list", "data": [{"id": "theirs"}, {"id": "another"}]}) if found else "{}"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        good = self.path == "/some/path/v1/completions" and body["model"] == "theirs" and max(body["prompt"]) < 50
        self.send_response(200 if good else 400)
        self.end_headers()
        if not good:
            return
        self.asked.append(body)
        for _ in range(body["max_tokens"]):
            event = f"data: {json.dumps({'choices': [{'index': 0, 'text': 'a'}]})}\n\n".encode()
            middle = event.index(b'"text"') + 8
            for part in (event[:middle], event[middle:]):
                self.wfile.write(part)
                self.wfile.flush()
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}}
        self.wfile.write(f"data: {json.dumps(usage, indent=1)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_):
        pass


def test_a_server_of_anothers(work):
    """All that its API has in common with ours is enough: every chunk is a token's, and no key is in the result."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), OtherServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = work / "theirs.json"
    traffic = ["--workload=random", "--num_prompts=3", "--random_input_len=20", "--random_output_len=7", f"--json={path}"]
    given = [f"--base_url=http://127.0.0.1:{server.server_port}/some/path/v1/", "--api_key=secret", *traffic]
    try:
        done = run(work, "bench serve", *given, model=False)
        assert (
            done.returncode == 1 and "does not say at /tokenizer_info how many token ids it knows: give --vocab_size" in done.stderr
        )
        done = run(work, "bench serve", *given, "--vocab_size=50", model=False)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text())["results"]
    assert result["model_id"] == "theirs" and result["completed"] == 3 and result["total_output_tokens"] == 21
    assert [len(body["prompt"]) for body in OtherServer.asked] == [20] * 3
    assert result["median_itl_ms"] is not None and "secret" not in path.read_text()


@pytest.mark.parametrize("script", ["bench serve", "tune buckets", "tune budget"])
def test_a_plot_that_cannot_be_drawn_ends_nothing_late(script):
    """It is said before anything is read or measured."""
    code = f"import runpy, sys\nsys.modules['matplotlib'] = None\nrunpy.run_module('{MODULES[script]}', run_name='__main__')"
    command = [sys.executable, "-c", code, "--plot=x", "--step_times=/nothing/there", "--tbt_slo_ms=9"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 1 and "plots need matplotlib" in done.stdout + done.stderr and "/nothing/there" not in done.stderr

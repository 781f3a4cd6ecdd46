"""`jaxserve generate` as a user runs it, on a tiny checkpoint. Each run is a process; they share compiled programs."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxserve import BucketPlan
from tests import alphabet_model
from tests.alphabet_model import after, ids

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(*flags, stdin=text): the finished process; --model and limits are given. run.command(*flags): (command, environment)."""
    work = tmp_path_factory.mktemp("generate")
    said = {"temperature": 0.5, "top_k": 1}  # greedy, by its makers' recommendation
    model = alphabet_model.save(work / "model", generation_config=said)
    BucketPlan(mixed=((32, 4),), head_rows=(4,)).save(work / "plan.json")
    environment = os.environ | {"JAXSERVE_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)

    def command(*given: str) -> tuple[list[str], dict[str, str]]:
        flags = [f"--model={model}", f"--bucket_plan={work / 'plan.json'}", "--num-pages=64", *given]
        return [sys.executable, "-W", "error", "-m", "jaxserve", "generate", *flags], environment

    def run(*given: str, stdin: str = "") -> subprocess.CompletedProcess:
        line, env = command(*given)
        return subprocess.run(line, input=stdin, capture_output=True, text=True, cwd=work, env=env, timeout=300)

    run.command = command
    return run


@pytest.mark.slow  # of a file and of a pipe it is served below
def test_prompts_from_flags_to_the_terminal(run):
    done = run("--prompt=tea", "--prompt=A", "--max_tokens=3", "--stop=C")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n--- tea [length]\nbcd\n\n--- A [stop]\nB\n"
    assert "100%" in done.stderr and "out" in done.stderr, "the progress bar"
    logged = re.findall(r"(?:DEBUG|INFO|WARNING|ERROR) (\S+):", done.stderr)
    assert set(logged) == {"jaxserve"}, "no other library has a say on the terminal"
    assert "backend" not in done.stderr and "cache" not in done.stderr


@pytest.mark.slow
def test_a_text_file_a_system_message_and_samples(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\x0bline\n\nté\n", encoding="utf-8")
    done = run(
        f"--prompts_file={tmp_path / 'prompts.txt'}",
        f"--output={tmp_path / 'out.jsonl'}",
        "--chat",
        "--system=S",
        "--n=2",
        "--max_tokens=2",
        "--noprogress",
    )
    assert done.returncode == 0, done.stderr
    assert "%" not in done.stderr and not done.stdout
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["prompt"] == "one\x0bline" and second["prompt"] == "té"
    assert [o["index"] for o in first["outputs"]] == [0, 1] and [o["text"] for o in first["outputs"]] == ["BC", "BC"]
    assert first["usage"] == {"prompt_tokens": len("s:S;u:one.line;A"), "completion_tokens": 4}


RECORDS = [
    {"prompt": "a", "max_tokens": 2, "id": 7, "tags": ["x"], "separator": "\u2028"},
    {"prompt": ""},
    {"messages": [{"role": "user", "content": "hi"}], "stop": "DE", "cache_salt": "mine"},
    {"messages": [{"content": "hi"}]},
    {"prompt_token_ids": ids("m"), "logprobs": 1, "max_tokens": 1},
    {"prompt": "c", "priority": 5},
    {"prompt": "b", "stop_token_ids": ids("d"), "id": 8},
]


@pytest.mark.slow
def test_jsonl_with_parameters_of_its_own_and_prompts_that_fail(run, tmp_path):
    lines = [json.dumps(record, ensure_ascii=False) for record in RECORDS]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:2], "", *lines[2:]]), encoding="utf-8")
    done = run(f"--prompts_file={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}", "--max_tokens=5")
    assert done.returncode == 1
    assert "3 of 7 prompts failed" in done.stderr and "Traceback" not in done.stderr
    assert "fields that are copied to the results and not used: id, separator, tags\n" in done.stderr
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [{k: v for k, v in r.items() if k not in ("outputs", "usage")} for r in results] == RECORDS
    got = [(o["text"], o["token_ids"], o["finish_reason"], o["stop_reason"]) for r in results for o in r["outputs"]]
    assert got[0] == ("bc", ids("bc"), "length", None)
    assert got[2] == ("BC", ids("BCDE"), "stop", "DE")
    assert got[4] == ("n", ids("n"), "length", None)
    assert got[6] == ("c", ids("cd"), "stop", ord("d"))
    for i, message in (
        (1, "empty prompt"),
        (3, "message 0 must be a dict with a string under 'role'"),
        (5, "priority=5 means nothing"),
    ):
        assert got[i][:3] == ("", [], "error") and message in got[i][3]
    usage = [(r["usage"]["prompt_tokens"], r["usage"]["completion_tokens"]) for r in results]
    assert usage == [(1, 2), (0, 0), (6, 4), (0, 0), (1, 1), (1, 0), (1, 2)]
    (logprobs,) = results[4]["outputs"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs][0] == "n" and logprobs[0]["rank"] == 1 and logprobs[0]["logprob"] < 0


@pytest.mark.slow
def test_jsonl_with_what_json_says_in_its_own_way(run, tmp_path):
    """Token ids as keys, forms as objects, and the log-probabilities that come back: against the model's own, by hand."""
    records = [
        {"prompt": "a", "logit_bias": {str(ord("x")): 100, str(ord("b")): -100.0}, "max_tokens": 1},
        {"prompt": "a", "structured_outputs": {"choice": ["no", "yes"]}, "logit_bias": {str(ord("y")): 50}, "max_tokens": 9},
        {"prompt": "tea", "prompt_logprobs": 1, "logprobs": 0, "n": 2, "max_tokens": 3},
        {"prompt": "b", "max_tokens": 1},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = [f"--prompts_file={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    biased, formed, scored, plain = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (biased["outputs"][0]["text"], formed["outputs"][0]["text"]) == ("x", "yes")
    assert not {"logprobs", "cumulative_logprob", "prompt_logprobs"} & plain["outputs"][0].keys()

    def logprob(before: str, token: str) -> float:
        x = alphabet_model.logits(ord(before))
        return float(x[ord(token)] - np.log(np.exp(x - x.max()).sum()) - x.max())

    for output in scored["outputs"]:
        first, *others = output["prompt_logprobs"]
        assert first is None and len(others) == len("ea")
        for entry, before, token in zip(others, "te", "ea", strict=True):
            (own,) = (x for x in entry if x["token_id"] == ord(token))
            assert own["token"] == token and own["logprob"] == pytest.approx(logprob(before, token), abs=1e-4)
            assert any(x["token"] == after(before, 1) and x["rank"] == 1 for x in entry)
        expected = sum(logprob(before, token) for before, token in zip("abc", "bcd", strict=True))
        assert output["text"] == "bcd" and output["cumulative_logprob"] == pytest.approx(expected, abs=1e-4)
    again = run(*flags, "--resume", "--model=none")
    assert again.returncode == 0 and "4 of 4 prompts are done already" in again.stderr
    refused = run(flags[0])
    assert refused.returncode == 1 and "log-probabilities are written to --output alone" in refused.stderr


@pytest.mark.slow
def test_token_ids_in_and_out_without_a_tokenizer(run, tmp_path):
    bare = alphabet_model.save(tmp_path / "bare", tokenizer=False)
    records = [{"prompt_token_ids": ids("a"), "max_tokens": 3, "logprobs": 0}, {"prompt_token_ids": ids("x"), "stop": "z"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = [f"--model={bare}", f"--prompts_file={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}", "--temperature=0"]
    missing = run(*flags)
    assert missing.returncode == 1 and missing.stderr.startswith(f"jaxserve generate: {bare} has no tokenizer.json")
    assert "(--tokenizer says where one lies; with --skip_tokenizer_init prompts are token ids)\n" in missing.stderr

    done = run(*flags, "--skip_tokenizer_init")
    assert done.returncode == 1 and "1 of 2 prompts failed" in done.stderr and "Traceback" not in done.stderr
    (plain,), (stopped,) = (json.loads(line)["outputs"] for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert (plain["token_ids"], plain["text"], plain["finish_reason"]) == (ids("bcd"), "", "length")
    assert [(x["token_id"], x["token"]) for entry in plain["logprobs"] for x in entry] == [(i, None) for i in ids("bcd")]
    assert stopped["finish_reason"] == "error" and "needs a tokenizer" in stopped["stop_reason"]

    (tmp_path / "in.jsonl").write_text(json.dumps(records[0] | {"logprobs": None}) + "\n")
    shown = run(*flags[:2], flags[3], "--skip_tokenizer_init")
    assert shown.returncode == 0 and shown.stdout == f"\n--- prompt [length]\n{ids('bcd')}\n", shown.stderr

    for text in ({"prompt": "a"}, RECORDS[2]):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (records[0], text)))
        refused = run(*flags, "--skip_tokenizer_init")
        said = "in.jsonl:2: a text, and --skip_tokenizer_init leaves nobody to tokenise it: give prompt_token_ids"
        assert refused.returncode == 1 and said in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_broke_off(run, tmp_path):
    """Killed without warning while it writes; no line is lost, changed, or written twice, and draws are those of one run."""
    prompts = [{"prompt": chr(97 + i % 26), "id": i, "max_tokens": 2 + i % 60} for i in range(120)]
    prompts[3] = {"prompt": "", "id": 3}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    flags = [f"--prompts_file={tmp_path / 'in.jsonl'}", "--temperature=1.5", "--top_k=0", "--noprogress"]
    assert run(*flags, f"--output={tmp_path / 'whole.jsonl'}").returncode == 1  # prompt 3
    whole = (tmp_path / "whole.jsonl").read_bytes()

    path = tmp_path / "out.jsonl"
    command, environment = run.command(*flags, f"--output={path}")
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (path.exists() and path.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.wait()
    kept = path.read_bytes()
    assert 0 < kept.count(b"\n") < len(prompts), "killed too early or too late to say anything"
    path.write_bytes(kept[: kept.rindex(b"\n") + 1] + b'{"prompt": "cut sho')
    done = run(*flags, f"--output={path}", "--resume")
    assert done.returncode == 1 and "1 of 120 prompts failed" in done.stderr
    assert f"{kept.count(b'\n')} of 120 prompts are done already" in done.stderr
    ours, theirs = path.read_bytes().splitlines(), whole.splitlines()
    assert ours[: kept.count(b"\n")] == kept.splitlines()[: kept.count(b"\n")]
    have, want = (list(map(json.loads, lines)) for lines in (ours, theirs))
    assert [{**r, "outputs": 0} for r in have] == [{**r, "outputs": 0} for r in want]
    drawn = [[r["outputs"][0]["token_ids"] for r in results] for results in (have, want)]
    assert drawn[0] == drawn[1]
    assert drawn[0][60][:8] != drawn[0][86][:8], "the same prompt got the same answer: nothing was drawn"

    # All done: nothing is loaded, the failed one still counts. And results of other prompts are no place to go on.
    again = run(*flags, f"--output={path}", "--resume", "--model=none")
    assert again.returncode == 1 and "120 of 120 prompts are done already" in again.stderr and "none" not in again.stderr
    assert path.read_bytes().splitlines() == ours
    other = run("--prompt=z", f"--output={path}", "--resume")
    assert other.returncode == 1 and "out.jsonl:1: not the result of prompt 1" in other.stderr
    path.write_text("precious\n")
    assert "out.jsonl:1: not a result of `jaxserve generate`" in run(*flags, f"--output={path}", "--resume").stderr
    assert path.read_text() == "precious\n"


@pytest.mark.slow
def test_draws_are_seeded_by_the_engines_seed_wherever_it_stands(run, tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 5}')
    flags = ["--prompt=a", "--temperature=1.5", "--top_k=0", "--max_tokens=20", "--ignore_eos"]
    drawn = []
    for given in (f"--config={tmp_path / 'config.json'}", "--seed=5"):
        assert run(*flags, given, f"--output={tmp_path / 'out.jsonl'}").returncode == 0
        drawn.append(json.loads((tmp_path / "out.jsonl").read_text())["outputs"][0]["token_ids"])
    assert drawn[0] == drawn[1]


BAD_LINES = [
    ("{'prompt'}", "not JSON"),
    ('["a"]', "must be an object with exactly one of prompt, prompt_token_ids, messages"),
    ('{"text": "a"}', "exactly one of"),
    ('{"prompt": "a", "messages": []}', "exactly one of"),
    ('{"prompt": 5}', "prompt must be a text, found 5"),
    ('{"prompt_token_ids": "5"}', "prompt_token_ids must be a list, found '5'"),
    ('{"prompt": "a", "temperature": "hot"}', "temperature='hot' must be a number"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0 must be an integer >= 1"),
    ('{"prompt": "a", "min_tokens": 129}', "min_tokens=129 must not exceed max_tokens=128"),
    ('{"prompt": "a", "logit_bias": {"b": 1}}', "logit_bias={'b': 1} must be a dict from token ids to numbers"),
    ('{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias={5: 101} must be a dict from token ids to numbers in [-100, 100]"),
    ('{"prompt": "a", "structured_outputs": {"regexp": "b"}}', "structured_outputs has unknown fields regexp"),
    ('{"prompt": "a", "presence_penalty": 3}', "presence_penalty=3 must be a number [-2, 2]"),
    ('{"prompt": "a", "cache_salt": 1}', "cache_salt=1 must be a text"),
    ('{"prompt": "a", "priority": "high"}', "priority='high' must be an integer"),
]
READ_ALL = """
import json, sys
from absl import flags
from jaxserve.cli import generate
for path in sys.argv[1:]:
    flags.FLAGS(["generate", "--model=none", f"--prompts_file={path}"])
    try:
        print(json.dumps(f"accepted {generate.read_prompts()}"))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[str]:
    """What reading a file with each of BAD_LINES as its second line brings."""
    paths = [tmp_path_factory.mktemp("lines") / "in.jsonl" for _ in BAD_LINES]
    for path, (line, _) in zip(paths, BAD_LINES, strict=True):
        path.write_text('{"prompt": "fine"}\n' + line + "\n")
    command = [sys.executable, "-c", READ_ALL, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=100)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("i", range(len(BAD_LINES)), ids=[line for line, _ in BAD_LINES])
def test_a_bad_line_is_named_by_file_and_number(errors, i):
    assert "in.jsonl:2: " in errors[i] and BAD_LINES[i][1] in errors[i]


MISTAKES = [
    ([], "nothing to do: give --prompt or --prompts_file"),
    (["--prompt=a", "--temperature=-1"], "jaxserve generate: --prompt: temperature=-1.0 must be a number >= 0"),
    (["--prompts_file=none.jsonl"], "jaxserve generate: .*No such file.*none.jsonl"),
    (["--prompt=a", "--max_num_seqs=64"], "jaxserve generate: the bucket plan's mixed buckets"),
    (["a"], "unknown arguments"),
    (["--prompts_file={work}/chats.jsonl", "--chat"], "--chat makes a user's message of a prompt's text, and there is none"),
]
OTHERS = [  # a process each, like those above
    (["--prompt=a", "--output=no/such/folder/out.jsonl"], "jaxserve generate: .*No such file.*no/such/folder/out.jsonl"),
    (["--prompt=a", "--model=no/such/model/here"], "jaxserve generate: 'no/such/model/here' is not a file or folder here"),
    (["--prompt=a", "--resume"], "--resume needs --output"),
    (["--prompt=a", "--logprobs=1"], "log-probabilities are written to --output alone"),
    (["--prompt=a", "--system=S"], "--system goes before a prompt's text with --chat"),
]


@pytest.mark.parametrize(
    ("given", "message"), [*MISTAKES, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)], ids=str
)
def test_mistakes_end_with_one_line_and_an_exit_code(run, tmp_path, given, message):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (RECORDS[2], RECORDS[4])))
    done = run(*(flag.format(work=tmp_path) for flag in given))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(message, done.stderr + done.stdout)


@pytest.mark.slow
def test_results_of_before_are_kept_until_the_model_is_loaded(run, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious\n")
    done = run("--prompt=a", f"--output={tmp_path / 'out.jsonl'}", "--max_num_seqs=64")
    assert done.returncode == 1 and "the bucket plan's mixed buckets" in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
    run("--prompt=a", f"--output={tmp_path / 'out.jsonl'}", "--max_tokens=1")
    assert json.loads((tmp_path / "out.jsonl").read_text())["outputs"][0]["text"] == after("a", 1)

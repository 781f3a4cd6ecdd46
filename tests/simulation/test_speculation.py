"""What speculation is predicted to gain, against the paper's closed form and against what must hold of any machine."""

import json
import subprocess
import sys

import pytest

from jaxserve.simulation import speculation
from jaxserve.simulation.speculation import expected_tokens, improvement, predict, shares_of
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.commands import programs_of

H100 = Deployment.named("qwen3-8b", "h100", programs=programs_of(1, False))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("num_drafts", [1, 4, 7])
@pytest.mark.parametrize("cost", [0.0, 0.05, 0.4])
def test_where_verifying_is_free_it_is_the_closed_form(acceptance, num_drafts, cost, monkeypatch):
    """Theorem 3.8 of 2211.17192: (1 - a^(k + 1)) / ((1 - a) (k c + 1))."""
    a, k = acceptance, num_drafts
    wanted = (1 - a ** (k + 1)) / ((1 - a) * (k * cost + 1))
    assert improvement(a, k, cost) == pytest.approx(wanted)
    monkeypatch.setattr(speculation, "_decode_seconds", lambda times, batch, rows, context_len: 0.01)
    monkeypatch.setattr(speculation, "_draft_seconds", lambda deployment, by, batch, context_len, widths: len(widths) * cost * 0.01)
    assert predict(H100, "eagle3", 4, 1000, shares_of(a, k)).factor == pytest.approx(wanted)


def test_tokens_of_a_step():
    assert expected_tokens(shares_of(0.5, 3)) == 1 + 0.5 + 0.25 + 0.125 and expected_tokens([0.9, 0.2]) == pytest.approx(2.1)


def test_steps_are_the_simulators():
    """A step without drafts is a decode as replays have it; verifying is one of as many rows; drafts by a model that is the target
    take k decodes and a body."""
    times, shares = H100.step_times(), shares_of(0.7, 3)
    found = predict(H100, "qwen3-8b", 8, 500, shares)
    assert found.plain_seconds == times.base_seconds(8) + times.per_kv_token * 4000 + times.head_seconds(8)
    assert found.verify_seconds == times.base_seconds(32) + times.per_kv_token * 4000 + times.head_seconds(32)
    body = times.base_seconds(32) + times.per_kv_token * 4000
    assert found.draft_seconds == pytest.approx(body + 3 * found.plain_seconds)
    assert found.factor < 1, "a draft as slow as its target gains nothing"
    assert predict(H100, "ngram", 8, 500, shares).draft_seconds == 0
    seconds = [predict(H100, by, 8, 500, shares).draft_seconds for by in ("ngram", "eagle3", "qwen3-0.6b", "qwen3-8b")]
    assert seconds == sorted(seconds) and len(set(seconds)) == 4


def test_a_tree_verifies_all_its_candidates_and_drafts_a_depth_at_a_time():
    shares, chain = [0.8, 0.6], predict(H100, "qwen3-8b", 8, 500, [0.8, 0.6], [1, 1])
    assert chain == predict(H100, "qwen3-8b", 8, 500, shares)
    tree, times = predict(H100, "qwen3-8b", 8, 500, shares, [3, 5]), H100.step_times()
    step = lambda rows: times.base_seconds(rows) + times.per_kv_token * 4000  # noqa: E731
    assert (tree.num_drafts, tree.tokens) == (8, chain.tokens)
    assert tree.verify_seconds == step(8 * 9) + times.head_seconds(8 * 9)
    passes = [step(8 * width) + times.head_seconds(8 * width) for width in (3, 5)]
    assert tree.draft_seconds == pytest.approx(step(8 * 9) + sum(passes))
    heads = [predict(H100, "medusa", 8, 500, shares, widths).draft_seconds for widths in ([1, 1], [3, 5])]
    assert heads[0] == heads[1], "whose logits have all candidates of a depth"


def test_drafts_gain_less_the_more_sequences_share_a_step():
    factors = [predict(H100, "eagle3", batch, 64, shares_of(0.75, 4)).factor for batch in (1, 8, 64, 512, 2048)]
    assert factors == sorted(factors, reverse=True) and factors[0] > 1.5 > 1 > factors[-1]


def test_what_is_out_of_range_is_refused():
    for shares, message in (
        ([0.5, 0.6], "none larger than the one before"),
        ([1.2], r"must lie in \[0, 1\]"),
        ([], "must be drafts"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(H100, "eagle3", 1, 10, shares)
    with pytest.raises(ValueError, match=r"widths=\[1\] must be 2 integers of at least 1"):
        predict(H100, "eagle3", 1, 10, [0.5, 0.2], [1])
    with pytest.raises(ValueError, match="drafts_by='gpt' must be one of ngram, eagle3, medusa, "):
        predict(H100, "gpt", 1, 10, [0.5])
    with pytest.raises(ValueError, match=r"acceptance=1.5 must lie in \[0, 1\]"):
        shares_of(1.5, 2)


@pytest.mark.slow
def test_the_command_prints_a_table():
    command = [sys.executable, "-m", "jaxserve", "simulate", "--model=qwen3-8b", "--gpu=h100", "--json=-"]
    run = lambda *args: subprocess.run([*command, *args], capture_output=True, text=True, timeout=120)  # noqa: E731
    done = run("--speculative=0.75", "--num_drafts=2,4", "--batches=1,16")
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["1"], ["16"])]
    assert [row[:2] for row in rows] == [["1", "2"], ["1", "4"], ["16", "2"], ["16", "4"]] and float(rows[0][2]) == 2.31
    results = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    assert [f"{r['factor']:.2f}" for r in results] == [row[-1] for row in rows]
    for args, message in ((["--speculative=x"], "--speculative=x must be numbers"), (["--speculative=0.2,0.3"], "none larger")):
        done = run(*args)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr

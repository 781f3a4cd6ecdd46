"""`jaxserve top`: what it shows is what the server did meanwhile."""

import io
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest
from rich.console import Console

from jaxserve.cli.top import frame, parse, read
from jaxserve.serving.messages import LoopStats
from jaxserve.serving.metrics import VLLM_PREFIX, Metrics
from tests.cli.commands import MODULES
from tests.serving.calls import complete, ok
from tests.serving.http_server import serving


def shown(before, now) -> dict[str, str]:
    """The rows of a frame: first column -> the rest. Tables beside each other are cut apart by what lies between them."""
    console = Console(file=io.StringIO(), width=60, color_system=None)
    console.print(frame(before, now))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = (re.split(r" {2,}", line.strip(), maxsplit=1) for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def metrics(prefix: str = "jaxserve:", **stats: Any) -> str:
    return Metrics("cats", LoopStats(**stats), prefix=prefix).render().decode()


@pytest.mark.parametrize("prefix", ["jaxserve:", VLLM_PREFIX])
def test_a_frame(prefix):
    """Between two readings that lie two seconds apart, whatever the names of the metrics begin with."""
    buckets = {"4 x 4": 10, "32 x 4": 5}
    before = parse(
        metrics(prefix, num_steps=100, generated_tokens=1000, steps_by_bucket=buckets, num_pages=50, num_free_pages=50), 10
    )
    after = {"4 x 4": 13, "32 x 4": 6, "8 x 4": 0}
    now = metrics(
        prefix,
        num_steps=104,
        generated_tokens=1001,
        steps_by_bucket=after,
        num_pages=50,
        num_free_pages=20,
        num_running=3,
        num_waiting=7,
    )
    rows = shown(before, parse(now, 12))
    assert rows["state"] == "serving" and (rows["running"], rows["waiting"]) == ("3", "7")
    assert rows["KV pages in use"] == "60.0% of 50" and rows["programs to compile"] == "0"
    assert rows["steps"] == "2.0" and rows["tokens generated"] == "0.5" and rows["preemptions"] == "0"
    assert rows["4 x 4"].split() == ["3", "75%"] and rows["32 x 4"].split() == ["1", "25%"] and "8 x 4" not in rows
    assert rows["first token"] == "-"


def test_states():
    cases: list[tuple[dict[str, Any], str]]
    cases = [({"is_paused": True}, "paused"), ({"sleep_level": 1, "is_asleep": True}, "weights_offloaded")]
    for stats, state in cases:
        reading = parse(metrics(**stats), 0)
        assert shown(reading, parse(metrics(**stats), 1))["state"] == state


def test_a_server_that_was_started_again():
    rows = shown(parse(metrics(num_steps=100), 0), parse(metrics(num_steps=8), 2))
    assert rows["steps"] == "4.0"


@pytest.mark.parametrize(
    "text, said",
    [
        ("nonsense {", "is not Prometheus's text"),
        ("# HELP a b\na 1\n", "has none of a server's metrics$"),
        ("jaxserve_router:server_up 1\n", "a router: give the address of one of its servers"),
    ],
)
def test_what_is_no_servers(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text, 0)


def test_what_a_server_did(shared_llm, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: cat, key: '1'}\n")
    with serving(shared_llm, options={"api_keys_file": str(path)}) as server:
        server.client.headers["Authorization"] = "Bearer 1"
        before = read(server.client)
        usage = ok(complete(server, ["a", "tea"], max_tokens=9))["usage"]
        server.wait_idle()
        now = read(server.client)
    rows = shown(before, now)
    seconds = now.time - before.time
    assert float(rows["tokens generated"].replace(",", "")) == pytest.approx(usage["completion_tokens"] / seconds, rel=0.1)
    assert rows["cat"].split() == ["0", "1", str(usage["total_tokens"]), "0"]
    whole, first = (float(rows[name]) for name in ("whole request", "first token"))
    assert 0 < first <= whole <= 1000 * seconds


@pytest.mark.slow
def test_once(shared_llm):
    """One frame as text; a mistake is a line."""

    def top(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", MODULES["top"], "--once", "--interval=0.2", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    with serving(shared_llm, options={"api_keys": ("k",), "open_paths": ("/health",)}) as server:
        done = top(f"--url={server.url}", "--api_key=k")
        assert done.returncode == 0 and "KV pages in use" in done.stdout and "\x1b" not in done.stdout, done.stderr
        done = top(f"--url={server.url}")
        assert done.returncode != 0 and "wants a key for its metrics: give --api_key" in done.stderr
        url = server.url
    done = top(f"--url={url}")
    assert done.returncode != 0 and "does not answer" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)

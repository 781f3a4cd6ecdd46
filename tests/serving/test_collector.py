"""Traces of requests in a collector that others have made: Arize Phoenix, which stores what comes by OTLP, and is asked by its API.

Needs the program `phoenix` (pip install arize-phoenix, 825 MB, in an environment of its own), on PATH or named by $PHOENIX.
"""

import contextlib
import datetime
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve import LLM
from tests.serving.calls import complete, ok
from tests.serving.conftest import PLAN
from tests.serving.http_server import serving

PHOENIX = os.environ.get("PHOENIX") or shutil.which("phoenix")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PHOENIX is None, reason="needs Arize Phoenix: $PHOENIX, or `phoenix` on PATH"),
    pytest.mark.skipif(
        not importlib.util.find_spec("opentelemetry") or not importlib.util.find_spec("opentelemetry.exporter"),
        reason="needs OpenTelemetry: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    ),
]


@contextlib.contextmanager
def phoenix(folder: Path) -> Iterator[httpx.Client]:
    """Its API, while the `with` lasts."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in (one, other)]
    said = {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(ports[0]),
        "PHOENIX_GRPC_PORT": str(ports[1]),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PHOENIX")} | said
    assert PHOENIX is not None
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([PHOENIX, "serve"], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=30) as client:
            deadline = time.monotonic() + 240
            while True:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/healthz").status_code == 200:
                        break
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def spans_of(client: httpx.Client, count: int) -> list[dict[str, Any]]:
    """What Phoenix has stored, once it is so many spans."""
    deadline = time.monotonic() + 60
    while True:
        spans = ok(client.get("/v1/projects/default/spans", params={"limit": 1000}))["data"]
        if len(spans) >= count:
            return spans
        assert time.monotonic() < deadline, f"{len(spans)} spans, not {count}: {spans}"
        time.sleep(0.2)


def seconds(span: dict[str, Any]) -> tuple[float, float]:
    start, end = (datetime.datetime.fromisoformat(span[name]).timestamp() for name in ("start_time", "end_time"))
    return start, end


def test_phoenix_has_the_spans_of_a_request(folder, tmp_path):
    """Two requests of one prompt, of which the second loads its KV from a store, and is part of a caller's trace."""
    llm = LLM(folder, kv_store="host:1MiB", bucket_plan=PLAN, num_pages=96, page_size=4, compilation_cache_dir="")
    stored = llm.engine.stored_pages
    assert stored is not None
    stored.load_seconds = 60.0
    with phoenix(tmp_path) as client:
        before = time.time()
        with serving(llm, options={"otlp_endpoint": str(client.base_url)}) as server:
            ok(complete(server, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", max_tokens=2))
            server.wait_idle()
            deadline = time.monotonic() + 60
            while stored.store.stats()[0].pages_written < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert llm.engine.reset_prefix_cache()
            body = {"prompt": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "max_tokens": 6, "ignore_eos": True}
            ok(server.client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}))
            server.wait_idle()
        after = time.time()
        spans = spans_of(client, 9)
    requests = [span for span in spans if span["name"] == "llm_request"]
    assert len(spans) == 9 and len(requests) == 2
    (asked,) = [span for span in requests if span["context"]["trace_id"] == TRACE]
    (alone,) = [span for span in requests if span is not asked]
    assert asked["parent_id"] == PARENT and not alone["parent_id"]
    for request, names in ((alone, ["queue", "prefill", "decode"]), (asked, ["queue", "kv_load", "prefill", "decode"])):
        parts = {span["name"]: span for span in spans if span["parent_id"] == request["context"]["span_id"]}
        assert sorted(parts) == sorted(names)
        assert {span["context"]["trace_id"] for span in parts.values()} == {request["context"]["trace_id"]}
        times = {name: seconds(span) for name, span in parts.items()}
        (start, end), slack = seconds(request), 1e-3  # it keeps milliseconds of some times
        assert before - slack <= start == times["queue"][0] and times["decode"][1] == end <= after + slack
        assert times["queue"][1] == times["prefill"][0] < times["prefill"][1] == times["decode"][0] < times["decode"][1]
        if "kv_load" in times:
            assert start - slack <= times["kv_load"][0] < times["kv_load"][1] <= times["queue"][1] + slack
    said = asked["attributes"]
    assert said["gen_ai.usage.output_tokens"] == 6 and said["gen_ai.usage.cache_read.input_tokens"] >= 24

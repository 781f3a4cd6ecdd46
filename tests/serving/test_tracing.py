"""Traces of requests, as a collector receives them by OTLP."""

import gzip
import http.server
import importlib.util
import sys
import threading
import time

import pytest

from jaxserve import LLM
from jaxserve.outputs import RequestMetrics
from jaxserve.serving.options import ServerOptions
from jaxserve.serving.tracing import Tracing, parts_of
from tests.serving.calls import complete, ok
from tests.serving.conftest import PLAN
from tests.serving.http_server import serving

needs_otel = pytest.mark.skipif(
    not importlib.util.find_spec("opentelemetry") or not importlib.util.find_spec("opentelemetry.exporter"),
    reason="needs OpenTelemetry: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP receiver: what is posted to /v1/traces, read by OpenTelemetry's own messages."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans, self.resources, self.paths = [], [], []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                collector.paths.append(self.path)
                for found in request.resource_spans:
                    collector.resources.append({a.key: a.value.string_value for a in found.resource.attributes})
                    collector.spans += [span for scope in found.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, name):
        return [span for span in self.spans if span.name == name]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.close()


def attributes(span):
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


@pytest.mark.slow
@needs_otel
def test_a_request_is_a_span_with_its_parts(llm, collector):
    before = time.time_ns()
    with serving(llm, options={"otlp_endpoint": collector.url}) as server:
        body = {"prompt": "ABCDEFGH", "max_tokens": 6, "ignore_eos": True}
        ok(server.client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}))
        ok(complete(server, ["AB", "CD"], max_tokens=2))
        server.wait_idle()
    after = time.time_ns()
    assert set(collector.paths) == {"/v1/traces"} and collector.resources[0]["service.name"] == "jaxserve"
    requests = collector.of("llm_request")
    assert len(requests) == 3, "a span for each prompt, all sent before the server ended"
    (first,) = [span for span in requests if span.trace_id.hex() == TRACE]
    assert first.parent_span_id.hex() == PARENT
    others = {span.trace_id.hex() for span in requests} - {TRACE}
    assert len(others) == 2 and not any(span.parent_span_id for span in requests if span is not first)
    said = attributes(first)
    assert said["gen_ai.usage.output_tokens"] == 6 and said["gen_ai.request.max_tokens"] == 6
    assert said["gen_ai.usage.input_tokens"] >= 8 and said["gen_ai.response.model"]
    parts = [span for span in collector.spans if span.parent_span_id == first.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    assert all(span.trace_id == first.trace_id for span in parts)
    times = [t for span in parts for t in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times) and parts[0].end_time_unix_nano == parts[1].start_time_unix_nano
    assert before <= first.start_time_unix_nano == times[0] and times[-1] == first.end_time_unix_nano <= after
    assert parts[1].end_time_unix_nano > parts[1].start_time_unix_nano


@needs_otel
@pytest.mark.slow
def test_a_load_of_kv_is_a_part(folder, collector):
    llm = LLM(folder, kv_store="host:1MiB", bucket_plan=PLAN, num_pages=96, page_size=4, compilation_cache_dir="")
    assert llm.engine.stored_pages is not None
    llm.engine.stored_pages.load_seconds = 60.0
    prompt = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    with serving(llm, options={"otlp_endpoint": collector.url + "/v1/traces", "role": None}) as server:
        for _ in range(2):
            ok(complete(server, prompt, max_tokens=2))
            server.wait_idle()
            deadline = time.monotonic() + 60
            (tier,) = llm.engine.stored_pages.store.stats()
            while tier.pages_written < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert llm.engine.reset_prefix_cache()
    (load,) = collector.of("kv_load")
    (request,) = [span for span in collector.of("llm_request") if span.span_id == load.parent_span_id]
    (queue,) = [span for span in collector.of("queue") if span.parent_span_id == request.span_id]
    assert queue.start_time_unix_nano <= load.start_time_unix_nano <= load.end_time_unix_nano <= queue.end_time_unix_nano
    assert attributes(request)["gen_ai.usage.cache_read.input_tokens"] >= 24
    assert set(collector.paths) == {"/v1/traces"}


@pytest.mark.slow
@needs_otel
def test_a_collector_that_is_not_there_delays_no_answer(llm):
    with serving(llm, options={"otlp_endpoint": "http://127.0.0.1:9"}) as server:
        ok(complete(server, "AB", max_tokens=2))
        server.wait_idle()


def test_parts_are_those_that_were():
    times = RequestMetrics(1.0, 2.0, 3.0, 4.0)
    assert list(parts_of(times)) == [("queue", 1.0, 2.0), ("prefill", 2.0, 3.0), ("decode", 3.0, 4.0)]
    times = RequestMetrics(1.0, 2.0, 3.0, 4.0, kv_load_time=1.2, kv_loaded_time=1.8)
    assert ("kv_load", 1.2, 1.8) in list(parts_of(times))
    assert list(parts_of(RequestMetrics(1.0, 2.0, None, 4.0))) == [("queue", 1.0, 2.0)]


def test_bad_endpoints_are_named(monkeypatch):
    with pytest.raises(ValueError, match="otlp_endpoint='collector:4317' must be a URL"):
        ServerOptions(names=("a",), otlp_endpoint="collector:4317")
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxserve\[otel\]'"):
        Tracing("http://127.0.0.1:4318", "m")

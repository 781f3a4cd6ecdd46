"""Traces of requests by OpenTelemetry: a span a request, and in it spans of its parts, sent to a collector by OTLP over HTTP.

Owns the spans. OpenTelemetry is asked for only where a server has an `otlp_endpoint`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from jaxserve.outputs import RequestMetrics
from jaxserve.serving.messages import Delta, Report, RequestTotals
from jaxserve.serving.streams import Ask

PATH = "/v1/traces"  # where an OTLP collector takes spans
EXPORT_SECONDS = 5  # that one delivery may take
REQUEST_SPAN = "llm_request"
HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context


def traced(asks: list[Ask], headers: Mapping[str, str]) -> list[Ask]:
    """The prompts of a request, with what its headers say of the trace that it is part of."""
    parent = {name: headers[name] for name in HEADERS if name in headers}
    return [replace(ask, trace=parent) for ask in asks] if parent else asks


def parts_of(times: RequestMetrics) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of each part of a request, in seconds of time.monotonic(). kv_load lies within queue, or behind prefill if
    the request was preempted."""
    for name, start, end in (
        ("queue", times.arrival_time, times.first_scheduled_time),
        ("kv_load", times.kv_load_time, times.kv_loaded_time),
        ("prefill", times.first_scheduled_time, times.first_token_time),
        ("decode", times.first_token_time, times.finished_time),
    ):
        if start is not None and end is not None:
            yield name, start, end


class Tracing:
    """Makes spans of requests that end, from the Reports that `take` is given, and sends them on a thread of OpenTelemetry's.

    endpoint: "http://HOST:PORT" of a collector, or a whole URL. model: its name. role: of the server.

    What OpenTelemetry's own environment variables say of resources, samplers, headers and batches holds here too.

    Raises:
      ValueError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, model: str, role: str | None = None):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError(
                f"otlp_endpoint={endpoint!r} needs OpenTelemetry, which is not installed: pip install 'jaxserve[otel]'"
            ) from error
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_SECONDS)))
        self._tracer = self._provider.get_tracer("jaxserve")
        self._model, self._role = model, role

    def take(self, report: Report) -> None:
        """Makes the spans of requests that the report ends."""
        for event in report.events:
            if isinstance(event, Delta) and event.totals is not None and event.totals.metrics is not None:
                self._add(event, event.totals, event.totals.metrics)

    def _add(self, last: Delta, totals: RequestTotals, times: RequestMetrics) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        epoch = time.time() - time.monotonic()
        end = time.monotonic() if times.finished_time is None else times.finished_time
        parent = TraceContextTextMapPropagator().extract(totals.trace or {})
        span = self._tracer.start_span(
            REQUEST_SPAN,
            parent,
            kind=trace.SpanKind.SERVER,
            attributes=self._attributes(last, totals, times),
            start_time=_nanoseconds(epoch + times.arrival_time),
        )
        inside = trace.set_span_in_context(span, parent)
        for name, start, stop in parts_of(times):
            part = self._tracer.start_span(name, inside, start_time=_nanoseconds(epoch + start))
            part.end(_nanoseconds(epoch + stop))
        span.end(_nanoseconds(epoch + end))

    def _attributes(self, last: Delta, totals: RequestTotals, times: RequestMetrics) -> dict[str, Any]:
        """By OpenTelemetry's names for generative models, where it has one."""
        found = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": last.request_id,
            "gen_ai.request.choice.count": totals.n,
            "gen_ai.request.max_tokens": totals.max_tokens,
            "gen_ai.usage.input_tokens": totals.num_prompt_tokens,
            "gen_ai.usage.output_tokens": totals.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": totals.num_cached_tokens,
            "gen_ai.response.finish_reasons": [last.finish_reason] if last.finish_reason else None,
            "gen_ai.response.time_to_first_token": times.ttft,
            "jaxserve.num_preemptions": times.num_preemptions,
            "jaxserve.role": self._role,
        }
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Sends what waits. It may take EXPORT_SECONDS, where nobody takes it."""
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

"""A router's metrics for Prometheus: its choices, their results, and the state of the servers.

Owns the registry. Knows nothing of why a server was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.routing.backends import Backend
from jaxserve.routing.policy import Choice
from jaxserve.serving.keys import KeyRing
from jaxserve.serving.metrics import key_metrics

ROUTER_PREFIX = "jaxserve_router:"


class RouterMetrics(Collector):
    """`render` gives Prometheus's text. backends: by address, read whenever it is asked for, as are the router's API keys."""

    def __init__(self, backends: Mapping[str, Backend], keys: KeyRing | None = None):
        self._backends, self._keys = backends, keys
        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(self)
        registry = self.registry
        self._http = Counter(f"{ROUTER_PREFIX}http_requests", "HTTP requests.", ("path", "status"), registry=registry)
        self._choices = Counter(
            f"{ROUTER_PREFIX}choices", "Servers chosen, retries included.", ("server", "reason"), registry=registry
        )
        self._prefills = Counter(
            f"{ROUTER_PREFIX}prefills", "Prompts sent to prefill servers, by what came of it.", ("result",), registry=registry
        )
        self._blocks = Counter(f"{ROUTER_PREFIX}prompt_blocks", "Blocks of prompts that were passed on.", registry=registry)
        self._matched = Counter(
            f"{ROUTER_PREFIX}matched_blocks", "Of those, blocks that the first choice had seen.", registry=registry
        )

    def count_http(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def count_choice(self, choice: Choice) -> None:
        self._choices.labels(choice.server, choice.reason).inc()

    def count_prefill(self, stored: bool) -> None:
        """Counts a request whose prompt was to be computed elsewhere. stored: whether it was; else its own server computes it."""
        self._prefills.labels("stored" if stored else "failed").inc()

    def count_blocks(self, num_blocks: int, num_matched: int) -> None:
        """Counts the blocks of one request once, however many servers are asked. num_matched: blocks that the first had seen."""
        self._blocks.inc(num_blocks)
        self._matched.inc(num_matched)

    def collect(self) -> Iterator[Metric]:
        """The servers as they are now."""
        gauges = {
            "server_up": ("1 while it takes requests.", lambda b: b.health.up),
            "server_waiting": ("Requests that wait there, as it said last.", lambda b: b.load.waiting),
            "server_running": ("Requests that run there: as it said last, and those sent since.", lambda b: b.load.running),
            "server_requests": ("Requests passed on that are not answered to the end.", lambda b: b.num_in_flight),
        }
        counters = {
            "unanswered": ("Requests that it did not begin to answer: retried elsewhere, if possible.", lambda b: b.num_unanswered),
            "refused": ("Requests that it refused with 429 or 503: likewise.", lambda b: b.num_refused),
            "broken_answers": ("Answers that it broke off: the client saw that.", lambda b: b.num_broken),
        }
        for family, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in table.items():
                metric = family(f"{ROUTER_PREFIX}{name}", text, labels=("server",))
                for url, backend in self._backends.items():
                    metric.add_metric((url,), float(value(backend)))
                yield metric
        roles = GaugeMetricFamily(f"{ROUTER_PREFIX}server_role", "1; the server's role is in the label.", labels=("server", "role"))
        for url, backend in self._backends.items():
            if backend.role:
                roles.add_metric((url, backend.role), 1.0)
        yield roles
        if self._keys is not None:
            yield from key_metrics(ROUTER_PREFIX, self._keys)

    def render(self) -> bytes:
        return generate_latest(self.registry)

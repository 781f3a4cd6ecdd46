"""Metrics for Prometheus: vLLM's under our own prefix, and those that this engine adds (steps, buckets, padding, compiles).

Owns the registry. The engine loop's Reports and the access log bring the numbers. Knows nothing of the engine itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.engine.stats import KVStoreStats
from jaxserve.serving.interfaces import ServedConfig
from jaxserve.serving.keys import KeyRing
from jaxserve.serving.messages import Aborted, Delta, Failed, LoopStats, Report, RequestError, RequestTotals
from jaxserve.serving.options import ServerOptions

PREFIX, VLLM_PREFIX = "jaxserve:", "vllm:"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
SAMPLES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 3, 5, 10, 20)
REASONS = ("stop", "length", "abort", "error", "repetition")  # for which a sample ends
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # vLLM's, by sleep level
_COUNTERS = {  # name -> (field of LoopStats, help)
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts, cached ones too, each counted at its first output token."),
    "prompt_tokens_cached": ("prompt_tokens_cached", "Of prompt_tokens, those whose KV was cached."),
    "generation_tokens": ("generated_tokens", "Tokens generated."),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens run, and tokens recomputed after a preemption."),
    "num_preemptions": ("num_preemptions", "Times that a running request lost its pages."),
    "prefix_cache_queries": ("num_prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("num_prefix_hits", "Prompt tokens found in the prefix cache."),
    "steps": ("num_steps", "Steps of the engine."),
    "step_failures": ("num_failures", "Steps that raised."),
    "weight_updates": ("num_weight_updates", "Times that other weights came."),
    "step_tokens": ("tokens_run", "Tokens that steps ran, padding not counted."),
    "padding_tokens": ("padding_tokens", "Padding tokens that steps ran."),
    "spec_decode_num_drafts": ("num_drafts", "Sequences of steps that had drafts."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Tokens drafted and verified."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Drafts that stood."),
    "compiles": ("num_compiles", "Programs compiled, or loaded from the persistent cache."),
    "compile_seconds": ("compile_seconds", "Time spent compiling or loading programs."),
}
_STORE = {  # name -> (field of KVStoreStats, help), of counters
    "external_prefix_cache_queries": ("num_queried_tokens", "Prompt tokens looked up in the store of KV."),
    "external_prefix_cache_hits": ("num_hit_tokens", "Prompt tokens loaded from the store of KV."),
    "kv_store_load_failures": (
        "num_failed_loads",
        "Loads from the store of KV that brought less than was found, or came too late.",
    ),
    "kv_store_skipped_tokens": ("num_skipped_tokens", "Tokens computed and not saved, since nothing that was saved is hit."),
    "kv_store_save_seconds": (
        "save_seconds",
        "Time that saving has taken from the steps: threads' measured, on a CPU with the copy of pages, estimated by bytes.",
    ),
    "kv_store_hit_gain_seconds": ("hit_gain_seconds", "Time by which loads from the store were faster than computing."),
}
_TIERS = {  # field of TierStats -> (help, kind)
    "pages_read": ("Pages read from a tier of the store of KV.", CounterMetricFamily),
    "pages_written": ("Pages written to a tier of the store of KV.", CounterMetricFamily),
    "bytes_read": ("Bytes of KV read from a tier of the store.", CounterMetricFamily),
    "bytes_written": ("Bytes of KV written to a tier of the store.", CounterMetricFamily),
    "read_seconds": ("Time of reads of a tier of the store of KV.", CounterMetricFamily),
    "write_seconds": ("Time of writes of a tier of the store of KV.", CounterMetricFamily),
    "num_failures": ("Reads and writes of a tier of the store of KV that failed.", CounterMetricFamily),
    "bytes_held": ("Bytes of KV that a tier of the store holds.", GaugeMetricFamily),
}
_GAUGES = {
    "num_requests_running": ("num_running", "Samples that run."),
    "num_requests_waiting": ("num_waiting", "Samples that wait."),
    "kv_pages": ("num_pages", "KV pages of all pools."),
    "programs_left_to_compile": ("num_programs_left", "Programs of the bucket plan that are not compiled yet."),
    "engine_paused": ("is_paused", "1 while paused."),
}


class Metrics(Collector):
    """Counts the Reports that `take` is given; `render` returns Prometheus's text.

    model: the label model_name. stats: counts to begin with. cache: facts of the KV cache, by vLLM's names. prefix: of all names.
    num_refused: how many requests were refused since the server started, because too many waited. role: of the server. keys: what
    its API keys have used.
    """

    def __init__(
        self,
        model: str,
        stats: LoopStats | None = None,
        cache: Mapping[str, object] | None = None,
        *,
        prefix: str = PREFIX,
        num_refused: Callable[[], int] = lambda: 0,
        role: str | None = None,
        keys: KeyRing | None = None,
    ):
        self._keys = keys
        self.stats: LoopStats = stats or LoopStats()
        self._prefix, self._num_refused, self._role = prefix, num_refused, role
        self._model, self._cache = model, {name: str(value) for name, value in (cache or {}).items()}
        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(self)
        self._ttft = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Between two deliveries of a request's tokens.")
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self._queue = self._histogram("request_queue_time_seconds", "From a request's arrival to its first step.")
        self._inference = self._histogram("request_inference_time_seconds", "From a request's first step to its end.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From a request's first step to its first token.")
        self._decode = self._histogram("request_decode_time_seconds", "From a request's first token to its end.")
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output_tokens = self._histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._longest = self._histogram("request_max_num_generation_tokens", "Output tokens of a request's longest sample.", TOKENS)
        self._computed = self._histogram("request_prefill_kv_computed_tokens", "Prompt tokens whose KV was not cached.", TOKENS)
        self._preemptions = self._histogram("request_num_preemptions", "Times that a request lost its pages.", PREEMPTIONS)
        self._n = self._histogram("request_params_n", "Samples that a request asked for.", SAMPLES)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of requests that said one.", TOKENS)
        self._iteration = self._histogram(
            "iteration_tokens_total", "Tokens that a turn generated, and those of the prompts it ended.", TOKENS
        )
        self._step = self._histogram("step_time_seconds", "A turn of the engine: schedule, dispatch, and an earlier step's end.")
        self._success = Counter(
            f"{self._prefix}request_success", "Samples that ended.", ("model_name", "finished_reason"), registry=self.registry
        )
        for reason in REASONS:  # zeros, from the beginning
            self._success.labels(model, reason)
        self._failures = Counter(
            f"{self._prefix}request_failures", "Requests that failed.", ("model_name",), registry=self.registry
        )
        self._sleep_seconds = Histogram(
            f"{self._prefix}sleep_mode_operation_duration_seconds",
            "A call that puts the engine to sleep or wakes it.",
            ("operation",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._sleeping = Gauge(
            f"{self._prefix}sleep_mode_operations_in_flight",
            "Calls under way that put the engine to sleep or wake it.",
            ("operation",),
            registry=self.registry,
        )
        self._http = Counter(f"{self._prefix}http_requests", "HTTP requests.", ("path", "status"), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        made = Histogram(f"{self._prefix}{name}", text, ("model_name",), buckets=buckets, registry=self.registry)
        return made.labels(self._model)

    def take(self, report: Report) -> None:
        """Counts the events of one turn of the engine."""
        before, self.stats = self.stats, report.stats
        num_tokens = self.stats.prompt_tokens + self.stats.generated_tokens - before.prompt_tokens - before.generated_tokens
        if num_tokens:
            self._iteration.observe(num_tokens)
        if report.stats.step_seconds is not None:
            self._step.observe(report.stats.step_seconds)
        for event in report.events:
            if isinstance(event, Delta):
                self._take_delta(event)
            elif isinstance(event, Aborted):
                self._success.labels(self._model, "abort").inc(event.num_samples)
            elif isinstance(event, Failed) and isinstance(event.error, RequestError):
                self._failures.labels(self._model).inc()

    def _take_delta(self, delta: Delta) -> None:
        if delta.gap is not None:
            self._itl.observe(delta.gap)
        if delta.finish_reason is not None:
            self._success.labels(self._model, delta.finish_reason).inc()
        if delta.totals is not None:
            self._take_totals(delta.totals)

    def _take_totals(self, totals: RequestTotals) -> None:
        num_tokens, times = totals.num_output_tokens, totals.metrics
        self._prompt_tokens.observe(totals.num_prompt_tokens)
        self._output_tokens.observe(num_tokens)
        self._longest.observe(totals.max_output_tokens)
        self._computed.observe(totals.num_prompt_tokens - totals.num_cached_tokens)
        self._n.observe(totals.n)
        if totals.max_tokens is not None:
            self._max_tokens.observe(totals.max_tokens)
        if times is None:
            return
        self._preemptions.observe(times.num_preemptions)
        start, scheduled, first, end = times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time
        if scheduled is None or first is None or end is None:
            return
        self._ttft.observe(first - start)
        self._queue.observe(scheduled - start)
        self._inference.observe(end - scheduled)
        self._prefill.observe(first - scheduled)
        self._decode.observe(end - first)
        self._e2e.observe(end - start)
        if num_tokens > 1:
            self._tpot.observe((end - first) / (num_tokens - 1))

    @contextlib.contextmanager
    def sleep_operation(self, operation: Literal["sleep", "wake"]) -> Iterator[None]:
        """Times a call that puts the engine to sleep or wakes it, whether it succeeds or not."""
        with self._sleeping.labels(operation).track_inprogress(), self._sleep_seconds.labels(operation).time():
            yield

    def count_http(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """The engine's own counts, as of its last turn."""
        stats, labels = self.stats, ("model_name",)
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"{self._prefix}{name}", text, labels=labels)
            counter.add_metric((self._model,), float(getattr(stats, field)))
            yield counter
        buckets = CounterMetricFamily(f"{self._prefix}bucket_steps", "Steps by bucket.", labels=("model_name", "bucket"))
        for bucket, num_steps in stats.steps_by_bucket.items():
            buckets.add_metric((self._model, bucket), float(num_steps))
        yield buckets
        if stats.kv_store is not None:
            yield from self._store(stats.kv_store)
        labels = ("model_name", "position")
        text = "Drafts that stood, by their place among a step's."
        positions = CounterMetricFamily(f"{self._prefix}spec_decode_num_accepted_tokens_per_pos", text, labels=labels)
        for position, num_accepted in enumerate(stats.num_accepted_tokens_per_pos):
            positions.add_metric((self._model, str(position)), float(num_accepted))
        yield positions
        used, total = stats.num_pages - stats.num_free_pages, stats.tokens_run + stats.padding_tokens
        for name, text, value in (
            *((name, text, float(getattr(stats, field))) for name, (field, text) in _GAUGES.items()),
            ("kv_cache_usage_perc", "Share of the KV pages that requests hold.", _share(used, stats.num_pages)),
            ("padding_share", "Padding tokens over all tokens that steps ran.", _share(stats.padding_tokens, total)),
        ):
            gauge = GaugeMetricFamily(f"{self._prefix}{name}", text, labels=labels)
            gauge.add_metric((self._model,), value)
            yield gauge
        yield from self._labelled()
        if self._keys is not None:
            yield from key_metrics(self._prefix, self._keys)
        info = GaugeMetricFamily(f"{self._prefix}cache_config_info", "1; the KV cache is in the labels.", labels=tuple(self._cache))
        info.add_metric(tuple(self._cache.values()), 1.0)
        yield info
        if self._role is not None:
            role = GaugeMetricFamily(
                f"{self._prefix}server_role", "1; the server's role is in the label.", labels=("model_name", "role")
            )
            role.add_metric((self._model, self._role), 1.0)
            yield role

    def _labelled(self) -> Iterator[Metric]:
        """vLLM's metrics whose samples a second label tells apart."""
        stats = self.stats
        computed = stats.prompt_tokens - stats.prompt_tokens_cached
        for kind, name, text, label, values in (
            (
                GaugeMetricFamily,
                "num_requests_waiting_by_reason",
                "Samples that wait for room (capacity), or for a grammar, another sample's prompt or a store's pages (deferred).",
                "reason",
                {"capacity": stats.num_waiting - stats.num_held, "deferred": stats.num_held},
            ),
            (
                GaugeMetricFamily,
                "engine_sleep_state",
                "1 for the state that the engine is in; awake, weights_offloaded (level 1), discard_all (level 2).",
                "sleep_state",
                {state: level == stats.sleep_level for level, state in enumerate(SLEEP_STATES)},
            ),
            (
                CounterMetricFamily,
                "prompt_tokens_by_source",
                "Tokens of prompts: computed, or found in the prefix cache, where a store of KV puts its own too.",
                "source",
                {"local_compute": computed, "local_cache_hit": stats.prompt_tokens_cached},
            ),
            (
                CounterMetricFamily,
                "admission_rejections",
                "Calls refused with 429, since too many samples waited.",
                "reason",
                {"max_num_queued_reqs": self._num_refused()},
            ),
        ):
            metric = kind(f"{self._prefix}{name}", text, labels=("model_name", label))
            for value, number in values.items():
                metric.add_metric((self._model, value), float(number))
            yield metric

    def load(self) -> dict[str, float]:
        """As `load_of`, of the last turn."""
        return load_of(self.stats)

    def _store(self, stats: KVStoreStats) -> Iterator[Metric]:
        """The counts of a store of KV and of each of its tiers."""
        for name, (field, text) in _STORE.items():
            counter = CounterMetricFamily(f"{self._prefix}{name}", text, labels=("model_name",))
            counter.add_metric((self._model,), float(getattr(stats, field)))
            yield counter
        share = GaugeMetricFamily(
            f"{self._prefix}kv_store_save_share", "Share of the requests whose pages are saved.", labels=("model_name",)
        )
        share.add_metric((self._model,), stats.save_share)
        yield share
        for name, (text, kind) in _TIERS.items():
            metric = kind(f"{self._prefix}kv_store_{name}", text, labels=("model_name", "tier"))
            for tier in stats.tiers:
                metric.add_metric((self._model, tier.name), float(getattr(tier, name)))
            yield metric

    def render(self) -> bytes:
        return generate_latest(self.registry)


def make_metrics(
    config: ServedConfig, options: ServerOptions, stats: LoopStats, num_refused: Callable[[], int], keys: KeyRing | None = None
) -> Metrics:
    """A server's metrics, as its options have them. The KV cache is told under vLLM's names; of devices that attend in groups, all
    of theirs together."""
    cache, scheduler = config.cache, config.scheduler
    num_pages, pages_of_longest = cache.num_pages * scheduler.num_groups, -(-scheduler.max_model_len // cache.page_size)
    facts = {
        "block_size": cache.page_size,
        "num_gpu_blocks": num_pages,
        "kv_cache_size_tokens": num_pages * cache.page_size,
        "kv_cache_max_concurrency": num_pages / pages_of_longest,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": config.engine.gpu_memory_utilization,
    }
    prefix = VLLM_PREFIX if options.vllm_metric_names else PREFIX
    return Metrics(options.names[0], stats, facts, prefix=prefix, num_refused=num_refused, role=options.role, keys=keys)


def load_of(stats: LoopStats) -> dict[str, float]:
    """What load balancers are told with an answer, by vLLM's names."""
    usage = _share(stats.num_pages - stats.num_free_pages, stats.num_pages)
    return {"kv_cache_usage_perc": usage, "num_requests_waiting": float(stats.num_waiting)}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def key_metrics(prefix: str, keys: KeyRing) -> Iterator[Metric]:
    """What the keys that have names have used; nothing where there are none."""
    if not keys.named:
        return
    requests = CounterMetricFamily(f"{prefix}api_key_requests", "Requests that were taken, by API key.", labels=("key",))
    tokens = CounterMetricFamily(f"{prefix}api_key_tokens", "Tokens of prompts and outputs, by API key.", labels=("key",))
    refused = CounterMetricFamily(
        f"{prefix}api_key_refusals", "Requests that a limit of their API key refused.", labels=("key", "limit")
    )
    running = GaugeMetricFamily(f"{prefix}api_key_requests_running", "Requests under way, by API key.", labels=("key",))
    connections = GaugeMetricFamily(
        f"{prefix}api_key_connections", "Open connections whose last request showed it, by API key.", labels=("key",)
    )
    for use in keys.named:
        name = str(use.key.name)
        requests.add_metric((name,), float(use.num_requests))
        tokens.add_metric((name,), float(use.num_tokens))
        running.add_metric((name,), float(use.num_running))
        connections.add_metric((name,), float(use.num_connections))
        for limit, number in use.num_refused.items():
            refused.add_metric((name, limit), float(number))
    yield from (requests, *((tokens,) if keys.counts_tokens else ()), refused, running, connections)

"""Watches a server in the terminal: its queue, KV pages, steps and buckets, latencies, and what its keys use.

    jaxserve top --url=http://127.0.0.1:8000
    jaxserve top --once --interval=5       # what five seconds brought, as text

It reads the server's /metrics every --interval seconds. Rates and latencies are of the time since the last reading; a dash says
that nothing happened meanwhile. Ctrl-C ends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from absl import flags

from jaxserve.cli.common.command import refuse_bad_input, run_command

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_URL = flags.DEFINE_string("url", "http://127.0.0.1:8000", "The server's address.")
_API_KEY = flags.DEFINE_string("api_key", None, "Its key, where /metrics need one; by default JAXSERVE_API_KEY.")
_INTERVAL = flags.DEFINE_float("interval", 2.0, "Seconds between two readings.", lower_bound=0.1)
_ONCE = flags.DEFINE_bool("once", False, "Read twice, print once, and end.")

_PREFIXES = ("jaxserve:", "vllm:")
_LATENCIES = {  # histogram -> what it is of
    "time_to_first_token_seconds": "first token",
    "inter_token_latency_seconds": "between tokens",
    "request_queue_time_seconds": "in the queue",
    "e2e_request_latency_seconds": "whole request",
    "step_time_seconds": "turn of the engine",
}
_RATES = {  # counter -> what it counts
    "steps_total": "steps",
    "generation_tokens_total": "tokens generated",
    "prefill_tokens_total": "prompt tokens computed",
    "prompt_tokens_cached_total": "prompt tokens cached",
    "padding_tokens_total": "padding tokens",
    "num_preemptions_total": "preemptions",
}
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Reading:
    """A server's metrics at a time, in seconds of time.monotonic(). values: by name, without its prefix, and sorted labels."""

    time: float
    values: Mapping[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of this name that have these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(value for (found, has), value in self.values.items() if found == name and wanted <= dict(has).items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values of a name by one of its labels, in the order in which the server has them."""
        return {
            dict(labels)[label]: value for (found, labels), value in self.values.items() if found == name and label in dict(labels)
        }


def parse(text: str, at: float) -> Reading:
    """Prometheus's text as a Reading. Raises ValueError where it is none, or no server's of ours."""
    from prometheus_client.parser import text_string_to_metric_families

    values = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix = next((prefix for prefix in _PREFIXES if sample.name.startswith(prefix)), None)
                if prefix is not None:
                    values[sample.name.removeprefix(prefix), tuple(sorted(sample.labels.items()))] = sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"/metrics is not Prometheus's text: {error}") from None
    if not values:
        router = " (a router: give the address of one of its servers)" if "jaxserve_router:" in text else ""
        raise ValueError(f"/metrics has none of a server's metrics{router}")
    return Reading(at, values)


def read(client: Any) -> Reading:
    """A server's metrics now. client: an httpx.Client with the server as base_url. Raises ValueError if they can't be had."""
    import httpx

    try:
        response = client.get("/metrics")
    except httpx.HTTPError as error:
        raise ValueError(f"{client.base_url} does not answer: {error}") from None
    if response.status_code == 401:
        raise ValueError(f"{client.base_url} wants a key for its metrics: give --api_key")
    if response.status_code != 200:
        raise ValueError(f"{client.base_url} answered {response.status_code} for /metrics")
    return parse(response.text, time.monotonic())


def frame(before: Reading, now: Reading) -> Group:
    """What is shown: the server as it is now, and what happened between two readings."""
    from rich.columns import Columns
    from rich.console import Group

    tables = [_state(now), _rates(before, now), _latencies(before, now)]
    below = [table for table in (_buckets(before, now), _keys(before, now)) if table.row_count]
    return Group(Columns(tables), *([Columns(below)] if below else []))


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=len(columns) > 2)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    return made


def _state(now: Reading) -> Table:
    models = [dict(labels).get("model_name") for name, labels in now.values if name == "num_requests_running"]
    asleep = [state for state, value in now.by("engine_sleep_state", "sleep_state").items() if value and state != "awake"]
    state = asleep[0] if asleep else "paused" if now.total("engine_paused") else "serving"
    table = _table(str(models[0] if models else ""), "", "")
    table.add_row("state", state)
    table.add_row("running", f"{now.total('num_requests_running'):.0f}")
    table.add_row("waiting", f"{now.total('num_requests_waiting'):.0f}")
    table.add_row("KV pages in use", f"{now.total('kv_cache_usage_perc'):.1%} of {now.total('kv_pages'):.0f}")
    table.add_row("programs to compile", f"{now.total('programs_left_to_compile'):.0f}")
    return table


def _rates(before: Reading, now: Reading) -> Table:
    table, seconds = _table("a second", "", ""), now.time - before.time
    for name, what in _RATES.items():
        table.add_row(what, _number(_gained(before, now, name) / seconds))
    table.add_row("requests ended", _number(_gained(before, now, "e2e_request_latency_seconds_count") / seconds))
    return table


def _latencies(before: Reading, now: Reading) -> Table:
    table = _table("mean time, ms", "", "")
    for name, what in _LATENCIES.items():
        count = _gained(before, now, f"{name}_count")
        table.add_row(what, f"{1000 * _gained(before, now, f'{name}_sum') / count:.1f}" if count else "-")
    return table


def _buckets(before: Reading, now: Reading) -> Table:
    """The buckets that steps ran in, the most frequent first."""
    table = _table("buckets", "tokens x sequences", "steps", "share")
    ran = {
        bucket: total - before.total("bucket_steps_total", bucket=bucket)
        for bucket, total in now.by("bucket_steps_total", "bucket").items()
    }
    all_steps = sum(ran.values())
    for bucket, steps in sorted(ran.items(), key=lambda item: -item[1]):
        if steps:
            table.add_row(bucket, f"{steps:.0f}", f"{steps / all_steps:.0%}")
    return table


def _keys(before: Reading, now: Reading) -> Table:
    table = _table("keys", "name", "under way", "requests", "tokens", "refused")
    for key, running in now.by("api_key_requests_running", "key").items():
        used = (f"api_key_{what}_total" for what in ("requests", "tokens", "refusals"))
        gained = (_gained(before, now, name, key=key) for name in used)
        table.add_row(key, f"{running:.0f}", *(f"{value:.0f}" for value in gained))
    return table


def _gained(before: Reading, now: Reading, name: str, **labels: str) -> float:
    """How much a counter has grown. From 0, if the server was started again."""
    last, this = before.total(name, **labels), now.total(name, **labels)
    return this - last if this >= last else this


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or not value else f"{value:.1f}"


def frames(client: Any, interval: float) -> Iterator[Group | str]:
    """A frame every `interval` seconds, or why there is none. Raises ValueError if the first reading fails."""
    before = read(client)
    while True:
        time.sleep(interval)
        try:
            now = read(client)
        except ValueError as error:
            yield str(error)
            continue
        yield frame(before, now)
        before = now


def main() -> None:
    import httpx
    from rich.console import Console
    from rich.live import Live

    key = _API_KEY.value or os.environ.get("JAXSERVE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    console = Console()
    with refuse_bad_input(), httpx.Client(base_url=_URL.value.rstrip("/"), headers=headers, timeout=10) as client:
        shown = frames(client, _INTERVAL.value)
        first = next(shown)
        if _ONCE.value:
            if isinstance(first, str):
                raise ValueError(first)
            console.print(first)
            return
        with Live(first, console=console, screen=True, auto_refresh=False) as live:
            try:
                for found in shown:
                    live.update(found, refresh=True)
            except KeyboardInterrupt:
                pass


if __name__ == "__main__":
    run_command(main)

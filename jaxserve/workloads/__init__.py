"""What a benchmark serves: named workloads, their traffic over time, and the latencies that come of it."""

from typing import TYPE_CHECKING

from jaxserve.moved import forward

if not TYPE_CHECKING:
    __getattr__ = forward(__name__)

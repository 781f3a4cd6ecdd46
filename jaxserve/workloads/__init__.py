"""What a benchmark serves: named workloads, their traffic over time, and the latencies that come of it."""

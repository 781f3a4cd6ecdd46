"""`jaxserve bench`: throughput, latency and serving."""

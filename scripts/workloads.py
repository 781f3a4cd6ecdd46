"""The workloads that benchmarks share: for each request, in order of arrival, (prompt tokens, output tokens)."""

WORKLOADS: dict[str, list[tuple[int, int]]] = {
    "single": [(32, 64)],
    "eight": [(32, 64)] * 8,
    "equal_size": [(128, 128)] * 16,
    "short_long_mix": [(32, 32), (512, 128)] * 8,
}

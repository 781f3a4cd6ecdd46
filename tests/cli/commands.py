"""Modules of the commands that tests start in a process of their own."""

MODULES = {
    "autotune": "jaxserve.cli.autotune",
    "bench_serve": "jaxserve.cli.bench.serve",
    "bench_throughput": "jaxserve.cli.bench.throughput",
    "generate": "jaxserve.cli.generate",
    "profile_steps": "jaxserve.cli.tune.profile",
    "router": "jaxserve.cli.router",
    "serve": "jaxserve.cli.serve",
    "simulate": "jaxserve.cli.simulate",
    "tune_buckets": "jaxserve.cli.tune.buckets",
    "tune_budget": "jaxserve.cli.tune.budget",
    "validate_simulator": "scripts.validate_simulator",
}

"""What every test shares."""

import os

# Before anything imports jax. JAX_PLATFORMS=cuda pytest tests/kernels runs the kernels on a GPU instead.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_terminal_summary(terminalreporter):
    """What tests counted (`record_property("counted", text)`): pytest shows no prints of a test that passes, nor of a worker."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    counted = [text for report in reports if report.when == "call" for name, text in report.user_properties if name == "counted"]
    if counted:
        terminalreporter.section("counted")
        for text in counted:
            terminalreporter.line(text)

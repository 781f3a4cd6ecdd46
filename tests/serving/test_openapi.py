"""The published schema's own arithmetic; what it says of requests is tried by schemathesis (test_schema.py)."""

import re

import pytest

from jaxserve.serving.openapi import decimal_below


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 11, 99, 100, 101, 260, 1000, 4096])
def test_decimal_below(limit):
    pattern = re.compile(decimal_below(limit))
    assert [n for n in range(2 * limit + 20) if pattern.search(str(n))] == list(range(limit))
    assert not any(pattern.search(text) for text in ("", "00", "01", "-1", "1x", "+1"))

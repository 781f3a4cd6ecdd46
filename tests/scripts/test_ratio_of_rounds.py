"""An interval of a median holds it as often as it says."""

from math import comb

import pytest

from scripts.bench.ratio_of_rounds import ratio_of


def test_there_is_no_interval_of_fewer_than_six_rounds():
    """All of five hold the median with 93.75%."""
    for num_rounds in range(1, 6):
        assert ratio_of({"off": [1.0] * num_rounds, "on": [1.0] * num_rounds}) == (1.0, None)
    assert ratio_of({"off": [1.0] * 6, "on": [6.0, 1.0, 2.0, 5.0, 4.0, 3.0]}) == (3.5, [1.0, 6.0])


@pytest.mark.parametrize("num_rounds", [6, 8, 9, 12, 50, 60, 61])
def test_the_interval_holds_the_median_as_often_as_it_says(num_rounds):
    """By every number of ratios that may lie below it, with their chances; and a shorter one does not."""
    _, interval = ratio_of({"off": [1.0] * num_rounds, "on": [float(i) for i in range(num_rounds)]})
    assert interval is not None
    low, high = map(int, interval)
    assert low == num_rounds - 1 - high, "as many ranks from below as from above"

    def coverage(low, high):
        return sum(comb(num_rounds, below) for below in range(low + 1, high + 1)) / 2**num_rounds

    assert coverage(low, high) >= 0.95 > coverage(low + 1, high - 1)

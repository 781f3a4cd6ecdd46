"""scripts.bench.loop_lag: one long wait counts as long as it lasts."""

import numpy as np
import pytest

from scripts.bench.loop_lag import LoopLag, with_missed


def test_a_wait_counts_for_all_who_came_meanwhile():
    assert with_missed([0.0, 0.012, 0.003]).tolist() == pytest.approx([0.0, 0.012, 0.007, 0.002, 0.003])
    late = with_missed([0.0] * 80 + [0.1])
    assert np.quantile(late, 0.99) > 0.09 and len(late) == 101, "one sample in 81 alone would be beyond no quantile"


def test_nothing_sampled_is_no_lag():
    assert LoopLag().take() == {"median_loop_lag_ms": 0.0, "p99_loop_lag_ms": 0.0, "max_loop_lag_ms": 0.0}

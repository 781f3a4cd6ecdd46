"""Successive halving against settings whose scores are known."""

import math

import pytest

from jaxserve.simulation.halving import successive_halving, widths


def test_rungs():
    """27 settings on a ninth, 9 on a third, 3 on all; ever more work, and the best comes through."""
    asked = []

    def score(setting, size):
        asked.append((setting, size))
        return -abs(setting - 11) + (0.4 if setting == 12 and size < 90 else 0.0)  # little work flatters 12, not too much

    rungs = successive_halving(range(27), score, 90)
    assert [(rung.size, len(rung.scores)) for rung in rungs] == [(10, 27), (30, 9), (90, 3)]
    assert rungs[-1].scores[0] == (11, 0) and {s for s, _ in rungs[-1].scores} == {10, 11, 12}
    assert len(asked) == len(set(asked)) == 39 == sum(widths(27, 3, 3))
    assert [s for s, _ in rungs[0].scores[:2]] == [11, 12]


def test_the_impossible_come_last_and_few_settings_get_all_the_work():
    rungs = successive_halving([3, 1, 2], lambda s, size: -math.inf if s == 3 else s, 50)
    assert [rung.size for rung in rungs] == [50] and [s for s, _ in rungs[0].scores] == [2, 1, 3]
    rungs = successive_halving(range(100), lambda s, size: s, 64, factor=4, finalists=1, least=8)
    assert [(rung.size, len(rung.scores)) for rung in rungs] == [(8, 100), (8, 25), (8, 7), (16, 2), (64, 1)]
    assert widths(100, 4, 1) == [100, 25, 7, 2, 1]
    assert rungs[-1].scores == ((99, 99),)


def test_equal_scores_stay_in_order():
    rungs = successive_halving("abcdef", lambda s, size: 0.0, 9, finalists=2)
    assert [s for s, _ in rungs[-1].scores] == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "given"), [([], {}), ([1], {"factor": 1}), ([1], {"finalists": 0}), ([1], {"least": 0}), ([1], {"least": 11})]
)
def test_no_rungs(settings, given):
    with pytest.raises(ValueError, match="no rungs"):
        successive_halving(settings, lambda s, size: 0.0, 10, **given)

"""The ratio of what is measured by turns in rounds, with an interval of confidence that takes no distribution for granted."""

from __future__ import annotations

import math
import statistics

Seconds = dict[str, list[float]]  # of each round, without what is measured ("off") and with it ("on")


def ratio_of(seconds: Seconds) -> tuple[float, list[float] | None]:
    """(the median of the rounds' ratios, with over without it; its interval of confidence of 95% or a little more, by
    ranks). None: there is no such interval, of fewer than six rounds."""
    ratios = sorted(on / off for off, on in zip(seconds["off"], seconds["on"], strict=True))
    num_below = num_cut(len(ratios))
    return statistics.median(ratios), [ratios[num_below], ratios[-1 - num_below]] if num_below >= 0 else None


def num_cut(num_rounds: int) -> int:
    """How many of the least and of the greatest ratios an interval of 95% leaves out; -1: all together are less sure. The median
    lies below the k + 1st where at most k of the ratios lie below it, and each does with a half."""
    chance, cut = 0.5**num_rounds, -1  # that at most `cut + 1` lie below
    while chance <= 0.025:
        cut += 1
        chance += math.comb(num_rounds, cut + 1) * 0.5**num_rounds
    return cut

"""Whether an output repeats itself: its last tokens are one pattern several times in a row.

Owns how that is found. Knows nothing of what becomes of the request.
"""

from __future__ import annotations

import numpy as np

from jaxserve.request import Request
from jaxserve.sampling_params import RepetitionDetectionParams


class RepetitionWatch:
    """Follows the output of one request that asks for `repetition_detection`.

    For each size n of a pattern it counts how many tokens, up to the last one, equal the token n before them. The last tokens are
    `count` times a pattern of n tokens where that is n * (count - 1) or more. So a token costs as many comparisons as there are
    sizes, whatever the output is.
    """

    def __init__(self, request: Request):
        asked = request.params.repetition_detection
        assert isinstance(asked, RepetitionDetectionParams)
        self._request = request
        self._least, self._most = asked.least_pattern_size, asked.max_pattern_size
        self._needed = np.arange(self._least, self._most + 1) * (asked.min_count - 1)
        self._equal = np.zeros(self._most + 1 - self._least, np.int64)  # by size, tokens in a row that equal the one so far before
        self._output, self._num_read = np.zeros(64, np.int64), 0  # the output so far, with room for more

    def repeats(self) -> bool:
        """Whether the output so far ends with a pattern often enough."""
        new = self._request.token_ids[self._request.num_prompt_tokens + self._num_read :]
        num_known = self._num_read + len(new)
        if num_known > len(self._output):
            self._output = np.concatenate([self._output, np.zeros(num_known, np.int64)])
        self._output[self._num_read : num_known] = new
        for position in range(self._num_read, num_known):
            first, last = max(0, position - self._most), max(0, position + 1 - self._least)
            before = self._output[first:last][::-1]  # the token n before, by size
            same = np.zeros(len(self._equal), bool)
            same[: len(before)] = before == self._output[position]
            self._equal = np.where(same, self._equal + 1, 0)
        self._num_read = num_known
        return bool((self._equal >= self._needed).any())

"""Whether what drafts makes drafts at all.

Drafts that a model makes take time though none stands. So steps are tried without them, and where they don't pay, heads that make
none run until there is a reason to ask again. Knows nothing of tokens, nor of what pays: it is told.
"""

from __future__ import annotations

from jaxserve.speculative.recent_times import RETRY_STEPS, RecentTimes, Shape

LEAST_GAIN = 1.05  # by prediction, over a plain step, that makes drafts worth it, and over a step at rest their making
PATIENCE = 8  # steps of decodes for which no drafts pay, and more of few rows; behind those none are made,
PROBE_EVERY, PROBE_STEPS = 128, 3  # but in so many of every so many steps,
OTHERS = 0.25  # and when so many of the rows have other owners; behind a second rest as seldom as probes come
RESTS_THAT_FOLLOW = 1  # in a row, in which what drafts still runs over the steps' tokens; in others it does not
MOST_HALVINGS = 2  # of patience, and doublings of the steps between probes, each time that no drafts had paid since the last rest
TRIAL_STEPS, REST_DUE_STEPS = 5, 256  # without drafts, so that it is known what these take; as RecentTimes' due_steps


class DraftRests:
    """Says of each step whether its head makes drafts.

    It does while they pay. Where none paid for a while it rests, but for a few steps from time to time, until many of the rows have
    new owners, or until they have another bucket. `follows` says whether what drafts runs over a step's tokens at least, so that it
    drafts well as soon as it is asked. Where no drafts have paid from one rest to the next, it does not: of the tokens of those
    steps it knows nothing then, and drafts well again for requests that come; and new owners are a reason to ask again no more
    often than probes are made.
    """

    def __init__(self) -> None:
        self.times: RecentTimes = RecentTimes(REST_DUE_STEPS)  # of steps whose heads made no drafts
        self.proposes: bool = True  # whether the head of the step that was decided last makes drafts
        self.follows: bool = True  # whether what drafts runs over that step's tokens
        self._num_steps = 0
        self._shape: Shape | None = None  # of the last step, as a plain one
        self._unpaid = 0.0  # steps in a row for which drafts did not pay; new owners take some of them back
        self._rested = 0  # steps since the rest began; 0: there is none
        self._others = 0.0  # share of the rows that have new owners since then
        self._num_rests: dict[Shape, int] = {}  # since drafts paid there
        self._next_tries: dict[Shape, int] = {}  # at which step others may end a rest there
        self._trial = 0  # steps of a trial without drafts that are left
        self._next_trials: dict[Shape, int] = {}  # at which step one may begin

    def meet(self, share: float) -> None:
        """So many of the rows have new owners, of whom nothing is known."""
        self._unpaid *= 1 - share / 2  # not all: what comes is often of the kind that goes
        self._others += share

    def decide(self, shape: Shape, num_rows: int, pays: bool, timed: bool) -> None:
        """Of the next step. shape, num_rows: of its decodes, as a plain step. pays: whether it has drafts that pay for making
        them. timed: whether it will be known what the step took. Rows that leave change nothing until a smaller bucket holds the
        rest. A step of prompts alone makes drafts, whatever its requests will be."""
        if not num_rows:
            self.proposes = self.follows = True
            return
        self._num_steps += 1
        alike, self._shape = shape == self._shape, shape
        may_try = self._num_steps >= self._next_tries.get(shape, 0)
        if pays:
            self._unpaid, self._rested, self._num_rests[shape] = 0.0, 0, 0
        elif self._rested and may_try and (not alike or self._others >= OTHERS):
            self._unpaid, self._rested = 0.0, 0
        elif self._rested or not (alike or may_try):
            self._rested += 1
        else:
            self._unpaid = self._unpaid + 1 if alike else 0.0
        self._give_up(shape, num_rows)
        num_rests = self._num_rests.get(shape, 0)
        probe_every = PROBE_EVERY << min(max(0, num_rests - 1), MOST_HALVINGS)
        probes = self._rested >= probe_every and self._rested % probe_every < PROBE_STEPS
        tries_without = self._tries_without(shape, pays) if timed else False
        self.proposes = not tries_without and (not self._rested or probes)
        self.follows = self.proposes or num_rests <= RESTS_THAT_FOLLOW

    def _give_up(self, shape: Shape, num_rows: int) -> None:
        """Begins a rest where patience is at its end."""
        num_rests = self._num_rests.get(shape, 0)
        patience = PATIENCE * (1 + 2 // num_rows) >> min(num_rests, MOST_HALVINGS)  # what few rows say is noisy
        if self._rested or self._unpaid < patience:
            return
        self._rested, self._others, self._num_rests[shape] = 1, 0.0, num_rests + 1
        if num_rests:
            self._next_tries[shape] = self._num_steps + PROBE_EVERY

    def _tries_without(self, shape: Shape, pays: bool) -> bool:
        """Whether the step makes no drafts though they pay, so that it is known what it takes without."""
        unsure = self.times.get(shape) is None or self.times.is_due(shape)
        if pays and unsure and self._num_steps >= self._next_trials.get(shape, 0):
            self._trial = TRIAL_STEPS
            self._next_trials[shape] = self._num_steps + RETRY_STEPS  # unless this one is timed
        if not self._trial:
            return False
        self._trial -= 1
        return True

    def add_time(self, shape: Shape, seconds: float) -> None:
        """Of a step of decodes whose head made no drafts."""
        self.times.add(shape, seconds)
        if self.times.get(shape) is not None:
            self._next_trials.pop(shape, None)

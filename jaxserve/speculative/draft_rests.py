"""Whether what drafts makes drafts at all.

Drafts that a model makes take time though none stands. So steps are tried without them, and where they don't pay, heads that make
none run until there is a reason to ask again. Knows nothing of tokens, nor of what pays: it is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.speculative.recent_times import RETRY_STEPS, RecentTimes, Shape

PATIENCE = 8  # steps of decodes for which no drafts pay, and more of few rows; behind those none are made,
BLIND_STEPS = 64  # nor behind so many in a row for which nobody could say whether they pay;
PROBE_EVERY, PROBE_STEPS = 128, 3  # but in so many of every so many steps,
OTHERS = 0.25  # and when so many of the rows have had new owners; behind a second rest once in PROBE_EVERY steps at most
RESTS_THAT_FOLLOW = 1  # in a row, in which what drafts still runs over the steps' tokens; in others it does not
MOST_HALVINGS = 2  # of patience, and doublings of the steps between probes, each time that no drafts had paid since the last rest
TRIAL_STEPS, REST_DUE_STEPS = 5, 256  # without drafts, so that it is known what these take; as RecentTimes' due_steps


@dataclass
class _Record:
    """Of the steps of one shape."""

    unpaid: float = 0.0  # for which drafts did not pay, since they last did; new owners take some of them back
    blind: int = 0  # in a row, that had drafts of which nobody could say whether they pay
    rested: int = 0  # since the rest began; 0: there is none
    others: float = 0.0  # new owners since then, as a share of the rows
    num_rests: int = 0  # since drafts paid
    next_try: int = 0  # at which step of all others may end a rest
    next_trial: int = 0  # at which step of all a trial without drafts may begin


class DraftRests:
    """Says of each step whether its head makes drafts.

    It does while they pay. Where none paid for a while in steps of a shape, these rest, but for a few from time to time, until many
    of the rows have had new owners. `follows` says whether what drafts runs over a step's tokens at least, so that it drafts well
    as soon as it is asked. Where no drafts have paid from one rest to the next, it does not: of the tokens of those steps it knows
    nothing then, and drafts well again for requests that come, whose prompts it is always given. New owners end such rests seldom.
    """

    def __init__(self) -> None:
        self.times: RecentTimes = RecentTimes(REST_DUE_STEPS)  # of steps whose heads made no drafts
        self.proposes: bool = True  # whether the head of the step that was decided last makes drafts
        self.follows: bool = True  # whether what drafts runs over that step's tokens
        self._records: dict[Shape, _Record] = {}
        self._num_steps = 0
        self._num_rows = 0  # of decodes, in the last step
        self._trial = 0  # steps of a trial without drafts that are left

    def meet(self, num_rows: int) -> None:
        """So many rows have new owners, of whom nothing is known."""
        share = num_rows / max(num_rows, self._num_rows)
        for record in self._records.values():
            record.unpaid *= 1 - share / 2  # not all: what comes is often of the kind that goes
            record.others += share

    def decide(self, shape: Shape, num_rows: int, pays: bool | None, timed: bool) -> None:
        """Of the next step. shape, num_rows: of its decodes, as a plain step. pays: whether it has drafts that pay for making them;
        None: nobody can say, as the step before made none, or steps of these shapes were not timed. timed: whether it will be known
        what the step took."""
        self._num_steps += 1
        self._num_rows = num_rows
        record = self._records.setdefault(shape, _Record())
        record.blind = 0 if pays is not None else record.blind + self.proposes  # of the step before
        if pays:
            record.unpaid, record.rested, record.num_rests = 0.0, 0, 0
        elif record.rested and record.others >= OTHERS and self._num_steps >= record.next_try:
            record.unpaid, record.rested = 0.0, 0
        elif record.rested:
            record.rested += 1
        elif pays is not None:
            record.unpaid += 1
            self._give_up(record, num_rows)
        probe_every = PROBE_EVERY << min(max(0, record.num_rests - 1), MOST_HALVINGS)
        probes = record.rested >= probe_every and record.rested % probe_every < PROBE_STEPS
        blind = record.blind > BLIND_STEPS and not timed
        tries_without = timed and self._tries_without(shape, record, bool(pays))
        self.proposes = not (blind or tries_without) and (not record.rested or probes)
        self.follows = self.proposes or record.num_rests <= RESTS_THAT_FOLLOW

    def _give_up(self, record: _Record, num_rows: int) -> None:
        """Begins a rest where patience is at its end."""
        patience = PATIENCE * (1 + 2 // max(1, num_rows)) >> min(record.num_rests, MOST_HALVINGS)  # what few rows say is noisy
        if record.unpaid < patience:
            return
        if record.num_rests:
            record.next_try = self._num_steps + PROBE_EVERY
        record.rested, record.others, record.num_rests = 1, 0.0, record.num_rests + 1

    def _tries_without(self, shape: Shape, record: _Record, pays: bool) -> bool:
        """Whether the step makes no drafts though they pay, so that it is known what it takes without."""
        unsure = self.times.get(shape) is None or self.times.is_due(shape)
        if pays and unsure and self._num_steps >= record.next_trial:
            self._trial = TRIAL_STEPS
            record.next_trial = self._num_steps + RETRY_STEPS  # unless this one is timed
        if not self._trial:
            return False
        self._trial -= 1
        return True

    def add_time(self, shape: Shape, seconds: float) -> None:
        """Of a step of decodes whose head made no drafts."""
        self.times.add(shape, seconds)
        if self.times.get(shape) is not None and shape in self._records:
            self._records[shape].next_trial = 0

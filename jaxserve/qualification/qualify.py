"""The verdict on our kernels for the card at hand: from its record, or from a process that tries them now."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.execution.compilation import cache_folder
from jaxserve.qualification import watch
from jaxserve.qualification.card import Card
from jaxserve.qualification.record import Record, Store
from kernels.qualification.plan import KEPT, NO_MEMORY, NOT_TRIED, Plan, Verdict

logger: logging.Logger = logging.getLogger("jaxserve")

_found: dict[Path, Record] = {}  # in this process, by the record's path: where it can't be kept, it is not found out again


@dataclasses.dataclass(frozen=True)
class Qualification:
    """What is known of the kernels on a card, for one plan."""

    card: Card
    plan: Plan
    record: Record

    @property
    def verdicts(self) -> list[Verdict]:
        """On the plan's units, in the order in which they are tried."""
        return [self.record.verdicts[unit.name] for unit in self.plan.all_units if unit.name in self.record.verdicts]

    def left_out(self, kernel: str) -> dict[str, str]:
        """Backends of a kernel that must not be taken unless the user names them, and why."""
        return self.plan.left_out(kernel, self.record.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: card, date, seconds, verdicts, left_out."""
        return {
            "card": dataclasses.asdict(self.card),
            "date": self.record.date,
            "seconds": self.record.seconds,
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
            "left_out": {kernel: self.left_out(kernel) for kernel in self.plan.asks},
        }

    def __str__(self) -> str:
        """One line."""
        parts = []
        for kernel in self.plan.asks:
            parts += [f"{kernel} {name} passed" for name in self.plan.passed(kernel, self.record.verdicts)]
            parts += [f"{kernel} {name} LEFT OUT, {why}" for name, why in self.left_out(kernel).items()]
        return f"kernels on {self.card.name}, {self.record.date}: {'; '.join(parts) or 'none of ours runs here'}{self._again()}"

    def _again(self) -> str:
        """When what is left out will be tried again."""
        if not any(map(self.left_out, self.plan.asks)):
            return ""
        ways = []
        if any(verdict.failed for verdict in self.verdicts):
            ways.append("`jaxserve qualify --again` tries anew what failed")
        if any(verdict.result == NO_MEMORY for verdict in self.verdicts):
            ways.append("the next start of an engine tries again what had no memory")
        if any(verdict.result == NOT_TRIED for verdict in self.verdicts):
            ways.append("the next process tries what was not tried")
        return f" ({'; '.join(ways)})" if ways else ""


def qualify(
    card: Card,
    plan: Plan,
    *,
    folder: Path | None = None,
    command: Sequence[str] | None = None,
    limits: watch.Limits | None = None,
    again: bool = False,
) -> Qualification:
    """What is known of the plan's kernels on this card. What is not known is tried first, in a process of its own, and kept.

    Args:
      folder: of the records; None is "qualification" in jaxserve's cache folder.
      command: what tries them; None is `python -m kernels.qualification`.
      limits: of time; None is `watch.Limits()`.
      again: tries what is known anew.
    """
    command, limits = command or watch.COMMAND, limits or watch.Limits()
    store = Store(cache_folder() / "qualification" if folder is None else folder, card)
    record = _known(store)
    if not again and plan.next_unit(record.verdicts) is None:
        return Qualification(card, plan, record)
    with store.lock(2 * limits.whole):
        known = record = _known(store)  # another process may have found it meanwhile
        if again:
            ours = {unit.name for unit in plan.all_units}
            record = Record({name: v for name, v in known.verdicts.items() if name not in ours and not v.failed})
        if plan.next_unit(record.verdicts) is not None:
            logger.info("trying our kernels on %s, once for this card: %.0f s at most", card, limits.whole)
            start = time.monotonic()
            verdicts = watch.watch(plan, record.verdicts, command=command, limits=limits)
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            record = Record(verdicts, date, round(record.seconds + time.monotonic() - start, 2))
            # What could not be tried now keeps the verdict that it had.
            untried = {name for name, verdict in verdicts.items() if verdict.result not in KEPT}
            had = {name: verdict for name, verdict in known.verdicts.items() if name in untried and verdict.result in KEPT}
            kept = dataclasses.replace(record, verdicts={**verdicts, **had})
            # There may be memory at the next start, also of this process.
            lasting = {name: verdict for name, verdict in kept.verdicts.items() if verdict.result != NO_MEMORY}
            _found[store.path] = dataclasses.replace(kept, verdicts=lasting)
            store.write(kept)
    return Qualification(card, plan, record)


def _known(store: Store) -> Record:
    """What this process has found, or else what the file says."""
    found, kept = _found.get(store.path, Record()), store.read()
    return Record({**found.verdicts, **kept.verdicts}, kept.date or found.date, max(kept.seconds, found.seconds))

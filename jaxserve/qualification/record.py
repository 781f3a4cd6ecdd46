"""What was found on a card, as a JSON file in the cache folder; and the lock that lets one process at a time find it out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jaxserve.qualification.card import Card
from kernels.qualification.plan import KEPT, Verdict

logger: logging.Logger = logging.getLogger("jaxserve")

FORMAT = 1
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Record:
    """Verdicts by unit. date: of the last of them, in UTC. seconds: that all of them took."""

    verdicts: dict[str, Verdict] = dataclasses.field(default_factory=dict)
    date: str = ""
    seconds: float = 0.0


class Store:
    """The file of one card. `read` and `write` never raise: a folder that can't be used is one without records."""

    _unwritable: set[Path] = set()  # that a warning was given of, in this process

    def __init__(self, folder: Path, card: Card):
        self.folder: Path = folder
        self.card: Card = card
        self.path: Path = folder / f"{card.key}.json"

    def read(self) -> Record:
        """What is known of the card; nothing if there is no file, or none that can be read, or it is of another card."""
        try:
            text = self.path.read_bytes()
        except OSError:
            return Record()
        try:
            found = json.loads(text)
            if found["format"] != FORMAT or found["card"] != dataclasses.asdict(self.card):
                logger.warning("%s is of another card or version, and is not used", self.path)
                return Record()
            verdicts = {name: Verdict(**verdict) for name, verdict in found["verdicts"].items()}
            return Record(verdicts, str(found["date"]), float(found["seconds"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is no record of a qualification (%s), and is not used", self.path, error)
            return Record()

    def write(self, record: Record) -> bool:
        """Keeps the verdicts that say something of the kernels, all of the file or nothing of it; whether it could."""
        verdicts = {name: dataclasses.asdict(v) for name, v in record.verdicts.items() if v.result in KEPT}
        text = {"format": FORMAT, "card": dataclasses.asdict(self.card), "date": record.date, "seconds": record.seconds}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(prefix=f".{self.path.stem}-", suffix=".tmp", dir=self.folder)
            try:
                with os.fdopen(number, "w") as file:
                    json.dump(text | {"verdicts": verdicts}, file, indent=1)
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            if self.path not in self._unwritable:
                self._unwritable.add(self.path)
                logger.warning(
                    "the verdict on the kernels is used and can't be kept in %s (%s): the next start will try them again",
                    self.folder,
                    error,
                )
            return False
        return True

    @contextlib.contextmanager
    def lock(self, seconds: float) -> Iterator[bool]:
        """Held by one process at a time, the system's own, so that none stays behind a process that died. Waits for it; False
        after so many seconds, or where the folder can't be written: then there is nothing to wait for."""
        import fcntl

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.path.with_suffix(".lock"), "w")
        except OSError:
            yield False
            return
        end, waiting = time.monotonic() + seconds, False
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waiting:
                        logger.info("another process qualifies the kernels on this card: waiting for its verdict")
                    waiting = True
                    if time.monotonic() >= end:
                        yield False
                        return
                    time.sleep(_POLL_SECONDS)
                except OSError:  # a file system without locks
                    yield False
                    return
            yield True

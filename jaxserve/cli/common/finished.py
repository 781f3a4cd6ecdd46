"""Results that a long script has already, in a JSON file, so that a run that broke off goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Finished:
    """A dict from key to result (both JSON), written to `path` after each one. path None: kept in memory alone.

    settings: what all results depend on. They are in the file too.

    Raises:
      ValueError: the file is of other settings, which it names, or no such file.
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any]):
        self._path = None if path is None else Path(path)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))  # as they come back: lists for tuples
        self.results: dict[str, Any] = {}
        if self._path is None or not self._path.exists():
            return
        try:
            before = json.loads(self._path.read_text())
            theirs, self.results = before["settings"], before["results"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold finished results ({error!r}); name another file, or remove it") from None
        names = [name for name in {**theirs, **self.settings} if theirs.get(name) != self.settings.get(name)]
        if names:
            differ = ", ".join(f"{name}: {theirs.get(name)!r} there, {self.settings.get(name)!r} now" for name in names)
            raise ValueError(f"{path} has results of other settings ({differ}); name another file, or remove it")

    def __getitem__(self, key: str) -> Any:
        return self.results[key]

    def __contains__(self, key: str) -> bool:
        return key in self.results

    def __setitem__(self, key: str, result: Any) -> None:
        self.results[key] = result
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(self._path.name + ".part")
        beside.write_text(json.dumps({"settings": self.settings, "results": self.results}, indent=1) + "\n")
        os.replace(beside, self._path)  # whole at any moment

"""API keys: who may ask, and how much each may ask for.

Owns a server's keys, hashed, what each has used, and the file that they are read from. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

logger: logging.Logger = logging.getLogger("jaxserve")

LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests", "max_connections")
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key. None is no limit.

    name: in logs and metrics; None for a key that was given without one.
    digest: SHA-256 of the key, 32 bytes.
    requests_per_minute, tokens_per_minute: on average; a minute's worth may come at once. Tokens are those of prompts, cached ones
    too, and of outputs.
    max_concurrent_requests: requests under way, open streams and responses in the background included.
    max_connections: open connections whose last request showed this key, idle ones included.
    may_control: whether it opens the control routes, where the server has them.
    """

    name: str | None
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_connections: int | None = None
    may_control: bool = False


class KeyLimitError(Exception):
    """A key's limit is reached. limit: its name; retry_after: seconds after which to try again."""

    def __init__(self, message: str, limit: str, retry_after: int):
        super().__init__(message)
        self.limit = limit
        self.retry_after = retry_after


@dataclass
class _Bucket:
    """What may be spent now of so much a minute: full at first, filled evenly, and below 0 after a request that cost more."""

    level: float
    filled_at: float

    def wait(self, per_minute: int, now: float) -> float:
        """Fills it. Returns the seconds until 1 may be spent."""
        self.level = min(per_minute, self.level + (now - self.filled_at) * per_minute / 60)
        self.filled_at = now
        missing = 1 - self.level
        return missing * 60 / per_minute if missing > 1e-9 else 0.0


class KeyUse:
    """A key and what it has used.

    num_requests: requests that were taken. num_refused: by the limit that refused them. num_tokens: of prompts and outputs.
    num_running: requests under way. num_connections: open connections that showed the key last.
    """

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic):
        self.key: ApiKey = key
        self.num_requests: int = 0
        self.num_tokens: int = 0
        self.num_running: int = 0
        self.num_connections: int = 0
        self.num_refused: dict[str, int] = dict.fromkeys(LIMITS, 0)
        self._clock = clock
        now = clock()
        self._requests = _Bucket(key.requests_per_minute or 0, now)
        self._tokens = _Bucket(key.tokens_per_minute or 0, now)

    def begin(self, *, is_brief: bool = False) -> None:
        """Takes a request, which is under way until `end`. is_brief: it makes no answer of its own, and is taken whatever is under
        way. Raises KeyLimitError."""
        key, now = self.key, self._clock()
        if not is_brief and key.max_concurrent_requests is not None and self.num_running >= key.max_concurrent_requests:
            self._refuse("max_concurrent_requests", f"{self.num_running} requests under way", 1.0)
        if key.requests_per_minute is not None and (wait := self._requests.wait(key.requests_per_minute, now)):
            self._refuse("requests_per_minute", "no request left", wait)
        if key.tokens_per_minute is not None and (wait := self._tokens.wait(key.tokens_per_minute, now)):
            self._refuse("tokens_per_minute", "no token left", wait)
        self._requests.level -= 1
        self.num_requests += 1
        self.num_running += not is_brief

    def hold(self) -> None:
        """Counts one more request as under way, which was taken as a part of another, until `end`."""
        self.num_running += 1

    def end(self) -> None:
        """A request is not under way any more."""
        self.num_running -= 1

    def connect(self) -> None:
        """Counts a connection, which is open until `disconnect`. Raises KeyLimitError."""
        if self.key.max_connections is not None and self.num_connections >= self.key.max_connections:
            self._refuse("max_connections", f"{self.num_connections} open connections", 1.0)
        self.num_connections += 1

    def disconnect(self) -> None:
        """A connection is not open any more, or has shown another key."""
        self.num_connections -= 1

    def spend(self, num_tokens: int) -> None:
        """Counts tokens of a prompt or an output."""
        self.num_tokens += num_tokens
        self._tokens.level -= num_tokens

    def change(self, key: ApiKey) -> None:
        """Goes on with other limits. A limit that was not there begins with a full minute."""
        now = self._clock()
        for bucket, name in ((self._requests, "requests_per_minute"), (self._tokens, "tokens_per_minute")):
            if getattr(self.key, name) is None:
                bucket.level, bucket.filled_at = getattr(key, name) or 0, now
            else:
                bucket.wait(getattr(self.key, name), now)
        self.key = key

    def _refuse(self, limit: str, found: str, seconds: float) -> NoReturn:
        self.num_refused[limit] += 1
        retry_after = max(1, math.ceil(seconds))
        allowed = getattr(self.key, limit)
        raise KeyLimitError(
            f"key {self.key.name!r} has {found}, of its {limit}={allowed}; try again in {retry_after} s", limit, retry_after
        )


class ShownKey:
    """The key that a connection has shown last: the connection counts for it until it is closed."""

    def __init__(self):
        self._use: KeyUse | None = None
        self._closed = False

    def show(self, use: KeyUse) -> None:
        """A request of the connection shows a key. Raises KeyLimitError if that may have no more connections; this one then counts
        as before."""
        if use is not self._use and not self._closed:  # a request may be looked at when its client has gone
            use.connect()
            self._leave()
            self._use = use

    def close(self) -> None:
        """The connection is closed."""
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        if self._use is not None:
            self._use.disconnect()
            self._use = None


class KeyRing:
    """The keys of a server: those that were given, which have no name and no limit and may control, and those of a file.

    path: a file as `read_keys` takes it; None: none.
    counts_tokens: whether `KeyUse.spend` is called, so that tokens can be limited.

    Raises:
      ValueError: as `read_keys`; a limit of tokens where none are counted.
    """

    def __init__(
        self,
        given: Sequence[str] = (),
        path: str | None = None,
        *,
        counts_tokens: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._path, self._clock = path, clock
        self.counts_tokens: bool = counts_tokens
        self._given = [KeyUse(ApiKey(name=None, digest=_digest(key.encode()), may_control=True), clock) for key in given]
        self.named: tuple[KeyUse, ...] = () if path is None else self._read(path)

    @property
    def is_open(self) -> bool:
        """Whether there is no key, so that none is asked for."""
        return not self._given and self._path is None

    def find(self, tokens: Iterable[bytes]) -> KeyUse | None:
        """The key that one of these tokens is. How long it takes does not depend on which, or how much of one is right."""
        found = None
        for digest in map(_digest, tokens):
            for use in (*self._given, *self.named):
                if hmac.compare_digest(digest, use.key.digest):
                    found = use
        return found

    def reload(self) -> bool:
        """Reads the file again. Keys that keep their name keep what they have used. A file that can't be read changes nothing,
        and a line of the log says why. Returns whether it was read."""
        if self._path is None:
            return False
        try:
            self.named = self._read(self._path)
        except ValueError as error:
            logger.error("the keys stay as they were: %s", error)
            return False
        logger.info("%d keys read from %s", len(self.named), self._path)
        return True

    def _read(self, path: str) -> tuple[KeyUse, ...]:
        keys = read_keys(path)
        for key in keys:
            if key.tokens_per_minute is not None and not self.counts_tokens:
                raise ValueError(f"tokens_per_minute of {key.name}: a router counts no tokens; limit them in a file of its servers")
        before = {use.key.name: use for use in getattr(self, "named", ())}
        uses = []
        for key in keys:
            if (use := before.get(key.name)) is not None:
                use.change(key)
            uses.append(use or KeyUse(key, self._clock))
        return tuple(uses)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def read_keys(path: str | Path) -> list[ApiKey]:
    """The keys of a file: YAML, or JSON if it ends in .json; a list of objects with the fields of `ApiKey`, but `key`, the key
    itself, or `sha256`, its SHA-256 in hex, in place of `digest`.

    Raises:
      ValueError: the file can't be read, or holds no such list, no key, or two keys with one name or of one value. Says which; a
        key itself is never told.
    """
    entries = _load(Path(path))
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"api_keys_file={str(path)!r} must hold a list of keys, one at least")
    keys = []
    for i, entry in enumerate(entries):
        try:
            keys.append(_key(entry))
        except ValueError as error:
            raise ValueError(f"api_keys_file={str(path)!r}: key {i + 1}: {error}") from None
    for said, values in (("name", [key.name for key in keys]), ("value", [key.digest for key in keys])):
        twice = [i for i, value in enumerate(values) if value in values[:i]]
        if twice:
            raise ValueError(f"api_keys_file={str(path)!r}: key {twice[0] + 1} has the {said} of one before it")
    return keys


def _load(path: Path) -> Any:
    """What a file says. Raises ValueError, which tells nothing of it but where it is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_keys_file={str(path)!r} can't be read: {error}") from None
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"api_keys_file={str(path)!r} is not JSON: {error}") from None
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)  # the whole message shows the line
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise ValueError(f"api_keys_file={str(path)!r} is not YAML: {getattr(error, 'problem', None) or error}{where}") from None


def _key(entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise ValueError("must be an object with name, and key or sha256")
    known = {"key", "sha256"} | {field.name for field in fields(ApiKey)} - {"digest"}
    unknown = sorted(str(name) for name in entry.keys() - known)
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not known; it may have {', '.join(sorted(known))}")
    name, key, sha256 = entry.get("name"), entry.get("key"), entry.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r} must be a text of 1 to 64 letters, digits and signs of '._-'")
    if (key is None) == (sha256 is None):
        raise ValueError(f"{name} must have one of key and sha256")
    if key is not None and (not isinstance(key, str) or not key):
        raise ValueError(f"key of {name} must be a text that is not empty; quotes make a number one")
    if sha256 is not None and not (isinstance(sha256, str) and _DIGEST.fullmatch(sha256)):
        raise ValueError(f"sha256 of {name} must be 64 hexadecimal digits, in quotes")
    digest = _digest(key.encode()) if key is not None else bytes.fromhex(str(sha256))
    if digest == _digest(b""):
        raise ValueError(f"sha256 of {name} is that of an empty text: was the variable set that it was made of?")
    limits = {limit: entry.get(limit) for limit in LIMITS}
    for limit, value in limits.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{limit}={value!r} of {name} must be a whole number above 0; leave it out for none")
    may_control = entry.get("may_control", False)
    if not isinstance(may_control, bool):
        raise ValueError(f"may_control={may_control!r} of {name} must be true or false")
    return ApiKey(name=name, digest=digest, may_control=may_control, **limits)

"""The options of a server, and those that a router has in common with it.

Of the standard library alone, so that a command can offer their defaults without importing a server.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WAITING = 1024  # samples that may wait beyond an engine's max_num_seqs
MAX_FAILURES = 3  # steps in a row that may raise before an engine counts as broken


@dataclass(frozen=True, kw_only=True)
class HTTPOptions:
    """What a server and a router have in common.

    api_keys: bearer tokens, any of which gives access. None of them: access is free.
    max_body_bytes, body_seconds: the most bytes of a body, and the most seconds for it to arrive.
    patience: seconds that a stream waits for a client that reads nothing.

    Raises:
      ValueError: an empty key, or a limit that is not above 0.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    body_seconds: float = 60.0
    patience: float = 120.0

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ValueError("an API key must not be empty")
        for name in ("max_body_bytes", "body_seconds", "patience"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(HTTPOptions):
    """The options of a server, beside those of `HTTPOptions`.

    names: names of the model; answers contain the first.
    tool_calls, reasoning: whether chats are parsed for Hermes tool calls and for <think>. None: as the model's chat template has
    it.
    enable_control: whether `/pause`, `/update_weights_from_path` and the other control routes exist.

    Raises:
      ValueError: as `HTTPOptions`; an empty name or no name, or enable_control without a key.
    """

    names: tuple[str, ...]
    tool_calls: bool | None = None
    reasoning: bool | None = None
    enable_control: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.names or not all(self.names):
            raise ValueError(f"names={self.names!r} must hold one name at least, none empty")
        if self.enable_control and not self.api_keys:
            raise ValueError("enable_control=True lets clients swap the weights: give api_keys too")

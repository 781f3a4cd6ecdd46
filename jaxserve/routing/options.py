"""The options of a router. Light, so that a command can offer their defaults without importing an HTTP client."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from jaxserve.routing.health import BackendHealth
from jaxserve.routing.policy import ROUTING_POLICIES
from jaxserve.serving.options import HTTPOptions


@dataclass(frozen=True, kw_only=True)
class RouterOptions(HTTPOptions):
    """The options of a router, beside those of `HTTPOptions`.

    backends: the servers, each "http://host:port".
    policy: one of ROUTING_POLICIES.
    backend_api_key: sent to the servers in place of the client's key. None: the client's key is passed on.
    check_seconds, check_timeout: seconds between two checks of a server, and the most that one check may take.
    max_failures: failures in a row after which a server gets no requests.
    min_successes: successful checks in a row after which it gets requests again.
    enable_control: whether `/pause`, `/update_weights_from_path` and the other control routes exist, and reach all servers.
    min_prefill_bytes: of a prompt's JSON that the decode server has probably not cached, from which a prefill server computes it.
      It means nothing where no server has the role "prefill".

    Raises:
      ValueError: as `HTTPOptions`; an option out of its range, a backend that is no address, or enable_control without a key.
    """

    backends: tuple[str, ...]
    policy: str = "prefix_aware"
    backend_api_key: str | None = None
    check_seconds: float = 1.0
    check_timeout: float = 5.0
    max_failures: int = 3
    min_successes: int = 2
    min_prefill_bytes: int = 2048
    enable_control: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.backends or len(set(self.backends)) != len(self.backends):
            raise ValueError(f"backends={self.backends!r} must name one server at least, none twice")
        for url in self.backends:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or url != f"{parts.scheme}://{parts.netloc}":
                raise ValueError(f"backend {url!r} must be an address such as http://127.0.0.1:8000, without a path")
        if self.policy not in ROUTING_POLICIES:
            raise ValueError(f"policy={self.policy!r} must be one of {', '.join(ROUTING_POLICIES)}")
        if not (self.check_seconds > 0 and self.check_timeout > 0):
            raise ValueError(f"check_seconds={self.check_seconds} and check_timeout={self.check_timeout} must be above 0")
        if self.min_prefill_bytes < 0:
            raise ValueError(f"min_prefill_bytes={self.min_prefill_bytes} must be at least 0")
        if self.enable_control and not self.has_keys:
            raise ValueError("enable_control=True lets clients swap the weights of all servers: give api_keys too")
        BackendHealth(self.max_failures, self.min_successes)  # checks both

"""What a server and a router have in common as commands: where they listen, how they log, and how they stop."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from jaxserve.cli.common import listeners
from jaxserve.serving import logs
from jaxserve.serving.keys import read_keys
from jaxserve.serving.options import OPEN_PATHS, OPENABLE_PATHS, HTTPOptions, with_key_of_environment

# So many more objects, and the garbage collector looks at the new ones, while all threads wait. Python 3.12 says 700, 3.13 2,000.
_YOUNG_OBJECTS = 10_000

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 is every one that this machine has.")
_PORT = flags.DEFINE_integer("port", 8000, "Port; 0 is any free one.", lower_bound=0, upper_bound=65535)
_KEYS = flags.DEFINE_multi_string("api_key", [], "A key that a client must show; may be repeated. Also JAXSERVE_API_KEY.")
_KEYS_FILE = flags.DEFINE_string(
    "api_keys_file", None, "YAML or JSON file of keys with names and limits; read again on SIGHUP (docs/server.md#keys)."
)
_OPEN = flags.DEFINE_list("open_paths", list(OPEN_PATHS), f"Paths that need no key, of {', '.join(OPENABLE_PATHS)}.")
_GRACE = flags.DEFINE_integer("grace", 30, "Seconds that requests have to finish after SIGTERM.", lower_bound=0)
_CERT = flags.DEFINE_string("ssl_certfile", None, "A TLS certificate: serve https.")
_KEY = flags.DEFINE_string("ssl_keyfile", None, "Its private key.")
_CLIENTS = flags.DEFINE_string("ssl_ca_certs", None, "Certificates of authorities that clients' certificates may be of.")
_REQUIRED = flags.DEFINE_integer(
    "ssl_cert_reqs", 0, "A client's certificate: 0 none, 1 optional, 2 required.", lower_bound=0, upper_bound=2
)
_CIPHERS = flags.DEFINE_string("ssl_ciphers", None, "Ciphers of TLS 1.2 and before, as OpenSSL writes them.")
_UDS = flags.DEFINE_string("uds", None, "Listen on a Unix domain socket of this path, and on no port.")
_ACCESS_LOG = flags.DEFINE_bool("access_log", True, "A line a request on stderr; never a prompt.")


@flags.multi_flags_validator(["ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"])
def _tls_can_be_served(given: dict[str, Any]) -> bool:
    """At once, and not when a model has been loaded. The key may be in the certificate's file."""
    certificate, key = given["ssl_certfile"], given["ssl_keyfile"]
    if certificate is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if given[name]:
                raise flags.ValidationError(f"--{name}={given[name]} needs --ssl_certfile")
        return True
    if given["ssl_cert_reqs"] and given["ssl_ca_certs"] is None:
        raise flags.ValidationError(
            f"--ssl_cert_reqs={given['ssl_cert_reqs']} needs --ssl_ca_certs, which clients must be known by"
        )
    try:
        for path in filter(None, (certificate, key, given["ssl_ca_certs"])):
            open(path, "rb").close()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # asks nobody for one
    except OSError as error:  # SSLError among them
        raise flags.ValidationError(f"no TLS with certificate {certificate} and key {key or certificate}: {error}") from error
    return True


_MAX_BODY = flags.DEFINE_integer("max_body_bytes", HTTPOptions.max_body_bytes, "Largest body of a request.", lower_bound=1)
_MAX_HELD = flags.DEFINE_integer(
    "max_held_bytes",
    HTTPOptions.max_held_bytes,
    "Most bytes of the bodies of all requests under way; then 429.",
    lower_bound=1,
)
_MAX_HEADER = flags.DEFINE_integer(
    "max_header_bytes", HTTPOptions.max_header_bytes, "Largest request line and headers of a request, together.", lower_bound=1
)
_MAX_CONNECTIONS = flags.DEFINE_integer(
    "max_connections", HTTPOptions.max_connections, "Connections that may be open; more are answered with 503.", lower_bound=1
)


def shared_options() -> dict[str, Any]:
    """Fields of `HTTPOptions`. Raises ValueError for a file of keys that can't be read."""
    if _KEYS_FILE.value is not None:
        read_keys(_KEYS_FILE.value)  # now, and not when a model has been loaded
    return {
        "api_keys": with_key_of_environment(_KEYS.value),
        "api_keys_file": _KEYS_FILE.value,
        "open_paths": tuple(_OPEN.value),
        "max_body_bytes": _MAX_BODY.value,
        "max_held_bytes": _MAX_HELD.value,
        "max_header_bytes": _MAX_HEADER.value,
        "max_connections": _MAX_CONNECTIONS.value,
    }


def logs_access() -> bool:
    """Whether each request has a line in the log."""
    return _ACCESS_LOG.value


def grace() -> int:
    """Seconds that requests have to finish after SIGTERM."""
    return _GRACE.value


def http_options() -> dict[str, Any]:
    """Where to listen, as Ray Serve's HTTP options. The key may be in the certificate's file."""
    return {"host": _HOST.value, "port": _PORT.value, "ssl_certfile": _CERT.value, "ssl_keyfile": _KEY.value or _CERT.value}


def set_up_logging(*, access_log: bool | None = None) -> None:
    """access_log: whether each request has a line; None: as --access_log says."""
    logs.set_up_logging(access_log=logs_access() if access_log is None else access_log)


def reload_on_hangup(reload: Callable[[], object] = lambda: None) -> None:
    """SIGHUP calls `reload`, where there is a file of keys; else it ends the process, as ever."""
    if _KEYS_FILE.value is not None:
        signal.signal(signal.SIGHUP, lambda *_: reload())


def run(application: Any, options: HTTPOptions, *, date_header: bool = True) -> None:
    """Serves an application, whose `state.keys` is its KeyRing, until SIGTERM or Ctrl-C, then lets what runs finish for --grace
    seconds. On SIGHUP the keys are read again."""
    reload_on_hangup(application.state.keys.reload)
    serve(application, options, uvicorn_options() | {"date_header": date_header})


def uvicorn_options() -> dict[str, Any]:
    """What the flags say to uvicorn."""
    return {
        "host": _HOST.value,
        "port": _PORT.value,
        "timeout_graceful_shutdown": _GRACE.value,
        "ssl_certfile": _CERT.value,
        "ssl_keyfile": _KEY.value,
        "ssl_ca_certs": _CLIENTS.value,
        "ssl_cert_reqs": _REQUIRED.value,
        "ssl_ciphers": _CIPHERS.value,
        "uds": _UDS.value,
    }


def serve(application: Any, options: HTTPOptions, given: dict[str, Any], sockets: Sequence[socket.socket] = ()) -> None:
    """Serves an application until SIGTERM or Ctrl-C. given: uvicorn's options. sockets: that listen already, which other
    processes may have too; none: this process makes its own."""
    import uvicorn

    from jaxserve.serving.connections import bounded

    gc.set_threshold(_YOUNG_OBJECTS)
    # uvicorn raises the signal that stopped it again at its end, to be handled as it was before: done is done.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    ours = {
        "http": bounded(options),
        "ws": "none",
        "log_config": None,
        "access_log": False,
        "backlog": listeners.BACKLOG,
        "server_header": False,
    }
    if not sockets:
        uvicorn.run(application, **ours, **given)
        return
    server = uvicorn.Server(uvicorn.Config(application, **ours, **given))
    server.run(sockets=list(sockets))
    if not server.started:
        sys.exit(3)  # as uvicorn.run does


def bound() -> contextlib.AbstractContextManager[list[socket.socket]]:
    """Sockets where the flags say, as `listeners.bound`."""
    return listeners.bound(_HOST.value, _PORT.value, _UDS.value)


def scheme() -> str:
    """Of the server's URLs."""
    return "http" if _CERT.value is None else "https"

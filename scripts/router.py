"""One address in front of several servers: each request goes where its prefix is cached, or to the least busy.

    python -m scripts.router --backends=http://127.0.0.1:8001,http://127.0.0.1:8002
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

Streams pass through byte for byte. A request that a server did not begin to answer is given to another; an answer that breaks off
ends as it would have without a router. Servers are checked every second. SIGTERM and Ctrl-C stop the router from taking more, and
let what runs finish for --grace seconds. /metrics are its own; /pause, /sleep and their like are refused: send them to each server.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from absl import app, flags

from jaxserve.serving.router_policy import POLICIES

_BACKENDS = flags.DEFINE_list("backends", None, "Addresses of the servers, http://host:port.", required=True)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 is every one that this machine has.")
_PORT = flags.DEFINE_integer("port", 8000, "Port.", lower_bound=0, upper_bound=65535)
_POLICY = flags.DEFINE_enum("policy", "prefix_aware", POLICIES, "How a server is chosen (jaxserve/serving/router_policy.py).")
_KEYS = flags.DEFINE_multi_string("api_key", [], "A key that opens the router; may be repeated. Also JAXSERVE_API_KEY.")
_BACKEND_KEY = flags.DEFINE_string("backend_api_key", None, "What servers get as key; by default what the client sent.")
_CHECK = flags.DEFINE_float("check_seconds", 1.0, "Between two checks of a server.")
_CHECK_TIMEOUT = flags.DEFINE_float("check_timeout", 5.0, "Seconds that a check may take.")
_FAILURES = flags.DEFINE_integer("max_failures", 3, "Failures in a row that take a server out.", lower_bound=1)
_SUCCESSES = flags.DEFINE_integer("min_successes", 2, "Checks in a row that bring it back.", lower_bound=1)
_MAX_BODY = flags.DEFINE_integer("max_body_bytes", 32 * 2**20, "Largest body of a request.", lower_bound=1)
_GRACE = flags.DEFINE_integer("grace", 30, "Seconds that requests have to finish after SIGTERM.", lower_bound=0)
_CERT = flags.DEFINE_string("ssl_certfile", None, "A TLS certificate: serve https.")
_KEY = flags.DEFINE_string("ssl_keyfile", None, "Its private key.")
_ACCESS_LOG = flags.DEFINE_bool("access_log", True, "A line a request on stderr; never a prompt.")


def set_up_logging() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("jaxserve").setLevel(logging.INFO)
    logging.getLogger("jaxserve.access").setLevel(logging.INFO if _ACCESS_LOG.value else logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    import uvicorn

    from jaxserve.serving.router import RouterOptions, make_router

    set_up_logging()
    keys = tuple(_KEYS.value) + ((os.environ["JAXSERVE_API_KEY"],) if os.environ.get("JAXSERVE_API_KEY") else ())
    try:
        options = RouterOptions(
            backends=tuple(url.rstrip("/") for url in _BACKENDS.value),
            policy=_POLICY.value,
            api_keys=keys,
            backend_api_key=_BACKEND_KEY.value,
            check_seconds=_CHECK.value,
            check_timeout=_CHECK_TIMEOUT.value,
            max_failures=_FAILURES.value,
            min_successes=_SUCCESSES.value,
            max_body_bytes=_MAX_BODY.value,
        )
    except ValueError as error:
        sys.exit(f"router: {error}")
    # uvicorn raises the signal that stopped it again at its end, to be handled as it was before: done is done.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    uvicorn.run(
        make_router(options),
        host=_HOST.value,
        port=_PORT.value,
        log_config=None,
        access_log=False,
        backlog=4096,
        timeout_graceful_shutdown=_GRACE.value,
        ssl_certfile=_CERT.value,
        ssl_keyfile=_KEY.value,
        server_header=False,
        date_header=False,  # the servers' own pass through
    )


if __name__ == "__main__":
    app.run(main)

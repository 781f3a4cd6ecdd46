"""One address in front of several servers: each request goes where its prefix is cached, or to the least busy.

    jaxserve router --backends=http://127.0.0.1:8001,http://127.0.0.1:8002
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

Streams pass through byte for byte. A request that a server did not begin to answer is given to another; an answer that breaks off
ends as it would have without a router. Servers are checked every second. SIGTERM and Ctrl-C stop the router from taking more, and
let what runs finish for --grace seconds. /metrics are its own. With --enable_control, /pause, /update_weights_from_path and their
like go to every server; without it they are refused.

Servers say in /health which role they have. Where some have --role=prefill, they compute long prompts for the others.
"""

from __future__ import annotations

from absl import flags

from jaxserve.cli.common import http_server
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.routing.options import RouterOptions
from jaxserve.routing.policy import ROUTING_POLICIES

_BACKENDS = flags.DEFINE_list("backends", None, "Addresses of the servers, http://host:port.", required=True)
_POLICY = flags.DEFINE_enum(
    "policy", RouterOptions.policy, ROUTING_POLICIES, "How a server is chosen (jaxserve/routing/policy.py)."
)
_BACKEND_KEY = flags.DEFINE_string("backend_api_key", None, "What servers get as key; by default what the client sent.")
_CHECK = flags.DEFINE_float("check_seconds", RouterOptions.check_seconds, "Between two checks of a server.")
_CHECK_TIMEOUT = flags.DEFINE_float("check_timeout", RouterOptions.check_timeout, "Seconds that a check may take.")
_FAILURES = flags.DEFINE_integer(
    "max_failures", RouterOptions.max_failures, "Failures in a row that take a server out.", lower_bound=1
)
_SUCCESSES = flags.DEFINE_integer(
    "min_successes", RouterOptions.min_successes, "Checks in a row that bring it back.", lower_bound=1
)
_PREFILL = flags.DEFINE_integer(
    "min_prefill_bytes",
    RouterOptions.min_prefill_bytes,
    "Bytes of a prompt that its server has not cached, from which a prefill server computes it.",
    lower_bound=0,
)
_CONTROL = flags.DEFINE_bool(
    "enable_control", False, "Pass /pause, /update_weights_from_path and their like on to every server; needs a key."
)
flags.adopt_module_key_flags(http_server)


def main() -> None:
    from jaxserve.routing.app import make_router

    http_server.set_up_logging()
    with refuse_bad_input():
        options = RouterOptions(
            backends=tuple(url.rstrip("/") for url in _BACKENDS.value),
            policy=_POLICY.value,
            **http_server.shared_options(),
            backend_api_key=_BACKEND_KEY.value,
            check_seconds=_CHECK.value,
            check_timeout=_CHECK_TIMEOUT.value,
            max_failures=_FAILURES.value,
            min_successes=_SUCCESSES.value,
            min_prefill_bytes=_PREFILL.value,
            enable_control=_CONTROL.value,
        )
        router = make_router(options)
    http_server.run(router, options, date_header=False)  # the servers' own pass through


if __name__ == "__main__":
    run_command(main)

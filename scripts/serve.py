"""Serves a model over HTTP with OpenAI's API, and a page to try it at http://127.0.0.1:8000/.

    python -m scripts.serve --model=FOLDER
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

It listens on this machine alone unless --host says otherwise; give --api_key (or JAXSERVE_API_KEY) before it does. SIGTERM and
Ctrl-C stop it from taking more, and let what runs finish for --grace seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from absl import app, flags

from scripts.engine_flags import define_engine_flags, engine_options

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 is every one that this machine has.")
_PORT = flags.DEFINE_integer("port", 8000, "Port; 0 is any free one.", lower_bound=0, upper_bound=65535)
_NAMES = flags.DEFINE_list("served_model_name", [], "What clients call the model; by default as --model does.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Where the tokenizer lies, if not beside the model.")
_KEYS = flags.DEFINE_multi_string("api_key", [], "A key that opens the server; may be repeated. Also JAXSERVE_API_KEY.")
_MAX_WAITING = flags.DEFINE_integer("max_waiting", 1024, "Samples that may wait; more are refused with 429.", lower_bound=0)
_TIMEOUT = flags.DEFINE_float("request_timeout", None, "Seconds that a request may take; by default as long as it likes.")
_GRACE = flags.DEFINE_integer("grace", 30, "Seconds that requests have to finish after SIGTERM.", lower_bound=0)
_MAX_BODY = flags.DEFINE_integer("max_body_bytes", 32 * 2**20, "Largest body of a request.", lower_bound=1)
_MAX_FAILURES = flags.DEFINE_integer("max_failures", 3, "Steps that may fail in a row before /health is unhealthy.", lower_bound=1)
_TOOLS = flags.DEFINE_enum("tool_call_parser", "auto", ["auto", "hermes", "none"], "auto: as the chat template has it.")
_REASONING = flags.DEFINE_enum("reasoning_parser", "auto", ["auto", "qwen3", "none"], "auto: as the chat template has it.")
_CONTROL = flags.DEFINE_bool("enable_control", False, "Add /pause, /resume, /sleep, /update_weights_from_path, ...; needs a key.")
_CERT = flags.DEFINE_string("ssl_certfile", None, "A TLS certificate: serve https.")
_KEY = flags.DEFINE_string("ssl_keyfile", None, "Its private key.")
_ACCESS_LOG = flags.DEFINE_bool("access_log", True, "A line a request on stderr; never a prompt.")
define_engine_flags()


def chosen(value: str) -> bool | None:
    """What a parser's flag says: on, off, or as the template has it."""
    return None if value == "auto" else value != "none"


def set_up_logging() -> None:
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("jaxserve").setLevel(logging.INFO)
    logging.getLogger("jaxserve.access").setLevel(logging.INFO if _ACCESS_LOG.value else logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)


def make_application() -> Any:
    from jaxserve import LLM
    from jaxserve.serving.app import ServerOptions, make_app
    from jaxserve.serving.async_llm import AsyncLLM

    keys = tuple(_KEYS.value) + ((os.environ["JAXSERVE_API_KEY"],) if os.environ.get("JAXSERVE_API_KEY") else ())
    options = ServerOptions(
        names=tuple(_NAMES.value or [flags.FLAGS.model]),
        api_keys=keys,
        tool_calls=chosen(_TOOLS.value),
        reasoning=chosen(_REASONING.value),
        enable_control=_CONTROL.value,
        max_body_bytes=_MAX_BODY.value,
    )
    llm = LLM(flags.FLAGS.model, _TOKENIZER.value, **engine_options())
    engine = AsyncLLM(llm, max_waiting=_MAX_WAITING.value, request_timeout=_TIMEOUT.value, max_failures=_MAX_FAILURES.value)
    return make_app(engine, options)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if "warm_up" not in flags.FLAGS or not flags.FLAGS["warm_up"].present:
        flags.FLAGS.warm_up = "all"  # no request should wait for a compiler
    import uvicorn

    set_up_logging()
    try:
        application = make_application()
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(f"serve: {error}")
    # uvicorn raises the signal that stopped it again at its end, to be handled as it was before: done is done.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    uvicorn.run(
        application,
        host=_HOST.value,
        port=_PORT.value,
        log_config=None,
        access_log=False,
        backlog=4096,
        timeout_graceful_shutdown=_GRACE.value,
        ssl_certfile=_CERT.value,
        ssl_keyfile=_KEY.value,
        server_header=False,
    )


if __name__ == "__main__":
    app.run(main)

"""Serves a model over HTTP with OpenAI's API, and a page to try it at http://127.0.0.1:8000/.

    jaxserve serve --model=FOLDER
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

    jaxserve serve --model=FOLDER --ray --replicas=2       # on Ray, behind its proxy: pip install 'jaxserve[ray]'

It listens on this machine alone unless --host says otherwise; give --api_key (or JAXSERVE_API_KEY) before it does. SIGTERM and
Ctrl-C stop it from taking more, and let what runs finish for --grace seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from socket import socket
from typing import TYPE_CHECKING, Any, cast

from absl import app, flags

from jaxserve.cli.common import http_server, server_flags
from jaxserve.cli.common.command import refuse_bad_input, run_command, without_collecting
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.fleet import on_ray
from jaxserve.cli.common.hosts import end_when_a_host_is_lost, lead_or_follow
from jaxserve.cli.common.parser_flags import parsers
from jaxserve.cli.common.ray_server import fleet_of_flags, serve_on_ray
from jaxserve.serving.options import (
    MAX_FAILURES,
    MAX_STORED_BYTES,
    MAX_STORED_RESPONSES,
    MAX_WAITING,
    ROLES,
    ModelOptions,
    Role,
    ServerOptions,
    check_can_share,
    check_role_has_store,
)

if TYPE_CHECKING:
    from jaxserve import LLM
    from jaxserve.ray.fleet import FleetOptions

_NAMES = flags.DEFINE_list("served_model_name", [], "What clients call the model; by default as --model does.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Where the tokenizer lies, if not beside the model.")
_SKIP_TOKENIZER = flags.DEFINE_bool("skip_tokenizer_init", False, "Use no tokenizer: prompts are token ids, as are answers.")
_MAX_WAITING = flags.DEFINE_integer("max_waiting", MAX_WAITING, "Samples that may wait; more are refused with 429.", lower_bound=0)
_TIMEOUT = flags.DEFINE_float("request_timeout", None, "Seconds that a request may take; by default as long as it likes.")
_MAX_FAILURES = flags.DEFINE_integer(
    "max_failures", MAX_FAILURES, "Steps that may fail in a row before /health is unhealthy.", lower_bound=1
)
_CONTROL = flags.DEFINE_bool("enable_control", False, "Add /pause, /resume, /sleep, /update_weights_from_path, ...; needs a key.")
_STORE = flags.DEFINE_string("response_store", None, "SQLite file that keeps responses of /v1/responses; by default memory does.")
_STORED = flags.DEFINE_integer("max_stored_responses", MAX_STORED_RESPONSES, "Most responses that are kept.", lower_bound=0)
_STORED_BYTES = flags.DEFINE_integer("max_stored_bytes", MAX_STORED_BYTES, "Most bytes of responses that are kept.", lower_bound=0)
_PROCESSES = flags.DEFINE_integer(
    "api_server_count", 1, "Processes that speak HTTP; with more than 1 the engine has a process of its own.", lower_bound=1
)
_ROLE = flags.DEFINE_enum(
    "role", None, ROLES, "prefill: only compute prompts for decode servers. decode: load those. Needs --kv_store=disk:..."
)
flags.adopt_module_key_flags(http_server)
flags.adopt_module_key_flags(server_flags)
define_engine_flags(warm_up="background")  # no request should wait for a compiler, nor the port for all programs


def server_options() -> ServerOptions:
    """What the flags say of the HTTP application, checked before anything is loaded."""
    check_role_has_store(_ROLE.value, engine_options().get("kv_store"))
    return ServerOptions(
        names=tuple(_NAMES.value or [flags.FLAGS.model]),
        root=flags.FLAGS.model,
        **http_server.shared_options(),
        **parsers(),
        enable_control=_CONTROL.value,
        **server_flags.answer_options(),
        response_store=_STORE.value,
        max_stored_responses=_STORED.value,
        max_stored_bytes=_STORED_BYTES.value,
        role=cast("Role | None", _ROLE.value),
    )


def model_options() -> dict[str, Any]:
    """What the flags say of the model and its engine: fields of `ModelOptions`."""
    return {
        "model": flags.FLAGS.model,
        "tokenizer": _TOKENIZER.value,
        "skip_tokenizer_init": _SKIP_TOKENIZER.value,
        "engine": engine_options(),
        **server_flags.model_options(),
        "max_waiting": _MAX_WAITING.value,
        "request_timeout": _TIMEOUT.value,
        "max_failures": _MAX_FAILURES.value,
    }


def load(model: ModelOptions, prepare: Callable[[], object] = lambda: None) -> LLM:
    """The model, on the process that has the engine. prepare: called before, on the process that serves alone."""
    import jaxserve.serving.app  # noqa: F401 (what is not installed is said before a model is loaded)
    from jaxserve.serving.launch import load_llm

    hosts = lead_or_follow(model.model, dict(model.engine))
    prepare()
    llm = load_llm(model, hosts)
    end_when_a_host_is_lost(llm, hosts)
    return llm


def make_application(llm: LLM, model: ModelOptions, options: ServerOptions) -> Any:
    from jaxserve.serving.app import make_app
    from jaxserve.serving.launch import make_engine

    return make_app(make_engine(llm, model), options)


def run_processes(llm: LLM, model: ModelOptions, options: ServerOptions, listeners: Sequence[socket]) -> int:
    """Serves with several API processes on sockets of `http_server.bound`. Returns the exit code."""
    from jaxserve.cli.common import api_processes
    from jaxserve.cli.common.listeners import listen
    from jaxserve.serving.launch import default_sampling_params
    from jaxserve.serving.metrics import make_metrics
    from jaxserve.serving.pipes import EngineHub

    hub = EngineHub(
        llm,
        max_waiting=model.max_waiting,
        max_failures=model.max_failures,
        make_metrics=partial(make_metrics, llm.engine.config, options),
    )
    start = api_processes.Start(
        api_processes.describe(llm),
        api_processes.take_apart(llm.tokenizer),
        default_sampling_params(llm, model),
        {name: getattr(model, name) for name in ("max_waiting", "request_timeout", "max_new_tokens")},
        options,
        hub.stats,
        http_server.uvicorn_options(),
        http_server.logs_access(),
    )
    with refuse_bad_input():
        listen(listeners)
    return api_processes.run(hub, start, _PROCESSES.value, listeners, grace=http_server.grace(), scheme=http_server.scheme())


def fleet() -> FleetOptions:
    """What the flags say of replicas on Ray. UsageError: what can't be had there."""
    if _PROCESSES.value > 1:
        raise app.UsageError("--api_server_count is of one server; on Ray give --replicas")
    with refuse_bad_input():
        return fleet_of_flags(**model_options(), server=server_options())


def main() -> int | None:
    http_server.set_up_logging()
    if on_ray():
        serve_on_ray(fleet())
        return None
    with ExitStack() as stack:
        listeners = list[socket]()

        def bind() -> None:
            if _PROCESSES.value > 1:
                listeners.extend(stack.enter_context(http_server.bound()))

        with refuse_bad_input(), without_collecting():
            options, model = server_options(), ModelOptions(**model_options())
            if _PROCESSES.value > 1:
                check_can_share(options)
            http_server.reload_on_hangup()  # the model is being loaded, and the file is read after that
            llm = load(model, bind)
            application = make_application(llm, model, options) if _PROCESSES.value == 1 else None
        if application is None:
            return run_processes(llm, model, options, listeners)
        http_server.run(application, options)
    return None


if __name__ == "__main__":
    run_command(main)

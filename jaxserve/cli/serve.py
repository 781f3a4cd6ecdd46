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
from jaxserve.cli.common.ray_server import serve_on_ray
from jaxserve.serving.options import (
    MAX_FAILURES,
    MAX_STORED_BYTES,
    MAX_STORED_RESPONSES,
    MAX_WAITING,
    ROLES,
    Role,
    ServerOptions,
    check_can_share,
    check_role_has_store,
)

if TYPE_CHECKING:
    from jaxserve import LLM

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


def load(prepare: Callable[[], object] = lambda: None) -> LLM:
    """The model that the flags name, with its tokenizer and the chat template that they ask for. prepare: called before, on the
    process that serves alone."""
    template = server_flags.chat_template()
    import jaxserve.serving.app  # noqa: F401 (what is not installed is said before a model is loaded)
    from jaxserve import LLM
    from jaxserve.models.loading import NoTokenizerError

    try:
        hosts = lead_or_follow(flags.FLAGS.model, engine_options())
        prepare()
        llm = LLM(flags.FLAGS.model, _TOKENIZER.value, skip_tokenizer_init=_SKIP_TOKENIZER.value, **engine_options(), hosts=hosts)
    except NoTokenizerError as error:
        raise ValueError(f"{error.__cause__} (--tokenizer says where one lies, --skip_tokenizer_init does without)") from error
    end_when_a_host_is_lost(llm, hosts)
    if template is not None:
        llm.get_tokenizer().chat_templates["default"] = template
    return llm


def make_application(llm: LLM, options: ServerOptions) -> Any:
    from jaxserve.serving.app import make_app
    from jaxserve.serving.async_llm import AsyncLLM

    engine = AsyncLLM(
        llm,
        max_waiting=_MAX_WAITING.value,
        request_timeout=_TIMEOUT.value,
        max_failures=_MAX_FAILURES.value,
        default_sampling_params=server_flags.default_sampling_params(llm.get_default_sampling_params),
    )
    return make_app(engine, options)


def run_processes(llm: LLM, options: ServerOptions, listeners: Sequence[socket]) -> int:
    """Serves with several API processes on sockets of `http_server.bound`. Returns the exit code."""
    from jaxserve.cli.common import api_processes
    from jaxserve.cli.common.listeners import listen
    from jaxserve.serving.metrics import make_metrics
    from jaxserve.serving.pipes import EngineHub

    hub = EngineHub(
        llm,
        max_waiting=_MAX_WAITING.value,
        max_failures=_MAX_FAILURES.value,
        make_metrics=partial(make_metrics, llm.engine.config, options),
    )
    start = api_processes.Start(
        api_processes.describe(llm),
        api_processes.take_apart(llm.tokenizer),
        server_flags.default_sampling_params(llm.get_default_sampling_params),
        {"max_waiting": _MAX_WAITING.value, "request_timeout": _TIMEOUT.value},
        options,
        hub.stats,
        http_server.uvicorn_options(),
        http_server.logs_access(),
    )
    with refuse_bad_input():
        listen(listeners)
    return api_processes.run(hub, start, _PROCESSES.value, listeners, grace=http_server.grace(), scheme=http_server.scheme())


def main() -> int | None:
    http_server.set_up_logging()
    if on_ray():
        if _PROCESSES.value > 1:
            raise app.UsageError("--api_server_count is of one server; on Ray give --replicas")
        with refuse_bad_input():
            server = server_options()
        serve_on_ray(
            model=flags.FLAGS.model,
            tokenizer=_TOKENIZER.value,
            engine=engine_options(),
            server=server,
            max_waiting=_MAX_WAITING.value,
            request_timeout=_TIMEOUT.value,
            max_failures=_MAX_FAILURES.value,
        )
        return None
    with ExitStack() as stack:
        listeners = list[socket]()

        def bind() -> None:
            if _PROCESSES.value > 1:
                listeners.extend(stack.enter_context(http_server.bound()))

        with refuse_bad_input(), without_collecting():
            options = server_options()
            if _PROCESSES.value > 1:
                check_can_share(options)
            http_server.reload_on_hangup()  # the model is being loaded, and the file is read after that
            llm = load(bind)
            application = make_application(llm, options) if _PROCESSES.value == 1 else None
        if application is None:
            return run_processes(llm, options, listeners)
        http_server.run(application, options)
    return None


if __name__ == "__main__":
    run_command(main)

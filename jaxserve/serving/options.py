"""The options of a server and of its model, and those that a router has in common with it.

Of the standard library alone, so that a command can offer their defaults without importing a server.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from jaxserve.kv_store.spec import outlives_process

Role = Literal["prefill", "decode"]
ROLES: tuple[str, ...] = get_args(Role)
MAX_WAITING = 1024  # samples that may wait beyond an engine's max_num_seqs
MAX_STORED_RESPONSES, MAX_STORED_BYTES = 1000, 64 * 2**20  # of responses that are kept for later requests
# Paths that need no key by default, and those that may be among them.
OPEN_PATHS: tuple[str, ...] = ("/", "/health", "/ping", "/metrics", "/version")
OPENABLE_PATHS: tuple[str, ...] = (*OPEN_PATHS, "/openapi.json", "/v1/models", "/load")
# Routes that change one server, or tell what it is set to; they exist with enable_control.
CONTROL_PATHS: tuple[str, ...] = (
    *("/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/update_weights_from_path"),
    *("/update_weight_version", "/weight_info"),
    *("/sleep", "/wake_up", "/is_sleeping", "/server_info"),
)
# Options of connections, which a server has of its own listener alone.
LISTENER_OPTIONS: tuple[str, ...] = ("max_connections", "max_header_bytes", "header_seconds")
MAX_FAILURES = 3  # steps in a row that may raise before an engine counts as broken
# What override_generation_config may hold.
SAMPLING: tuple[str, ...] = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "max_new_tokens",
)
GENERATION_CONFIGS: tuple[str, ...] = ("auto", "vllm")
SEVERAL: dict[str, str] = {
    "api_server_count": "API processes",
    "replicas": "replicas",
}  # of what there may be several, by the option that says it
API_KEY = "JAXSERVE_API_KEY"  # in the environment


@dataclass(frozen=True, kw_only=True)
class HTTPOptions:
    """What a server and a router have in common.

    api_keys: bearer tokens, any of which gives access. None of them, and no api_keys_file: access is free.
    api_keys_file: a file of keys with names and limits, as keys.read_keys takes it.
    open_paths: paths that need no key, of OPENABLE_PATHS.
    max_connections: connections that may be open; more are answered with 503.
    max_header_bytes, header_seconds: the most bytes of a request line and its headers, and the most seconds for them to arrive.
    max_body_bytes, body_seconds: the most bytes of a body, and the most seconds for it to arrive.
    max_held_bytes: the most bytes of the bodies of all requests under way; more are answered with 429.
    patience: seconds that an answer waits for a client that reads nothing of it.

    Raises:
      ValueError: an empty key, an open path that is none of those, or a limit that is not above 0, or below that of one body.
    """

    api_keys: tuple[str, ...] = ()
    api_keys_file: str | None = None
    open_paths: tuple[str, ...] = OPEN_PATHS
    max_connections: int = 4096
    max_header_bytes: int = 64 * 2**10
    header_seconds: float = 20.0
    max_body_bytes: int = 32 * 2**20
    body_seconds: float = 60.0
    max_held_bytes: int = 2**30
    patience: float = 120.0

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ValueError("an API key must not be empty")
        for path in self.open_paths:
            if path not in OPENABLE_PATHS:
                raise ValueError(f"open_paths: {path!r} can't be without a key, only {', '.join(OPENABLE_PATHS)}")
        limits = ("max_connections", "max_header_bytes", "header_seconds", "max_body_bytes", "body_seconds", "patience")
        for name in limits:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0")
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError(f"max_held_bytes={self.max_held_bytes} must be at least max_body_bytes={self.max_body_bytes}")

    @property
    def has_keys(self) -> bool:
        """Whether clients must show a key."""
        return bool(self.api_keys) or self.api_keys_file is not None


@dataclass(frozen=True, kw_only=True)
class CrossOrigin:
    """Which pages of other origins a browser lets use the server (CORS). Names, and "*" for any, as Starlette's CORSMiddleware."""

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerOptions(HTTPOptions):
    """The options of a server, beside those of `HTTPOptions`.

    names: names of the model; answers contain the first.
    root: what the model was loaded from; by default the first name.
    tool_call_parser, reasoning_parser: how chats are parsed for tool calls and for reasoning: a name of notations.py's tables,
    "none", or "auto": as the model's chat template has it.
    enable_control: whether `/pause`, `/update_weights_from_path` and the other control routes exist.
    response_store: a SQLite file that keeps the responses of `/v1/responses`. None: they are kept in memory.
    max_stored_responses, max_stored_bytes: the most that are kept; the least recently used go first.

    Of answers, as vLLM's flags of these names:
    enable_prompt_tokens_details: the usage has prompt_tokens_details.
    enable_force_include_usage: every stream has the usage, so far in each chunk and in a last one.
    return_tokens_as_token_ids: as if every request asked for that.
    response_role: of messages that begin a turn.
    enable_request_id_headers: answers have X-Request-Id.
    sse_keep_alive_interval: seconds of silence after which a stream has a comment; 0: never.

    Of chats: default_chat_template_kwargs: variables of the chat template where a request gives none of that name.
    trust_request_chat_template: a request may bring its own template.

    enable_log_requests: a line of the log for each prompt, with at most max_log_len of its characters and token ids (None: all).

    vllm_metric_names: metrics have the prefix `vllm:`, so that dashboards made for vLLM work.

    root_path: the path under which a proxy shows the server; requests may have it before their own path or not.
    middleware: "module.name" of ASGI middleware classes, or of functions (request, call_next), around the whole application, the
    first outermost. cross_origin: None: no page of another origin.
    otlp_endpoint: the URL of an OpenTelemetry collector that gets a span of each request. None: there are no traces.
    role: "prefill": computes prompts for decode servers alone. "decode": loads what those have stored. None: neither.

    Raises:
      ValueError: as `HTTPOptions`; an empty name or no name, a root_path that begins with no slash, an empty role, or
        enable_control without a key.
    """

    names: tuple[str, ...]
    root: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_control: bool = False
    response_store: str | None = None
    max_stored_responses: int = MAX_STORED_RESPONSES
    max_stored_bytes: int = MAX_STORED_BYTES
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    response_role: str = "assistant"
    enable_request_id_headers: bool = False
    sse_keep_alive_interval: float = 0.0
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    vllm_metric_names: bool = False
    enable_log_requests: bool = False
    max_log_len: int | None = None
    root_path: str = ""
    middleware: tuple[str, ...] = ()
    cross_origin: CrossOrigin | None = None
    role: Role | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.names or not all(self.names):
            raise ValueError(f"names={self.names!r} must hold one name at least, none empty")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ValueError(f"max_log_len={self.max_log_len} must be at least 0, or None")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path={self.root_path!r} must begin with a slash and end with none, as /models/one")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint={self.otlp_endpoint!r} must be a URL, such as http://127.0.0.1:4318")
        if not 0 <= self.sse_keep_alive_interval < math.inf:
            raise ValueError(f"sse_keep_alive_interval={self.sse_keep_alive_interval} must be seconds, or 0 for no comments")
        if not self.response_role:
            raise ValueError("response_role must not be empty")
        for name in ("max_stored_responses", "max_stored_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 or more")
        if self.enable_control and not self.has_keys:
            raise ValueError("enable_control=True lets clients swap the weights: give api_keys too")
        if self.role is not None and self.role not in ROLES:
            raise ValueError(f"role={self.role!r} must be one of {', '.join(ROLES)}")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a server and how its engine is asked: plain values, which may be sent to another process.

    model, tokenizer, skip_tokenizer_init: as `LLM`'s. engine: options of `LLM`.
    chat_template: Jinja source in place of the tokenizer's template.
    generation_config: whose sampling parameters a request changes: "auto": the checkpoint's; "vllm": vLLM's defaults.
    override_generation_config: sampling parameters over those, of SAMPLING. Its max_new_tokens is also the most that any request
    gets.
    max_waiting, request_timeout, max_failures: as `AsyncLLM`'s.

    Raises:
      ValueError: a generation_config that there is not, a sampling parameter that there is not or out of its range, a
        chat_template without a tokenizer, or a limit out of its range.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    max_waiting: int = MAX_WAITING
    request_timeout: float | None = None
    max_failures: int = MAX_FAILURES

    def __post_init__(self) -> None:
        from jaxserve.sampling_params import SamplingParams

        check_limits(self.max_waiting, self.request_timeout, self.max_failures)
        if self.generation_config not in GENERATION_CONFIGS:
            raise ValueError(f"generation_config={self.generation_config!r} must be one of {', '.join(GENERATION_CONFIGS)}")
        if self.chat_template is not None and self.skip_tokenizer_init:
            raise ValueError("chat_template needs a tokenizer: leave it or skip_tokenizer_init out")
        if not isinstance(self.override_generation_config, Mapping):
            raise ValueError(f"override_generation_config={self.override_generation_config!r} must be names and values")
        if unknown := sorted(self.override_generation_config.keys() - set(SAMPLING)):
            raise ValueError(f"override_generation_config: {', '.join(unknown)} is not taken; it may hold {', '.join(SAMPLING)}")
        try:
            SamplingParams(**self.sampling_overrides)
        except ValueError as error:
            raise ValueError(f"override_generation_config: {str(error).replace('max_tokens', 'max_new_tokens')}") from None

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens of any output, where override_generation_config says it."""
        return self.override_generation_config.get("max_new_tokens")

    @property
    def sampling_overrides(self) -> dict[str, Any]:
        """override_generation_config by the names of SamplingParams."""
        return {"max_tokens" if name == "max_new_tokens" else name: x for name, x in self.override_generation_config.items()}


def check_limits(max_waiting: int, request_timeout: float | None, max_failures: int) -> None:
    """Raises ValueError for a limit of `AsyncLLM`'s that is out of its range."""
    if request_timeout is not None and not request_timeout > 0:
        raise ValueError(f"{request_timeout=} must be a number of seconds > 0, or None")
    if max_waiting < 0 or max_failures < 1:
        raise ValueError(f"{max_waiting=} must be at least 0 and {max_failures=} at least 1")


def read_chat_template(given: str) -> str:
    """The Jinja source that is given, or that is in the file that is. Raises ValueError for a file that is not there."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template={given!r} is neither Jinja source nor a file of it: {error}") from None


def with_key_of_environment(keys: Sequence[str]) -> tuple[str, ...]:
    """These API keys, and the one that the environment has as API_KEY."""
    own = os.environ.get(API_KEY)
    return (*keys, own) if own else tuple(keys)


def check_role_has_store(role: str | None, kv_store: str | None) -> None:
    """Raises ValueError for a role without a store that servers of the other role can share."""
    if role is not None and (kv_store is None or not outlives_process(kv_store)):
        raise ValueError(
            f"role={role!r} with kv_store={kv_store!r}: prefill and decode servers need a store that they share; "
            "give all of them kv_store='disk:FOLDER:SIZE' with one folder, or nixl:HOST:PORT+HOST:PORT:SIZE with one another's "
            "addresses"
        )


def needs_one(count: str) -> str:
    """What is said of a route or field that needs whatever `count`, a name of SEVERAL, says that there are several of to be one."""
    return f"can't be had of several {SEVERAL[count]}: start the server with --{count}=1"


def check_can_share(options: ServerOptions, count: str = "api_server_count", *, asks_all: bool = False) -> None:
    """Raises ValueError for an option that needs one process: what it keeps would be another in each. count: the option that says
    how many there are. asks_all: whether a control call is passed on to all of them."""
    asked = {
        "enable_control": options.enable_control and not asks_all,
        "api_keys_file": options.api_keys_file is not None,
        "response_store": options.response_store is not None,
        "role": options.role is not None,
    }
    if wrong := [name for name, is_asked in asked.items() if is_asked]:
        raise ValueError(f"{', '.join(wrong)}: not with several {SEVERAL[count]}; leave it out, or give {count}=1")

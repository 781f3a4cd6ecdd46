"""Flags of `jaxserve serve` that say what its answers are like and who may ask, under vLLM's names.

Owns these flags, and reads those that name files or hold JSON.
"""

from __future__ import annotations

import json
from typing import Any

from absl import flags

from jaxserve.serving.options import GENERATION_CONFIGS, CrossOrigin, read_chat_template

_DETAILS = flags.DEFINE_bool("enable_prompt_tokens_details", False, "The usage says how many tokens of the prompt were cached.")
_USAGE = flags.DEFINE_bool("enable_force_include_usage", False, "Every stream has the usage, in each chunk and in a last one.")
_AS_IDS = flags.DEFINE_bool("return_tokens_as_token_ids", False, 'Log-probabilities have "token_id:N" in place of tokens.')
_ROLE = flags.DEFINE_string("response_role", "assistant", "The role of messages that begin a turn.")
_ID_HEADERS = flags.DEFINE_bool("enable_request_id_headers", False, "Answers have the request's id as X-Request-Id.")
_KEEP_ALIVE = flags.DEFINE_float(
    "sse_keep_alive_interval",
    0.0,
    "Seconds without an event after which a stream has a comment; 0: never.",
    lower_bound=0,
)
_TEMPLATE = flags.DEFINE_string("chat_template", None, "A file of a chat template, or its Jinja source, for the tokenizer's.")
_KWARGS = flags.DEFINE_string("default_chat_template_kwargs", None, "Variables of the chat template, as JSON; a request's win.")
_TRUST = flags.DEFINE_bool("trust_request_chat_template", False, "A request may bring a chat template.")
_OVERRIDE = flags.DEFINE_string(
    "override_generation_config",
    None,
    "Default sampling parameters, as JSON, over those of generation_config.json; max_new_tokens is also the most of any request.",
)
_GENERATION = flags.DEFINE_enum(
    "generation_config", "auto", GENERATION_CONFIGS, "Default sampling: of the checkpoint (auto), or vLLM's own whatever that says."
)
_VLLM_METRICS = flags.DEFINE_bool("vllm_metric_names", False, "Metrics are vllm:..., as dashboards made for vLLM expect.")
_LOG = flags.DEFINE_bool("enable_log_requests", False, "Log each prompt and its sampling parameters.")
_LOG_LEN = flags.DEFINE_integer("max_log_len", None, "Most characters and token ids of a prompt in the log.", lower_bound=0)
_OTLP = flags.DEFINE_string(
    "otlp_endpoint",
    None,
    "The URL of an OpenTelemetry collector for traces, such as http://127.0.0.1:4318 (OTLP, HTTP).",
)
_ROOT = flags.DEFINE_string("root_path", "", "The path under which a proxy shows the server, such as /models/one.")
_MIDDLEWARE = flags.DEFINE_multi_string("middleware", [], "module.name of an ASGI middleware, or of an async function; repeated.")
_ORIGINS = flags.DEFINE_string("allowed_origins", None, 'Origins of pages that may use the server, as a JSON list; ["*"]: any.')
_METHODS = flags.DEFINE_string("allowed_methods", '["*"]', "Methods that such pages may use, as a JSON list.")
_HEADERS = flags.DEFINE_string("allowed_headers", '["*"]', "Headers that such pages may send, as a JSON list.")
_CREDENTIALS = flags.DEFINE_bool("allow_credentials", False, "Such pages may send cookies and keys that the browser holds.")


def _json(flag: flags.FlagHolder[Any], kind: type, means: str) -> Any:
    """The value of a flag that holds JSON. ValueError where it is none, or of another kind."""
    try:
        value = json.loads(flag.value)
    except ValueError as error:
        raise ValueError(f"--{flag.name}={flag.value} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"--{flag.name}={flag.value} must be {means}")
    return value


def answer_options() -> dict[str, Any]:
    """Fields of `ServerOptions`. Raises ValueError for a value that can't be read."""
    kwargs = {} if _KWARGS.value is None else _json(_KWARGS, dict, "a JSON object of template variables")
    return {
        "enable_prompt_tokens_details": _DETAILS.value,
        "enable_force_include_usage": _USAGE.value,
        "return_tokens_as_token_ids": _AS_IDS.value,
        "response_role": _ROLE.value,
        "enable_request_id_headers": _ID_HEADERS.value,
        "sse_keep_alive_interval": _KEEP_ALIVE.value,
        "default_chat_template_kwargs": kwargs,
        "trust_request_chat_template": _TRUST.value,
        "vllm_metric_names": _VLLM_METRICS.value,
        "enable_log_requests": _LOG.value,
        "max_log_len": _LOG_LEN.value,
        "root_path": _ROOT.value,
        "middleware": tuple(_MIDDLEWARE.value),
        "cross_origin": _cross_origin(),
        "otlp_endpoint": _OTLP.value,
    }


def _cross_origin() -> CrossOrigin | None:
    if _ORIGINS.value is None:
        for flag in (_METHODS, _HEADERS, _CREDENTIALS):
            if flag.value != flag.default:
                raise ValueError(f"--{flag.name} is about pages of other origins: give --allowed_origins too")
        return None
    origins, methods, headers = (tuple(_json(flag, list, "a JSON list of texts")) for flag in (_ORIGINS, _METHODS, _HEADERS))
    return CrossOrigin(origins=origins, methods=methods, headers=headers, credentials=_CREDENTIALS.value)


def model_options() -> dict[str, Any]:
    """Fields of `ModelOptions`. Raises ValueError for a value that can't be read."""
    return {
        "chat_template": None if _TEMPLATE.value is None else read_chat_template(_TEMPLATE.value),
        "generation_config": _GENERATION.value,
        "override_generation_config": {}
        if _OVERRIDE.value is None
        else _json(_OVERRIDE, dict, "a JSON object of sampling parameters"),
    }

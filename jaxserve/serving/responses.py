"""What clients get: OpenAI's objects as msgspec structs, which encode in a microsecond and describe themselves for OpenAPI.

Owns the shapes of answers and of stream chunks. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from jaxserve.outputs import WeightVersionSpan

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def event(chunk: Struct) -> bytes:
    """A chunk as a server-sent event."""
    return b"data: " + encode(chunk) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Error(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct):
    error: Error


class PromptTokensDetails(Struct):
    """cached_tokens: whose KV was found; created_cache_tokens: whose KV was computed, and is found by the next request."""

    cached_tokens: int
    created_cache_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None  # where the server was told to give them
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of chats of models that reason


class PlainLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PlainLogprob] | None] | None  # token id -> Logprob, for each token of the prompt but the first


WeightVersions = list[WeightVersionSpan] | UnsetType  # of a choice that has ended, of a server whose weights may change


# ---- completions


class CompletionLogprobs(Struct):
    """Parallel lists, one entry a token; text_offset counts characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    weight_versions: WeightVersions = UNSET


class Completion(Struct, kw_only=True):
    """An answer, or a chunk of one: `usage` is null in chunks unless asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET


# ---- chats


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class CalledFunction(Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CalledTool(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class CalledToolDelta(Struct, omit_defaults=True):
    """Part of a tool call: the first has id, type and name, the others go on with its arguments."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(Struct):
    content: str | None
    role: str = "assistant"
    reasoning: str | None = None  # vLLM's name of it now, and the older one
    reasoning_content: str | None | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    refusal: None = None  # OpenAI's clients read it


class MessageDelta(Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledToolDelta] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "abort", "error", "repetition"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: WeightVersions = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "abort", "error", "repetition"] | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


# ---- the rest


class ModelPermission(Struct, kw_only=True):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True):
    """root: what the model was loaded from. permission: the same for everybody."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str


class TokenizerInfo(Struct):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    eos_token_ids: list[int]
    chat_template: str | None


class Version(Struct):
    version: str


class Prefilled(Struct):
    """Prompts that a prefill server has computed. prompt_tokens: of all of them. stored: as handover.STORED_HEADER says."""

    prompt_tokens: int
    stored: list[str]
    object: Literal["prefill"] = "prefill"


class Health(Struct):
    """kernels: what the check of our kernels found on this GPU, in a line; absent where no GPU is used. role: if it has one.
    weight_version: the name of the weights, where they may change."""

    status: Literal["ok", "unhealthy"]
    reason: str | None = None
    kernels: str | UnsetType = UNSET
    role: Literal["prefill", "decode"] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET


class Done(Struct):
    """A control call is done; status, level, tags, success and new_version are vLLM's. reset, success: whether the prefix cache was
    emptied (it is not while requests hold pages). weight_version, new_version: the name that the weights have now."""

    status: Literal["ok", "paused", "resumed", "sleeping", "awake"] = "ok"
    level: int | UnsetType = UNSET
    tags: list[Literal["weights", "kv_cache"]] | None | UnsetType = UNSET
    reset: bool | UnsetType = UNSET
    success: bool | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    new_version: str | UnsetType = UNSET


class WeightInfo(Struct):
    """The name of the weights that the server has."""

    weight_version: str


class Paused(Struct):
    is_paused: bool


class Sleeping(Struct):
    is_sleeping: bool


class Load(Struct):
    """server_load: requests that run or wait."""

    server_load: int


class ServerInfo(Struct):
    """The server's settings, as an object or as text, and the versions of what it stands on."""

    jaxserve_config: dict[str, Any] | str
    system_env: dict[str, str]


def schemas(*types: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a JSON schema reference for each type, the components that they refer to)."""
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return list(found), components

"""What clients send: OpenAI's requests with vLLM's extra fields, as pydantic models, and the table that leads to SamplingParams.

Owns names, types and ranges; whatever is not named here is refused, and null means that a field was left out. Ranges that depend on
the model are the engine's to check (openapi.py writes them into the published schema).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from jaxserve.moved import forward
from jaxserve.outputs import MAX_WEIGHT_VERSION
from jaxserve.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_PATTERN_SIZE,
    RepetitionDetectionParams,
    SamplingParams,
)
from jaxserve.serving.errors import RefusedError
from jaxserve.serving.forms import ResponseFormat, StructuredOutputs, form_of
from jaxserve.serving.strict_model import ITEMS, Model, OnlyFalse, SomeTokenIds, Text, Texts, TokenIds, TokenIdText, if_given
from jaxserve.serving.vllm_fields import VLLMModel
from jaxserve.structured_outputs import StructuredOutputsParams

MAX_STOPS = 12  # stop strings, and stop token ids, of a request


CompletionPrompt = Text | Texts | TokenIds | Annotated[list[TokenIds], ITEMS]

PASSED_ON = (  # fields that are SamplingParams' own, by the same name
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "logprob_token_ids",
    "repetition_detection",
)


def _no_embeddings(given: Any) -> None:
    if given is not None:
        raise ValueError("a prompt is text or token ids; give prompt")


RequestId = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
NoEmbeddings = Annotated[None, BeforeValidator(_no_embeddings)]


class StreamOptions(Model):
    """include_usage: a last chunk with the usage. continuous_usage_stats: with include_usage, the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionPatterns(Model):
    """The output ends where its last tokens are one pattern of these sizes, min_count times in a row."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"max_pattern_size": {"const": 0}}},
            "then": {"properties": {"min_pattern_size": {"const": 0}}},
            "else": {"properties": {"min_count": {"minimum": 2}}, "required": ["min_count"]},
        }
    )

    max_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN_SIZE, description="0 is off.")
    min_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN_SIZE, description="At most max_pattern_size; 0 is 1.")
    min_count: int = Field(0, ge=0, le=2**31 - 1, description="At least 2, unless it is off.")


def _patterns(given: RepetitionPatterns) -> RepetitionDetectionParams:
    try:
        return RepetitionDetectionParams(**given.model_dump())
    except ValueError as error:
        raise ValueError(str(error).removeprefix("repetition_detection: ")) from None


RepetitionDetection = Annotated[RepetitionPatterns, AfterValidator(_patterns)]


ONE_FORM: dict[str, Any] = {  # both, unless the format is free
    "if": {"properties": {"structured_outputs": {"type": "object"}}, "required": ["structured_outputs"]},
    "then": {"properties": {"response_format": {"anyOf": [{"$ref": "#/components/schemas/TextFormat"}, {"type": "null"}]}}},
}

IDS_NEED_LOGPROBS: dict[str, Any] = {  # of completions; a chat's schema has no room for one more rule
    "if": {"properties": {"logprob_token_ids": {"type": "array", "minItems": 1}}, "required": ["logprob_token_ids"]},
    "then": {"properties": {"logprobs": {"type": "integer"}}, "required": ["logprobs"]},
}


class GenerationRequest(VLLMModel):
    """What completions and chats have in common."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={"allOf": [if_given("stream_options", "object", "stream"), ONE_FORM]}
    )

    model: str | None = Field(None, description="One of /v1/models; by default the one that is served.")
    stream: bool | None = Field(None, description="Answer in chunks, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream=true.")
    n: int | None = Field(None, ge=1, le=128, description="Samples of each prompt.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Most tokens of the output; by default its generation_config's max_new_tokens, else up to its length.",
    )
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="Nothing ends the output before; max_tokens does.")
    temperature: float | None = Field(None, ge=0, le=1000, description="Divides the logits before a token is sampled; 0 is greedy.")
    top_p: float | None = Field(
        None, gt=0, le=1, description="Sample of the likeliest tokens that have this share together; 1 is off."
    )
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="Sample of so many likeliest tokens; 0 and -1 are off.")
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Sample of tokens at least so likely, as a share of the likeliest one's probability; 0 is off.",
    )
    seed: int | None = Field(
        None,
        ge=-(2**53),
        le=2**53,
        description="Of the random numbers: the same request is sampled alike. By default one of the server's own.",
    )
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Texts that end the output, and are left out of it: one, or a list of 12 at most."
    )
    stop_token_ids: SomeTokenIds | None = Field(None, max_length=MAX_STOPS, description="Tokens that end the output, 12 at most.")
    ignore_eos: bool | None = Field(None, description="Go on where the model would end.")
    include_stop_str_in_output: bool | None = Field(None, description="Leave the stop text in the output.")
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text (true). A chat keeps those that mark calls or reasoning."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="Taken either way: no tokenizer here writes spaces between special tokens."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Taken off the logits of tokens that the output has.")
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Taken off the logits of tokens for each time that the output has them."
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Divides the logits of tokens that prompt or output have; 1 is off."
    )
    logit_bias: dict[TokenIdText, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, description="Token id, in decimal, to what is added to its logit."
    )
    allowed_token_ids: TokenIds | None = Field(None, description="No other token is sampled.")
    bad_words: list[Annotated[str, Field(pattern=r"\S")]] | None = Field(
        None, max_length=MAX_BAD_WORDS // 2, description="Texts that the output never has."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Log-probabilities of the prompt's tokens, and of so many likeliest in their places.",
    )
    logprob_token_ids: SomeTokenIds | None = Field(
        None, max_length=MAX_LOGPROB_TOKEN_IDS, description="Log-probabilities of these in place of the likeliest; needs logprobs."
    )
    return_token_ids: bool | None = Field(None, description="Answer with the token ids of prompt and output too.")
    return_tokens_as_token_ids: bool | None = Field(None, description='Write the tokens of log-probabilities as "token_id:N".')
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Keep so many tokens of the prompt, special ones included; -1: as many as leave room for one more."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncate_prompt_tokens cuts; by default on the left."
    )
    add_special_tokens: bool | None = Field(None, description="Put the model's special tokens (often a BOS) around texts.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower is served first, if the server was told to.")
    cache_salt: Text | None = Field(None, description="Prompts share cached prefixes only under one salt.")
    timeout: float | None = Field(
        None, gt=0, description="Ours: seconds from its arrival that it may take, within the server's own limit; then 504."
    )
    user: str | None = Field(None, description="Kept in the access log.")
    request_id: RequestId | None = Field(None, description="Part of the answer's id; the header X-Request-Id comes first.")
    use_beam_search: bool | None = Field(
        None, description="The n likeliest sequences, by beam search; a stream has each in one chunk."
    )
    length_penalty: float | None = Field(None, description="Of beam search: a score is divided by length to this power.")
    stream_interval: int | None = Field(None, ge=1, le=2**31 - 1, description="Tokens of a sample that a chunk waits for.")
    thinking_token_budget: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Most tokens of reasoning; then the model's </think> is forced. -1: any number."
    )
    response_format: ResponseFormat | None = Field(
        None, description="The form that the output must have: text, json_object, json_schema or structural_tag."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's: the form that the output must have.")
    repetition_detection: RepetitionDetection | None = Field(
        None, description="End an output whose last tokens are one pattern so many times."
    )
    store: OnlyFalse | None = Field(None, description="Only false: completions and chats are not kept. /v1/responses are.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="Taken, and changes nothing.")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only with stream=true")
        return self

    @model_validator(mode="after")
    def _penalty_needs_beams(self):
        if self.length_penalty not in (None, 1) and not self.use_beam_search:
            raise ValueError(
                f"length_penalty={self.length_penalty:g} is of beam search: give use_beam_search=true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_form(self):
        if self.structured_outputs is not None and form_of(self.response_format) is not None:
            raise ValueError("give response_format or structured_outputs, not both")
        return self

    @property
    def form(self) -> StructuredOutputsParams | None:
        """What the output must be, as far as these two fields say it."""
        return self.structured_outputs or form_of(self.response_format)

    @property
    def form_field(self) -> str:
        """The field that said it."""
        if self.form is None and self.has_budget:
            return "thinking_token_budget"
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    @property
    def has_budget(self) -> bool:
        """Whether the tokens of reasoning are counted."""
        return self.thinking_token_budget is not None and self.thinking_token_budget >= 0

    def tokens_as_ids(self, always: bool) -> bool:
        """Whether tokens are written as "token_id:N". always: the server was told so."""
        return always if self.return_tokens_as_token_ids is None else self.return_tokens_as_token_ids

    def usage_of_stream(self, always: bool) -> tuple[bool, bool]:
        """(whether a stream ends with the usage, whether each chunk has the usage so far). always: the server was told so."""
        include = bool(self.stream_options and self.stream_options.include_usage)
        return always or include, always or include and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, form: StructuredOutputsParams | None
    ) -> SamplingParams:
        """The server's defaults, changed by what was given. Raises ValueError or NotImplementedError for what can't be served."""
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        if self.logprob_token_ids:
            logprobs = None  # these take the place of the likeliest, however many of those were asked for
        if self.logit_bias is not None:
            given["logit_bias"] = {int(i): bias for i, bias in self.logit_bias.items()}
        if max_tokens is not None and self.min_tokens is not None:
            given["min_tokens"] = min(self.min_tokens, max_tokens)
        return defaults.with_(**given, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={"allOf": [if_given("stream_options", "object", "stream"), ONE_FORM, IDS_NEED_LOGPROBS]}
    )

    prompt: CompletionPrompt = Field(description="A text, texts, token ids, or lists of token ids.")
    max_tokens: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Most tokens of the output, by default 16; 0 only with echo: the prompt alone."
    )
    prompt_embeds: NoEmbeddings = Field(None, description="Not supported.")
    echo: bool | None = Field(None, description="Put the prompt before the completion.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of so many likeliest tokens.")
    suffix: None = Field(None, description="Not supported.")
    best_of: int | None = Field(None, ge=1, le=1, description="Only 1; use n.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_given(cls, given: Any) -> Any:
        if given is None:
            raise ValueError("Either prompt or prompt_embeds must be provided and non-empty, and here it must be prompt")
        return given

    @model_validator(mode="after")
    def _something_to_answer(self):
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 needs echo=true: there would be nothing to answer")
        return self

    @model_validator(mode="after")
    def _something_to_score(self):
        if self.logprob_token_ids and self.logprobs is None:
            raise ValueError("logprob_token_ids may be given only with logprobs, whose number then does not count")
        if self.logprob_token_ids and self.max_tokens == 0:
            raise ValueError("logprob_token_ids are scored at tokens of the output, and max_tokens=0 asks for none")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TokenizeCompletionRequest(VLLMModel):
    """`POST /tokenize` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(VLLMModel):
    model: str | None = None
    tokens: SomeTokenIds


WeightVersion = Annotated[str, Field(min_length=1, max_length=MAX_WEIGHT_VERSION)]


class UpdateWeightsRequest(Model):
    path: Text = Field(description="A folder or file on the server.")
    in_flight: Literal["refuse", "recompute", "keep"] = Field("refuse", description="What becomes of requests that have begun.")
    weight_version: WeightVersion | None = Field(None, description="The name of these weights; by default the number of updates.")


class UpdateWeightVersionRequest(Model):
    new_version: WeightVersion = Field(description="The name of the weights that the server has.")


class SleepRequest(Model):
    level: int = Field(1, ge=1, le=2, description="1: the weights go to the host's memory; 2: they are let go.")


def check_model(given: str | None, served: Sequence[str]) -> None:
    """404 for a model that is not served. Clients that must name one and know none send ""."""
    if given and given not in served:
        message = f"The model {given!r} does not exist; there is {', '.join(served)}"
        raise RefusedError(message, status=404, param="model", code="model_not_found")


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)

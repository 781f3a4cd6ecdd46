"""What users give as prompts: one or a list of texts, token ids, dicts, conversations or pairs to score; and their tokens.

Owns the forms that a prompt may take, their errors, and TokenizedPrompt. Bad words are tokenised here too.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
Message = Mapping[str, Any]
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's token ids. text: None where only token ids were given. score_from: the first position that is scored."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    score_from: int | None = None


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer. ValueError if none was loaded."""
    if tokenizer is None:
        raise ValueError("no tokenizer was loaded (skip_tokenizer_init=True): give prompts as token ids")
    return tokenizer


def prompt_fields(prompt: Prompt) -> tuple[str | None, Any, str | None]:
    """(text, token ids, cache_salt) of a prompt in any form. ValueError for unknown fields, or neither a text nor token ids."""
    if not isinstance(prompt, Mapping):
        prompt = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    unknown = set(prompt) - set(PROMPT_FIELDS)
    if unknown:
        raise ValueError(f"prompt has unknown fields {sorted(map(str, unknown))}; known are {', '.join(PROMPT_FIELDS)}")
    text, token_ids, salt = (prompt.get(name) for name in PROMPT_FIELDS)
    if not isinstance(salt, str | None):
        raise ValueError(f"cache_salt={salt!r} must be a string")
    if not isinstance(text, str | None) or (text is None and token_ids is None):
        raise ValueError(f"prompt={text!r} must be a text, or give prompt_token_ids")
    return text, token_ids, salt


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None, add_special_tokens: bool = True) -> TokenizedPrompt:
    """A prompt's tokens. ValueError as `prompt_fields`, for ids that are no integers, and for a text without a tokenizer."""
    text, token_ids, salt = prompt_fields(prompt)
    if token_ids is None:
        token_ids = require_tokenizer(tokenizer).encode(str(text), add_special_tokens)
    are_ids = isinstance(token_ids, Sequence | np.ndarray) and not isinstance(token_ids, bytes | bytearray)
    if not (are_ids and all(_is_int(i) for i in token_ids)):
        raise ValueError(f"{_short(token_ids)} is no prompt: give a text, a flat list of token ids, or a dict with one of them")
    return TokenizedPrompt(text, [int(i) for i in token_ids], salt)


def tokenize_chat(messages: Sequence[Message], tokenizer: Tokenizer | None, **options: Any) -> TokenizedPrompt:
    """The prompt that a conversation makes. options, and errors: as `Tokenizer.apply_chat_template`'s."""
    tokenizer = require_tokenizer(tokenizer)
    text = tokenizer.apply_chat_template(messages, **options)
    return TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=False))


def tokenize_to_score(item: Any, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    """A prompt scored from its second token on, or a pair (context, completion) scored from its completion on.

    Raises:
      ValueError: as `tokenize`; also for an empty part of a pair, and for a completion's cache_salt that is not its context's.
    """
    if not is_pair(item):
        return replace(tokenize(item, tokenizer), score_from=1)
    context, completion = tokenize(item[0], tokenizer), tokenize(item[1], tokenizer, add_special_tokens=False)
    if not context.token_ids or not completion.token_ids:
        raise ValueError(f"{_short(item)} has an empty context or completion; give each one token at least")
    if completion.cache_salt not in (None, context.cache_salt):
        raise ValueError(
            f"{_short(item)}: the completion's cache_salt={completion.cache_salt!r} differs from the context's "
            f"{context.cache_salt!r}, under which the whole is cached: give it to the context"
        )
    texts = (context.text, completion.text)
    text = None if None in texts else "".join(map(str, texts))
    return TokenizedPrompt(text, context.token_ids + completion.token_ids, context.cache_salt, len(context.token_ids))


def with_bad_words_tokenized(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """bad_words as token ids, beside those given as such. ValueError without a tokenizer, or for too many or too long ones."""
    if params.bad_words is None:
        return params
    if tokenizer is None:
        raise ValueError(f"bad_words={params.bad_words!r} needs a tokenizer, and none was loaded; use bad_words_token_ids")
    found = [ids for word in params.bad_words for ids in tokenizer.encode_word(word)]
    found += [list(ids) for ids in params.bad_words_token_ids or ()]
    return params.with_(bad_words=None, bad_words_token_ids=found)


def for_engine(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Sampling parameters as an engine takes them, which has no tokenizer: bad words as token ids. ValueError for what needs a
    tokenizer where there is none."""
    if params.stop and tokenizer is None:
        raise ValueError(f"stop={params.stop} needs a tokenizer for stop strings, and none was loaded; use stop_token_ids")
    return with_bad_words_tokenized(params, tokenizer)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, a dict, or a flat list of token ids) becomes a list of one; no prompts stay an empty list.

    Raises:
      TypeError: neither a prompt nor a list of them. Bytes are none, though they are a sequence of integers.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]  # pyright: ignore[reportReturnType]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Collection):  # arrays and pandas' series are
        raise TypeError(f"prompts must be a text, a dict, a list of token ids, or a list of these, found {_short(prompts)}")
    if len(prompts) > 0 and all(_is_int(p) for p in prompts):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]


def as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation (a list of messages) becomes a list of one. TypeError for neither; ValueError for none."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of messages (dicts), or a list of such lists, found {_short(messages)}")
    if len(messages) == 0:
        raise ValueError("messages is empty; give a conversation (a list of messages) or a list of conversations")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)  # pyright: ignore[reportReturnType]


def one_each(name: str, value: Any, num_prompts: int, kind: type) -> list[Any]:
    """`value`, or its entries, for each prompt. ValueError for a list of another length, TypeError for entries of another kind."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * num_prompts
    if len(values) != num_prompts:
        raise ValueError(f"{name} has {len(values)} entries for {num_prompts} prompts; give one for all, or one each")
    for x in values:
        if not isinstance(x, kind):
            raise TypeError(f"{name} must be {kind.__name__}, or a list of them, found {_short(x)}")
    return values


def priority_of_each(priority: int | None | Sequence[int | None], num_prompts: int) -> list[int]:
    """The priority of each prompt; None is 0. Errors as `one_each`."""
    if isinstance(priority, Sequence) and not isinstance(priority, str):
        priority = [0 if x is None else x for x in priority]
    return one_each("priority", 0 if priority is None else priority, num_prompts, numbers.Integral)


def is_pair(item: Any) -> bool:
    """Whether this is (context, completion), and not a prompt of two token ids."""
    return isinstance(item, tuple) and len(item) == 2 and not any(map(_is_int, item))


def _is_int(x: object) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)  # numpy's integers too


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."

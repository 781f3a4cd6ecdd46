"""Text to token ids and back: `Tokenizer`, with the chat templates of its model.

Owns a `tokenizers.Tokenizer` and the model's templates. Knows nothing of requests, stop strings or devices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.text.chat_template import ChatTemplate, compile_template
from jaxserve.text.pretrained import SPECIAL_TOKEN_NAMES, named_templates, read_folder
from jaxserve.text.token_bytes import TokenBytes, is_byte_level, max_token_bytes


class Tokenizer:
    """A model's tokenizer. Build one with `from_folder`, `from_gguf` or `from_id`.

    Args:
      backend: the `tokenizers` tokenizer; its truncation and padding are turned off.
      special_tokens: name -> token, of SPECIAL_TOKEN_NAMES; templates see them under these names.
      chat_templates: name -> Jinja source; "default" is the one used unless another is asked for.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        self.chat_templates: dict[str, str] = dict(chat_templates or {})
        for name, token in self.special_tokens.items():
            if name not in SPECIAL_TOKEN_NAMES:
                raise ValueError(f"special token name {name!r} must be one of {', '.join(SPECIAL_TOKEN_NAMES)}")
            if backend.token_to_id(token) is None:
                raise ValueError(f"{name}={token!r} is not in the tokenizer's vocabulary")
        self.special_ids: frozenset[int] = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.is_byte_level: bool = is_byte_level(backend)
        skipped = {False: frozenset[int](), True: self.special_ids}
        self._token_bytes = {skip: TokenBytes(backend, ids) for skip, ids in skipped.items()}

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """From a Hugging Face folder: tokenizer.json, and what there is of tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja and additional_chat_templates/. Without a tokenizer.json, transformers converts another vocabulary.

        Raises:
          FileNotFoundError: no such folder.
          ValueError: no tokenizer can be made of the folder's files; the message says what is missing.
        """
        found = read_folder(Path(folder))
        return cls(found.backend, special_tokens=found.special_tokens, chat_templates=found.chat_templates)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """From the metadata of a GGUF file (byte-level BPE vocabularies).

        Raises:
          ValueError: the file's vocabulary is of a kind that is not supported; the message names it.
        """
        from checkpoints import gguf

        reader = gguf.GGUFReader(path)
        backend = tokenizers.Tokenizer.from_str(json.dumps(gguf.tokenizer_json(reader)))
        config = gguf.tokenizer_config(reader)
        special = {name: config[name] for name in SPECIAL_TOKEN_NAMES if config.get(name) is not None}
        return cls(backend, special_tokens=special, chat_templates=named_templates(config.get("chat_template")))

    @classmethod
    def from_id(cls, model: str | os.PathLike[str], *, revision: str | None = None) -> Tokenizer:
        """From whatever names a model: a folder, a GGUF file, or a Hugging Face id (downloaded where needed).

        Raises:
          FileNotFoundError: no such path, and no such model can be had.
        """
        from checkpoints.huggingface import resolve

        path = resolve(model, revision=revision)
        return cls.from_folder(path) if path.is_dir() else cls.from_gguf(path)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included. A model's embedding may have more rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def max_token_bytes(self) -> int | None:
        """The most bytes of a text that one token can stand for, before normalisation; None where it may be any number: a text of
        n tokens has at most n times as many bytes. Known for byte-level vocabularies whose other parts drop nothing."""
        return max_token_bytes(self.backend)

    def special_id(self, name: str) -> int | None:
        """The id of a special token by its name ("pad_token"); None where the model has none."""
        return self.backend.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None

    @property
    def bos_token(self) -> str | None:
        """The text of the beginning of a text; None where there is none."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The text of the end of a sequence; None where there is none."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The text of the padding; None where there is none."""
        return self.special_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding; None where there is none."""
        return self.special_id("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        """The tokenizer's beginning of a text; None where it has none."""
        return self.special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end of sequence. A model's generation_config.json may name more."""
        return self.special_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text are recognised; `add_special_tokens` adds those that the model
        puts around any text (often a BOS; for rendered chats use `encode_chat`, whose template has already written it). Other
        threads go on meanwhile.

        Raises:
          ValueError: half of a surrogate pair in the text, which is no character. TypeError: no text.
        """
        try:
            # a batch of one: `encode` would hold the interpreter's lock, a second for a megabyte
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            for i, character in enumerate(text if isinstance(text, str) else ""):
                if "\ud800" <= character <= "\udfff":
                    raise ValueError(f"the text has {character!r} at {i}: half of a surrogate pair is no character") from None
            raise TypeError(f"a text to tokenise must be a str, got {type(text).__name__}") from None

    def get_vocab(self) -> dict[str, int]:
        """token -> id, added tokens included; tokens as the vocabulary writes them."""
        return self.backend.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        """How many tokens there are, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True  # an empty vocabulary's too

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """{"input_ids", "attention_mask"} of a text or of texts, as transformers' tokenizers return them; nothing is padded."""
        ids = self.encode(text, add_special_tokens) if isinstance(text, str) else [self.encode(t, add_special_tokens) for t in text]
        mask = [1] * len(ids) if isinstance(text, str) else [[1] * len(one) for one in ids if isinstance(one, list)]
        return {"input_ids": ids, "attention_mask": mask}

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text, as the vocabulary writes them, with none put around it."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        """The id of each token, None for one that does not exist. TypeError for a single text."""
        if isinstance(tokens, str):
            raise TypeError(f"tokens={tokens!r} must be a list of tokens")
        return [self.backend.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The token of each id, as the vocabulary writes it; "" for an id that does not exist."""
        return [self.backend.id_to_token(i) or "" for i in token_ids]

    def is_special(self, text: str) -> bool:
        """Whether the text is a special token, which `decode` leaves out unless told otherwise."""
        return self.backend.token_to_id(text) in self.special_ids

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens, in ascending order."""
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, by ascending id."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    def encode_word(self, word: str) -> list[list[int]]:
        """The token sequences that `word` can be: as a text's beginning and, where that makes other tokens, after a space."""
        word = word.lstrip()
        sequences = [self.encode(text, add_special_tokens=False) for text in (word, " " + word)]
        return sequences[:1] if sequences[0] == sequences[1] else sequences

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, ids out of the vocabulary nothing."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, skip_special_tokens: bool = False) -> Mapping[int, bytes]:
        """token id -> the bytes it stands for, for a byte-level vocabulary.

        Raises:
          ValueError: the vocabulary is not byte-level (tokens of others have no bytes of their own).
        """
        if not self.is_byte_level:
            raise ValueError(f"token_bytes needs a byte-level tokenizer; this one decodes with {self.backend.decoder!r}")
        return self._token_bytes[skip_special_tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt that a conversation makes, as text.

        Args:
          messages: dicts with "role" and "content" (a string, a list of {"type": "text", "text": ...} parts, which are joined by
            newlines, or None beside tool calls), and whatever else the template reads.
          add_generation_prompt: end with the opening of the assistant's turn.
          chat_template: the name of one of the model's templates, or Jinja source; by default "tool_use" where the model has one
            and `tools` are given, else "default".
          continue_final_message: end with the text of the last message, so that the output goes on with it. Not with
            add_generation_prompt.
          variables: what else the template reads, such as `tools` (a list of JSON schemas) or `enable_thinking`.

        Raises:
          ValueError: two ends of the prompt, no template, a malformed message (named by its index), a variable that the template
            does not read, or an error of the template itself (with the first message that brings it about).
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False: a prompt has one end")
        template = self._template(chat_template, has_tools=bool(variables.get("tools")))
        absent = {name for name in ("tools", "documents") if variables.get(name) is None}
        unread = variables.keys() - absent - template.variables
        if unread:
            reads = ", ".join(sorted(template.variables))
            raise ValueError(f"the chat template does not read {', '.join(sorted(unread))}; it reads {reads}")
        scope = self.special_tokens | variables | {"add_generation_prompt": add_generation_prompt}
        return template.render(messages, scope, continue_final_message)

    def template_variables(self, chat_template: str | None = None) -> frozenset[str]:
        """The names that a chat template reads, as `apply_chat_template` takes them. ValueError where there is no such template."""
        return frozenset(self._template(chat_template, has_tools=False).variables)

    def prepare_chats(self) -> None:
        """Compiles the default template, where there is one, so that the first chat need not wait for it."""
        if "default" in self.chat_templates:
            try:
                compile_template(self.chat_templates["default"])
            except ValueError:  # who wants to chat will be told
                pass

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of a conversation: `apply_chat_template`, encoded with no special tokens beyond those the template writes."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **kwargs), add_special_tokens=False)

    def _template(self, asked: str | None, has_tools: bool) -> ChatTemplate:
        named = self.chat_templates
        if asked is None and not named:
            raise ValueError("this model has no chat template: give one with chat_template=, or send a plain prompt")
        name = asked or ("tool_use" if has_tools and "tool_use" in named else "default")
        if asked is None and name not in named:
            raise ValueError(f"this model has no default chat template: choose with chat_template= from {sorted(named)}")
        return compile_template(named.get(name, name))  # what names no template is one

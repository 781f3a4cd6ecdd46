"""Text to token ids and back: encoding, whole and incremental decoding, and the chat template of a model.

Owns a `tokenizers.Tokenizer` and the model's templates. Knows nothing of requests, stop strings or devices.
"""

from __future__ import annotations

import bisect
import codecs
import json
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NFC_SHRINKS = 4  # times, at most, in bytes (3.5 in Unicode 15: U+212A, which is "K" again, and marks that join a letter)
_MAX_HELD_TOKENS = 8  # text that ends in U+FFFD waits for this many tokens; a character has at most 4 bytes


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
        self.is_byte_level: bool = isinstance(backend.decoder, decoders.ByteLevel)
        self._compiled: dict[str, ChatTemplate] = {}
        self._token_bytes = {skip: _TokenBytes(backend, self.special_ids if skip else ()) for skip in (False, True)}

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """From a Hugging Face folder: tokenizer.json, and what there is of tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja and additional_chat_templates/. Without a tokenizer.json, transformers builds one where it can.

        Raises:
          FileNotFoundError: no such folder.
          ValueError: no tokenizer can be made of the folder's files; the message says what is missing.
        """
        from checkpoints.huggingface import read_json

        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder")
        path = folder / "tokenizer.json"
        backend = _read_backend(path) if path.is_file() else _backend_from_transformers(folder)
        config = read_json(folder, "tokenizer_config.json") or {}
        _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, folder)
        names = (read_json(folder, "special_tokens_map.json") or {}) | config
        special = {name: _token_text(names[name]) for name in SPECIAL_TOKEN_NAMES if names.get(name) is not None}
        return cls(backend, special_tokens=special, chat_templates=_templates_of(folder, config))

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
        return cls(backend, special_tokens=special, chat_templates=_named_templates(config.get("chat_template")))

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
        stages = [json.loads(stage.__getstate__()) for stage in (self.backend.normalizer, self.backend.pre_tokenizer) if stage]
        parts = [part for stage in stages for part in stage.get("normalizers") or stage.get("pretokenizers") or [stage]]
        kinds = {part["type"] for part in parts}
        added, vocab = self.backend.get_added_tokens_decoder().values(), self.backend.get_vocab(with_added_tokens=False)
        if (
            not self.is_byte_level
            or not kinds <= {"NFC", "Split", "Digits", "ByteLevel"}
            or any(part.get("behavior") == "Removed" for part in parts)
            or any(token.lstrip or token.rstrip for token in added)  # swallow the blanks beside them
            or not {letter for letter in pre_tokenizers.ByteLevel.alphabet() if _is_utf8(letter)} <= vocab.keys()
        ):
            return None
        longest = max([*map(len, vocab), *(len(token.content.encode()) for token in added)])  # a letter stands for a byte
        return longest * (_NFC_SHRINKS if "NFC" in kinds else 1)

    def special_id(self, name: str) -> int | None:
        """The id of a special token by its name ("pad_token"); None where the model has none."""
        return self.backend.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None

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
        **variables: Any,
    ) -> str:
        """The prompt that a conversation makes, as text.

        Args:
          messages: dicts with "role" and "content" (a string, a list of {"type": "text", "text": ...} parts, which are joined by
            newlines, or None beside tool calls), and whatever else the template reads.
          add_generation_prompt: end with the opening of the assistant's turn.
          chat_template: the name of one of the model's templates, or Jinja source; by default "tool_use" where the model has one
            and `tools` are given, else "default".
          variables: what else the template reads, such as `tools` (a list of JSON schemas) or `enable_thinking`.

        Raises:
          ValueError: no template, a malformed message (named by its index), a variable that the template does not read, or an
            error of the template itself (with the first message that brings it about).
        """
        template = self._template(chat_template, has_tools=bool(variables.get("tools")))
        unread = {name for name, value in variables.items() if value is not None} - template.variables
        if unread:
            reads = ", ".join(sorted(template.variables))
            raise ValueError(f"the chat template does not read {', '.join(sorted(unread))}; it reads {reads}")
        if not messages:
            raise ValueError("messages is empty; a chat needs at least one message")
        plain = [_plain_message(i, message) for i, message in enumerate(messages)]
        scope = self.special_tokens | {name: _plain(name, value) for name, value in variables.items()}
        return template.render(plain, scope | {"add_generation_prompt": add_generation_prompt})

    def template_variables(self, chat_template: str | None = None) -> frozenset[str]:
        """The names that a chat template reads, as `apply_chat_template` takes them. ValueError where there is no such template."""
        return frozenset(self._template(chat_template, has_tools=False).variables)

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
        source = named.get(name, name)  # what names no template is one
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source]


class ChatTemplate:
    """A Jinja chat template, compiled in a sandbox with the extras that transformers gives templates.

    `variables`: the names it reads from outside. Raises ValueError if the source is not valid Jinja.
    """

    def __init__(self, source: str):
        import jinja2.meta

        environment = _jinja_environment()
        try:
            self.variables: set[str] = jinja2.meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja (line {error.lineno}): {error.message}") from error

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of `messages`. An error of the template becomes a ValueError that names the first message to bring it about."""
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:  # a template can raise anything: its own complaint, or a TypeError for a None it did not expect
            raise ValueError(f"the chat template fails{self._culprit(messages, variables, error)}: {error}") from error

    def _culprit(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], error: Exception) -> str:
        def brings_it(i: int) -> bool:
            try:
                self._template.render(messages=messages[: i + 1], **variables)
            except Exception as other:
                return str(other) == str(error)
            return False

        last = len(messages) - 1
        i = bisect.bisect_left(range(last), True, key=brings_it)  # by halves: one by one a long chat would take its square
        return f" at message {i} (role {messages[i]['role']!r})" if i < last or brings_it(last) else ""


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text as they come, never splitting a character.

    The pieces, with what `flush` returns, add up to what the tokens add to the text of the prompt. For a byte-level vocabulary that
    is `tokenizer.decode` of the tokens, and each step decodes just the new token's bytes. Other vocabularies decode a window of
    tokens again each step, because there a token's text depends on the one before (Text Generation Inference's algorithm).

    Args:
      tokenizer: whose ids these are.
      prompt_ids: the tokens before the first; the text of a word-initial token can depend on them.
      skip_special_tokens: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._stream = (_ByteStream if tokenizer.is_byte_level else _WindowStream)(tokenizer, prompt_ids, skip_special_tokens)

    def step(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; "" while a character is incomplete."""
        return self._stream.step(token_id)

    def flush(self) -> str:
        """What was held back, at the end of the sequence: an incomplete character comes out as U+FFFD."""
        return self._stream.flush()


class _ByteStream:
    """Byte-level vocabularies: the text is the UTF-8 decoding of the tokens' bytes, whatever came before them."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool):
        self._bytes = tokenizer.token_bytes(skip_special_tokens)
        self._rest = b""  # the first bytes of a character that is not complete

    def step(self, token_id: int) -> str:
        data = self._rest + self._bytes[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)  # what codecs' incremental decoder calls, at half its cost
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


class _WindowStream:
    """Any vocabulary: what tokens add to the decoding of those before them, which are the last ones that gave text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._before = self._kept(prompt_ids)  # their text is out
        self._pending: list[int] = []  # their text is not
        self._text_before = self._decode(self._before)

    def step(self, token_id: int) -> str:
        self._pending += self._kept([token_id])
        piece = self._new_text()
        if not piece or (piece.endswith("\ufffd") and len(self._pending) < _MAX_HELD_TOKENS):
            return ""
        self._before, self._pending = self._pending, []
        self._text_before = self._decode(self._before)
        return piece

    def flush(self) -> str:
        piece, self._pending = self._new_text(), []
        return piece

    def _new_text(self) -> str:
        return self._decode(self._before + self._pending)[len(self._text_before) :]

    def _kept(self, token_ids: Sequence[int]) -> list[int]:
        return [i for i in token_ids if not (self._skip and i in self._tokenizer.special_ids)]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class _TokenBytes(dict[int, bytes]):
    """token id -> bytes of a byte-level vocabulary, filled as ids are met. Skipped and unknown ids have none."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Collection[int]):
        super().__init__(dict.fromkeys(skipped, b""))
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            self[token_id] = token.translate(_ALPHABET).encode("latin-1")
        except UnicodeEncodeError:  # an added token with a character outside the byte alphabet stands for its own UTF-8
            self[token_id] = token.encode("utf-8")
        return self[token_id]


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's characters for the 256 bytes, as a translation from character to byte; other Latin-1 characters leave Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # stand for themselves
    others = [byte for byte in range(256) if byte not in printable]  # are written from U+0100 on
    return dict.fromkeys(others, 0xFFFF) | {0x100 + n: byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _is_utf8(letter: str) -> bool:
    """Whether the byte that a letter of the byte alphabet stands for is one that UTF-8 has."""
    byte = ord(letter.translate(_ALPHABET))
    return byte < 0xF5 and byte not in (0xC0, 0xC1)


@cache
def _jinja_environment():
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's tokens for training; here its body is rendered as it stands."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # Jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _plain_message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of message `i` that is plain JSON, its content one string (or None)."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {i} must be a dict with a string under 'role', found {message!r}")
    plain = _plain(f"message {i}", dict(message))
    if not isinstance(plain.get("content"), list):
        return plain
    texts = []
    for part in plain["content"]:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f"message {i}: content may hold only parts like {{'type': 'text', 'text': ...}}, found {part!r}")
        texts.append(part["text"])
    return plain | {"content": "\n".join(texts)}


def _plain(name: str, value: Any) -> Any:
    """A copy made of JSON types only, so that a template meets no object with methods of its own."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be made of JSON values: {error}") from error


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path} is not a tokenizer that the tokenizers library can read: {error}") from error


def _backend_from_transformers(folder: Path) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{folder} has no tokenizer.json; making a tokenizer of its other files needs the package transformers"
        ) from error
    backend = getattr(AutoTokenizer.from_pretrained(folder), "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{folder} has no tokenizer.json, and transformers has no fast tokenizer for it")
    return backend


def _add_missing_tokens(backend: tokenizers.Tokenizer, declared: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Add what tokenizer_config.json declares beyond tokenizer.json, at the ids that it says."""
    for token_id, spec in sorted(declared.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(spec["content"]) is None:
            flags = {k: spec[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in spec}
            backend.add_tokens([AddedToken(spec["content"], **flags)])
        if backend.token_to_id(spec["content"]) != int(token_id):
            raise ValueError(
                f"{folder / 'tokenizer_config.json'} gives {spec['content']!r} the id {token_id}, "
                f"but it is {backend.token_to_id(spec['content'])} in tokenizer.json"
            )


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _templates_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder by name; files win over tokenizer_config.json."""
    named = _named_templates(config.get("chat_template"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        named["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return named


def _named_templates(value: str | Sequence[Mapping[str, str]] | None) -> dict[str, str]:
    if value is None:
        return {}
    return {"default": value} if isinstance(value, str) else {each["name"]: each["template"] for each in value}

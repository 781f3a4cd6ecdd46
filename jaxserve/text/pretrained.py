"""The tokenizer of a model's folder, as transformers reads it: its backend, special tokens and chat templates.

Owns the import of transformers, which takes over a second: it happens where something of it is first needed, and says nothing.
Neither torch nor a network is needed, and no code that lies in a folder is run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FULL = "tokenizer.json"
_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_VOCABULARIES = ("*.model", "vocab.*", "merges.txt", "tekken.json", "*.tiktoken")  # what transformers can convert
_CONVERTERS = ("sentencepiece",)  # what transformers needs to convert a *.model


class Pretrained(NamedTuple):
    """What a folder says of its tokenizer."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # name -> token, of SPECIAL_TOKEN_NAMES
    chat_templates: dict[str, str]  # name -> Jinja source


def import_transformers() -> None:
    """Imports transformers without its notice that torch is missing."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers  # noqa: F401
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


@contextmanager
def _quietly() -> Iterator[None]:
    """transformers' warnings are off meanwhile: what it tries in vain is in the error that comes of it."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def read_folder(folder: Path) -> Pretrained:
    """The tokenizer in a Hugging Face folder.

    A tokenizer.json is taken as it stands; `AutoTokenizer` would rebuild parts of it by the model's type, whatever the file says.
    Without one, `AutoTokenizer` converts the vocabulary that there is (SentencePiece, tiktoken, BPE files).

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: no tokenizer can be made of the folder's files; the message names the file.
    """
    require_vocabulary(folder)
    loaded = _as_it_stands(folder) if (folder / _FULL).is_file() else _converted(folder)
    backend = loaded.backend_tokenizer
    _check_declared_ids(folder, backend, loaded.init_kwargs.get("added_tokens_decoder") or {})
    named = {name: str(token) for name in SPECIAL_TOKEN_NAMES if (token := getattr(loaded, name)) is not None}
    return Pretrained(backend, named, named_templates(loaded.chat_template))


def require_vocabulary(folder: Path) -> None:
    """Raises what `read_folder` would for a folder in which nothing can be a tokenizer, in no time."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    if not any(path.is_file() for pattern in (_FULL, *_VOCABULARIES) for path in folder.glob(pattern)):
        raise ValueError(f"{folder} has no {_FULL}, and no other vocabulary ({', '.join(_VOCABULARIES)}) to make a tokenizer of")


def named_templates(value: str | dict[str, str] | list[dict[str, str]] | None) -> dict[str, str]:
    """name -> Jinja source, of the chat_template in any of its spellings; a lone one is the "default"."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    return dict(value) if isinstance(value, dict) else {each["name"]: each["template"] for each in value}


def _as_it_stands(folder: Path) -> Any:
    """transformers' tokenizer around the backend that tokenizer.json describes."""
    import_transformers()
    from transformers import PreTrainedTokenizerFast

    class Declared(PreTrainedTokenizerFast):
        """Adds no special token that the folder does not declare: its id would be one that the model has no row for."""

        def _add_tokens(self, new_tokens: list[Any], special_tokens: bool = False) -> int:
            declared = {str(token) for token in self.init_kwargs.get("added_tokens_decoder", {}).values()}
            for name, token in self._special_tokens_map.items():
                if token is not None and str(token) not in declared and self.backend_tokenizer.token_to_id(str(token)) is None:
                    raise ValueError(f"{folder}: {name}={str(token)!r} is not in the tokenizer's vocabulary")
            return super()._add_tokens(new_tokens, special_tokens=special_tokens)

    try:
        return Declared.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception
        _check_json(folder)
        if str(error).startswith(f"{folder}: "):
            raise
        says = f"{folder / _FULL} is not a tokenizer that the tokenizers library can read: {_first_line(error)}"
        raise ValueError(says) from error


def _converted(folder: Path) -> Any:
    """transformers' tokenizer, made of whatever vocabulary the folder has."""
    import_transformers()
    from transformers import AutoTokenizer

    try:
        with _quietly():
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a converter can raise anything
        _check_json(folder)
        missing = [name for name in _CONVERTERS if importlib.util.find_spec(name.split(".")[0]) is None]
        lacks = any(folder.glob("*.model")) and missing
        reason = f"install the package {' and '.join(missing)} for its *.model" if lacks else _first_line(error)
        raise ValueError(f"{folder} has no {_FULL}, and transformers can't make one of its files: {reason}") from error
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise ValueError(f"{folder} has no {_FULL}, and transformers has no fast tokenizer for it ({type(loaded).__name__})")
    return loaded


def _check_json(folder: Path) -> None:
    """ValueError that names the first of the folder's configuration files which holds no JSON object."""
    from checkpoints.huggingface import read_json

    for name in _CONFIG_FILES:
        read_json(folder, name)


def _check_declared_ids(folder: Path, backend: tokenizers.Tokenizer, declared: dict[int, Any]) -> None:
    """transformers adds a declared token that is missing at the next free id, whatever id was declared."""
    for token_id, token in declared.items():
        if (found := backend.token_to_id(str(token))) != token_id:
            raise ValueError(f"{folder} gives {str(token)!r} the id {token_id}, but it is {found} in {_FULL}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

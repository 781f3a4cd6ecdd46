"""Compiles StructuredOutputsParams to grammars over a model's tokens, on threads of its own.

Owns these threads, llguidance's view of the vocabulary, and a cache of grammars. Knows nothing of requests or steps. llguidance
compiles: it is an Earley parser over derivatives of regular expressions, with no tables to build beforehand.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxserve.structured import lark, tag_formats
from jaxserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from jaxserve.text.tokenizer import Tokenizer

logger: logging.Logger = logging.getLogger("jaxserve")

MAX_CACHED = 256  # grammars; the least recently used is dropped first
FOUND_OUT_BY_MASK = ("regex", "grammar")  # kinds for which only an empty first mask shows that nothing satisfies them


class GrammarError(ValueError):
    """A grammar that can't be compiled, or that nothing satisfies. The message quotes the compiler."""


class CompilerBusyError(RuntimeError):
    """The compiler's queue is full: max_waiting grammars are not compiled yet."""


class Grammar:
    """A compiled grammar. `matcher` makes the state of one sequence in it."""

    def __init__(self, start: LLMatcher):
        self._start = start

    def matcher(self) -> LLMatcher:
        """A new matcher, at the start of the output."""
        return self._start.deep_copy()


class GrammarCompiler:
    """Compiles grammars for one vocabulary in threads of its own, each grammar once. It does nothing before the first, or
    `prepare`.

    Args:
      tokenizer: the model's, byte-level or not. None: every grammar is refused.
      vocab_size: V, the width of the model's logits. Ids past the tokenizer's are never allowed.
      eos_token_ids: allowed where the grammar may end.
      num_threads: how many grammars are compiled at a time.
      max_waiting: most grammars that may be compiling or wait for it. None: any number.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        num_threads: int = 2,
        *,
        max_waiting: int | None = None,
    ):
        self.vocab_size = vocab_size
        self.eos_token_ids: list[int] = sorted(eos_token_ids)
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._futures: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._vocabulary: Future[Any] | None = None
        self._max_waiting = max_waiting
        self._compiling: set[Future[Grammar]] = set()  # those that were not done when last looked at
        self._num_asking: weakref.WeakKeyDictionary[Future[Grammar], int] = weakref.WeakKeyDictionary()

    def submit(self, params: StructuredOutputsParams | Mapping[str, Any]) -> Future[Grammar]:
        """A future of the compiled grammar; its exception is a GrammarError where the grammar is wrong. All callers of an equal
        grammar share the future: call `give_up` instead of cancelling it.

        Raises:
          ValueError: there is no tokenizer, or no eos token with which an output could end.
          CompilerBusyError: max_waiting grammars are not compiled yet, and this is not one of them.
        """
        if self._tokenizer is None:
            raise ValueError(f"structured_outputs={params} needs a tokenizer, and none was loaded")
        if not self.eos_token_ids:
            raise ValueError("structured_outputs needs an end of sequence, and this model names no eos token")
        params = StructuredOutputsParams.make(params)
        with self._lock:
            vocabulary = self._vocabulary_soon()
            known = self._futures.get(params.key)
            if known is None or _broke_off(known):
                self._check_room()
                known = self._futures[params.key] = self._pool.submit(self._compile, params, vocabulary)
                self._compiling.add(known)
                if len(self._futures) > MAX_CACHED:
                    self._futures.popitem(last=False)
            self._futures.move_to_end(params.key)
            self._num_asking[known] = self._num_asking.get(known, 0) + 1
            return known

    def prepare(self) -> None:
        """Reads the vocabulary, and waits for that: a second for 150,000 tokens. Much of it holds Python's lock, so steps would
        stall if the first grammar had to do it. Does nothing where every grammar is refused."""
        if self._tokenizer is None or not self.eos_token_ids:
            return
        with self._lock:
            vocabulary = self._vocabulary_soon()
        error = vocabulary.exception()
        if error is not None:  # whoever submits a grammar is told
            logger.warning("structured_outputs: the tokenizer can't be read: %r", error)

    def beside(self, *, max_waiting: int) -> GrammarCompiler:
        """Another compiler with its own threads and limit, which shares the vocabulary that this one has read."""
        other = GrammarCompiler(self._tokenizer, self.vocab_size, self.eos_token_ids, max_waiting=max_waiting)
        other._vocabulary = self._vocabulary
        return other

    def _vocabulary_soon(self) -> Future[Any]:
        if self._vocabulary is None or _broke_off(self._vocabulary):
            self._vocabulary = self._pool.submit(self._read_vocabulary)
        return self._vocabulary

    def give_up(self, grammar: Future[Grammar]) -> None:
        """Ends one caller's interest in a grammar that it submitted. Without any left it is not compiled, unless that has begun."""
        with self._lock:
            self._num_asking[grammar] -= 1
            nobody = not self._num_asking[grammar]
        if nobody:
            grammar.cancel()  # outside the lock: it runs the callbacks of those who wait

    def _check_room(self) -> None:
        self._compiling = {grammar for grammar in self._compiling if not grammar.done()}
        if self._max_waiting is not None and len(self._compiling) >= self._max_waiting:
            raise CompilerBusyError(f"{len(self._compiling)} grammars are not compiled yet, of at most {self._max_waiting}")

    def compile(self, params: StructuredOutputsParams | Mapping[str, Any]) -> Grammar:
        """Compiles a grammar and waits for it. Raises GrammarError, and as `submit`."""
        return outcome(self.submit(params))

    def close(self) -> None:
        """Ends the threads. Grammars that wait to be compiled are cancelled."""
        self._pool.shutdown(cancel_futures=True)

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        assert self._tokenizer is not None
        eos: Any = self.eos_token_ids if len(self.eos_token_ids) > 1 else self.eos_token_ids[0]
        return LLTokenizer(lark.without_marks(self._tokenizer.backend), n_vocab=self.vocab_size, eos_token=eos)

    def _compile(self, params: StructuredOutputsParams, vocabulary: Future[Any]) -> Grammar:
        tokens = vocabulary.result()
        if params.preamble is not None and params.kind in FOUND_OUT_BY_MASK:  # the first mask is the preamble's: check without it
            self._start(replace(params, preamble=None, max_preamble_tokens=None), tokens)
        return Grammar(self._start(params, tokens))

    def _start(self, params: StructuredOutputsParams, tokens: LLTokenizer) -> LLMatcher:
        """A matcher at the start of the output. Raises GrammarError where the grammar is wrong."""
        from llguidance import LLMatcher

        try:
            source = self._source(params, tokens)
        except ValueError as error:
            raise GrammarError(f"structured_outputs: {params.kind}: {error}") from None
        matcher = LLMatcher(tokens, source, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"structured_outputs: {params.kind}: {words_of(matcher)}")
        matcher.compute_bitmask()
        if matcher.is_error():  # see FOUND_OUT_BY_MASK
            raise GrammarError(f"structured_outputs: {params.kind}: nothing satisfies it ({words_of(matcher)})")
        return matcher

    def _source(self, params: StructuredOutputsParams, vocabulary: LLTokenizer) -> str:
        """The grammar of these parameters, in a text that llguidance reads."""
        assert self._tokenizer is not None
        marks = lark.Marks(self._tokenizer.backend, vocabulary)
        if params.preamble is None:
            return self._form(params, marks)
        most, free = params.max_preamble_tokens, params.kind == "free"
        if most is None:
            closing = marks.text_until("closing", params.preamble[1])
        else:  # an end of the sequence within the preamble would leave out the form
            closing = lark.counted("closing", *params.preamble, most, marks, but=() if free else self.eos_token_ids)
        form = lark.anything(params.preamble[0], marks) if free else self._form(params, marks)
        return lark.after_preamble(params.preamble[0], closing, form, marks)

    def _form(self, params: StructuredOutputsParams, marks: lark.Marks) -> str:
        import llguidance

        if params.kind in ("json", "json_object"):
            schema: Any = params.json if params.kind == "json" else {"type": "object"}
            if isinstance(schema, bool):  # llguidance writes the options into the schema, which must be an object for that
                schema = {"allOf": [schema]}
            if params.disable_additional_properties:
                schema = _closed(schema)
            options: Any = {"whitespace_flexible": not params.disable_any_whitespace}
            if params.whitespace_pattern is not None:
                options["whitespace_pattern"] = params.whitespace_pattern
            return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        if params.kind == "structural_tag":
            tag: Any = params.structural_tag
            return tag_formats.grammar_of(tag["format"], marks) if "format" in tag else lark.structural_tag(tag, marks)
        if params.kind == "grammar":
            return marks.by_id(llguidance.grammar_from("grammar", str(params.grammar)))
        if params.kind == "choice":
            return llguidance.grammar_from("choice", json.dumps(params.choice))
        return llguidance.grammar_from("regex", str(params.regex))


def outcome(grammar: Future[Grammar]) -> Grammar:
    """Waits for the grammar. Raises a copy of its error: the original would keep every frame that it passes through alive."""
    error = grammar.exception()
    if error is not None:
        raise copy.copy(error) if isinstance(error, GrammarError) else error
    return grammar.result()


def words_of(matcher: LLMatcher) -> str:
    """llguidance's message about an error, without the dump of its state."""
    return matcher.get_error().split("<state>")[0].strip()


def _broke_off(future: Future[Grammar]) -> bool:
    """Whether it failed for a reason other than the grammar, so that another attempt may succeed."""
    return future.done() and (future.cancelled() or not isinstance(future.exception(), GrammarError | None))


_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # their values are name -> schema
_NO_SCHEMAS = ("enum", "const", "default", "examples")  # their values are data


def _closed(schema: Any) -> Any:
    """A JSON schema whose objects have only the properties that they name."""
    if isinstance(schema, list):
        return [_closed(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for key, value in schema.items():
        if key in _OF_SCHEMAS and isinstance(value, dict):
            closed[key] = {name: _closed(x) for name, x in value.items()}
        else:
            closed[key] = value if key in _NO_SCHEMAS else _closed(value)
    types = closed.get("type", ())
    is_object = "properties" in closed or types == "object" or (isinstance(types, list) and "object" in types)
    return closed | {"additionalProperties": False} if is_object and "additionalProperties" not in closed else closed

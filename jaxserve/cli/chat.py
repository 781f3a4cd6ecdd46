"""Chats in the terminal, with a model in this process or with a server.

    jaxserve chat --model=FOLDER
    jaxserve chat --url=http://127.0.0.1:8000 --system="Answer in one sentence."

Ctrl-C stops an answer; /new starts again, /quit or the end of the input ends. Reads from a pipe too: a message a line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from absl import app, flags

from jaxserve.cli.common.command import complain, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.serving.parsers import CallPart, Content, Notation, OutputParser, Piece, Reasoning

define_engine_flags(model="")
_URL = flags.DEFINE_string("url", None, "A server's address; by default --model runs here.")
_API_KEY = flags.DEFINE_string("api_key", None, "The server's key; by default JAXSERVE_API_KEY.")
_SYSTEM = flags.DEFINE_string("system", None, "The system message.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 1024, "Most tokens of an answer.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", None, "0 is greedy; by default what the model's makers recommend.", lower_bound=0.0
)
_TOP_P = flags.DEFINE_float("top_p", None, "Keep the likeliest tokens that hold this much probability.")

Messages = list[dict[str, str]]


class Talker(Protocol):
    def answer(self, messages: Messages) -> Iterator[Piece]:
        """The pieces of the next answer. Raises ValueError with what is wrong with the conversation, or the server."""
        ...


def sampling() -> dict[str, Any]:
    """What the flags say of sampling; the rest is the model's."""
    given = {"temperature": _TEMPERATURE.value, "top_p": _TOP_P.value}
    return {"max_tokens": _MAX_TOKENS.value} | {name: value for name, value in given.items() if value is not None}


class InProcess:
    """A model loaded here."""

    def __init__(self) -> None:
        from jaxserve import LLM
        from jaxserve.models.loading import NoTokenizerError

        try:
            self._llm = LLM(flags.FLAGS.model, **engine_options())
        except NoTokenizerError as error:
            raise ValueError(f"{error.__cause__}") from error
        templates = self._llm.get_tokenizer().chat_templates.values()
        self._notation = Notation(reasoning=Notation.of_template("\n".join(templates)).reasoning)

    def answer(self, messages: Messages) -> Iterator[Piece]:
        (prompt,) = self._llm.chat_prompts(messages)
        assert isinstance(prompt, Mapping)
        params = self._llm.get_default_sampling_params().with_(**sampling())
        parser, shown = OutputParser(self._notation, prompt["prompt"]), 0
        with contextlib.closing(self._llm.stream(prompt, params)) as stream:
            for _, output in stream:
                text = output.outputs[0].text
                yield from parser.feed(text[shown:])
                shown = len(text)
        yield from parser.finish()


class Remote:
    """A server that speaks OpenAI's protocol."""

    def __init__(self, url: str):
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would name every request
        key = _API_KEY.value or os.environ.get("JAXSERVE_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=10)
        self._client = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)
        with self._reached():
            self._model = self._checked(self._client.get("/v1/models"))["data"][0]["id"]

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """ValueError where the server can't be reached, or goes away."""
        import httpx

        try:
            yield
        except httpx.HTTPError as error:
            raise ValueError(f"{self._client.base_url}: {str(error) or type(error).__name__}") from error

    @staticmethod
    def _checked(response: Any) -> Any:
        if response.status_code != 200:
            try:
                message = json.loads(response.read())["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"HTTP {response.status_code}"
            raise ValueError(message)
        return response.json() if response.is_closed else None

    def answer(self, messages: Messages) -> Iterator[Piece]:
        body = {"model": self._model, "messages": messages, "stream": True} | sampling()
        with self._reached(), self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            self._checked(response)
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    if reasoning := choice["delta"].get("reasoning_content"):
                        yield Reasoning(reasoning)
                    if content := choice["delta"].get("content"):
                        yield Content(content)


def talk(talker: Talker, messages: Messages) -> str:
    """Prints the next answer as it comes and returns its content: what the model thought before is not said to it again."""
    pieces: list[Reasoning | Content] = []
    started = time.monotonic()
    try:
        for piece in talker.answer(messages):
            if not isinstance(piece, CallPart):
                if isinstance(piece, Content) and pieces and isinstance(pieces[-1], Reasoning):
                    print("\n")
                pieces.append(piece)
                print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except ValueError:
        if pieces:
            print()
        raise
    print()
    if sys.stdin.isatty():
        print(f"[{len(pieces) / max(time.monotonic() - started, 1e-9):.1f} pieces/s]", file=sys.stderr)
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def main() -> None:
    if bool(_URL.value) == bool(flags.FLAGS.model):
        raise app.UsageError("give either --model or --url")
    opening: Messages = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
    try:
        talker: Talker = Remote(_URL.value) if _URL.value else InProcess()
    except Exception as error:  # whatever it is, there is nobody to talk to
        raise app.UsageError(str(error)) from error
    messages = list(opening)
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if said == "/quit":
            return
        if said == "/new":
            messages = list(opening)
        elif said:
            messages.append({"role": "user", "content": said})
            content = ""
            try:
                content = talk(talker, messages)
            except ValueError as error:
                complain(error)
            if content:
                messages.append({"role": "assistant", "content": content})
            else:
                messages.pop()  # what got no answer is no part of the conversation


if __name__ == "__main__":
    run_command(main)

"""Text in, text out: `LLM`, vLLM's offline interface on a JAX-native engine.

Owns the tokenizer and the loop that drives the engine for a batch of prompts. Knows nothing of scheduling, shapes or devices.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.model_loader import load_model
from jaxserve.request import CompletionOutput, RequestOutput, SamplingParams
from jaxserve.text_outputs import TextOutputs
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger("jaxserve")

Prompt = str | Mapping[str, Any] | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    Args:
      model: a Hugging Face folder or id, or a GGUF file.
      tokenizer: where the tokenizer lies, or a Tokenizer, if it is not the model's own.
      skip_tokenizer_init: load no tokenizer; prompts are token ids then, and texts stay empty.
      revision: of a Hugging Face id.
      options: every field of `EngineConfig` (dtype, max_model_len, max_num_seqs, max_num_batched_tokens, page_size, num_pages,
        gpu_memory_utilization, enable_prefix_caching, enable_chunked_prefill, scheduling_policy, seed, bucket_plan, ...).

    Raises:
      TypeError: an option that does not exist; the message lists those that do.
      FileNotFoundError, NotImplementedError, ValueError: see `load_model` and `Engine`.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: str | Path | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        *,
        revision: str | None = None,
        **options: Any,
    ):
        config = engine_config(options)
        loaded = load_model(
            model, tokenizer=tokenizer, skip_tokenizer_init=skip_tokenizer_init, dtype=config.dtype, revision=revision
        )
        self.tokenizer, self.generation_defaults = loaded.tokenizer, loaded.defaults
        self.engine = Engine(loaded.module, config, eos_token_ids=loaded.defaults.eos_token_ids)
        self._texts = TextOutputs(self.tokenizer, self.engine.finish)
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. ValueError if none was loaded."""
        if self.tokenizer is None:
            raise ValueError("no tokenizer was loaded (skip_tokenizer_init=True): give prompts as token ids")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no SamplingParams are given: the recommendations of the model's generation_config.json, and
        vLLM's defaults where it has none."""
        recommended = self.generation_defaults.sampling()
        left_out = list(self.generation_defaults.not_applied)
        if recommended.pop("repetition_penalty", 1.0) != 1.0:
            left_out.append("repetition_penalty")
        if left_out:
            logger.warning("generation_config.json asks for %s, which is not supported yet and is left out", ", ".join(left_out))
        return SamplingParams(**recommended)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Completions of prompts, in their order.

        Args:
          prompts: a text, {"prompt": text}, {"prompt_token_ids": [...]}, a list of token ids, or a list of any of these. A dict may
            hold "cache_salt" too: prompts share cached prefixes only under one salt.
          sampling_params: one for all, or one each; None takes `get_default_sampling_params`.
          use_tqdm: a progress bar on stderr.
          priority: lower is served first (scheduling_policy="priority"); one for all, or one each.
          on_error: what becomes of prompts that can't be run. "raise": ValueError naming all of them, before anything runs.
            "return": their outputs have finish_reason "error" and the message as stop_reason; the others run.

        Raises:
          ValueError: see on_error; also lists of different lengths.

        Ctrl-C, or any other exception, aborts what this call added; the engine stays usable.
        """
        done: dict[int, RequestOutput] = {}
        prompts = as_list(prompts)
        bar = _progress_bar(len(prompts)) if use_tqdm else None
        try:
            with contextlib.closing(self.stream(prompts, sampling_params, priority=priority, on_error=on_error)) as stream:
                for index, output in stream:
                    if output.finished:
                        done[index] = output
                        if bar is not None:
                            bar.advance(output)
        finally:
            if bar is not None:
                bar.close()
        return [done[i] for i in range(len(prompts))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        on_error: str = "raise",
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """As `generate`, yielding (index of the prompt, its output so far) whenever a prompt's output has grown. A prompt's output
        is the same object each time. Closing the iterator aborts what still runs."""
        prompts = as_list(prompts)
        params = self._one_each("sampling_params", sampling_params or self.get_default_sampling_params(), len(prompts))
        priorities = self._one_each("priority", priority, len(prompts))
        if on_error not in ("raise", "return"):
            raise ValueError(f"{on_error=} must be 'raise' or 'return'")
        run = f"{next(self._ids)}"
        ready: list[tuple[int, str | None, list[int], Mapping[str, Any]]] = []
        errors: dict[int, str] = {}
        for i, prompt in enumerate(prompts):
            try:
                text, token_ids, extra = self._tokenize(prompt)
                self.engine.check_request(f"{run}-{i}", token_ids, params[i])
                ready.append((i, text, token_ids, extra))
            except (ValueError, TypeError) as error:
                errors[i] = str(error)
        if errors and on_error == "raise":
            raise ValueError("; ".join(f"prompt {i}: {message}" if len(prompts) > 1 else message for i, message in errors.items()))
        for i, message in errors.items():
            failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason=message)
            yield i, RequestOutput(f"{run}-{i}", prompts[i] if isinstance(prompts[i], str) else None, [], [failed], True)
        yield from self._run(run, ready, params, priorities)

    def _run(self, run: str, ready: list, params: list[SamplingParams], priorities: list[int]) -> Generator[tuple[int, RequestOutput], None, None]:
        index_of = {}
        try:
            for i, text, token_ids, extra in ready:
                request_id = f"{run}-{i}"
                index_of[request_id] = i
                salt = extra.get("cache_salt")
                requests = self.engine.add_request(request_id, token_ids, params[i], priority=priorities[i], cache_salt=salt)
                self._texts.add(requests, text)
            left = len(ready)
            while left:
                for output in self._texts.process(self.engine.step()):
                    if output.request_id in index_of:
                        left -= output.finished
                        yield index_of[output.request_id], output
        finally:  # nothing to abort after a whole run: finished ids do no harm
            self.engine.abort(index_of)
            self._texts.discard(index_of)
            self.engine.drain()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int | Sequence[int] = 0,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Completions of one conversation, or of a list of conversations; see `generate` and `Tokenizer.apply_chat_template`."""
        prompts = self.chat_prompts(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority, on_error=on_error)

    def chat_prompts(self, messages: Sequence[Message] | Sequence[Sequence[Message]], **options: Any) -> list[Prompt]:
        """The prompts that conversations make, ready for `generate` or `stream`. options: as `Tokenizer.apply_chat_template`'s."""
        tokenizer = self.get_tokenizer()
        if len(messages) == 0:
            raise ValueError("messages is empty; give a conversation (a list of messages) or a list of conversations")
        chats: Any = [messages] if isinstance(messages[0], Mapping) else messages
        texts = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
        return [{"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], Mapping[str, Any]]:
        """(text, token ids, the prompt's other fields)."""
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping):
            prompt = {"prompt_token_ids": prompt}
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            raise ValueError(f"prompt has unknown fields {sorted(unknown)}; known are prompt, prompt_token_ids, cache_salt")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None:
            if not isinstance(text, str):
                raise ValueError(f"prompt={text!r} must be a text, or give prompt_token_ids")
            token_ids = self.get_tokenizer().encode(text)
        return text, list(token_ids), prompt

    @staticmethod
    def _one_each(name: str, value: Any, n: int) -> list[Any]:
        if isinstance(value, Sequence):
            if len(value) != n:
                raise ValueError(f"{name} has {len(value)} entries for {n} prompts; give one for all, or one each")
            return list(value)
        return [value] * n


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, a dict, or a list of token ids) becomes a list of one."""
    one = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and all(isinstance(p, int) for p in prompts))
    return [prompts] if one else list(prompts)  # pyright: ignore[reportReturnType]


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keyword options. TypeError names an unknown one and lists those that exist."""
    known = [f.name for f in fields(EngineConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; options are {', '.join(known)}")
    return EngineConfig(**options)


class _progress_bar:  # noqa: N801
    """Prompts done, with prompt and output tokens a second."""

    def __init__(self, total: int):
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True)
        self._prompt_tokens = self._output_tokens = 0

    def advance(self, output: RequestOutput) -> None:
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(o.token_ids) for o in output.outputs)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        rates = f"in {self._prompt_tokens / seconds:.0f} tok/s, out {self._output_tokens / seconds:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()

"""Text in, text out: `LLM`, vLLM's offline interface on a JAX-native engine.

Owns the tokenizer and the loop that drives the engine for a batch of prompts. Knows nothing of scheduling, shapes or devices.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig, engine_config
from jaxserve.engine.beam_search import BeamSearchOutput, BeamSearchParams, search
from jaxserve.engine.description import EngineDescription
from jaxserve.engine.drafting import find_draft, load_draft, same_vocabulary
from jaxserve.engine.engine import Engine
from jaxserve.engine.progress import ProgressBar
from jaxserve.engine.runner_setup import prepare
from jaxserve.engine.sharding import model_shards
from jaxserve.kv_store.spec import outlives_process
from jaxserve.models import GenerationDefaults, ModelConfig
from jaxserve.models.files import find_model
from jaxserve.models.loading import LoadedModel, adopt_model, check_tokenizer_choice, load_files
from jaxserve.moved import forward
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput, ScoreOutput
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.constraints import check_start
from jaxserve.structured.grammars import Grammar, GrammarCompiler, outcome
from jaxserve.text.prompts import (
    TokenizedPrompt,
    as_chats,
    as_list,
    for_engine,
    is_pair,
    one_each,
    priority_of_each,
    require_tokenizer,
    tokenize,
    tokenize_chat,
    tokenize_to_score,
)
from jaxserve.text.text_outputs import TextOutputs
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # not at run time, when this module warns of the names that were defined here
    from jax.sharding import Mesh

    from jaxserve.hosts.group import HostGroup
    from jaxserve.text.prompts import Message, Prompt

logger: logging.Logger = logging.getLogger("jaxserve")

Outputs = Generator[tuple[int, RequestOutput], None, None]  # (index of the prompt, its output so far)


class LLM:
    """A model ready to generate.

    Args:
      model: a Hugging Face folder or id, a GGUF file, or a folder that `jaxserve convert` made (Orbax).
      tokenizer: where the tokenizer lies, or a Tokenizer, if it is not the model's own.
      skip_tokenizer_init: load no tokenizer; prompts are token ids then, and texts stay empty.
      revision: of a Hugging Face id.
      mesh: a `jax.sharding.Mesh` with an axis "tp", whose devices share the model; without it they are the first
        `tensor_parallel_size`.
      hosts: what `join_hosts` returned on host 0 of several processes, whose devices all share the model; the others call `follow`.
      options: every field of `EngineConfig` (dtype, max_model_len, max_num_seqs, max_num_batched_tokens, page_size, num_pages,
        gpu_memory_utilization, enable_prefix_caching, enable_chunked_prefill, scheduling_policy, seed, bucket_plan, ...).
        warm_up="all" also reads the tokenizer's vocabulary for forms (structured_outputs), which otherwise the first form does.

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
        mesh: Mesh | None = None,
        hosts: HostGroup | None = None,
        **options: Any,
    ):
        if hosts is not None and not hosts.leads:
            raise ValueError(f"host {hosts.host_id} follows: call jaxserve.follow(model, hosts=hosts, ...) there")
        with contextlib.nullcontext() if hosts is None else hosts.told():
            config = engine_config(options)
            check_tokenizer_choice(tokenizer, skip_tokenizer_init)
            files = find_model(model, revision=revision)
            draft = find_draft(config, files.config)
            shards, config, qualification = prepare(files, config, mesh, hosts, draft)
            if draft is not None and not skip_tokenizer_init:
                tokenizer = same_vocabulary(draft, tokenizer or files.path)
            loaded = load_files(
                files,
                tokenizer=tokenizer,
                skip_tokenizer_init=skip_tokenizer_init,
                dtype=config.dtype,
                transposed=None,
                shards=shards,
            )
            weights_id = files.digest() if config.kv_store is not None and outlives_process(config.kv_store) else None
            of_engine = {"hosts": hosts, "qualification": qualification, "weights_id": weights_id}
            self._set_up(loaded, config, mesh=mesh, draft=load_draft(draft, loaded.module), **of_engine)

    def _set_up(self, loaded: LoadedModel[Any], config: EngineConfig, **of_engine: Any) -> None:
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.generation_defaults: GenerationDefaults = loaded.defaults
        self.engine: Engine = Engine(loaded.module, config, eos_token_ids=loaded.defaults.eos_token_ids, **of_engine)
        self._texts = TextOutputs(self.tokenizer, self.engine.finish)
        self._grown: dict[str, RequestOutput] = {}  # by request id: outputs that grew and were not yielded yet
        self._runs = itertools.count()
        self.grammars: GrammarCompiler = GrammarCompiler(
            self.tokenizer, self.engine.config.model.vocab_size, self.engine.eos_token_ids
        )
        if config.warm_up == "all":
            self.grammars.prepare()

    @classmethod
    def from_params(
        cls,
        params: Any,
        config: ModelConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> LLM:
        """An LLM on weights that are already in this process, such as a trainer's.

        Args:
          params: a `jaxserve.models.Decoder`; any Flax NNX module or Linen variables with known names (tunix's Qwen3, Qwen2 and
            Llama, transformers' names in Flax or torch: models/trainer_keys.py); or a pytree or flat dict with such paths. Arrays
            of the right dtype, layout and device are shared, not copied; don't donate them before `update_params` brought others.
            On a CPU `LLM(path)` decodes up to twice as fast: it lays its weights out anew; `models.transpose_kernels` does it here.
            With deterministic="always" and XLA's matmuls an engine on a CPU copies dense weights that do not lie so.
          config: the model's, or its Hugging Face config as a dict or a folder; a `Decoder` brings its own.
          tokenizer: a Tokenizer, or where it lies; None: prompts are token ids, and texts stay empty.
          mesh: as for `LLM`; it may be the trainer's. Arrays that lie on its devices as the engine needs them are shared too; the
            others are copied once, and how many is logged.
          options: as for `LLM`. dtype="auto" is the weights' own.

        Raises:
          ValueError: leaves are missing, unknown, mis-shaped, of a wrong dtype or deleted, all listed; no config.
          TypeError: an option that does not exist.
        """
        engine_options = engine_config(options)
        shards_of = lambda model: model_shards(model, engine_options, mesh)[0]  # noqa: E731
        loaded = adopt_model(params, config, tokenizer=tokenizer, dtype=engine_options.dtype, shards_of=shards_of)
        llm = cls.__new__(cls)
        draft = find_draft(engine_options, loaded.config)
        if draft is not None and loaded.tokenizer is not None:
            same_vocabulary(draft, loaded.tokenizer)
        llm._set_up(loaded, engine_options, mesh=mesh, draft=load_draft(draft, loaded.module))
        return llm

    def update_params(self, params: Any, in_flight: str = "refuse", weight_version: str | None = None) -> None:
        """Other weights from the next step on, without recompiling; see `Engine.update_params`."""
        self.engine.update_params(params, in_flight, weight_version)

    def get_weight_version(self) -> str:
        """The name of the present weights, as `CompletionOutput.weight_versions` has it; see `Engine.weight_version`."""
        return self.engine.weight_version

    def update_weight_version(self, new_version: str) -> None:
        """Names the present weights; see `Engine.update_weight_version`."""
        self.engine.update_weight_version(new_version)

    def pause(self) -> None:
        """No steps until `resume`: `generate`, `chat` and reading a `stream` raise RuntimeError; `engine.add_request` queues."""
        self.engine.pause()

    def resume(self) -> None:
        """Ends `pause`."""
        self.engine.resume()

    def sleep(self, level: int = 1) -> None:
        """Frees the KV pages, and the weights from the device; see `Engine.sleep`."""
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends `sleep`, or that of "weights" or "kv_cache" alone; see `Engine.wake_up`."""
        self.engine.wake_up(tags)

    def close(self) -> None:
        """Ends every request and closes the engine's demand log."""
        self.engine.close()
        self.grammars.close()

    def describe(self) -> EngineDescription:
        """What was decided for this model on this device: kernels and what its check of them found, memory, limits, programs."""
        return self.engine.description

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. ValueError if none was loaded."""
        return require_tokenizer(self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no SamplingParams are given: the recommendations of the model's generation_config.json, and
        vLLM's defaults where it has none."""
        return self._default_sampling_params

    @functools.cached_property
    def _default_sampling_params(self) -> SamplingParams:
        recommended = self.generation_defaults.sampling()
        left_out = self.generation_defaults.not_applied
        if left_out:
            logger.warning("generation_config.json asks for %s, not taken from a file: give sampling_params", ", ".join(left_out))
        try:
            return SamplingParams(**recommended)
        except ValueError as error:
            raise ValueError(f"generation_config.json of the model: {error}; give sampling_params") from error

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | None | Sequence[int | None] = 0,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Completions of prompts, in their order.

        Args:
          prompts: a text, {"prompt": text}, {"prompt_token_ids": [...]}, a list of token ids, or a list of any of these. A dict may
            hold "cache_salt" too: prompts share cached prefixes only under one salt.
          sampling_params: one for all, or one each; None takes `get_default_sampling_params`.
          use_tqdm: a progress bar on stderr.
          priority: lower is served first (scheduling_policy="priority"); one for all, or one each. None is 0.
          on_error: what becomes of prompts that can't be run. "raise": ValueError naming all of them, before anything runs; for
            that the whole call, its prompts without a form too, waits until its forms (structured_outputs) are compiled: nothing
            else tells whether they can be. What other streams have queued runs meanwhile. "return": their outputs have
            finish_reason "error" and the message as stop_reason; the others run, and wait for no form but their own.

        Raises:
          ValueError: see on_error; also lists of different lengths.
          TypeError: what are no prompts, no SamplingParams or no integer priorities.
          RuntimeError: the engine is asleep, paused, or has no weights.

        Ctrl-C, or any other exception, aborts what this call added; the engine stays usable.
        """
        prompts = as_list(prompts)
        stream = self._start(prompts, tokenize, sampling_params, priority, on_error)
        return self._collect(stream, len(prompts), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | None | Sequence[int | None] = 0,
        on_error: str = "raise",
    ) -> Outputs:
        """As `generate`, yielding (index of the prompt, its output so far) whenever a prompt's output has grown. A prompt's output
        is the same object each time. Arguments are checked at once; the prompts are queued when the first output is asked for.
        Closing the iterator aborts what still runs. Several streams may be read by turns: they share the engine's steps. Raises as
        `generate`."""
        return self._start(as_list(prompts), tokenize, sampling_params, priority, on_error)

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
        priority: int | None | Sequence[int | None] = 0,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Completions of one conversation, or of a list of conversations; see `generate` and `Tokenizer.apply_chat_template`.

        Raises:
          ValueError: also for a template variable (chat_template_kwargs, tools) that the chat template does not read.
        """
        options = dict(chat_template_kwargs or {})
        options |= {"add_generation_prompt": add_generation_prompt, "chat_template": chat_template, "tools": tools}
        chats = as_chats(messages)
        stream = self._start(chats, functools.partial(tokenize_chat, **options), sampling_params, priority, on_error)
        return self._collect(stream, len(chats), use_tqdm)

    def score(
        self,
        texts: Prompt | tuple[Prompt, Prompt] | Sequence[Prompt | tuple[Prompt, Prompt]],
        use_tqdm: bool = True,
        *,
        priority: int | None | Sequence[int | None] = 0,
    ) -> list[ScoreOutput]:
        """The log-probability of each token of given texts; nothing is generated.

        Args:
          texts: prompts as `generate` takes them, or (context, completion) pairs of them, of which only the completion is scored.
            The two are tokenised apart, the completion without special tokens; contexts that pairs share are computed once.
          use_tqdm, priority: as `generate`.

        Raises:
          ValueError: as `generate`, also for a pair with an empty context or completion, or whose completion has a cache_salt other
            than the context's, which is the pair's.
        """
        items = [texts] if is_pair(texts) else as_list(texts)  # pyright: ignore[reportArgumentType]
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        stream = self._start(items, tokenize_to_score, params, priority, "raise")
        return [_score_output(output) for output in self._collect(stream, len(items), use_tqdm)]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of prompts by beam search, as vLLM's; see `BeamSearchParams`.

        Every step is a batch of requests of one token each, which find all but their last page in the prefix cache (turned off,
        each is computed anew). use_tqdm: a progress bar of each step's beams.

        Raises:
          ValueError: as `generate`, also for a prompt that leaves no room for max_tokens.
        """
        longest = self.engine.config.scheduler.max_model_len
        ready = [tokenize(prompt, self.tokenizer) for prompt in as_list(prompts)]
        for i, prompt in enumerate(ready):
            if len(prompt.token_ids) + params.max_tokens > longest:
                raise ValueError(
                    f"prompt {i} has {len(prompt.token_ids)} tokens, and max_tokens={params.max_tokens} more go past "
                    f"max_model_len={longest}; shorten it or lower max_tokens"
                )
        step = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * params.beam_width)

        def expand(beams: list[tuple[int, list[int]]]) -> list[dict[int, Logprob]]:
            asked = [{"prompt_token_ids": tokens, "cache_salt": ready[i].cache_salt} for i, tokens in beams]
            samples = [output.outputs[0] for output in self.generate(asked, step, use_tqdm)]
            for sample in samples:
                if not sample.logprobs:
                    raise RuntimeError(f"beam search: {sample.stop_reason}")
            return [sample.logprobs[0] for sample in samples if sample.logprobs]

        found = search([prompt.token_ids for prompt in ready], params, self.engine.eos_token_ids, expand)
        if self.tokenizer is not None:
            for beam in itertools.chain(*found):
                beam.text = self.tokenizer.decode(beam.tokens)
        return [BeamSearchOutput(beams) for beams in found]

    def chat_prompts(self, messages: Sequence[Message] | Sequence[Sequence[Message]], **options: Any) -> list[Prompt]:
        """The prompts that conversations make, ready for `generate` or `stream`. options: as `Tokenizer.apply_chat_template`'s."""
        chats = [tokenize_chat(chat, self.tokenizer, **options) for chat in as_chats(messages)]
        return [{"prompt": chat.text, "prompt_token_ids": chat.token_ids} for chat in chats]

    def _start(
        self,
        prompts: Sequence[Any],
        tokenize: Callable[..., TokenizedPrompt],  # of (prompt, tokenizer)
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | None | Sequence[int | None],
        on_error: str,
    ) -> Outputs:
        """Everything that can be checked is, before `_run` is ready to start."""
        if on_error not in ("raise", "return"):
            raise ValueError(f"{on_error=} must be 'raise' or 'return'")
        self.engine.check_can_step()
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_each("sampling_params", sampling_params, len(prompts), SamplingParams)
        priorities = priority_of_each(priority, len(prompts))
        run = next(self._runs)
        grammars: dict[int, Future[Grammar]] = {}
        ready: dict[int, TokenizedPrompt] = {}
        requests: dict[int, list[Request]] = {}  # of each prompt: made and checked here, queued when the run begins
        errors: dict[int, str] = {}
        for i, prompt in enumerate(prompts):
            try:
                ready[i] = tokenize(prompt, self.tokenizer)
                params[i] = for_engine(params[i], self.tokenizer)
                form = params[i].structured_outputs
                if form is not None and on_error == "raise":
                    grammars[i] = self.grammars.submit(form)
                requests[i] = self.engine.prepare(
                    f"{run}-{i}",
                    ready[i].token_ids,
                    params[i],
                    priority=priorities[i],
                    cache_salt=ready[i].cache_salt,
                    score_from=ready[i].score_from,
                    stops_at_text=True,
                )
            except ValueError as error:
                errors[i] = str(error)
        for i, grammar in grammars.items():  # all of them compile by now
            self._step_until(grammar)
            try:
                compiled = outcome(grammar)
                if i in requests:
                    check_start(requests[i][0], compiled, self.engine.config.model.vocab_size)
            except ValueError as error:
                errors[i] = str(error)
        if errors and on_error == "raise":
            raise ValueError("; ".join(f"prompt {i}: {message}" if len(prompts) > 1 else message for i, message in errors.items()))
        failed = {}
        for i, message in errors.items():
            prompt = ready.pop(i, None) or TokenizedPrompt(prompts[i] if isinstance(prompts[i], str) else None, [])
            failed[i] = _refused(f"{run}-{i}", prompt, message)
        return self._run(run, ready, requests, failed, params, grammars)

    def _run(
        self,
        run: int,
        ready: dict[int, TokenizedPrompt],
        requests: Mapping[int, list[Request]],
        failed: Mapping[int, RequestOutput],
        params: Sequence[SamplingParams],
        grammars: dict[int, Future[Grammar]],
    ) -> Outputs:
        """grammars: those that are compiled; the rest are asked for when the run begins: one that never does gives nothing up."""
        yield from failed.items()
        index_of: dict[str, int] = {}  # of this run's requests
        try:
            for i in list(ready):
                form = params[i].structured_outputs
                if form is None or i in grammars:
                    continue
                try:
                    grammars[i] = self.grammars.submit(form)
                except ValueError as error:
                    yield i, _refused(f"{run}-{i}", ready.pop(i), str(error))
            for i, prompt in ready.items():
                index_of[f"{run}-{i}"] = i
                self._texts.add(self.engine.add(requests[i], grammar=grammars.get(i)), prompt.text)
            left = len(ready)
            while left:
                for output in self._next_outputs(index_of):
                    left -= output.finished
                    yield index_of[output.request_id], output
        finally:  # nothing to abort after a whole run: finished ids do no harm
            self.engine.abort(index_of)
            self._texts.discard(index_of)
            for grammar in grammars.values():
                self.grammars.give_up(grammar)
            for request_id in index_of:
                self._grown.pop(request_id, None)
            self.engine.drain()

    def _next_outputs(self, request_ids: Mapping[str, Any]) -> list[RequestOutput]:
        """Steps until some of these requests' outputs have grown. What other runs get meanwhile waits for them in `_grown`."""
        while True:
            grown = [request_id for request_id in self._grown if request_id in request_ids]
            if grown:
                return [self._grown.pop(request_id) for request_id in grown]
            self.engine.check_can_step()
            if not self.engine.has_unfinished_requests():
                raise RuntimeError("the requests were aborted from elsewhere, or by an exception in another stream's step")
            self._step()

    def _step_until(self, grammar: Future[Grammar]) -> None:
        """Steps while other runs have anything left to do and the grammar is not compiled; what they get waits for them."""
        while not grammar.done() and self.engine.has_unfinished_requests():
            self._step()

    def _step(self) -> None:
        for output in self._texts.process(self.engine.step()):
            self._grown[output.request_id] = output

    @staticmethod
    def _collect(stream: Outputs, num_prompts: int, use_tqdm: bool) -> list[RequestOutput]:
        done: dict[int, RequestOutput] = {}
        with contextlib.closing(stream), ProgressBar(num_prompts, disable=not use_tqdm) as bar:
            for index, output in stream:
                if output.finished:
                    done[index] = output
                    bar.advance(output)
        return [done[i] for i in range(num_prompts)]


def _score_output(output: RequestOutput) -> ScoreOutput:
    sample, scores = output.outputs[0], output.prompt_scores
    if sample.finish_reason == "error":
        raise RuntimeError(f"request {output.request_id}: {sample.stop_reason}")
    assert scores is not None and not scores.wanted
    return ScoreOutput(output.prompt, output.prompt_token_ids[scores.first :], scores.logprobs, scores.first)


def _refused(request_id: str, prompt: TokenizedPrompt, message: str) -> RequestOutput:
    outputs = [CompletionOutput(0, "", [], finish_reason="error", stop_reason=message)]
    return RequestOutput(request_id, prompt.text, prompt.token_ids, outputs, True)


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)

"""Makes the model and the engine of a server of its options, for a command and for a replica on Ray alike."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.llm import LLM
from jaxserve.models.loading import NoTokenizerError
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.async_llm import AsyncLLM
from jaxserve.serving.options import ModelOptions

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.hosts.group import HostGroup


def load_llm(options: ModelOptions, hosts: HostGroup | None = None) -> LLM:
    """The model with its tokenizer and chat template. hosts: as `LLM`'s. Errors as `LLM`'s; ValueError where there is no
    tokenizer."""
    try:
        llm = LLM(options.model, options.tokenizer, skip_tokenizer_init=options.skip_tokenizer_init, hosts=hosts, **options.engine)
    except NoTokenizerError as error:
        raise ValueError(f"{error.__cause__} (--tokenizer says where one lies, --skip_tokenizer_init does without)") from error
    if options.chat_template is not None:
        llm.get_tokenizer().chat_templates["default"] = options.chat_template
    llm.engine.on_compiled(partial(_leave_programs_uncollected, llm.engine))
    return llm


def _leave_programs_uncollected(engine: Engine) -> None:
    """What compiling behind the steps has left stays, and Python's garbage collector need not look at it again: 50,000 objects of
    a small model's plan, at which a full collection looks for 0.1 s while every stream waits. Nor at what is garbage just then: a
    collection before would be such a pause."""
    if not engine.num_programs_left:
        gc.freeze()


def default_sampling_params(llm: LLM, options: ModelOptions) -> SamplingParams:
    """What requests change."""
    base = SamplingParams() if options.generation_config == "vllm" else llm.get_default_sampling_params()
    return base.with_(**options.sampling_overrides)


def make_engine(llm: LLM, options: ModelOptions) -> AsyncLLM:
    """The engine of one server, not started yet."""
    return AsyncLLM(
        llm,
        max_waiting=options.max_waiting,
        request_timeout=options.request_timeout,
        max_failures=options.max_failures,
        default_sampling_params=default_sampling_params(llm, options),
        max_new_tokens=options.max_new_tokens,
    )

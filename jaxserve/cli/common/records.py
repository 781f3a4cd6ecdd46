"""Prompts as records and their completions as results, which `jaxserve generate` reads and writes.

Owns what a record asks of an LLM and the form of a result. Knows no flags, so that processes of Ray's can run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_KINDS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True)
class Job:
    """A prompt of a run. number: its place. record: as it was given. params: fields of SamplingParams."""

    number: int
    record: dict[str, Any]
    params: dict[str, Any]


@dataclass(frozen=True)
class ChatForm:
    """How a prompt's text is read. as_chat: as a user's message. system: the message before it."""

    as_chat: bool = False
    system: str | None = None

    def prompt_of(self, llm: Any, record: dict[str, Any]) -> Any:
        """What `LLM.generate` takes for a record. ValueError if its messages make no chat."""
        messages = record.get("messages")
        if messages is None and self.as_chat and "prompt" in record:
            system = [{"role": "system", "content": self.system}] if self.system else []
            messages = [*system, {"role": "user", "content": record["prompt"]}]
        prompt = record if messages is None else llm.chat_prompts(messages)[0]
        salt = {"cache_salt": record["cache_salt"]} if "cache_salt" in record else {}
        return {name: prompt[name] for name in PROMPT_KINDS if name in prompt} | salt


def completions(llm: Any, jobs: Sequence[Job], form: ChatForm, *, progress: bool) -> Iterator[tuple[Job, Any]]:
    """(job, RequestOutput) of each, in order, once it and those before it are done. What can't be run ends with "error"."""
    from jaxserve.engine.progress import ProgressBar
    from jaxserve.outputs import CompletionOutput, RequestOutput

    defaults = llm.get_default_sampling_params()
    done, inputs, indices = {}, [], []
    for index, job in enumerate(jobs):
        try:
            inputs.append(form.prompt_of(llm, job.record))
            indices.append(index)
        except ValueError as error:
            failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
            done[index] = RequestOutput(str(job.number), None, [], [failed], True)
    seed = llm.engine.config.engine.seed
    run = [jobs[index] for index in indices]
    params = [defaults.with_(**{"seed": _seed(seed, job.number)} | job.params) for job in run]
    stream = llm.stream(inputs, params, priority=[job.record.get("priority", 0) for job in run], on_error="return")
    written = 0
    with contextlib.closing(stream), ProgressBar(len(inputs), disable=not progress) as bar:
        while written < len(jobs):
            if written in done:
                yield jobs[written], done.pop(written)
                written += 1
                continue
            index, output = next(stream)
            if output.finished:
                done[indices[index]] = output
                bar.advance(output)


def _seed(seed: int, number: int) -> int:
    """Of a prompt that brings none: by the engine's seed and its number, so that a resumed run draws what an unbroken one would."""
    import numpy as np

    return int(np.random.SeedSequence((seed % 2**64, number)).generate_state(1, np.uint64)[0])


def result_of(record: dict[str, Any], output: Any) -> dict[str, Any]:
    """A JSONL result: the record, its completions and its usage in tokens."""
    scores = {} if output.prompt_logprobs is None else {"prompt_logprobs": _plain_logprobs(output.prompt_logprobs)}
    choices = [
        {
            "index": o.index,
            "text": o.text,
            "token_ids": o.token_ids,
            "finish_reason": o.finish_reason,
            "stop_reason": o.stop_reason,
            **({} if o.logprobs is None else {"cumulative_logprob": o.cumulative_logprob, "logprobs": _plain_logprobs(o.logprobs)}),
            **scores,
        }
        for o in output.outputs
    ]
    completion_tokens = sum(len(o.token_ids) for o in output.outputs)
    usage = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": completion_tokens}
    return {**record, "outputs": choices, "usage": usage}


def _plain_logprobs(logprobs: list) -> list[list[dict[str, Any]] | None]:
    """As JSON, which has no infinity: -9999 stands for -inf, as in the server's answers."""

    def plain(token_id: int, x: Any) -> dict[str, Any]:
        return {"token_id": token_id, "token": x.decoded_token, "logprob": max(x.logprob, -9999.0), "rank": x.rank}

    return [entry and [plain(i, x) for i, x in entry.items()] for entry in logprobs]

"""Generates completions of prompts from flags, a text file or JSONL.

    python -m scripts.generate --model=FOLDER --prompt="Once upon a time" --max_tokens=64
    python -m scripts.generate --model=FOLDER --prompts_file=prompts.jsonl --output=completions.jsonl --chat

A text file holds a prompt a line. A JSONL line holds {"prompt": text}, {"prompt_token_ids": [...]} or {"messages": [...]}, and may
hold sampling parameters of its own ("max_tokens", "temperature", ...) and anything else, which is copied to its result.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from absl import app, flags

from scripts.engine_flags import define_engine_flags, engine_options

_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be repeated.")
_FILE = flags.DEFINE_string(
    "prompts_file", None, "Prompts: a .jsonl file, or a text file with one a line; - is stdin (text)."
)
_OUTPUT = flags.DEFINE_string("output", None, "Write results to this JSONL file instead of the terminal.")
_CHAT = flags.DEFINE_bool("chat", False, "Treat each prompt as a user's message of a chat.")
_SYSTEM = flags.DEFINE_string("system", None, "With --chat: the system message.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Most output tokens of each prompt.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy; by default what the model's makers recommend.")
_TOP_P = flags.DEFINE_float("top_p", None, "Keep the likeliest tokens that hold this much probability.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Keep this many of the likeliest tokens; 0 is off.")
_MIN_P = flags.DEFINE_float("min_p", None, "Keep tokens at least this likely, relative to the likeliest.")
_N = flags.DEFINE_integer("n", 1, "Completions of each prompt.", lower_bound=1)
_SAMPLING_SEED = flags.DEFINE_integer(
    "sampling_seed", None, "Seed of every prompt that brings none; by default they differ."
)
_STOP = flags.DEFINE_multi_string("stop", [], "Stop at this text; may be repeated.")
_LOGPROBS = flags.DEFINE_integer(
    "logprobs", None, "Log-probabilities of each token and this many alternatives (JSONL output)."
)
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on to max_tokens.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")
define_engine_flags()


def read_prompts() -> list[dict[str, Any]]:
    """Records of all prompts that the flags name. ValueError names the file and line of a bad one."""
    records: list[dict[str, Any]] = [{"prompt": text} for text in _PROMPT.value]
    if _FILE.value:
        text = sys.stdin.read() if _FILE.value == "-" else Path(_FILE.value).read_text()
        as_json = _FILE.value.endswith(".jsonl")
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                records.append(_record(line, f"{_FILE.value}:{number}") if as_json else {"prompt": line})
    if not records:
        raise app.UsageError("nothing to do: give --prompt or --prompts_file")
    return records


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    kinds = {"prompt", "prompt_token_ids", "messages"}
    if not isinstance(record, dict) or len(kinds & set(record)) != 1:
        raise ValueError(f"{where}: must be an object with exactly one of {', '.join(sorted(kinds))}")
    return record


def sampling_params(llm: Any, record: dict[str, Any]) -> Any:
    """The model's defaults, overridden by the flags, overridden by the record."""
    from jaxserve import SamplingParams

    flagged = {
        "temperature": _TEMPERATURE.value,
        "top_p": _TOP_P.value,
        "top_k": _TOP_K.value,
        "min_p": _MIN_P.value,
        "seed": _SAMPLING_SEED.value,
        "logprobs": _LOGPROBS.value,
        "stop": _STOP.value or None,
    }
    changes: dict[str, Any] = {"max_tokens": _MAX_TOKENS.value, "n": _N.value, "ignore_eos": _IGNORE_EOS.value}
    changes |= {name: value for name, value in flagged.items() if value is not None}
    changes |= {f.name: record[f.name] for f in fields(SamplingParams) if f.name in record}
    return llm.get_default_sampling_params().with_(**changes)


def to_prompt(llm: Any, record: dict[str, Any]) -> Any:
    """What `LLM.generate` takes for a record."""
    messages = record.get("messages")
    if messages is None and _CHAT.value and "prompt" in record:
        system = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
        messages = [*system, {"role": "user", "content": record["prompt"]}]
    if messages is not None:
        return llm.chat_prompts(messages)[0]
    return {name: record[name] for name in ("prompt", "prompt_token_ids", "cache_salt") if name in record}


def result_of(record: dict[str, Any], output: Any) -> dict[str, Any]:
    """A JSONL result: the record, its completions and its usage in tokens."""
    choices = [
        {
            "index": o.index,
            "text": o.text,
            "token_ids": o.token_ids,
            "finish_reason": o.finish_reason,
            "stop_reason": o.stop_reason,
            **({"logprobs": _plain_logprobs(o.logprobs)} if o.logprobs is not None else {}),
        }
        for o in output.outputs
    ]
    completion_tokens = sum(len(o.token_ids) for o in output.outputs)
    usage = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": completion_tokens}
    return {**record, "outputs": choices, "usage": usage}


def _plain_logprobs(logprobs: list) -> list[list[dict[str, Any]]]:
    return [
        [{"token_id": i, "token": x.decoded_token, "logprob": x.logprob, "rank": x.rank} for i, x in entry.items()]
        for entry in logprobs
    ]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; prompts are given by --prompt")
    records = read_prompts()
    from jaxserve import LLM

    llm = LLM(flags.FLAGS.model, flags.FLAGS.tokenizer, **engine_options())
    params = [sampling_params(llm, record) for record in records]
    prompts = [to_prompt(llm, record) for record in records]
    outputs = llm.generate(prompts, params, use_tqdm=_PROGRESS.value, on_error="return")
    failed = 0
    with open(_OUTPUT.value, "w") if _OUTPUT.value else contextlib.nullcontext() as file:
        for record, output in zip(records, outputs, strict=True):
            failed += any(o.finish_reason == "error" for o in output.outputs)
            if file is not None:
                file.write(json.dumps(result_of(record, output), ensure_ascii=False) + "\n")
                continue
            for completion in output.outputs:
                print(f"\n--- {record.get('prompt', 'prompt')!s:.70} [{completion.finish_reason}]")
                print(completion.stop_reason if completion.finish_reason == "error" else completion.text)
    if failed:
        print(f"{failed} of {len(outputs)} prompts failed; their finish_reason is 'error'", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)

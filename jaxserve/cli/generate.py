"""Generates completions of prompts from flags, a text file or JSONL.

    jaxserve generate --model=FOLDER --prompt="Once upon a time" --max_tokens=64
    jaxserve generate --model=FOLDER --prompts_file=prompts.jsonl --output=completions.jsonl --chat

A text file holds a prompt a line. A JSONL line, or a row of a .parquet file, holds {"prompt": text}, {"prompt_token_ids": [...]}
or {"messages": [...]}, and may hold sampling parameters of its own ("max_tokens", "temperature", ...; the fields of
jaxserve.SamplingParams), which win over the flags, "cache_salt" and "priority". Anything else is copied to its result, and said to
be on stderr. With --skip_tokenizer_init, for a folder that has no tokenizer, a prompt is prompt_token_ids, and completions are
token ids without a text.

With --output, a result is a JSONL line: the prompt's own line, "outputs" and "usage" in tokens, in the order of the prompts, each
written once it and those before it are done. An output has index, text, token_ids, finish_reason and stop_reason; logprobs and
cumulative_logprob if logprobs are asked for; prompt_logprobs if those are (null for the first token). A prompt that can't be run
has finish_reason "error" and the message as stop_reason; the others run, and the exit code is 1. A line that is malformed stops
the command before anything is loaded.

With --ray and --output, --replicas engines on Ray share the prompts, in batches of --ray_batch_size. Results keep the prompts'
order.

A run that broke off, however it did, goes on with --resume and otherwise the same flags: results that are whole in the file stay,
in order and as they are, and the first prompt without one comes next.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command, without_collecting
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.fleet import on_ray
from jaxserve.cli.common.hosts import lead_or_follow
from jaxserve.cli.common.records import PROMPT_KINDS, ChatForm, Job, completions, result_of
from jaxserve.sampling_params import SamplingParams

_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be repeated.")
_FILE = flags.DEFINE_string(
    "prompts_file", None, "Prompts: a .jsonl or .parquet file, or a text file with one a line; - is stdin (text)."
)
_OUTPUT = flags.DEFINE_string("output", None, "Write results to this JSONL file instead of the terminal.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on where a run with this --output broke off; otherwise the file is written anew.")
_CHAT = flags.DEFINE_bool("chat", False, "Treat each prompt as a user's message of a chat.")
_SYSTEM = flags.DEFINE_string("system", None, "With --chat: the system message before each prompt.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Most output tokens of each prompt.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy; by default what the model's makers recommend.")
_TOP_P = flags.DEFINE_float("top_p", None, "Keep the likeliest tokens that hold this much probability.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Keep this many of the likeliest tokens; 0 is off.")
_MIN_P = flags.DEFINE_float("min_p", None, "Keep tokens at least this likely, relative to the likeliest.")
_N = flags.DEFINE_integer("n", 1, "Completions of each prompt.", lower_bound=1)
_SAMPLING_SEED = flags.DEFINE_integer("sampling_seed", None, "Seed of every prompt that brings none; by default they differ.")
_STOP = flags.DEFINE_multi_string("stop", [], "Stop at this text; may be repeated.")
_LOGPROBS = flags.DEFINE_integer("logprobs", None, "Log-probabilities of each token and this many alternatives, in --output.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on to max_tokens.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Where the tokenizer lies, if not beside the model.")
_SKIP_TOKENIZER = flags.DEFINE_bool("skip_tokenizer_init", False, "Use no tokenizer: token ids in, token ids out.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")
_BATCH = flags.DEFINE_integer("ray_batch_size", 512, "With --ray, prompts that an engine gets at a time.", lower_bound=1)
define_engine_flags()


SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
OTHER_FIELDS = ("cache_salt", "priority")


def read_prompts() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(record, its sampling parameters) of all prompts that the flags name. ValueError names the file and line of a bad one."""
    records: list[tuple[str, dict[str, Any]]] = [("--prompt", {"prompt": text}) for text in _PROMPT.value]
    if _FILE.value and _FILE.value.endswith(".parquet"):
        records += _read_parquet(_FILE.value)
    elif _FILE.value:
        as_json = _FILE.value.endswith(".jsonl")
        with contextlib.nullcontext(sys.stdin) if _FILE.value == "-" else open(_FILE.value, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):  # not splitlines(), which also splits at what JSON may hold unescaped
                where = f"{_FILE.value}:{number}"
                if line.strip():
                    records.append((where, _parse(line, where) if as_json else {"prompt": line.rstrip("\r\n")}))
    if not records:
        raise app.UsageError("nothing to do: give --prompt or --prompts_file")
    if _SKIP_TOKENIZER.value:
        for where, record in records:
            if "prompt_token_ids" not in record:
                raise ValueError(f"{where}: a text, and --skip_tokenizer_init leaves nobody to tokenise it: give prompt_token_ids")
    return [(record, _sampling(record, where)) for where, record in records]


def _read_parquet(path: str) -> list[tuple[str, dict[str, Any]]]:
    """(where, record) of each row; a field that is null is left out."""
    import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]

    with refuse_bad_input():
        rows = parquet.read_table(path).to_pylist()
    records = []
    for number, row in enumerate(rows, 1):
        try:
            line = json.dumps({name: value for name, value in row.items() if value is not None})
        except TypeError as error:
            raise ValueError(f"{path}: row {number}: {error}: give columns of text, numbers and lists") from None
        records.append((f"{path}: row {number}", _parse(line, f"{path}: row {number}")))
    return records


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict) or len(set(PROMPT_KINDS) & set(record)) != 1:
        raise ValueError(f"{where}: must be an object with exactly one of {', '.join(PROMPT_KINDS)}")
    kind = next(k for k in PROMPT_KINDS if k in record)
    if not isinstance(record[kind], str if kind == "prompt" else list):
        raise ValueError(f"{where}: {kind} must be a {'text' if kind == 'prompt' else 'list'}, found {record[kind]!r}")
    if not isinstance(record.get("cache_salt"), str | None):
        raise ValueError(f"{where}: cache_salt={record['cache_salt']!r} must be a text")
    priority = record.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"{where}: priority={priority!r} must be an integer")
    return record


def _sampling(record: dict[str, Any], where: str) -> dict[str, Any]:
    """What the flags and then the record ask for, checked; the rest is the model's default."""
    flagged = {
        "temperature": _TEMPERATURE.value,
        "top_p": _TOP_P.value,
        "top_k": _TOP_K.value,
        "min_p": _MIN_P.value,
        "seed": _SAMPLING_SEED.value,
        "logprobs": _LOGPROBS.value,
        "stop": _STOP.value or None,
    }
    params: dict[str, Any] = {"max_tokens": _MAX_TOKENS.value, "n": _N.value, "ignore_eos": _IGNORE_EOS.value}
    params |= {name: value for name, value in flagged.items() if value is not None}
    params |= {name: record[name] for name in SAMPLING_FIELDS if name in record}
    if isinstance(params.get("logit_bias"), dict):  # JSON's keys are texts; one that is no number is refused below
        params["logit_bias"] = {int(key) if key.isdecimal() else key: bias for key, bias in params["logit_bias"].items()}
    try:
        SamplingParams(**params)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{where}: {error}") from None
    return params


def check_flags(prompts: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """UsageError for what is asked for and would not be heeded."""
    texts = any("prompt" in record for record, _ in prompts)
    if _CHAT.value and not texts:
        raise app.UsageError("--chat makes a user's message of a prompt's text, and there is none: messages are chats already")
    if _SYSTEM.value is not None and not _CHAT.value:
        raise app.UsageError("--system goes before a prompt's text with --chat; messages and token ids bring their own")
    asking = ("logprobs", "logprob_token_ids", "prompt_logprobs")
    scored = any(params.get(name) is not None for _, params in prompts for name in asking)
    if scored and not _OUTPUT.value:
        raise app.UsageError("log-probabilities are written to --output alone, not to the terminal: give it")


def only_copied(records: list[dict[str, Any]]) -> list[str]:
    """The fields of the records that mean nothing here."""
    return sorted({name for record in records for name in record} - {*PROMPT_KINDS, *SAMPLING_FIELDS, *OTHER_FIELDS})


def finished_results(path: str, records: list[dict[str, Any]]) -> tuple[int, int, int]:
    """(results, failed ones among them, bytes) of the whole lines in a file that an earlier run on these records began.

    What follows them is a line cut short. ValueError if they are not the first records' results.
    """
    num_done = num_failed = num_bytes = 0
    if not Path(path).exists():
        return 0, 0, 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            where = f"{path}:{num_done + 1}"
            try:
                result = json.loads(line)
                outputs = result["outputs"]
                num_failed += any(output["finish_reason"] == "error" for output in outputs)
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{where}: not a result of `jaxserve generate`: nothing to resume") from None
            if num_done == len(records) or _given(result) != _given(records[num_done]):
                raise ValueError(
                    f"{where}: not the result of prompt {num_done + 1}: --resume needs the prompts of the run that broke off"
                )
            num_done += 1
            num_bytes += len(line)
    return num_done, num_failed, num_bytes


def _given(record: dict[str, Any]) -> dict[str, Any]:
    """What a record and its result have in common."""
    return {name: value for name, value in record.items() if name not in ("outputs", "usage")}


def write(result: dict[str, Any], file: TextIO) -> None:
    """A result, to the JSONL file."""
    file.write(json.dumps(result, ensure_ascii=False) + "\n")
    file.flush()


def show(record: dict[str, Any], output: Any) -> None:
    """A result, to the terminal."""
    for completion in output.outputs:
        print(f"\n--- {output.prompt or record.get('prompt', 'prompt')!s:.70} [{completion.finish_reason}]")
        result = completion.token_ids if _SKIP_TOKENIZER.value else completion.text
        print(completion.stop_reason if completion.finish_reason == "error" else result, flush=True)


def serve(jobs: Sequence[Job], num_bytes: int, hosts: Any) -> int:
    """Shows the result of each job; how many failed. num_bytes: of the output file, what stays. hosts: the group that this process
    leads, or None."""
    with contextlib.ExitStack() as stack:
        with refuse_bad_input(), without_collecting():
            from jaxserve import LLM
            from jaxserve.models.loading import NoTokenizerError

            # Opened first, so that a path that can't be written costs no time; emptied last, so that a mistake costs no results.
            file = stack.enter_context(open(_OUTPUT.value, "a", encoding="utf-8")) if _OUTPUT.value else None
            try:
                llm = LLM(flags.FLAGS.model, _TOKENIZER.value, _SKIP_TOKENIZER.value, **engine_options(), hosts=hosts)
            except NoTokenizerError as error:
                advice = "--tokenizer says where one lies; with --skip_tokenizer_init prompts are token ids"
                raise ValueError(f"{error.__cause__} ({advice})") from error
        if file is not None:
            file.truncate(num_bytes)
        num_failed = 0
        for job, output in completions(llm, jobs, chat_form(), progress=_PROGRESS.value):
            num_failed += any(o.finish_reason == "error" for o in output.outputs)
            if file is None:
                show(job.record, output)
            else:
                write(result_of(job.record, output), file)
    return num_failed


def chat_form() -> ChatForm:
    """What the flags say of chats."""
    return ChatForm(_CHAT.value, _SYSTEM.value)


def serve_on_ray(jobs: Sequence[Job], output: str, num_bytes: int) -> int:
    """As `serve`, by engines on Ray. output: the file."""
    from jaxserve.cli.common.ray_records import results_on_ray

    with refuse_bad_input():
        file = open(output, "a", encoding="utf-8")
    num_failed = 0
    with file:
        engine = {"model": flags.FLAGS.model, "tokenizer": _TOKENIZER.value, "skip_tokenizer_init": _SKIP_TOKENIZER.value}
        results = results_on_ray(jobs, chat_form(), engine | engine_options(), batch_size=_BATCH.value, progress=_PROGRESS.value)
        with contextlib.closing(results):
            for number, result in enumerate(results):
                if not number:
                    file.truncate(num_bytes)  # only now: a mistake costs no results
                num_failed += any(output["finish_reason"] == "error" for output in result["outputs"])
                write(result, file)
    return num_failed


def main() -> None:
    if _RESUME.value and not _OUTPUT.value:
        raise app.UsageError("--resume needs --output, the file to go on with")
    ray = on_ray()
    output = _OUTPUT.value
    if ray and not output:
        raise app.UsageError("--ray needs --output, the file that gets the results")
    with refuse_bad_input():
        hosts = None if ray else lead_or_follow(flags.FLAGS.model, engine_options())
        prompts = read_prompts()
    check_flags(prompts)
    copied = only_copied([record for record, _ in prompts])
    if copied:
        print(f"fields that are copied to the results and not used: {', '.join(copied)}", file=sys.stderr)
    num_done = num_failed = num_bytes = 0
    if _RESUME.value and _OUTPUT.value:
        with refuse_bad_input():
            num_done, num_failed, num_bytes = finished_results(_OUTPUT.value, [record for record, _ in prompts])
        print(f"{num_done} of {len(prompts)} prompts are done already", file=sys.stderr)
    jobs = [Job(number, *prompts[number]) for number in range(num_done, len(prompts))]
    if jobs:
        num_failed += serve_on_ray(jobs, output, num_bytes) if ray and output else serve(jobs, num_bytes, hosts)
    if num_failed:
        print(f"{num_failed} of {len(prompts)} prompts failed; their finish_reason is 'error'", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)

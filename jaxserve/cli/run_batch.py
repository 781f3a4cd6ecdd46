"""Answers a file of requests in OpenAI's batch format, and writes a file of their answers.

    jaxserve run-batch -i requests.jsonl -o answers.jsonl FOLDER

A line of the input is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; url may be
/v1/completions or /v1/responses too. Its result is a line {"id", "custom_id", "response", "error"}: response has status_code,
request_id and body. The results are in the order of the requests, each written once it and those before it are done. A line that is
no request has response null and an error that says why; a request that the server refuses has both, and the others run. The exit
code is 1 then.

A run that broke off, however it did, goes on with --resume and otherwise the same flags: results that are whole in the file stay,
and the first request without one comes next.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from absl import flags

from jaxserve.cli.common.command import refuse_bad_input, run_command, without_collecting
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.hosts import lead_or_follow
from jaxserve.cli.common.parser_flags import parsers
from jaxserve.serving.options import ServerOptions

_INPUT = flags.DEFINE_string("input_file", None, "The requests, JSONL.", short_name="i", required=True)
_OUTPUT = flags.DEFINE_string("output_file", None, "Where the answers go, JSONL.", short_name="o", required=True)
_RESUME = flags.DEFINE_bool("resume", False, "Go on where a run with this output broke off; otherwise the file is written anew.")
_NAMES = flags.DEFINE_list("served_model_name", [], "What requests call the model; by default as --model does.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Where the tokenizer lies, if not beside the model.")
_CONCURRENCY = flags.DEFINE_integer(
    "max_concurrency", None, "Requests that run or wait at a time; by default twice max_num_seqs.", lower_bound=1
)
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")
define_engine_flags(warm_up="background")


def make_application() -> tuple[Any, int]:
    """(the server's application, requests that it is asked at a time)."""
    from jaxserve import LLM
    from jaxserve.models.loading import NoTokenizerError
    from jaxserve.serving.app import make_app
    from jaxserve.serving.async_llm import AsyncLLM

    try:
        hosts = lead_or_follow(flags.FLAGS.model, engine_options())
        llm = LLM(flags.FLAGS.model, _TOKENIZER.value, **engine_options(), hosts=hosts)
    except NoTokenizerError as error:
        raise ValueError(f"{error.__cause__} (--tokenizer says where one lies)") from error
    names = tuple(_NAMES.value or [flags.FLAGS.model])
    concurrency = _CONCURRENCY.value or 2 * llm.engine.config.scheduler.max_num_seqs
    engine = AsyncLLM(llm, max_waiting=concurrency)
    options: dict[str, Any] = {"names": names, "root": flags.FLAGS.model, **parsers()}
    return make_app(engine, ServerOptions(**options)), concurrency


async def answer(application: Any, lines: Iterator[Any], concurrency: int, file: BinaryIO, bar: Any) -> int:
    """Writes the results; how many failed."""
    from jaxserve.serving.batch import run_batch

    num_failed = 0
    async with application.router.lifespan_context(application):
        async with contextlib.aclosing(run_batch(application, lines, concurrency)) as results:
            async for result in results:
                num_failed += result["error"] is not None
                file.write(json.dumps(result, ensure_ascii=False).encode() + b"\n")
                file.flush()
                bar.update()
    return num_failed


def main() -> None:
    import asyncio

    from tqdm import tqdm

    from jaxserve.serving.batch import count_results, read_lines

    num_done = num_failed = num_bytes = 0
    with contextlib.ExitStack() as stack:
        with refuse_bad_input():
            num_lines = sum(1 for _ in read_lines(stack.enter_context(open(_INPUT.value, encoding="utf-8"))))
            lines = read_lines(stack.enter_context(open(_INPUT.value, encoding="utf-8")))
            if _RESUME.value and Path(_OUTPUT.value).exists():
                with open(_OUTPUT.value, "rb") as results:
                    try:
                        num_done, num_failed, num_bytes = count_results(results, lines)
                    except ValueError as error:
                        raise ValueError(f"{_OUTPUT.value}: {error}") from None
                print(f"{num_done} of {num_lines} requests are done already", file=sys.stderr)
            # Opened first, so that a path that can't be written costs no time; emptied last, so that a mistake costs no results.
            file = stack.enter_context(open(_OUTPUT.value, "ab"))
            if num_done < num_lines:
                with without_collecting():
                    application, concurrency = make_application()
        file.truncate(num_bytes)
        if num_done < num_lines:
            logging.getLogger("jaxserve.access").setLevel(logging.WARNING)
            bar = stack.enter_context(tqdm(total=num_lines, initial=num_done, unit="request", disable=not _PROGRESS.value))
            num_failed += asyncio.run(answer(application, lines, concurrency, file, bar))
    if num_failed:
        print(f"{num_failed} of {num_lines} requests failed; their results say why in error", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)

"""Workloads: lists of requests, seeded, that benchmarks serve and tuning plans for.

Owns what a named workload is, so that figures under one name compare. Needs no jax; knows nothing of engines. A workload's text is
token ids from the start; where only lengths are given, `prompts` draws the ids.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.lazy_names import Late

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")  # the commands' --help reads WORKLOADS


# Fixed lists: for each request, in order of arrival, (prompt tokens, output tokens).
WORKLOADS: dict[str, list[tuple[int, int]]] = {
    "single": [(32, 64)],
    "eight": [(32, 64)] * 8,
    "thirty_two": [(32, 64)] * 32,
    "prefill": [(512, 1)] * 4,
    "equal_size": [(128, 128)] * 16,
    "short_long_mix": [(32, 32), (512, 128)] * 8,
}

# vLLM's filter of ShareGPT's conversations: tokens of prompt and output each at least, of the prompt and of both at most.
SHAREGPT_MIN_LEN, SHAREGPT_MAX_PROMPT_LEN, SHAREGPT_MAX_TOTAL_LEN = 4, 1024, 2048


@dataclass(frozen=True)
class WorkloadRequest:
    """arrived_at: seconds after the workload's beginning. prompt_token_ids: None where only the length is given."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrived_at: float = 0.0
    prompt_token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are given. Each runs to its full output length; temperature 0 is greedy."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"workload {self.name} has no requests")
        for i, r in enumerate(self.requests):
            if r.num_prompt_tokens < 1 or r.num_output_tokens < 1 or not 0 <= r.arrived_at < math.inf:
                raise ValueError(f"request {i} of workload {self.name} needs at least 1 token each way and a time from 0 on: {r}")

    @property
    def num_prompt_tokens(self) -> int:
        return sum(r.num_prompt_tokens for r in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(r.num_output_tokens for r in self.requests)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of each request."""
        return [(r.num_prompt_tokens, r.num_output_tokens) for r in self.requests]

    @property
    def max_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(r.num_prompt_tokens + r.num_output_tokens for r in self.requests)

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Each request's prompt: its own ids, taken modulo vocab_size so that small models can serve them, or random ones."""
        rng = np.random.default_rng(seed)
        return [
            rng.integers(0, vocab_size, r.num_prompt_tokens).tolist()
            if r.prompt_token_ids is None
            else [i % vocab_size for i in r.prompt_token_ids]
            for r in self.requests
        ]


def fixed(name: str) -> Workload:
    """One of WORKLOADS."""
    if name not in WORKLOADS:
        raise ValueError(f"{name=} must be one of {', '.join(WORKLOADS)}")
    return Workload(name, tuple(WorkloadRequest(p, o) for p, o in WORKLOADS[name]))


def nano_vllm(num_requests: int = 256, seed: int = 0) -> Workload:
    """nano-vllm's benchmark, id for id: prompts and outputs uniform in [100, 1024] tokens, ids in [0, 10000], temperature 0.6."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))) for _ in range(num_requests)]
    requests = (WorkloadRequest(len(p), rng.randint(100, 1024), prompt_token_ids=p) for p in prompts)
    return Workload("nano_vllm", tuple(requests), temperature=0.6)


def random_lengths(num_requests: int, input_len: int, output_len: int, range_ratio: float = 0.0, seed: int = 0) -> Workload:
    """Lengths uniform in [len * (1 - range_ratio), len * (1 + range_ratio)], as vLLM's "random" dataset has them."""
    if not 0 <= range_ratio < 1:
        raise ValueError(f"{range_ratio=} must be in [0, 1)")
    rng = np.random.default_rng(seed)

    def draw(length: int) -> np.ndarray:
        low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
        return np.maximum(rng.integers(low, high + 1, num_requests), 1)

    pairs = zip(draw(input_len).tolist(), draw(output_len).tolist(), strict=True)
    return Workload("random", tuple(WorkloadRequest(p, o) for p, o in pairs))


def sharegpt(
    path: str | os.PathLike[str],
    encode: Callable[[str], list[int]],
    num_requests: int,
    *,
    output_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """First turns of a ShareGPT JSON file, shuffled by the seed, that pass vLLM's filter by length (the SHAREGPT constants).

    encode: text -> token ids. output_len: of every request; None is the length of the answer in the file.

    Raises:
        ValueError: not such a file, or fewer than num_requests conversations pass.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        turns = [[turn["value"] for turn in entry["conversations"][:2]] for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not ShareGPT's JSON, a list of {{'conversations': [{{'value': text}}, ...]}} ({error!r})"
        ) from None
    turns = [turn for turn in turns if len(turn) == 2]
    random.Random(seed).shuffle(turns)
    requests: list[WorkloadRequest] = []
    for question, answer in turns:
        if len(requests) == num_requests:
            break
        prompt = encode(question)
        num_output = len(encode(answer)) if output_len is None else output_len
        long_enough = len(prompt) >= SHAREGPT_MIN_LEN and (output_len is not None or num_output >= SHAREGPT_MIN_LEN)
        if long_enough and len(prompt) <= SHAREGPT_MAX_PROMPT_LEN and len(prompt) + num_output <= SHAREGPT_MAX_TOTAL_LEN:
            requests.append(WorkloadRequest(len(prompt), num_output, prompt_token_ids=tuple(prompt)))
    if len(requests) < num_requests:
        raise ValueError(f"{path} has {len(requests)} conversations of a fitting length, {num_requests} were asked for")
    return Workload("sharegpt", tuple(requests))


def trace(path: str | os.PathLike[str], num_requests: int | None = None, max_len: int | None = None) -> Workload:
    """The first requests of a CSV file with the columns num_prefill_tokens, num_decode_tokens and perhaps arrived_at (seconds);
    gzip'd if its name ends in .gz. max_len: requests with more tokens than that, prompt and output, are left out.

    Raises:
        ValueError: a column is missing, or a value is absent or no finite number (the line is named); the file is cut or not gzip;
          fewer than num_requests rows, or none at all.
    """
    opened = gzip.open(path, "rt", newline="") if str(path).endswith(".gz") else open(path, newline="")
    requests: list[WorkloadRequest] = []
    with opened as file:
        try:
            rows = csv.DictReader(file)
            missing = {"num_prefill_tokens", "num_decode_tokens"} - set(rows.fieldnames or ())
            if missing:
                found = ", ".join(rows.fieldnames or ())
                raise ValueError(f"{path} lacks the columns {', '.join(sorted(missing))}; found {found}")
            for row in rows:
                if len(requests) == num_requests:
                    break
                try:
                    request = _request_of(row)
                except ValueError as error:
                    raise ValueError(f"{path}:{rows.line_num}: {error}") from None
                if max_len is None or request.num_prompt_tokens + request.num_output_tokens <= max_len:
                    requests.append(request)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is no whole gzip file: {error}") from None
    fitting = "" if max_len is None else f" of at most {max_len} tokens"
    if not requests:
        raise ValueError(f"{path} has no request{fitting}: give a file with a line for each after the line of column names")
    if num_requests is not None and len(requests) < num_requests:
        raise ValueError(f"{path} has {len(requests)} requests{fitting}, {num_requests} were asked for; ask for fewer")
    return Workload(Path(path).name.split(".")[0], tuple(requests))


def _request_of(row: dict[str, str | None]) -> WorkloadRequest:
    """The request of a trace's row. ValueError says what it lacks."""
    for name in ("num_prefill_tokens", "num_decode_tokens", "arrived_at"):
        if name in row and not row[name]:
            raise ValueError(f"{name} is missing")
    arrived_at = float(row.get("arrived_at") or 0.0)
    if not math.isfinite(arrived_at):
        raise ValueError(f"{arrived_at=} must be a finite number of seconds")
    return WorkloadRequest(int(row["num_prefill_tokens"] or 0), int(row["num_decode_tokens"] or 0), arrived_at)

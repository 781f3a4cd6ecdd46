"""The requests of a soak, good and bad, and what counts as a leak. Knows no server."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reading:
    """The server between two rounds. rss_mb: None where no process is known."""

    num_requests: int
    rss_mb: float | None
    threads: int | None
    files: int | None


def schema(rng: random.Random) -> dict[str, Any]:
    """A JSON schema that has hardly been seen before."""
    name = "".join(rng.choices("abcdef", k=6))
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": False}


def prompt(rng: random.Random) -> Any:
    """In one of the ways that a completion can have it."""
    texts = ["".join(rng.choices("abc def, ", k=rng.randint(1, 200))) for _ in range(rng.randint(2, 4))]
    token_ids = [rng.choices(range(32, 127), k=len(text)) for text in texts]
    return rng.choice([texts[0], texts[0], texts, token_ids[0], token_ids])


def extras(rng: random.Random, chat: bool) -> list[dict[str, Any]]:
    """Of which a request has some."""
    function = {"name": "look_up", "parameters": schema(rng), "strict": rng.random() < 0.5}
    tools = {"tools": [{"type": "function", "function": function}]}
    named = {"type": "function", "function": {"name": "look_up"}}
    own: list[dict[str, Any]] = [{"echo": True}, {"echo": True, "logprobs": 1, "max_tokens": 1}, {"logprobs": rng.randint(0, 5)}]
    of_chats = [
        tools,
        tools | {"tool_choice": rng.choice(["required", named])},
        {"logprobs": True, "top_logprobs": rng.randint(0, 5)},
    ]
    return [
        {"n": rng.randint(1, 4)},
        {"stop": rng.choice(["a", ["b", "."], "zzz"])},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": rng.randint(0, 2**31)},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"logit_bias": {str(rng.randint(0, 200)): rng.uniform(-50, 50)}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"min_tokens": 2, "ignore_eos": True},
        {"prompt_logprobs": 1},
        {"timeout": 600},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(rng)}}},
        {"structured_outputs": rng.choice([{"choice": ["yes", "no"]}, {"regex": f"[a-z]{{{rng.randint(1, 40)}}}"}])},
        *(of_chats if chat else own),
    ]


def request(rng: random.Random) -> tuple[str, dict[str, Any], float | None]:
    """(path, body, seconds after which the client leaves) of a request that may be good or bad."""
    chat = rng.random() < 0.4
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 32),
        "stream": rng.random() < 0.5,
        "temperature": rng.choice([0, 0.7, 1.5]),
    }
    text = "".join(rng.choices("abc def, ", k=rng.randint(1, 200)))
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": prompt(rng)}
    for extra in rng.sample(extras(rng, chat), rng.randint(0, 3)):
        body |= extra
    if rng.random() < 0.15:
        wrong = [
            {"temperature": -1},
            {"n": 0},
            {"unknown": 1},
            {"model": "none"},
            {"max_tokens": "many"},
            {"stop": ""},
            {"top_p": 7},
            {"structured_outputs": {"regex": "("}},
            {"messages": []} if chat else {"prompt": [1, "a"]},
        ]
        body |= rng.choice(wrong)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return path, body, rng.choice([0.001, 0.05, 0.3]) if rng.random() < 0.15 else None


def faults(readings: Sequence[Reading], held: float, statuses: Counter[str], max_growth_mb: float) -> list[str]:
    """What is wrong, in words. held: what `left_over` found; growth is from the end of the first third of the readings on."""
    found = [f"{count} answers with status {status}" for status, count in statuses.items() if status.startswith("5")]
    found += [f"{count} times {name}" for name, count in statuses.items() if name.endswith("Error")]
    if held:
        found.append(f"requests or pages stayed behind ({held:g})")
    settled = readings[len(readings) // 3 :]
    first, last = settled[0], settled[-1]
    if first.rss_mb is not None and last.rss_mb is not None and last.rss_mb - first.rss_mb > max_growth_mb:
        found.append(f"memory grew from {first.rss_mb:.0f} to {last.rss_mb:.0f} MB")
    for name, before, after in (("open files", first.files, last.files), ("threads", first.threads, last.threads)):
        if before is not None and after is not None and after > before + 4:
            found.append(f"{name} grew from {before} to {after}")
    return found

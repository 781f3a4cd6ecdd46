"""Prefill and decode on servers of their own: what passes between a router and them, beside the request.

A router sends a request with PREFILL_HEADER to a prefill server. That computes the prompts, waits until their full pages lie in
the store that it shares with the decode servers, and answers with STORED_HEADER: "PAGES:HASH" for each prompt, or "-", with commas
between them. The router sends the same request with that header to a decode server, which loads the pages and computes the rest.
What the header says is a hint: a page that is not there, or has another name here, is computed.

Owns the headers, and what a prefill server makes of a request. The idea is that of DistServe (Zhong et al., OSDI 2024) and
Splitwise (Patel et al., ISCA 2024).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import replace

from starlette.responses import Response

from jaxserve.request import StoredPrefix
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.errors import RefusedError
from jaxserve.serving.options import Role
from jaxserve.serving.responses import Prefilled, encode
from jaxserve.serving.streams import AnswerStream, Ask

PREFILL_HEADER = "x-jaxserve-prefill"
STORED_HEADER = "x-jaxserve-stored"
MAX_TOLD = 64  # prompts of a request whose pages are told of; those behind them are computed
_NOTHING = "-"
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def asks_for_prefill(headers: Mapping[str, str]) -> bool:
    """Whether the prompts of a request are to be computed and stored, and nothing is to be generated."""
    return PREFILL_HEADER in headers


def check_role(role: Role | None, headers: Mapping[str, str]) -> None:
    """Raises RefusedError where a request is for a server of another role."""
    if asks_for_prefill(headers) and role != "prefill":
        raise RefusedError(f"{PREFILL_HEADER} is for a server with --role=prefill, and this one has {role or 'none'}")
    if role == "prefill" and not asks_for_prefill(headers):
        raise RefusedError("this server has --role=prefill and generates nothing: ask the router, or a decode server")


def hand_over(asks: list[Ask], headers: Mapping[str, str]) -> list[Ask]:
    """The prompts of a request, with what its headers say of their pages. ValueError: STORED_HEADER is malformed."""
    if asks_for_prefill(headers):
        return [replace(ask, params=_ONE_TOKEN, keeps_prompt=True) for ask in asks]
    said = headers.get(STORED_HEADER)
    if said is None:
        return asks
    try:
        told = [None if part == _NOTHING else StoredPrefix.parse(part) for part in said.split(",")]
    except ValueError as error:
        raise ValueError(f"{STORED_HEADER}: {error}") from None
    return [replace(ask, stored_prefix=prefix) for ask, prefix in zip(asks, told, strict=False)] + asks[len(told) :]


async def answer_prefill(opening: Awaitable[AnswerStream]) -> Response:
    """The answer of a prefill server, once the prompts are stored, or as much of them as can be within some seconds."""
    stored: dict[str, StoredPrefix | None] = {}
    async with await opening as stream:
        async for delta in stream:
            if delta.last:
                stored[delta.request_id] = delta.stored_prefix
    told = [str(stored.get(name) or _NOTHING) for name in stream.request_ids][:MAX_TOLD]
    num_tokens = sum(len(ask.prompt_token_ids) for ask in stream.asks.values())
    headers = {STORED_HEADER: ",".join(told)}
    return Response(encode(Prefilled(prompt_tokens=num_tokens, stored=told)), headers=headers, media_type="application/json")

"""A router: one address in front of several servers, each request passed on to the one that a policy chooses.

Owns which requests are passed on, what is retried, which prompts prefill servers compute first, and the router's own answers. An
answer passes through byte for byte, unread.
Knows neither how a server is chosen (policy.py) nor how its health is checked (backends.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.routing.backends import UNANSWERED, UNREACHED, Answer, Backend, end_to_end, open_session
from jaxserve.routing.control import EMPTY_CACHES, ask_all
from jaxserve.routing.health import BackendHealth
from jaxserve.routing.metrics import RouterMetrics
from jaxserve.routing.options import RouterOptions
from jaxserve.routing.policy import Choice, Load, make_policy
from jaxserve.routing.prompts import BLOCK_BYTES, PROMPTED, prompt_blocks
from jaxserve.serving.errors import error_response, on_error
from jaxserve.serving.handover import PREFILL_HEADER, STORED_HEADER
from jaxserve.serving.keys import KeyRing
from jaxserve.serving.messages import UnavailableError
from jaxserve.serving.middleware import KeyCheck, LastResort, RequestLog, body_limit
from jaxserve.serving.options import CONTROL_PATHS
from jaxserve.serving.responses import encode
from jaxserve.serving.streaming import ClientGoneError, EventStream, unless_gone

logger: logging.Logger = logging.getLogger("jaxserve")

Headers = list[tuple[bytes, bytes]]
_PREFILL, _STORED = PREFILL_HEADER.encode(), STORED_HEADER.encode()
_OURS = (_PREFILL, _STORED)  # said by this router alone, not by its clients
OF_ONE_SERVER = (*CONTROL_PATHS, "/inference/v1/abort_requests")
PATHS = frozenset(
    (
        *PROMPTED,
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/version",
        "/load",
        "/ping",
    )
    + ("/", "/openapi.json", "/health", "/metrics", *OF_ONE_SERVER)
)
HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
REFUSED = (429, 503)  # the server has run nothing of the request, so another may be asked
MAX_BROKEN = 2  # servers that may fail with one request before it is given up: it may be the cause


class PassedOn(EventStream):
    """An answer that is passed on to the client, sent as EventStream does. When it ends, the server's connection is closed too."""

    def __init__(self, answer: Answer, patience: float):
        super().__init__(answer.chunks(), answer.close, patience)
        self.status_code: int = answer.status
        # The server's x-request-id is ours too, and the log adds it.
        self.raw_headers: list[tuple[bytes, bytes]] = end_to_end(answer.raw_headers, b"x-request-id")


class Router:
    """Passes requests on. `app` is the ASGI application. Raises ValueError as `KeyRing`."""

    def __init__(self, options: RouterOptions):
        self._options = options
        self.keys: KeyRing = KeyRing(options.api_keys, options.api_keys_file, counts_tokens=False)
        self._policy, self._prefill_policy = make_policy(options.policy), make_policy(options.policy)
        self._missing: str | None = None  # what was said last of a role without a partner
        self.backends: dict[str, Backend] = {}
        self.metrics: RouterMetrics = RouterMetrics(self.backends, self.keys)
        self.app: Starlette = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *(
                    Route(path, self._refuse_method, methods=HTTP_METHODS) for path in ("/health", "/metrics")
                ),  # ours, not a server's
                # Passed to one of several servers, these would leave them in different states.
                *(Route(path, self._control, methods=HTTP_METHODS) for path in CONTROL_PATHS if options.enable_control),
                *(Route(path, self._refuse, methods=HTTP_METHODS) for path in OF_ONE_SERVER),
                Route("/{path:path}", self._pass_on, methods=HTTP_METHODS),
            ],
            lifespan=self._lifespan,
            exception_handlers={ClientGoneError: _nobody_listens, HTTPException: on_error, UnavailableError: on_error},
            middleware=[
                Middleware(RequestLog, paths=lambda: PATHS, count=self.metrics.count_http),
                Middleware(KeyCheck, keys=self.keys, open_paths=options.open_paths, control_paths=CONTROL_PATHS),
                Middleware(LastResort),
                body_limit(options),
            ],
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        """Checks all servers before the first request is taken, and watches them until the last is answered."""
        options = self._options
        async with open_session() as session, asyncio.TaskGroup() as tasks:
            for url in options.backends:
                health = BackendHealth(options.max_failures, options.min_successes)
                forget = functools.partial(self._forget, url)
                self.backends[url] = Backend(url, session, health, options.backend_api_key, forget)
            await asyncio.gather(*(backend.check(options.check_timeout) for backend in self.backends.values()))
            self._say_what_is_missing()
            watches = [tasks.create_task(b.watch(options.check_seconds, options.check_timeout)) for b in self.backends.values()]
            yield
            for watch in watches:
                watch.cancel()

    def _forget(self, url: str) -> None:
        self._policy.forget(url)
        self._prefill_policy.forget(url)

    def _num_up(self) -> tuple[int, int]:
        """How many servers are up: those that compute prompts for others, and all others."""
        up = [backend.role == "prefill" for backend in self.backends.values() if backend.health.up]
        return sum(up), len(up) - sum(up)

    def _say_what_is_missing(self) -> None:
        """Logs a line when servers of one role lose those of the other, or never had them."""
        num_prefill, num_others = self._num_up()
        missing = None
        if num_prefill and not num_others:
            missing = self._unavailable()
        elif not num_prefill and any(backend.role == "decode" and backend.health.up for backend in self.backends.values()):
            missing = "no server with --role=prefill is up: decode servers compute prompts themselves"
        if missing is not None and missing != self._missing:
            logger.warning("%s", missing)
        self._missing = missing

    def _unavailable(self) -> str:
        num_prefill, num_others = self._num_up()
        if num_prefill and not num_others:
            only = f"{num_prefill} of {len(self.backends)} are up, with --role=prefill"
            return f"no server generates ({only}): start one with --role=decode"
        return f"none of the {len(self.backends)} servers takes requests"

    async def _health(self, _: Request) -> Response:
        num_prefill, num_others = self._num_up()
        if not num_others:
            raise UnavailableError(self._unavailable())
        said: dict[str, object] = {"status": "ok", "servers": len(self.backends), "up": num_prefill + num_others}
        if num_prefill or any(backend.role for backend in self.backends.values()):
            said["up_by_role"] = {"prefill": num_prefill, "decode": num_others}
        versions = {url: backend.weight_version for url, backend in self.backends.items() if backend.weight_version is not None}
        if versions:
            said["weight_versions"] = versions
        return Response(encode(said), media_type="application/json")

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _refuse_method(self, request: Request) -> Response:
        raise HTTPException(405, f"{request.scope['path']} is for GET, not for {request.method}", {"Allow": "GET, HEAD"})

    async def _refuse(self, request: Request) -> Response:
        path = request.scope["path"]
        instead = ", or start the router with --enable_control" if path in CONTROL_PATHS else ""
        message = f"{path} is for one server, not for a router: send it to each of them{instead}"
        return error_response(request.scope, 403, message)

    async def _control(self, request: Request) -> Response:
        status, answer = await ask_all(self.backends, request.method, *_target_of(request), await request.body())
        if request.method == "POST" and request.scope["path"] in EMPTY_CACHES:
            for url in self.backends:
                self._forget(url)
        return Response(encode(answer), status, media_type="application/json")

    async def _pass_on(self, request: Request) -> Response:
        body = await request.body()
        answer = await unless_gone(request, self._ask(request, body))
        return PassedOn(answer, self._options.patience)

    async def _ask(self, request: Request, body: bytes) -> Answer:
        """The first answer that is no refusal; another server is asked only while no byte of an answer has come.

        Raises:
          HTTPException: 502 if servers failed with this request, 400 for a path that is none.
          UnavailableError: no server takes requests.
        """
        target, headers = _target_of(request)
        blocks = prompt_blocks(request.scope["path"], body)
        tried: set[str] = set()
        refusal: Answer | None = None
        num_broken = 0
        self._say_what_is_missing()
        try:
            while (loads := self._loads(tried)) and num_broken < MAX_BROKEN:
                choice = self._policy.choose(blocks, loads)
                tried.add(choice.server)
                self.metrics.count_choice(choice)
                if len(tried) == 1:
                    self.metrics.count_blocks(len(blocks), choice.num_matched)
                    if self._pays_to_prefill(blocks, choice):
                        headers += await self._prefill(self.backends[choice.server], request.method, target, headers, body, blocks)
                try:
                    answer = await self.backends[choice.server].ask(request.method, target, headers, body)
                except UNANSWERED as error:
                    num_broken += not isinstance(error, UNREACHED)
                    continue
                if answer.status not in REFUSED:
                    return answer
                answer.backend.num_refused += 1
                if refusal is not None:
                    refusal.close()
                refusal = answer
            if refusal is not None:
                answer, refusal = refusal, None
                return answer
        finally:
            if refusal is not None:
                refusal.close()
        if num_broken:
            raise HTTPException(502, f"{num_broken} server{'s' * (num_broken > 1)} broke off before answering this request")
        raise UnavailableError(self._unavailable())

    def _loads(self, tried: set[str], *, prefill: bool = False) -> dict[str, Load]:
        """Those of the servers that are up and were not tried: the prefill servers, or all others."""
        found = {url: backend for url, backend in self.backends.items() if backend.health.up and url not in tried}
        return {url: backend.load for url, backend in found.items() if (backend.role == "prefill") is prefill}

    def _pays_to_prefill(self, blocks: Sequence[bytes], choice: Choice) -> bool:
        """Whether a prefill server is to compute a prompt for the server that was chosen for it."""
        num_new_bytes = BLOCK_BYTES * (len(blocks) - choice.num_matched)
        return bool(blocks) and num_new_bytes >= self._options.min_prefill_bytes and self._num_up()[0] > 0

    async def _prefill(
        self, expecting: Backend, method: str, target: str, headers: Headers, body: bytes, blocks: Sequence[bytes]
    ) -> Headers:
        """The header that says which pages of the prompt a prefill server has stored; nothing where none has: then the server that
        is `expecting` the request computes them. A client's mistake is for that server to answer, too."""
        tried: set[str] = set()
        stored: Headers = []
        expecting.num_expected += 1
        try:
            while not stored and len(tried) < MAX_BROKEN and (loads := self._loads(tried, prefill=True)):
                choice = self._prefill_policy.choose(blocks, loads)
                tried.add(choice.server)
                self.metrics.count_choice(choice)
                with contextlib.suppress(*UNANSWERED):
                    answer = await self.backends[choice.server].ask(method, target, [*headers, (_PREFILL, b"1")], body)
                    answer.close()
                    stored = [(_STORED, value) for key, value in answer.raw_headers if key.lower() == _STORED]
                    if answer.status not in REFUSED:
                        break
        finally:
            expecting.num_expected -= 1
        self.metrics.count_prefill(bool(stored))
        return stored


def make_router(options: RouterOptions) -> Starlette:
    """The router's application; `state.keys` is its KeyRing. Raises as `Router`."""
    router = Router(options)
    router.app.state.keys = router.keys
    return router.app


def _target_of(request: Request) -> tuple[str, Headers]:
    """(path and query, headers) of a request as servers get them. HTTPException 400: its path is none."""
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    if not path.startswith("/"):
        raise HTTPException(400, f"{path!r} is no path")
    headers = end_to_end(request.scope["headers"], b"host", b"content-length", b"expect", b"x-request-id", *_OURS)
    headers.append((b"x-request-id", request.state.request_id.encode()))
    return f"{path}?{query}" if query else path, headers


async def _nobody_listens(_: Request, __: Exception) -> Response:
    return Response(status_code=499)

"""Middleware by which tests know the process that has answered."""

import os

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Pid:
    """Gives each answer the header X-Pid."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-pid", str(os.getpid()).encode())]
            await send(message)

        await self.app(scope, receive, send_marked)

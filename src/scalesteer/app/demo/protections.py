"""What every request to the page is held to: who sends it, its size and time, and what a browser may do."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HOST = "127.0.0.1"
MOST_BYTES = 5 << 20  # of a picture
MOST_CONNECTIONS = 64  # at a time
MOST_WAITING = 16  # of them for an answer, one of which is worked on
MOST_HEADERS = 100
MOST_HEADER_BYTES = 1 << 15  # of a request's first line and headers together
SECONDS = 10.0  # that a client has to send its request, and again to read its answer
HEADERS = {
    # No other page may frame this one or read from it, and it loads nothing from elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Connection": "close",  # one request on one connection: whatever comes after it is not read
}
PICTURES = ("image/png", "image/jpeg")


class RequestError(Exception):
    """A request that is refused: with which status, and why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def to_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def refusal(status: int, why: str) -> bytes:
    """A whole answer, for what is refused before it is a request."""
    body = to_json({"error": why})
    told = {**HEADERS, "Content-Type": "application/json", "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{head}\r\n".encode() + body


async def refuse(send: Send, error: RequestError) -> None:
    """Answer a request with why it is refused."""
    body = to_json({"error": str(error)})
    told = {"content-type": "application/json", "content-length": str(len(body))}
    headers = [(name.encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": int(error.status), "headers": headers})
    await send({"type": "http.response.body", "body": body})


class PolicyHeaders:
    """Says in every answer what a browser may do with it: `HEADERS`."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self.headers]
            await send(message)

        await self.app(scope, receive, send_with_headers)


class OwnPagesOnly:
    """Refuses what another site's page makes a browser send, known by its origin or by a name that it gave us."""

    def __init__(self, app: App, port: int) -> None:
        self.app = app
        hosts = {f"{name}:{port}" for name in (HOST, "localhost")} | ({HOST, "localhost"} if port == 80 else set())
        self.hosts = {host.encode() for host in hosts}
        self.origins = {b"http://" + host for host in self.hosts}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            self._check(scope["headers"])
        except RequestError as error:
            await refuse(send, error)
        else:
            await self.app(scope, receive, send)

    def _check(self, headers: list[tuple[bytes, bytes]]) -> None:
        if len(headers) > MOST_HEADERS:
            raise RequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request has too many headers.")
        named = [value for name, value in headers if name == b"host"]
        if len(named) != 1 or named[0] not in self.hosts:
            raise RequestError(HTTPStatus.FORBIDDEN, "this page is only for this machine: open it at 127.0.0.1.")
        if any(value not in self.origins for name, value in headers if name == b"origin"):
            raise RequestError(HTTPStatus.FORBIDDEN, "another site may not use this page.")


class WholePicture:
    """Reads a picture that a request carries before the application sees it, within limits of size and time."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "POST":
                receive = _replay(await self._read(scope, receive), receive)
        except RequestError as error:
            await refuse(send, error)
        else:
            await self.app(scope, receive, send)

    async def _read(self, scope: Message, receive: Receive) -> bytes:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if b"transfer-encoding" in headers or not length.isdigit():
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "the request must say its length.")
        if len(length) > 12 or int(length) > MOST_BYTES:
            limit = f"{MOST_BYTES >> 20} MiB"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the picture must have at most {limit}.")
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower().decode("latin-1") not in PICTURES:
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the picture must be a PNG or JPEG file.")
        content = bytearray()
        try:
            async with asyncio.timeout_at(scope["state"]["deadline"]):
                while True:
                    message = await receive()
                    content += message.get("body", b"")
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        break
        except TimeoutError:
            content.clear()
        if len(content) < int(length):
            raise RequestError(HTTPStatus.REQUEST_TIMEOUT, "the picture did not arrive.")
        return bytes(content)


def _replay(content: bytes, receive: Receive) -> Receive:
    """What an application receives of a body that was read already."""
    whole: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return again

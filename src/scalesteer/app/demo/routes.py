"""The addresses of the page: its files, and the networks' answers as JSON."""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from scalesteer.app.demo.asking import SIZES
from scalesteer.app.demo.companions import NotHereError
from scalesteer.app.demo.model import DemoModel
from scalesteer.app.demo.protections import OwnPagesOnly, PolicyHeaders, RequestError, WholePicture, to_json
from scalesteer.app.demo.worker import BusyError, Worker
from scalesteer.app.pictures import PictureError

STATIC = Path(__file__).with_name("static")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}  # of the files that are served
log = logging.getLogger("scalesteer")


def find_pages(folder: Path = STATIC) -> dict[str, tuple[bytes, str]]:
    """What is served at which path: content and kind of every file of a known kind, read now."""
    found = {f"/{path.name}": path for path in sorted(folder.iterdir()) if path.suffix in KINDS}
    found["/"] = found.pop("/index.html")
    return {name: (path.read_bytes(), KINDS[path.suffix]) for name, path in found.items()}


def make_app(model: DemoModel, worker: Worker, port: int) -> Any:
    """The application, with all of its protections.

    Everything that a network is asked goes through the `worker`: the loop that serves never waits for it.
    """

    async def ask(request: Request, thing: Callable[[], Any]) -> Response:
        """What the worker says; who has gone away is not waited for."""
        try:
            work = worker.ask(thing)
        except BusyError:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too many pictures at once: try again.") from None
        answer = asyncio.wrap_future(work)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                return Response(status_code=HTTPStatus.NO_CONTENT)  # to nobody
            return Response(to_json(answer.result()), media_type="application/json")
        finally:
            gone.cancel()

    def page(content: bytes, kind: str) -> Callable[[Request], Any]:
        async def show(request: Request) -> Response:
            return Response(content, headers={"Content-Type": kind})

        return show

    async def network(request: Request) -> Response:
        return await ask(request, model.describe)

    async def filters(request: Request) -> Response:
        return await ask(request, model.filters)

    async def answer(request: Request) -> Response:
        content, size = await request.body(), _size(request.url.query)
        return await ask(request, lambda: model.answer(model.read(content), size))

    async def curve(request: Request) -> Response:
        content = await request.body()
        return await ask(request, lambda: model.curve(model.read(content)))

    async def find(request: Request) -> Response:
        content = await request.body()
        return await ask(request, lambda: model.find(content))

    routes = [Route(path, page(*file), methods=["GET"]) for path, file in find_pages().items()]
    routes += [Route("/api/network", network, methods=["GET"]), Route("/api/filters", filters, methods=["GET"])]
    reads = [Middleware(WholePicture)]
    for path, endpoint in (("/api/answer", answer), ("/api/curve", curve), ("/api/find", find)):
        routes.append(Route(path, endpoint, methods=["POST"], middleware=reads))
    handlers = {HTTPException: _refuse_http, Exception: _fail, RequestError: _refuse, PictureError: _refuse_picture}
    handlers |= {NotHereError: _refuse_missing}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return PolicyHeaders(OwnPagesOnly(app, port))


async def _gone(request: Request) -> None:
    """Returns when the client goes away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


def _size(query: str) -> float:
    """The size that a query asks for."""
    values = parse_qs(query).get("size", [])
    try:
        size = float(values[0]) if len(values) == 1 else float("nan")
    except ValueError:
        size = float("nan")
    if not SIZES[0] - 1e-9 <= size <= SIZES[-1] + 1e-9:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"size must be a number from {SIZES[0]:g} to {SIZES[-1]:g}.")
    return size


def _error(status: int, why: str) -> Response:
    return Response(to_json({"error": why}), status, media_type="application/json")


def _refuse(request: Request, error: Exception) -> Response:
    return _error(error.status, str(error)) if isinstance(error, RequestError) else _fail(request, error)


def _refuse_picture(request: Request, error: Exception) -> Response:
    return _error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))


def _refuse_missing(request: Request, error: Exception) -> Response:
    return _error(HTTPStatus.NOT_FOUND, str(error))


def _refuse_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
    return _error(status, "there is no such page." if status == HTTPStatus.NOT_FOUND else HTTPStatus(status).phrase)


def _fail(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "something went wrong: the terminal says what.")

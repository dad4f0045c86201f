"""The server of the page: this machine's own, with limits on everything that it is sent."""

import json
import logging
import socket
import threading
import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from scalesteer._text import printable
from scalesteer.app.demo.model import SIZES, DemoModel
from scalesteer.app.pictures import PictureError

HOST = "127.0.0.1"
STATIC = {  # the only files that are served, read when the server starts
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
MOST_BYTES = 5 << 20  # of a picture
MOST_CONNECTIONS = 64  # at a time
MOST_WAITING = 16  # of them for an answer, one of which is worked on
SECONDS = 10.0  # that a client has to send its request
HEADERS = {
    # No other page may frame this one or read from it, and it loads nothing from elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
log = logging.getLogger("scalesteer")


class RequestError(Exception):
    """A request that is refused: with which status, and why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class DemoServer(ThreadingHTTPServer):
    """Serves the page and what a network says, on 127.0.0.1 only.

    Args:
        model: The network.
        port: 0 takes any that is free; :attr:`url` says which.

    Raises:
        ValueError: If the port is in use.
    """

    daemon_threads, block_on_close = True, False  # the end does not wait for an answer
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, model: DemoModel, port: int = 0) -> None:
        if not 0 <= port < 1 << 16:
            raise ValueError(f"`port` must be from 0 to 65535 (got {port}).")
        self.model = model
        folder = Path(__file__).with_name("static")
        self.pages = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in STATIC.items()}
        self.connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.waiting, self.turn = threading.BoundedSemaphore(MOST_WAITING), threading.Lock()
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise ValueError(
                f"port {port} cannot be used ({error.strerror}): choose another one with --port."
            ) from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.acquire(blocking=False):
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection broke", exc_info=True)  # the client went away


class Handler(BaseHTTPRequestHandler):
    """One request on one connection; whatever comes after it is not read."""

    server: DemoServer
    server_version, sys_version = "scalesteer", ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(SECONDS)  # also for a client that does not read its answer
        # A client that sends a byte now and then would never run into a limit for each byte.
        self.deadline = threading.Timer(SECONDS, self._stop_reading)
        self.deadline.daemon = True
        self.deadline.start()

    def finish(self) -> None:
        self.deadline.cancel()
        super().finish()

    def _stop_reading(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RD)  # an answer can still be written
        except OSError:
            log.debug("a connection had ended by itself")

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def _respond(self, find: Callable[[], tuple[bytes, str]]) -> None:
        try:
            self._check_sender()
            self._send(HTTPStatus.OK, *find())
        except RequestError as error:
            self.send_error(error.status, str(error))
            self._ignore_body()
        except OSError:  # the client has gone
            raise
        except Exception:
            log.exception("a request failed")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "something went wrong: the terminal says what.")

    def _ignore_body(self) -> None:
        """Let a client send all it has, or it would find a closed connection before it reads why it is refused."""
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(1 << 16):  # until it has no more, or the deadline
                pass

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Also what the base class refuses: methods and headers that it does not know."""
        self._send(code, *_to_json({"error": message or HTTPStatus(code).phrase}))

    def _check_sender(self) -> None:
        """Refuse what another site's page makes a browser send, known by its origin or by a name that it gave us."""
        port = self.server.server_port
        hosts = {f"{name}:{port}" for name in (HOST, "localhost")} | ({HOST, "localhost"} if port == 80 else set())
        named, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(named) != 1 or named[0] not in hosts:
            raise RequestError(HTTPStatus.FORBIDDEN, "this page is only for this machine: open it at 127.0.0.1.")
        if any(origin not in {f"http://{host}" for host in hosts} for origin in origins):
            raise RequestError(HTTPStatus.FORBIDDEN, "another site may not use this page.")

    def _split_path(self) -> SplitResult:
        try:
            return urlsplit(self.path)
        except ValueError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, "this is no path.") from error

    def _get(self) -> tuple[bytes, str]:
        path = self._split_path().path
        if path == "/network":
            return _to_json(self.server.model.describe())
        if path not in self.server.pages:
            raise RequestError(HTTPStatus.NOT_FOUND, "there is no such page.")
        return self.server.pages[path]

    def _post(self) -> tuple[bytes, str]:
        parts, model = self._split_path(), self.server.model
        if parts.path not in ("/answer", "/curve"):
            raise RequestError(HTTPStatus.NOT_FOUND, "there is no such page.")
        size = _size(parts.query) if parts.path == "/answer" else None
        content = self._read_body()
        if not self.server.waiting.acquire(blocking=False):
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too many pictures at once: try again.")
        try:
            with self.server.turn:
                picture, inverted = model.read(content)
                said = model.curve(picture) if size is None else model.answer(picture, size)
        except PictureError as error:
            raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        finally:
            self.server.waiting.release()
        return _to_json(said | {"inverted": inverted})

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "the request must say its length.")
        if len(length) > 12 or int(length) > MOST_BYTES:
            limit = f"{MOST_BYTES >> 20} MiB"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the picture must have at most {limit}.")
        if self.headers.get_content_type() not in ("image/png", "image/jpeg"):
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the picture must be a PNG or JPEG file.")
        try:
            content = self.rfile.read(int(length))
        except TimeoutError:  # of the socket, if it comes before the deadline
            content = b""
        if len(content) < int(length):
            raise RequestError(HTTPStatus.REQUEST_TIMEOUT, "the picture did not arrive.")
        return content

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


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


def _to_json(value: Any) -> tuple[bytes, str]:
    return json.dumps(value, allow_nan=False).encode(), "application/json"


def serve(model: DemoModel, port: int, browse: bool = False) -> None:
    """Serve the page until Ctrl-C."""
    try:
        with DemoServer(model, port) as server:
            print(f"{printable(model.name)}: {server.url} (only on this machine; Ctrl-C ends it)", flush=True)
            if browse:
                webbrowser.open(server.url)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print()

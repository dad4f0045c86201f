"""The server of the page: this machine's own, with limits on everything that it is sent."""

import logging
import socket
import webbrowser
from collections.abc import Callable
from typing import Any, Self

from scalesteer._text import printable
from scalesteer.app.demo.model import DemoModel
from scalesteer.app.demo.protections import HOST, MOST_CONNECTIONS, MOST_HEADER_BYTES
from scalesteer.app.demo.worker import Worker
from scalesteer.files import require

LAST_SECONDS = 1  # that the end waits for what is being answered


class DemoServer:
    """Serves the page and what a network says, on 127.0.0.1 only.

    Args:
        model: The network.
        port: 0 takes any that is free; :attr:`url` says which.

    Raises:
        ValueError: If the port is in use.
    """

    def __init__(self, model: DemoModel, port: int = 0) -> None:
        if not 0 <= port < 1 << 16:
            raise ValueError(f"`port` must be from 0 to 65535 (got {port}).")
        uvicorn: Any = require("uvicorn")
        require("starlette")
        from scalesteer.app.demo.connections import Connection
        from scalesteer.app.demo.routes import make_app

        self.model, self.socket = model, _listen(port)
        self.port: int = self.socket.getsockname()[1]
        self.worker = Worker()
        config = uvicorn.Config(
            make_app(model, self.worker, self.port),
            http=Connection, ws="none", lifespan="off", loop="asyncio", backlog=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES, timeout_graceful_shutdown=LAST_SECONDS,
            log_config=None, access_log=False, server_header=False, date_header=False, proxy_headers=False,
        )  # fmt: skip
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what a client does wrong it is told
        self.server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def connections(self) -> set[Any]:
        """Those that are open."""
        found: set[Any] = self.server.server_state.connections
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve_forever(self) -> None:
        """Serve until :meth:`shutdown`, Ctrl-C or a signal to end."""
        for thing in self.model.warm_up():
            self.worker.later(thing)
        self.server.run(sockets=[self.socket])

    def shutdown(self) -> None:
        """End :meth:`serve_forever`, which another thread runs."""
        self.server.should_exit = True

    def close(self) -> None:
        """Give the port back."""
        self.socket.close()
        self.worker.end(LAST_SECONDS / 10)  # what is asked has been waited for already


def _listen(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(MOST_CONNECTIONS)  # from now on clients wait instead of being refused
    except OSError as error:
        listening.close()
        raise ValueError(f"port {port} cannot be used ({error.strerror}): choose another one with --port.") from error
    return listening


def serve(
    model: DemoModel, port: int, browse: bool = False, leave: Callable[[int], object] = lambda code: None
) -> None:
    """Serve the page until Ctrl-C.

    If a network is still at work at the end, `leave` is called with the exit code: at the end of Python the thread that
    it works in would be stopped amid torch's code, which aborts the process.
    """
    server, code = DemoServer(model, port), None
    try:
        with server:
            print(f"{printable(model.name)}: {server.url} (only on this machine; Ctrl-C ends it)", flush=True)
            if browse:
                webbrowser.open(server.url)
            server.serve_forever()
        code = 0
    except KeyboardInterrupt:
        code = 0
        print()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else None
        raise
    finally:
        if code is not None and server.worker.is_working():
            leave(code)

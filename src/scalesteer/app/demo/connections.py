"""Connections of the server with an end: how many there may be, and how long a client may take to send and to read."""

import asyncio
import logging
import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from scalesteer.app.demo import protections

log = logging.getLogger("scalesteer")


class LastingEnd:
    """A transport whose client has time to read an answer, and to send the rest of what is not read any more.

    A connection that is closed while bytes arrive is reset, and its client does not see why it was refused.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.over = transport, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.over or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self.over = True
        asyncio.get_running_loop().call_later(protections.SECONDS, self._transport.abort)
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()  # once all is written; the client closes then, or is cut off
            self._transport.resume_reading()
        except OSError:  # the client has gone already
            self._transport.abort()


class Connection(H11Protocol):
    """One request on one connection, and an answer; the server has `MOST_CONNECTIONS` of them."""

    transport: Any
    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= protections.MOST_CONNECTIONS:
            transport.write(protections.refusal(503, "too many connections at once: try again."))
            transport.close()
            self.transport = transport
            return
        super().connection_made(LastingEnd(transport))  # type: ignore[arg-type]
        until = self.loop.time() + protections.SECONDS
        self.app_state = {**self.app_state, "deadline": until}  # for the body; a client may send a byte now and then
        self.deadline = self.loop.call_at(until, self._give_up)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            if self.deadline is not None and self.cycle is not None:
                self.deadline.cancel()  # the headers are here

    def connection_lost(self, exc: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)  # also 431, headers without end
        self._refuse(status, "this is no request.")

    def shutdown(self) -> None:
        """The server ends: who has sent no request, or has its answer, is not waited for."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:
            super().shutdown()

    def _give_up(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self._refuse(408, "the request did not arrive.")

    def _refuse(self, status: int, why: str) -> None:
        self.transport.write(protections.refusal(status, why))
        self.transport.close()

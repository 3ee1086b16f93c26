"""The socket of the explorer, and the server on it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..zoo import Zoo
from .app import create_app

BACKLOG = 512
LONGEST_HEAD = 32 * 2**10  # bytes of the head of a request


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; the error says what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"--host {host}: no address of this machine ({error})") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} is used by another program: --port 0 finds a free one") from error
        raise OSError(f"cannot listen on {host}, port {port}: {error}") from error
    return listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(
    zoo: Zoo, listening: socket.socket, hosts: Sequence[str] = (), ready: Callable[[], None] | None = None
) -> None:
    """Answer until interrupted."""
    import uvicorn

    app = create_app(zoo, [*hosts, listening.getsockname()[0]])
    config = uvicorn.Config(
        app, http=Prompt,  # even if another is installed: the limit below is for h11
        log_level="warning", access_log=False, server_header=False, date_header=False, proxy_headers=False,
        h11_max_incomplete_event_size=LONGEST_HEAD, timeout_keep_alive=SECONDS, timeout_graceful_shutdown=2,
        backlog=BACKLOG, ws="none",
    )  # fmt: skip
    if ready is not None:
        ready()
    uvicorn.Server(config).run(sockets=[listening])


# Connections without a request are closed: a server would otherwise run out of them

SECONDS = 30  # for the head of a request to arrive


class Prompt(H11Protocol):
    """The protocol of uvicorn, which waits for ever for the rest of a request, with a time limit."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._timer = self.loop.call_later(SECONDS, self._look, self.cycle)

    def _look(self, last: Any) -> None:
        """Close the connection if no request came since `last`."""
        if self.conn.their_state is h11.IDLE and self.cycle is last:
            self.transport.close()
        else:
            self._look_later()

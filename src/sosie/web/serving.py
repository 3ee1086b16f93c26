"""A socket, and a server on it."""

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
LONGEST_HEAD = 32 * 2**10  # bytes of a request's first lines


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens, or an error in words."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"--host {host}: no address of this machine ({error})") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} is taken by another program: --port 0 finds one that is free") from error
        raise OSError(f"cannot listen on {host}, port {port}: {error}") from error
    return found


def address_of(found: socket.socket) -> str:
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(
    zoo: Zoo, listening: socket.socket, hosts: Sequence[str] = (), ready: Callable[[], None] | None = None
) -> None:
    """Answer until interrupted."""
    import uvicorn

    own = listening.getsockname()[0]
    app = create_app(zoo, [*hosts, own])
    config = uvicorn.Config(
        app, http=Prompt,  # whatever else is installed: the limit below is h11's
        log_level="warning", access_log=False, server_header=False, date_header=False, proxy_headers=False,
        h11_max_incomplete_event_size=LONGEST_HEAD, timeout_keep_alive=SECONDS, timeout_graceful_shutdown=2,
        backlog=BACKLOG, ws="none",
    )  # fmt: skip
    if ready is not None:
        ready()
    uvicorn.Server(config).run(sockets=[listening])


# Connections on which no request comes are closed: a server would otherwise run out of them

SECONDS = 30  # that the first lines of a request may take


class Prompt(H11Protocol):
    """As uvicorn has it, which waits for ever for the rest of a request that has begun."""

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
        """`last`: the request that was there when the time began."""
        if self.conn.their_state is h11.IDLE and self.cycle is last:
            self.transport.close()
        else:
            self._look_later()

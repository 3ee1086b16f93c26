"""Connections on which no request comes are closed: a server would otherwise run out of them."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

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

"""What every request passes: who may ask, and what a browser may do with the answer.

A page from elsewhere can make a browser send requests to this machine. By a name of its own that it points here (DNS
rebinding) it could even read the answers: so only requests under names of this machine are answered. It may not post
either, nor frame the pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
RAW = {name.lower().encode(): value.encode() for name, value in HEADERS.items()}


def host_of(text: str) -> str | None:
    """The name in a Host header, without the port; None where it is none."""
    try:
        return urlsplit(f"//{text}").hostname if text and "@" not in text and "/" not in text else None
    except ValueError:
        return None


class Guard:
    """Refuses hosts that are not named and posts from other pages; puts the headers on every answer."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = ()) -> None:
        self.app = app
        self.hosts = {*LOOPBACK, *(name.lower() for name in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [pair for pair in message["headers"] if pair[0] not in RAW]
                if all(name != b"cache-control" for name, _ in own):
                    own.append((b"cache-control", b"no-store"))
                message["headers"] = [*own, *RAW.items()]
            await send(message)

        refused = self._refusal(scope["method"], Headers(scope=scope))
        await (refused or self.app)(scope, receive, send_guarded)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        host = host_of(headers.get("host", ""))
        if len(headers.getlist("host")) != 1 or host not in self.hosts:
            text = "not a name of this server: `sosie serve --allow NAME` answers to more names"
            return JSONResponse({"error": f"{str(host)[:100]!r} is {text}"}, 421)
        if method not in ("GET", "HEAD", "POST"):
            return JSONResponse({"error": "the explorer only reads"}, 405)
        origin = headers.get("origin")
        if method == "POST" and origin is not None and urlsplit_netloc(origin) != headers["host"].lower():
            return JSONResponse({"error": "another page may not send files here"}, 403)
        return None


def urlsplit_netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None

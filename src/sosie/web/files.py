"""The front end's files, as they came with sosie."""

from __future__ import annotations

import hashlib
import pathlib
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..report.page import style_file

FOLDER = pathlib.Path(__file__).with_name("static")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class File:
    content: bytes
    kind: str
    tag: str

    @property
    def headers(self) -> dict[str, str]:
        return {"ETag": self.tag, "Cache-Control": "no-cache"}


def static_files() -> dict[str, File]:
    """All of them by name; a name that is not among them is served by nobody."""
    found = {}
    for path in (*sorted(FOLDER.iterdir()), style_file("colours")):
        if path.suffix in KINDS:
            content = path.read_bytes()
            tag = hashlib.blake2b(content, digest_size=12).hexdigest()
            found[path.name] = File(content, KINDS[path.suffix], f'"{tag}"')
    return found


class FrontEnd:
    """Answers for the files, which were read when the server started; every other path goes on to the application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.files = {f"/{name}": file for name, file in static_files().items()}
        self.files["/"] = self.files["/index.html"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self.files.get(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
        elif Headers(scope=scope).get("if-none-match") == found.tag:
            await Response(status_code=304, headers=found.headers)(scope, receive, send)
        else:
            await Response(found.content, media_type=found.kind, headers=found.headers)(scope, receive, send)

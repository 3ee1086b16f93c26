"""The front end's files, as they came with sosie."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("static")
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
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in KINDS:
            content = path.read_bytes()
            tag = hashlib.blake2b(content, digest_size=12).hexdigest()
            found[path.name] = File(content, KINDS[path.suffix], f'"{tag}"')
    return found

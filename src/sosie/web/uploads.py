"""A fingerprint that a browser sends: read up to a limit, checked as any file from others, never kept."""

from __future__ import annotations

import asyncio
import os
import pathlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any, BinaryIO

from ..results import DamagedFile
from ..zoo import Fingerprint, Zoo
from ..zoo.fingerprints.making import MOST_SITES
from ..zoo.store import Facts

HEAD = 2 * 2**20  # bytes for what is not vectors
SECONDS = 60.0  # that a file may take to arrive
AT_ONCE = 4  # that are checked and looked up


class TooLarge(ValueError):
    """More bytes than a fingerprint of this zoo can have."""


def most_bytes(zoo: Zoo) -> int:
    """What a fingerprint of this zoo has at most."""
    about = zoo.settings
    return HEAD + 4 * MOST_SITES * (about.n * (about.n - 1) // 2 + 3 * about.size)


def check_length(text: str | None, most: int) -> None:
    """Refuse by what the sender says, before a byte is read."""
    if text is not None and (not text.isdecimal() or int(text[:20]) > most):
        raise TooLarge(f"a fingerprint of this zoo has at most {most:,} bytes, this would be {text[:20]}")


async def received(stream: AsyncIterator[bytes], most: int) -> pathlib.Path:
    """The body in a temporary file, which whoever asked deletes."""
    handle, name = tempfile.mkstemp(prefix="sosie-upload-", suffix=".safetensors")
    try:
        with os.fdopen(handle, "wb") as file:
            await asyncio.wait_for(_write(stream, file, most), SECONDS)
    except BaseException:
        os.unlink(name)
        raise
    return pathlib.Path(name)


async def _write(stream: AsyncIterator[bytes], file: BinaryIO, most: int) -> None:
    taken = 0
    async for part in stream:
        taken += len(part)
        if taken > most:
            raise TooLarge(f"a fingerprint of this zoo has at most {most:,} bytes: the rest was not read")
        file.write(part)


def checked(zoo: Zoo, path: pathlib.Path) -> Fingerprint:
    """The fingerprint, if it is one and was made as those of the zoo."""
    try:
        found = Fingerprint.load(path)
    except DamagedFile as error:
        raise DamagedFile(str(error).replace(str(path), "the file")) from error
    zoo.settings.record("the file", found, Facts())
    return found


def described(found: Fingerprint) -> dict[str, Any]:
    """What a fingerprint says of its model."""
    said = {name: str(found.about.get(name, "unknown"))[:200] for name in ("architecture", "parameters", "model")}
    return {**said, "sites": found.sites}

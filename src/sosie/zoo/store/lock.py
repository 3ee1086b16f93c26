"""One writer at a time: a lock on a file that says who holds it; the system lets go of it when that process ends."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from .errors import ZooBusy

PAUSE = 0.02  # seconds between two tries


@contextmanager
def only_writer(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock, or wait up to so many seconds for it and then say who has it."""
    try:
        import fcntl
    except ImportError as error:  # pragma: no cover
        raise OSError("a zoo is written to under POSIX file locks, which this system lacks; reading works") from error
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError as error:
        raise PermissionError(f"{path.parent} cannot be written to: {error.strerror}") from error
    try:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ZooBusy(
                        f"{path.parent} is being written to by {_holder(path)}; waited {wait:g} s. Try again when it "
                        "is done, or open the zoo with a longer wait (wait=, --wait)"
                    ) from None
                time.sleep(PAUSE)
        _sign(handle)
        yield
    finally:
        os.close(handle)  # which lets go of the lock


def _sign(handle: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)


def _holder(path: Path) -> str:
    try:
        text = path.read_bytes()[:200].decode("utf-8", "replace").strip()
    except OSError:
        text = ""
    return text if text and text.isprintable() else "another process"

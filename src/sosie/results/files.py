"""Writing a file so that it is either whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def check_writable(path: str | os.PathLike[str] | None) -> None:
    """Raise now if a file could not be written there later, after hours of work."""
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file inside it")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise PermissionError(f"cannot write {path}: {above} is not a folder that can be written to")


def write_atomically(path: str | os.PathLike[str], content: str | bytes | Callable[[Path], None]) -> Path:
    """Write text, bytes, or whatever `content(temporary_path)` writes; then rename over `path`.

    An interruption leaves the old file as it was, and no temporary file behind.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file inside it")
    if path.exists() and not path.is_file():
        # Renamed over, /dev/null would be gone for all.
        raise FileExistsError(f"{path} is no file but a device or a pipe, which a file would replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path

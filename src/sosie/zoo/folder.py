"""A new folder for a zoo: whole, or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .fingerprints import Probe
from .probe_file import save_probe
from .settings import Settings
from .store import Store, sync_folder


def make_folder(folder: Path, probe: Probe, settings: Settings, wait: float) -> None:
    """An empty zoo; if somebody else has made one there meanwhile, that one."""
    with new_folder(folder) as temporary:
        save_probe(probe, temporary / "probe.safetensors")
        Store.create(temporary, settings.as_json(), wait)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is full."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there, and is no zoo: name a new folder, or an empty one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes folders that only their owner can read
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / "zoo.sqlite").is_file():
                raise
        with contextlib.suppress(OSError):
            sync_folder(folder.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

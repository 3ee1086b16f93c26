"""The folder of a benchmark: every unit of work is a file, written whole, and not done again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ...results import DamagedFile, read_json, read_tensors, write_json, write_tensors

KIND, VERSION = "benchmark-unit", 2
SETTINGS = "settings.json"
MEASURES = "measures"


class Store:
    """Units by name. A folder belongs to one benchmark: its settings say which."""

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any], *, resume: bool = True) -> None:
        self.folder = Path(folder)
        self.resume = resume
        self._made: set[Path] = set()  # in this run: without resume older ones are made anew
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file: a benchmark needs a folder of its own")
        path = self.folder / SETTINGS
        wanted = json.loads(json.dumps(_plain(settings)))
        if path.exists():
            found = _read(path)["settings"]
            different = [key for key in wanted if found.get(key) != wanted[key]]
            if different:
                raise ValueError(
                    f"{self.folder} holds another benchmark ({', '.join(different)} differ): name another folder"
                )
        _write(path, {"settings": wanted})

    def json(self, name: str, make: Callable[[], dict[str, Any]], *, made_of: str = "") -> dict[str, Any]:
        """What `make` finds, from the file where it was found before; `made_of` tells versions of a measure apart."""
        path = self.folder / f"{name}.json"
        if self._is_there(path):
            kept = _read(path)
            if kept.get("made_of") == made_of:
                return kept["found"]
        return self.write(name, make(), made_of=made_of)

    def write(self, name: str, found: dict[str, Any], *, made_of: str = "") -> dict[str, Any]:
        """Whatever was there before."""
        path, plain = self.folder / f"{name}.json", _plain(found)
        _write(path, {"made_of": made_of, "found": plain})
        self._made.add(path)
        return json.loads(json.dumps(plain))

    def tensors(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The same for tensors, which are on the CPU when they come back."""
        path = self.folder / f"{name}.safetensors"
        if not self._is_there(path):
            write_tensors(path, KIND, VERSION, make(), {})
            self._made.add(path)
        return read_tensors(path, KIND, VERSION)[1]

    def of_measures(self) -> list[dict[str, Any]]:
        """What is kept about every measure that was tried here."""
        paths = sorted((self.folder / MEASURES).glob("*/about.json"))
        return [_read(path)["found"] for path in paths if self._is_there(path)]

    def _is_there(self, path: Path) -> bool:
        return path.exists() and (self.resume or path in self._made)


def measure_folder(name: str) -> str:
    """Where the units of a measure are, below the folder: readable, and one for each name."""
    readable = re.sub(r"[^\w.=-]+", "-", name).strip("-")[:60]
    return f"{MEASURES}/{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {str(key): _plain(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(value) for value in found]
    if hasattr(found, "tolist"):  # arrays and numbers of NumPy
        return _plain(found.tolist())
    if isinstance(found, float) and not math.isfinite(found):
        return None
    return found


def _write(path: Path, content: dict[str, Any]) -> None:
    write_json(path, {"format": f"sosie-{KIND}", "version": VERSION, **content})


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, f"sosie-{KIND}", VERSION, "unit of a benchmark")
    except DamagedFile as error:
        raise DamagedFile(f"{error}; remove it, and it is made again") from error

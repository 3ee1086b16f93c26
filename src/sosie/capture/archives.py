"""Arrays in .npz and .safetensors files, opened without reading them and never unpickled."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from sosie.results import DamagedFile

_LOCAL_HEADER = 30  # bytes of a zip member's header before its name
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Stored(NamedTuple):
    """One site's array: its shape and type, and how to read some of its rows."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Any]  # (start, stop) -> array or tensor


def read_npz(path: Path) -> dict[str, Stored]:
    """The arrays of a .npz: memory-mapped, or if it is compressed decompressed once on first use."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {info.filename.removesuffix(".npy"): _npz_entry(path, archive, info) for info in archive.infolist()}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError) as error:
        raise DamagedFile(f"{path} is no whole .npz file ({error}); was it cut off? Save it again") from error


def _npz_entry(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Stored:
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(stream)
        header = stream.tell()
    if dtype.hasobject:
        return Stored(shape, "object", lambda start, stop: None)
    if info.compress_type == zipfile.ZIP_STORED and 0 not in shape:
        begin = _data_offset(path, info) + header
        if begin + dtype.itemsize * int(np.prod(shape, dtype=np.int64)) > path.stat().st_size:
            raise ValueError(f"{info.filename} ends early")
        order: Any = "F" if fortran else "C"
        mapped = np.memmap(path, dtype, "r", begin, shape, order)
        return Stored(shape, dtype.name, lambda start, stop: np.array(mapped[start:stop]))

    @cache
    def whole() -> np.ndarray[Any, Any]:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays[info.filename.removesuffix(".npy")]

    return Stored(shape, dtype.name, lambda start, stop: whole()[start:stop])


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: after a local header with a name and extra field of its own."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        head = file.read(_LOCAL_HEADER)
    name, extra = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
    return info.header_offset + _LOCAL_HEADER + name + extra


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a .safetensors file, sliced on disk."""
    try:
        file = safe_open(path, framework="pt")
        about = file.metadata() or {}
        kind = about.get("format", "")
        if not kind.startswith("sosie-"):
            return {name: _safetensors_entry(file, name) for name in _in_order(list(file.keys()), about)}
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedFile(f"{path} is no whole .safetensors file ({error}); was it cut off? Save it again") from error
    raise DamagedFile(f"{path} holds a {kind.removeprefix('sosie-')} of sosie's, and no arrays to read rows from")


def _safetensors_entry(file: Any, name: str) -> Stored:
    part = file.get_slice(name)
    dtype = part.get_dtype()
    return Stored(tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype), lambda start, stop: part[start:stop])


def _in_order(names: list[str], metadata: dict[str, str]) -> list[str]:
    asked = json.loads(metadata["sites"]) if "sites" in metadata else []
    rest = [name for name in names if name not in asked]
    return [name for name in asked if name in names] + sorted(rest, key=_natural)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts layer2 before layer10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)]

"""Saved activations in place of a model: arrays in memory, .npz or .safetensors files, read piece by piece."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..checks import nearest
from ..files import DamagedFile, check_hash
from .batches import number_array, with_tensors
from .rows import Rule, to_rows
from .sites import Site, UnknownSite

# Arrays in .npz and .safetensors files, opened without reading them and never unpickled

PIECE = 2**18  # bytes that are read at a time where they are not kept
WHOLE = 2**30  # bytes of a compressed array that can only be read at once
_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, struct.error)
_LOCAL_HEADER = 30  # bytes of a zip member's header before its name
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Stored(NamedTuple):
    """One site's array: its shape and type, and how to read some of its rows."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Any]  # (start, stop) -> array or tensor


def read_npz(path: Path) -> dict[str, Stored]:
    """The arrays of a .npz: memory-mapped, or if it is compressed decompressed as rows are asked for, in their order.

    The checksum of an array is verified, which reads all of it once, before its first rows are handed out.
    """
    with _explained(path), zipfile.ZipFile(path) as archive:
        return {info.filename.removesuffix(".npy"): _npz_entry(path, archive, info) for info in archive.infolist()}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of zipfile and NumPy name the file and the next step."""
    try:
        yield
    except DamagedFile:
        raise
    except (*_FAULTS, ValueError, OSError, RuntimeError, SyntaxError) as error:
        raise DamagedFile(
            f"{path} is no whole .npz file ({error}); was it cut off or changed? Save it again"
        ) from error


def _npz_entry(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Stored:
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(stream)
        header = stream.tell()
    if dtype.hasobject:
        return Stored(shape, "object", lambda start, stop: None)
    size = dtype.itemsize * math.prod(shape)
    if header + size != info.file_size:
        raise ValueError(f"{info.filename} has {info.file_size - header:,} bytes for an array of {size:,}")
    if not size:
        return Stored(shape, dtype.name, lambda start, stop: np.empty((stop - start, *shape[1:]), dtype))
    order: Literal["F", "C"] = "F" if fortran else "C"
    if info.compress_type == zipfile.ZIP_STORED:
        with path.open("rb") as file:  # the bytes begin after a local header with a name and extra field of its own
            file.seek(info.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))
        start = info.header_offset + _LOCAL_HEADER + sum(lengths) + header
        rows: Any = np.memmap(path, dtype, "r", start, shape, order)
    elif fortran and size > WHOLE:
        raise ValueError(
            f"{info.filename} is compressed column by column (Fortran order), so that its {size / 2**30:.1f} GiB would "
            "have to be read at once: save numpy.ascontiguousarray(array)"
        )
    else:
        rows = _Inflated(path, info, header, shape, dtype, order)

    @cache
    def verify() -> None:
        """Read to the end, where zipfile compares the checksum."""
        with zipfile.ZipFile(path) as archive, archive.open(info) as stream:
            while stream.read(PIECE):
                pass

    def read(start: int, stop: int) -> np.ndarray[Any, Any]:
        with _explained(path):
            verify()
            return np.array(rows[start:stop])

    return Stored(shape, dtype.name, read)


class _Inflated:
    """Rows of a compressed array: those that follow on the last are decompressed alone, for others from the start."""

    def __init__(
        self, path: Path, info: zipfile.ZipInfo, header: int, shape: tuple[int, ...], dtype: np.dtype[Any], order: Any
    ) -> None:
        self._path, self._info, self._header = path, info, header
        self._shape, self._dtype, self._order = shape, dtype, order
        self._row = dtype.itemsize * math.prod(shape[1:])
        self._stream: Any = None
        self._last = ((0, 0), b"")
        self._lock = threading.Lock()

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        start, stop, _ = rows.indices(self._shape[0])
        if self._order == "F":
            start, stop = 0, self._shape[0]
        with self._lock:
            if self._last[0] != (start, stop):  # the same rows may be asked for twice
                self._last = (start, stop), self._read(start * self._row, stop * self._row)
            content = self._last[1]
        found = np.frombuffer(content, self._dtype).reshape(stop - start, *self._shape[1:], order=self._order)
        return found[rows] if self._order == "F" else found

    def _read(self, start: int, stop: int) -> bytes:
        start, stop = self._header + start, self._header + stop
        if self._stream is None or self._stream.tell() > start:
            self._stream = zipfile.ZipFile(self._path).open(self._info)  # noqa: SIM115 (read on the next call)
        while (left := start - self._stream.tell()) > 0 and self._stream.read(min(left, PIECE)):
            pass
        content: bytes = self._stream.read(stop - start)
        if len(content) < stop - start:
            raise EOFError(f"{self._info.filename} ends early")
        return content


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a .safetensors file, sliced on disk."""
    try:
        file = safe_open(path, framework="pt")
        about = file.metadata() or {}
        check_hash(path, about)
        kind = about.get("format", "")
        if not kind.startswith("sosie-"):
            given = json.loads(about.get("sites", "[]"))
            names = sorted(
                file.keys(), key=lambda name: (given.index(name) if name in given else len(given), _natural(name))
            )
            return {name: _safetensors_entry(file, name) for name in names}
    except DamagedFile:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedFile(f"{path} is no whole .safetensors file ({error}); was it cut off? Save it again") from error
    raise DamagedFile(f"{path} holds a sosie {kind.removeprefix('sosie-')}, not arrays to read rows from")


def _safetensors_entry(file: Any, name: str) -> Stored:
    part = file.get_slice(name)
    dtype = part.get_dtype()
    return Stored(tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype), lambda start, stop: part[start:stop])


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts layer2 before layer10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)]


_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle")


class BadActivations(ValueError):
    """Saved activations that cannot be compared as they are."""


class ActivationFile:
    """Activations by site, all of the same inputs in the same order."""

    def __init__(self, stored: Mapping[str, Stored], name: str, path: Path | None = None) -> None:
        _check(stored, name)
        self.name = name
        self.path = path  # None: they are in memory
        self._stored = dict(stored)
        self.n = next(iter(stored.values())).shape[0]
        # Three dimensions are read as tokens, more as NCHW maps; a function as row rule reads them otherwise.
        self.sites = tuple(
            Site(label, label, 1, found.shape[1:], channels_last=len(found.shape) <= 3)
            for label, found in stored.items()
        )

    def __getitem__(self, label: str) -> Site:
        for site in self.sites:
            if site.label == label:
                return site
        raise KeyError(f"no site {label!r} in {self.name}{nearest(label, self._stored)}")

    def select(self, sites: Any = None) -> tuple[Site, ...]:
        """The sites that names or globs ask for, in the order they are kept in; None asks for all."""
        if sites is None:
            return self.sites
        wanted: set[str] = set()
        for selector in [sites] if isinstance(sites, str) else list(sites):
            if not isinstance(selector, str):
                raise UnknownSite(f"saved activations are chosen by name or glob, got {selector!r}")
            found = {selector} & set(self._stored) or {s for s in self._stored if fnmatchcase(s, selector)}
            if not found:
                raise UnknownSite(f"no site {selector!r} in {self.name}{nearest(selector, self._stored)}")
            wanted |= found
        return tuple(site for site in self.sites if site.label in wanted)

    def activation(self, label: str, start: int, stop: int) -> Tensor:
        """The activation of inputs start to stop as it was saved."""
        site = self[label]
        if not 0 <= start < stop <= self.n:
            raise IndexError(f"inputs {start} to {stop} of {self.n} at site {label!r}")
        return with_tensors(self._stored[site.label].read(start, stop))

    def rows(self, label: str, start: int, stop: int, *, rule: Rule = "flatten") -> Tensor:
        """Inputs start to stop as (rows, features) by a row rule."""
        return to_rows(self.activation(label, start, stop), rule, site=self[label], inputs=stop - start)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"<SavedActivations {self.name}: {len(self.sites)} sites, {self.n} inputs>"


def open_activations(source: Mapping[str, Any] | str | os.PathLike[str]) -> ActivationFile:
    """Activations from {site: array}, a .npz or a .safetensors file; files are read as rows are asked for.

    Sites keep the order of the dict or .npz. A .safetensors file has no order of its own: its metadata may
    give one ("sites": a JSON list), else names are sorted, layer2 before layer10.
    """
    if isinstance(source, Mapping):
        return ActivationFile({str(site): _in_memory(site, array) for site, array in source.items()}, "activations")
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise BadActivations(
            f"{path} is refused: reading it may run code hidden in it (it is a pickle): save as .npz or .safetensors"
        )
    if suffix == ".npy":
        raise BadActivations(
            f"{path} is refused: it holds one array without a site's name: save with "
            "numpy.savez(path, **{site: array})"
        )
    readers = {".npz": read_npz, ".safetensors": read_safetensors}
    if suffix not in readers:
        raise BadActivations(f"{path}: saved activations are .npz or .safetensors files, not {suffix or 'this'}")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return ActivationFile(readers[suffix](path), str(path), path)


def _in_memory(site: Any, array: Any) -> Stored:
    if not isinstance(array, (np.ndarray, Tensor)):
        raise BadActivations(f"site {site!r} holds a {type(array).__name__}; give a NumPy array or a tensor")
    if isinstance(array, np.ma.MaskedArray):
        number_array(array, f"site {site!r}")
    dtype = str(array.dtype).removeprefix("torch.")
    return Stored(tuple(array.shape), dtype, lambda start, stop: array[start:stop])


def _check(stored: Mapping[str, Stored], name: str) -> None:
    if not stored:
        raise BadActivations(f"{name} holds no sites")
    for site, found in stored.items():
        if found.dtype == "object":
            raise BadActivations(
                f"{name}: site {site!r} is an array of objects, which only unpickling could read, and "
                "that may run code hidden in it; save numbers of one shape"
            )
        if "float" not in found.dtype:
            raise BadActivations(f"{name}: site {site!r} holds {found.dtype}; activations are floating-point numbers")
        if found.dtype in ("float96", "float128"):
            raise BadActivations(
                f"{name}: site {site!r} holds {found.dtype}, more digits than torch has: round it with "
                ".astype(numpy.float64)"
            )
        if len(found.shape) < 2:
            raise BadActivations(
                f"{name}: site {site!r} has shape {found.shape}, rows need (inputs, features); "
                "one number per input is array.reshape(-1, 1)"
            )
    counts = {site: found.shape[0] for site, found in stored.items()}
    most = max(set(counts.values()), key=list(counts.values()).count)
    odd = ", ".join(f"{site!r} has {count}" for site, count in counts.items() if count != most)
    if odd:
        raise BadActivations(f"{name} is unpaired: most sites have {most} inputs, but {odd}")
    if most == 0:
        raise BadActivations(f"{name} holds no inputs")

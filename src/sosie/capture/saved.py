"""Saved activations in place of a model: arrays in memory, .npz or .safetensors files, read as rows are needed."""

from __future__ import annotations

import json
import math
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..checks import matching, natural, nearest
from ..files import DamagedFile, check_hash, check_schema, check_tensors, reading
from .batches import number_array, with_tensors
from .rows import Rule, to_rows
from .sites import Site, SiteError

# Arrays in .npz and .safetensors files, opened without reading the numbers and never unpickled

PIECE = 2**18  # bytes read at a time where they are not kept
WHOLE = 2**30  # the largest compressed array that may be read at once, in bytes
_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, struct.error)
_LOCAL_HEADER = 30  # bytes of a zip member's header before its name
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class StoredArray(NamedTuple):
    """The shape and type of one site's array, and a function that reads some of its rows."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Any]  # (start, stop) -> array or tensor


def read_npz(path: Path) -> dict[str, StoredArray]:
    """Return the arrays of a .npz, memory-mapped or, if compressed, decompressed as rows are needed.

    Before the first rows of an array are returned, all of it is read once to verify its checksum.
    """
    with _explained(path), zipfile.ZipFile(path) as archive:
        return {info.filename.removesuffix(".npy"): _npz_entry(path, archive, info) for info in archive.infolist()}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Make errors of zipfile and NumPy name the file and the next step."""
    try:
        yield
    except DamagedFile:
        raise
    except (*_FAULTS, ValueError, OSError, RuntimeError, SyntaxError) as error:
        raise DamagedFile(f"{path} is not a whole .npz file ({error}): was it cut off? Save it again") from error


def _npz_entry(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredArray:
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(stream)
        header = stream.tell()
    if dtype.hasobject:
        return StoredArray(shape, "object", lambda start, stop: None)
    size = dtype.itemsize * math.prod(shape)
    if header + size != info.file_size:
        raise ValueError(f"{info.filename} has {info.file_size - header:,} bytes for an array of {size:,}")
    if not size:
        return StoredArray(shape, dtype.name, lambda start, stop: np.empty((stop - start, *shape[1:]), dtype))
    order: Literal["F", "C"] = "F" if fortran else "C"
    if info.compress_type == zipfile.ZIP_STORED:
        with path.open("rb") as file:  # the local header has a name and an extra field of its own
            file.seek(info.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))
        start = info.header_offset + _LOCAL_HEADER + sum(lengths) + header
        mapped = np.memmap(path, dtype, "r", start, shape, order)
        read_rows: Callable[[int, int], Any] = lambda start, stop: mapped[start:stop]  # noqa: E731
    elif fortran and size > WHOLE:
        raise ValueError(
            f"{info.filename} is compressed in Fortran order, so its {size / 2**30:.1f} GiB would have to be read at "
            "once: save numpy.ascontiguousarray(array)"
        )
    else:
        read_rows = _inflating_reader(path, info, header, shape, dtype, order)

    @cache
    def verify() -> None:
        """Read to the end, where zipfile compares the checksum."""
        with zipfile.ZipFile(path) as archive, archive.open(info) as stream:
            while stream.read(PIECE):
                pass

    def read(start: int, stop: int) -> np.ndarray[Any, Any]:
        with _explained(path):
            verify()
            return np.array(read_rows(start, stop))

    return StoredArray(shape, dtype.name, read)


def _inflating_reader(
    path: Path, info: zipfile.ZipInfo, header: int, shape: tuple[int, ...], dtype: np.dtype[Any], order: Any
) -> Callable[[int, int], np.ndarray[Any, Any]]:
    """Return a reader of a compressed array: rows after the last ones go on from there, others from the start."""
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    stream: Any = None
    last, content = (0, 0), b""
    lock = threading.Lock()

    def inflate(start: int, stop: int) -> bytes:
        nonlocal stream
        start, stop = header + start * row_bytes, header + stop * row_bytes
        if stream is None or stream.tell() > start:
            stream = zipfile.ZipFile(path).open(info)  # noqa: SIM115 (read on the next call)
        while (left := start - stream.tell()) > 0 and stream.read(min(left, PIECE)):
            pass
        inflated: bytes = stream.read(stop - start)
        if len(inflated) < stop - start:
            raise EOFError(f"{info.filename} ends early")
        return inflated

    def read(start: int, stop: int) -> np.ndarray[Any, Any]:
        nonlocal last, content
        first, end = (0, shape[0]) if order == "F" else (start, stop)
        with lock:
            if last != (first, end):  # the same rows may be read twice
                content = inflate(first, end)
                last = first, end
            array = np.frombuffer(content, dtype).reshape(end - first, *shape[1:], order=order)
        return array[start - first : stop - first]

    return read


ACTIVATIONS, ACTIVATIONS_VERSION = "activations", 2  # the format of files that `extract` writes
_ABOUT = {
    "sites": [str],
    "rows": str,
    "model": str,
    "name": (str, None),
    "max_rows": (int, None),
    "left_out": [[str]],
    "mixing": (str, None),
    "first_inputs?": str,
}


def about_extracted(path: Path) -> dict[str, Any]:
    """What a file that `extract` wrote says about its rows; empty for other files."""
    with safe_open(path, framework="pt") as file:
        text = file.metadata() or {}
    if text.get("format") != f"sosie-{ACTIVATIONS}":
        return {}
    with reading(path):
        about: dict[str, Any] = json.loads(text["about"])
    check_schema(path, about, _ABOUT)
    return about


def read_safetensors(path: Path) -> dict[str, StoredArray]:
    """Return the tensors of a .safetensors file, sliced on disk."""
    try:
        file = safe_open(path, framework="pt")
        about = file.metadata() or {}
        kind = about.get("format", "")
        check_hash(path, about)
        if (extracted := kind == f"sosie-{ACTIVATIONS}") or not kind.startswith("sosie-"):
            if extracted:
                check_tensors(path, about, ACTIVATIONS, ACTIVATIONS_VERSION)
            order = about_extracted(path)["sites"] if extracted else json.loads(about.get("sites", "[]"))
            names = sorted(
                file.keys(), key=lambda name: (order.index(name) if name in order else len(order), natural(name))
            )
            return {name: _safetensors_entry(file, name) for name in names}
    except DamagedFile:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedFile(f"{path} is not a whole .safetensors file ({error}); was it cut off?") from error
    raise DamagedFile(f"{path} holds a sosie {kind.removeprefix('sosie-')}, not arrays of rows")


def _safetensors_entry(file: Any, name: str) -> StoredArray:
    part = file.get_slice(name)
    dtype = part.get_dtype()
    return StoredArray(
        tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype), lambda start, stop: part[start:stop]
    )


_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle")


class ActivationFile:
    """Activations by site, for the same inputs in the same order."""

    def __init__(
        self,
        stored: Mapping[str, StoredArray],
        name: str,
        path: Path | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        _check(stored, name)
        self.name = name
        self.path = path  # None if they are in memory
        self.about = about or {}  # what a file that `extract` wrote says: "rows", "model" …
        self._stored = dict(stored)
        self.n = next(iter(stored.values())).shape[0]
        # Three dimensions are read as tokens, more as NCHW maps; a function as row rule reads them differently.
        self.sites = tuple(
            Site(label, label, 1, array.shape[1:], channels_last=len(array.shape) <= 3)
            for label, array in stored.items()
        )

    def __getitem__(self, label: str) -> Site:
        if label not in self._stored:
            raise KeyError(f"no site {label!r} in {self.name}{nearest(label, self._stored)}")
        return next(site for site in self.sites if site.label == label)

    def select(self, sites: Any = None) -> tuple[Site, ...]:
        """Return the sites that names or globs select, in the order of the file; all of them for None."""
        if sites is None:
            return self.sites
        chosen: set[str] = set()
        for selector in [sites] if isinstance(sites, str) else list(sites):
            if not isinstance(selector, str):
                raise SiteError(f"saved activations are selected by name or glob, got {selector!r}")
            chosen.update(matching(self._stored, selector, f"{self.name} has no site"))
        return tuple(site for site in self.sites if site.label in chosen)

    def activation(self, label: str, start: int, stop: int) -> Tensor:
        """Return the activation of inputs start to stop as it was saved."""
        site = self[label]
        if not 0 <= start < stop <= self.n:
            raise IndexError(f"inputs {start} to {stop} of {self.n} at site {label!r}")
        return with_tensors(self._stored[site.label].read(start, stop))

    def rows(self, label: str, start: int, stop: int, *, rule: Rule = "flatten") -> Tensor:
        """Return inputs start to stop as (rows, features) by a row rule."""
        return to_rows(self.activation(label, start, stop), rule, site=self[label], inputs=stop - start)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"<SavedActivations {self.name}: {len(self.sites)} sites, {self.n} inputs>"


def open_activations(source: Mapping[str, Any] | str | os.PathLike[str]) -> ActivationFile:
    """Open activations from {site: array}, a .npz or a .safetensors file; rows are read as they are needed.

    Sites keep the order of the dict or .npz. The metadata of a .safetensors file may give the order ("sites": a JSON
    list); otherwise names are sorted, layer2 before layer10.
    """
    if isinstance(source, Mapping):
        return ActivationFile({str(site): _in_memory(site, array) for site, array in source.items()}, "activations")
    if isinstance(source, (np.ndarray, Tensor)):
        raise TypeError(f"activations need a name: {{site: array}}, got an array of shape {tuple(source.shape)}")
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise ValueError(f"{path} is a pickle, which may run code when it is read: save as .npz or .safetensors")
    if suffix == ".npy":
        raise ValueError(f"{path} holds one array without a site name: save with numpy.savez(path, **{{site: array}})")
    readers = {".npz": read_npz, ".safetensors": read_safetensors}
    if suffix not in readers:
        raise ValueError(f"{path}: saved activations are .npz or .safetensors files, not {suffix or 'this'}")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    stored = readers[suffix](path)
    return ActivationFile(stored, str(path), path, about_extracted(path) if suffix == ".safetensors" else None)


def _in_memory(site: Any, array: Any) -> StoredArray:
    if not isinstance(array, (np.ndarray, Tensor)):
        raise ValueError(f"site {site!r} holds a {type(array).__name__}; give a NumPy array or a tensor")
    if isinstance(array, Tensor):
        array = array.detach()
    if isinstance(array, np.ma.MaskedArray):
        number_array(array, f"site {site!r}")
    dtype = str(array.dtype).removeprefix("torch.")
    return StoredArray(tuple(array.shape), dtype, lambda start, stop: array[start:stop])


def _check(stored: Mapping[str, StoredArray], name: str) -> None:
    if not stored:
        raise ValueError(f"{name} holds no sites")
    for site, array in stored.items():
        label = f"{name}: site {site!r}"
        if array.dtype == "object":
            raise ValueError(
                f"{label} is an array of objects, which only unpickling could read, and that may run code: save "
                "numbers of one shape"
            )
        if "float" not in array.dtype:
            raise ValueError(f"{label} holds {array.dtype}; activations are floating-point numbers")
        if array.dtype in ("float96", "float128"):
            raise ValueError(f"{label} holds {array.dtype}, which torch lacks: round it with .astype(numpy.float64)")
        if len(array.shape) < 2:
            raise ValueError(
                f"{label} has shape {array.shape}, rows need (inputs, features); for one number per input use "
                "array.reshape(-1, 1)"
            )
    counts = {site: array.shape[0] for site, array in stored.items()}
    most = max(set(counts.values()), key=list(counts.values()).count)
    different = ", ".join(f"{site!r} has {count}" for site, count in counts.items() if count != most)
    if different:
        raise ValueError(f"{name} is unpaired: most sites have {most} inputs, but {different}")
    if most == 0:
        raise ValueError(f"{name} holds no inputs")

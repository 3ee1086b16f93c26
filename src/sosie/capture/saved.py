"""Saved activations: as good as a model, read piece by piece."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .archives import Stored, read_npz, read_safetensors
from .rows import Rule, to_rows
from .sites import Site, UnknownSite, nearest
from .structure import number_array, with_tensors

_REFUSED = {
    ".npy": "it holds one array without a site's name: save with numpy.savez(path, **{site: array})",
    ".pt": "reading it may run code hidden in it (it is a pickle): save as .safetensors",
    ".pth": "reading it may run code hidden in it (it is a pickle): save as .safetensors",
    ".bin": "reading it may run code hidden in it (it is a pickle): save as .safetensors",
    ".pkl": "reading it may run code hidden in it (it is a pickle): save as .npz or .safetensors",
    ".pickle": "reading it may run code hidden in it (it is a pickle): save as .npz or .safetensors",
}


class BadActivations(ValueError):
    """Saved activations that cannot be compared as they are."""


class SavedActivations:
    """Activations by site, all of the same inputs in the same order."""

    def __init__(self, stored: Mapping[str, Stored], name: str) -> None:
        _check(stored, name)
        self.name = name
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


def open_activations(source: Mapping[str, Any] | str | os.PathLike[str]) -> SavedActivations:
    """Activations from {site: array}, a .npz or a .safetensors file; files are read as rows are asked for.

    Sites keep the order of the dict or .npz. A .safetensors file has no order of its own: its metadata may
    give one ("sites": a JSON list), else names are sorted, layer2 before layer10.
    """
    if isinstance(source, Mapping):
        return SavedActivations({str(site): _in_memory(site, array) for site, array in source.items()}, "activations")
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix in _REFUSED:
        raise BadActivations(f"{path} is refused: {_REFUSED[suffix]}")
    readers = {".npz": read_npz, ".safetensors": read_safetensors}
    if suffix not in readers:
        raise BadActivations(f"{path}: saved activations are .npz or .safetensors files, not {suffix or 'this'}")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return SavedActivations(readers[suffix](path), str(path))


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
                "one number an input is array.reshape(-1, 1)"
            )
    counts = {site: found.shape[0] for site, found in stored.items()}
    most = max(set(counts.values()), key=list(counts.values()).count)
    odd = ", ".join(f"{site!r} has {count}" for site, count in counts.items() if count != most)
    if odd:
        raise BadActivations(f"{name} is unpaired: most sites have {most} inputs, but {odd}")
    if most == 0:
        raise BadActivations(f"{name} holds no inputs")

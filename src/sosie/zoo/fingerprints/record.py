"""A model's fingerprint: what it holds, how two of them are compared."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...results import Array

ATOMS = "atoms-"  # and the digest of the coefficients: only models that share them can be compared
Vectors = np.ndarray[Any, np.dtype[np.float32]]


class NotComparable(ValueError):
    """Two fingerprints that were not made the same way."""


def kind_of(key: str) -> str:
    """The kind that a key of `vectors` is of: "atoms" for any coefficients."""
    return "atoms" if key.startswith(ATOMS) else key


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Short vectors of length 1 of a model's sites, in float32.

    Kinds of vectors, by their keys: "cka" (a cosine estimates debiased CKA on the probe set), "weights" (wCKA),
    "atoms-…" (atom cosine; the digest of the coefficients is part of the key). `exact` holds, site by site of "cka",
    the whole vectors, whose cosine is debiased CKA.
    """

    probe: str  # hash of the probe set
    n: int  # inputs of it
    size: int
    seed: int
    rows: str  # rule by which activations became rows
    vectors: dict[str, Vectors]  # (sites of the kind, size)
    labels: dict[str, tuple[str, ...]]  # the sites of each kind, in execution order
    exact: Vectors | None  # (sites of "cka", n (n − 1) / 2)
    absent: dict[str, str]  # kinds asked for that the model does not have, with the reason
    about: dict[str, Any]  # architecture, parameters, model (digest of the weights), sosie (version), left_out, notes

    @property
    def sites(self) -> list[str]:
        """Those of "cka", else of the first kind that there is."""
        return list(self.labels.get("cka") or next(iter(self.labels.values()), ()))

    @property
    def kinds(self) -> list[str]:
        return [kind_of(key) for key in self.vectors]

    def key(self, kind: str) -> str:
        """The key of `vectors` for "cka", "weights" or "atoms"."""
        found = next((key for key in self.vectors if kind in (key, kind_of(key))), None)
        if found is None:
            why = self.absent.get(kind, f"it was not asked for; there are {', '.join(self.kinds)}")
            raise NotComparable(f"no fingerprint of kind {kind!r}: {why}")
        return found

    def check_comparable(self, other: Fingerprint) -> None:
        """Raise unless both were made of one probe set, with one size, seed and rule."""
        if self.probe != other.probe:
            raise NotComparable(f"fingerprints of different probe sets: {self.probe} and {other.probe}")
        for name in ("n", "size", "seed", "rows"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise NotComparable(f"fingerprints made differently: {name}={mine!r} and {name}={theirs!r}")

    def cosine(self, other: Fingerprint, kind: str = "cka", *, exact: bool = False) -> Array:
        """Site by site, (sites of this one, of the other); `exact` takes the whole vectors of "cka".

        NaN for atoms of different layers, which share no coefficients.
        """
        self.check_comparable(other)
        if exact:
            if kind != "cka" or self.exact is None or other.exact is None:
                raise NotComparable(f"exact=True is for fingerprints of kind 'cka' that both have, not for {kind!r}")
            return self.exact.astype(np.float64) @ other.exact.astype(np.float64).T
        mine, theirs = self.key(kind), other.key(kind)
        if mine != theirs:
            raise NotComparable(f"atoms with different coefficients ({mine} and {theirs}) have nothing in common")
        found = self.vectors[mine].astype(np.float64) @ other.vectors[theirs].astype(np.float64).T
        if kind_of(mine) == "atoms":
            same = [[a == b for b in other.labels[theirs]] for a in self.labels[mine]]
            found = np.where(same, found, np.nan)
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As one safetensors file, which `Fingerprint.load` reads."""
        from .files import save

        return save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Fingerprint:
        """What `save` wrote; anything else is refused in words, and nothing in it is ever run."""
        from .files import load

        return load(path)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{key} {vectors.shape[0]} × {vectors.shape[1]}" for key, vectors in self.vectors.items())
        return f"<Fingerprint of {self.about.get('architecture', 'a model')}: {kinds}; probe {self.probe}>"

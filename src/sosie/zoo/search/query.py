"""What is searched for: a model of the zoo by its name, a fingerprint, or a model that is fingerprinted now."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...models import with_name
from ..fingerprints import Fingerprint, kind_of
from ..probe_file import gone
from ..tasks import NoProbe, Task, is_fingerprint_file, make

if TYPE_CHECKING:
    from ..asking import Asking


@dataclass(frozen=True, eq=False)
class Query:
    """A fingerprint with a name; `own` is its number if it is a model of the zoo."""

    name: str
    fingerprint: Fingerprint
    own: int | None = None

    def chosen(self, kind: str, site: str | Sequence[str] | None) -> Chosen:
        """Its vectors of a kind at some sites, or at all."""
        key = self.fingerprint.key(kind)
        labels = self.fingerprint.labels[key]
        places = np.array(_places(labels, site, self.name), np.int64)
        exact = self.fingerprint.exact
        return Chosen(
            key,
            tuple(labels[k] for k in places),
            places,
            np.ascontiguousarray(self.fingerprint.vectors[key][places], np.float32),
            exact[places].astype(np.float64) if key == "cka" and exact is not None else None,
        )


@dataclass(frozen=True, eq=False)
class Chosen:
    """The vectors of one kind that are searched for."""

    key: str
    sites: tuple[str, ...]
    places: NDArray[np.int64]  # of the sites among all of the query's
    vectors: NDArray[np.float32]
    exact: NDArray[np.float64] | None

    @property
    def meets(self) -> NDArray[np.int64] | None:
        """Atoms meet at the same layer only: coefficients, so layers and their order, are part of the kind's key."""
        return self.places if kind_of(self.key) == "atoms" else None


def as_query(zoo: Asking, thing: Any, **options: Any) -> Query:
    """A text is a name in the zoo, else a file with a fingerprint, else the specification of a model."""
    if isinstance(thing, Query):
        return thing
    if isinstance(thing, str) and thing in zoo:
        entry = zoo[thing]
        return Query(thing, entry.fingerprint, entry.id)
    if isinstance(thing, Fingerprint):
        name, found = str(thing.about.get("architecture", "a fingerprint")), thing
    elif is_fingerprint_file(thing):
        name, found = Path(thing).stem, Fingerprint.load(thing)
    else:
        name, found = _made(zoo, thing, options)
    zoo.settings.check_alike(name, found)
    return Query(name, found)


def _made(zoo: Asking, thing: Any, options: dict[str, Any]) -> tuple[str, Fingerprint]:
    text = os.fspath(thing) if isinstance(thing, os.PathLike) else thing
    try:
        outcome = make(Task("query", text, zoo.settings, str(zoo.probe_path.absolute()), options=options))
    except ValueError as error:
        if isinstance(text, str) and not any(mark in text for mark in "@(:./"):
            zoo.store.read(text, kinds=())  # says which names are near
        raise error
    if isinstance(outcome, NoProbe):
        raise gone(zoo.probe_path)
    assert isinstance(outcome, Fingerprint)
    return (text if isinstance(text, str) else with_name(text, None)[1]), outcome


def _places(labels: Sequence[str], site: str | Sequence[str] | None, name: str) -> list[int]:
    if site is None:
        return list(range(len(labels)))
    wanted = [site] if isinstance(site, str) else list(site)
    found: list[int] = []
    for one in wanted:
        some = [k for k, label in enumerate(labels) if label == one]
        some = some or [k for k, label in enumerate(labels) if fnmatchcase(label, str(one))]
        if not some:
            raise ValueError(f"{name} has no site {one!r}; it has {', '.join(labels)}")
        found += some
    if not found:
        raise ValueError(f"no site of {name} asked for; it has {', '.join(labels)}")
    return sorted(set(found))

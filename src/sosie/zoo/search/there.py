"""What a zoo can be asked about: kinds that it has, filters that some model passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..fingerprints import kind_of
from ..store.errors import UnknownModel
from ..store.listing import why_none

if TYPE_CHECKING:
    from ..asking import Asking


def check_kind(zoo: Asking, kind: str) -> None:
    """Raise unless the zoo has such vectors; the whole ones belong to "cka", and are no kind to ask for."""
    there = {kind_of(key) for key in zoo.views.kinds()} or zoo.settings.kinds
    kinds = [known for known in zoo.settings.kinds if known in there]
    if kind_of(kind) not in kinds:
        raise UnknownModel(f"no vectors of kind {kind!r} in {zoo.folder}; there are {', '.join(kinds)}")


def none_passes(zoo: Asking, filters: Mapping[str, Any], otherwise: str) -> ValueError:
    """What is wrong with filters that left no model; or what else is."""
    return ValueError(f"{zoo.folder}: {why_none(zoo.store.database, filters) or otherwise}")

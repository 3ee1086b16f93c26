"""What questions about all models have in common: what is said of the question, and which arguments make sense."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..asking import Asking

NONE: Mapping[str, Any] = MappingProxyType({})
LANDMARKS = 500  # models that stand for all where there are too many for all pairs


def asked_of(zoo: Asking, question: dict[str, Any], filters: Mapping[str, Any] = NONE) -> dict[str, Any]:
    """The question with the probe set and the filters that were given."""
    return question | {"probe": zoo.settings.probe} | {name: v for name, v in filters.items() if v is not None}


def whole_number(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: a whole number of at least {least}")


def landmarks_for(models: int, given: int | None, most_whole: int) -> int | None:
    """How many models stand for all; None where all pairs are looked at."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 3):
        raise ValueError(f"landmarks={given!r}: a whole number of at least 3, or None")
    count = given if given is not None else (LANDMARKS if models > most_whole else models)
    return None if count >= models else count

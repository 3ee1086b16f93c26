"""What every answer about all models has in it: the question, and what is known of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..asking import Asking


def asked_of(zoo: Asking, question: dict[str, Any], filters: dict[str, Any]) -> dict[str, Any]:
    """The question with the probe set and the filters that were given."""
    return question | {"probe": zoo.settings.probe} | {name: v for name, v in filters.items() if v is not None}


def whole_number(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: a whole number of at least {least}")

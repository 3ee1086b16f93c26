"""Which models: by tag, architecture, task; as SQL with its values apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST = 500  # SQL has a limit, too


def where(
    tag: str | Sequence[str] | None = None,
    architecture: str | Sequence[str] | None = None,
    task: str | Sequence[str] | None = None,
) -> tuple[str, list[Any]]:
    """A condition on `models`; several tags must all be there, of several architectures or tasks one."""
    parts, values = ["models.removed IS NULL"], []
    for one in several(tag, "tag"):
        parts.append("EXISTS (SELECT 1 FROM tags WHERE tags.model = models.id AND tags.tag = ?)")
        values.append(one)
    for column, asked in (("architecture", architecture), ("task", task)):
        if asked is not None:
            wanted = several(asked, column)
            parts.append(f"models.{column} IN ({', '.join('?' * len(wanted))})")
            values += wanted
    return " AND ".join(parts), values


def several(asked: str | Sequence[str] | None, what: str) -> tuple[str, ...]:
    """One or more texts, however they were given."""
    found = () if asked is None else (asked,) if isinstance(asked, str) else tuple(asked)
    if not all(isinstance(one, str) for one in found):
        raise TypeError(f"{what}= is text or a list of texts, got {asked!r}")
    if len(found) > MOST:
        raise ValueError(f"{what}= has {len(found):,} texts; {MOST} at most")
    return found

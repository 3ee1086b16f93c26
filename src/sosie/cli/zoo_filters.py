"""Which models of a zoo a question is about; one that no model passes is a mistake, and told as one."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..zoo import Zoo

MOST_NAMED = 8


def filters(zoo: Zoo, tag: Sequence[str] | None, architecture: str | None, task: str | None) -> dict[str, Any]:
    """As `Zoo.search` and its like take them; refused where no model passes."""
    given = {"tag": tag or None, "architecture": architecture, "task": task}
    if why := why_none(zoo, given):
        raise ValueError(why)
    return given


def why_none(zoo: Zoo, given: dict[str, Any]) -> str | None:
    """Why no model passes; None if some do, or there are none to begin with."""
    if not len(zoo) or len(zoo.list(**given, limit=1)):
        return None
    asked = [(what, one) for what, value in given.items() if value for one in ([value] if what != "tag" else value)]
    for what, one in asked:
        if not len(zoo.list(**{what: one}, limit=1)):
            return f"no model of {zoo.folder} has the {what} {one!r}; {_there_are(zoo, what, one)}"
    return f"no model of {zoo.folder} has all of {', '.join(f'--{what} {one}' for what, one in asked)}"


def _there_are(zoo: Zoo, what: str, asked: str) -> str:
    """Those like it first, then the most frequent."""
    from ..zoo.store.listing import choices

    names = [row["name"] for row in choices(zoo.store.database)[f"{what}s"]]
    near = get_close_matches(asked, names, n=3)
    ordered = near + [name for name in names if name not in near]
    more = ", …" * (len(ordered) > MOST_NAMED)
    return f"its {what}s: {', '.join(ordered[:MOST_NAMED])}{more}" if ordered else f"none has a {what}"

"""What the zoo says in Python's words, in those of the command line: `by='x'` is `--by x` there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from typing import Any

OPTIONS = {
    "by": "--by",
    "data": "--data",
    "k": "--count",
    "kinds": "--kinds",
    "most": "--inputs",
    "probe_layer": "--probe-layer",
    "size": "--size",
    "threshold": "--threshold",
    "wait": "--wait",
}
_VALUE = r"""\([^()]*\)|\[[^\[\]]*\]|'[^']*'|"[^"]*"|[-+.\w]*[-+\w]"""
# After a space only: small_cnn(size=3) is a model's own.
_SAID = re.compile(rf"(?<!\S)(?P<name>{'|'.join(OPTIONS)})=(?P<value>{_VALUE})?")
_INDEX = re.compile(r"zoo\.index\('([^']+)'\)")


def as_typed(text: str) -> str:
    """The text with the names of options for those of arguments."""
    text = _INDEX.sub(r"`sosie zoo index --kind \1`", text)
    return _SAID.sub(lambda found: " ".join(filter(None, (OPTIONS[found["name"]], _typed(found["value"])))), text)


def _typed(value: str | None) -> str:
    """A value as one would have typed it."""
    try:
        found = ast.literal_eval(value or "''")
    except (ValueError, SyntaxError):
        return str(value)
    return ",".join(map(str, found)) if isinstance(found, (list, tuple)) else str(found)


def telling_options(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose errors name its options."""

    @functools.wraps(verb)
    def told(*args: Any, **kwargs: Any) -> None:
        try:
            verb(*args, **kwargs)
        except (ValueError, TypeError, OSError) as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (as_typed(error.args[0]), *error.args[1:])
            raise

    return told

"""What models, tags and kinds may be called; whoever shows a name escapes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

LONGEST = 200  # letters of a name
LONGEST_TEXT = 2000  # letters of a source or of a task
_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}(?:[:.-][a-z0-9_]{1,64}){0,3}")


def check_name(name: Any, what: str = "name") -> str:
    """The name, if it is printable, of 1 to 200 letters, without path separators, and neither "." nor ".."."""
    text = check_text(name, what, LONGEST)
    if text in (".", ".."):
        raise ValueError(f"a {what} cannot be {text!r}, which names a folder")
    if "/" in text or "\\" in text:
        raise ValueError(f"a {what} has no path separators, got {_shown(text)}: write - or : in their place")
    return text


def check_text(text: Any, what: str, longest: int = LONGEST_TEXT) -> str:
    """Printable text that is not empty, does not begin or end with a space, and is not longer than that."""
    if not isinstance(text, str):
        raise TypeError(f"a {what} is text, got {type(text).__name__}")
    if not text:
        raise ValueError(f"a {what} cannot be empty")
    if len(text) > longest:
        raise ValueError(f"a {what} has at most {longest} letters, got {len(text):,}: {_shown(text)}")
    if not text.isprintable():
        wrong = next(letter for letter in text if not letter.isprintable())
        raise ValueError(f"a {what} is printable, got {_shown(text)} with U+{ord(wrong):04X} in it")
    if text != text.strip():
        raise ValueError(f"a {what} does not begin or end with a space, got {_shown(text)}")
    return text


def check_tags(tags: Iterable[str] | str) -> tuple[str, ...]:
    """Tags in order, each once; one text is one tag."""
    each = [tags] if isinstance(tags, str) else list(tags)
    return tuple(dict.fromkeys(check_name(tag, "tag") for tag in each))


def check_kind(kind: Any) -> str:
    """A kind of vectors, of which the name of a file is made: cka, atoms:0f3a…"""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError(f"a kind of vectors is called like cka or atoms:0f3a, got {_shown(str(kind))}")
    return kind


def _shown(text: str) -> str:
    short = text if len(text) <= 60 else text[:57] + "…"
    return ascii(short) if not short.isprintable() else repr(short)

"""Comma-separated lists whose items may have options in brackets."""

from __future__ import annotations


def split(text: str | None) -> list[str] | None:
    """Items of "a,b(k=1,l=2)": commas inside brackets do not separate; None stays None."""
    if text is None:
        return None
    items, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            items.append(text[start:place])
            start = place + 1
    items.append(text[start:])
    found = [item.strip() for item in items if item.strip()]
    if not found:
        raise ValueError(f"an empty list: {text!r}")
    return found

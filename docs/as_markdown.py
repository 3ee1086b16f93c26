"""Docstrings as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable


def prose(docstring: str | None) -> str:
    """A docstring's text: formulas set apart by four spaces stay as they are, the rest cannot turn into markup."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring or "").splitlines():
        formula, before = line.startswith("    "), lines[-1] if lines else ""
        if before and formula != before.startswith("    "):
            lines.append("")
        lines.append(line if formula or not line else plain(line))
    return "\n".join(lines) + "\n"


def plain(line: str) -> str:
    """Text without the signs that Markdown reads as emphasis, links or HTML; what stands in backticks is left alone."""
    parts = re.split(r"(`[^`]*`)", line)
    # An underscore inside a word, as in mean_cca, is no emphasis.
    return "".join(
        part if part.startswith("`") else re.sub(r"[*\[]|\b_\B|\B_\b", r"\\\g<0>", part).replace("<", "&lt;")
        for part in parts
    )


def table(columns: Iterable[str], records: Iterable[Iterable[str]], *, numbers: bool = False) -> str:
    """A table; with `numbers` all columns but the first are set to the right."""
    head = list(columns)
    rule = ["---"] + ["---:" if numbers else "---"] * (len(head) - 1)
    lines = [head, rule, *([cell.replace("|", "\\|").replace("\n", " ") for cell in record] for record in records)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

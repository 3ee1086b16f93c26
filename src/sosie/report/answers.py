"""Answers of a zoo on the terminal and as a page: a sentence, a table, and the points of a map."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ..results import Answer, Family, Map, cell, counted
from .page import render_page
from .terminal import print_table, print_text
from .words import in_a_sentence, visible

MOST_PRINTED = 60
MOST_POINTS = 5000
MOST_ROWS = 500
_SCRIPTS = ("answer_map", "answer_page")


def print_answer(answer: Answer, console: Console | None = None) -> None:
    """Print a sentence, a table, the models that failed, and the notes."""
    console = console or Console()
    print_text(console, answer.sentence(), "bold")
    rows = [row for row in answer if not row.get("reason")]
    failed = [row for row in answer if row.get("reason")]  # a reason is a sentence, too long for a cell
    if rows:
        columns = [column for column in answer.table()[0] if column != "reason"]
        print_table(rows[:MOST_PRINTED], columns, console)
    for row in failed[:MOST_PRINTED]:
        print_text(console, f"- {visible(row['name'])}: {visible(row['reason'])}", "yellow")
    if left := sum(max(len(some) - MOST_PRINTED, 0) for some in (rows, failed)):
        print_text(console, f"and {left:,} more: --json or --out has all", "dim")
    for text in answer.notes:
        print_text(console, text, "dim")


def render(answer: Answer) -> str:
    """The page of an answer."""
    columns, _ = answer.table()
    rows = answer.rows()
    data: dict[str, Any] = {
        "columns": columns,
        "rows": [[_shown(row.get(column)) for column in columns] for row in rows[:MOST_ROWS]],
        "left": max(len(rows) - MOST_ROWS, 0),
        "points": _points(answer) if isinstance(answer, Map) else [],
        "undrawn": max(len(rows) - MOST_POINTS, 0) if isinstance(answer, Map) else 0,
    }
    return render_page(
        title=_heading(answer),
        question=answer.words,
        lead=visible(answer.sentence()),
        others=[visible(note) for note in answer.notes],
        kind="note",
        data=data,
        scripts=_SCRIPTS,
        styles=("figures", "answer", "page"),
    )


def _heading(answer: Answer) -> str:
    if query := answer.asked.get("query"):
        return f"{'Family of' if isinstance(answer, Family) else 'Nearest to'} {in_a_sentence(str(query))}"
    models = counted(answer.models, "model")
    return f"A map of {models}" if isinstance(answer, Map) else models


def _points(answer: Map) -> list[dict[str, Any]]:
    return [
        {
            "name": visible(row["name"]),
            "x": row["x"],
            "y": row["y"],
            "architecture": visible(row["architecture"]),
            "task": visible(row["task"]) if row["task"] else "no task",
            "tag": ", ".join(map(visible, row["tags"])) or "no tag",
        }
        for row in answer.rows()[:MOST_POINTS]
    ]


def _shown(value: Any) -> Any:
    """A number as it is, anything else as safe text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return visible(text) if (text := cell(value)) else None

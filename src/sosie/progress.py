"""A progress bar, shown after two seconds, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from html import escape
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds before anything is shown


class Progress(AbstractContextManager["Progress"]):
    """`with Progress("comparing", total) as bar: bar.advance(1)`; the total may be unknown."""

    def __init__(self, task: str, total: int | None = None, unit: str = "", *, shown: bool = True) -> None:
        self.task, self.total, self.unit = task, total, unit
        self._done = 0
        self._start = time.monotonic()
        self._bar: object | None = None
        self._notebook = in_notebook()
        self._visible = shown and (self._notebook or (sys.stderr is not None and sys.stderr.isatty()))

    def advance(self, steps: int = 1, note: str = "") -> None:
        self._done += steps
        if not self._visible:
            return
        if self._bar is None and time.monotonic() - self._start >= PATIENCE:
            self._open()
        if self._bar is not None:
            self._bar.update(self._line, completed=self._done, note=note)  # type: ignore[attr-defined]

    def _open(self) -> None:
        if self._notebook:
            self._bar, self._line = NotebookBar(self.task, self.total, self.unit), 0
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        self._bar = bar = Bar(
            TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn(f"{self.unit} {{task.fields[note]}}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._line = bar.add_task(self.task, total=self.total, completed=self._done, note="")
        bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, which has no terminal."""
    python = sys.modules.get("IPython")
    shell = None if python is None else python.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A bar in the output of a cell, which disappears at the end. rich's needs ipywidgets, this does not."""

    OFTEN = 0.25  # seconds between two updates: each is a message to the browser

    def __init__(self, task: str, total: int | None, unit: str) -> None:
        from IPython.display import display

        self.task, self.total, self.unit = task, total, unit
        self._last, self._start, self._first = 0.0, time.monotonic(), -1
        self._handle = display(self._shown(0, ""), raw=True, display_id=True)

    def update(self, line: object, *, completed: int, note: str = "") -> None:
        if self._first < 0:
            self._first = completed
        if time.monotonic() - self._last >= self.OFTEN:
            self._last = time.monotonic()
            self._handle.update(self._shown(completed, note), raw=True)

    def stop(self) -> None:
        self._handle.update({"text/plain": "", "text/html": ""}, raw=True)

    def _shown(self, completed: int, note: str) -> dict[str, str]:
        count = f"{completed:,}" if self.total is None else f"{completed:,} of {self.total:,}"
        words = f"{self.task}: {count} {self.unit} {note}".strip()
        if self.total and (steps := completed - max(self._first, 0)) > 0 and completed < self.total:
            left = (time.monotonic() - self._start) / steps * (self.total - completed)
            words += f", about {left:.0f} s left"
        ends = "" if self.total is None else f' value="{completed}" max="{self.total}"'
        return {"text/plain": words, "text/html": f"<progress{ends}></progress> {escape(words)}"}


def track(items: Iterable[T], task: str, total: int | None = None, unit: str = "") -> Iterator[T]:
    """Pass items through, with a progress bar."""
    with Progress(task, total, unit) as bar:
        for item in items:
            yield item
            bar.advance()

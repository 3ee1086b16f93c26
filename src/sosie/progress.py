"""A progress bar, shown after two seconds, and only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
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
        self._visible = shown and sys.stderr is not None and sys.stderr.isatty()

    def advance(self, steps: int = 1, note: str = "") -> None:
        self._done += steps
        if not self._visible:
            return
        if self._bar is None and time.monotonic() - self._start >= PATIENCE:
            self._open()
        if self._bar is not None:
            self._bar.update(self._line, completed=self._done, note=note)  # type: ignore[attr-defined]

    def _open(self) -> None:
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


def track(items: Iterable[T], task: str, total: int | None = None, unit: str = "") -> Iterator[T]:
    """Pass items through, with a progress bar."""
    with Progress(task, total, unit) as bar:
        for item in items:
            yield item
            bar.advance()

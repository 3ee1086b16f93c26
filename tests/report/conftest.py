"""Pages opened in a browser, and a record of everything it complained about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sosie.report import write_report
from sosie.results import Comparison, Comparisons


@dataclass
class Seen:
    """An open page with what happened on it."""

    page: Any
    path: Path
    complaints: list[str]  # console messages, errors, dialogs
    requests: list[str]

    def centre(self, i: int, j: int, which: int = 0) -> tuple[float, float]:
        """Where a reader of the axis labels would look for the cell of row i and column j."""
        drawing = self.page.locator("svg.heatmap").nth(which)
        drawing.scroll_into_view_if_needed()
        # The scroll event, which hides the tip, comes with the next frame.
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        row = drawing.locator(f"line[data-row='{i}']").bounding_box()
        column = drawing.locator(f"line[data-column='{j}']").bounding_box()
        return column["x"] + column["width"] / 2, row["y"] + row["height"] / 2

    def hover(self, i: int, j: int, which: int = 0) -> str:
        self.page.mouse.move(*self.centre(i, j, which))
        return str(self.page.locator(".tip").inner_text())


@pytest.fixture
def look(new_page: Callable[..., Any], tmp_path: Path) -> Callable[..., Seen]:
    """`look(result, width=360)` writes the page and opens it from the disk."""

    def opened(result: Comparison | Comparisons, width: int = 1360, **options: Any) -> Seen:
        path = write_report(result, tmp_path / f"page-{len(list(tmp_path.glob('page-*')))}.html")
        page = new_page(width, **options)
        page.goto(path.as_uri())
        return Seen(page, path, page.complaints, page.asked)

    return opened

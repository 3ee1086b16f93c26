"""What things look like in a notebook: a table of facts, and figures, for which the report is imported when asked."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .results import Comparison, Comparisons, Dynamics


def html_facts(title: str, facts: Mapping[str, Any]) -> str:
    """A title and a row for each fact that is not None or empty, all escaped."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(str(fact))}</td></tr>'
        for name, fact in facts.items()
        if fact is not None and fact != ""
    )
    html = f"<p><strong>{escape(title)}</strong></p><table><tbody>{rows}</tbody></table>"
    return html.encode("utf-8", "replace").decode()  # half characters cannot be saved with a notebook


def html_figures(result: Comparison | Comparisons | Dynamics) -> str:
    """Sentences, figures and tables as HTML with inline SVG, without scripts."""
    from .report.notebook import html_of

    return html_of(result)


def figure(result: Comparison | Comparisons, measure: str | None) -> Any:
    """A matplotlib figure: the heat map and the curves of a comparison, or the matrix of several models."""
    from .report.plots import plot

    return plot(result, measure)

"""Stitches and their evaluation, as rows that can be written down."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from networks import Images, fit_batches, held_out
from settings import Settings

import sosie
from sosie.models import NamedModel

Row = dict[str, Any]


def join(
    a: NamedModel,
    site_a: str,
    b: NamedModel,
    site_b: str,
    fits: Sequence[str],
    settings: Settings,
    images: Images | None = None,
) -> list[Row]:
    """One row a fit: how well B does with A's representation on test images, and how the joint was found."""
    found = sosie.stitch(a, site_a, b, site_b, images or fit_batches(settings), fit=list(fits))
    return [row_of(each, settings) for each in found]


def row_of(found: Any, settings: Settings) -> Row:
    tested = found.evaluate(held_out(settings))
    return {"fit": found.fit, **rounded(tested), "report": rounded(found.report), "history": map_rows(found.history)}


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}


def map_rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rounded(row) for row in history]


def mean(values: Sequence[float]) -> float:
    return fmean(values)


def spread(values: Sequence[float]) -> float:
    return pstdev(values)


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's; None where one of them does not vary."""
    if len(x) < 2 or not spread(x) or not spread(y):
        return None
    return fmean((a - fmean(x)) * (b - fmean(y)) for a, b in zip(x, y, strict=True)) / (spread(x) * spread(y))

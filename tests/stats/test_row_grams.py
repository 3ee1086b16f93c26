"""Leaving groups of rows out in closed form is leaving them out."""

from __future__ import annotations

import pytest
import torch

from sosie.stats import Alignment, DebiasedAlignment, Sample, UncentredAlignment, dealt_evenly
from sosie.stats.row_grams import columns_are_cheaper, from_products, inner_products


def sides(
    n: int, widths_a: tuple[int, ...], widths_b: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    random = torch.Generator().manual_seed(n)
    common = torch.randn(n, 3, generator=random, dtype=torch.float64)
    a, b = (
        [common @ torch.randn(3, w, generator=random, dtype=torch.float64) + 5 * torch.randn(w, generator=random)
         + torch.randn(n, w, generator=random, dtype=torch.float64) for w in widths]
        for widths in (widths_a, widths_b)
    )  # fmt: skip
    return a, b


@pytest.mark.parametrize("kind", [Alignment, DebiasedAlignment, UncentredAlignment])
@pytest.mark.parametrize(("n", "columns"), [(203, True), (41, False)])
def test_as_if_the_rows_were_not_there(kind: type[Alignment], n: int, columns: bool) -> None:
    a, b = sides(n, (4, 7), (5, 2, 6) if columns else (90, 2, 6))
    sample = Sample.of(a, b)
    assert (sample.grams._grouped(True) is None) is columns
    groups = sample.grams.groups
    left = sample.grams.left_out(kind)
    assert left.xy.shape == (groups, 2, 3)
    for group in range(groups):
        apart = sample.without((dealt_evenly(n, groups) == group).nonzero().flatten()).alignment(kind)
        for name in ("xx", "yy", "xy"):
            found, expected = getattr(left, name)[group], getattr(apart, name)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-9)


def test_float32_rows_with_a_large_mean() -> None:
    a, b = ([rows.float() + 100 for rows in side] for side in sides(60, (80,), (70,)))
    left = Sample.of(a, b).grams.left_out(DebiasedAlignment)
    exact = Sample.of([x.double() for x in a], [y.double() for y in b]).grams.left_out(DebiasedAlignment)
    torch.testing.assert_close(
        left.xy / (left.xx * left.yy).sqrt(), exact.xy / (exact.xx * exact.yy).sqrt(), atol=1e-5, rtol=0
    )


def test_many_rows_group_by_group_give_what_all_at_once_give() -> None:
    a, b = sides(600, (700, 3), (650,))
    sample = Sample.of(a, b)
    assert not columns_are_cheaper(a, b)
    for kind in (Alignment, DebiasedAlignment, UncentredAlignment):
        xs, ys = ([x if kind is UncentredAlignment else x - x.mean(0) for x in side] for side in (a, b))
        at_once, found = from_products(inner_products(xs, ys), xs, ys, kind), sample.alignment(kind)
        for name in ("xx", "yy", "xy"):
            torch.testing.assert_close(getattr(found, name), getattr(at_once, name), rtol=1e-12, atol=0)


def test_the_share_of_the_heaviest_row() -> None:
    a, b = sides(520, (600,), (640,))
    a[0][17] *= 30
    sample = Sample.of(a, b)
    sample.alignment()
    for found, rows in zip(sample.grams.heaviest, (a[0], b[0]), strict=True):
        gram = (rows - rows.mean(0)) @ (rows - rows.mean(0)).T
        without = [gram.square().sum() - 2 * gram[i].square().sum() + gram[i, i] ** 2 for i in range(len(gram))]
        expected = 1 - min(without) / gram.square().sum()
        assert float(found) == pytest.approx(float(expected), rel=1e-9)

"""Leaving groups of rows out in closed form is leaving them out."""

from __future__ import annotations

import pytest
import torch

from sosie.stats import Alignment, DebiasedAlignment, Sample, UncentredAlignment
from sosie.stats.from_rows import columns_are_cheaper


def sides(n: int, widths_a: tuple[int, ...], widths_b: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    random = torch.Generator().manual_seed(n)
    common = torch.randn(n, 3, generator=random, dtype=torch.float64)
    a, b = (
        [common @ torch.randn(3, w, generator=random, dtype=torch.float64) + 5 * torch.randn(w, generator=random)
         + torch.randn(n, w, generator=random, dtype=torch.float64) for w in widths]
        for widths in (widths_a, widths_b)
    )  # fmt: skip
    return a, b


@pytest.mark.parametrize("kind", [Alignment, DebiasedAlignment, UncentredAlignment])
@pytest.mark.parametrize(("n", "columns"), [(103, True), (41, False)])
def test_as_if_the_rows_were_not_there(kind: type[Alignment], n: int, columns: bool) -> None:
    a, b = sides(n, (4, 7), (5, 2, 6) if columns else (90, 2, 6))
    assert columns_are_cheaper(a, b) is columns
    sample, groups = Sample.of(a, b), 9
    left = sample.left_out_alignment(kind, groups)
    assert left.xy.shape == (groups, 2, 3)
    for group in range(groups):
        apart = sample.without(torch.arange(group, n, groups)).alignment(kind)
        for name in ("xx", "yy", "xy"):
            found, expected = getattr(left, name)[group], getattr(apart, name)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-9)


def test_float32_rows_with_a_large_mean() -> None:
    a, b = ([rows.float() + 100 for rows in side] for side in sides(60, (80,), (70,)))
    left = Sample.of(a, b).left_out_alignment(DebiasedAlignment, 10)
    exact = Sample.of([x.double() for x in a], [y.double() for y in b]).left_out_alignment(DebiasedAlignment, 10)
    torch.testing.assert_close(left.xy / (left.xx * left.yy).sqrt(), exact.xy / (exact.xx * exact.yy).sqrt(), atol=1e-5, rtol=0)

"""Measures of linear maps: their laws, and their values against linear CKA and the formula written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paired import correlated_rows
from test_laws import check_bounds, check_invariance, check_same, check_symmetry
from torch import Tensor

import sosie
from sosie.measures import MEASURES, Measure
from sosie.measures.define import TRANSFORMATIONS
from sosie.stats import LinearMaps

OF_MAPS = [measure for measure in MEASURES.values() if issubclass(measure.reads, LinearMaps)]
measures = pytest.mark.parametrize("measure", OF_MAPS, ids=lambda m: m.name)


@measures
@pytest.mark.parametrize("how", TRANSFORMATIONS)
def test_invariant_exactly_where_declared(measure: Measure, how: str) -> None:
    check_invariance(measure, *correlated_rows(n=30, p=4, q=3), how)


@measures
def test_other_laws(measure: Measure) -> None:
    x, y = correlated_rows(n=30, p=4, q=3)
    check_same(measure, x)
    check_symmetry(measure, x, y)
    check_bounds(measure, float(measure.of(x, y)))
    assert float(measure.of(x.float(), y.float())) == pytest.approx(float(measure.of(x, y)), abs=1e-5)


@measures
def test_gradient_is_right(measure: Measure) -> None:
    x, y = correlated_rows(n=20, p=4, q=3)
    x.requires_grad_(True)
    measure.of(x, y).backward()
    assert x.grad is not None
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    with torch.no_grad():
        slope = (measure.of(x + 1e-6 * direction, y) - measure.of(x - 1e-6 * direction, y)) / 2e-6
    assert float((x.grad * direction).sum()) == pytest.approx(float(slope), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(("n", "p", "q"), [(30, 4, 3), (8, 40, 30)], ids=["tall", "wide"])
def test_are_cka_whose_rows_are_the_entries_of_the_input(n: int, p: int, q: int) -> None:
    x, y = correlated_rows(n=n, p=p, q=q)
    assert float(MEASURES["wcka"].of(x, y)) == pytest.approx(float(MEASURES["linear_cka"].of(x, y)), abs=1e-12)
    kernel_alignment = float(MEASURES["kernel_alignment"].of(x, y))
    assert float(MEASURES["wcka_uncentred"].of(x, y)) == pytest.approx(kernel_alignment, abs=1e-12)


def test_against_equations_2_and_5_written_out() -> None:
    random = np.random.default_rng(0)
    a = [random.normal(size=shape) for shape in ((12, 5), (5, 4), (4, 3))]
    b = [random.normal(size=shape) for shape in ((12, 6), (6, 2))]
    w1, w2 = a[0] @ a[1] @ a[2], b[0] @ b[1]
    h = np.eye(12) - 1 / 12
    k1, k2 = w1 @ w1.T, w2 @ w2.T
    s = [np.trace(k @ h @ l @ h) for k, l in ((k1, k2), (k1, k1), (k2, k2))]
    assert sosie.measure("wcka", a, b) == pytest.approx(s[0] / np.sqrt(s[1] * s[2]), abs=1e-12)
    uncentred = np.linalg.norm(w2.T @ w1) ** 2 / (np.linalg.norm(w1.T @ w1) * np.linalg.norm(w2.T @ w2))
    assert sosie.measure("wcka_uncentred", w1, w2) == pytest.approx(uncentred, abs=1e-12)
    assert sosie.measure("wcka_uncentred", a, b) == pytest.approx(uncentred, abs=1e-12)


@pytest.mark.parametrize("size", [1e-40, 1e40])
def test_chains_of_any_size(size: float) -> None:
    random = torch.Generator().manual_seed(0)
    a, b = ([torch.randn(6, 6, generator=random, dtype=torch.float64) for _ in range(30)] for _ in range(2))
    expected = sosie.measure("wcka", a, b)
    assert sosie.measure("wcka", [size * w for w in a], [size * w for w in b]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (torch.ones(5, 3), torch.rand(5, 3), "same for all 5 inputs"),
        (torch.zeros(5, 3), torch.rand(5, 3), "x is zero"),
        (torch.rand(5, 3), torch.rand(4, 3), "5 and 4 entries"),
        ([torch.rand(5, 3), torch.rand(4, 3)], torch.rand(5, 3), r"factors 1 and 2 do not fit together: \(5, 3\)"),
        (torch.rand(5), torch.rand(5, 3), r"a map is \(inputs, outputs\)"),
        (torch.rand(5, 3) / 0 * 0, torch.rand(5, 3), "x has 15 values that are NaN"),
    ],
)
def test_bad_maps_are_refused(x: Tensor, y: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sosie.measure("wcka", x, y)


@pytest.mark.parametrize("widths", [(10,), (400,), (32, 32, 10), (64, 16, 16, 16, 10)], ids=str)
def test_chance_of_independent_chains_is_as_declared(widths: tuple[int, ...]) -> None:
    d = 200
    values = []
    for seed in range(8):
        random = torch.Generator().manual_seed(seed)
        sizes = list(zip((d, *widths), widths, strict=False))
        a, b = ([torch.randn(*s, generator=random, dtype=torch.float64) for s in sizes] for _ in range(2))
        values.append(sosie.measure("wcka", a, b))
    rank = 1 / (1 / d + sum(1 / width for width in widths))
    assert np.mean(values) == pytest.approx(rank / d, rel=0.25)

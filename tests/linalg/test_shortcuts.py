"""Cheaper ways to a number give the number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from sosie.linalg import (
    column_squares,
    cross_product,
    distances,
    gram_factor,
    nuclear_norm,
    row_squares,
    self_product,
    self_product_squares,
    spectra,
    squared_distances,
    upper_triangle,
    whitening,
    without_mean,
)


def rows(n: int, p: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(300, 200), (90, 150), (7, 1)])
def test_products_and_squares(shape: tuple[int, int]) -> None:
    x = rows(*shape)
    torch.testing.assert_close(self_product(x), x.T @ x)
    torch.testing.assert_close(self_product(x.float()), (x.T @ x).float(), atol=1e-3, rtol=0)
    torch.testing.assert_close(self_product(x.T), x @ x.T)
    torch.testing.assert_close(cross_product(x.float(), x + 1), x.float().double().T @ (x + 1))
    torch.testing.assert_close(column_squares(x), x.square().sum(0))
    torch.testing.assert_close(row_squares(x), x.square().sum(1))


@pytest.mark.parametrize("width", [1, 255, 256, 301])
def test_norms_of_products_by_halves(width: int) -> None:
    x = rows(40, width)
    torch.testing.assert_close(self_product_squares(x), (x.T @ x).square().sum(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4, 1e9])
def test_centred_rows_have_no_mean_left(offset: float) -> None:
    """One column far off, and one that is constant; what is left of a mean, squared, is no part of the variance."""
    x = rows(5000, 3)
    x[:, 0] += offset
    x[:, 1] = 0.1
    left = without_mean(x).mean(0)
    assert (left.square() < 1e-16 * x.var(0)).tolist() == [True, False, True]
    assert abs(left[1]) < 1e-16


def test_distances_of_rows_that_nearly_coincide() -> None:
    x = rows(40, 5) + 1e6
    x[1] = x[0] + 1e-6
    found = distances(x)
    np.testing.assert_allclose(found.numpy(), cdist(x.numpy(), x.numpy()), rtol=1e-12)
    assert found[0, 1] > 0


@pytest.mark.parametrize("p", [1, 5, 200])
def test_distances_have_all_digits_whatever_the_rows(p: int) -> None:
    """Tight clusters, equal rows, one row far from all others, an offset: as from differences."""
    x = rows(60, p)
    pairs = x.repeat(2, 1) + 1e-7 * rows(120, p, seed=1)
    clusters = x[:6].repeat(10, 1) + 1e-5 * rows(60, p, seed=1)  # a tenth of all pairs and more: none by products
    equal, outlier = x.clone(), x.clone()
    equal[7] = equal[3]
    outlier[0] = 1e9
    for each in (x, x + 100, pairs, clusters, equal, outlier):
        expected = cdist(each.numpy(), each.numpy())
        np.testing.assert_allclose(distances(each).numpy(), expected, rtol=1e-12, atol=0)
        np.testing.assert_allclose(squared_distances(each).numpy(), expected**2, rtol=2e-12, atol=0)


def test_the_upper_triangle_row_by_row() -> None:
    square = rows(7, 7)
    expected = square[tuple(torch.triu_indices(7, 7, 1))]
    assert torch.equal(upper_triangle(square), expected)
    assert torch.equal(upper_triangle(square.requires_grad_()), expected)


@pytest.mark.parametrize("shape", [(150, 150), (200, 90), (90, 200)])
def test_nuclear_norm_from_eigenvalues(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(*shape)
    expected = np.linalg.svd(x.numpy(), compute_uv=False).sum()
    monkeypatch.setattr(spectra, "singular_values", None)  # not needed here
    assert float(nuclear_norm(x, most=2 * expected)) == pytest.approx(expected, rel=1e-12)


def test_nuclear_norm_by_the_book_where_digits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = spectra.singular_values
    monkeypatch.setattr(spectra, "singular_values", lambda m: calls.append(m.shape) or original(m))
    x = rows(150, 150)
    steep = x * torch.logspace(0, -9, 150, dtype=torch.float64)
    hollow = torch.cat([x[:, :75], torch.zeros_like(x[:, :75])], dim=1)  # flat, but eigenvalues 0 have no digits
    for matrix, share in ((x, 1 - 1e-6), (steep, 0.5), (hollow, 0.5)):
        expected = np.linalg.svd(matrix.numpy(), compute_uv=False).sum()
        assert float(nuclear_norm(matrix, most=expected / share)) == pytest.approx(expected, rel=1e-13)
    assert len(calls) == 3


def test_what_a_nuclear_norm_is_short_of_has_digits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close to what it can be at most, where distances are roots of the difference: by eigenvalues if they allow it."""
    original, calls = spectra.singular_values, []
    monkeypatch.setattr(spectra, "singular_values", lambda m: calls.append(m.shape) or original(m))
    x = rows(2000, 150)
    for noise, by_the_book in ((0.1, 0), (1e-5, 1)):
        y = x @ torch.linalg.qr(rows(150, 150, seed=1)).Q + noise * rows(2000, 150, seed=2)
        most = x.norm() * y.norm()
        expected = np.linalg.svd((x.T @ y).numpy(), compute_uv=False).sum()
        calls.clear()
        found = nuclear_norm(x.T @ y, most=most)
        assert float(most - found) == pytest.approx(float(most) - expected, rel=1e-10, abs=1e-15 * float(most))
        assert found > 0.99 * most
        assert len(calls) == by_the_book


def test_a_nuclear_norm_is_as_certain_as_it_is_asked_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling spectra: eigenvalues where their bound allows, and then far within it; otherwise singular values."""
    calls = []
    original = spectra.singular_values
    monkeypatch.setattr(spectra, "singular_values", lambda m: calls.append(m.shape) or original(m))
    turn = torch.linalg.qr(rows(200, 200, seed=1)).Q
    for power, enough, by_the_book in ((0.5, 1e-10, 0), (1.5, 1e-10, 1), (1.5, 1e-7, 0), (3.0, 1e-7, 1)):
        fall = torch.arange(1, 201, dtype=torch.float64) ** -power
        matrix = (rows(200, 200) * fall) @ turn
        expected = np.linalg.svd(matrix.numpy(), compute_uv=False).sum()
        calls.clear()
        found = float(nuclear_norm(matrix, most=2 * expected, enough=enough))
        assert abs(found / expected - 1) < enough / 100
        assert len(calls) == by_the_book, (power, enough)


@pytest.mark.parametrize("rank", [40, 9])
def test_a_factor_of_a_gram_matrix(rank: int) -> None:
    x = rows(40, rank) * torch.logspace(0, -2, rank, dtype=torch.float64)
    found = gram_factor(x @ x.T)
    assert found.shape == (40, rank)
    torch.testing.assert_close(found @ found.T, x @ x.T, rtol=0, atol=1e-13)


def test_whitening_by_a_triangle_or_by_the_root() -> None:
    x = rows(60, 8)
    full = torch.corrcoef(x.T)
    found, everywhere = whitening(full)
    assert everywhere
    torch.testing.assert_close(found @ full @ found.T, torch.eye(8, dtype=torch.float64))
    repeated = torch.corrcoef(torch.cat([x, x[:, :2]], dim=1).T)
    found, everywhere = whitening(repeated)
    assert not everywhere
    projector = found @ repeated @ found.T
    torch.testing.assert_close(projector @ projector, projector)
    assert float(projector.trace()) == pytest.approx(8)


def test_whitening_has_a_gradient() -> None:
    change = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    matrix, other = torch.corrcoef(rows(40, 5).T), rows(5, 5, seed=1)

    def canonical(change: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(whitening(matrix + change + change.T)[0] @ other).sum()

    assert torch.autograd.gradcheck(canonical, (change,), eps=1e-6, atol=1e-6)

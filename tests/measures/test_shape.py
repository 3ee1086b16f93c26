"""Shape angles and raw Procrustes against SciPy, NumPy and their ends."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from paired import numpy_pair

import sosie
from sosie.stats import Moments


def test_raw_procrustes_against_scipy() -> None:
    x, y = numpy_pair(5, 5)
    a, b = (side - side.mean(0) for side in (x, y))
    rotation, _ = scipy.linalg.orthogonal_procrustes(a, b)
    assert sosie.measure("raw_procrustes_distance", x, y) == pytest.approx(np.linalg.norm(a @ rotation - b), abs=1e-10)


def test_raw_procrustes_pads_the_narrower_side() -> None:
    x, y = numpy_pair(6, 4)
    padded = np.c_[y, np.zeros((80, 2))]
    a, b = (side - side.mean(0) for side in (x, padded))
    rotation, _ = scipy.linalg.orthogonal_procrustes(a, b)
    assert sosie.measure("raw_procrustes_distance", x, y) == pytest.approx(np.linalg.norm(a @ rotation - b), abs=1e-10)


def test_raw_procrustes_of_unit_sizes_is_the_procrustes_distance() -> None:
    x, y = (side - side.mean(0) for side in numpy_pair())
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    raw, scaled = (sosie.measure(name, x, y) for name in ("raw_procrustes_distance", "procrustes_distance"))
    assert raw == pytest.approx(scaled, abs=1e-12)


def angle_by_singular_values(x: np.ndarray, y: np.ndarray, alpha: float) -> float:
    """The definition, from the singular value decomposition of each side: eigenvalues of C are σ² / n."""

    def partly_whitened(rows: np.ndarray) -> np.ndarray:
        u, s, v = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
        kept = s > 1e-8 * s[0]
        roots = s[kept] / np.sqrt(np.mean(s[kept] ** 2))  # of eigenvalues that are 1 on average
        return u[:, kept] * (alpha * roots + (1 - alpha)) @ v[kept]

    a, b = partly_whitened(x), partly_whitened(y)
    return float(np.arccos(np.linalg.norm(a.T @ b, "nuc") / (np.linalg.norm(a) * np.linalg.norm(b))))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("widths", [(6, 4), (5, 5), (100, 7)], ids=str)
def test_shape_angle_by_its_definition(alpha: float, widths: tuple[int, int]) -> None:
    x, y = numpy_pair(*widths)
    expected = angle_by_singular_values(x, y, alpha)
    assert sosie.measure("shape_angle", x, y, alpha=alpha) == pytest.approx(expected, abs=1e-7)


def test_shape_angle_ends_at_procrustes_and_at_cca() -> None:
    x, y = numpy_pair()
    assert sosie.measure("shape_angle", x, y, alpha=1) == pytest.approx(
        sosie.measure("procrustes_angle", x, y), abs=1e-12
    )
    equal = numpy_pair(5, 5)
    assert sosie.measure("shape_angle", *equal, alpha=0) == pytest.approx(
        np.arccos(sosie.measure("mean_cca", *equal)), abs=1e-10
    )
    # Ranks 6 and 4: a sum of four correlations over √(6 · 4).
    assert sosie.measure("shape_angle", x, y, alpha=0) == pytest.approx(
        np.arccos(4 * sosie.measure("mean_cca", x, y) / np.sqrt(24)), abs=1e-10
    )


def test_shape_angle_knows_no_units_for_any_alpha() -> None:
    """Without the scaling to a mean eigenvalue of 1 a value between the ends would change."""
    x, y = numpy_pair()
    for alpha in (0.1, 0.7):
        angles = [sosie.measure("shape_angle", scale * x, y, alpha=alpha) for scale in (1e-3, 1, 50)]
        assert angles == pytest.approx([angles[0]] * 3, abs=1e-10)


def test_shape_angle_is_a_metric_on_a_triangle() -> None:
    x, y = numpy_pair(5, 5)
    z = x + y
    xy, yz, xz = (sosie.measure("shape_angle", *pair, alpha=0.5) for pair in ((x, y), (y, z), (x, z)))
    assert max(xy, yz, xz) < sum((xy, yz, xz)) - max(xy, yz, xz)


def test_shape_angle_of_dead_and_repeated_neurons() -> None:
    x, y = (torch.from_numpy(side) for side in numpy_pair())
    padded = torch.cat([x, torch.full((80, 2), 0.7, dtype=x.dtype)], dim=1)
    for statistic in (Moments.of(padded, y), Moments.of(padded[:30], y[:30]).merge(Moments.of(padded[30:], y[30:]))):
        found = sosie.measures.find("shape_angle")(statistic.covariances())
        assert float(found) == pytest.approx(sosie.measure("shape_angle", x, y), abs=1e-9)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_outside_the_family_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha=0"):
        sosie.measure("shape_angle", *numpy_pair(), alpha=alpha)


def test_rows_with_themselves_turned_stay_defined_where_variances_differ_a_lot() -> None:
    random = np.random.default_rng(1)
    for n, p in ((50, 10), (300, 70), (400, 128)):
        x = random.normal(size=(n, p)) * np.logspace(0, -4, p)
        turn = np.linalg.qr(random.normal(size=(p, p)))[0]
        assert sosie.measure("shape_angle", x, x @ turn) < 1e-3

"""Geometry and topology of rows against SciPy, scikit-learn, closed forms, and a barcode by plain reduction."""

from __future__ import annotations

import builtins
import math
import os

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.csgraph
import torch
from barcodes import bars
from paired import correlated_rows
from scipy.spatial.distance import cdist, pdist, squareform
from sklearn.neighbors import NearestNeighbors, kneighbors_graph

import sosie
from sosie.measures import (
    Measure,
    concentricity_difference,
    imd,
    intrinsic_dimension_difference,
    magnitude_difference,
    rtd,
    uniformity_difference,
)
from sosie.measures.geometry import _heat_trace, _intrinsic_dimension
from sosie.stats import Sample

UNPAIRED = [
    magnitude_difference,
    concentricity_difference,
    uniformity_difference,
    imd,
    intrinsic_dimension_difference,
]


def numpy_pair(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = correlated_rows(n=n, seed=seed)
    return x.numpy(), y.numpy()


# One number of each cloud


def test_magnitude() -> None:
    x, y = numpy_pair()
    expected = abs(np.linalg.norm(x.mean(0)) - np.linalg.norm(y.mean(0)))
    assert sosie.measure("magnitude_difference", x, y) == pytest.approx(expected, abs=1e-12)
    assert float(magnitude_difference.of(torch.full((5, 4), 3.0), torch.full((5, 1), 2.0))) == pytest.approx(4)


def test_concentricity() -> None:
    x, y = numpy_pair()
    expected = [np.mean(1 - cdist(side, side.mean(0, keepdims=True), "cosine")) for side in (x, y)]
    assert sosie.measure("concentricity_difference", x, y) == pytest.approx(abs(expected[0] - expected[1]), abs=1e-12)
    # Two rows at a right angle are at 45° to their mean; two equal rows at 0.
    corner, line = torch.eye(2), torch.ones(2, 2)
    found = float(concentricity_difference.of(corner, line))
    assert found == pytest.approx(1 - 0.5**0.5, abs=1e-12)


def test_uniformity() -> None:
    x, y = numpy_pair()
    units = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in (x, y)]
    expected = [np.log(np.mean(np.exp(-2 * pdist(u, "sqeuclidean")))) for u in units]
    assert sosie.measure("uniformity_difference", x, y) == pytest.approx(abs(expected[0] - expected[1]), abs=1e-12)
    # Opposite rows: log exp(−2 · 4); equal rows: 0.
    apart, together = torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1)
    assert float(uniformity_difference.of(apart, together)) == pytest.approx(8, abs=1e-12)


def test_undefined_numbers() -> None:
    with pytest.raises(ValueError, match="mean row that is not zero"):
        concentricity_difference.of(torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1))
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        uniformity_difference.of(torch.ones(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize("measure", UNPAIRED, ids=lambda m: m.name)
def test_the_pairing_is_no_part_of_it(measure: Measure) -> None:
    x, y = correlated_rows()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    assert not measure.paired
    assert float(measure.of(x, y[order])) == pytest.approx(float(measure.of(x, y)), abs=1e-12)
    assert float(measure.of(x, x[order])) == pytest.approx(0, abs=1e-12)


# The heat trace


@pytest.mark.parametrize("k", [1, 5, 20])
def test_imd_against_scikit_learn_and_scipy(k: int) -> None:
    temperatures = np.logspace(-1, 1, 256)
    x, y = numpy_pair()

    def trace(side: np.ndarray) -> np.ndarray:
        graph = kneighbors_graph(side, k, mode="connectivity")
        laplacian = scipy.sparse.csgraph.laplacian(graph.maximum(graph.T), normed=True).toarray()
        return np.exp(-np.outer(temperatures, scipy.linalg.eigvalsh(laplacian))).mean(1)

    expected = (np.exp(-2 * (temperatures + 1 / temperatures)) * abs(trace(x) - trace(y))).max()
    assert sosie.measure("imd", x, y, k=k) == pytest.approx(expected, rel=1e-9)


def test_imd_of_two_graphs_with_known_spectra() -> None:
    """k = n − 1 joins all: eigenvalues 0 and n − 1 times n/(n − 1). k = 1 joins twos: 0 and 2, each n/2 times."""
    n, t = 8, np.logspace(-1, 1, 256)
    twos = torch.tensor([[10.0 * (i // 2) + 0.1 * i] for i in range(n)])
    complete, pairs = (1 + (n - 1) * np.exp(-t * n / (n - 1))) / n, (1 + np.exp(-2 * t)) / 2
    heat = [_heat_trace(twos.double(), k).numpy() for k in (n - 1, 1)]
    np.testing.assert_allclose(heat[0], complete, rtol=1e-12)
    np.testing.assert_allclose(heat[1], pairs, rtol=1e-12)


def test_imd_tells_a_ring_from_a_ball() -> None:
    random = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(2, 300, generator=random, dtype=torch.float64)
    ring, other_ring = (torch.stack([a.cos(), a.sin()], 1) for a in angle)
    ball = torch.randn(300, 10, generator=random, dtype=torch.float64)
    assert float(imd.of(ring, ball)) > 10 * float(imd.of(ring, other_ring)) > 0


# Intrinsic dimension


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_the_dimension_of_a_cube_is_found_in_a_wider_space(dimension: int) -> None:
    def found(seed: int) -> float:
        random = torch.Generator().manual_seed(seed)
        cube = torch.rand(1500, dimension, generator=random, dtype=torch.float64)
        turned = cube @ torch.linalg.qr(torch.randn(12, 12, generator=random, dtype=torch.float64)).Q[:dimension]
        inside, outside = (float(_intrinsic_dimension(rows, 0.1)) for rows in (cube, turned))
        assert outside == pytest.approx(inside, rel=1e-6)
        return inside

    assert np.mean([found(seed) for seed in range(6)]) == pytest.approx(
        dimension, rel=0.08
    )  # its faces make it a little low


@pytest.mark.parametrize("discard", [0.0, 0.1, 0.5])
def test_intrinsic_dimension_against_least_squares(discard: float) -> None:
    x, y = numpy_pair(80)

    def dimension(side: np.ndarray) -> float:
        distances, _ = NearestNeighbors(n_neighbors=2).fit(side).kneighbors()
        ratio = np.log(np.sort(distances[:, 1] / distances[:, 0]))
        height = [-math.log(1 - i / 80) if i < 80 else math.inf for i in range(1, 81)]
        kept = min(80 - round(80 * discard), 79)
        return float(np.linalg.lstsq(ratio[:kept, None], np.array(height[:kept]), rcond=None)[0][0])

    found = sosie.measure("intrinsic_dimension_difference", x, y, discard=discard)
    assert found == pytest.approx(abs(dimension(x) - dimension(y)), abs=1e-9)


def test_undefined_dimensions() -> None:
    x, y = correlated_rows(n=20)
    twins = x.clone()
    twins[7] = twins[2]
    with pytest.raises(ValueError, match="2 of 20 rows are equal to another"):
        intrinsic_dimension_difference.of(twins, y)
    with pytest.raises(ValueError, match="equally far, as on a grid"):
        intrinsic_dimension_difference.of(torch.eye(20), y)
    with pytest.raises(ValueError, match="needs more rows, got 2"):
        intrinsic_dimension_difference.of(x[:2], y[:2])
    with pytest.raises(ValueError, match="share from 0 to below 1"):
        intrinsic_dimension_difference.using(discard=1).of(x, y)


# Topology


def scaled(side: np.ndarray) -> np.ndarray:
    distances = squareform(pdist(side))
    return distances / np.quantile(distances, 0.9)


def two_copies(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The graph of the authors' code, on 2n points."""
    return np.block([[np.zeros_like(x), x], [x.T, np.minimum(x, y)]])


def two_copies_and_a_tip(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The graph of the paper's algorithm, on 2n + 1 points: half of the edges between the copies, and a cone."""
    n = len(x)
    half = np.where(np.tril(np.ones((n, n)), -1) > 0, np.inf, x)  # an edge from i to its own copy has length 0
    graph = np.full((2 * n + 1, 2 * n + 1), np.inf)
    graph[:n, :n], graph[n:-1, n:-1] = x, np.minimum(x, y)
    graph[n:-1, :n], graph[:n, n:-1] = half, half.T
    graph[-1, :n] = graph[:n, -1] = 0
    return graph


def total(graph: np.ndarray) -> float:
    return sum(died - born for born, died in bars(graph))


def test_the_reduction_knows_a_square() -> None:
    square = squareform(pdist(np.array([[0, 0], [0, 1], [1, 1], [1, 0.0]])))
    assert bars(square) == [(1.0, pytest.approx(2**0.5))]
    assert bars(square, 0) == [(0.0, 1.0)] * 3 + [(0.0, np.inf)]


@pytest.mark.parametrize("seed", range(4))
def test_rtd_against_plain_reduction(seed: int) -> None:
    pytest.importorskip("ripser")
    x, y = numpy_pair(9, seed)
    a, b = scaled(x), scaled(y)
    by_hand = (total(two_copies(a, b)) + total(two_copies(b, a))) / 2
    assert by_hand > 0.1
    assert sosie.measure("rtd", x, y) == pytest.approx(by_hand, abs=1e-12)
    # The two graphs in use are worth the same.
    assert total(two_copies_and_a_tip(a, b)) == pytest.approx(total(two_copies(a, b)), abs=1e-12)


@pytest.mark.skipif("SOSIE_SLOW_TESTS" not in os.environ, reason="takes a minute and a half; set SOSIE_SLOW_TESTS=1")
def test_rtd_of_the_authors_example() -> None:
    """The readme of the authors' code prints 35.55234398557805 for these rows, a mean over ten draws of 500."""
    pytest.importorskip("ripser")
    state = np.random.RandomState(7)
    p, q = state.rand(1000, 2), state.rand(1000, 2)
    values = []
    for _ in range(10):
        index = list(range(1000))
        state.shuffle(index)
        values.append(sosie.measure("rtd", p[index[:500]], q[index[:500]], rows=500))
    assert np.mean(values) == pytest.approx(35.55234398557805, abs=1e-6)


def test_rtd_sees_a_ring_that_closes() -> None:
    """A ring against the same points on a line: one loop's worth of difference, and nothing against a larger ring."""
    pytest.importorskip("ripser")
    angle = torch.linspace(0, 2 * math.pi, 41, dtype=torch.float64)[:-1]
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    assert float(rtd.of(ring, 5 * ring + 2)) == pytest.approx(0, abs=1e-9)
    assert float(rtd.of(ring, angle[:, None])) > 0.2


def test_rtd_draws_the_same_rows_of_both_sides() -> None:
    pytest.importorskip("ripser")
    x, y = correlated_rows(n=50)
    few = rtd.using(rows=20)
    drawn = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:20].sort().values
    assert float(few.of(x, x.clone())) == pytest.approx(0, abs=1e-12)
    assert float(few.of(x, y)) == pytest.approx(float(rtd.of(x[drawn], y[drawn])), abs=1e-12)
    assert float(few.of(x, y)) != pytest.approx(float(rtd.using(rows=20, seed=1).of(x, y)), abs=1e-3)
    sample = Sample.of([x], [y, y + 1])  # a site's distances are made once
    few(sample.paired(0, 0))
    kept = sample.paired(0, 0).x._made[("scaled distances", 20, 0)]
    few(sample.paired(0, 1))
    assert sample.paired(0, 1).x._made[("scaled distances", 20, 0)] is kept


def test_undefined_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = correlated_rows(n=40)
    with pytest.raises(ValueError, match="nine in ten of the distances between 40 rows are 0"):
        rtd.of(torch.ones(40, 3), y)
    with pytest.raises(ValueError, match="at least 2 rows, got 40, of which at most 1"):
        rtd.using(rows=1).of(x, y)
    honest = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "ripser":
            raise ImportError(name)
        return honest(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'sosie\[topology\]'"):
        rtd.of(x, y)

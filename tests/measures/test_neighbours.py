"""Neighbour measures against scikit-learn's neighbours, plain loops and what chance gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from paired import correlated_rows
from scipy.spatial.distance import cdist, cosine
from sklearn.neighbors import NearestNeighbors

import sosie
from sosie.measures import MEASURES, cycle_knn, mutual_knn, second_order_cosine
from sosie.measures import neighbours as module
from sosie.measures.neighbours import nearest
from sosie.stats import Sample

K_MEASURES = ["mutual_knn", "jaccard", "second_order_cosine", "rank_similarity", "cycle_knn", "lcs_knn", "imd"]


def lists(side: np.ndarray, k: int) -> list[list[int]]:
    """Each row's k nearest other rows, by scikit-learn."""
    found = NearestNeighbors(n_neighbors=k, metric="cosine").fit(side).kneighbors(return_distance=False)
    return found.tolist()


def jaccard(x: np.ndarray, y: np.ndarray, k: int) -> float:
    return np.mean([len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in zip(lists(x, k), lists(y, k), strict=True)])


def second_order(x: np.ndarray, y: np.ndarray, k: int) -> float:
    values = []
    for i, (a, b) in enumerate(zip(lists(x, k), lists(y, k), strict=True)):
        union = sorted(set(a) | set(b))
        first, second = (1 - cdist(side[[i]], side[union], "cosine")[0] for side in (x, y))
        values.append(1 - cosine(first, second))
    return float(np.mean(values))


def rank_similarity(x: np.ndarray, y: np.ndarray, k: int) -> float:
    values = []
    for a, b in zip(lists(x, k), lists(y, k), strict=True):
        common = set(a) & set(b)
        total = 0.0
        for j in common:
            r, s = a.index(j) + 1, b.index(j) + 1
            total += 2 / ((1 + abs(r - s)) * (r + s))
        values.append(total / sum(1 / c for c in range(1, len(common) + 1)) if common else 0.0)
    return float(np.mean(values))


def cycle(x: np.ndarray, y: np.ndarray, k: int) -> float:
    near_x, near_y = lists(x, k), lists(y, k)
    return float(np.mean([any(i in near_x[j] for j in near_y[i]) for i in range(len(x))]))


def longest_common(x: np.ndarray, y: np.ndarray, k: int) -> float:
    def length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        @cache
        def of(i: int, j: int) -> int:
            if i == len(a) or j == len(b):
                return 0
            return 1 + of(i + 1, j + 1) if a[i] == b[j] else max(of(i + 1, j), of(i, j + 1))

        return of(0, 0)

    return float(np.mean([length(tuple(a), tuple(b)) / k for a, b in zip(lists(x, k), lists(y, k), strict=True)]))


@pytest.mark.parametrize("k", [1, 3, 10, 59])
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("jaccard", jaccard),
        ("second_order_cosine", second_order),
        ("rank_similarity", rank_similarity),
        ("cycle_knn", cycle),
        ("lcs_knn", longest_common),
    ],
)
def test_against_loops_over_scikit_learns_neighbours(name: str, reference: Callable[..., float], k: int) -> None:
    x, y = (side.numpy() for side in correlated_rows(n=60))
    assert sosie.measure(name, x, y, k=k) == pytest.approx(reference(x, y, k), abs=1e-12)
    assert sosie.measure(name, y, x, k=k) == pytest.approx(reference(y, x, k), abs=1e-12)


def test_by_hand() -> None:
    """Four directions on a circle, in degrees; neighbours by angle."""

    def circle(*degrees: float) -> torch.Tensor:
        angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
        return torch.stack([angle.cos(), angle.sin()], 1)

    x, y = (
        circle(0, 10, 30, 70),
        circle(0, 30, 10, 70),
    )  # nearest two in x: 1 2, 0 2, 1 0, 2 1; in y: 2 1, 2 0, 0 1, 1 2
    expected = {
        "mutual_knn": 1.0,
        "jaccard": 1.0,
        "lcs_knn": 0.5,
        # ranks 1 and 2 swapped in every list: 2 (2 / (2 · 3)) / (1 + 1/2)
        "rank_similarity": 4 / 9,
        "cycle_knn": 0.75,  # nobody has the last row near
    }
    for name, value in expected.items():
        assert float(MEASURES[name].using(k=2).of(x, y)) == pytest.approx(value, abs=1e-12), name


def test_order_between_the_measures() -> None:
    x, y = correlated_rows(n=80)
    for k in (2, 5, 10):
        shared = sosie.measure("mutual_knn", x, y, k=k)
        assert sosie.measure("jaccard", x, y, k=k) < shared
        assert sosie.measure("lcs_knn", x, y, k=k) <= shared


def test_rows_with_themselves_need_not_return() -> None:
    x = torch.cat([correlated_rows(n=20)[0] + 5, -torch.ones(1, 7, dtype=torch.float64)])
    assert float(cycle_knn.using(k=3).of(x, x)) < 1  # the last row is nobody's neighbour


# What chance gives


def independent(n: int, p: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, p, generator=random, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def by_chance(name: str, k: int, n: int) -> float:
    rank = np.arange(1, k + 1)
    return {
        "mutual_knn": k / (n - 1),
        "jaccard": k / (2 * (n - 1) - k),
        "rank_similarity": (2 / ((1 + abs(rank[:, None] - rank)) * (rank[:, None] + rank))).sum() / (n - 1),
        "cycle_knn": 1 - (1 - k / (n - 1)) ** k,
        "lcs_knn": k / (n - 1),
        "second_order_cosine": 0,
    }[name]


@pytest.mark.parametrize(
    ("name", "k"),
    [("mutual_knn", 10), ("jaccard", 10), ("rank_similarity", 5), ("cycle_knn", 10), ("lcs_knn", 5)],
)
def test_independent_rows_give_what_is_declared(name: str, k: int) -> None:
    values = [float(MEASURES[name].using(k=k).of(*independent(400, 3, seed))) for seed in range(60)]
    assert np.mean(values) == pytest.approx(by_chance(name, k, 400), rel=0.12)


def test_second_order_cosine_of_independent_rows() -> None:
    """Cosines to neighbours are positive on their own side and average to the common mean's on the other."""
    centred = [float(second_order_cosine.of(*independent(300, 20, seed))) for seed in range(4)]
    shifted = [float(second_order_cosine.of(*(s + 2 for s in independent(300, 20, seed)))) for seed in range(4)]
    assert abs(np.mean(centred)) < 0.05
    assert np.mean(shifted) > 0.9


# Ties, shared work, refusals


def test_ties_are_broken_by_a_draw_that_the_rows_decide() -> None:
    score = torch.tensor([[0.0, 3, 2, 2, 2, 1]], dtype=torch.float64)
    x, y = correlated_rows(n=6)
    assert torch.equal(nearest(score, 3, x), nearest(score, 3, x.clone()))
    found = {tuple(nearest(score, 3, rows)[0].tolist()) for rows in (*(x + k for k in range(20)), y)}
    assert len(found) > 1, "equal ones come in other orders for other rows"
    assert all(columns[0] == 1 and set(columns[1:]) < {2, 3, 4} for columns in found)
    near = score + torch.tensor([0, 0, 1e-16, -1e-16, 0, 0])
    assert torch.equal(nearest(near, 3, x), nearest(score, 3, x)), "rounding is no order"
    assert score[0].tolist() == [0, 3, 2, 2, 2, 1], "scores are left as they were"


def test_neighbours_are_found_once_for_all_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    honest = module.nearest
    monkeypatch.setattr(module, "nearest", lambda score, k, rows: calls.append(k) or honest(score, k, rows))
    x, y = correlated_rows(n=40)
    sample = Sample.of([x, x.flip(0)], [y, y.flip(0)])
    for name in ("mutual_knn", "jaccard", "second_order_cosine", "rank_similarity", "cycle_knn", "lcs_knn"):
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            MEASURES[name](sample.paired(i, j))
    assert calls == [10] * 4  # once a site


@pytest.mark.parametrize("name", K_MEASURES)
def test_too_few_rows_or_no_neighbours(name: str) -> None:
    x, y = correlated_rows(n=8)
    assert np.isfinite(sosie.measure(name, x, y, k=7))
    with pytest.raises(ValueError, match=rf"{name}\(k=8\) needs more than k rows, got 8"):
        sosie.measure(name, x, y, k=8)
    for k in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"{name} counts neighbours: k must be a whole number of at least 1"):
            sosie.measure(name, x, y, k=k)


def test_rows_without_a_direction() -> None:
    x, y = correlated_rows(n=20)
    x[3:5] = 0
    for name in ("mutual_knn", "lcs_knn", "second_order_cosine", "concentricity_difference", "uniformity_difference"):
        with pytest.raises(ValueError, match="2 of 20 rows are all zero"):
            sosie.measure(name, x, y)


def test_second_order_cosine_of_orthogonal_rows() -> None:
    with pytest.raises(ValueError, match="12 of 12 rows are orthogonal to all their neighbours"):
        second_order_cosine.using(k=3).of(torch.eye(12), torch.eye(12))
    assert float(mutual_knn.using(k=3).of(torch.eye(12), torch.eye(12))) == 1

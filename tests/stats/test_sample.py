"""Samples are seeded, paired, mergeable, and free of the order in which rows arrive."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paired import correlated_rows

from sosie.measures import MEASURES
from sosie.stats import Fold, RowSampler, Sample, SampleMaker, Shuffle, row_hash


def drawn(
    x: torch.Tensor, y: torch.Tensor, edges: list[int], *, rows: int = 20, order: list[int] | None = None
) -> Sample:
    lottery = RowSampler(rows, seed=4)
    makers = SampleMaker(lottery), SampleMaker(lottery)
    spans = list(itertools.pairwise(edges))
    total = None
    for k in order or range(len(spans)):
        start, stop = spans[k]
        a, b = (m.side([m.part("s", r[start:stop], start)], start) for m, r in zip(makers, (x, y), strict=True))
        part = Sample.join(a, b)
        total = part if total is None else total.merge(part)
    assert total is not None
    return total


@given(cuts=st.lists(st.integers(1, 99), max_size=6), seed=st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_any_split_in_any_order_keeps_the_same_rows(cuts: list[int], seed: int) -> None:
    x, y = correlated_rows(n=100)
    edges = [0, *sorted(set(cuts)), 100]
    order = torch.randperm(len(edges) - 1, generator=torch.Generator().manual_seed(seed)).tolist()
    found = drawn(x, y, edges, order=order)
    smallest = np.sort(np.argsort(row_hash(np.arange(100), 4))[:20])
    assert found.index.tolist() == smallest.tolist()
    assert torch.equal(found.xs[0], x[smallest])
    assert torch.equal(found.ys[0], y[smallest])
    assert found.seen == 100


def test_seeds_differ_and_rows_spread() -> None:
    one, two = (set(np.argsort(row_hash(np.arange(1000), seed))[:100]) for seed in (0, 1))
    assert len(one & two) < 30
    assert 380 < np.mean(sorted(one)) < 620
    shifted = [
        set((row_hash(np.arange(1000) + d, 0)).tolist()) & set(row_hash(np.arange(1000), 1).tolist()) for d in range(5)
    ]
    assert not any(shifted), "one seed is another one shifted"


def test_what_is_kept_is_a_copy() -> None:
    x, y = correlated_rows(n=10)
    found = drawn(x, y, [0, 10])
    before = found.xs[0].clone()
    x.zero_()
    assert torch.equal(found.xs[0], before)


def test_overlapping_or_unlike_samples_are_refused() -> None:
    x, y = correlated_rows(n=40)
    one = drawn(x, y, [0, 40])
    with pytest.raises(ValueError, match="overlap"):
        one.merge(one)
    with pytest.raises(ValueError, match="not drawn alike"):
        one.merge(drawn(y, x, [0, 40]))
    with pytest.raises(ValueError, match="need paired rows, got 40 and 39"):
        Sample.of(x, y[:39])
    with pytest.raises(ValueError, match="at least 4"):
        RowSampler(3)


def test_folding_keeps_inner_products_on_average() -> None:
    x, y = correlated_rows(n=200, p=3000, q=3000, seed=1)
    folded = [Fold(3000, 512, seed)(x) for seed in range(10)]
    assert folded[0].shape == (200, 512)
    gram = sum(f @ f.T for f in folded) / 10
    assert float((gram - x @ x.T).norm() / (x @ x.T).norm()) < 0.05
    assert torch.equal(Fold(3000, 512, 0)(x), folded[0])
    exact = float(MEASURES["procrustes_angle"].of(x, y))
    fold = Fold(3000, 1024)
    assert float(MEASURES["procrustes_angle"].of(fold(x), Fold(3000, 1024, 1)(y))) == pytest.approx(exact, abs=0.1)


def test_it_says_what_it_is() -> None:
    x, y = correlated_rows(n=100)
    assert Sample.of(x, y).describe() == "all 100 rows"
    assert Sample.of(x, y).exact
    found = drawn(x, y, [0, 100])
    assert found.describe() == "a seeded sample of 20 of 100 rows"
    assert not found.exact


def test_wide_rows_are_described_by_fewer_coordinates() -> None:
    """With p > n the covariances come from n coordinates; every measure that reads them agrees with p × p ones."""
    x, y = correlated_rows(n=12, p=30, q=5)
    narrow = Sample.of(x, y).covariances()
    assert narrow.x.matrix.shape[0] < 12
    wide = Sample.of(x.clone().requires_grad_(True), y).covariances()
    for name in ("normalized_bures", "procrustes_angle", "svcca", "pwcca"):
        assert float(MEASURES[name](narrow)) == pytest.approx(float(MEASURES[name](wide).detach()), abs=1e-6)


def test_rows_can_be_left_out_after_a_shuffle() -> None:
    x, y = correlated_rows(n=30)
    shuffle, out = Shuffle.draw(30, 0, 1, x.device), torch.arange(0, 30, 3)
    kept = torch.ones(30, dtype=torch.bool).index_fill(0, out, False)
    sample = Sample.of(x, y)
    sample.paired(), sample.covariances()  # so that there is something to go back to
    found = sample.shuffled(shuffle).without(out)
    assert torch.equal(found.paired().y.rows, y[shuffle.order][kept])
    expected = Sample.of(x[kept], y[shuffle.order][kept]).covariances().xy
    torch.testing.assert_close(found.covariances().xy, expected, rtol=1e-12, atol=1e-12)

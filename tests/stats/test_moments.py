"""Moments are exact, whatever the split, the order and the centre."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paired import correlated_rows

from sosie.measures import MEASURES
from sosie.stats import Alignment, Covariances, MomentMaker, Moments

NAMES = ["linear_cka", "debiased_cka", "kernel_alignment", "normalized_bures", "mean_cca", "regression_r2"]


def value(name: str, moments: Moments) -> float:
    measure = MEASURES[name]
    view = moments.alignment(measure.reads) if issubclass(measure.reads, Alignment) else moments.covariances()
    return float(measure(view))


def joined(makers: tuple[MomentMaker, MomentMaker], x: torch.Tensor, y: torch.Tensor) -> Moments:
    return Moments.join(*(m.side([m.part("site", rows)]) for m, rows in zip(makers, (x, y), strict=True)))


def streamed(x: torch.Tensor, y: torch.Tensor, batch: int, products: torch.dtype = torch.float64) -> Moments:
    """As the engine does it: makers keep the centre of the first batch."""
    makers = MomentMaker(products), MomentMaker(products)
    total = None
    for start in range(0, len(x), batch):
        chunk = joined(makers, x[start : start + batch], y[start : start + batch])
        total = chunk if total is None else total.merge(chunk)
    assert total is not None
    return total


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "offset"), [(1000, 1e4), (128, 0.0), (37, 1e4), (1, 100.0)])
def test_streaming_is_exact(name: str, batch: int, offset: float) -> None:
    x, y = correlated_rows(n=300, p=6, q=4)
    x = x + offset
    assert value(name, streamed(x, y, batch)) == pytest.approx(value(name, Moments.of(x, y)), abs=1e-9)
    if name != "kernel_alignment":  # which a common mean changes, rightly
        assert value(name, Moments.of(x, y)) == pytest.approx(value(name, Moments.of(x - offset, y)), abs=1e-9)


def test_a_centre_that_is_far_off_is_moved() -> None:
    x, y = correlated_rows(n=200, p=6, q=4)
    x[0] = 1e6  # the first batch is one odd row, a million standard deviations off
    plain = value("debiased_cka", Moments.of(x[1:], y[1:]))
    makers = MomentMaker(), MomentMaker()
    chunks = []
    for start, stop in ((0, 1), (1, 100), (100, 200)):
        chunks.append(joined(makers, x[start:stop], y[start:stop]))
    assert float(chunks[1].a.centre.abs().max()) < 10, "the centre stayed at the odd row"
    assert value("debiased_cka", chunks[1].merge(chunks[2])) == pytest.approx(plain, abs=1e-12)


def test_parts_about_different_centres_merge() -> None:
    x, y = correlated_rows(n=200)
    first, second = Moments.of(x[:80], y[:80]), Moments.of(x[80:], y[80:])
    for name in NAMES:
        assert value(name, first.merge(second)) == pytest.approx(value(name, Moments.of(x, y)), abs=1e-12)
        assert value(name, second.merge(first)) == pytest.approx(value(name, Moments.of(x, y)), abs=1e-12)


@given(cuts=st.lists(st.integers(1, 99), max_size=6), seed=st.integers(0, 50), shift=st.floats(-50, 50))
@settings(max_examples=25, deadline=None)
def test_any_split_in_any_order(cuts: list[int], seed: int, shift: float) -> None:
    x, y = correlated_rows(n=100, p=4, q=3, seed=seed)
    x = x + shift
    edges = [0, *sorted(set(cuts)), 100]
    parts = [Moments.of(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
    total = parts[order[0]]
    for k in order[1:]:
        total = total.merge(parts[k])
    whole = Moments.of(x, y)
    assert total.n == 100
    for name in ("linear_cka", "debiased_cka", "mean_cca"):
        assert value(name, total) == pytest.approx(value(name, whole), abs=1e-9)


def test_float32_products_are_good_enough_for_cka() -> None:
    x, y = (side.float() for side in correlated_rows(n=300, p=6, q=4))
    truth = Moments.of(x.double(), y.double())
    for name in ("linear_cka", "debiased_cka", "normalized_bures"):
        assert value(name, streamed(x + 100, y, 64, torch.float32)) == pytest.approx(value(name, truth), abs=2e-5)


def test_all_pairs_of_sites_at_once() -> None:
    (x1, y1), (x2, y2) = correlated_rows(n=50), correlated_rows(n=50, p=4, q=9, seed=3)
    moments = Moments.of([x1, x2], [y1, y2, x1])
    for kind in (m for m in MEASURES.values() if issubclass(m.reads, Alignment)):
        together = kind(moments.alignment(kind.reads))
        assert together.shape == (2, 3)
        for i, x in enumerate((x1, x2)):
            for j, y in enumerate((y1, y2, x1)):
                assert float(together[i, j]) == pytest.approx(float(kind.of(x, y)), abs=1e-12)
    assert float(MEASURES["mean_cca"](moments.covariances(1, 2))) == pytest.approx(
        float(MEASURES["mean_cca"].of(x2, x1))
    )


def test_a_site_is_factorised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = correlated_rows(n=50)
    calls = []
    original = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: calls.append(m.shape) or original(m))
    moments = Moments.of([x, x], [y, y, y])
    for i in range(2):
        for j in range(3):
            MEASURES["mean_cca"](moments.covariances(i, j))
    assert len(calls) == 5


def test_what_does_not_belong_together_is_refused() -> None:
    x, y = correlated_rows(n=50)
    with pytest.raises(ValueError, match="need paired rows, got 50 and 49"):
        Moments.of(x, y[:49])
    with pytest.raises(ValueError, match="other sites"):
        Moments.of(x, y).merge(Moments.of(y, x))


def test_spread_tells_a_constant_site() -> None:
    x, y = correlated_rows(n=50)
    a, b = Moments.of([x, torch.full((50, 3), 7.0, dtype=x.dtype)], y).spread
    assert float(a[1]) < 1e-20 < float(a[0]) <= 1
    assert Covariances in Moments.supplies
    assert len(b) == 1

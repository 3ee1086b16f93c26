"""Grams: unbiased, independent of how the rows arrive, and steady under a large mean."""

from __future__ import annotations

import itertools

import pytest
import torch
from paired import correlated_rows

from sosie.measures import MEASURES
from sosie.stats import Alignment, DebiasedAlignment, GramMaker, Grams, UncentredAlignment

KINDS = {"linear_cka": Alignment, "debiased_cka": DebiasedAlignment, "kernel_alignment": UncentredAlignment}


def value(name: str, grams: Grams) -> float:
    return float(MEASURES[name](grams.alignment(KINDS[name])))


def streamed(x: torch.Tensor, y: torch.Tensor, edges: list[int], block: int = 32) -> Grams:
    makers = GramMaker(block, True), GramMaker(block, True)
    total, blocks = None, 0
    for start, stop in itertools.pairwise(edges):
        a, b = (m.side([m.part("site", rows[start:stop])]) for m, rows in zip(makers, (x, y), strict=True))
        part = Grams.join(a, b, block=block, first_block=blocks)
        blocks += a.blocks
        total = part if total is None else total.merge(part)
    assert total is not None
    return total


@pytest.mark.parametrize("name", KINDS)
def test_chunks_of_whole_blocks_do_not_matter(name: str) -> None:
    x, y = correlated_rows(n=205)
    whole = value(name, streamed(x, y, [0, 205]))
    assert value(name, streamed(x, y, [0, 32, 96, 205])) == pytest.approx(whole, abs=1e-12)
    assert value(name, streamed(x, y, [0, 160, 205])) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize(("name", "error"), [("linear_cka", 0.01), ("debiased_cka", 0.01), ("kernel_alignment", 0.01)])
@pytest.mark.parametrize("p", [5, 400])
def test_blocks_estimate_the_value_on_all_rows(name: str, error: float, p: int) -> None:
    """The biased CKA too, whose value depends on the number of rows: at p = 400 it is far from the debiased."""
    x, y = correlated_rows(n=1500, p=p, q=p, seed=2)
    x, y = x / x.std(0), y / y.std(0)
    truth = float(MEASURES[name].of(x, y))
    assert value(name, Grams.of(x, y, block=64)) == pytest.approx(truth, abs=error)


def test_the_estimate_is_unbiased() -> None:
    """Over shuffles of the rows into blocks, numerator and denominator average to those of all rows."""
    x, y = correlated_rows(n=96, p=30, q=30)
    truth = Grams.of(x, y, block=96).alignment(DebiasedAlignment)
    found = []
    for seed in range(200):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(seed))
        found.append(Grams.of(x[order], y[order], block=8).alignment(DebiasedAlignment))
    for part in ("xx", "yy", "xy"):
        values = torch.stack([getattr(a, part) for a in found])
        standard_error = float(values.std()) / 200**0.5
        assert abs(float(values.mean() - getattr(truth, part))) < 4 * standard_error


def test_a_large_mean_in_float32() -> None:
    """Peers give NaN or 1.000 for what is 0.944."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(512, 3000, generator=random)
    y = x + 0.25 * torch.randn(512, 3000, generator=random)
    truth = float(MEASURES["debiased_cka"].of(x.double(), y.double()))
    assert truth == pytest.approx(0.94, abs=0.01)
    plain = value("debiased_cka", Grams.of(x, y))
    assert value("debiased_cka", Grams.of(x + 100, y + 100)) == pytest.approx(plain, abs=1e-5)
    assert value("debiased_cka", Grams.of(x + 100, y, uncentred=False)) == pytest.approx(plain, abs=1e-5)
    assert value("debiased_cka", Grams.of(x + 100, y - 1000)) == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
def test_the_scale_does_not_matter(scale: float) -> None:
    x, y = (side.float() for side in correlated_rows(n=200))
    plain, scaled = Grams.of(x, y), Grams.of(scale * x, y)
    for name in KINDS:
        assert value(name, scaled) == pytest.approx(value(name, plain), abs=1e-6)


def test_centring_starts_when_it_is_needed() -> None:
    def offset(maker: GramMaker, rows: torch.Tensor) -> float:
        return float(maker.side([maker.part("site", rows)]).offset[0])

    maker = GramMaker(16)
    x = correlated_rows(n=32)[0].float()
    assert offset(maker, x) > 0
    assert offset(maker, x + 1000) == 0, "rows with a large mean went into a product uncentred"
    assert offset(maker, x) == 0, "once centred, a site stays centred"
    told = GramMaker(16)
    told.notice("site", 1e6)
    assert offset(told, x) == 0


def test_groups_of_blocks_are_kept_for_the_interval() -> None:
    x, y = correlated_rows(n=40 * 16)
    grams = streamed(x, y, [0, 640], block=16)
    assert grams.groups.all()
    assert streamed(x, y, [0, 48], block=16).groups.sum() == 3
    left = torch.tensor([b not in (3, 35) for b in range(40)]).repeat_interleave(16)
    for name, kind in KINDS.items():
        without = MEASURES[name](grams.alignment(kind, jackknife=True))
        assert without.shape == (32, 1, 1)
        if name == "debiased_cka":  # the others are scaled to all rows, not to those left
            assert float(without[3]) == pytest.approx(value(name, Grams.of(x[left], y[left], block=16)), abs=1e-12)
        assert float(without.mean()) == pytest.approx(value(name, grams), abs=1e-2)


def test_all_pairs_of_sites_at_once() -> None:
    (x1, y1), (x2, _) = correlated_rows(n=90), correlated_rows(n=90, p=3, seed=3)
    grams = Grams.of([x1, x2], [y1, x2, x1], block=16)
    for name, kind in KINDS.items():
        together = MEASURES[name](grams.alignment(kind))
        for i, x in enumerate((x1, x2)):
            for j, y in enumerate((y1, x2, x1)):
                assert float(together[i, j]) == pytest.approx(value(name, Grams.of(x, y, block=16)), abs=1e-12)


def test_linear_cka_from_blocks_never_exceeds_one() -> None:
    """An estimate may fall below 0 (it is unbiased); by the Cauchy-Schwarz inequality it cannot pass 1."""
    for seed in range(20):
        x, y = correlated_rows(n=40, p=3, q=2, seed=seed)
        for other in (y, x, x[:, :1], x + 0.01 * x.flip(0)):
            assert value("linear_cka", Grams.of(x, other, block=4)) <= 1 + 1e-12


def test_what_does_not_belong_together_is_refused() -> None:
    x, y = correlated_rows(n=50)
    with pytest.raises(ValueError, match="need paired rows, got 50 and 40"):
        Grams.of(x, y[:40])
    with pytest.raises(ValueError, match="at least 4"):
        Grams.of(x[:3], y[:3])
    with pytest.raises(ValueError, match="at least 4 rows, got 2"):
        GramMaker(2)
    with pytest.raises(ValueError, match="blocks of 16 and of 32"):
        Grams.of(x, y, block=16).merge(Grams.of(x, y, block=32))
    with pytest.raises(ValueError, match="without uncentred sums"):
        Grams.of(x, y, uncentred=False).alignment(UncentredAlignment)


@pytest.mark.parametrize("kind", [Alignment, DebiasedAlignment, UncentredAlignment])
def test_blocks_cut_in_two_are_blocks_of_half_the_rows(kind: type[Alignment]) -> None:
    x, y = correlated_rows(n=64)
    whole, halved = Grams.of(x, y, block=16).halves, Grams.of(x, y, block=8)
    parts = Grams.of(x[:32], y[:32], block=16).merge(Grams.of(x[32:], y[32:], block=16)).halves
    assert whole is not None
    assert parts is not None
    for name in ("xx", "yy", "xy"):
        found, added, expected = (getattr(grams.alignment(kind), name) for grams in (whole, parts, halved))
        assert torch.allclose(found, added, rtol=1e-12)
        if kind is not Alignment:  # which takes its diagonals about the mean of the block
            assert torch.allclose(found, expected, rtol=1e-12)
    assert Grams.of(x, y, block=6).halves is None

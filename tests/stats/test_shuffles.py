"""Shuffled pairing: what is moved must be what would be made anew from moved rows."""

from __future__ import annotations

import pytest
import torch
from paired import correlated_rows
from torch import Tensor

from sosie.measures import MEASURES, Measure
from sosie.stats import Alignment, DebiasedAlignment, Grams, PairedRows, Sample, Shuffle, UncentredAlignment
from sosie.stats.sampling import orders_within_blocks

KINDS = [Alignment, DebiasedAlignment, UncentredAlignment]


def drawn(n: int, number: int = 0) -> Shuffle:
    return Shuffle.draw(n, 3, number, torch.device("cpu"))


@pytest.mark.parametrize("moves", ["square", "rows", "neighbours", "triangle"])
def test_things_made_of_rows_follow_them(moves: str) -> None:
    x, _ = correlated_rows(n=20)
    shuffle = drawn(20)

    def make(rows: Tensor) -> Tensor:
        squares = torch.cdist(rows, rows)
        if moves == "square":
            return squares
        if moves == "rows":
            return rows.exp()
        if moves == "neighbours":
            return squares.fill_diagonal_(torch.inf).topk(4, largest=False).indices
        i, j = torch.triu_indices(20, 20, 1)
        return squares[i, j]

    assert torch.allclose(shuffle(make(x), moves).double(), make(x[shuffle.order]).double())  # type: ignore[arg-type]


OF_ROWS = [m for m in MEASURES.values() if m.paired and m.reads_layers and not m.needs]


@pytest.mark.parametrize("measure", OF_ROWS, ids=lambda m: m.name)
@pytest.mark.parametrize("n", [40, 5 + 8], ids=["tall", "wide"])
def test_a_shuffled_sample_gives_what_shuffled_rows_give(measure: Measure, n: int) -> None:
    x, y = correlated_rows(n=n, p=7 if n == 40 else 16, q=5 if n == 40 else 14)
    if measure.same_width or measure.few_rows == "infinite":
        x, y = x[:, :5], y[:, :5]
    shuffle, sample = drawn(n), Sample.of(x, y)
    try:
        measure.from_sample(sample)  # so that everything is made once, and moved afterwards
    except ImportError as missing:
        pytest.skip(str(missing))
    found = float(measure.from_sample(sample.shuffled(shuffle)))
    assert found == pytest.approx(float(measure.of(x, y[shuffle.order])), abs=1e-9)
    if measure.reads is not PairedRows and n == 40 and measure.few_rows != "saturates":
        assert found != pytest.approx(float(measure.of(x, y)), abs=1e-6), "the shuffle changed nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(3, 6), (60, 70)], ids=["by columns", "by rows"])
def test_shuffled_alignment_of_all_rows(kind: type[Alignment], widths: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(0)
    xs = [torch.randn(30, w, generator=random, dtype=torch.float64) + 1 for w in widths]
    ys = [x.cos() for x in xs] + [xs[0]]
    shuffles = [drawn(30, k) for k in range(3)]
    found = Sample.of(xs, ys).grams.shuffled(kind, shuffles)
    for k, shuffle in enumerate(shuffles):
        expected = Sample.of(xs, [y[shuffle.order] for y in ys]).alignment(kind)
        assert torch.allclose(found.xy[k], expected.xy)
        assert torch.allclose(found.yy, expected.yy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fewer", ["a", "b"])
def test_draws_within_blocks(kind: type[Alignment], fewer: str) -> None:
    """Against rows that were moved by the same orders; the side with fewer sites is the one that moves."""
    random = torch.Generator().manual_seed(0)
    few = [torch.randn(20, 4, generator=random, dtype=torch.float64) + 1]
    many = [few[0].cos(), torch.randn(20, 3, generator=random, dtype=torch.float64)]
    xs, ys = (few, many) if fewer == "a" else (many, few)
    grams = Grams.of(xs, ys, block=8, draws=5, seed=7)
    found = grams.alignment(kind, shuffled=True)
    for draw in range(5):
        # Blocks of 8 and 12 rows: a remainder joins the last.
        orders = [orders_within_blocks(7, 0, 5, 8)[draw], 8 + orders_within_blocks(7, 1, 5, 12)[draw]]
        moved = [few[0][torch.cat(orders)]]
        expected = Grams.of(moved if fewer == "a" else many, moved if fewer == "b" else many, block=8).alignment(kind)
        assert torch.allclose(found.xy[draw], expected.xy, rtol=1e-5, atol=1e-5)


def test_draws_merge_and_do_not_depend_on_the_parts() -> None:
    x, y = correlated_rows(n=64)
    from sosie.stats import GramMaker

    def part(start: int, stop: int, first: int) -> Grams:
        sides = []
        for rows in (x, y):
            maker = GramMaker(16)
            sides.append(maker.side([maker.part("s", rows[start:stop])]))
        return Grams.join(*sides, block=16, first_block=first, draws=6, seed=1)

    whole, halves = part(0, 64, 0), part(0, 32, 0).merge(part(32, 64, 2))
    assert whole.shuffled is not None
    assert halves.shuffled is not None
    assert torch.allclose(whole.shuffled.debiased, halves.shuffled.debiased)
    assert not torch.allclose(whole.shuffled.debiased[0], whole.shuffled.debiased[1])
    with pytest.raises(ValueError, match="shuffled sums"):
        part(0, 32, 0).merge(Grams.of(x, y, block=16, uncentred=False))


def test_spread_within_blocks_in_closed_form_is_that_of_draws() -> None:
    x, y = correlated_rows(n=96)
    grams = Grams.of(x**3, y, block=32, draws=4000, seed=0)
    assert grams.shuffled is not None
    found = grams.shuffled.debiased[:, 0, 0]
    assert abs(float(found.mean())) < 4 * float(found.std()) / 4000**0.5
    assert float(found.std()) == pytest.approx(float(grams.variance[0, 0].sqrt()), rel=0.06)

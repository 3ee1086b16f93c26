"""Measures that compare entry by entry: the laws they declare, reference values, and how their sums merge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_laws import check_bounds, transformed
from torch import Tensor

import sosie
from sosie.measures import MEASURES, Measure
from sosie.measures.define import TRANSFORMATIONS
from sosie.stats import Entries, entries, jackknife, squared_error

ENTRY_BY_ENTRY = [measure for measure in MEASURES.values() if measure.reads_entries]
measures = pytest.mark.parametrize("measure", ENTRY_BY_ENTRY, ids=lambda m: m.name)


def near_pair(n: int = 40, width: int = 6, size: float = 1e-7) -> tuple[Tensor, Tensor]:
    """Rows, and the same with noise as large as what `torch.testing.assert_close` allows in float64."""
    random = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(n, width, generator=random, dtype=torch.float64) for _ in range(2))
    return x, x + size * noise


def check_invariance(measure: Measure, how: str) -> None:
    x, y = near_pair()
    before = measure.of(x, y)
    moved = torch.stack([measure.of(transformed(x, how), y), measure.of(x, transformed(y, how))]) - before
    if how in measure.invariant:
        assert float(moved.abs().max()) < 1e-12, f"{measure.name} under {how}"
    else:
        assert float(moved.abs().min()) > 1e-6, f"{measure.name} under {how} did not move, but does not declare that"


@measures
def test_invariant_exactly_where_declared(measure: Measure) -> None:
    for how in TRANSFORMATIONS:
        check_invariance(measure, how)


@measures
def test_the_laws_hold(measure: Measure) -> None:
    x, y = near_pair(size=0.3)
    if measure.same is not None:
        assert float(measure.of(x, x.clone())) == pytest.approx(measure.same, abs=1e-12)
    value = float(measure.of(x, y))
    check_bounds(measure, value)
    gap = abs(value - float(measure.of(y, x)))
    if measure.base != "mismatched_share":  # which nearly all entries are, of both
        assert (gap < 1e-12) == measure.symmetric
    nearer, far = float(measure.of(*near_pair())), float(measure.of(x, x.roll(1, 0)))
    assert (nearer > value > far) if measure.closer == "up" else (nearer < value <= far)
    assert float(measure.of(x.float(), y.float())) == pytest.approx(value, rel=1e-4)


@measures
def test_split_and_order_do_not_matter(measure: Measure) -> None:
    x, y = near_pair(n=90)
    whole = float(measure.of(x, y))
    parts = [Entries.of(x[a:b], y[a:b], start=a) for a, b in ((60, 90), (0, 37), (37, 38), (38, 60))]
    merged = parts[0].merge(parts[1]).merge(parts[2].merge(parts[3]))
    assert float(measure(merged)) == pytest.approx(whole, rel=1e-12)


def test_the_laws_can_fail() -> None:
    liar = replace(MEASURES["relative_error"], invariant=frozenset({"scale"}))
    with pytest.raises(AssertionError, match="relative_error under scale"):
        check_invariance(liar, "scale")


def test_reference_values() -> None:
    x, y = (each.numpy() for each in near_pair(size=0.1))
    d = y - x
    assert sosie.measure("relative_error", x, y) == pytest.approx(np.linalg.norm(d) / np.linalg.norm(x), rel=1e-12)
    assert sosie.measure("largest_difference", x, y) == np.abs(d).max()
    assert sosie.measure("signal_to_noise", x, y) == pytest.approx(10 * np.log10((x**2).sum() / (d**2).sum()))
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    assert sosie.measure("row_cosine", x, y) == pytest.approx(cosines.mean(), rel=1e-12)
    assert sosie.measure("least_row_cosine", x, y) == pytest.approx(cosines.min(), rel=1e-12)
    for share in (0.5, 0.9, 0.99):
        quantile = sosie.measure("difference_quantile", x, y, share=share)
        assert quantile == pytest.approx(np.quantile(np.abs(d), share, method="inverted_cdf"), rel=0.1)
    a, b = torch.tensor(x, dtype=torch.float32), torch.tensor(x + 1e-6 * d, dtype=torch.float32)
    near = int(torch.isclose(a, b, rtol=1.3e-6, atol=1e-5).sum())
    found = MEASURES["mismatched_share"].of(a, b + 1e-5)
    assert float(found) == pytest.approx(1 - int(torch.isclose(a, b + 1e-5, rtol=1.3e-6, atol=1e-5).sum()) / near)


def test_places_and_odd_numbers() -> None:
    x = torch.zeros(6, 4, dtype=torch.float64)
    y = x.clone()
    y[4, 2] = 3
    both = Entries.of(x[3:], y[3:], start=3).merge(Entries.of(x[:3], y[:3]))
    assert (both.at.tolist(), float(both.largest), both.inputs) == ([4, 2], 3, 6)
    x[1, 3] = y[1, 3] = torch.nan
    x[2, 0] = y[2, 0] = torch.inf
    y[5, 1], x[0, 0] = torch.nan, -torch.inf
    odd = Entries.of(x, y)
    assert (int(odd.lone), int(odd.alike), odd.lone_at.tolist()) == (2, 2, [0, 0])
    assert float(odd.dd.sum()) == 9
    assert int(odd.mismatched) == 3
    parts = [Entries.of(x[k : k + 1], y[k : k + 1], start=k) for k in range(6)]
    merged = parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3]).merge(parts[4]).merge(parts[5])
    assert (int(merged.lone), merged.lone_at.tolist()) == (2, [0, 0])


def test_the_interval_does_not_depend_on_the_order_of_the_inputs() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(640, 6, generator=random, dtype=torch.float64)
    turns = torch.where(torch.arange(640) % 32 < 16, 0.5, 0.01)[:, None]  # classes that take turns
    y = x + turns * torch.randn(640, 6, generator=random, dtype=torch.float64)
    lengths = []
    for order in (torch.arange(640), torch.randperm(640, generator=random)):
        low, high = jackknife(Entries.of(x[order], y[order])) or (0, 0)
        lengths.append(high - low)
    assert lengths[0] == pytest.approx(lengths[1], rel=0.4)
    assert jackknife(Entries.of(x[:20], y[:20], start=100)) is not None
    assert jackknife(Entries.of(x[:7], y[:7])) is None


def truth(a: Tensor, b: Tensor) -> dict[str, float]:
    a, b = a.double(), b.double()
    d = a - b
    products = {"aa": a * a, "bb": b * b, "ad": a * d, "dd": d * d, "d": d}
    return {name: float(each.sum()) for name, each in products.items()}


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pieces_of_any_size_and_type(dtype: torch.dtype, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are cut, rows taken together, and numbers whose squares float32 does not hold."""
    x, y = (size * each for each in near_pair(n=12, width=100, size=1e-2))
    a, b = x.to(dtype), y.to(dtype)
    for piece in (64, 250, 10_000):
        monkeypatch.setitem(entries.PIECE, "cpu", piece)
        found = Entries.of(a, b, start=5)
        for name, value in truth(a, b).items():
            assert float(getattr(found, name).sum()) == pytest.approx(value, rel=1e-5, abs=size * 1e-5), name
        most = (a.double() - b.double()).abs()
        assert float(found.largest) == pytest.approx(float(most.max()), rel=1e-6)
        assert found.at.tolist() == [int(most.argmax()) // 100 + 5, int(most.argmax()) % 100]
        assert (int(found.counts.sum()), found.entries, found.inputs) == (1200, 1200, 12)
        error = squared_error(a, b)
        assert float(error[0] / error[1]) == pytest.approx(truth(a, b)["dd"] / truth(a, b)["aa"], rel=1e-5)


def test_of_a_large_activation_the_histogram_counts_a_sample() -> None:
    """Also where differences follow the columns, and beside a small one, which weighs as much as its entries."""
    random = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(400, 1024, generator=random) for _ in range(2))
    noise[:, ::16] *= 100
    found = Entries.of(x, x + noise)
    few = Entries.of(x[:100], x[:100] + 1e-4 * noise[:100], start=400)
    for entries_, size in ((found, noise.abs()), (found.merge(few), torch.cat([noise, 1e-4 * noise[:100]]).abs())):
        assert float(entries_.counts.sum()) == pytest.approx(entries_.entries, rel=1e-3)
        for share in (0.1, 0.5, 0.9, 0.99, 0.999):
            assert float(entries_.quantile(share)) == pytest.approx(np.quantile(size, share), rel=0.15), share
    assert int((found.counts % entries.STEP).sum()) == 0


def test_a_scale_shows_however_near_the_rows_are() -> None:
    """b = 1.00001 a leaves nothing of d beside a multiple of a, of which float32 sums of a² and b² hold no digit."""
    a = near_pair(n=64, width=512)[0].float()
    found = Entries.of(a, a * (1 + 2**-16))
    left = float(found.dd.sum() - found.ad.sum() ** 2 / found.aa.sum())
    assert left < 0.01 * float(found.dd.sum())
    assert 1 - float(found.ad.sum() / found.aa.sum()) == pytest.approx(1 + 2**-16, abs=1e-9)


def test_padding_is_left_out() -> None:
    x, y = (each.reshape(8, 5, 6) for each in near_pair(size=0.1))
    keep = torch.ones(8, 5)
    keep[3, 2:] = 0
    y[3, 4, 0] = torch.nan
    y[2, 1, 3] += 7
    found = Entries.of(x, y, keep=keep)
    kept = keep.bool()
    assert float(found.dd.sum()) == pytest.approx(float((x - y)[kept].square().sum()), rel=1e-12)
    assert (found.entries, found.inputs, int(found.lone), found.at.tolist()) == (37 * 6, 8, 0, [2, 9])
    error = squared_error(x, y, keep)
    assert error.tolist() == pytest.approx([float(found.dd.sum()), float(found.aa.sum())], rel=1e-12)
    assert squared_error(x, y) is None


def test_compare_says_what_to_use_instead() -> None:
    x, y = (each.numpy() for each in near_pair())
    with pytest.raises(ValueError, match=r"relative_error: entry by entry.*sosie\.diff"):
        sosie.compare({"a": x}, {"b": y}, measures=["relative_error"])
    with pytest.raises(ValueError, match="one shape"):
        Entries.of(torch.ones(3, 2), torch.ones(3, 4))


HOSTILE = {
    "huge": 1e30,
    "tiny": 1e-30,
    "subnormal": 1e-41,
    "of all sizes": torch.logspace(-25, 25, 40, dtype=torch.float64)[:, None],
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", HOSTILE)
def test_sums_are_those_of_float64(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some rows need float64, and where padding, which does not count, holds what is worst."""
    x, y = (HOSTILE[kind] * each for each in near_pair(n=40, width=5000, size=0.1))
    a, b = x.float().reshape(4, 10, -1), y.float().reshape(4, 10, -1)
    a[1, 2], b[3, 3] = 0, a[3, 3]
    keep = torch.ones(4, 10)
    if padded:
        keep[:, 8:] = 0
        a[0, 8, 7], b[2, 9] = torch.nan, torch.inf
    for piece in (3000, 2**17):
        monkeypatch.setitem(entries.PIECE, "cpu", piece)
        found = Entries.of(a, b, keep=keep) if padded else Entries.of(a, b)
        some = keep.bool()
        for name, value in truth(a[some], b[some]).items():
            scale = truth(a[some].abs(), -b[some].abs())["d"] if name == "d" else 0.0
            near = pytest.approx(value, rel=1e-6, abs=max(1e-6 * abs(scale), 1e-90))
            assert float(getattr(found, name).sum()) == near, name
        most = (a.double() - b.double()).abs().masked_fill(~some[..., None], 0).flatten(1)
        assert float(found.largest) == pytest.approx(float(most.max()), rel=1e-6)
        assert found.at.tolist() == list(divmod(int(most.argmax()), most.shape[1]))
        count = int(some.sum()) * 5000
        assert (found.entries, int(found.counts.sum()), int(found.lone), int(found.alike)) == (count, count, 0, 0)
        error = squared_error(a, b, keep if padded else None)
        expected = truth(a[some], b[some])
        assert error.tolist() == pytest.approx([expected["dd"], expected["aa"]], rel=1e-6, abs=1e-90)


def test_odd_entries_count_unless_they_are_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.arange(1.0, 241).reshape(4, 10, 6)
    b = a + 1
    a[2, 9, 4] = b[1, 3, 5] = b[0, 9, 0] = torch.nan
    a[3, 0, 1] = b[3, 0, 1] = torch.inf
    keep = torch.ones(4, 10)
    keep[:2, 9] = 0
    for piece in (4, 20, 10_000):
        monkeypatch.setitem(entries.PIECE, "cpu", piece)
        found = Entries.of(a, b, keep=keep, start=7)
        assert (int(found.lone), int(found.alike), found.lone_at.tolist()) == (2, 1, [8, 23])
        assert float(found.dd.sum()) == pytest.approx(225, rel=1e-6)
        assert (float(found.largest), found.entries) == (1, 228)
        assert int(found.mismatched) == 227
        assert int(found.counts[entries._bins(torch.ones(1))]) == 225
        assert squared_error(a, b, keep) is None


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1), (1,)])
def test_nothing_and_one_entry(shape: tuple[int, ...]) -> None:
    a = torch.full(shape, 3.0)
    found = Entries.of(a, a - 2)
    assert (found.entries, found.inputs, float(found.dd.sum())) == (a.numel(), shape[0], 4 * a.numel())
    assert (float(found.largest), found.at.tolist()) == (2.0 * bool(a.numel()), [0, 0])
    assert (int(found.counts.sum()), int(found.mismatched)) == (a.numel(), a.numel())
    error = squared_error(a, a - 2)
    assert error.tolist() == [4 * a.numel(), 9 * a.numel()]

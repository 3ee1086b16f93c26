"""Gram matrices of many layers at once and their inner products, against plain products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sosie.linalg import double_centred, u_centred
from sosie.train import similarity as layer_grams
from sosie.train.similarity import inner_products, sized_grams

KINDS = pytest.mark.parametrize(
    ("centre", "unbiased"), [(True, False), (True, True), (False, False)], ids=["centred", "unbiased", "as they are"]
)
SHARED = pytest.mark.parametrize("small", [2**18, 30, 0], ids=["all together", "some together", "each alone"])


def layers(*widths: int, count: int = 5) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(count, width, generator=random, dtype=torch.float64) + 1 for width in widths]


def by_hand(rows: list[Tensor], centre: bool, unbiased: bool) -> Tensor:
    grams = [x @ x.T for x in ((each - each.mean(0) if centre else each) for each in rows)]
    flat = torch.stack([u_centred(gram) if unbiased else gram for gram in grams]).flatten(1)
    return flat @ flat.T


def products(rows: list[Tensor], centre: bool, unbiased: bool) -> Tensor:
    return inner_products(sized_grams(rows, centre=centre)[0], centre=centre, unbiased=unbiased)[0]


@KINDS
@SHARED
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, small: int, centre: bool, unbiased: bool) -> None:
    monkeypatch.setattr(layer_grams, "SMALL", small)
    monkeypatch.setattr(layer_grams, "CHUNK", 4)
    rows = [each.requires_grad_() for each in layers(3, 5, 7)]
    expected = by_hand(rows, centre, unbiased)
    assert torch.allclose(products(rows, centre, unbiased), expected, rtol=1e-12, atol=1e-12 * expected.max().item())
    assert torch.autograd.gradcheck(lambda *z: products(list(z), centre, unbiased), rows)
    assert torch.autograd.gradgradcheck(lambda *z: products(list(z), centre, unbiased), rows)


@SHARED
def test_traces_and_sizes_in_the_order_of_the_layers(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(layer_grams, "SMALL", small)
    rows = layers(3, 5, 20, 7)
    stacks, sizes = sized_grams(rows, centre=True)
    assert len(stacks) == {2**18: 1, 30: 3, 0: 4}[small]
    _, traces = inner_products(stacks, centre=True)
    torch.testing.assert_close(traces, torch.stack([(each - each.mean(0)).square().sum() for each in rows]))
    torch.testing.assert_close(torch.cat(sizes), torch.stack([5 * each[0].square().sum() for each in rows]))


def test_many_rows_and_wide_layers_are_not_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(*widths: int, count: int = 5) -> list[int]:
        return [len(run) for run in layer_grams._runs(layers(*widths, count=count))]

    assert sizes(3, 4, 5) == [3]
    assert sizes(3, 4, 5, count=layer_grams.FEW + 1) == [1, 1, 1]
    monkeypatch.setattr(layer_grams, "SMALL", 50)
    assert sizes(3, 4, 11, 5, 6) == [2, 1, 2]
    monkeypatch.setattr(layer_grams, "WIDENED", 60)  # once all are filled up to the widest
    assert sizes(4, 4, 4, 4) == [3, 1]
    assert sizes(2, 2, 8, 2) == [2, 1, 1]


def test_an_offset_costs_no_digits_and_a_nan_stays_where_it_is() -> None:
    rows = [each.float() + 1e4 for each in layers(300, 200, 300, count=8)]
    exact = [each.double().requires_grad_() for each in rows]
    found = [each.requires_grad_() for each in rows]
    for given in (found, exact):
        products(given, True, False)[0, 1].backward()
    for mine, wanted in zip(found[:2], exact[:2], strict=True):
        assert float((mine.grad.double() - wanted.grad).norm() / wanted.grad.norm()) < 1e-5
    with torch.no_grad():
        rows[1][0, 0] = torch.nan
    assert products(rows, True, False).isnan().any(1).tolist() == [True] * 3
    assert products(rows, True, False)[::2, ::2].isfinite().all()


def test_centrings_are_orthogonal_projections() -> None:
    """Which is what the gradient of the inner products rests on."""
    grams = torch.stack([x @ x.T for x in layers(3, 7, count=6)])
    for project in (double_centred, u_centred):
        once = project(grams)
        assert torch.allclose(project(once), once, atol=1e-12)
        assert torch.allclose((once[0] * grams[1]).sum(), (grams[0] * once[1]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_few_digits_are_near_those_of_many(dtype: torch.dtype) -> None:
    rows = [each.to(dtype) for each in layers(300, 90, 2000, count=8)]
    exact = [each.double().requires_grad_() for each in rows]
    found = [each.requires_grad_() for each in rows]
    for given in (found, exact):
        inner = products(given, True, False)
        (inner[0, 1] / (inner[0, 0] * inner[1, 1]).sqrt() + inner[0, 2] / (inner[0, 0] * inner[2, 2]).sqrt()).backward()
    for mine, wanted in zip(found, exact, strict=True):
        assert mine.grad.dtype == dtype
        error = float((mine.grad.double() - wanted.grad).norm() / wanted.grad.norm())
        assert error < (1e-5 if dtype == torch.float32 else 2**-7)


@SHARED
def test_a_shift_changes_nothing_of_layers_that_are_nearly_alike(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """So the gradient sums to 0 over the rows, although it is what is left of terms that are much larger."""
    monkeypatch.setattr(layer_grams, "SMALL", small)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(32, 400, generator=random) + 3 * torch.randn(1, 400, generator=random)
    rows = [each.requires_grad_() for each in (x, x + 0.03 * torch.randn(32, 400, generator=random))]
    inner = products(rows, True, False)
    (inner[0, 1] / (inner[0, 0] * inner[1, 1]).sqrt()).backward()
    for each in rows:
        assert float(each.grad.double().sum(0).norm() / each.grad.double().norm()) < 1e-6

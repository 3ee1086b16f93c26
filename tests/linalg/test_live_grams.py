"""Gram matrices with gradients, against plain products in float64."""

from __future__ import annotations

import pytest
import torch

from sosie.linalg import centred_grams, live_gram
from sosie.linalg import grams as live_grams


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_hand(x: torch.Tensor, centre: bool) -> torch.Tensor:
    x = x - x.mean(0) if centre else x
    return x @ x.T


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("strip", [8, 2**21])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, centre: bool, strip: int) -> None:
    monkeypatch.setattr(live_grams, "WIDENED", strip)  # a few columns at a time
    x = rows(4, 7).requires_grad_()
    assert torch.allclose(live_gram(x, centre=centre), by_hand(x, centre), rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda z: live_gram(z, centre=centre), x)
    assert torch.autograd.gradgradcheck(lambda z: live_gram(z, centre=centre), x)
    if centre:
        assert torch.allclose(centred_grams(x), by_hand(x, True), rtol=1e-13, atol=1e-13)


def test_half_precision_and_an_offset_cost_no_digits() -> None:
    x = rows(20, 300).float()
    expected = by_hand((x + 1e4).double(), True)
    assert torch.allclose(live_gram(x + 1e4).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    half = x.bfloat16()
    assert live_gram(half).dtype == torch.float32
    expected = by_hand(half.double(), True)
    assert torch.allclose(live_gram(half).double(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_equal_rows_give_exactly_nothing() -> None:
    x = torch.full((7, 5), 0.1) * torch.arange(1, 6)
    assert not bool(live_gram(x).any())
    assert not bool(centred_grams(x[None]).any())


def test_the_rows_themselves_are_kept_for_the_gradient() -> None:
    x = rows(4, 6).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        live_gram(x)
    assert kept == [x.data_ptr()]


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_gradients_of_bfloat16_rows_are_as_good_as_bfloat16(offset: float) -> None:
    random = torch.Generator().manual_seed(0)
    rows = (torch.randn(32, 4096, generator=random) + offset).bfloat16()
    pull = torch.randn(32, 32, generator=random)
    low, exact = rows.clone().requires_grad_(), rows.double().requires_grad_()
    (live_gram(low) * pull).sum().backward()
    (live_gram(exact) * pull.double()).sum().backward()
    assert low.grad is not None
    assert exact.grad is not None
    assert float((low.grad.double() - exact.grad).norm() / exact.grad.norm()) < 2**-7

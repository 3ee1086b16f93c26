"""Decorrelation against a loop in float64, and as a penalty that comes and goes without a trace."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from sosie.capture import SilentSite, SiteError
from sosie.models import small_cnn
from sosie.train import Attached, Decorrelation, Recipe, decorrelation, fit


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.3


def by_hand(z: np.ndarray) -> tuple[float, float]:
    """The sum as printed, and the mean squared cosine, pair by pair."""
    plain = cosines = 0.0
    pairs = list(itertools.permutations(range(z.shape[1]), 2))
    for i, j in pairs:
        plain += float(z[:, i] @ z[:, j]) ** 2
        cosines += float(z[:, i] @ z[:, j] / np.linalg.norm(z[:, i]) / np.linalg.norm(z[:, j])) ** 2
    return plain, cosines / len(pairs)


def test_it_is_the_sum_over_pairs() -> None:
    z = rows(40, 7)
    plain, cosines = by_hand(z.numpy())
    assert float(decorrelation(z)) == pytest.approx(plain, rel=1e-12)
    assert float(decorrelation(z, normalised=True)) == pytest.approx(cosines, rel=1e-12)
    assert float(decorrelation(z.float())) == pytest.approx(plain, rel=1e-5)


def test_maps_are_rows_by_position() -> None:
    z = rows(3, 5, 4, 2)
    flat = torch.stack([z[n, :, i, j] for n in range(3) for i in range(4) for j in range(2)])
    assert float(decorrelation(z)) == pytest.approx(float(decorrelation(flat)), rel=1e-12)
    last = z.contiguous(memory_format=torch.channels_last)
    assert float(decorrelation(last)) == pytest.approx(by_hand(flat.numpy())[0], rel=1e-12)


def test_normalised_depends_on_neither_rows_nor_scale() -> None:
    z = rows(30, 6)
    scales = torch.tensor([1e-3, 1.0, 50.0, 2.0, 1e3, 7.0], dtype=torch.float64)
    once = float(decorrelation(z, normalised=True))
    assert float(decorrelation(torch.cat([z, z, z]) * scales, normalised=True)) == pytest.approx(once, rel=1e-12)
    assert float(decorrelation(torch.cat([z, z]))) == pytest.approx(4 * float(decorrelation(z)), rel=1e-12)
    assert float(decorrelation(2 * z)) == pytest.approx(16 * float(decorrelation(z)), rel=1e-12)
    q, _ = torch.linalg.qr(z)
    assert float(decorrelation(1e4 * q, normalised=True)) < 1e-28  # orthogonal channels, and no rounding of ‖G‖²
    assert float(decorrelation(z[:, :1].expand(30, 4), normalised=True)) == pytest.approx(1)


@pytest.mark.parametrize("normalised", [False, True])
def test_gradients(normalised: bool) -> None:
    z = rows(6, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: decorrelation(x, normalised=normalised), z)
    dead = rows(6, 4).float()
    dead[:, 2] = 0
    dead.requires_grad_()
    decorrelation(dead, normalised=normalised).backward()
    assert bool(dead.grad.isfinite().all())


def test_under_autocast_the_products_are_float32() -> None:
    z = rows(300, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = decorrelation(z)
        half = decorrelation(z.bfloat16())
    assert found.dtype == half.dtype == torch.float32
    assert float(found) == float(decorrelation(z))
    assert float(half) == float(decorrelation(z.bfloat16().float()))


def test_shapes_that_are_neither_rows_nor_maps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        decorrelation(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="two channels"):
        decorrelation(torch.ones(5, 1), normalised=True)
    assert float(decorrelation(torch.ones(5, 1))) == 0


def network(inplace: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace), nn.Linear(16, 16), nn.ReLU(inplace), nn.Linear(16, 2))


@pytest.mark.parametrize("inplace", [False, True])
def test_the_penalty_is_that_of_the_last_forward(inplace: bool) -> None:
    model, x = network(inplace), rows(20, 6).float()
    z = x @ model[0].weight.T + model[0].bias
    expected = 0.5 * (decorrelation(z) + decorrelation(model[2](z.relu())))
    expected_gradients = torch.autograd.grad(expected, list(model[:3].parameters()))
    with Decorrelation(model, ["0", "2"], weight=0.5) as penalty:
        model(torch.ones_like(x))
        model(x)
        found = penalty()
    found.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for parameter, gradient in zip(model[:3].parameters(), expected_gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-3)


def test_in_place_dropout_after_an_evaluation() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5, inplace=True), nn.Linear(8, 2))
    with Decorrelation(model, "0") as penalty:
        model.eval()(rows(5, 6).float())
        model.train()(rows(5, 6).float())
        penalty().backward()


def test_sites_by_glob_and_type_and_training_with_it() -> None:
    x = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    y = torch.arange(64) % 4
    values = {}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        model = small_cnn(classes=4, width=4)
        with Decorrelation(model, "conv*", weight, normalised=True) as penalty:
            fit(model, x, y, recipe=Recipe(epochs=3, batch=32), seed=0, penalty=penalty)
        with Decorrelation(model, nn.Conv2d, 1.0, normalised=True) as penalty, torch.no_grad():
            model(x)
            values[weight] = float(penalty())
    assert values[1.0] < 0.9 * values[0.0]


def test_the_model_is_left_as_found() -> None:
    model, x = network(False), rows(4, 6).float()
    penalty = Decorrelation(model, "*")
    with pytest.raises(RuntimeError, match="not attached"):
        penalty()
    with pytest.raises(RuntimeError, match="shapes"), penalty:
        model(x[:, :5])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="not attached"):
        penalty()
    with penalty:  # once more
        with pytest.raises(RuntimeError, match="no forward"):
            penalty()
        with pytest.raises(RuntimeError, match="already"):
            penalty.__enter__()


def test_nothing_fired_and_no_such_site() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    with Decorrelation(model, "unused") as penalty:
        model(torch.ones(2, 3))
        with pytest.raises(SilentSite, match="unused"):
            penalty()
    with pytest.raises(SiteError, match="used"), Decorrelation(model, "usd"):
        pass


def test_any_term_of_activations_can_be_attached() -> None:
    model, x = network(True), rows(4, 6).float()
    with Attached(model, ["0", "4"], lambda seen: sum(z.square().sum() for z in seen.values())) as penalty:
        answer = model(x)
        found = float(penalty().detach())
    with torch.no_grad():
        assert found == pytest.approx(float(model[0](x).square().sum() + answer.square().sum()), rel=1e-6)

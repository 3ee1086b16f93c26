"""Attacks stay in their ball and box, repeat themselves, leave the model as found, and mislead it."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sosie.data import ATTACKS, Attack, attack
from sosie.data.shifts import open_attack
from sosie.train import Recipe, accuracy, fit

REAL = [kind for kind in ATTACKS if kind != "gaussian"]


@cache
def data() -> tuple[Tensor, Tensor]:
    """Two classes of 4 × 4 images: brighter above or below, under noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(400) % 2
    x = 0.35 + 0.3 * torch.rand(400, 1, 4, 4, generator=generator)
    x[y == 0, :, :2] += 0.06
    x[y == 1, :, 2:] += 0.06
    return x, y


@cache
def undefended() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.ReLU(), nn.Linear(32, 2)
    )
    return fit(model, *data(), recipe=Recipe(epochs=20), seed=0)


@given(
    kind=st.sampled_from(REAL),
    norm=st.sampled_from(["inf", "2"]),
    epsilon=st.floats(0, 2),
    steps=st.integers(1, 4),
    factor=st.floats(0.1, 5),
    seed=st.integers(0, 2**63),
    double=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_the_result_stays_in_the_ball_and_the_box_and_repeats(
    kind: str, norm: Any, epsilon: float, steps: int, factor: float, seed: int, double: bool
) -> None:
    x, y = data()
    model = copy.deepcopy(undefended()).double() if double else undefended()
    x = x[:7].double() if double else x[:7]
    x = (x - 0.35) / 0.36  # up to the edges of the box
    x = x.clamp(0, 1)
    how: dict[str, Any] = {"epsilon": epsilon, "norm": norm, "step_size": factor * epsilon, "seed": seed}
    if kind in ("pgd", "trades"):
        how["steps"] = steps
    found = attack(model, x, y[:7], kind, **how)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    change = (found - x).double().flatten(1)
    sizes = change.abs().amax(1) if norm == "inf" else change.norm(dim=1)
    assert float(sizes.max()) <= epsilon * (1 + 1e-6) + (1e-12 if double else 1e-6)
    assert torch.equal(attack(model, x, y[:7], kind, **how), found)
    # What is random belongs to the position, so that the batch does not matter; in float32 the batch changes roundings,
    # and where a gradient is nearly 0, as at the start of TRADES, these decide its direction.
    if double:
        assert torch.allclose(attack(model, x[:3], y[:3], kind, **how), found[:3], atol=1e-5)


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("kind", REAL)
def test_an_undefended_network_is_misled(kind: str, norm: str) -> None:
    (x, y), model = data(), undefended()
    assert accuracy(model, x, y) > 0.9
    epsilon = 0.1 if norm == "inf" else 0.4
    # TRADES only leads away from what the model answered: to the other class, or to more of the same.
    least = 0.6 if kind == "trades" else 0.3
    assert accuracy(model, attack(model, x, y, kind, epsilon=epsilon, norm=norm), y) < least
    noise = attack(model, x, y, "gaussian", epsilon=0.1)
    assert accuracy(model, noise, y) > 0.6


@pytest.mark.parametrize("kind", ATTACKS)
def test_the_model_and_the_random_state_are_left_as_found(kind: str) -> None:
    x, y = data()
    model = copy.deepcopy(undefended())
    model.train()
    model[2].eval()
    model[1].weight.requires_grad_(False)
    model[5].bias.grad = torch.ones(2)
    before = copy.deepcopy(model.state_dict())
    flags, state, copied = [m.training for m in model.modules()], torch.get_rng_state(), x.clone()
    with torch.no_grad():
        found = attack(model, x, y, kind)
    with torch.inference_mode():
        assert torch.equal(attack(model, x, y, kind), found)
    assert not found.requires_grad
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, copied)
    assert torch.equal(model[5].bias.grad, torch.ones(2))
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert [p.requires_grad for p in model.parameters()].count(False) == 1


def test_flags_are_put_back_after_an_error() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        attack(model, *data())
    assert model.training


def test_one_step_against_a_linear_model_is_known() -> None:
    """The gradient of −log p(0) with respect to x is p(1) (w₁ − w₀)."""
    weights = torch.tensor([[1.0, -2.0, 0.0], [3.0, -1.0, 0.0]])
    x, y = torch.full((1, 3), 0.5), torch.tensor([0])

    def model(z: Tensor) -> Tensor:
        return z @ weights.T

    assert torch.allclose(attack(model, x, y, "fgsm", epsilon=0.1), torch.tensor([[0.6, 0.6, 0.5]]))
    along = torch.tensor([2.0, 1.0, 0.0]) / 5**0.5
    assert torch.allclose(attack(model, x, y, "fgsm", epsilon=0.1, norm="2"), x + 0.1 * along)
    many = attack(model, x, y, "pgd", epsilon=0.1, steps=20, norm="2")
    assert torch.allclose(many, x + 0.1 * along, atol=5e-3)
    assert torch.allclose(attack(model, x, y, "pgd", epsilon=2.0, steps=20)[0, :2], torch.ones(2))
    # From a random start, 1.25 ε of step and the ball lead to the same corner or near it.
    fast = attack(model, x.expand(200, 3), y.expand(200), "fast_fgsm", epsilon=0.1)[:, :2] - 0.5
    assert float(fast.min()) >= 0.1 * (-1 + 1.25) - 1e-6
    assert 0.5 < float((fast > 0.1 - 1e-6).double().mean()) < 1


def test_trades_raises_the_divergence_and_reads_no_labels() -> None:
    (x, y), model = data(), undefended()
    model.eval()

    def divergence(z: Tensor) -> float:
        with torch.no_grad():
            p, q = model(x).log_softmax(-1), model(z).log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    found = attack(model, x, y, "trades", epsilon=0.05)
    assert torch.equal(found, attack(model, x, None, "trades", epsilon=0.05))
    assert divergence(found) > 10 * divergence(attack(model, x, y, "gaussian", epsilon=0.05))


def test_without_labels_the_model_is_led_away_from_its_own_answers() -> None:
    (x, _), model = data(), undefended()
    with torch.no_grad():
        own = model.eval()(x).argmax(-1)
    assert torch.equal(attack(model, x), attack(model, x, own))


def test_noise_has_its_size_and_knows_no_box() -> None:
    x = torch.zeros(50, 1, 20, 20)
    found = attack(lambda z: z, x, kind="gaussian", epsilon=0.3)
    assert abs(float(found.std()) - 0.3) < 0.01
    assert float(found.min()) < 0


def test_texts_name_attacks() -> None:
    assert open_attack("pgd(epsilon=0.1, norm='2')") == Attack("pgd", epsilon=0.1, norm="2")
    assert str(Attack("pgd", epsilon=0.1)) == "pgd(epsilon=0.1)"
    assert open_attack(str(Attack("pgd", steps=3, bounds=None))) == Attack("pgd", steps=3, bounds=None)
    assert str(ATTACKS["fgsm"]) == "fgsm"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("pgdd", "did you mean 'pgd'"),
        ("pgd(eps=1)", "no option 'eps'"),
        ("pgd(epsilon=-1)", "at least 0"),
        ("pgd(steps=0)", "at least 1"),
        ("fgsm(steps=3)", "one step"),
        ("pgd(norm='1')", "'inf', '2'"),
        ("trades(random_start=False)", "no gradient"),
        ("pgd(bounds=(1, 0))", "low, high"),
    ],
)
def test_what_is_wrong_is_said(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_attack(given)


def test_inputs_outside_the_box_are_refused() -> None:
    (x, y), model = data(), undefended()
    with pytest.raises(ValueError, match="outside bounds"):
        attack(model, 2 * x, y)
    assert attack(model, 2 * x, y, bounds=None).max() > 1
    with pytest.raises(TypeError, match="floating-point"):
        attack(model, (x * 255).byte(), y)


def test_labels_that_do_not_fit_the_inputs_are_refused() -> None:
    x, model = torch.rand(4, 1, 2, 2), nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"need one label per input: inputs \(4, 1, 2, 2\), labels \(2,\)"):
        attack(model, x, torch.tensor([0, 1]), "pgd")
    with pytest.raises(TypeError, match=r"labels are whole numbers, got torch.float32"):
        attack(model, x, torch.zeros(4), "fgsm")

"""Networks in a stack: from any state, with parts in common, pulled, in bfloat16, and with dropout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sosie.models import AtomConv2d
from sosie.train import Recipe
from sosie.train.many_networks import Stack, network, stacked_state, state_of, without_numbers

RECIPE = Recipe(epochs=1, rate=0.1, optimiser="sgd")


def model(seed: int, *, dropout: float = 0.0, norm: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm2d(4)] if norm else []
    return nn.Sequential(
        AtomConv2d(2, 4, 3, 5, padding=1), *middle, nn.ReLU(), nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(48, 4),
    ).to(dtype)  # fmt: skip


def batches(dtype: torch.dtype = torch.float64, networks: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(networks, 7, 2, 6, 6, generator=generator, dtype=dtype)
    return x, torch.randint(0, 4, (networks, 7), generator=generator)


def alone(start: nn.Module, x: Tensor, y: Tensor, trains: set[str], pull: Any = None, steps: int = 3) -> nn.Module:
    """Three steps of one network by the ordinary way, the pull as a term of the loss."""
    one = copy.deepcopy(start).train()
    for name, p in one.named_parameters():
        p.requires_grad_(name in trains)
    stepper = RECIPE.make_optimiser([p for p in one.parameters() if p.requires_grad])
    for _ in range(steps):
        loss = functional.cross_entropy(one(x), y)
        if pull is not None:
            weight, towards = pull
            loss = loss + weight / 2 * sum(
                ((p - towards[name]) ** 2).sum() for name, p in one.named_parameters() if p.requires_grad
            )
        stepper.zero_grad()
        loss.backward()
        stepper.step()
    return one.eval()


def learnt(stack: Stack, x: Tensor, y: Tensor, pull: Any = None, steps: int = 3) -> None:
    stepper = RECIPE.make_optimiser(stack.trained.values(), fused=True)
    for _ in range(steps):
        stack.learn(x, y, stepper, pull)


def apart(one: nn.Module, other: nn.Module) -> float:
    mine, theirs = state_of(one), state_of(other)
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("trains", ["all", "0.atoms"])
def test_networks_with_batches_of_their_own_are_trained_as_if_alone(trains: str, norm: bool) -> None:
    models = [model(seed, norm=norm) for seed in range(3)]
    x, y = batches()
    wanted = {name for name, _ in models[0].named_parameters()} if trains == "all" else {trains}
    given = stacked_state(models)
    stack = Stack(without_numbers(models[0]), given, trains=wanted)
    learnt(stack, x, y)
    assert all(torch.equal(given[name], stacked) for name, stacked in stacked_state(models).items())
    for k, start in enumerate(models):
        found = network(start, stack.state(), k)
        assert apart(found, alone(start, x[k], y[k], wanted)) < 1e-12
        assert apart(found, start) > 1e-4
        assert torch.allclose(stack.answers(x, batch=3)[k], found(x[k]), atol=1e-12)
        if trains != "all":
            assert torch.equal(state_of(found)["0.coefficients"], state_of(start)["0.coefficients"])


def test_what_is_in_common_is_neither_copied_nor_trained_unless_asked() -> None:
    models = [model(seed) for seed in range(3)]
    common = state_of(models[0])
    own = {name: stacked for name, stacked in stacked_state(models).items() if name.startswith("6")}
    x, y = batches()
    stack = Stack(
        without_numbers(models[0]), own, {n: t for n, t in common.items() if n not in own}, trains={"6.weight"}
    )
    assert stack.shared["0.atoms"].data_ptr() == common["0.atoms"].data_ptr()
    wide = Stack(without_numbers(models[0]), {}, common, count=3, trains={"0.atoms", "6.bias"})
    learnt(stack, x, y)
    learnt(wide, x, y)
    assert set(stack.state()) == {"6.weight", "6.bias"}
    assert set(wide.state()) == {"0.atoms", "6.bias"}
    for k in range(3):
        start = copy.deepcopy(models[0])
        start[6] = copy.deepcopy(models[k][6])
        one = alone(start, x[k], y[k], {"6.weight"})
        assert float((stack.state()["6.weight"][k] - one[6].weight.detach()).abs().max()) < 1e-12
        other = alone(models[0], x[k], y[k], {"0.atoms", "6.bias"})
        assert float((wide.state()["0.atoms"][k] - other[0].atoms.detach()).abs().max()) < 1e-12
    assert apart(models[0], model(0)) == 0  # nothing was written to what was given


def test_a_pull_is_the_square_of_the_distance_in_the_loss() -> None:
    models, towards = [model(seed) for seed in range(3)], state_of(model(7))
    x, y = batches()
    names = {name for name, _ in models[0].named_parameters()}
    stack = Stack(without_numbers(models[0]), stacked_state(models))
    learnt(stack, x, y, (0.3, towards))
    for k, start in enumerate(models):
        pulled = alone(start, x[k], y[k], names, (0.3, towards))
        assert apart(network(start, stack.state(), k), pulled) < 1e-12
        assert apart(pulled, alone(start, x[k], y[k], names)) > 1e-3


def test_parameters_that_need_no_gradient_stay() -> None:
    start = model(0)
    start[0].coefficients.requires_grad_(False)
    stack = Stack(without_numbers(start), stacked_state([start, start]))
    assert "0.coefficients" in stack.held
    assert "0.atoms" in stack.trained


def test_in_bfloat16_the_weights_stay_float32() -> None:
    models = [model(seed, dtype=torch.float32) for seed in range(3)]
    x, y = batches(torch.float32)
    low = Stack(without_numbers(models[0]), stacked_state(models), mixed=True)
    full = Stack(without_numbers(models[0]), stacked_state(models))
    assert low(x).dtype == torch.float32
    gap = float((low.answers(x) - full.answers(x)).abs().max())
    assert 0 < gap < 0.05
    learnt(low, x, y)
    learnt(full, x, y)
    for name, stacked in low.state().items():
        assert stacked.dtype == full.state()[name].dtype
        assert torch.allclose(stacked.float(), full.state()[name].float(), atol=0.03)
    assert not torch.equal(low.state()["0.atoms"], stacked_state(models)["0.atoms"])
    with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\) has averages in float32"):
        Stack(without_numbers(model(0, norm=True)), stacked_state([model(0, norm=True)]), mixed=True)


def test_dropout_draws_for_each_network_from_the_seed() -> None:
    start = model(0, dropout=0.5)
    x = batches()[0][:1].expand(3, -1, -1, -1, -1)
    stack = Stack(without_numbers(start), stacked_state([start] * 3))

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return stack(x).detach()

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.allclose(drawn(1), drawn(2))
    assert not torch.allclose(drawn(1)[0], drawn(1)[1])
    assert torch.allclose(stack.answers(x)[0], stack.answers(x)[1])
    strict = Stack(without_numbers(start), stacked_state([start] * 3), draws=False)
    with pytest.raises(RuntimeError, match="randomness"):
        strict(x)

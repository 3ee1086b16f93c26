"""Nothing moves a masked weight: optimisers, scalers, closures, and what torch puts around a model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_nets import assert_held, batch, small, train
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from sosie.train import Masks, pruned_masks, random_masks

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_masks_hold_through_many_steps(name: str) -> None:
    model = small()
    optimiser = OPTIMISERS[name](model.parameters())
    with random_masks(model, 0.8).hold(optimiser) as masks:
        train(model, optimiser, 30)
    assert_held(masks, optimiser)


def test_without_holding_the_masks_do_not_hold() -> None:
    model = small()
    masks, optimiser = random_masks(model, 0.8), torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimiser, 1)
    with pytest.raises(AssertionError):
        assert_held(masks)


def test_momentum_from_before_is_cleared() -> None:
    model = small()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    train(model, optimiser, 3)
    with pruned_masks(model, 0.5).hold(optimiser) as masks:
        assert_held(masks, optimiser)
        train(model, optimiser, 3)
    assert_held(masks, optimiser)


def test_held_training_is_training_of_a_network_whose_forward_is_masked() -> None:
    """Against torch.nn.utils.prune, which multiplies weight and mask in every forward."""
    model, reference = small(), small()
    masks = random_masks(model, 0.8)
    for layer, mask in masks.items():
        prune.custom_from_mask(reference.get_submodule(layer), "weight", mask.float())
    optimiser = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=1e-3, nesterov=True)
    other = torch.optim.SGD(reference.parameters(), 0.05, 0.9, weight_decay=1e-3, nesterov=True)
    with masks.hold(optimiser):
        train(model, optimiser, 10)
    train(reference, other, 10)
    for layer in masks:
        twin = reference.get_submodule(layer)
        torch.testing.assert_close(masks.weight(layer).detach(), (twin.weight_orig * twin.weight_mask).detach())


def test_after_the_block_nothing_is_held() -> None:
    model = small()
    masks, optimiser = random_masks(model, 0.8), torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ZeroDivisionError), masks.hold(optimiser):
        raise ZeroDivisionError
    assert not optimiser._optimizer_step_pre_hooks
    assert not optimiser._optimizer_step_post_hooks
    masks.remove()
    assert not [name for name, _ in model.named_buffers() if name.endswith("mask")]
    assert (model[6].weight == 0).float().mean() > 0.5
    with pytest.raises(RuntimeError, match="removed"):
        masks["0"]


def test_gradients_made_by_a_closure_are_masked() -> None:
    model = small()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = batch()

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    with random_masks(model, 0.8).hold(optimiser) as masks:
        losses = [float(optimiser.step(closure)) for _ in range(5)]
        losses += [float(optimiser.step(closure=closure)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert_held(masks, optimiser)


# Under what torch puts around a model


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_gradient_scaler(fused: bool) -> None:
    model = small()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    with random_masks(model, 0.8).hold(optimiser) as masks:
        for step in range(8):
            x, y = batch(step)
            optimiser.zero_grad()
            before = masks.weight("6").detach().clone()
            scaler.scale(functional.cross_entropy(model(x), y) * (math.inf if step == 3 else 1)).backward()
            scaler.step(optimiser)
            scaler.update()
            assert torch.equal(masks.weight("6").detach(), before) == (step == 3)  # the scaler skips that step
    assert_held(masks, optimiser)


def test_a_copy_has_masks_of_its_own() -> None:
    model = small()
    masks = random_masks(model, 0.8)
    twin = copy.deepcopy(model)
    own = Masks.of(twin)
    assert all(torch.equal(own[layer], masks[layer]) and own[layer] is not masks[layer] for layer in masks)
    optimiser = torch.optim.SGD(twin.parameters(), 0.1, 0.9)
    with pytest.raises(ValueError, match=r"Masks\.of\(copy\)"), masks.hold(optimiser):
        pass
    with own.hold(optimiser):
        train(twin, optimiser, 3)
    assert_held(own, optimiser)


def test_under_compile() -> None:
    model = small()
    compiled = torch.compile(model, backend="aot_eager")
    masks = random_masks(compiled, 0.8)
    optimiser = torch.optim.SGD(compiled.parameters(), 0.05, 0.9)
    with masks.hold(optimiser):
        train(compiled, optimiser, 4)
    assert list(masks) == list(Masks.of(model)) == ["0", "3", "6"]
    assert_held(masks, optimiser)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_under_distributed_training() -> None:
    plain, model = small(), small()
    names = set(plain.state_dict())
    random_masks(model, 0.8)
    spread = nn.parallel.DistributedDataParallel(model)
    masks = Masks.of(spread)
    optimiser = torch.optim.SGD(spread.parameters(), 0.05, 0.9)
    with masks.hold(optimiser):
        train(spread, optimiser, 4)
    assert_held(masks, optimiser)
    assert set(model.state_dict()) - names == {f"{layer}.weight_mask" for layer in masks}
    assert names <= set(model.state_dict())
    assert {name for name, _ in spread.named_parameters()} == {f"module.{name}" for name, _ in plain.named_parameters()}


def test_masks_move_with_the_model() -> None:
    model = small()
    masks = random_masks(model, 0.8)
    model.double().to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    with masks.hold(optimiser):
        x, y = batch()
        functional.cross_entropy(model(x.double()), y).backward()
        optimiser.step()
    assert masks["3"].is_contiguous(memory_format=torch.channels_last)
    assert masks["3"].dtype == torch.bool
    assert_held(masks, optimiser)


def test_tied_weights_have_one_mask() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 5), "a": nn.Linear(5, 5), "b": nn.Linear(5, 5)})
    model["b"].weight = model["a"].weight
    model["again"] = model["a"]
    masks = random_masks(model, 0.6)
    assert [row["weights"] for row in masks.densities()] == [25]
    assert torch.equal(model["b"].weight == 0, ~masks["a"])
    assert list(Masks.of(model)) == ["a"]
    masks.remove()
    with pytest.raises(ValueError, match="stay dense"):
        random_masks(model, 0.6, dense="b")


def test_misuse_is_refused() -> None:
    model = small()
    masks, optimiser = random_masks(model, 0.5), torch.optim.SGD(model.parameters(), 0.1)
    with masks.hold(optimiser):
        with pytest.raises(RuntimeError, match="already"), masks.hold(optimiser):
            pass
        with pytest.raises(RuntimeError, match="after the with block"):
            masks.remove()
    with pytest.raises(ValueError, match=r"shape \(8, 3, 3, 3\)"):
        masks.set("0", torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="no state"):
        masks.load_state_dict({"step": 3})

"""Networks trained side by side are those that `fit` trains alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sosie.models import small_cnn
from sosie.train import Augment, Penalty, Recipe, fit, fit_side_by_side
from sosie.train.sparse import random_masks

on_gpu = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ["cpu", on_gpu]


def lesson(device: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (150,), generator=random)
    images = torch.randint(0, 256, (150, 3, 16, 16), generator=random, dtype=torch.uint8)
    return images.to(device), labels.to(device)


def nets(device: str, count: int = 3) -> list[nn.Module]:
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(small_cnn(width=8 + 4 * (seed == 2), channels=3, size=16).to(device))
    return found


def distance(a: nn.Module, b: nn.Module) -> float:
    return max(
        float((p.double() - q.double()).abs().max())
        for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


RECIPE = Recipe(
    epochs=3,
    batch=64,  # the last batch has 22 images
    rate=0.02,
    optimiser="sgd",
    decay=1e-3,
    schedule="cosine",
    warmup=1,
    augment=Augment(pad=2),
)


@pytest.fixture(autouse=True)
def whole_precision() -> Any:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_each_is_trained_as_fit_trains_it(device: str, optimiser: str) -> None:
    images, labels = lesson(device)
    started = nets(device)
    alone, beside = copy.deepcopy(started), copy.deepcopy(started)
    recipe = replace(RECIPE, optimiser=optimiser, rate=0.02 if optimiser == "sgd" else 1e-3)  # type: ignore[arg-type]
    for k, model in enumerate(alone):
        fit(model, images, labels, seed=k + 5, recipe=recipe)
    found = fit_side_by_side(beside, images, labels, seeds=[5, 6, 7], at_once=2, recipe=recipe)
    for a, b, first in zip(alone, found, started, strict=True):
        assert distance(a, first) > 3e-3
        assert distance(a, b) < 1e-4
        assert not b.training


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("measure", "rows"), [("linear_cka", 8), ("linear_cka", None), ("mean_cca", None)])
def test_penalties_are_due_when_they_are_for_fit(device: str, measure: str, rows: int | None) -> None:
    images, labels = lesson(device)
    alone, beside = nets(device, 2), nets(device, 2)
    options: dict[str, Any] = {"rows": rows, "every": 2, "weight": 0.3, "pairs": [("conv1", "conv2")], "rule": "mean"}
    for k, model in enumerate(alone):
        with Penalty(model, measure, **options) as penalty:
            fit(model, images, labels, seed=k, penalty=penalty, recipe=RECIPE)
    with Penalty(beside[0], measure, **options) as first, Penalty(beside[1], measure, **options) as second:
        fit_side_by_side(beside, images, labels, seeds=[0, 1], penalties=[first, second], recipe=RECIPE)
        assert first.step == second.step == 9
    without = fit_side_by_side(nets(device, 1), images, labels, seeds=[0], recipe=RECIPE)
    assert distance(without[0], beside[0]) > 1e-3
    for a, b in zip(alone, beside, strict=True):
        assert distance(a, b) < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_masks_hold(device: str) -> None:
    images, labels = lesson(device)
    alone, beside = nets(device, 1), nets(device, 2)
    masks = random_masks(beside[0], 0.8, seed=3)
    kept = {name: mask.clone() for name, mask in masks.items()}
    fit(alone[0], images, labels, seed=0, masks=random_masks(alone[0], 0.8, seed=3), recipe=RECIPE)
    fit_side_by_side(beside, images, labels, seeds=[0, 1], masks=[masks, None], recipe=RECIPE)
    for name, mask in masks.items():
        weight = beside[0].get_submodule(name).weight
        assert torch.equal(mask, kept[name])
        assert torch.equal(weight != 0, mask)
    assert distance(alone[0], beside[0]) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_epochs_are_told(device: str) -> None:
    images, labels = lesson(device)
    told: list[tuple[int, int]] = []
    models = nets(device, 2)
    fit_side_by_side(models, images, labels, seeds=[0, 1], after_epoch=lambda k, e: told.append((k, e)), recipe=RECIPE)
    assert sorted(told) == [(k, epoch) for k in (0, 1) for epoch in range(4)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_that_is_no_number_is_told_with_its_network(device: str) -> None:
    images, labels = lesson(device)
    images = images.float()
    models = nets(device, 2)
    with torch.no_grad():
        next(models[1].parameters())[0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        fit_side_by_side(models, images, labels, seeds=[0, 1], recipe=replace(RECIPE, augment=None))


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_of_a_single_step(device: str) -> None:
    images, labels = lesson(device)
    alone, beside = nets(device, 1), nets(device, 1)
    recipe = replace(RECIPE, epochs=1, batch=150, warmup=0)
    with Penalty(alone[0], every=3, weight=0.1, pairs="all") as penalty:
        fit(alone[0], images, labels, seed=4, penalty=penalty, recipe=recipe)
    with Penalty(beside[0], every=3, weight=0.1, pairs="all") as penalty:
        fit_side_by_side(beside, images, labels, seeds=[4], penalties=[penalty], recipe=recipe)
    assert distance(nets(device, 1)[0], alone[0]) > 1e-3
    assert distance(alone[0], beside[0]) < 1e-4


def test_bad_input() -> None:
    images, labels = lesson("cpu")
    models = nets("cpu", 2)
    with pytest.raises(ValueError, match="2 models, 1 seeds"):
        fit_side_by_side(models, images, labels, seeds=[0], recipe=RECIPE)
    with pytest.raises(ValueError, match="networks 0 and 1 share"):
        fit_side_by_side([models[0], models[0]], images, labels, seeds=[0, 1], recipe=RECIPE)
    with pytest.raises(ValueError, match="penalties: need one for each of 2 models"):
        fit_side_by_side(models, images, labels, seeds=[0, 1], penalties=[None], recipe=RECIPE)
    with pytest.raises(ValueError, match="cannot train with average"):
        fit_side_by_side(models, images, labels, seeds=[0, 1], recipe=replace(RECIPE, average=0.9))
    stem = nets("cpu", 1)[0][0]
    sharing = [nn.Sequential(stem, *own[1:]) for own in nets("cpu", 2)]
    with pytest.raises(ValueError, match=r"networks 0 and 1 share '0\.weight'"):
        fit_side_by_side(sharing, images, labels, seeds=[0, 1], recipe=RECIPE)
    with pytest.raises(ValueError, match="at_once must be"):
        fit_side_by_side(models, images, labels, seeds=[0, 1], at_once=0, recipe=RECIPE)


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_the_table_of_rates_is_the_schedule(name: str) -> None:
    recipe = Recipe(epochs=5, rate=0.1, optimiser="sgd", schedule=name, warmup=1)  # type: ignore[arg-type]
    stepper = recipe.make_optimiser([torch.zeros(1, requires_grad=True)])
    plan, found = recipe.make_schedule(stepper, 4), recipe.rates(4)
    for step in range(20):
        assert float(found[step]) == pytest.approx(stepper.param_groups[0]["lr"], rel=1e-6)
        stepper.step()
        plan.step()
    assert float(found[0]) == pytest.approx(0.025)


def test_a_schedule_that_moves_the_momentum_cannot_be_recorded() -> None:
    with pytest.raises(ValueError, match="move the momentum"):
        Recipe(epochs=20, optimiser="sgd").rates(1)

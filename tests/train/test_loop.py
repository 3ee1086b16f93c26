"""The training loop learns, and repeats itself under one seed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_training import images
from torch import nn

from sosie.train import Augment, Recipe, accuracy, fit


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))


def test_it_learns_and_repeats() -> None:
    x, y = problem()
    untrained = accuracy(network(), x, y)
    models = [fit(network(), x, y, recipe=Recipe(epochs=30), seed=1) for _ in range(2)]
    assert accuracy(models[0], x, y) > max(0.9, untrained + 0.2)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    other = fit(network(), x, y, recipe=Recipe(epochs=30), seed=2)
    assert any(not torch.equal(a, b) for a, b in zip(models[0].parameters(), other.parameters(), strict=True))
    assert not models[0].training


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("optimiser", "rate"), [("adam", 5e-3), ("sgd", 0.05)])
def test_images_of_bytes_are_learnt_with_changes(optimiser: str, rate: float, mixed: bool) -> None:
    x, y = images(200)
    recipe = Recipe(
        8, 32, rate, optimiser, decay=1e-4, mixed=mixed,  # type: ignore[arg-type]
        augment=Augment(pad=1, mirror=False), prepare=lambda z: (z - 0.3) / 0.2,
    )  # fmt: skip
    model = fit(convolution(), x, y, recipe=recipe, seed=0)
    assert accuracy(model, x, y, prepare=lambda z: (z - 0.3) / 0.2) == 1.0
    assert x.dtype == torch.uint8
    assert int(x.max()) < 210  # the images are as they were


def test_crops_and_mirror_images_are_parts_of_the_image() -> None:
    x = torch.arange(1, 2 * 3 * 4 * 4 + 1).reshape(2, 3, 4, 4)
    augment = Augment(pad=2)
    padded = augment.padded(x)
    index = torch.tensor([1, 0, 1]).repeat(40)
    made = augment(padded, index, augment.draws(len(index), seed=0, epoch=0))
    seen = set()
    for i, picture in zip(index.tolist(), made, strict=True):
        wanted = {
            (top, left, mirrored): (crop.flip(-1) if mirrored else crop)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            for crop in [padded[i, :, top : top + 4, left : left + 4]]
        }
        matches = [key for key, crop in wanted.items() if torch.equal(crop, picture)]
        assert matches
        seen.add(matches[0])
    assert len(seen) > 35  # of 50: shifts and both directions all occur
    still = Augment(pad=0, mirror=False)
    assert torch.equal(still(x, torch.tensor([1]), still.draws(1, seed=0, epoch=0)), x[1:])


def test_a_sparsity_is_no_mask() -> None:
    with pytest.raises(TypeError, match=r"masks=0\.5: give masks"):
        fit(
            nn.Linear(3, 2),
            torch.rand(4, 3),
            torch.zeros(4, dtype=torch.long),
            recipe=Recipe(epochs=1),
            seed=0,
            masks=0.5,
        )  # type: ignore[arg-type]


def test_an_unknown_optimiser_is_refused() -> None:
    x, y = images(200)
    with pytest.raises(ValueError, match="'adam', 'sgd'"):
        fit(convolution(), x, y, recipe=Recipe(epochs=1, optimiser="lion"), seed=0)  # type: ignore[arg-type]


def test_only_what_requires_gradients_is_trained() -> None:
    x, y = problem()
    model = network()
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, x, y, recipe=Recipe(epochs=2, decay=0.1), seed=0)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"2.weight", "2.bias"}
    with pytest.raises(ValueError, match="nothing to train"):
        fit(model.requires_grad_(False), x, y, recipe=Recipe(epochs=1), seed=0)


def test_a_penalty_is_added_after_each_forward() -> None:
    x, y = problem()
    recipe = Recipe(1, len(x), 0.01, "sgd", momentum=0.0, schedule="constant")
    model, calls = network(), []

    def sums() -> torch.Tensor:
        calls.append(1)
        return 3 * model[2].weight.sum()

    fit(model, x, y, recipe=recipe, seed=0, penalty=sums)
    plain = fit(network(), x, y, recipe=recipe, seed=0)
    assert torch.allclose(model[2].weight, plain[2].weight - 0.01 * 3)  # one step along the penalty's gradient
    assert torch.equal(model[0].weight, plain[0].weight)
    fit(model, x, y, recipe=replace(recipe, batch=100), seed=0, penalty=sums)
    assert len(calls) == 1 + 3


def test_epochs_are_told_and_the_mode_is_restored() -> None:
    x, y = images(200)
    model, told, modes = convolution(), [], []

    def look(epoch: int) -> None:
        told.append((epoch, float(model[0].weight.detach().sum())))
        accuracy(model.eval(), x[:4], y[:4])

    model[2].register_forward_hook(lambda module, args, out: modes.append(module.training))
    plain = fit(convolution(), x, y, recipe=Recipe(epochs=3), seed=0)
    fit(model, x, y, recipe=Recipe(epochs=3), seed=0, after_epoch=look)
    assert [epoch for epoch, _ in told] == [0, 1, 2, 3]
    assert len({value for _, value in told}) == 4
    assert told[0][1] == float(convolution()[0].weight.detach().sum())
    steps = [True] * 4
    assert modes == [False, *steps, False, *steps, False, *steps, False]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("batch", [10, 100])
def test_a_loss_that_is_no_number_names_its_step(batch: int) -> None:
    x, y = problem()
    steps = iter(range(1, 10**6))

    def breaks() -> torch.Tensor:
        return torch.tensor(float("nan") if next(steps) == 5 else 0.0)

    with pytest.raises(ValueError, match=rf"step 5 \(epoch {1 if batch == 10 else 2}\) is NaN"):
        fit(network(), x, y, recipe=Recipe(epochs=3, batch=batch), seed=0, penalty=breaks)

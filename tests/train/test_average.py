"""The running average of weights against its formula."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_training import MovingMasks, images, network, numbers, same
from torch import Tensor

from sosie.train import Attached, Recipe, fit


def test_the_average_is_the_formula_and_the_training_is_the_same() -> None:
    x, y = images()
    model, seen = network(), []
    plain = Recipe(epochs=6, batch=len(x))  # an epoch is a step
    averaged = replace(plain, average=0.7)
    fit(model, x, y, recipe=averaged, seed=0, after_epoch=lambda epoch: seen.append(numbers(model)))
    wanted: dict[str, Tensor] = {name: value.double() for name, value in seen[1].items()}
    for state in seen[2:]:
        wanted = {name: 0.7 * wanted[name] + 0.3 * state[name].double() for name in state}
    found = numbers(model)
    for name in ("0.weight", "1.weight", "1.running_mean", "1.running_var", "5.bias"):
        assert torch.allclose(found[name].double(), wanted[name], rtol=1e-5, atol=1e-7), name
        assert not torch.allclose(found[name], seen[-1][name], rtol=1e-3), name
    assert int(found["1.num_batches_tracked"]) == 6  # a count, not an average
    assert same(numbers(fit(network(), x, y, recipe=plain, seed=0)), seen[-1])


def test_the_average_of_masked_weights_is_masked() -> None:
    x, y = images()
    model = network()
    fit(model, x, y, recipe=Recipe(epochs=3, batch=50, average=0.9), seed=0, masks=MovingMasks(model, every=2))
    mask = model[0].weight_mask
    assert mask.dtype == torch.bool
    assert mask[..., 0].all() != mask[..., 1].all()
    assert not model[0].weight[~mask].any()
    assert model[0].weight[mask].all()


def test_a_model_with_hooks_is_averaged_and_they_stay_its_own() -> None:
    x, y = images()
    calls = []
    model = network()
    model[5].register_forward_hook(lambda *_: calls.append(1))
    with Attached(model, "0", lambda shown: next(iter(shown.values())).square().mean()) as penalty:
        fit(model, x, y, recipe=Recipe(epochs=2, batch=50, average=0.9), seed=0, penalty=penalty)
    assert len(calls) == 4
    assert penalty.step == 4

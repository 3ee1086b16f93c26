"""RigL and SET: densities never change, what is dropped and grown is what the papers say, and it can go on."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from sparse_nets import assert_held, batch, small, train
from torch import Tensor, nn
from torch.nn import functional

from sosie.train import Masks, random_masks
from sosie.train.sparse import SET, Regrow, RigL


def kept(masks: Masks) -> dict[str, int]:
    return {row["layer"]: row["kept"] for row in masks.densities()}


def frozen(masks: Masks) -> dict[str, Tensor]:
    return {layer: mask.clone() for layer, mask in masks.items()}


@pytest.mark.parametrize("how", ["gradient", "random"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_densities_never_change_and_masks_do(how: Any, optimiser: str) -> None:
    model = small()
    masks = random_masks(model, 0.8)
    before, counts = frozen(masks), kept(masks)
    stepper: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=1e-2, nesterov=True)
    if optimiser == "adam":
        stepper = torch.optim.AdamW(model.parameters(), 1e-2)
    with Regrow(masks, 40, how=how, every=3).hold(stepper):
        for step in range(40):
            train(model, stepper, 1)
            assert kept(masks) == counts, step
    assert all(not torch.equal(masks[layer], before[layer]) for layer in ("0", "3"))
    assert_held(masks, stepper)


def test_one_update_is_the_papers() -> None:
    """Drop the smallest |w|, grow the largest |dense gradient| outside what stays: by plain sorting, in Python."""
    model = small()
    masks = random_masks(model, 0.8)
    optimiser = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    grow = RigL(masks, 10, every=1, fraction=0.5, until=1.0)
    before, weights = frozen(masks), {layer: masks.weight(layer).detach().clone() for layer in masks}
    x, y = batch()
    functional.cross_entropy(model(x), y).backward()
    gradients = {layer: masks.weight(layer).grad.clone() for layer in masks}
    with grow.hold(optimiser):
        optimiser.step()
    share = 0.5 / 2 * (1 + math.cos(math.pi / 10))
    for layer, mask in masks.items():
        old, w, g = (each[layer].flatten().tolist() for each in (before, weights, gradients))
        count = math.floor(share * sum(old))
        ranked = sorted((i for i, keep in enumerate(old) if keep), key=lambda i: abs(w[i]))
        stay = set(ranked[count:])
        others = sorted((i for i in range(len(old)) if i not in stay), key=lambda i: -abs(g[i]))
        expected = stay | set(others[:count])
        assert {i for i, keep in enumerate(mask.flatten().tolist()) if keep} == expected
        new = mask & ~before[layer]
        weight = masks.weight(layer).detach()
        assert new.any()
        assert (weight[new] == 0).all()  # it starts at 0 …
        assert (optimiser.state[masks.weight(layer)]["momentum_buffer"][new] == 0).all()  # … with no momentum
        stayed = mask & before[layer]
        torch.testing.assert_close(weight[stayed], (weights[layer] - 0.1 * gradients[layer])[stayed])
    assert [row["new"] for row in grow.last] == [int((masks[layer] & ~before[layer]).sum()) for layer in masks]


def test_when_masks_change_and_by_how_much() -> None:
    """At every third of 20 steps below 0.75 × 20 = 15: 3, 6, 9, 12; the share falls as a cosine to 0 at step 15."""
    model = small()
    masks = random_masks(model, 0.8)
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    grow, changed = RigL(masks, 20, every=3), []
    with grow.hold(optimiser):
        for step in range(1, 21):
            before, due = frozen(masks), grow.due
            train(model, optimiser, 1)
            if any(not torch.equal(before[layer], masks[layer]) for layer in masks):
                changed.append(step)
            assert due == (step in (3, 6, 9, 12))
    assert changed == [3, 6, 9, 12]
    assert grow.fraction_at(0) == pytest.approx(0.3)
    assert grow.fraction_at(15) == pytest.approx(0, abs=1e-15)
    assert grow.fraction_at(5) == pytest.approx(0.225)  # cos 60° = 1/2


def test_random_growth_is_of_the_seed_and_blind_to_gradients() -> None:
    def grown(seed: int, data: int, step: int = 0) -> dict[str, Tensor]:
        model = small()
        masks = random_masks(model, 0.8)
        optimiser = torch.optim.SGD(model.parameters(), 1e-9)  # weights hardly move: the same are dropped
        grow = SET(masks, 10**9, every=1, seed=seed)  # so long that each of the first updates drops the same share
        grow.load_state_dict({"step": step})
        with grow.hold(optimiser):
            x, y = batch(data)
            functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        return frozen(masks)

    one, same, other, later = grown(0, 0), grown(0, 5), grown(1, 0), grown(0, 0, step=1)
    assert all(torch.equal(one[layer], same[layer]) for layer in one)
    assert not all(torch.equal(one[layer], other[layer]) for layer in one)
    assert not all(torch.equal(one[layer], later[layer]) for layer in one)


def test_a_run_goes_on_from_its_state() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small()
        random_masks(model, 0.8)
        return model, torch.optim.SGD(model.parameters(), 0.05, 0.9)

    model, optimiser = start()
    with SET(Masks.of(model), 20, every=2).hold(optimiser):
        train(model, optimiser, 7)
        saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
        train(model, optimiser, 7)
    again, stepper = start()
    again.load_state_dict(saved[0])
    stepper.load_state_dict(saved[1])
    grow = SET(Masks.of(again), 20, every=2)
    grow.load_state_dict({"step": 7})
    with grow.hold(stepper):
        train(again, stepper, 7)
    assert grow.state_dict() == {"step": 14}
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_gradients_that_are_no_numbers_grow_nothing() -> None:
    model = small()
    masks = random_masks(model, 0.8)
    before = frozen(masks)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with RigL(masks, 10, every=1).hold(optimiser):
        x, y = batch()
        scaler.scale(functional.cross_entropy(model(x), y) * math.inf).backward()
        scaler.step(optimiser)  # which calls the optimiser, and tells it to skip
    assert all(torch.equal(before[layer], masks[layer]) for layer in masks)
    assert_held(masks)


@pytest.mark.parametrize("given", [False, True])
def test_layers_that_are_not_trained_stay_as_they_are(given: bool) -> None:
    model = small()
    masks = random_masks(model, 0.8)
    before = frozen(masks)
    model[0].requires_grad_(False)
    optimiser = torch.optim.SGD([p for p in model.parameters() if given or p.requires_grad], 0.05)
    with SET(masks, 10, every=1).hold(optimiser):
        train(model, optimiser, 3)
    assert torch.equal(masks["0"], before["0"])
    assert not torch.equal(masks["3"], before["3"])


def test_the_closure_makes_the_gradients_that_grow() -> None:
    model = small()
    masks = random_masks(model, 0.8)
    before = frozen(masks)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    x, y = batch()

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    with RigL(masks, 10, every=1).hold(optimiser):
        optimiser.step(closure)
    assert not torch.equal(masks["3"], before["3"])
    plain = small()
    reference = random_masks(plain, 0.8)
    other = torch.optim.SGD(plain.parameters(), 0.05, 0.9)
    with RigL(reference, 10, every=1).hold(other):
        train(plain, other, 1)
    assert all(torch.equal(masks[layer], reference[layer]) for layer in masks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps must be"),
        ({"steps": 10, "every": 0}, "every must be"),
        ({"steps": 10, "every": True}, "every must be"),
        ({"steps": 10, "fraction": 1.0}, "fraction=1.0"),
        ({"steps": 10, "until": 0}, "until=0"),
        ({"steps": 10, "how": "momentum"}, "'gradient'"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Regrow(random_masks(small(), 0.5), **options)


def test_masks_are_not_held_twice() -> None:
    model = small()
    masks, optimiser = random_masks(model, 0.5), torch.optim.SGD(model.parameters(), 0.1)
    with masks.hold(optimiser), pytest.raises(RuntimeError, match="already"), RigL(masks, 10).hold(optimiser):
        pass
    assert not optimiser._optimizer_step_pre_hooks

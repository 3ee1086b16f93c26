"""One step by itself: what it computes, and that nothing in it waits for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_training import MovingMasks, images, network, numbers, same
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sosie.train import Attached, Augment, Recipe, Training, fit
from sosie.train.recipe import trainable

WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_to_copy"}
DRAWS = {"rand", "randn", "randint", "randperm", "bernoulli", "bernoulli_", "uniform_", "normal_", "random_"}


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def quiet() -> nn.Sequential:
    """Without dropout."""
    model = network()
    model[4] = nn.Identity()
    return model


def begun(model: nn.Sequential, clip: float | None = None, masks: Any = None) -> Training:
    x, y = images()
    recipe = Recipe(1, rate=0.1, optimiser="sgd", momentum=0.0, clip=clip, augment=Augment(pad=1))
    return Training(model.train(), recipe.padded(x).float() / 255, y, recipe, masks=masks)


def test_nothing_in_a_step_waits_or_draws() -> None:
    model = quiet()
    index, draws = torch.arange(20), Augment(pad=1).draws(20, seed=0, epoch=0)
    with begun(model, masks=MovingMasks(model), clip=1.0) as training, Operations() as operations:
        training.step(index, draws)
    assert "convolution_backward" in operations.seen
    assert not operations.seen & (WAITS | DRAWS)
    with operations:
        training.look(5)
    assert "_local_scalar_dense" in operations.seen


def test_a_step_is_the_gradients_of_the_changed_images() -> None:
    model, twin = quiet(), quiet().train()
    index, draws = torch.tensor([7, 3, 90]), torch.tensor([[0, 2, 0], [1, 1, 1], [2, 0, 1]])
    with begun(model) as training:
        loss = training.step(index, draws)
    padded = training.images
    crops = [padded[7, :, 0:8, 2:10], padded[3, :, 1:9, 1:9].flip(-1), padded[90, :, 2:10, 0:8].flip(-1)]
    wanted = functional.cross_entropy(twin(torch.stack(crops)), training.labels[index])
    wanted.backward()
    assert torch.equal(loss, wanted.detach())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other - 0.1 * other.grad, atol=1e-7)
    with pytest.raises(ValueError, match="needs draws"):
        training.step(index)


def test_clipping_counts_what_masks_leave() -> None:
    model, twin = quiet(), quiet().train()
    index, draws = torch.arange(20), Augment(pad=1).draws(20, seed=0, epoch=0)
    before = numbers(model)
    with begun(model, masks=MovingMasks(model, every=0), clip=0.5) as training:
        training.step(index, draws)
    functional.cross_entropy(twin(Augment(pad=1)(training.images, index, draws)), training.labels[index]).backward()
    assert twin[0].weight.grad[..., ::2].abs().sum() > 0  # which the mask takes away
    twin[0].weight.grad.mul_(twin[0].weight_mask)
    length = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
    assert length > 0.5
    for name, parameter in twin.named_parameters():
        moved = before[name] - model.state_dict()[name]
        assert torch.allclose(moved, 0.1 * parameter.grad * 0.5 / length, rtol=1e-4, atol=1e-6), name
    assert not training.optimiser._optimizer_step_pre_hooks  # hooks are borrowed
    assert not training.optimiser._optimizer_step_post_hooks


def test_an_epochs_draws_are_a_function_of_the_seed_and_the_epoch() -> None:
    augment = Augment(pad=2)
    one = augment.draws(4000, seed=3, epoch=5)
    assert torch.equal(one, augment.draws(4000, seed=3, epoch=5))
    assert torch.equal(one[:7], augment.draws(7, seed=3, epoch=5))
    for other in (augment.draws(4000, seed=3, epoch=6), augment.draws(4000, seed=4, epoch=5)):
        assert float((one == other).float().mean(0).max()) < 0.55  # a fifth, a fifth and a half by chance
    for column, many in enumerate((5, 5, 2)):
        counts = torch.bincount(one[:, column], minlength=many)
        assert len(counts) == many
        assert float((counts / 4000 - 1 / many).abs().max()) < 4 * (1 / many / 4000) ** 0.5
    assert int(Augment(mirror=False).draws(100, seed=0, epoch=0)[:, 2].max()) == 0


def test_compiled_training_is_training(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, plain = [], torch.compile

    def traced(model: nn.Module) -> Any:
        compiled.append(model)
        return plain(model, backend="eager")  # traced like any, without the minute of a compiler

    monkeypatch.setattr(torch, "compile", traced)
    torch.compiler.reset()
    x, y = images()
    found = []
    for how in (False, True):
        model = quiet()
        with Attached(model, "0", lambda shown: sum(z.square().mean() for z in shown.values()), weight=0.1) as penalty:
            fit(model, x, y, recipe=Recipe(epochs=2, batch=50, compiled=how), seed=0, penalty=penalty)
        found.append(numbers(model))
    assert len(compiled) == 1
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-5) for name in found[0])
    assert same(found[1], numbers(compiled[0]))


def test_arguments_that_make_no_sense_are_refused() -> None:
    x, y = images()
    for wrong, words in [
        ({"clip": 0.0}, "clip must be a number above 0"),
        ({"average": 1.0}, "average=1.0"),
        ({"rate": 0.0}, "rate must be a number above 0"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
    ]:
        with pytest.raises(ValueError, match=words):
            Recipe(epochs=1, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="save_every must be"):
        fit(quiet(), x, y, recipe=Recipe(epochs=1), seed=0, save_every=0)
    with pytest.raises(ValueError, match="100 images and 99 labels"):
        fit(quiet(), x, y[:99], recipe=Recipe(epochs=1), seed=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_can_be_recorded_and_replayed() -> None:
    found = []
    for recorded in (False, True):
        model = quiet().cuda()
        x, y = (part.cuda() for part in images())
        augment = Augment(pad=1)
        recipe = Recipe(1, rate=0.1, optimiser="sgd", clip=1.0, augment=augment)
        optimiser = recipe.make_optimiser(trainable(model), fused=True, capturable=True)
        masks = MovingMasks(model, every=0)
        index, draws = torch.arange(20, device="cuda"), augment.draws(20, 0, 0, "cuda")
        with Training(model.train(), augment.padded(x), y, recipe, optimiser=optimiser, masks=masks) as training:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    training.step(index, draws)
            torch.cuda.current_stream().wait_stream(side)
            if recorded:
                graph = torch.cuda.CUDAGraph()
                optimiser.zero_grad()
                with torch.cuda.graph(graph):
                    training.step(index, draws)
                for _ in range(4):
                    graph.replay()
            else:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    for _ in range(4):
                        training.step(index, draws)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        assert int(training.taken) == 7
        found.append(numbers(model))
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-5) for name in found[0])

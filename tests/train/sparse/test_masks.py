"""Masks: how many weights each layer keeps, which ones torch would prune, and that nothing moves them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from sosie.models import cifar_resnet
from sosie.train import Masks, pruned_masks, random_masks
from sosie.train.sparse import counts_of, densities_of


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(8 * 6 * 6, 10),
    )  # fmt: skip


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x, y = batch(step)
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()


def assert_held(masks: Masks, optimiser: torch.optim.Optimizer | None = None) -> None:
    """Weights, and all that the optimiser remembers of them, are 0 where masked and nowhere else."""
    for layer, mask in masks.items():
        weight = masks.weight(layer)
        assert torch.equal(weight[~mask], torch.zeros_like(weight[~mask]))
        assert (weight[mask] != 0).all()
        for name, kept in (optimiser.state[weight] if optimiser else {}).items():
            if kept is not None and kept.shape == weight.shape:
                assert torch.equal(kept[~mask], torch.zeros_like(kept[~mask])), (layer, name)
                assert (kept[mask] != 0).all(), (layer, name)


# How many weights each layer keeps

SHAPES = {
    "conv1": (16, 3, 3, 3),
    **{f"layer1.{k}.conv{i}": (16, 16, 3, 3) for k in range(3) for i in (1, 2)},
    "layer2.0.conv1": (32, 16, 3, 3), "layer2.0.conv2": (32, 32, 3, 3),
    **{f"layer2.{k}.conv{i}": (32, 32, 3, 3) for k in (1, 2) for i in (1, 2)},
    "layer3.0.conv1": (64, 32, 3, 3), "layer3.0.conv2": (64, 64, 3, 3),
    **{f"layer3.{k}.conv{i}": (64, 64, 3, 3) for k in (1, 2) for i in (1, 2)},
    "linear": (10, 64),
}  # fmt: skip


def by_hand(kept: int) -> dict[str, Fraction]:
    """ERK of ResNet-20 worked from the formula in exact fractions: every set of dense layers is tried, smallest first.

    A layer's density is scale × (inputs + outputs + height + width) / weights, so it keeps scale × that sum.
    """
    sums = {name: sum(shape) for name, shape in SHAPES.items()}
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    order = sorted(SHAPES, key=lambda name: Fraction(sums[name], sizes[name]), reverse=True)
    for many in range(len(order)):
        rest = order[many:]
        scale = Fraction(kept - sum(sizes[name] for name in order[:many]), sum(sums[name] for name in rest))
        if all(scale * sums[name] <= sizes[name] for name in rest):
            return {n: Fraction(1) if n in order[:many] else scale * sums[n] / sizes[n] for n in SHAPES}
    raise AssertionError("no set of dense layers fits")


@pytest.mark.parametrize(
    ("sparsity", "kept"), [(0.7, 80501), (0.85, 40250), (0.9, 26834), (0.95, 13417), (0.98, 5367), (0.998, 537)]
)
def test_erk_of_resnet20_is_the_formula(sparsity: float, kept: int) -> None:
    assert abs(kept - (1 - sparsity) * 268336) <= 0.5
    expected, found = by_hand(kept), densities_of(SHAPES, sparsity)
    for name, density in expected.items():
        assert found[name] == pytest.approx(float(density), rel=1e-12)


def test_erk_of_resnet20_at_95_percent_in_numbers() -> None:
    """Only the head is dense; scale = (13417 − 640) / Σ (inputs + outputs + 6) = 12777 / 1429 = 8.9412."""
    sums = 25 + 6 * 38 + 54 + 5 * 70 + 102 + 5 * 134
    assert sums == 1429
    rows = {row["layer"]: row for row in random_masks(cifar_resnet(), 0.95).densities()}
    assert {name: row["shape"] for name, row in rows.items()} == SHAPES
    assert rows["linear"]["kept"] == 640
    assert rows["conv1"]["kept"] in (223, 224)  # 8.9412 × 25 = 223.53
    assert rows["layer1.0.conv1"]["kept"] in (339, 340)  # 339.77
    assert rows["layer3.2.conv2"]["kept"] in (1198, 1199)  # 1198.12
    assert sum(row["kept"] for row in rows.values()) == 13417  # 268336 − round(0.95 × 268336)


@pytest.mark.parametrize("how", ["erk", "uniform"])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 1 / 3, 0.5, 0.9, 0.99, 0.998])
def test_the_number_of_kept_weights_is_exact(how: Any, sparsity: float) -> None:
    counts = counts_of(SHAPES, sparsity, how)
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    total = sum(sizes.values())
    assert sum(counts.values()) == total - round(sparsity * total)
    shares = densities_of(SHAPES, sparsity, how)
    for name, count in counts.items():
        assert 0 < count <= sizes[name]
        assert abs(count - shares[name] * sizes[name]) < 1


def test_masks_come_from_the_seed_alone_and_say_what_they_are() -> None:
    one, two = random_masks(small(), 0.8, seed=3), random_masks(small(1), 0.8, seed=3)
    other = random_masks(small(), 0.8, seed=4)
    assert all(torch.equal(one[layer], two[layer]) for layer in one)
    assert not torch.equal(one["6"], other["6"])
    assert list(one) == ["0", "3", "6"]
    assert one.sparsity == pytest.approx(0.8, abs=1e-3)
    assert "3 layers" in repr(one)
    assert_held(one)


def test_random_masks_leave_the_random_state() -> None:
    model, state = small(), torch.get_rng_state()
    random_masks(model, 0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_named_dense_stay_whole() -> None:
    model = small()
    masks = random_masks(model, 0.5, dense=["0", "[4-6]"])
    assert list(masks) == ["3"]
    assert set(dict(model.named_buffers())) >= {"3.weight_mask"}
    assert "0.weight_mask" not in model.state_dict()


# What torch would prune


def test_magnitude_is_what_torch_prunes_globally() -> None:
    model, reference = small(), small()
    found = pruned_masks(model, 0.7)
    layers = [(reference[i], "weight") for i in (0, 3, 6)]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.7)
    for i in (0, 3, 6):
        assert torch.equal(found[str(i)], reference[i].weight_mask.bool())
        assert torch.equal(model[i].weight, reference[i].weight)
    assert_held(found)


def test_magnitude_of_each_layer_is_what_torch_prunes() -> None:
    model, reference = small(), small()
    found = pruned_masks(model, 0.7, how="magnitude_of_layer")
    for i in (0, 3, 6):
        prune.l1_unstructured(reference[i], "weight", 0.7)
        assert torch.equal(found[str(i)], reference[i].weight_mask.bool())


def test_channels_are_what_torch_prunes() -> None:
    model, reference = small(), small()
    found = pruned_masks(model, 0.5, how="channels", dense="6")
    for i in (0, 3):
        prune.ln_structured(reference[i], "weight", 0.5, n=1, dim=0)
        assert torch.equal(found[str(i)], reference[i].weight_mask.bool())
        channels = found[str(i)].flatten(1)
        assert torch.equal(channels.any(1), channels.all(1))
        assert channels.any(1).sum() == 4


def test_output_channels_of_a_transposed_convolution_are_on_its_second_axis() -> None:
    torch.manual_seed(0)
    masks = pruned_masks(nn.Sequential(nn.ConvTranspose2d(5, 4, 3)), 0.5, how="channels")
    assert masks["0"].any((0, 2, 3)).tolist().count(True) == 2
    with pytest.raises(ValueError, match="groups"):
        pruned_masks(nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2)), 0.5, how="channels")


@pytest.mark.parametrize("how", ["magnitude", "magnitude_of_layer", "channels"])
def test_pruning_further_is_pruning_at_once(how: Any) -> None:
    model, at_once = small(), small()
    first = pruned_masks(model, 0.25, how=how, dense="6")
    before = {layer: mask.clone() for layer, mask in first.items()}
    second = pruned_masks(model, 0.5, how=how, dense="6")
    reference = pruned_masks(at_once, 0.5, how=how, dense="6")
    for layer, mask in second.items():
        assert torch.equal(mask, reference[layer])
        assert torch.equal(mask & before[layer], mask)
        assert first[layer] is mask  # masks that are held follow
    with pytest.raises(ValueError, match="pruned already"):
        pruned_masks(model, 0.25, how=how, dense="6")


def test_a_model_pruned_by_torch_is_taken_over() -> None:
    model, reference = small(), small()
    for each in (model, reference):
        prune.l1_unstructured(each[3], "weight", 0.5)
    x, _ = batch()
    parameter, expected = model[3].weight_orig, reference(x)
    with pytest.raises(ValueError, match=r"Masks\.of"):
        random_masks(model, 0.5)
    masks = Masks.of(model)
    assert list(masks) == ["3"]
    assert masks["3"].dtype == torch.bool
    assert model[3].weight is parameter  # an optimiser made before goes on with it
    assert torch.equal(model(x), expected)
    optimiser = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    with masks.hold(optimiser):
        train(model, optimiser, 3)
    assert_held(masks, optimiser)


# They hold

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


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparsity": 1.0}, "from 0 to below 1"),
        ({"sparsity": -0.1}, "from 0 to below 1"),
        ({"sparsity": math.nan}, "from 0 to below 1"),
        ({"sparsity": 0.5, "how": "er"}, "'erk' or 'uniform'"),
        ({"sparsity": 0.5, "dense": "7"}, "no convolution or linear layer is called '7'"),
        ({"sparsity": 0.5, "dense": "*"}, "all 3 stay dense"),
        ({"sparsity": 0.9999}, "leaves no weight in"),
    ],
)
def test_bad_random_masks_are_refused(options: dict[str, Any], words: str) -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        random_masks(model, **options)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_masked_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to mask in ReLU"):
        random_masks(nn.ReLU(), 0.5)
    with pytest.raises(ValueError, match="call the model once"):
        random_masks(nn.Sequential(nn.LazyLinear(3)), 0.5)
    parametrised = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="remove a parametrisation"):
        random_masks(parametrised, 0.5)
    with pytest.raises(ValueError, match="has a mask already"):
        random_masks(masked := small(), 0.5) and random_masks(masked, 0.5)
    with pytest.raises(ValueError, match="leaves none of the 8 channels"):
        pruned_masks(small(), 0.99, how="channels", dense="6")
    with pytest.raises(ValueError, match="'channels'"):
        pruned_masks(small(), 0.5, how="l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no convolution or linear layer of the model has a mask"):
        Masks.of(small())


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

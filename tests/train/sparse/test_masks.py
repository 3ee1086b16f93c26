"""How many weights each layer keeps, which ones torch would prune, and what is refused."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from sparse_nets import assert_held, batch, small, train
from torch import nn
from torch.nn.utils import prune

from sosie.models import cifar_resnet
from sosie.train import Masks, pruned_masks, random_masks
from sosie.train.sparse import counts_of, densities_of

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


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparsity": 1.0}, "from 0 to below 1"),
        ({"sparsity": -0.1}, "from 0 to below 1"),
        ({"sparsity": math.nan}, "from 0 to below 1"),
        ({"sparsity": 0.5, "how": "er"}, "'erk', 'uniform'"),
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
    with pytest.raises(RuntimeError, match="Call `forward` to initialize"):  # torch's own words
        random_masks(nn.Sequential(nn.LazyLinear(3)), 0.5)
    parametrised = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="remove a parametrisation"):
        random_masks(parametrised, 0.5)
    with pytest.raises(ValueError, match="have masks already"):
        random_masks(masked := small(), 0.5) and random_masks(masked, 0.5)
    with pytest.raises(ValueError, match="leaves no channel"):
        pruned_masks(small(), 0.99, how="channels", dense="6")
    with torch.no_grad():
        (odd := small())[3].weight[0, 0, 0, 0] = torch.nan  # type: ignore[index]
    with pytest.raises(ValueError, match="weights of '3' are NaN"):
        pruned_masks(odd, 0.5)
    with pytest.raises(ValueError, match="'channels'"):
        pruned_masks(small(), 0.5, how="l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no convolution or linear layer of the model has a mask"):
        Masks.of(small())


def test_a_layer_without_inputs_has_nothing_to_mask() -> None:
    with pytest.warns(UserWarning, match="zero-element"):  # by torch, which fills no weights
        model = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 4))
    assert list(random_masks(model, 0.5)) == ["1"]


def test_modules_that_share_a_weight_cannot_have_a_mask_each() -> None:
    model = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 5)})
    model["b"].weight = model["a"].weight
    for name, density in (("a", 0.5), ("b", 0.8)):
        model[name].register_buffer("weight_mask", torch.rand(5, 5) < density)
    with pytest.raises(ValueError, match="'a' and 'b' share one weight and have a mask each"):
        Masks.of(model)


def test_all_layers_are_multiplied_in_one_call_by_the_masks_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, calls = torch._foreach_mul_, []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *given: (calls.append(given), multiply(*given))[1])
    model = small()
    masks = random_masks(model, 0.5, seed=0)
    calls.clear()
    masks.apply()
    assert [len(tensors) for tensors, _ in calls] == [len(masks)]
    masks["0"].logical_not_()  # in place, as load_state_dict does
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        with torch.no_grad():
            masks.weight("0").fill_(2)
        masks.apply()
        assert torch.equal(masks.weight("0"), 2 * masks["0"].to(dtype))

"""Convolutions made of atoms: the same as plain ones, taken apart and put together again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from sosie.models import (
    AtomConv2d,
    alexnet,
    atom_layers,
    cifar_resnet,
    decompose,
    freeze,
    load_atoms,
    open_model,
    recompose,
    share_coefficients,
    small_cnn,
    vgg11,
    with_atoms,
)
from sosie.models.atoms import why_not

SETTINGS = [
    {"bias": False},
    {"stride": 2, "padding": 1},
    {"stride": (2, 1), "dilation": (1, 2)},
    {"groups": 2, "padding": (2, 0)},
    {"groups": 4, "padding": "same"},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    *({"padding": 1, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")),
    {"padding": "same", "dilation": (1, 2), "padding_mode": "circular"},
]


def images(channels: int = 4, side: int = 9, count: int = 3) -> Tensor:
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(1))


def seeded(seed: int, make: type[nn.Module] | object, **options: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(**options).eval()  # type: ignore[operator, no-any-return]


def depthwise() -> nn.Module:
    """As MobileNet's block: 1 × 1, then one kernel a channel, then 1 × 1."""
    layers = (nn.Conv2d(3, 12, 1), nn.ReLU6(), nn.Conv2d(12, 12, 3, 2, 1, groups=12), nn.BatchNorm2d(12), nn.ReLU6())
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), *layers, nn.Conv2d(12, 5, 1))


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("kernel", [3, (2, 4)])
def test_computes_what_a_plain_convolution_of_its_weight_does(options: dict, kernel: int | tuple[int, int]) -> None:
    layer = seeded(0, lambda **given: AtomConv2d(4, 8, kernel, 5, **given), **options)
    assert isinstance(layer, AtomConv2d)
    plain = nn.Conv2d(4, 8, kernel, **options).eval()
    with torch.no_grad():
        plain.weight.copy_(torch.einsum("oim,mhw->oihw", layer.coefficients, layer.atoms))
        if layer.bias is not None:
            layer.bias.normal_()
            plain.bias.copy_(layer.bias)
    x = images()
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer.to_conv()(x), plain(x))


@pytest.mark.parametrize("model", [alexnet, vgg11, lambda: cifar_resnet(depth=20), depthwise])
def test_as_many_atoms_as_entries_lose_nothing(model: object) -> None:
    plain = seeded(0, model)
    found = decompose(plain, 25)
    x = images(3, 32, 2)
    with torch.no_grad():
        assert float((found.model(x) - plain(x)).abs().max()) < 1e-5 * float(plain(x).abs().max())
        assert float((recompose(found.model)(x) - plain(x)).abs().max()) < 1e-5 * float(plain(x).abs().max())
    assert max(found.errors.values()) < 1e-5
    for name, layer in atom_layers(found.model).items():
        size = layer.kernel_size[0] * layer.kernel_size[1]
        assert found.atoms[name] == len(layer.atoms) == min(25, size, layer.coefficients[..., 0].numel())


def test_the_error_is_the_tail_of_the_singular_values() -> None:
    plain = seeded(0, small_cnn)
    for count in (1, 4, 8):
        found = decompose(plain, count)
        for name, layer in plain.named_modules():
            if isinstance(layer, nn.Conv2d):
                s = torch.linalg.svdvals(layer.weight.detach().double().flatten(2).flatten(0, 1))
                tail = float(s[count:].norm() / s.norm())
                assert found.errors[name] == pytest.approx(tail, rel=1e-5)
                made = atom_layers(found.model)[name]
                alpha = made.coefficients.detach().flatten(0, 1)
                torch.testing.assert_close(alpha.T @ alpha, torch.eye(count), atol=1e-5, rtol=0)


def test_recomposing_gives_the_parameters_back() -> None:
    plain = seeded(3, small_cnn)
    again = recompose(decompose(plain, 9).model)
    assert list(again.state_dict()) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-6, rtol=1e-5)
    assert not atom_layers(again)


def test_the_model_and_the_random_state_are_left_alone() -> None:
    plain = seeded(0, small_cnn)
    before, state = copy.deepcopy(plain.state_dict()), torch.random.get_rng_state()
    recompose(decompose(plain, 4).model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in plain.state_dict().items())


def test_what_is_left_alone_says_why() -> None:
    class Own(nn.Conv2d):
        pass

    hooked = nn.Conv2d(3, 3, 3)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "one": nn.Conv2d(3, 4, 1), "linear": nn.Linear(3, 4), "back": nn.ConvTranspose2d(3, 4, 3),
            "line": nn.Conv1d(3, 4, 3), "normed": weight_norm(nn.Conv2d(3, 4, 3)),
            "spectral": spectral_norm(nn.Conv2d(3, 4, 3)), "own": Own(3, 4, 3), "hooked": hooked,
            "plain": nn.Conv2d(3, 4, 3), "atoms": AtomConv2d(3, 4, 3, 2), "norm": nn.BatchNorm2d(3),
        }
    )  # fmt: skip
    found = decompose(model, 3)
    assert list(found.atoms) == ["plain"]
    reasons = {
        "one": "one entry", "linear": "is a Linear", "back": "is a ConvTranspose2d", "line": "is a Conv1d",
        "normed": "parametrisation", "spectral": "parametrisation", "own": "is a Own",
        "hooked": "has hooks", "atoms": "already",
    }  # fmt: skip
    assert {name: reasons[name] in why for name, why in found.left.items() if name in reasons} == dict.fromkeys(
        reasons, True
    )
    assert not any(name.startswith("norm.") or name == "norm" for name in found.left)
    pruned = prune.l1_unstructured(nn.Conv2d(3, 4, 3), "weight", 0.5)  # type: ignore[no-untyped-call]
    assert "parametrisation" in (why_not(pruned) or "")
    with pytest.raises(ValueError, match="nothing to decompose: 0 has kernels of one entry; 1 is a Linear"):
        decompose(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(3, 4)), 3)


def test_a_layer_in_two_places_stays_one() -> None:
    layer, twin = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    twin.weight = layer.weight
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Sequential(nn.ReLU(), layer), twin)
    made = decompose(model, 9).model
    assert made[0] is made[2] is made[3][1]
    assert isinstance(made[0], AtomConv2d)
    assert made[4].atoms is made[0].atoms
    assert made[4].coefficients is made[0].coefficients
    x = images(3)
    torch.testing.assert_close(made(x), model(x), atol=1e-5, rtol=1e-4)
    assert (back := recompose(made))[4].weight is back[2].weight
    assert isinstance(decompose(layer, 2).model, AtomConv2d)


def test_weights_that_are_no_numbers_are_named() -> None:
    model = seeded(0, small_cnn)
    with torch.no_grad():
        model.conv2.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"conv2\.weight has 1 of 4608 values that are NaN"):
        decompose(model, 3)


@pytest.mark.parametrize("count", [0, -1, True, 2.5])
def test_a_number_of_atoms_that_is_none(count: int) -> None:
    for make in (decompose, with_atoms):
        with pytest.raises(ValueError, match="at least one atom"):
            make(seeded(0, small_cnn), count)


def test_what_is_frozen_stays_as_it_is() -> None:
    for part, other in (("atoms", "coefficients"), ("coefficients", "atoms")):
        model = freeze(seeded(0, small_cnn, width=2, atoms=4), part)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = copy.deepcopy(model.state_dict())
        optimiser = torch.optim.SGD(trained, 0.1)
        model(images(1, 28)).square().mean().backward()
        optimiser.step()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]) == name.endswith(part), (part, other, name)
        assert all(parameter.requires_grad for parameter in freeze(model, part, False).parameters())
    with pytest.raises(ValueError, match=r"part must be .*'bias'"):
        freeze(model, "bias")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no layer of atoms"):
        freeze(seeded(0, small_cnn), "atoms")


def test_frozen_layers_stay_frozen_on_the_way_there_and_back() -> None:
    plain = seeded(0, small_cnn)
    plain.conv1.requires_grad_(False)
    made = decompose(plain, 4).model
    assert [p.requires_grad for p in made.conv1.parameters()] == [False] * 3
    assert all(p.requires_grad for p in made.conv2.parameters())
    again = recompose(made)
    assert not any(p.requires_grad for p in again.conv1.parameters())
    assert recompose(freeze(decompose(plain, 4).model, "coefficients")).conv2.weight.requires_grad


def test_shared_coefficients_are_one_tensor() -> None:
    a, b, c = (seeded(seed, small_cnn, width=2, atoms=4) for seed in range(3))
    share_coefficients(a, [b, c])
    with torch.no_grad():
        a.conv2.coefficients += 1
    assert torch.equal(b.conv2.coefficients, a.conv2.coefficients)
    assert b.conv2.coefficients is c.conv2.coefficients
    assert not torch.equal(b.conv2.atoms, a.conv2.atoms)
    with pytest.raises(ValueError, match=r"conv1: coefficients of \(2, 1, 2\) .* cannot be .*\(4, 1, 4\)"):
        share_coefficients(seeded(0, small_cnn, width=4, atoms=4), [seeded(0, small_cnn, width=2, atoms=4)])
    with pytest.raises(ValueError, match=r"model 0 and the source do not both have .* '0'"):
        share_coefficients(a, [with_atoms(nn.Sequential(nn.Conv2d(3, 4, 3)), 2)])


def test_atoms_are_loaded_by_name() -> None:
    a, b = (seeded(seed, small_cnn, width=2, atoms=4) for seed in range(2))
    load_atoms(b, {name: layer.atoms for name, layer in atom_layers(a).items()})
    assert torch.equal(a.conv3.atoms, b.conv3.atoms)
    assert not torch.equal(a.conv3.coefficients, b.conv3.coefficients)
    before = b.conv1.atoms.detach().clone()
    with pytest.raises(ValueError, match="'conv9'; there are conv1"):
        load_atoms(b, {"conv1": torch.zeros_like(before), "conv9": before})
    with pytest.raises(ValueError, match=r"conv2: atoms of \(3, 3, 3\), the layer has \(4, 3, 3\)"):
        load_atoms(b, {"conv1": torch.zeros_like(before), "conv2": torch.zeros(3, 3, 3)})
    assert torch.equal(b.conv1.atoms, before), "an error must leave all as it was"


@pytest.mark.parametrize(
    ("name", "atoms"),
    [("alexnet(hidden=8)", 4), ("alexnet(hidden=8)", 25), ("small_cnn(width=2)", 25), ("vgg11_bn(hidden=8)", 4)],
)
def test_a_file_tells_how_many_atoms_there_are(name: str, atoms: int, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = open_model(f"{name[:-1]}, atoms={atoms})").model
    safetensors.save_file(model.state_dict(), tmp_path / "file.safetensors")
    again = open_model(f"{name.partition('(')[0]}@{tmp_path}/file.safetensors").model
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert max(len(layer.atoms) for layer in atom_layers(again).values()) == min(atoms, 25 if "alex" in name else 9)
    # What decompose makes has the layers that the architecture makes.
    plain = decompose(open_model(name).model, atoms).model
    assert {key: t.shape for key, t in plain.state_dict().items()} == {
        key: t.shape for key, t in model.state_dict().items()
    }


def test_compiled_channels_last_and_autocast_give_the_same() -> None:
    model = seeded(0, small_cnn, atoms=6)
    x = images(1, 28)
    with torch.no_grad():
        plain = model(x)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), plain)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), plain, atol=1e-5, rtol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            low, same = model(x), recompose(model)(x)
    assert low.dtype == torch.bfloat16
    # Of the size of the output, as the plain network in bfloat16.
    size = float(plain.abs().max())
    assert float((low - plain).abs().max()) < 0.05 * size
    assert float((same - plain).abs().max()) < 0.05 * size


def test_gradients_are_those_of_the_weight_put_together() -> None:
    layer = AtomConv2d(2, 3, 3, 4, dtype=torch.float64)
    x = images(2, 5).double()
    assert torch.autograd.gradcheck(
        lambda a, d: torch.func.functional_call(layer, {"coefficients": a, "atoms": d}, (x,)),
        (layer.coefficients, layer.atoms),
    )


@pytest.mark.parametrize(("kernel", "groups"), [(3, 1), (5, 1), (3, 4), ((2, 7), 2)])
def test_fresh_atoms_have_length_1_and_kernels_the_variance_of_he(kernel: int | tuple[int, int], groups: int) -> None:
    layer = seeded(0, lambda: AtomConv2d(64, 128, kernel, 200, groups=groups))  # of few atoms the variance is a draw
    entries = layer.atoms[0].numel()
    assert float(layer.atoms.detach().flatten(1).square().sum(1).mean()) == pytest.approx(1, rel=0.1)
    assert float(layer.weight.detach().std()) == pytest.approx((2 * groups / (128 * entries)) ** 0.5, rel=0.1)


def test_a_network_to_train_is_drawn_from_torchs_generator() -> None:
    state = torch.random.get_rng_state()
    with_atoms(seeded(0, small_cnn), 3)
    assert not torch.equal(torch.random.get_rng_state(), state)


def test_it_says_what_it_is() -> None:
    assert repr(AtomConv2d(4, 8, 3, 5, stride=2, groups=2, bias=False)) == (
        "AtomConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), groups=2, bias=False, atoms=5)"
    )
    with pytest.raises(ValueError, match="divisible by groups"):
        AtomConv2d(4, 6, 3, 5, groups=4)


def test_half_precision_models_are_decomposed_in_double() -> None:
    plain = seeded(0, small_cnn).bfloat16()
    found = decompose(plain, 9)
    assert found.model.conv1.atoms.dtype == torch.bfloat16
    assert max(found.errors.values()) < 0.02

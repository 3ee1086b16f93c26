"""Every network of the registry: what it is made of, and that it runs and learns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from sosie.models import (
    build_model,
    cifar_resnet,
    inception_v1,
    list_models,
    resnet18,
    resnet50,
    small_cnn,
    vgg11,
    vgg11_bn,
    vit,
)
from sosie.models.convolutional import SameConv2d

# the same code again, only deeper
DEEPER = {"resnet32", "resnet34", "resnet44", "resnet56", "resnet101", "resnet110", "resnet152"}
DEEPER |= {"cifar_resnet", "efficientnet_lite1", "efficientnet_lite2"}
QUICK = [name for name in list_models() if name not in DEEPER]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two images keep no second core busy; threads that wait for each other take seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def leaves(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not list(module.children())]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def inputs(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand((2, 1, 28, 28) if name == "small_cnn" else (2, 3, 32, 32), generator=generator)


@pytest.mark.parametrize("name", QUICK)
def test_a_network_runs_and_every_parameter_gets_a_gradient(name: str) -> None:
    model = build_model(name).train()
    x = inputs(name)
    y = model(x)
    assert y.dim() == 2
    y.square().sum().backward()
    idle = [key for key, value in model.named_parameters() if value.grad is None or not value.grad.isfinite().all()]
    assert not idle


@pytest.mark.parametrize("name", QUICK)
def test_every_leaf_can_be_hooked(name: str) -> None:
    model, fired = build_model(name).eval(), []
    for key in leaves(model):
        model.get_submodule(key).register_forward_hook(lambda *_, key=key: fired.append(key))
    with torch.inference_mode():
        model(inputs(name))
    assert set(fired) == set(leaves(model))


# torchvision's own counts, and those of the published CIFAR files
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny10", 86_778),
        ("resnet20", 269_722),
        ("resnet56", 853_018),
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("inception_v1", 6_624_904),
        ("efficientnet_lite0", 4_652_008),
        ("vgg11(classes=1000, size=224, hidden=4096)", 132_863_336),
        ("vgg11_bn(classes=1000, size=224, hidden=4096)", 132_868_840),
    ],
)
def test_parameter_counts(name: str, count: int) -> None:
    plain, _, options = name.partition("(")
    given = dict(part.strip(" )").split("=") for part in options.split(",")) if options else {}
    with torch.device("meta"):  # VGG's linear layers are large
        model = build_model(plain, {key: int(value) for key, value in given.items()})
    assert parameters(model) == count


@pytest.mark.parametrize(("name", "count"), [("tiny10", 17), ("resnet20", 39), ("resnet56", 111), ("resnet50", 126)])
def test_leaf_counts(name: str, count: int) -> None:
    assert len(leaves(build_model(name))) == count


def test_resnet50_fires_158_times_as_torchvision_does() -> None:
    model, fired = resnet50().eval(), []
    for key in leaves(model):
        model.get_submodule(key).register_forward_hook(lambda *_, key=key: fired.append(key))
    with torch.inference_mode():
        model(inputs("resnet50"))
    assert len(fired) == 158


def test_shortcut_a_has_no_parameters_and_pads_with_zero_channels() -> None:
    block = cifar_resnet(depth=8).layer2[0].eval()
    x = torch.rand(2, 16, 8, 8)
    nn.init.zeros_(block.bn2.weight)
    nn.init.zeros_(block.bn2.bias)
    y = block(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_shortcut_b_adds_two_convolutions() -> None:
    assert parameters(cifar_resnet(shortcut="B")) - parameters(cifar_resnet()) == 2752
    assert hasattr(cifar_resnet(shortcut="B"), "fc")
    assert hasattr(cifar_resnet(shortcut="B", head="linear"), "linear")


def test_width_multiplies_channels() -> None:
    assert cifar_resnet(depth=8, width=0.5).conv1.out_channels == 8
    assert cifar_resnet(depth=8, width=4).linear.in_features == 256


def test_torchvision_names() -> None:
    names = set(resnet18().state_dict())
    assert {"layer2.0.downsample.0.weight", "layer4.1.bn2.running_var", "fc.bias"} <= names
    names = set(inception_v1().state_dict())
    assert {"conv1.conv.weight", "inception3a.branch1.bn.bias", "inception5b.branch4.1.conv.weight"} <= names
    assert "features.18.weight" in vgg11().state_dict()
    assert "features.25.weight" in vgg11_bn().state_dict()


@pytest.mark.parametrize("build", [resnet18, inception_v1])
def test_the_small_stem_keeps_the_resolution(build: type) -> None:
    model, seen = build(stem="cifar", classes=10).eval(), []
    first = model.layer1 if hasattr(model, "layer1") else model.inception3a
    first.register_forward_hook(lambda *call: seen.append(call[2].shape[-1]))
    with torch.inference_mode():
        assert model(inputs("")).shape == (2, 10)
    assert seen == [32]


def test_attention_agrees_with_torch() -> None:
    model = vit(depth=1, width=32, heads=4).eval()
    attention = model.blocks[0].attention
    reference = nn.MultiheadAttention(32, 4, batch_first=True)
    parts = [attention.query, attention.key, attention.value]
    reference.in_proj_weight.data = torch.cat([part.weight.data for part in parts])
    reference.in_proj_bias.data = torch.cat([part.bias.data for part in parts])
    reference.out_proj.load_state_dict(attention.project.state_dict())
    x = torch.rand(2, 5, 32)
    with torch.no_grad():
        torch.testing.assert_close(attention(x), reference(x, x, x)[0])


def test_a_vit_says_which_size_it_wants() -> None:
    with pytest.raises(ValueError, match="size=64"):
        vit(depth=1)(torch.rand(1, 3, 64, 64))


def test_same_padding_puts_the_odd_row_last() -> None:
    convolution = SameConv2d(1, 1, 3, 2, bias=False)
    nn.init.ones_(convolution.weight)
    x = torch.arange(16.0).view(1, 1, 4, 4)
    with torch.no_grad():
        y = convolution(x)
    assert y.shape == (1, 1, 2, 2)
    assert y[0, 0, 0, 0] == x[0, 0, :3, :3].sum()
    assert y[0, 0, 1, 1] == x[0, 0, 2:, 2:].sum()


def test_the_small_network_learns_in_a_few_steps() -> None:
    torch.manual_seed(0)
    model = small_cnn(classes=2, width=8)
    x = torch.rand(32, 1, 28, 28)
    y = torch.arange(32) % 2
    x[y == 1, :, :14] = 0
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.1
    assert [name for name, _ in model.named_children()][:4] == ["conv1", "relu1", "pool1", "conv2"]

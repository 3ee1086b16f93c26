"""A network without its activations: against the same network run plainly, and everything that cannot be linear."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosie.capture import NotLinear, as_found, check_linear, linearised, weighted_layers

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.PReLU, nn.Hardswish, nn.ReLU6, nn.ELU)


class Calls(nn.Module):
    """A function with layers, as a module."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def maps_of(model: nn.Module, x: Tensor, sites: object = None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(site: object, rows: Tensor, exponent: int) -> None:
        found[site.label] = rows * 2.0**exponent  # type: ignore[attr-defined]

    with as_found(model), linearised(model, weighted_layers(model) if sites is None else sites, keep) as run:
        run.run(x)
    return found


def plain(model: nn.Module) -> nn.Module:
    """The model in float64 with its activation modules replaced by the identity, and max pooling by the mean."""
    model = copy.deepcopy(model).double().eval()
    for module in model.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, ACTIVATIONS):
                setattr(module, name, nn.Identity())
            if isinstance(child, nn.MaxPool2d):
                pool = nn.AvgPool2d(
                    child.kernel_size, child.stride, child.padding, child.ceil_mode, count_include_pad=False
                )
                setattr(module, name, pool)
    return model


def residual(self: nn.Module, x: Tensor) -> Tensor:
    x = self.act(self.bn(self.stem(x)))
    y = self.body(x)
    shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), value=3.0)
    y += shortcut
    y = torch.cat([y, 2 * y - 1, torch.ones_like(y[:, :1])], dim=1)
    y = torch.where(torch.arange(17)[:, None, None] < 3, 1 - y, y - 0.3 * y.flip(1))
    return self.head(y.mean((2, 3))) / 7


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.Sigmoid()), (7,)),
    "conv, norm, pool": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="circular"), nn.BatchNorm2d(8), nn.GELU(),
            nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, groups=4, padding=1), nn.PReLU(8), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Dropout(), nn.Linear(32, 4),
        ),
        (3, 16, 16),
    ),
    "transposed, upsampled": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1), nn.Hardswish(), nn.Upsample(scale_factor=2),
            nn.PixelShuffle(2), nn.ReflectionPad2d(1), nn.Conv2d(1, 2, 3, dilation=2),
        ),
        (2, 5, 5),
    ),
    "residual": (
        lambda: Calls(
            residual, stem=nn.Conv2d(3, 4, 3, padding=1), bn=nn.BatchNorm2d(4), act=nn.ReLU(inplace=True),
            body=nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.SiLU()),
            head=nn.Linear(17, 4),
        ),
        (3, 8, 8),
    ),
    "one dimension": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.AvgPool1d(2), nn.Flatten()), (2, 9)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.ELU(), nn.Linear(4, 2)), (6,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_is_the_network_without_activations_and_biases(name: str) -> None:
    make, shape = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make()
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.2, 2)
        model.train()
        model(torch.randn(32, *shape))  # running statistics that are not 0 and 1
        x = torch.randn(5, *shape, dtype=torch.float64)
    reference = plain(model)
    with torch.no_grad():
        expected = reference(x) - reference(torch.zeros_like(x))
    found = maps_of(model, x)["output"]
    digits = 1e-5 if name == "weight norm" else 1e-9  # the model itself computes those weights, in float32
    torch.testing.assert_close(found, expected.flatten(1), rtol=digits, atol=digits * float(expected.abs().max()))


def test_sites_are_the_layers_with_weights_in_order() -> None:
    model = NETS["residual"][0]().eval()
    assert list(maps_of(model, torch.randn(2, 3, 8, 8))) == ["stem", "body.0", "head", "output"]


def test_the_model_is_left_as_found() -> None:
    model = NETS["residual"][0]().train()
    before = copy.deepcopy(model.state_dict())
    maps_of(model, torch.randn(2, 3, 8, 8))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_deep_chains_neither_overflow_nor_vanish(size: float) -> None:
    layers = [nn.Linear(4, 4).double() for _ in range(40)]
    for layer in layers:
        layer.weight.data = size * torch.eye(4, dtype=torch.float64)
    found = {}
    model = nn.Sequential(*layers)

    def keep(site: object, rows: Tensor, exponent: int) -> None:
        found["rows"], found["exponent"] = rows, exponent

    with linearised(model, ["."], keep) as run:
        run.run(torch.eye(4))
    rows, exponent = found["rows"], found["exponent"]
    assert torch.isfinite(rows).all()
    import math

    log = torch.log2(rows.diagonal()) + exponent
    torch.testing.assert_close(log, torch.full_like(log, 40 * math.log2(size)), rtol=1e-9, atol=0)


def attention(self: nn.Module, x: Tensor) -> Tensor:
    y = self.first(x)
    return self.second((y @ y.mT).softmax(-1) @ y)


NOT_LINEAR: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        (4,),
        r"site '2' .*layer_norm in '1' \(LayerNorm\)",
    ),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), (4,), r"softmax in '1' \(Softmax\)"),
    "attention": (
        lambda: Calls(attention, first=nn.Linear(4, 4), second=nn.Linear(4, 4)),
        (3, 4),
        "product of two tensors that both depend on the input",
    ),
    "a gate": (
        lambda: Calls(lambda s, x: s.a(x) * s.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
        (4,),
        "product of two",
    ),
    "batch statistics": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        (4,),
        r"statistics of the batch in '1' \(BatchNorm1d\)",
    ),
    "a branch": (
        lambda: Calls(lambda s, x: s.a(x) if x.sum() > 0 else x, a=nn.Linear(4, 4)),
        (4,),
        r"the model's own forward \(Calls\) decides by what it computes",
    ),
    "writing into a constant": (
        lambda: Calls(lambda s, x: torch.zeros(3, 4).copy_(s.a(x)), a=nn.Linear(4, 4)),
        (4,),
        "into a tensor that does not",
    ),
    "a size": (lambda: Calls(lambda s, x: s.a(x).abs(), a=nn.Linear(4, 4)), (4,), r"abs in the model's own forward"),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_is_named(name: str) -> None:
    make, shape, words = NOT_LINEAR[name]
    with pytest.raises(NotLinear, match=words):
        maps_of(make(), torch.randn(3, *shape))


def test_sites_before_what_is_not_linear_can_be_read() -> None:
    model = NOT_LINEAR["layer norm"][0]()
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(maps_of(model, x, ["0"])["0"], x @ model[0].weight.detach().double().T)  # type: ignore[index, union-attr, operator]


def test_mixing_the_inputs_of_a_batch_is_noticed() -> None:
    model = Calls(lambda s, x: s.a(x) - x.mean(0), a=nn.Linear(4, 4))
    x = torch.randn(2, 4, dtype=torch.float64)
    rows = maps_of(model, torch.cat([x, x[:1] + 2 * x[1:]]))["output"]
    with pytest.raises(NotLinear, match="mixed"):
        check_linear("output", rows)

"""Which site belongs to which: two implementations of one network, fused layers, heads in another order."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from diffed_nets import Decoder, OtherDecoder
from torch import nn

import sosie
from sosie.capture.calls import Seen
from sosie.diffing.pairing import by_numbers, pair_sites

TOKENS = torch.randint(50, (12, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def models() -> tuple[Decoder, OtherDecoder]:
    torch.manual_seed(0)
    a = Decoder().eval()
    for parameter in a.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return a, OtherDecoder(a).eval()


def test_another_implementation_is_the_same(models: tuple[Decoder, OtherDecoder]) -> None:
    a, b = models
    d = sosie.diff(a, b, TOKENS)
    assert d.same, d.verdict
    assert [(s.site_b, s.paired) for s in d.sites[:-1]] == [(f"h.{k}", "in order") for k in range(3)]
    d = sosie.diff(a, b, TOKENS, sites="leaves")
    assert d.same, d.verdict
    pairs = {s.site_a: (s.site_b, s.paired) for s in d.sites}
    assert pairs["layers.1.attn.o"] == ("h.1.mha.c_proj", "by their numbers")
    assert pairs["layers.2.down"][0] == "h.2.mlp.2"
    assert set(d.unpaired_b) == {f"h.{k}.{name}" for k in range(3) for name in ("mha.c_attn", "mlp.1")}


def test_a_fused_layer_is_noticed_and_said(models: tuple[Decoder, OtherDecoder]) -> None:
    a, b = models
    said = "h.0.mha.c_attn of B gives what layers.0.attn.q, layers.0.attn.k, layers.0.attn.v of A give, side by side"
    assert said in sosie.diff(a, b, TOKENS, sites="leaves").caveats
    assert said.replace("of B", "of A").replace("v of A", "v of B") in sosie.diff(b, a, TOKENS, sites="leaves").caveats


def test_the_module_with_the_fault_is_named_in_another_implementation(models: tuple[Decoder, OtherDecoder]) -> None:
    a, b = models
    for name, change in {"h.1.mha": b.h[1].mha.c_attn, "h.1.ln_2": b.h[1].ln_2}.items():
        wrong = copy.deepcopy(b)
        module = wrong.get_submodule(next(n for n, m in b.named_modules() if m is change))
        module.weight.data[5] *= 1.3
        d = sosie.diff(a, wrong, TOKENS)
        assert (d.same, d.first) == (False, name), d.verdict
    b.h[1].mlp[2].weight.data[5] *= 1.3
    assert sosie.diff(a, b, TOKENS, sites="leaves").first == "h.1.mlp.2"


def test_heads_in_another_order_are_no_difference(models: tuple[Decoder, OtherDecoder]) -> None:
    a, _ = models
    b = copy.deepcopy(a)
    order = (torch.tensor([2, 0, 3, 1])[:, None] * 6 + torch.arange(6)).flatten()
    for layer in b.layers:
        for part in (layer.attn.q, layer.attn.k, layer.attn.v):
            part.weight.data, part.bias.data = part.weight.data[order], part.bias.data[order]
        layer.attn.o.weight.data = layer.attn.o.weight.data[:, order]
    assert sosie.diff(a, b, TOKENS).same
    d = sosie.diff(a, b, TOKENS, sites="leaves")
    assert d.same, d.verdict
    assert "features in another order" in next(s for s in d.sites if s.site_a == "layers.0.attn.q").notes


def seen(*sites: tuple[str, float]) -> list[Seen]:
    """Sites of one shape that give the same noise, some of it (the number) replaced by noise of their own."""
    common, own = torch.randn(2, 4, 99, generator=torch.Generator().manual_seed(0))
    result = []
    for name, share in sites:
        own = own.roll(7, 1)
        x = common + share * own
        result.append(Seen(name, tuple(x.shape), x.dtype, x))
    return result


def test_what_comes_nearly_as_near_is_not_taken() -> None:
    a = seen(("x", 0.0))
    assert [(x.label, y.label) for x, y in by_numbers(a, seen(("far", 1.0), ("near", 0.02)))] == [("x", "near")]
    assert not by_numbers(a, seen(("other", 0.06), ("near", 0.02)))
    assert not by_numbers(a, seen(("far", 1.0), ("not near", 0.2)))
    with pytest.raises(
        ValueError, match=r"not clear which sites belong together: x .* of A and other .*, near .* of B"
    ):
        pair_sites(a, seen(("other", 0.06), ("near", 0.02)))


def test_equal_numbers_are_taken_in_order() -> None:
    a, b = seen(("one", 0.0), ("two", 0.0)), seen(("first", 0.0), ("second", 0.0), ("third", 0.0))
    assert [(x.label, y.label) for x, y in by_numbers(a, b)] == [("one", "first"), ("two", "second")]


def test_wholly_other_layers_are_not_paired() -> None:
    a = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    b = nn.Sequential()
    for name, module in {"p": nn.Linear(6, 6), "q": nn.Linear(6, 3)}.items():
        b.add_module(name, module)
    with pytest.raises(ValueError, match="which sites belong together"):
        sosie.diff(a.eval(), b.eval(), torch.rand(9, 6), sites="leaves")


class Plain(nn.Module):
    """Its layers give what they give before the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(x).relu()).relu())


class WithActivation(nn.Module):
    """The same network; its blocks give what they give after the activation."""

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        first, second = (nn.Sequential(copy.deepcopy(layer), nn.ReLU()) for layer in (plain.one, plain.two))
        self.first, self.second, self.last = first, second, copy.deepcopy(plain.head)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(vectors)))


def test_sites_of_one_place_and_shape_that_are_other_tensors_are_no_difference() -> None:
    torch.manual_seed(0)
    plain, x = Plain().eval(), torch.randn(20, 6)
    d = sosie.diff(plain, WithActivation(plain).eval(), x)
    assert d.same, d.verdict
    assert [site.site_b for site in d.sites] == ["first.0", "second.0", "last", "output"]
    d = sosie.diff(plain, WithActivation(plain).eval(), x, sites_b=["first", "second", "last"])
    assert d.same
    assert [site.site_b for site in d.sites] == ["last", "output"]
    assert any("one and first" in caveat and "not compared" in caveat for caveat in d.caveats)
    other = copy.deepcopy(plain)
    other.two.weight.data *= 1.01
    assert not sosie.diff(plain, WithActivation(other).eval(), x, sites_b=["first", "second", "last"]).same


def test_sites_of_one_place_and_shape_count_where_the_outputs_differ() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 6)
    d = sosie.diff(Plain().eval(), WithActivation(Plain()).eval(), x, sites_b=["first", "second", "last"])
    assert not d.same
    assert any("compared all the same" in caveat for caveat in d.caveats)


def test_each_model_takes_arguments_of_its_own() -> None:
    torch.manual_seed(0)
    plain = Plain().eval()
    data = [{"pixels": torch.randn(20, 6)}]
    d = sosie.diff(
        plain, WithActivation(plain).eval(), data,
        inputs_a=lambda batch: {"x": batch["pixels"]}, inputs_b=lambda batch: {"vectors": batch["pixels"]},
    )  # fmt: skip
    assert d.same, d.verdict


class Holds(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


def test_torchscript_inside_a_module_is_compared_at_the_output() -> None:
    torch.manual_seed(0)
    plain, x = Plain().eval(), torch.randn(20, 6)
    d = sosie.diff(Holds(torch.jit.script(plain)).eval(), plain, x)
    assert d.same, d.verdict
    assert [site.site_a for site in d.sites] == ["output"]
    assert any("TorchScript" in caveat for caveat in d.caveats)
    assert not sosie.diff(plain, Holds(torch.jit.script(Plain())).eval(), x).same


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 4)
        for norm in (self.bn1, self.bn2):
            nn.init.uniform_(norm.weight, 0.3, 3)
            nn.init.uniform_(norm.running_var, 0.3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.bn1(self.conv1(x)))
        return self.linear(self.bn2(self.conv2(x)).mean((2, 3)))


def test_quantised_layers_that_are_fused_are_held_against_what_they_replace() -> None:
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx", reason="this torch has no torch.ao")
    from torch.ao.quantization import get_default_qconfig_mapping

    torch.manual_seed(0)
    model, x = WithNorm().eval(), torch.randn(32, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = quantize_fx.prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
        prepared(x)
        quantised = quantize_fx.convert_fx(prepared)
    d = sosie.diff({"float": model, "int8": quantised}, x)
    assert not d.same
    pairs = {site.site_b: site for site in d.sites}
    assert "conv1" not in pairs  # it gives what follows the activation, which is no module in A
    assert pairs["conv2"].site_a == "bn2"
    assert pairs["conv2"].error < 0.1
    assert pairs["conv2"].made is None
    assert d.first == "output"
    assert "fused" in d.verdict


def test_layers_that_torch_fx_fuses_are_held_against_what_they_replace() -> None:
    from torch.fx.experimental.optimization import fuse

    torch.manual_seed(0)
    model, x = WithNorm().eval(), torch.randn(32, 3, 8, 8)
    d = sosie.diff(model, fuse(copy.deepcopy(model)), x)
    assert d.same, d.verdict
    assert [(site.site_a, site.site_b) for site in d.sites][:2] == [("bn1", "conv1"), ("bn2", "conv2")]
    wrong = copy.deepcopy(model)
    wrong.bn2.eps = 0.01
    assert not sosie.diff(model, fuse(wrong), x).same
    wrong = fuse(copy.deepcopy(model))
    wrong.linear.weight.data.mul_(1.01)
    assert sosie.diff(model, wrong, x).first == "linear"

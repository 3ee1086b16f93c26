"""Whether two models are the same, and which module makes the error: harmless changes, and faults."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffed_nets import Net, Residual, decoder, edited, images, jiggled, padded_tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

import sosie

A = jiggled(Net())
X = images()


def same(b: nn.Module, a: nn.Module = A, data: Any = X, **options: Any) -> sosie.results.Diff:
    d = sosie.diff(a, b, data, **options)
    assert d.same, d.verdict
    assert d.first is None
    return d


def first(b: nn.Module, a: nn.Module = A, data: Any = X, **options: Any) -> str | None:
    d = sosie.diff(a, b, data, **options)
    assert not d.same, d.verdict
    return d.first


# Harmless changes


def test_a_twin_is_the_same_bit_for_bit() -> None:
    d = same(copy.deepcopy(A))
    assert d.verdict == "The same, bit for bit, at all 4 sites."
    assert [site.site_a for site in d.sites] == ["block1", "block2", "block3", "output"]
    assert all(site.error == 0 and site.floor > 1e-7 and site.inputs == len(X) for site in d.sites)


def fused(b: Net) -> None:
    for block in (b.block1, b.block2, b.block3):
        block.conv, block.bn = fuse_conv_bn_eval(block.conv, block.bn), nn.Identity()


def test_fused_layers_and_other_layouts() -> None:
    same(edited(A, lambda b: b.to(memory_format=torch.channels_last)))
    same(edited(A, fused))
    d = same(edited(A, fused), sites="leaves")
    assert "later layers undo" in d.verdict
    assert [site.site_a for site in d.sites if site.beyond] == ["block1.conv", "block2.conv", "block3.conv"]


def test_other_batches_wrappers_and_types() -> None:
    same(copy.deepcopy(A), data=[X[:5], X[5:]])
    same(nn.DataParallel(copy.deepcopy(A)))
    same(torch.compile(copy.deepcopy(A), backend="aot_eager"))
    d = same(edited(A, nn.Module.bfloat16), floor="bfloat16")
    assert d.verdict == "The same up to bfloat16 rounding at all 4 sites."
    assert "inputs are cast" in d.caveats[0]
    same(edited(A, nn.Module.bfloat16))
    same(edited(A, nn.Module.double))
    assert first(edited(A, nn.Module.bfloat16), floor=1e-4) == "stem"


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Renamed(nn.Module):
    def __init__(self, a: Net) -> None:
        super().__init__()
        a = copy.deepcopy(a)
        self.first, self.layers, self.last = a.stem, nn.ModuleList([a.block1, a.block2, a.block3]), a.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean((2, 3)))


def test_other_names() -> None:
    assert {site.paired for site in same(Wrapped(A)).sites[:-1]} == {"by name without a prefix"}
    d = same(Renamed(A))
    assert [(site.site_b, site.paired) for site in d.sites[:2]] == [("layers.0", "in order"), ("layers.1", "in order")]
    d = same(Renamed(A), map={"block1": "layers.0", "block2": "layers.1", "block3": "layers.2"})
    assert {site.paired for site in d.sites[:-1]} == {"by the map"}
    assert first(edited(Renamed(A), lambda b: b.layers[1].conv.weight.data.mul_(1.01))) == "layers.1.conv"


class ChannelsLast(nn.Module):
    """A network of blocks that take and give (inputs, height, width, channels)."""

    class Block(nn.Module):
        def __init__(self, block: Residual) -> None:
            super().__init__()
            self.inner = copy.deepcopy(block)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def __init__(self, a: Net) -> None:
        super().__init__()
        self.stem, self.head = copy.deepcopy(a.stem), copy.deepcopy(a.head)
        self.block1, self.block2, self.block3 = map(self.Block, (a.block1, a.block2, a.block3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu().permute(0, 2, 3, 1)
        return self.head(self.block3(self.block2(self.block1(x))).mean((1, 2)))


def test_axes_in_another_order_are_no_difference() -> None:
    d = same(ChannelsLast(A))
    assert d.sites[0].paired == "by name, B's axes in the order [0, 3, 1, 2]"
    assert d.sites[1].made == 0
    wrong = edited(ChannelsLast(A), lambda b: b.block2.inner.bn.bias.data.add_(0.01))
    assert str(first(wrong)).startswith("block2")


def test_channels_in_another_order_are_no_difference() -> None:
    def shuffled(b: Net) -> None:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
        b.stem.weight.data, b.stem.bias.data = b.stem.weight.data[order], b.stem.bias.data[order]
        b.block1.conv.weight.data = b.block1.conv.weight.data[:, order]
        b.block1.skip.weight.data = b.block1.skip.weight.data[:, order]

    d = same(edited(A, shuffled), sites="leaves")
    assert "features in another order" in d.sites[0].notes


@pytest.mark.parametrize("pad", ["right", "left"])
def test_another_attention_kernel(pad: str) -> None:
    tokens = padded_tokens(left=pad == "left")
    for name in ("llama", "gpt2", "bert"):
        eager, fast = decoder(name, "eager"), decoder(name, "sdpa")
        same(fast, eager, tokens)
        same(eager, fast, tokens)


def test_no_cache_and_lower_precision_of_a_decoder() -> None:
    a = decoder("llama", "sdpa")
    same(edited(a, lambda b: setattr(b.config, "use_cache", False)), a, padded_tokens())
    same(edited(decoder("llama", "eager"), nn.Module.bfloat16), a, padded_tokens(), floor="bfloat16")


# Faults


def transposed(b: Net) -> None:
    b.block2.conv.weight.data = b.block2.conv.weight.data.transpose(0, 1).contiguous()


def dropped_residual(b: Net) -> None:
    def forward(self: Residual, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu()

    b.block2.forward = types.MethodType(forward, b.block2)


def scaled_answer(b: Net) -> None:
    b.forward = types.MethodType(lambda self, x: 1.02 * Net.forward(self, x), b)


def skipped_in_forward(b: Net) -> None:
    b.block2.forward = lambda x: x


FAULTS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "transposed weight": (transposed, "block2.conv"),
    "eps": (lambda b: setattr(b.block2.bn, "eps", 3e-5), "block2.bn"),
    "batch norm in training mode": (lambda b: b.block2.bn.train(), "block2.bn"),
    "stale statistics": (lambda b: b.block1.bn.running_var.mul_(1.01), "block1.bn"),
    "missing bias": (lambda b: b.stem.bias.data.zero_(), "stem"),
    "skipped layer": (lambda b: setattr(b, "block2", nn.Identity()), "block2"),
    "skipped in its forward": (skipped_in_forward, "block2"),
    "another layer's weights": (lambda b: setattr(b, "block2", b.block3), "block2"),
    "stride": (lambda b: setattr(b.stem, "stride", (2, 2)), "stem"),
    "dropped residual": (dropped_residual, "block2"),
    "scaled answer": (scaled_answer, "output"),
    "head": (lambda b: b.head.weight.data.mul_(1.0005), "head"),
    "NaN": (lambda b: b.block3.conv.weight.data[1, 0].fill_(torch.nan), "block3.conv"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_module_with_the_fault_is_named(fault: str) -> None:
    change, module = FAULTS[fault]
    assert first(edited(A, change)) == module


def test_the_verdict_says_who_makes_the_error() -> None:
    d = sosie.diff(A, edited(A, transposed), X)
    assert d.verdict.startswith("Different from block2 on: block2.conv makes an error of ")
    by_site = {site.site_a: site for site in d.sites}
    assert by_site["block2.conv"].inside == "block2"
    assert by_site["block3"].beyond
    assert by_site["block3"].made == pytest.approx(0, abs=1e-6)
    d = sosie.diff(A, edited(A, dropped_residual), X)
    assert d.verdict.endswith("in its own forward, after its last layer.")
    d = sosie.diff(A, edited(A, scaled_answer), X)
    assert "nothing inside makes it; the model's own forward makes an error of 0.02" in d.verdict
    assert "scaled by 1.02" in d.sites[-1].notes

    def two(b: Net) -> None:
        transposed(b)
        b.block3.bn.eps = 1e-2

    assert sosie.diff(A, edited(A, two), X).verdict.endswith("; errors of their own: block3.bn.")


def test_a_model_that_gives_nan_alone_is_said_to_be_compared_with_nothing() -> None:
    lost = edited(A, lambda b: b.head.bias.data.fill_(torch.nan))
    d = sosie.diff(lost, copy.deepcopy(lost), X)
    assert "no number is compared at output: all are NaN or infinite in both models alike" in d.caveats
    assert not any("no number" in caveat for caveat in sosie.diff(A, A, X).caveats)


def test_nan_is_named_with_its_place() -> None:
    class Cleaned(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.nan_to_num())

    a = Cleaned()
    a.load_state_dict(A.state_dict())
    x = X.clone()
    x[13] = torch.nan
    d = sosie.diff(a.eval(), A, x)
    assert not d.same
    assert d.sites[0].at is not None
    assert d.sites[0].at.input == 13
    assert "in one model alone" in d.sites[0].notes[0]
    broken = edited(A, FAULTS["NaN"][0])
    both = same(copy.deepcopy(broken), broken)
    assert "in both models alike" in both.sites[2].notes[0]


def test_inputs_prepared_otherwise() -> None:
    d = sosie.diff(A, copy.deepcopy(A), X, prepare_b=lambda x: x.flip(1))
    assert (d.same, d.first) == (False, "input")
    assert "the models are given different inputs" in d.verdict


def test_token_ids_that_are_near_each_other_are_other_inputs() -> None:
    """Which rounding does not explain, in bfloat16 either."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9000, 4), nn.Linear(4, 4)).bfloat16().eval()
    ids = torch.randint(8000, 9000, (16, 5))
    d = sosie.diff(model, copy.deepcopy(model), ids, inputs_b=lambda x: x + (torch.arange(5) == 4))
    assert (d.same, d.first) == (False, "input")


class Turned(nn.Module):
    """Rotates pairs of features by complex numbers, as the first code of Llama does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.before(x).view(-1, 4, 2))
        return self.after(torch.view_as_real(pairs * self.turns).flatten(1))


def test_complex_numbers_keep_their_imaginary_part_in_the_floor() -> None:
    torch.manual_seed(0)
    model = Turned().eval()
    d = sosie.diff(model, edited(model, lambda b: b.turns.mul_(1.001)), torch.rand(64, 8))
    assert not d.same
    assert all(site.floor is not None and site.floor < 1e-6 for site in d.sites)


def with_rotary(model: Any) -> Any:
    if not hasattr(model.model, "rotary_emb"):
        pytest.skip("in this transformers each layer has rotary positions of its own")
    return model


def test_faults_of_decoders() -> None:
    a, tokens = with_rotary(decoder("llama", "sdpa")), padded_tokens(left=True)
    layer = "model.layers.1"

    def swapped(b: nn.Module) -> None:
        attention = b.model.layers[1].self_attn
        attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj

    def mask_ignored(b: nn.Module) -> None:
        attention = b.model.layers[1].self_attn
        forward = attention.forward
        attention.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": None})

    faults: dict[str, Callable[[Any], Any]] = {
        f"{layer}.self_attn.k_proj": swapped,
        f"{layer}.self_attn": lambda b: setattr(b.model.layers[1].self_attn, "scaling", 0.36),
        f"{layer}.post_attention_layernorm": lambda b: setattr(
            b.model.layers[1].post_attention_layernorm, "variance_epsilon", 1e-5
        ),
        "model.rotary_emb": lambda b: b.model.rotary_emb.inv_freq.mul_(0.99),
        f"{layer}.mlp.act_fn": lambda b: setattr(b.model.layers[1].mlp, "act_fn", nn.GELU()),
        "lm_head": lambda b: setattr(b.lm_head, "weight", nn.Parameter(b.lm_head.weight.roll(1, 0))),
    }
    for module, change in faults.items():
        assert first(edited(a, change), a, tokens) == module
    assert first(edited(a, mask_ignored), a, tokens) == f"{layer}.self_attn"
    assert first(edited(a, faults[f"{layer}.self_attn"]), decoder("llama", "eager"), tokens) == f"{layer}.self_attn"


def test_positions_off_by_one() -> None:
    a, tokens = decoder("gpt2", "sdpa"), padded_tokens()

    def in_the_embedding(b: Any) -> None:
        forward = b.transformer.wpe.forward
        b.transformer.wpe.forward = lambda positions: forward(positions + 1)

    def in_the_forward(b: Any) -> None:
        forward = b.transformer.forward

        def shifted(input_ids: Tensor, **kwargs: Any) -> Any:
            return forward(input_ids, **{**kwargs, "position_ids": torch.arange(1, input_ids.shape[1] + 1)[None]})

        b.transformer.forward = shifted

    assert first(edited(a, in_the_embedding), a, tokens) == "transformer.wpe"
    d = sosie.diff(a, edited(a, in_the_forward), tokens)
    assert d.first == "transformer"
    assert "in its own forward, before transformer.wpe" in d.verdict


def test_zeros_in_a_are_said() -> None:
    a = edited(A, lambda b: (b.head.weight.data.zero_(), b.head.bias.data.zero_()))
    d = sosie.diff(a, A, X)
    assert (d.same, d.first) == (False, "head")
    assert "or where A gives zeros" in d.verdict
    assert "zero in A" in d.sites[-1].notes


def test_the_verdict_says_from_where_on_even_if_the_code_before_a_part_is_wrong() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Scaling(1.0) for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)

    class Scaling(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(3, 3, 3, padding=1), scale

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x * self.scale)

    a = jiggled(Scaled())
    d = sosie.diff(a, edited(a, lambda b: setattr(b.blocks[1], "scale", 1.1)), X)
    assert d.verdict.startswith("Different from blocks.1 on: blocks.1 makes an error of ")
    assert d.verdict.endswith("in its own forward, before blocks.1.conv.")


def test_a_layer_that_is_called_output_is_not_taken_for_the_model() -> None:
    class Net2(Net):
        def __init__(self) -> None:
            super().__init__()
            self.output, self.scale = nn.Linear(5, 4), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.output(super().forward(x)) * self.scale

    a = jiggled(Net2())
    for sites in (None, "leaves", ["block1", "output"]):
        assert same(copy.deepcopy(a), a, sites=sites).sites[-1].site_a == "output"
        d = sosie.diff(a, edited(a, lambda b: setattr(b, "scale", 1.02)), X, sites=sites)
        assert (d.same, d.first) == (False, "output"), d.verdict
        assert "the model's own forward makes an error of 0.02, after its last layer" in d.verdict
        assert first(edited(a, lambda b: b.output.weight.data.mul_(1.1)), a, sites=sites) == "output@1"


def test_a_cache_that_layers_append_to_stays_the_models_own() -> None:
    """That of transformers 4.40 is a dataclass without fields; a copy of it in one layer would lack the next one's."""

    @dataclass
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    class Layer(nn.Linear):
        def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:  # type: ignore[override]
            cache.keys.append(x)
            return super().forward(cache.keys[self.index]), cache

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(6, 6) for _ in range(3))
            for index, layer in enumerate(self.layers):
                layer.index = index

        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            for layer in self.layers:
                x, _ = layer(x, cache)
            return x

    a = Decoder()
    x = torch.rand(32, 6)
    same(copy.deepcopy(a), a, x)
    assert first(edited(a, lambda b: b.layers[1].weight.data.mul_(1.1)), a, x) == "layers.1"


def test_what_a_module_does_not_mind_is_no_difference() -> None:
    """Attention sees differences of rotary positions alone."""
    a = with_rotary(decoder("llama", "sdpa"))
    b = copy.deepcopy(a)
    rotary, forward = b.model.rotary_emb, b.model.rotary_emb.forward  # type: ignore[union-attr]
    rotary.forward = lambda x, position_ids: forward(x, position_ids + 5)  # type: ignore[method-assign, union-attr]
    d = same(b, a, padded_tokens())
    assert d.verdict == "The same up to float32 rounding at all 4 sites."
    rotary.forward = lambda x, position_ids: forward(x, position_ids * 2)  # type: ignore[method-assign, union-attr]
    assert first(b, a, padded_tokens()) == "model.rotary_emb"


def test_a_module_that_is_called_several_times() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.mix(x).tanh()
            return self.out(x)

    a, x = Recurrent(), torch.rand(9, 6)
    d = sosie.diff(a, edited(a, lambda b: b.mix.bias.data.add_(0.1)), x)
    assert [site.site_a for site in d.sites] == ["mix", "mix@2", "mix@3", "out", "output"]
    assert d.first == "mix"
    assert d.sites[3].made == pytest.approx(0, abs=1e-6)


def wrong(graph: Any, examples: Any) -> Callable[..., Any]:
    """A compiler that makes a mistake."""
    return lambda *given: [1.01 * y for y in graph(*given)]


def test_compiled_code_is_run() -> None:
    def compiled_block(b: Any) -> None:
        b.block2.compile(backend=wrong)

    compiled: nn.Module = torch.compile(copy.deepcopy(A), backend=wrong)  # type: ignore[assignment]
    for a, b in ((A, compiled), (A, edited(A, compiled_block)), (compiled, A)):
        torch.compiler.reset()
        d = sosie.diff(a, b, X)
        assert (d.same, d.first) == (False, "output")
        assert not any(site.beyond for site in d.sites[:-1])
    assert "the compiled code of OptimizedModule makes it" in sosie.diff(A, compiled, X).verdict
    torch.compiler.reset()
    # What it was compiled from is wrong: that is named.
    assert first(torch.compile(edited(A, transposed), backend="eager")) == "block2.conv"


# The floor


def test_the_floor_is_measured() -> None:
    b = edited(A, lambda b: b.head.weight.data.mul_(1.0001))
    assert first(b) == "head"
    d = same(b, floor=1e-3)
    assert (d.factor, d.floor) == (1, "a relative error of 0.001, as given")
    same(b, floor=edited(A, lambda b: b.head.weight.data.mul_(0.9998)))
    twin = sosie.diff(A, copy.deepcopy(A), X)
    assert twin.floor == "A with half as many inputs at a time; A in float64"
    assert all(1.1e-7 < site.floor < 1e-5 for site in twin.sites if site.floor is not None)
    coarse = sosie.diff(A, copy.deepcopy(A), X, floor="bfloat16")
    assert all(1e-3 < site.floor < 0.1 for site in coarse.sites if site.floor is not None)


def test_a_model_without_a_copy_has_a_floor_too() -> None:
    class Typed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    a = Typed()
    a.load_state_dict(A.state_dict())
    d = same(copy.deepcopy(a.eval()), a)
    assert d.floor == "A with half as many inputs at a time"
    assert any("the floor lacks A in float64, which does not run" in caveat for caveat in d.caveats)
    d = same(copy.deepcopy(A), memory="5kB")
    assert any("a copy in float64 takes" in caveat for caveat in d.caveats)


def test_models_that_mix_inputs_or_draw_numbers_have_the_floor_of_rounding() -> None:
    class Drawing(Net):
        def __init__(self, own: bool) -> None:
            super().__init__()
            self.random = torch.Generator() if own else None

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + torch.randn(x.shape, dtype=x.dtype, generator=self.random)

    mixing = edited(A, lambda b: setattr(b.block2, "bn", nn.BatchNorm2d(8, track_running_stats=False)))
    batches = [X[:12], X[12:]]
    for a, words in ((mixing, "mixes the inputs of a batch"), (jiggled(Drawing(False)), "draws random numbers")):
        d = same(copy.deepcopy(a), a, batches)
        assert any(words in caveat and "the floor leaves this out" in caveat for caveat in d.caveats)
        assert first(edited(a, lambda b: b.head.weight.data.mul_(1.01)), a, batches) == "head"
    a = jiggled(Drawing(True))
    assert same(copy.deepcopy(a), a, batches).verdict.startswith("The same, bit for bit")


def test_both_models_run_under_the_callers_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(copy.deepcopy(A)).verdict.startswith("The same, bit for bit")
        near = edited(A, lambda b: b.head.weight.data.mul_(1.001))
        assert same(near).verdict.startswith("The same up to bfloat16 rounding")
        assert first(edited(A, transposed)) == "block2.conv"


def test_the_floor_of_threads_is_one_against_several() -> None:
    class Threads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1e-4 * torch.get_num_threads()

    a, before = jiggled(Threads()), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        d = same(copy.deepcopy(a), a)
    finally:
        torch.set_num_threads(before)
    floor = d.sites[-1].floor
    assert floor is not None
    assert floor > 1e-5


def test_numbers_for_all_inputs_together_are_no_floor() -> None:
    class Loss(Net):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean() * self.scale

    a = jiggled(Loss(1.0))
    same(copy.deepcopy(a), a)
    assert first(jiggled(Loss(1.001)), a) == "output"


# As found


def test_models_and_random_state_stay_as_found() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.log: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.log.append(len(x))
            return super().forward(F.dropout(x)) * self.seen

    a, b = jiggled(Counting()).train(), jiggled(Counting()).train()
    weights = copy.deepcopy(a.state_dict())
    torch.manual_seed(3)
    state, x = torch.get_rng_state(), X.clone()
    same(b, a, [X[:4], X[4:]])
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, X)
    for model in (a, b):
        assert model.training
        assert not model.log
        assert all(torch.equal(now, weights[name]) for name, now in model.state_dict().items())
        hooks = [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
        assert not hooks


def test_errors_leave_models_as_found() -> None:
    a = copy.deepcopy(A).train()
    with pytest.raises(RuntimeError):
        sosie.diff(a, copy.deepcopy(a), torch.rand(4, 5))
    assert a.training
    assert not [h for m in a.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_layers_work_in_place() -> None:
    class InPlace(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu_()
            for block in (self.block1, self.block2, self.block3):
                x = block(x)
                x += 1
            return self.head(x.mean((2, 3)))

    a = jiggled(InPlace())
    same(copy.deepcopy(a), a)
    assert first(edited(a, transposed), a) == "block2.conv"


def test_outputs_of_any_kind() -> None:
    lstm = nn.LSTM(4, 6, 2, batch_first=True)
    x = torch.rand(10, 5, 4)
    same(copy.deepcopy(lstm), lstm, x)
    assert first(edited(lstm, lambda b: b.weight_hh_l1.data.mul_(1.01)), lstm, x) == "output"

    class Classes(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(1)

    a = jiggled(Classes())
    same(copy.deepcopy(a), a)
    assert first(edited(a, transposed), a) == "block2.conv"
    script = torch.jit.trace(A, X)
    assert same(script).verdict == "The same, bit for bit, at all 4 sites."


class Answers(Net):
    """The answer of a network beside what `beside` makes of it."""

    def __init__(self, beside: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> Any:
        return self.beside(super().forward(x))


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        (lambda y: (y, y.argmax(1)), lambda y: (y, y.argmax(1) + 1)),
        (lambda y: (y, y > 0), lambda y: (y, y < 0)),
        (lambda y: {"y": y, "z": y[:, :2]}, lambda y: {"y": y, "z": y[:, :3]}),
        (lambda y: (y, 1.0), lambda y: (y, 2.0)),
        (lambda y: (y, "a"), lambda y: (y, "b")),
        (lambda y: (y, y.numpy()), lambda y: (y, 2 * y.numpy())),
        (lambda y: SimpleNamespace(a=y, b=y), lambda y: SimpleNamespace(a=y, b=2 * y)),
    ],
)
def test_answers_beside_the_first_count(of_a: Any, of_b: Any) -> None:
    a, b = jiggled(Answers(of_a)), jiggled(Answers(of_b))
    same(copy.deepcopy(a), a)
    d = sosie.diff(a, b, X)
    assert not d.same
    assert d.sites[-1].error == 0
    assert d.sites[-1].notes[0].startswith("other tensors that it returns differ")


def test_answers_of_one_model_alone_are_told() -> None:
    d = same(jiggled(Answers(lambda y: (y, y, y))), jiggled(Answers(lambda y: (y, y))))
    assert d.caveats == ("answers that one model alone gives are not compared: 2 of B",)


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        (lambda y: y.numpy(), lambda y: 2 * y.numpy()),
        (lambda y: ["a text"] * len(y), lambda y: ["a test"] * len(y)),
        (lambda y: y, lambda y: None),
        (lambda y: y.sum(), lambda y: 2 * y.sum()),
        (lambda y: y.to(torch.float8_e4m3fn), lambda y: (2 * y).to(torch.float8_e4m3fn)),
    ],
)
def test_answers_that_are_no_tensors_are_compared(of_a: Any, of_b: Any) -> None:
    a, b = jiggled(Answers(of_a)), jiggled(Answers(of_b))
    same(copy.deepcopy(a), a)
    d = sosie.diff(a, b, X)
    assert not d.same
    assert d.sites[-1].site_a == "output"


def test_answers_in_which_nothing_is_found_are_told() -> None:
    d = same(jiggled(Answers(lambda y: None)), jiggled(Answers(lambda y: None)))
    assert d.verdict == "The same, bit for bit, at all 3 sites."
    assert d.caveats == ("the answers are not compared: no numbers, tensors or text are found in NoneType",)
    with pytest.raises(TypeError, match="nested tensor"):
        sosie.diff(*[jiggled(Answers(lambda y: torch.nested.nested_tensor(list(y))))] * 2, X)

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    with pytest.raises((TypeError, ValueError), match=r"no site|nothing can be compared"):
        sosie.diff(Nothing(), Nothing(), X)


def test_answers_without_numbers_or_dense_numbers() -> None:
    for answer in (lambda y: None, lambda y: ["a text"] * len(y), lambda y: y.to_sparse()):
        a = jiggled(Answers(answer))
        same(copy.deepcopy(a), a)
        assert first(edited(a, transposed), a) == "block2.conv"


def test_a_layer_that_is_called_less_often_in_b() -> None:
    class Twice(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.one, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
            self.other = self.one if tied else nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.other(self.one(x).tanh()))

    a, b, x = jiggled(Twice(True)), jiggled(Twice(False)), torch.rand(9, 6)
    b.load_state_dict({**a.state_dict(), "other.weight": a.one.weight, "other.bias": a.one.bias})
    assert [site.site_a for site in same(b, a, x).sites] == ["one", "out", "output"]
    assert first(edited(b, lambda b: b.other.bias.data.add_(0.1)), a, x) is not None


def test_quantised_layers() -> None:
    quantised = torch.ao.quantization.quantize_dynamic(A, {nn.Linear})
    d = sosie.diff(A, quantised, X)
    assert (d.first, d.caveats) == ("head", ())
    assert same(quantised, quantised).verdict.startswith("The same, bit for bit")
    assert sosie.compare(A, quantised, X, sites=["block3", "head"]).sites_b == ["block3", "head"]
    plain = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), {nn.Linear})
    assert sosie.compare(plain, A, X).sites_a == ["1"]


def test_numbers_beyond_squares_are_not_equal() -> None:
    def scaled(scale: float) -> nn.Module:
        return edited(copy.deepcopy(A).double(), lambda b: [p.data.mul_(scale) for p in b.head.parameters()])

    for scale in (1e-200, 1e200):
        assert not sosie.diff(scaled(scale), scaled(2 * scale), X.double()).same


# Bad input


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="needs data to run models on, the third argument"):
        sosie.diff(A, A)
    with pytest.raises(TypeError, match="no folder or file nowhere, nothing, whose weights"):
        sosie.diff("nowhere", "nothing")
    with pytest.raises(ValueError, match=r"floor must be one of.*did you mean 'bfloat16'"):
        sosie.diff(A, A, X, floor="bf16")
    with pytest.raises(ValueError, match=r"names 'layers\.9', which is not a site of B"):
        sosie.diff(A, Renamed(A), X, map={"block1": "layers.9"})
    other = nn.Sequential(nn.Flatten(), nn.Linear(192, 7), nn.Tanh(), nn.Linear(7, 5))
    with pytest.raises(ValueError, match=r"no site of A has a counterpart in B.*block1 \[8, 8, 8\].*map="):
        sosie.diff(A, other, X)


def test_tokens_that_are_all_padding_show_nothing() -> None:
    class Tokens(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.embed, self.scale = nn.Embedding(9, 4), scale

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.scale * self.embed(input_ids)

    ids = torch.arange(8).view(2, 4)
    with pytest.raises(ValueError, match="every token as padding"):
        sosie.diff(Tokens(1.0), Tokens(2.0), [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}])


def test_an_ambiguous_pairing_lists_the_candidates() -> None:
    fewer = jiggled(Renamed(Net()))
    fewer.layers = nn.ModuleList(fewer.layers[k] for k in (2, 1))
    with pytest.raises(ValueError, match=r"not clear which sites belong together: block1 .* of A and layers\.0"):
        sosie.diff(A, fewer, X)
    del (shorter := copy.deepcopy(A)).block3
    shorter.block3 = nn.Identity()
    assert first(shorter) == "block3"


def test_a_result_reads_back(tmp_path: Any) -> None:
    d = sosie.diff(A, edited(A, FAULTS["NaN"][0]), X)
    back = sosie.load(d.save(tmp_path / "d.json"))
    assert repr(back.sites[2:]) == repr(d.sites[2:])
    assert (back.verdict, back.first) == (d.verdict, d.first)

import pytest
import torch
from stand_ins import Bert, ResNet20
from torch import nn

from sosie.capture import NoRows, to_rows, watch


def layouts(model, x, sites="leaves"):
    with torch.no_grad(), watch(model.eval(), sites, sink=lambda site, a: None) as seen:
        model(x)
    return {site.label: (site.shape, site.channels_last) for site in seen.sites}


class Permuted(nn.Module):
    """A block that works on NHWC inside and returns NCHW, as ConvNeXt's does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, 1, 1), nn.LayerNorm(4)
        self.up, self.act, self.down = nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)

    def forward(self, x):
        inside = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.down(self.act(self.up(inside))).permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    """Normalises the channels of an NCHW map."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Window(nn.Module):
    """A block that takes and returns NHWC, as Swin's does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def test_maps_have_their_channels_second():
    found = layouts(ResNet20(), torch.randn(2, 3, 8, 8), sites=["conv1", "layer1", "layer1.0.bn1", "fc"])
    assert found == {
        "conv1": ((4, 8, 8), False),
        "layer1.0.bn1": ((4, 8, 8), False),
        "layer1": ((4, 8, 8), False),
        "fc": ((10,), True),
    }


def test_tokens_have_their_features_last():
    found = layouts(Bert(), torch.ones(2, 5, dtype=torch.long), sites=["embeddings", "encoder.layer.*", "."])
    assert all(last for _, last in found.values())
    assert found["encoder.layer.0.mlp.1"] == ((5, 16), True)


def test_one_dimensional_convolutions_are_maps_and_so_is_what_follows_them():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.AvgPool1d(2))
    found = layouts(model, torch.randn(2, 3, 12), sites=["leaves", "."])
    assert {label: last for label, (_, last) in found.items()} == dict.fromkeys(["0", "1", "2", "3", "output"], False)


@pytest.mark.parametrize(
    ("model", "x", "last"),
    [(Permuted(), torch.randn(2, 4, 6, 6), False), (Window(), torch.randn(2, 6, 6, 4), True)],
)
def test_blocks_are_read_by_the_layers_inside_them(model, x, last):
    assert layouts(nn.Sequential(model), x, sites="0")["0"][1] is last


def test_inside_a_permuting_block_the_layers_differ():
    found = {label: last for label, (_, last) in layouts(Permuted(), torch.randn(2, 4, 6, 6)).items()}
    assert found == {"conv": False, "norm": True, "up": True, "act": True, "down": True}


def test_a_layer_norm_for_maps_is_seen_through():
    found = layouts(nn.Sequential(nn.Conv2d(3, 4, 3), LayerNorm2d(4)), torch.randn(2, 3, 6, 6))
    assert found["1"] == ((4, 4, 4), False)


def test_a_shared_activation_registered_after_the_head_is_still_a_map():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc, self.relu = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.ReLU()

        def forward(self, x):
            return self.relu(self.fc(self.relu(self.conv(x)).mean((2, 3))))

    found = layouts(Shared(), torch.randn(2, 3, 8, 8), sites="relu")
    assert found == {"relu": ((4, 6, 6), False), "relu@2": ((5,), True)}


class Permute(nn.Module):
    """As torchvision.ops.Permute."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.permute(self.dims)


class Same(nn.Module):
    """A class of one's own that says nothing about axes, as stochastic depth does in eval mode."""

    def forward(self, x):
        return x * 1.0


def last_of(model, x, sites="leaves"):
    return {label: last for label, (_, last) in layouts(model, x, sites).items()}


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("side", [6, 9])  # as many pixels a side as channels, and not
def test_bare_permutations_are_followed(grad, side):
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), Permute(0, 2, 3, 1), nn.LayerNorm(6), Same(), nn.Linear(6, 12), nn.GELU(),
        Same(), Permute(0, 3, 1, 2), nn.ReLU(),
    )  # fmt: skip
    x = torch.randn(2, 3, side, side)
    with grad(), watch(model.eval(), ["*"], sink=lambda site, a: None) as seen:
        model(x)
    expected = [False, True, True, True, True, True, True, False, False]
    assert [site.channels_last for site in seen.sites] == expected


def test_the_mean_after_a_permutation_is_over_space():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), Permute(0, 2, 3, 1)).eval()
    x = torch.randn(2, 3, 8, 10, dtype=torch.float64)
    model.double()
    with torch.no_grad(), watch(model, "1") as seen:
        seen.run(x)
        rows = to_rows(seen["1"], "mean", site=seen.sites[0], inputs=2)
        torch.testing.assert_close(rows, model[0](x).mean((2, 3)))


class Attention(nn.Module):
    """Heads are split off and joined again; `product` of attention written out, as in older code, or fused."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.fused, self.soft, self.joined, self.out = (
            nn.Linear(8, 24),
            fused,
            Same(),
            Same(),
            nn.Linear(8, 8),
        )

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            found = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            found = self.soft((q @ k.transpose(-2, -1)).softmax(-1)) @ v
        return self.out(self.joined(found.transpose(1, 2).reshape(batch, tokens, width)))


def test_heads_of_attention_are_joined_to_features_and_its_map_has_none():
    x = torch.randn(2, 8, 8)
    assert last_of(Attention(False), x) == {"qkv": True, "soft": None, "joined": True, "out": True}
    assert last_of(Attention(True), x) == {"qkv": True, "joined": True, "out": True}


class Windows(nn.Module):
    """Maps cut into windows and put together again, as in Swin and MaxViT."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cut, self.linear, self.whole = nn.Conv2d(3, 4, 1), Same(), nn.Linear(4, 4), Same()

    def forward(self, x):
        n, side = len(x), x.shape[-1] // 2
        x = self.conv(x).view(n, 4, 2, side, 2, side).permute(0, 2, 4, 3, 5, 1)
        x = self.linear(self.cut(x.reshape(n, 4, side * side, 4)))
        return self.whole(x.view(n, 2, 2, side, side, 4).permute(0, 5, 1, 3, 2, 4).reshape(n, 4, 2 * side, 2 * side))


def test_windows_are_cut_and_joined():
    assert last_of(Windows(), torch.randn(2, 3, 8, 8)) == {"conv": False, "cut": True, "linear": True, "whole": False}


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shuffled, self.up, self.larger = nn.Conv2d(3, 8, 1), Same(), nn.PixelShuffle(2), Same()
        self.bilinear, self.pooled = nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveMaxPool2d(3)

    def forward(self, x):
        x = self.conv(x)
        x = self.shuffled(x.view(len(x), 2, 4, *x.shape[2:]).transpose(1, 2).flatten(1, 2))
        return self.pooled(self.bilinear(self.larger(torch.cat([self.up(x), self.up(x)], 1))))


def test_channels_are_shuffled_split_and_joined():
    assert set(last_of(Shuffled(), torch.randn(2, 3, 8, 8)).values()) == {False}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.act = (
            nn.Embedding(10, 4),
            nn.LSTM(4, 6, batch_first=True, bidirectional=True),
            Same(),
        )
        self.nodes = Same()

    def forward(self, x):
        x = self.act(self.lstm(self.embed(x))[0])
        return self.nodes(torch.zeros_like(x).index_add(1, torch.tensor([1, 2, 0]), x[:, [0, 1, 2]]))


def test_recurrent_layers_and_sums_over_neighbours_keep_their_features_last():
    assert set(last_of(Recurrent(), torch.ones(2, 3, dtype=torch.long)).values()) == {True}


class Mixer(nn.Module):
    """Tokens are mixed by a layer whose units are tokens; the sum with what came in is tokens with features again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens, self.back, self.sum = nn.LayerNorm(4), nn.Linear(5, 5), Same(), Same()

    def forward(self, x):
        x = self.norm(x)
        return self.sum(x + self.back(self.tokens(x.transpose(1, 2)).transpose(1, 2)))


def test_where_units_and_features_are_in_two_axes_nothing_is_taken_for_granted():
    assert last_of(Mixer(), torch.randn(2, 5, 4)) == {"norm": True, "tokens": None, "back": None, "sum": True}


def test_what_no_layer_has_made_has_no_known_layout():
    found = layouts(nn.Sequential(Same(), nn.Conv2d(3, 4, 1)), torch.randn(2, 3, 4, 4))
    assert found == {"0": ((3, 4, 4), None), "1": ((4, 4, 4), False)}


@pytest.mark.parametrize(
    ("before", "norm"),
    [
        (nn.Linear(6, 8), nn.BatchNorm1d(5)),
        (nn.Linear(6, 8), nn.GroupNorm(1, 5)),
        (nn.Linear(6, 8), nn.InstanceNorm1d(5, affine=True)),
        (nn.Conv1d(5, 7, 1), nn.LayerNorm(6)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_norm_that_contradicts_the_layer_before_it_leaves_the_layout_open(before, norm):
    found = last_of(nn.Sequential(before, norm, nn.ReLU()), torch.randn(4, 5, 6))
    assert found == {"0": isinstance(before, nn.Linear), "1": None, "2": None}


def test_a_norm_that_agrees_with_the_layer_before_it_says_the_same():
    maps = nn.Sequential(nn.Linear(6, 8), Permute(0, 2, 1), nn.BatchNorm1d(8), Permute(0, 2, 1), nn.LayerNorm(8))
    assert list(last_of(maps, torch.randn(4, 5, 6)).values()) == [True, False, False, True, True]
    assert last_of(nn.Sequential(nn.BatchNorm1d(5)), torch.randn(4, 5, 6)) == {"0": False}


def test_rules_that_need_the_layout_ask_for_it():
    with torch.no_grad(), watch(nn.Sequential(Same(), nn.Conv2d(3, 4, 1)), "0") as seen:
        seen.run(torch.randn(2, 3, 4, 4))
    (site,), activation = seen.sites, seen["0"]
    assert to_rows(activation, "flatten", site=site, inputs=2).shape == (2, 48)
    for rule in ("mean", "positions", "cls", "last"):
        with pytest.raises(NoRows, match=rf"site '0' has shape.*Rule '{rule}'.*give a function as row rule"):
            to_rows(activation, rule, site=site, inputs=2)


def test_no_operation_is_followed_once_the_first_forward_is_over():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    with watch(model, "0") as seen:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 4, 4))
        assert _get_current_dispatch_mode() is None
        model(torch.randn(2, 3, 4, 4))
        assert _get_current_dispatch_mode() is None
    assert seen.sites[0].channels_last is False


@pytest.mark.filterwarnings("ignore")  # torch would have it compiled
def test_attention_that_is_a_higher_order_operator_still_runs():
    flexible = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs torch 2.5")

    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
            return self.out(flexible.flex_attention(q, k, v).transpose(1, 2).reshape(2, 8, 16))

    assert last_of(Flexible(), torch.randn(2, 8, 16)) == {"qkv": True, "out": True}


class Routed(nn.Module):
    """A mixture of experts whose one expert is given no token."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.expert, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x, nowhere = self.inner(x), torch.zeros(x.shape[:2], dtype=torch.bool)
        chosen = self.expert(x[nowhere]).reshape(-1, 2, 4).reshape(-1, 8)
        return self.out(x.index_put((nowhere,), chosen))


def test_tensors_without_numbers_on_the_way():
    assert layouts(Routed(), torch.rand(3, 5, 8), ["inner", "out"]) == {"inner": ((5, 8), True), "out": ((5, 8), True)}

import pytest
import torch
from torch import nn

from sosie.capture import watch

from .stand_ins import Bert, ResNet20


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

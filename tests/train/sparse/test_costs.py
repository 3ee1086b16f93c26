"""Parameters and FLOPs after sparsity: torch's counter, and counts by hand."""

from __future__ import annotations

import pytest
import torch
from sparse_nets import small
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sosie.models import cifar_resnet
from sosie.train import pruned_masks, random_masks
from sosie.train.sparse import sparse_cost


def counted(model: nn.Module, *inputs: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops()


def test_resnet20_dense_and_sparse() -> None:
    """40.55 million multiply-adds and 0.27 million parameters, as He et al. count them."""
    model, x = cifar_resnet(), torch.zeros(2, 3, 32, 32)
    dense = sparse_cost(model, x)
    assert dense.flops == dense.kept_flops == counted(model, x) == 2 * 2 * 40_551_040
    assert dense.parameters == dense.kept_parameters == 269_722
    masks = random_masks(model, 0.95)
    sparse = sparse_cost(model, x)
    assert (sparse.parameters, sparse.flops) == (dense.parameters, dense.flops)
    assert sparse.kept_parameters == 269_722 - (268_336 - 13_417)
    assert sparse.sparsity == pytest.approx(254_919 / 269_722)
    # By hand: each kept weight is used once a position of the output, on 2 images.
    places = {"conv1": 32 * 32, "layer1": 32 * 32, "layer2": 16 * 16, "layer3": 8 * 8, "linear": 1}
    expected = sum(2 * 2 * row["kept"] * places[row["layer"].partition(".")[0]] for row in masks.densities())
    assert sparse.kept_flops == expected
    assert sum(row["flops"] for row in sparse.layers) == sparse.flops


def test_pruned_channels_count_as_the_mask_says() -> None:
    """The tensors keep their shapes: the next layer still reads the channels that are 0, and its FLOPs say so."""
    model, x = small(), torch.zeros(1, 3, 8, 8)
    pruned_masks(model, 0.5, how="channels", dense=["3", "6"])
    rows = {row["layer"]: row for row in sparse_cost(model, x).layers}
    assert rows["0"]["kept_flops"] * 2 == rows["0"]["flops"] == 2 * 8 * 3 * 9 * 64
    assert rows["3"]["kept_flops"] == rows["3"]["flops"]
    assert model(x).shape == (1, 10)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) @ x.T


def test_shared_weights_are_parameters_once_and_work_twice() -> None:
    model, x = Tied(), torch.zeros(3, 4)
    random_masks(model, 0.75)
    cost = sparse_cost(model, x)
    assert (cost.parameters, cost.kept_parameters) == (16, 4)
    assert cost.flops == 2 * (2 * 3 * 16) + 2 * 3 * 3 * 4
    assert cost.kept_flops == 2 * (2 * 3 * 4) + 2 * 3 * 3 * 4  # the product of activations counts whole


def test_attention_is_counted_also_where_its_layer_is_never_called() -> None:
    """Multi-head attention reads out_proj's weight itself; in_proj_weight is no layer's weight and has no mask."""
    model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)
    expected = counted(model.train(), x)
    masks = random_masks(model.eval(), 0.5, how="uniform")
    cost = sparse_cost(model, x)
    assert list(masks) == ["self_attn.out_proj", "linear1", "linear2"]
    assert cost.flops == expected
    assert cost.flops - cost.kept_flops == 2 * 10 * (16 * 16 + 2 * 16 * 32) // 2
    assert not model.training
    assert torch.backends.mha.get_fastpath_enabled()


def test_groups_and_transposed_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=4), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 6, 1))
    x = torch.zeros(2, 8, 6, 6)
    random_masks(model, 0.5, how="uniform")
    cost = sparse_cost(model, x)
    assert cost.flops == counted(model, x)
    assert cost.kept_flops * 2 == cost.flops
    assert [row["flops"] for row in cost.layers] == [2 * 2 * 8 * 2 * 9 * 16, 2 * 2 * 8 * 4 * 4 * 16, 2 * 2 * 24 * 64]


def test_autocast_around_it_changes_no_count() -> None:
    model = small()
    random_masks(model, 0.8)
    x = torch.randn(2, 3, 8, 8)
    plain = sparse_cost(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse_cost(model, x) == plain
    assert plain.kept_flops < plain.flops

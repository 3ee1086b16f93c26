"""ε-sparsity with the paper's Theorem 1, where it stops holding, and histograms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sparse_nets import batch, small
from torch import nn

from sosie.models import small_cnn
from sosie.train import Recipe, fit, random_masks
from sosie.train.sparse import WeightHistograms, epsilon_sparsity, weight_histogram


def test_epsilon_zero_is_the_sparsity() -> None:
    model = small()
    assert epsilon_sparsity(model, 0) == 0
    masks = random_masks(model, 0.8)
    assert epsilon_sparsity(model, 0) == masks.sparsity
    assert epsilon_sparsity(model, 10) == 1


def test_epsilon_sparsity_is_a_count() -> None:
    model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.0, 0.1, -0.1, 0.2, -0.3], [0.05, 0.5, 1.0, -1.0, 0.0]]))
        model[1].weight.copy_(torch.tensor([[0.09, 3.0]]))
    assert epsilon_sparsity(model, 0.15) == 6 / 12
    assert epsilon_sparsity(model, 0.15, layers="0") == 5 / 10
    assert epsilon_sparsity(model, 0.15, layers=["1"]) == 1 / 2


@pytest.mark.parametrize("epsilon", [1e-1, 1e-3, 1e-6])
def test_theorem_1(epsilon: float) -> None:
    """Zeros of W become values up to ε: the ε-sparsity is the sparsity, and outputs differ by at most ε √m ‖x‖.

    m is the number of zeros: ‖(W − W′) x‖ ≤ ‖W − W′‖ ‖x‖, and m entries of at most ε have a norm of at most ε √m. An
    output differs by at most ε × Σ |x| over its zeros, which is reached where each takes the sign of its input.
    """
    torch.manual_seed(0)
    layer = nn.Linear(40, 30).double()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.sign() * (0.2 + layer.weight.abs()))  # ε is below the smallest weight
    masks = random_masks(layer, 0.8)
    zeros = ~masks[""]
    x = torch.randn(64, 40, dtype=torch.float64)
    near = nn.Linear(40, 30).double()
    near.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    with torch.no_grad():
        near.weight[zeros] = epsilon * (2 * torch.rand(int(zeros.sum()), dtype=torch.float64) - 1)
    assert epsilon_sparsity(near, epsilon) == epsilon_sparsity(layer, 0) == masks.sparsity
    difference = (near(x) - layer(x)).norm(dim=1)
    assert (difference <= epsilon * math.sqrt(int(zeros.sum())) * x.norm(dim=1)).all()
    with torch.no_grad():
        near.weight.copy_(torch.where(zeros, epsilon * x[0].sign(), layer.weight))
    reached = (near(x[0]) - layer(x[0])).detach()
    torch.testing.assert_close(reached, epsilon * (zeros.double() @ x[0].abs()), rtol=1e-6, atol=1e-14)


def test_where_theorem_1_ends() -> None:
    """Before a batch norm weights can be as small as one likes: ε-sparsity goes to 1, and the network is the same."""
    model, x = small().double().train(), batch()[0].double()
    expected, before = model(x), epsilon_sparsity(model, 1e-2, layers="0")
    with torch.no_grad():
        model[0].weight.mul_(2**-5)
        model[0].bias.mul_(2**-5)
        model[1].eps *= 2**-10
    assert before < 0.2
    assert epsilon_sparsity(model, 1e-2, layers="0") == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        model[0].weight.zero_()
    assert (model(x) - expected).abs().max() > 0.1


def test_a_histogram_is_numpys_and_leaves_out_what_is_masked() -> None:
    model = small()
    found = weight_histogram(model, bins=20)
    values = torch.cat([model[i].weight.detach().flatten() for i in (0, 3, 6)]).double().numpy()
    counts, edges = np.histogram(values, 20, (-abs(values).max(), abs(values).max()))
    assert np.array_equal(found[0], counts)
    assert np.array_equal(found[1], edges)
    masks = random_masks(model, 0.8)
    kept, _, outside = weight_histogram(model, bins=21, limit=0.1)
    assert kept.sum() + outside == sum(row["kept"] for row in masks.densities())
    assert outside > 0
    zeros, _, _ = weight_histogram(model, bins=21, limit=0.1, masked=True)
    assert zeros[10] - kept[10] == sum(row["weights"] - row["kept"] for row in masks.densities())


def test_histograms_along_training() -> None:
    torch.manual_seed(0)
    model = small_cnn(width=4)
    histograms = WeightHistograms(model, bins=50, limit=0.5)
    images, labels = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
    fit(model, images, labels, recipe=Recipe(epochs=2), seed=0, after_epoch=histograms.record)
    assert histograms.steps == [0, 1, 2]
    assert histograms.counts.shape == (3, 50)
    assert np.array_equal(histograms.counts[2], weight_histogram(model, 50, 0.5)[0])
    assert not np.array_equal(histograms.counts[0], histograms.counts[2])
    totals = histograms.counts.sum(1) + histograms.outside
    assert len(set(totals.tolist())) == 1


def test_bad_input_is_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match="epsilon=-1"):
        epsilon_sparsity(model, -1)
    with pytest.raises(ValueError, match="layers: no convolution or linear layer is called '7'"):
        epsilon_sparsity(model, 0.1, layers="7")
    with pytest.raises(ValueError, match="bins must be"):
        weight_histogram(model, 0)
    with pytest.raises(ValueError, match="limit must be"):
        weight_histogram(model, limit=0)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="1 weights of the model are NaN"):
        weight_histogram(model)
    for module in (model[0], model[3], model[6]):
        nn.init.zeros_(module.weight)
    with pytest.raises(ValueError, match="needs a limit"):
        weight_histogram(model)

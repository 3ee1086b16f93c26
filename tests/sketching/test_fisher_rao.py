"""The Fisher–Rao norm against gradients at the parameters (Liang et al. 2019), and by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sosie.sketching import FisherRao, fisher_rao_norm


def relu_net(*widths: int, seed: int = 0) -> nn.Sequential:
    """No biases: f is homogeneous of degree 1 in each weight matrix."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


X, Y = random(9, 5), torch.tensor([0, 2, 1, 1, 0, 2, 2, 1, 0])


def by_parameters(model: nn.Module, y: int, x: Tensor) -> float:
    """⟨θ, ∇_θ ℓ⟩ of one input."""
    loss = nn.functional.cross_entropy(model(x[None]), torch.tensor([y]))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return float(sum((p.detach() * g).sum() for p, g in zip(model.parameters(), grads, strict=True)))


@pytest.mark.parametrize("hidden", [(), (7,), (7, 6, 4)])
def test_the_norm_is_that_of_parameters_times_gradients(hidden: tuple[int, ...]) -> None:
    model = relu_net(5, *hidden, 3)
    expected = sum(by_parameters(model, int(y), x) ** 2 for x, y in zip(X, Y, strict=True)) / len(X)
    found = fisher_rao_norm(model, [(X, Y)])
    assert found.layers == len(hidden)
    assert found.norm**2 == pytest.approx(expected, rel=1e-12)


def test_expected_labels_are_weighted_by_the_models_own_p() -> None:
    model = relu_net(5, 7, 3)
    p = torch.softmax(model(X), 1).detach()
    expected = sum(float(p[i, y]) * by_parameters(model, y, X[i]) ** 2 for i in range(9) for y in range(3)) / 9
    assert fisher_rao_norm(model, X, under="expected").norm ** 2 == pytest.approx(expected, rel=1e-12)
    drawn = [fisher_rao_norm(model, X, under="drawn", seed=seed).norm ** 2 for seed in range(400)]
    assert sum(drawn) / 400 == pytest.approx(expected, rel=0.1)
    assert len(set(drawn)) > 100


def test_a_shared_layer_counts_at_every_call() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.unused = (
                nn.Linear(5, 5, bias=False),
                nn.Linear(5, 3, bias=False),
                nn.Linear(1, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(torch.relu(self.body(x)))))

    torch.manual_seed(0)
    model = Shared().double()
    found = fisher_rao_norm(model, [(X, Y)])
    del model.unused
    expected = sum(by_parameters(model, int(y), x) ** 2 for x, y in zip(X, Y, strict=True)) / len(X)
    assert found.layers == 2
    assert found.norm**2 == pytest.approx(expected, rel=1e-12)


def test_two_classes_by_hand() -> None:
    """Logits (1, −1): p = (σ, 1 − σ) with σ = 1/(1 + e⁻²); y = 1 gives ⟨f, p − onehot⟩ = (2σ − 1) + 1 = 2σ."""
    model = nn.Linear(1, 2, bias=False).double()
    model.weight.data = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    sigma = float(torch.sigmoid(torch.tensor(2.0, dtype=torch.float64)))
    found = fisher_rao_norm(model, [(torch.ones(1, 1, dtype=torch.float64), torch.tensor([1]))])
    assert found.norm == pytest.approx(2 * sigma, rel=1e-14)
    assert fisher_rao_norm(model, [(torch.ones(1, 1).double(), torch.tensor([1]))], layers=4).norm == pytest.approx(
        5 * 2 * sigma, rel=1e-14
    )


def test_batch_size_does_not_matter() -> None:
    model = relu_net(5, 7, 3)
    for options in ({}, {"under": "drawn"}, {"under": "expected"}):
        whole = fisher_rao_norm(model, [(X, Y)], **options)
        parts = fisher_rao_norm(model, list(zip(X.split(2), Y.split(2), strict=True)), **options)
        assert parts.norm == pytest.approx(whole.norm, rel=1e-12)
    assert fisher_rao_norm(model, X, labels=Y).norm == pytest.approx(fisher_rao_norm(model, [(X, Y)]).norm, rel=1e-12)


def test_distance() -> None:
    a, b = (FisherRao(name, norm, 1, 1, "labels") for name, norm in (("a", 2.0), ("b", 8.0)))
    assert a.distance(b) == b.distance(a) == pytest.approx(6 / 4)
    assert a.distance(a) == 0
    with pytest.raises(ValueError, match="norm is 0"):
        a.distance(FisherRao("flat", 0.0, 1, 1, "labels"))


def test_the_model_is_left_as_found() -> None:
    model = relu_net(5, 7, 3).train()
    fisher_rao_norm(model, [(X, Y)])
    assert model.training
    assert all(not m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (X, {}, "have no labels"),
        ([(X, Y + 1)], {}, "there are 3 classes"),
        (X, {"under": "guess"}, "under must be one of"),
        (X, {"under": "drawn", "labels": Y}, "does not read them"),
        ([(X, Y)], {"layers": -1}, "number of hidden layers"),
    ],
)
def test_errors_in_words(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fisher_rao_norm(relu_net(5, 7, 3), data, **options)


def test_a_model_without_weight_layers_needs_a_number() -> None:
    with pytest.raises(ValueError, match="layers="):
        fisher_rao_norm(nn.LayerNorm(5).double(), [(X, Y)])
    assert fisher_rao_norm(nn.LayerNorm(5).double(), [(X, Y)], layers=0).norm > 0

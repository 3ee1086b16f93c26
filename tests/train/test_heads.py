"""Last layers fitted anew: against another solver, and each as if it were alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from sosie.models import alexnet, small_cnn
from sosie.train import Recipe
from sosie.train.heads import Heads, features, find_head, refit_head


def problem(heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes that overlap, so that the best layer is finite."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (200,), generator=generator)
    x = torch.randn(heads, 200, 5, generator=generator)
    return x + 0.8 * functional.one_hot(labels, 5), labels


def test_it_finds_what_another_solver_finds() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    x, y = problem()
    found = refit_head(x, y, 3, recipe=Recipe(epochs=300, batch=50, rate=2e-2))
    for k in range(len(x)):
        other = linear.LogisticRegression(C=1e8, max_iter=2000, tol=1e-10).fit(x[k].numpy(), y.numpy())
        theirs = functional.cross_entropy(torch.tensor(other.decision_function(x[k].numpy())), y)
        ours = functional.cross_entropy(found(x)[k].double(), y)
        assert float(theirs) <= float(ours) + 1e-6 < float(theirs) + 1e-3


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_each_head_is_fitted_as_if_it_were_alone(optimiser: str) -> None:
    x, y = problem()
    labels = torch.stack([y, y.flip(0), y])
    recipe = Recipe(epochs=5, batch=32, rate=1e-3, optimiser=optimiser)  # type: ignore[arg-type]
    together = refit_head(x, labels, 3, recipe=recipe, seed=1)
    for k in range(3):
        alone = refit_head(x[k : k + 1], labels[k], 3, recipe=recipe, seed=1)
        assert torch.allclose(together.weight[k], alone.weight[0], atol=1e-6)
        assert torch.allclose(together.bias[k], alone.bias[0], atol=1e-6)
    assert not together.weight.requires_grad


def test_features_are_what_the_last_layer_reads() -> None:
    torch.manual_seed(0)
    for model, shape, name in ((small_cnn(width=2), (7, 1, 28, 28), "fc"), (alexnet(), (3, 3, 32, 32), "classifier.6")):
        x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        assert find_head(model) == name
        layer = model.get_submodule(name)
        found = features(model.train(), x, batch=2)
        assert model.training
        assert not layer._forward_hooks
        head = Heads(layer.weight[None].detach(), layer.bias[None].detach())
        with torch.no_grad():
            assert torch.allclose(head(found[None])[0], model.eval()(x), atol=1e-5)
    bytes_ = (255 * torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    model = small_cnn(width=2)
    expected = features(model, 1 - bytes_.float() / 255)
    assert torch.allclose(features(model, bytes_, prepare=lambda x: 1 - x), expected, atol=1e-6)


def test_a_layer_that_does_not_answer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Softmax(1))
    with pytest.raises(ValueError, match="is not that of"):
        features(model, torch.rand(2, 4))
    with pytest.raises(ValueError, match="there are 0, 1"):
        find_head(model, "2")
    with pytest.raises(ValueError, match="no linear layer"):
        find_head(nn.Conv2d(1, 1, 1))


def test_bad_shapes_and_labels_are_refused() -> None:
    x, y = problem()
    with pytest.raises(ValueError, match=r"\(3, 200, 5\) and \(199,\)"):
        refit_head(x, y[1:], 3)
    with pytest.raises(ValueError, match="labels lie between 0 and 2"):
        refit_head(x, y, 2)

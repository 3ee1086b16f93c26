"""Linear probes against independent logistic regression and ridge classification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import mlp
from torch import Tensor, nn

import sosie
from sosie.benchmark import linear_probe, probe
from sosie.sketching import classify
from sosie.train import Recipe


def labelled(n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Classes separated by a curve, and not by a plane of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + noise > 0).long() + (x[:, 1] + x[:, 2].square() > 1.5).long()
    return list(zip(x.split(64), y.split(64), strict=True))


@pytest.fixture
def model() -> nn.Module:
    return mlp().double()


@pytest.fixture
def train() -> Any:
    return labelled(400, 0)


@pytest.fixture
def test() -> Any:
    return labelled(200, 1)


def features(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        rows = torch.cat([model[0](x) for x, _ in data])  # type: ignore[index, operator]
    return rows, torch.cat([y for _, y in data])


@pytest.mark.parametrize("penalty", [1.0, 30.0])
def test_converged_it_is_logistic_regression(penalty: float, model: nn.Module, train: Any, test: Any) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    (x, y), (x_new, y_new) = features(model, train), features(model, test)
    mean, spread = x.mean(0), x.std(0, correction=0)
    outside = linear.LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=5000).fit((x - mean) / spread, y)
    found = linear_probe(model, train, test, sites="0", penalty=penalty)
    assert found == {"0": outside.score((x_new - mean) / spread, y_new)}
    head = nn.Linear(12, 3, dtype=torch.float64)
    probe._converge(head, (x - mean) / spread, y, penalty, "0")
    torch.testing.assert_close(head.weight.detach(), torch.from_numpy(outside.coef_), rtol=0, atol=1e-4)


def test_ridge_is_the_classifier_of_rows_that_were_all_kept(model: nn.Module, train: Any, test: Any) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    (x, y), (x_new, y_new) = features(model, train), features(model, test)
    outside = linear.Ridge(alpha=3.0).fit(x, nn.functional.one_hot(y))
    fitted = classify(sosie.sketch(model, train, sites="0", size=None, kernels="features"), "features", alpha=3.0)
    torch.testing.assert_close(fitted.scores(model, test)["0"], torch.from_numpy(outside.predict(x_new)))
    assert fitted.evaluate(model, test) == {"0": float((outside.predict(x_new).argmax(1) == y_new.numpy()).mean())}


def test_epochs_come_near_and_are_repeated_exactly(model: nn.Module, train: Any, test: Any) -> None:
    before = torch.get_rng_state()
    settled = linear_probe(model, train, test, sites=["0", "1"])
    one, many = (
        linear_probe(model, train, test, sites=["0", "1"], recipe=Recipe(epochs, rate=1e-2)) for epochs in (1, 50)
    )
    assert one == linear_probe(model, train, test, sites=["0", "1"], recipe=Recipe(1, rate=1e-2))
    assert torch.equal(before, torch.get_rng_state())
    for site, value in settled.items():
        assert value > 0.6
        assert abs(many[site] - value) < 0.05  # of 200 inputs; epochs have no penalty
        assert one[site] > 1 / 3


def test_it_converges_in_single_precision_too(model: nn.Module, train: Any, test: Any) -> None:
    single = mlp().float()
    halved = [[(x.float(), y) for x, y in data] for data in (train, test)]
    assert linear_probe(single, *halved, sites="0") == linear_probe(model, train, test, sites="0")


def test_constant_columns_and_far_means_do_not_matter(train: Any, test: Any) -> None:
    class Shifted(nn.Module):
        def __init__(self, scale: float, offset: float) -> None:
            super().__init__()
            self.scale, self.offset, self.site = scale, offset, nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.site(torch.cat([x * self.scale + self.offset, torch.full_like(x[:, :2], 5.0)], 1))

    plain, far = (linear_probe(Shifted(*how), train, test, sites="site") for how in ((1.0, 0.0), (1e-3, 100.0)))
    assert plain == far


def test_what_cannot_be_probed_is_said(
    model: nn.Module, train: Any, test: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="penalty must be a number above 0"):
        linear_probe(model, train, test, sites="0", penalty=0)
    with pytest.raises(ValueError, match="test has no labels"):
        linear_probe(model, train, [x for x, _ in test], sites="0")
    with pytest.raises(ValueError, match="classes that the data do not: 7"):
        linear_probe(model, train, [(x, torch.full_like(y, 7)) for x, y in test], sites="0")
    with pytest.raises(ValueError, match="all 400 rows of 0 are the same"):
        linear_probe(model, [(torch.ones_like(x), y) for x, y in train], test, sites="0")
    monkeypatch.setattr(probe, "STEPS", 2)
    with pytest.raises(RuntimeError, match="has not converged after 2 steps"):
        linear_probe(model, train, test, sites="0")

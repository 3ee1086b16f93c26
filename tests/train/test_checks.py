"""What cannot be trained is told before it is begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.train import Recipe, fit, fit_together

X, Y = torch.rand(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def alone(images: Tensor, **options: Any) -> object:
    return fit(network(), images, Y, recipe=Recipe(epochs=1, **options), seed=0)


def together(images: Tensor, **options: Any) -> object:
    return fit_together(network, 2, images, Y, recipe=Recipe(epochs=1, **options))


def test_no_epochs_and_no_batches_are_told() -> None:
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=f"epochs must be a whole number of at least 1, got {wrong}"):
            Recipe(epochs=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"batch must be a whole number of at least 1, got {wrong}"):
            Recipe(epochs=1, batch=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [alone, together])
@pytest.mark.parametrize(("images", "name"), [(X.double(), "float64"), (X.half(), "float16"), (X.long(), "int64")])
def test_images_of_another_type_are_told(train: Callable[..., object], images: Tensor, name: str) -> None:
    with pytest.raises(ValueError, match=rf"images of {name} for a model of float32: .*images\.to\(torch\.float32\)"):
        train(images)


@pytest.mark.parametrize("train", [alone, together])
def test_no_images_are_told(train: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"nothing to learn from: images of shape \(0, 6\)"):
        train(X[:0])
    with pytest.raises(TypeError, match=r"images are a ndarray: torch\.as_tensor\(images\)"):
        train(X.numpy())


def test_what_the_model_takes_is_taken() -> None:
    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    fit(Casting(6, 2), X.double(), Y, recipe=Recipe(epochs=1), seed=0)
    fit(network().double(), X.double(), Y, recipe=Recipe(epochs=1), seed=0)
    alone(X.double(), prepare=lambda x: x.float())
    alone((255 * X).to(torch.uint8))
    pictures, seen = X[..., None, None].expand(-1, -1, 3, 3), nn.Sequential(nn.Conv2d(6, 2, 3), nn.Flatten())
    fit(seen, pictures.bfloat16(), Y, recipe=Recipe(epochs=1, mixed=True), seed=0)
    with pytest.raises(ValueError, match="images of float64"):
        fit(seen, pictures.double(), Y, recipe=Recipe(epochs=1, mixed=True), seed=0)


def test_another_fault_is_told_as_it_is() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fit(Broken(6, 2), X.double(), Y, recipe=Recipe(epochs=1), seed=0)


def test_checkpoints_probed_with_another_type_are_told() -> None:
    with pytest.raises(ValueError, match="inputs of float64 for a model of float32"):
        sosie.dynamics([network(), network()], data=X.double())

"""What cannot be trained is told before it is begun."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.train import fit, fit_together

X, Y = torch.rand(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def alone(images: Tensor, epochs: int, **options: object) -> object:
    return fit(network(), images, Y, epochs=epochs, seed=0, **options)  # type: ignore[arg-type]


def together(images: Tensor, epochs: int, **options: object) -> object:
    return fit_together(network, 2, images, Y, epochs=epochs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [alone, together])
@pytest.mark.parametrize("schedule", ["one_cycle", "constant"])
@pytest.mark.parametrize("epochs", [0, -1, True, 1.5])
def test_no_epochs_are_told(train: Callable[..., object], schedule: str, epochs: int) -> None:
    with pytest.raises(ValueError, match=f"epochs={epochs}: a whole number of at least 1"):
        train(X, epochs, schedule=schedule)


@pytest.mark.parametrize("train", [alone, together])
@pytest.mark.parametrize(("images", "name"), [(X.double(), "float64"), (X.half(), "float16"), (X.long(), "int64")])
def test_images_of_another_type_are_told(train: Callable[..., object], images: Tensor, name: str) -> None:
    with pytest.raises(ValueError, match=rf"images of {name} for a model of float32: .*images\.to\(torch\.float32\)"):
        train(images, 1)


@pytest.mark.parametrize("train", [alone, together])
def test_no_images_and_no_batches_are_told(train: Callable[..., object]) -> None:
    for batch in (0, -3, 2.5, True):
        with pytest.raises(ValueError, match=f"batch={batch}: how many images a step learns from"):
            train(X, 1, batch=batch)
    with pytest.raises(ValueError, match=r"nothing to learn from: images of shape \(0, 6\)"):
        train(X[:0], 1)
    with pytest.raises(TypeError, match=r"images are a ndarray: torch\.as_tensor\(images\)"):
        train(X.numpy(), 1)


def test_what_the_model_takes_is_taken() -> None:
    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    fit(Casting(6, 2), X.double(), Y, epochs=1, seed=0)
    fit(network().double(), X.double(), Y, epochs=1, seed=0)
    alone(X.double(), 1, prepare=lambda x: x.float())
    alone((255 * X).to(torch.uint8), 1)
    pictures, seen = X[..., None, None].expand(-1, -1, 3, 3), nn.Sequential(nn.Conv2d(6, 2, 3), nn.Flatten())
    fit(seen, pictures.bfloat16(), Y, epochs=1, seed=0, mixed=True)
    with pytest.raises(ValueError, match="images of float64"):
        fit(seen, pictures.double(), Y, epochs=1, seed=0, mixed=True)


def test_another_fault_is_told_as_it_is() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fit(Broken(6, 2), X.double(), Y, epochs=1, seed=0)


def test_checkpoints_probed_with_another_type_are_told() -> None:
    with pytest.raises(ValueError, match="inputs of float64 for a model of float32"):
        sosie.dynamics([network(), network()], data=X.double())

"""Small networks, and copies of them that compute the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def dense(sizes: Sequence[int], act: Callable[[], nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [(nn.Linear(a, b), act()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))[:-1].eval()


def conv(seed: int = 0, width: int = 6) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 4),
        )  # fmt: skip
        nn.init.uniform_(model[1].weight, 0.2, 2)  # type: ignore[arg-type]
        model.train()
        model(torch.randn(64, 2, 8, 8))
    return model.eval()


def intertwined(model: nn.Sequential, make: Callable[[int, int], Tensor]) -> nn.Sequential:
    """Each hidden layer's neurons through an invertible matrix, and back by the next layer."""
    model = copy.deepcopy(model)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for k, (layer, after) in enumerate(itertools.pairwise(layers)):
        g = make(layer.out_features, k).double()
        with torch.no_grad():
            layer.weight.copy_((g @ layer.weight.double()).to(layer.weight.dtype))
            layer.bias.copy_((g @ layer.bias.double()).to(layer.bias.dtype))
            after.weight.copy_((after.weight.double() @ torch.linalg.inv(g)).to(after.weight.dtype))
    return model


def permutation(size: int, seed: int) -> Tensor:
    return torch.eye(size)[torch.randperm(size, generator=torch.Generator().manual_seed(seed))]


def scaled_permutation(size: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.diag(torch.logspace(-1, 1, size)) @ permutation(size, int(torch.randint(99, (), generator=random)))


def invertible(size: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, size, generator=random) + 3 * torch.eye(size)

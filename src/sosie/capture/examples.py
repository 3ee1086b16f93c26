"""An input for a model that came without data, to see how its forward goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .quiet import as_found, kept_attributes

SIDES = {1: (16, 64, 256, 1024), 2: (32, 28, 64, 96, 128, 224, 256), 3: (8, 16, 32)}  # tried in turn, by axes of space
TOKENS = 8
BATCH = 2


def example_input(model: nn.Module, input_shape: Sequence[int] | None = None, *, seed: int = 0) -> Tensor:
    """Two random inputs of this shape (without the batch axis), or of one that the model's first layer takes.

    For a convolution that tells the channels; of the usual sides the first is taken with which the forward runs.
    """
    generator = torch.Generator().manual_seed(seed)
    like = next(iter(model.parameters()), None)
    if like is None:
        raise ValueError("the model has no weights")
    if input_shape is not None:
        return _normal((BATCH, *input_shape), like, generator)
    first = next((m for m in model.modules() if isinstance(m, _FIRST)), None)
    if isinstance(first, nn.Embedding):
        return torch.randint(first.num_embeddings, (BATCH, TOKENS), generator=generator).to(like.device)
    shapes: list[tuple[int, ...]]
    if isinstance(first, nn.Linear):
        shapes = [(first.in_features,)]
    elif isinstance(first, _ConvNd):
        shapes = shapes_for(first)
    else:
        raise ValueError("the model's first layer does not tell what it takes: give input_shape=")
    failure: Exception | None = None
    for shape in shapes:
        found = _normal((BATCH, *shape), like, generator)
        try:
            with kept_attributes(model), as_found(model):
                model(found)
            return found
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # whatever a forward says of a wrong shape
            failure = error
    tried = ", ".join(map(str, shapes))
    raise ValueError(f"the forward ran for no input of shape {tried}: give input_shape=; it said: {failure}")


def shapes_for(first: _ConvNd) -> list[tuple[int, ...]]:
    """Shapes of one input that a first convolution takes, the likeliest first."""
    axes = first.weight.ndim - 2
    sides: Sequence[int] = SIDES[axes]
    if axes == 2:
        # Grey images are mostly MNIST's, images that the first layer makes smaller mostly ImageNet's.
        best = 28 if first.in_channels == 1 else 224 if first.stride[0] > 1 else 32
        sides = sorted(sides, key=lambda side: side != best)
    return [(first.in_channels, *[side] * axes) for side in sides]


_FIRST = (nn.Linear, nn.Embedding, _ConvNd)


def _normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator).to(like)

"""What cannot be trained or probed, told in words before torch does in its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.quiet import evaluating
from .adversarial import Prepare, floats


def check_epochs(epochs: int) -> None:
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs={epochs!r}: a whole number of at least 1")


def check_data(images: Tensor, labels: Tensor, batch: int) -> None:
    for name, given in (("images", images), ("labels", labels)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} are a {type(given).__name__}: torch.as_tensor({name}) makes a tensor of them")
    if not len(images):
        raise ValueError(f"there is nothing to learn from: images of shape {tuple(images.shape)}")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch={batch!r}: how many images a step learns from, a whole number of at least 1")


@torch.no_grad()
def check_types(model: nn.Module, images: Tensor, *, prepare: Prepare | None = None, mixed: bool = False) -> None:
    """Refuse images of a type that the model does not take; tried on one image where the types are not the same."""
    x = floats(images[:1])
    if not len(x) or x.dtype in types_of(model):
        return
    try:
        with evaluating(model), torch.autocast(x.device.type, torch.bfloat16, enabled=mixed):
            model(prepare(x) if prepare else x)
    except RuntimeError as error:
        tell_types(error, model, [x], "images")


def tell_types(error: RuntimeError, model: nn.Module, given: Any, word: str) -> None:
    """Raise in words where torch objects to the type of what a model was given; else return, to raise as it was."""
    own = types_of(model)
    odd = sorted({_name(x.dtype) for x in _tensors(given) if x.dtype not in own})
    if own and odd and "type" in str(error):
        here = sorted(map(_name, own))
        raise ValueError(
            f"{word} of {' and '.join(odd)} for a model of {' and '.join(here)}: bring them to one type, with "
            f"{word}.to(torch.{here[0]}) for instance"
        ) from error


def types_of(model: nn.Module) -> set[torch.dtype]:
    """Of its floating point numbers."""
    return {t.dtype for t in itertools.chain(model.parameters(), model.buffers()) if t.is_floating_point()}


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from _tensors(list(given.values()))
    elif isinstance(given, Iterable) and not isinstance(given, str):
        for item in given:
            yield from _tensors(item)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

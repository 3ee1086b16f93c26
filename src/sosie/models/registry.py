"""Architectures by name: one dict, filled by a decorator."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from ..checks import nearest

State = Mapping[str, Tensor]
Factory = TypeVar("Factory", bound=Callable[..., nn.Module])

CIFAR_DEPTHS = (20, 32, 44, 56, 110)  # the depths of He et al. 2016; any other 6n + 2 is accepted too


@dataclass(frozen=True)
class Architecture:
    """A factory and how to read its options from a state dict, so that the network fits the file."""

    build: Callable[..., nn.Module]
    read_options: Callable[[State], dict[str, Any]]
    ignore: tuple[str, ...] = ()  # prefixes of names in a file that are not needed (training-only heads)


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(
    read_options: Callable[[State], dict[str, Any]], *, name: str = "", ignore: tuple[str, ...] = ()
) -> Callable[[Factory], Factory]:
    """Enter a factory into the registry, under its own name unless another is given."""

    def enter(build: Factory) -> Factory:
        key = name or build.__name__
        if key in ARCHITECTURES:
            raise ValueError(f"an architecture named {key!r} is already defined")
        ARCHITECTURES[key] = Architecture(build, read_options, ignore)
        return build

    return enter


def list_models() -> list[str]:
    """Names that `build_model` and `open_model` know; besides those listed, any `resnet<6n+2>` is known."""
    return sorted({*ARCHITECTURES, *(f"resnet{depth}" for depth in CIFAR_DEPTHS)}, key=_natural)


def find_architecture(name: str) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of that name, and the options that the name itself fixes.

    A registered name comes first, so `resnet18/34/50/101/152` are the ImageNet family; every other
    `resnet<6n+2>` is the CIFAR family. (50 and 152 are 6n + 2 too: `cifar_resnet(depth=50)` gives those.)
    """
    key = name.strip().lower().replace("-", "_")
    if key in ARCHITECTURES:
        return ARCHITECTURES[key], {}
    match = re.fullmatch(r"resnet_?(\d{1,4})", key)
    if match:
        return ARCHITECTURES["cifar_resnet"], {"depth": int(match[1])}
    raise ValueError(
        f"no architecture {name!r} (your own: path/to/file.py:factory@weights.safetensors){nearest(key, list_models())}"
    )


def build_model(name: str, options: Mapping[str, Any] | None = None, state: State | None = None) -> nn.Module:
    """A network by name; options that are not given are read from the state dict, if there is one."""
    entry, fixed = find_architecture(name)
    given = {**fixed, **(options or {})}
    accepted = inspect.signature(entry.build).parameters
    unknown = [key for key in given if key not in accepted]
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it takes {', '.join(accepted)}")
    read = {key: value for key, value in (entry.read_options(state) if state else {}).items() if value is not None}
    try:
        return entry.build(**{**read, **given})
    except (TypeError, RuntimeError, AttributeError, ZeroDivisionError) as error:
        described = ", ".join(f"{key}={value!r}" for key, value in {**read, **given}.items())
        raise ValueError(f"cannot build {name}({described}): {error}") from error


def dimension(state: State, name: str, axis: int) -> int | None:
    """The size of a tensor in a state dict along an axis, or None if it is missing (loading reports that)."""
    tensor = state.get(name)
    return int(tensor.shape[axis]) if tensor is not None and tensor.dim() > axis else None


def count_atoms(state: State) -> int | None:
    """The largest number of atoms of a convolution, or None if all are plain."""
    return max((len(tensor) for name, tensor in state.items() if name.endswith(".atoms")), default=None)


def count_blocks(state: State, prefix: str) -> int | None:
    """How many different numbers follow `prefix.` in the names."""
    numbers = {match[1] for name in state if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", name))}
    return len(numbers) or None


def _natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

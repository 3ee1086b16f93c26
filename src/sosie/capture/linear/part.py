"""The linear part of an activation: a tensor that follows the network's own code, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl

FAR = 2.0**64  # numbers beyond this, or below its inverse, are brought back by a power of two

# Where in the model the code is: the modules that are being called, outermost first.
PLACES: ContextVar[tuple[str, ...]] = ContextVar("sosie_linear_places", default=())
# The type that linear parts claim to have: that of the model's weights, since operations refuse to mix types.
CLAIMED: ContextVar[torch.dtype] = ContextVar("sosie_linear_claimed", default=torch.float64)

# What was done to a model that is not plain linear algebra, in words.
NOTES: ContextVar[set[str] | None] = ContextVar("sosie_linear_notes", default=None)


class NotLinear(ValueError):
    """Something in the model does not become linear when its activation functions are removed."""


class LinearPart(Tensor):
    """`part` × 2 ** `exponent`: what of an activation is linear in the network's input, in float64.

    What is added to it (biases, means) vanishes by definition and not by subtraction, so that it costs no digits. The
    exponent keeps deep chains from overflowing. `broken` says why a value is no longer linear; it is an error only
    where somebody wants to read it.
    """

    part: Tensor
    exponent: int
    broken: str | None

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, part: Tensor, exponent: int = 0, broken: str | None = None) -> LinearPart:
        made: LinearPart = Tensor._make_wrapper_subclass(
            cls,
            part.shape,
            strides=part.stride(),
            storage_offset=part.storage_offset(),
            dtype=CLAIMED.get() if part.is_floating_point() else part.dtype,
            device=part.device,
            requires_grad=False,
        )
        made.part, made.exponent, made.broken = part, exponent, broken
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LinearPart({tuple(self.part.shape)}, 2**{self.exponent}{', broken' if self.broken else ''})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from .operations import follow

        return follow(func, args, kwargs or {})


def scaled(part: Tensor, exponent: int) -> LinearPart:
    """A linear part whose numbers are brought back where they leave the middle of what float64 holds."""
    largest = float(part.abs().max()) if part.numel() else 0.0
    if largest and math.isfinite(largest) and not 1 / FAR <= largest <= FAR:
        shift = math.frexp(largest)[1]
        # In two steps: 2 ** 1074 alone would not fit.
        half = shift // 2
        return LinearPart(part * 2.0**-half * 2.0 ** -(shift - half), exponent + shift)
    return LinearPart(part, exponent)


def aligned(parts: Sequence[LinearPart]) -> tuple[list[Tensor], int]:
    """The parts to one common exponent, the largest of theirs."""
    exponent = max(part.exponent for part in parts)
    return [part.part if part.exponent == exponent else to_exponent(part, exponent) for part in parts], exponent


def to_exponent(value: LinearPart, exponent: int) -> Tensor:
    """The numbers that stand for a value under another exponent."""
    shift = value.exponent - exponent
    if not shift:
        return value.part
    half = shift // 2
    low, high = -1022, 1022
    first, second = (2.0 ** min(max(s, low), high) for s in (half, shift - half))
    return value.part * first * second


def note(text: str) -> None:
    """Keep in mind what the result should say."""
    found = NOTES.get()
    if found is not None:
        found.add(text)


def place() -> str:
    """Where the code is, for a message."""
    places = PLACES.get()
    return places[-1] if places else "the model"

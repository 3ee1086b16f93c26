"""Corruptions: what kind there are, and how one is applied to a batch of images."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from ..draws import derived, normals, poisson, uniforms

DEFAULT = 3  # the strength that MNIST-C has


@dataclass(frozen=True)
class Draws:
    """The random numbers of each image of a batch, the same whatever the batch; each call has new ones."""

    seed: Tensor
    index: Tensor

    def part(self, number: int) -> Draws:
        return Draws(derived(self.seed, number), self.index)

    def uniforms(self, *shape: int) -> Tensor:
        return uniforms(self.seed, self.index, torch.Size(shape).numel()).reshape(-1, *shape)

    def normals(self, *shape: int) -> Tensor:
        return normals(self.seed, self.index, torch.Size(shape).numel()).reshape(-1, *shape)

    def poisson(self, rates: Tensor) -> Tensor:
        return poisson(self.seed, self.index, rates)

    def signs(self, *shape: int) -> Tensor:
        return 2 * (self.uniforms(*shape) < 0.5).double() - 1


Change = Callable[[Tensor, Any, Draws], Tensor]


@dataclass(frozen=True)
class Corruption:
    """A change to images (n, channels, height, width) in [0, 1], with its strength at severities 1 to 5."""

    name: str
    change: Change
    strengths: tuple[Any, Any, Any, Any, Any]

    @property
    def summary(self) -> str:
        return (self.change.__doc__ or "").partition("\n")[0]

    def __call__(
        self, images: Tensor, *, severity: int = DEFAULT, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """The images changed, as `corrupt` gives them; `index`: the numbers of the images, from 0 on if None."""
        if isinstance(severity, bool) or severity not in (1, 2, 3, 4, 5):
            raise ValueError(f"{self.name}: severity is 1, 2, 3, 4 or 5, got {severity!r}")
        x = _floats(images, self.name)
        index = torch.arange(len(images), device=images.device) if index is None else index.to(images.device)
        if index.shape != images.shape[:1]:
            raise ValueError(f"need one number an image: {len(images)} images, numbers {tuple(index.shape)}")
        if not x.numel():
            return images.clone()
        draws = Draws(derived(seed, zlib.crc32(self.name.encode())), index)
        changed = self.change(x, self.strengths[severity - 1], draws).to(x.dtype).clamp(0, 1)  # no camera goes beyond
        return changed.mul(255).round().byte() if images.dtype == torch.uint8 else changed.to(images.dtype)


CORRUPTIONS: dict[str, Corruption] = {}


def define(*strengths: Any) -> Callable[[Change], Change]:
    """Enter a change under its own name, with its five strengths."""

    def enter(change: Change) -> Change:
        name = change.__name__
        if name in CORRUPTIONS or len(strengths) != 5:
            raise ValueError(f"{name}: a corruption has its own name and five strengths, got {len(strengths)}")
        CORRUPTIONS[name] = Corruption(name, change, strengths)
        return change

    return enter


def find_corruption(name: str) -> Corruption:
    if name in CORRUPTIONS:
        return CORRUPTIONS[name]
    near = get_close_matches(name, CORRUPTIONS, n=1)
    offer = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"no corruption is called {name!r}; {offer}there are {', '.join(CORRUPTIONS)}")


def corrupt(images: Tensor, name: str, *, severity: int = DEFAULT, seed: int = 0) -> Tensor:
    """Images (n, channels, height, width) corrupted: uint8 stay uint8, floats in [0, 1] stay floats.

    `severity` 1 to 5; 3 is as strong as in MNIST-C (Mu and Gilmer 2019), lengths being in 28ths of the shorter side.
    What is random in image i depends on `seed` and i alone.
    """
    return find_corruption(name)(images, severity=severity, seed=seed)


def unit(x: Tensor) -> float:
    """The length that is a pixel of a 28 × 28 image."""
    return min(x.shape[-2:]) / 28


def _floats(images: Tensor, name: str) -> Tensor:
    if images.ndim != 4:
        raise ValueError(f"{name}: images are (n, channels, height, width), got {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        return images.float() / 255
    if not images.is_floating_point():
        raise TypeError(f"{name}: images are uint8 or floating point in [0, 1], got {images.dtype}")
    if images.numel():
        low, high = (float(edge) for edge in torch.aminmax(images.detach()))
        if not (low >= 0 and high <= 1):  # also where they are NaN
            raise ValueError(f"{name}: images must lie in [0, 1], found {low:.4g} to {high:.4g}; normalise afterwards")
    return images.detach() if images.dtype == torch.float64 else images.detach().float()

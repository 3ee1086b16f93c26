"""Random crops and mirror images, made on the images' own device from numbers drawn beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..data.draws import derived, uniforms

USE = 2**32  # which seed derived from the training's is that of the changes: attacks take those of small numbers


@dataclass(frozen=True)
class Augment:
    """Random crops of images padded with black, and random mirror images.

    `draws` gives the random numbers of a whole epoch; the images of a batch are then a function of the padded images,
    their numbers and their draws alone.
    """

    pad: int = 4
    mirror: bool = True

    def draws(self, count: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
        """(count, 3): top, left and mirrored of each place of an epoch, the same on every device."""
        places = torch.arange(count, device=device)
        drawn = uniforms(derived(derived(seed, USE), epoch), places, 3)
        many = torch.tensor([2 * self.pad + 1] * 2 + [2 if self.mirror else 1], device=device)
        return (drawn * many).long()

    def __call__(self, padded: Tensor, index: Tensor, draws: Tensor) -> Tensor:
        """The images of these numbers from a set that was padded: crop and mirror in a single gather."""
        height, width = (size - 2 * self.pad for size in padded.shape[-2:])
        device = padded.device
        top, left, mirrored = draws.unsqueeze(-1).unbind(1)  # each (batch, 1)
        along = torch.arange(width, device=device)
        columns = left + torch.where(mirrored == 1, width - 1 - along, along)
        rows = top + torch.arange(height, device=device)
        channels = torch.arange(padded.shape[1], device=device)[None, :, None, None]
        return padded[index[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None, :]]

    def padded(self, images: Tensor) -> Tensor:
        return functional.pad(images, [self.pad] * 4)

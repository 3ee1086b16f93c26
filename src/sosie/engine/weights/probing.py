"""Kernels from random inputs, where there are too many entries to try each: unbiased, and with an interval.

For independent Gaussian g and h the mean of (gᵀK h)(gᵀL h) is ⟨K, L⟩; products of pairs of different inputs within
blocks estimate it without bias, for all pairs of sites at once. Centring takes from each input its mean: what the
network makes of the constant input is known, so that both kinds come from one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...capture import Site
from ...progress import Progress
from .sources import WeightSource

BLOCK = 128  # inputs whose pairs are looked at
PROBES = 8 * BLOCK
FEWEST = 2 * BLOCK


@dataclass(frozen=True)
class Probed:
    """Gram matrices of what each site makes of the probes, off their diagonal, block by block."""

    plain: Tensor  # (blocks, S, b, b)
    centred: Tensor

    def met(self, other: Probed, *, centre: bool) -> Tensor:
        """⟨K, L⟩ of each block (blocks, S, T), but for a factor."""
        return self._grams(centre).flatten(2) @ other._grams(centre).flatten(2).mT

    def size(self, *, centre: bool) -> Tensor:
        """⟨K, K⟩ of each block (blocks, S), but for the same factor."""
        return self._grams(centre).square().sum((-2, -1))

    def _grams(self, centre: bool) -> Tensor:
        return self.centred if centre else self.plain


def probe(source: WeightSource, probes: int, seed: int) -> Probed:
    """Run a model on the probes that `seed` gives, the same for each model."""
    grams: list[Tensor] = []
    sizes: list[Tensor] = []
    means: list[Tensor] = []

    def gram(site: Site, rows: Tensor, exponent: int) -> tuple[Tensor, int]:
        return (rows @ rows.T).cpu(), 2 * exponent

    with source.opened(gram) as run, Progress(f"probing {source.name}", probes, "inputs") as bar:
        for drawn in _drawn(source.entries, probes, seed):
            means.append(drawn.mean(1))
            with_constant = torch.cat([drawn, drawn.new_ones(1, source.entries)])
            found = run.run(source.shaped(with_constant))
            grams.append(torch.stack([each for each, _ in found]))
            sizes.append(torch.tensor([exponent for _, exponent in found]))
            bar.advance(len(drawn))
    whole = torch.stack(grams) * common_scale(torch.stack(sizes))[..., None, None]
    return _off_diagonal(whole, torch.stack(means))


def common_scale(exponents: Tensor) -> Tensor:
    """Powers of two that bring what was scaled apart, along the first axis, to the scale of the largest."""
    shift = (exponents - exponents.amax(0)).clamp(min=-1022)  # below it float64 has nothing left
    return torch.pow(2.0, shift.double())


def _drawn(entries: int, probes: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(probes // BLOCK):
        yield torch.randn(BLOCK, entries, generator=generator, dtype=torch.float64)


def _off_diagonal(whole: Tensor, means: Tensor) -> Probed:
    """The last row and column are those of the constant input."""
    plain, constant, both = whole[..., :-1, :-1], whole[..., :-1, -1], whole[..., -1:, -1:]
    share = means[:, None, :, None]  # (blocks, 1, b, 1)
    shared = share * constant[..., None, :]
    centred = plain - shared - shared.mT + share * share.mT * both
    largest = whole.abs().amax((0, 2, 3))[None, :, None, None]
    norm = largest.where(largest > 0, largest.new_ones(()))
    return Probed(*(_without_diagonal(grams / norm) for grams in (plain, centred)))


def _without_diagonal(grams: Tensor) -> Tensor:
    grams = grams.clone()
    grams.diagonal(dim1=-2, dim2=-1).zero_()
    return grams

"""What one site makes of its rows: Gram matrices of fixed blocks, centred where float32 needs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg import block_stacks, double_centred, gram_stack, u_centred, without_diagonal

BLOCK = 64  # rows a block
OFFSET_LIMIT = 30.0  # n‖mean‖² over Σ‖x − mean‖² above which rows are centred before the product


@dataclass(frozen=True)
class GramPart:
    """One site's Gram matrices of one chunk, in float64: a list of stacks, since the last block may be larger."""

    sizes: tuple[tuple[int, int], ...]  # (blocks, b) of each stack
    debiased: list[Tensor]  # (blocks, b·b) U-centred
    diagonal: list[Tensor]  # (blocks, b) of the centred Gram, over 1 − 1/b
    length: Tensor  # scalar: Σ ‖x‖², the mean included
    offset: Tensor  # scalar: the largest n‖mean‖² / Σ‖x − mean‖² that went uncentred into a product
    raw: list[Tensor]  # (blocks, b·b) as they are, diagonal left out; empty unless asked for
    raw_diagonal: list[Tensor]  # (blocks, b)

    @property
    def rows(self) -> int:
        return sum(blocks * b for blocks, b in self.sizes)

    @property
    def check(self) -> Tensor:
        """Not finite where an activation was not."""
        return self.length


class GramMaker:
    """Makes the parts of one model; remembers which sites have to be centred first.

    Centring costs a pass over the activations, so it is done only where the mean is large against the
    spread and float32 (or TF32) would lose the difference.
    """

    def __init__(self, block: int = BLOCK, uncentred: bool = False) -> None:
        if block < 4:
            raise ValueError(f"a block needs at least 4 rows, got {block}")
        self.block, self.uncentred = block, uncentred
        self._centre: dict[str, bool] = {}

    def part(self, site: str, rows: Tensor, start: int = 0) -> GramPart:
        if len(rows) < 4:
            raise ValueError(f"{site}: {len(rows)} rows, but Gram matrices need at least 4")
        stacks = block_stacks(rows, self.block)
        known = self._centre.get(site)
        raw = [gram_stack(stack).double() for stack in stacks] if self.uncentred or not known else []
        offset = _offset(raw) if raw else torch.zeros((), dtype=torch.float64, device=rows.device)
        # Asking costs a wait for the device: on a GPU only the first chunk is asked, later ones are `noticed`.
        if known is None or not (known or rows.is_cuda):
            known = self._centre[site] = bool(offset > OFFSET_LIMIT)
        if not known:
            length = sum(gram.diagonal(dim1=-2, dim2=-1).sum() for gram in raw)
            return _assemble(raw, length, offset, raw if self.uncentred else [])
        means = [stack.mean(1, keepdim=True) for stack in stacks]
        grams = [gram_stack(stack - mean).double() for stack, mean in zip(stacks, means, strict=True)]
        length = sum(
            gram.diagonal(dim1=-2, dim2=-1).sum() + stack.shape[1] * mean.double().square().sum()
            for gram, stack, mean in zip(grams, stacks, means, strict=True)
        )
        return _assemble(grams, length, torch.zeros_like(offset), raw if self.uncentred else [])

    def notice(self, site: str, offset: float) -> None:
        """Told later how far off the mean was: centre this site from now on."""
        if offset > OFFSET_LIMIT:
            self._centre[site] = True


def _offset(grams: list[Tensor]) -> Tensor:
    """The largest n‖mean‖² / Σ‖x − mean‖² of the blocks; infinite where float32 lost the spread altogether."""
    found = []
    for gram in grams:
        from_mean = gram.sum((-1, -2)) / gram.shape[-1]
        spread = gram.diagonal(dim1=-2, dim2=-1).sum(-1) - from_mean
        lost = torch.where(from_mean > 0, torch.inf, 0.0).to(spread)
        found.append(torch.where(spread > 0, from_mean / spread, lost).max())
    return torch.stack(found).max()


def _assemble(grams: list[Tensor], length: Tensor | int, offset: Tensor, raw: list[Tensor]) -> GramPart:
    return GramPart(
        sizes=tuple((gram.shape[0], gram.shape[1]) for gram in grams),
        debiased=[u_centred(gram).flatten(1) for gram in grams],
        diagonal=[double_centred(g).diagonal(dim1=-2, dim2=-1) / (1 - 1 / g.shape[-1]) for g in grams],
        length=torch.as_tensor(length),
        offset=offset,
        raw=[without_diagonal(gram).flatten(1) for gram in raw],
        raw_diagonal=[gram.diagonal(dim1=-2, dim2=-1) for gram in raw],
    )

"""What one side makes of its rows: Gram matrices of fixed blocks, centred where float32 needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg import block_stacks, centred_diagonal, gram_cuda, gram_stack, u_centred, without_diagonal
from .drift import Drift, columns

BLOCK = 64  # rows a block
OFFSET_LIMIT = 30.0  # n‖mean‖² over Σ‖x − mean‖² above which rows are centred before the product


@dataclass(frozen=True)
class GramPart:
    """One site's Gram matrices of one chunk, as the products left them.

    Lists of stacks (blocks, b, b), since the last block may be larger. Nothing else is computed here: this is
    made inside the model's forward, and small operations are cheaper for all sites together.
    """

    grams: list[Tensor]
    from_mean: list[Tensor]  # (blocks,) b‖mean‖² if the rows were centred first; empty if not
    raw: list[Tensor]  # uncentred ones, if they are wanted beside centred ones
    few: Tensor  # (n, C): a few columns of the rows, to see whether they come in an order


class GramMaker:
    """Makes the parts of one model; remembers which sites have to be centred first.

    Centring costs a pass over the activations, so it is done only where the mean is large against the
    spread and float32 would lose the difference; on a GPU with Triton it is free, and always done.
    """

    def __init__(self, block: int = BLOCK, uncentred: bool = False, tf32: bool = True) -> None:
        if block < 4:
            raise ValueError(f"a block needs at least 4 rows, got {block}")
        self.block, self.uncentred, self.tf32 = block, uncentred, tf32
        self._centre: dict[str, bool] = {}

    def part(self, site: str, rows: Tensor, start: int = 0) -> GramPart:
        if len(rows) < 4:
            raise ValueError(f"{site}: {len(rows)} rows, but Gram matrices need at least 4")
        stacks = block_stacks(rows, self.block)
        few = rows[:, columns(rows.shape[1], rows.device)]
        if gram_cuda.suits(stacks[-1]):
            return self._in_one_reading(stacks, few)
        known = self._centre.get(site)
        raw = [gram_stack(stack) for stack in stacks] if self.uncentred or not known else []
        # Asking costs a wait for the device: on a GPU only the first chunk is asked, later ones are noticed.
        if known is None or not (known or rows.is_cuda):
            worst = max(float(offsets(gram.double()).max()) for gram in raw)
            known = self._centre[site] = worst > OFFSET_LIMIT
        if not known:
            return GramPart(raw, [], raw if self.uncentred else [], few)
        means = [stack.mean(1, keepdim=True) for stack in stacks]
        grams = [gram_stack(stack - mean) for stack, mean in zip(stacks, means, strict=True)]
        lengths = [mean.square().sum((1, 2), dtype=torch.float64) * stacks[k].shape[1] for k, mean in enumerate(means)]
        return GramPart(grams, lengths, raw if self.uncentred else [], few)

    def _in_one_reading(self, stacks: list[Tensor], few: Tensor) -> GramPart:
        """On a GPU, where centring is free."""
        found = [gram_cuda.gram_blocks(stack, about="mean", tf32=self.tf32) for stack in stacks]
        raw = (
            [gram_cuda.gram_blocks(stack, about="nothing", tf32=self.tf32)[0] for stack in stacks]
            if self.uncentred
            else []
        )
        return GramPart([gram for gram, _ in found], [length for _, length in found], raw, few)

    def side(self, parts: Sequence[GramPart], start: int = 0) -> GramSide:
        return GramSide.of(parts)

    def learnt(self) -> dict[str, bool]:
        """Which sites are centred first, for another process to begin with."""
        return dict(self._centre)

    def learn(self, centred: dict[str, bool]) -> None:
        self._centre |= centred

    def notice(self, site: str, offset: float) -> None:
        """Told later how far off the mean was: centre this site from now on."""
        if offset > OFFSET_LIMIT:
            self._centre[site] = True


def offsets(gram: Tensor) -> Tensor:
    """n‖mean‖² / Σ‖x − mean‖² of Gram matrices (…, n, n); infinite where float32 lost the spread altogether."""
    from_mean = gram.sum((-1, -2)) / gram.shape[-1]
    spread = gram.diagonal(dim1=-2, dim2=-1).sum(-1) - from_mean
    lost = torch.where(from_mean > 0, torch.inf, 0.0).to(spread)
    return torch.where(spread > 0, from_mean / spread, lost)


@dataclass(frozen=True)
class GramSide:
    """All sites of one side for one chunk, in float64; lists have one entry a stack of blocks."""

    sizes: tuple[tuple[int, int], ...]  # (blocks, b) of each stack
    debiased: list[Tensor]  # (blocks, sites, b·b) U-centred
    diagonal: list[Tensor]  # (blocks, sites, b) of the centred Gram, over 1 − 1/b
    length: Tensor  # (sites,) Σ ‖x‖², the mean included
    offset: Tensor  # (sites,) the largest n‖mean‖² / Σ‖x − mean‖² that went uncentred into a product
    raw: list[Tensor]  # (blocks, sites, b·b) as they are, diagonal left out; empty unless asked for
    raw_diagonal: list[Tensor]  # (blocks, sites, b)
    norms: list[Tensor]  # (blocks, sites) Σ Kᵢⱼ² of the U-centred ones
    heaviest: Tensor  # (sites,) the largest Σⱼ Kᵢⱼ² of one row of the U-centred Gram matrices
    drift: Drift
    halves: list[Tensor]  # (2 blocks, sites, b/2·b/2) U-centred: blocks cut in two; none of blocks of fewer than 8 rows
    raw_halves: list[Tensor]

    @classmethod
    def of(cls, parts: Sequence[GramPart]) -> GramSide:
        sizes = [tuple((len(gram), gram.shape[-1]) for gram in part.grams) for part in parts]
        for size in sizes:
            if size != sizes[0]:
                raise ValueError(f"need paired rows, got {_rows(sizes[0])} and {_rows(size)}")
        grams = [torch.stack(stack, dim=1).double() for stack in zip(*(part.grams for part in parts), strict=True)]
        raw = [torch.stack(stack, dim=1).double() for stack in zip(*(part.raw for part in parts), strict=True)]
        length = torch.stack([gram.diagonal(dim1=-2, dim2=-1).sum((0, 2)) for gram in grams]).sum(0)
        unbiased = [u_centred(gram) for gram in grams]
        by_row = [torch.einsum("ksij,ksij->ksi", gram, gram) for gram in unbiased]
        return cls(
            sizes=sizes[0],
            debiased=[gram.flatten(2) for gram in unbiased],
            norms=[rows.sum(-1) for rows in by_row],
            heaviest=torch.stack([rows.amax((0, 2)) for rows in by_row]).amax(0),
            diagonal=[centred_diagonal(g) / (1 - 1 / g.shape[-1]) for g in grams],
            length=length + _from_means(parts, grams),
            offset=_offsets_left(parts, grams),
            raw=[without_diagonal(gram).flatten(2) for gram in raw],
            raw_diagonal=[gram.diagonal(dim1=-2, dim2=-1) for gram in raw],
            drift=Drift.of(torch.stack([part.few for part in parts], dim=1), sizes[0]),
            halves=[u_centred(_cut_in_two(gram)).flatten(2) for gram in unbiased],
            raw_halves=[without_diagonal(_cut_in_two(gram)).flatten(2) for gram in raw],
        )

    @property
    def rows(self) -> int:
        return _rows(self.sizes)

    @property
    def blocks(self) -> int:
        return sum(count for count, _ in self.sizes)

    @property
    def check(self) -> Tensor:
        """(2, sites): a number that is not finite where an activation was not, and how far off the mean was."""
        return torch.stack([self.length, self.offset])


def _cut_in_two(gram: Tensor) -> Tensor:
    """(2 blocks, sites, b/2, b/2): all first halves, then all second ones; an odd row is left out."""
    half = gram.shape[-1] // 2
    if half < 4:
        return gram[:0]
    return torch.cat([gram[..., :half, :half], gram[..., half : 2 * half, half : 2 * half]])


def _from_means(parts: Sequence[GramPart], grams: list[Tensor]) -> Tensor:
    """(sites,): what the means took out of Σ‖x‖² where rows were centred."""
    found = []
    for stack, gram in enumerate(grams):
        nothing = gram.new_zeros(len(gram))
        found.append(torch.stack([p.from_mean[stack].double() if p.from_mean else nothing for p in parts]).sum(1))
    return torch.stack(found).sum(0)


def _offsets_left(parts: Sequence[GramPart], grams: list[Tensor]) -> Tensor:
    """(sites,): the largest offset that went into a product, 0 where rows were centred."""
    centred = [bool(part.from_mean) for part in parts]
    if all(centred):
        return grams[0].new_zeros(len(parts))
    worst = torch.stack([offsets(gram).amax(0) for gram in grams]).amax(0)
    return worst.masked_fill(torch.tensor(centred, device=worst.device), 0.0)


def _rows(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(count * b for count, b in sizes)

"""Grams: HSIC from the Gram matrices of fixed blocks of rows, for layers too wide for covariances.

Each block's estimate is unbiased, so their sum is; memory does not grow with the rows, and all pairs of
sites come out of one matrix product. Sums are kept for a few groups of blocks: they give the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..linalg import block_stacks, diagonal_part, double_centred, gram_stack, u_centred, without_diagonal
from .views import Alignment, DebiasedAlignment, UncentredAlignment

BLOCK = 64  # rows a block
GROUPS = 32  # groups of blocks whose sums are kept apart for the jackknife
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


@dataclass(frozen=True)
class PairSums:
    """Sums of products of two lots of per-site vectors, by group of blocks: G groups, A and B sites."""

    xx: Tensor  # (G, A)
    yy: Tensor  # (G, B)
    xy: Tensor  # (G, A, B)

    @classmethod
    def of(cls, xs: list[list[Tensor]], ys: list[list[Tensor]], groups: Tensor) -> PairSums:
        """`xs[site][stack]` is (blocks, length); `groups` names the group of each block, stack after stack."""
        xx, yy, xy = [], [], []
        for stack in range(len(xs[0])):
            x, y = (
                torch.stack([site[stack] for site in side], dim=1) for side in (xs, ys)
            )  # (blocks, sites, length)
            xx.append(x.square().sum(-1))
            yy.append(y.square().sum(-1))
            xy.append(torch.bmm(x, y.transpose(1, 2)))
        return cls(*(_grouped(torch.cat(found), groups) for found in (xx, yy, xy)))

    def merge(self, other: PairSums) -> PairSums:
        return PairSums(self.xx + other.xx, self.yy + other.yy, self.xy + other.xy)

    def total(self, without: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(A, 1), (1, B), (A, B): the sums over all groups, or over all but one."""
        found = (_sum(self.xx, without)[:, None], _sum(self.yy, without)[None, :], _sum(self.xy, without))
        return found


def _grouped(blocks: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros(GROUPS, *blocks.shape[1:], dtype=blocks.dtype, device=blocks.device).index_add(
        0, groups, blocks
    )


def _sum(grouped: Tensor, without: int | None) -> Tensor:
    return grouped.sum(0) if without is None else grouped.sum(0) - grouped[without]


@dataclass(frozen=True)
class Grams:
    """Block sums over paired rows of all sites of two sides; `merge` joins two lots of blocks."""

    block: int
    n: int
    debiased: PairSums
    diagonal: PairSums
    trace_a: Tensor  # (G, A)
    trace_b: Tensor  # (G, B)
    length_a: Tensor  # (A,) Σ ‖x‖²
    length_b: Tensor  # (B,)
    pairs: Tensor  # (G,) Σ b (b − 3): what the debiased sums are to be divided by
    raw: PairSums | None = None
    raw_diagonal: PairSums | None = None
    raw_pairs: Tensor | None = None  # (G,) Σ b (b − 1)

    @classmethod
    def of(
        cls,
        x: Tensor | Sequence[Tensor],
        y: Tensor | Sequence[Tensor],
        *,
        block: int = BLOCK,
        uncentred: bool = True,
    ) -> Grams:
        """From paired rows: (n, p) and (n, q), or a list of sites each."""
        xs, ys = ([side] if isinstance(side, Tensor) else list(side) for side in (x, y))
        if len(xs[0]) != len(ys[0]):
            raise ValueError(f"need paired rows, got {len(xs[0])} and {len(ys[0])}")
        makers = GramMaker(block, uncentred), GramMaker(block, uncentred)
        parts = [
            [m.part(str(i), r) for i, r in enumerate(side)] for m, side in zip(makers, (xs, ys), strict=True)
        ]
        return cls.join(parts[0], parts[1], block=block)

    @classmethod
    def join(
        cls, parts_a: Sequence[GramPart], parts_b: Sequence[GramPart], *, block: int, first_block: int = 0
    ) -> Grams:
        """The sums of one chunk, from what each side's sites made of it; blocks are counted over the whole data."""
        sizes = parts_a[0].sizes
        for part in (*parts_a, *parts_b):
            if part.sizes != sizes:
                raise ValueError(f"need paired rows, got {parts_a[0].rows} and {part.rows}")
        each = [b for k, b in sizes for _ in range(k)]
        device = parts_a[0].length.device
        groups = torch.arange(first_block, first_block + len(each), device=device) % GROUPS

        def sums(kind: str) -> PairSums:
            return PairSums.of(
                [getattr(p, kind) for p in parts_a], [getattr(p, kind) for p in parts_b], groups
            )

        def traces(parts: Sequence[GramPart]) -> Tensor:
            return _grouped(
                torch.stack([torch.cat([d.sum(1) for d in p.diagonal]) for p in parts], dim=1), groups
            )

        def counted(less: int) -> Tensor:
            return _grouped(
                torch.tensor([float(b * (b - less)) for b in each], dtype=torch.float64).to(device), groups
            )

        raw = bool(parts_a[0].raw)
        return cls(
            block=block,
            n=sum(each),
            debiased=sums("debiased"),
            diagonal=sums("diagonal"),
            trace_a=traces(parts_a),
            trace_b=traces(parts_b),
            length_a=torch.stack([part.length for part in parts_a]),
            length_b=torch.stack([part.length for part in parts_b]),
            pairs=counted(3),
            raw=sums("raw") if raw else None,
            raw_diagonal=sums("raw_diagonal") if raw else None,
            raw_pairs=counted(1) if raw else None,
        )

    @property
    def supplies(self) -> frozenset[type]:
        kinds = {Alignment, DebiasedAlignment}
        return frozenset(kinds | {UncentredAlignment} if self.raw is not None else kinds)

    @property
    def exact(self) -> bool:
        """Whether one block holds all rows."""
        return self.n < 2 * self.block

    @property
    def groups(self) -> list[int]:
        """The groups of blocks that can be left out in turn."""
        return [g for g, pairs in enumerate(self.pairs.tolist()) if pairs > 0]

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """For each site, how much of Σ‖x‖² is variation about the mean: nothing for constant features."""
        return self.trace_a.sum(0) / self.length_a, self.trace_b.sum(0) / self.length_b

    def describe(self) -> str:
        if self.exact:
            return f"Gram matrices of all {self.n} rows"
        return f"Gram matrices of blocks of {self.block} rows, {self.n} rows in all"

    def merge(self, other: Grams) -> Grams:
        if self.block != other.block:
            raise ValueError(f"these Grams have blocks of {self.block} and of {other.block} rows")
        if self.debiased.xy.shape != other.debiased.xy.shape or (self.raw is None) != (other.raw is None):
            raise ValueError(
                f"these Grams are of other sites: {tuple(self.debiased.xy.shape[1:])} and "
                f"{tuple(other.debiased.xy.shape[1:])}, or only one keeps uncentred sums"
            )
        found = {}
        for spec in fields(self):
            mine, theirs = getattr(self, spec.name), getattr(other, spec.name)
            if isinstance(mine, PairSums):
                found[spec.name] = mine.merge(theirs)
            elif isinstance(mine, Tensor) or spec.name == "n":
                found[spec.name] = mine + theirs
        return replace(self, **found)

    def alignment(self, kind: type[Alignment] = Alignment, *, without: int | None = None) -> Alignment:
        """Inner products of Gram matrices for every pair of sites, scaled to all n rows.

        The debiased ones are sums over the blocks. The biased and uncentred ones add what the diagonals
        contribute at n rows, so that they estimate the value on the whole data, bias and all.
        """
        if kind is UncentredAlignment:
            return self._uncentred(without)
        scale = self.n * (self.n - 3) / _sum(self.pairs, without)
        xx, yy, xy = (scale * part for part in self.debiased.total(without))
        if kind is DebiasedAlignment:
            return DebiasedAlignment(xx, yy, xy)
        share = self._share(without)
        centre = 1 - 1 / self.n  # the diagonals were taken about the block's mean and divided by 1 − 1/b
        trace_a = _sum(self.trace_a, without)[:, None] * centre / share
        trace_b = _sum(self.trace_b, without)[None, :] * centre / share
        kxx, kyy, kxy = (part * centre**2 / share for part in self.diagonal.total(without))
        return Alignment(
            xx + diagonal_part(kxx, trace_a, trace_a, self.n),
            yy + diagonal_part(kyy, trace_b, trace_b, self.n),
            xy + diagonal_part(kxy, trace_a, trace_b, self.n),
        )

    def _uncentred(self, without: int | None) -> UncentredAlignment:
        if self.raw is None or self.raw_diagonal is None or self.raw_pairs is None:
            raise ValueError("these Grams were made without uncentred sums")
        scale = self.n * (self.n - 1) / _sum(self.raw_pairs, without)
        share = self._share(without)
        return UncentredAlignment(
            *(
                scale * off + on / share
                for off, on in zip(self.raw.total(without), self.raw_diagonal.total(without), strict=True)
            )
        )

    def _share(self, without: int | None) -> Tensor | float:
        """Which part of the rows is left when a group is left out (by its pairs: blocks are of one size but the last)."""
        if without is None:
            return 1.0
        return _sum(self.pairs, without) / self.pairs.sum()

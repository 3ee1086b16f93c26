"""Grams: HSIC from the Gram matrices of fixed blocks of rows, for layers too wide for covariances.

The estimate from each block is unbiased, and so is the sum; memory does not grow with the rows, and one matrix product
covers all pairs of sites. Sums are kept for a few groups of blocks, which give the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks import paired_rows
from ..linalg import gram_cuda
from ..linalg.grams import block_stacks, centred_diagonal, diagonal_part, gram_stack, u_centred, without_diagonal
from .moments import side_of
from .sampling import orders_within_blocks
from .views import Alignment, DebiasedAlignment, UncentredAlignment

T = TypeVar("T")

# One side: Gram matrices of fixed blocks of rows, centred where float32 needs it

BLOCK = 64  # rows per block
OFFSET_LIMIT = 30.0  # n‖mean‖² over Σ‖x − mean‖² above which rows are centred before the product


@dataclass(frozen=True)
class GramPart:
    """The Gram matrices of one site and chunk, as the products left them.

    Lists of stacks (blocks, b, b), since the last block may be larger. Nothing else is computed here, inside the
    model's forward pass: small operations are cheaper for all sites together.
    """

    grams: list[Tensor]
    from_mean: list[Tensor]  # (blocks,) b‖mean‖² if rows were centred first; empty if not
    raw: list[Tensor]  # uncentred Gram matrices, if they are needed too
    few: Tensor  # (n, C): a few columns of the rows, to see whether rows come in an order

    def is_finite(self) -> bool:
        """Return whether the sum of squares is finite; called on a CPU only, where nothing waits for it."""
        traces = (gram.diagonal(dim1=-2, dim2=-1).sum() for gram in (*self.grams, *self.raw))
        return all(math.isfinite(trace) for trace in traces)


class GramMaker:
    """Makes the parts of one model; remembers which sites must be centred first.

    Centring costs a pass over the activations, so rows are centred only where the mean is so large against the spread
    that float32 would lose the difference; on a GPU with Triton it is free, and always done.
    """

    def __init__(self, block: int = BLOCK, uncentred: bool = False, tf32: bool = True) -> None:
        if block < 4:
            raise ValueError(f"a block needs at least 4 rows, got {block}")
        self.block, self.uncentred, self.tf32 = block, uncentred, tf32
        self.learnt: dict[str, bool] = {}  # the sites that are centred first; other processes start from it

    def part(self, site: str, rows: Tensor, start: int = 0) -> GramPart:
        if len(rows) < 4:
            raise ValueError(f"{site}: {len(rows)} rows, but Gram matrices need at least 4")
        stacks = block_stacks(rows, self.block)
        few = rows[:, columns(rows.shape[1], rows.device)]
        if rows.is_cuda and gram_cuda.suits(stacks[-1]):  # where centring is free
            read = [gram_cuda.gram_blocks(stack, about="mean", tf32=self.tf32) for stack in stacks]
            also = stacks if self.uncentred else []
            raw = [gram_cuda.gram_blocks(stack, about="nothing", tf32=self.tf32)[0] for stack in also]
            return GramPart([gram for gram, _ in read], [length for _, length in read], raw, few)
        known = self.learnt.get(site)
        raw = [gram_stack(stack) for stack in stacks] if self.uncentred or not known else []
        # This waits for the device, so a GPU does it for the first chunk only; `notice` handles later ones.
        if known is None or not (known or rows.is_cuda):
            known = self.learnt[site] = max(map(_largest_offset, raw)) > OFFSET_LIMIT
        if not known:
            return GramPart(raw, [], raw if self.uncentred else [], few)
        means = [stack.mean(1, keepdim=True) for stack in stacks]
        grams = [gram_stack(stack - mean) for stack, mean in zip(stacks, means, strict=True)]
        lengths = [mean.square().sum((1, 2), dtype=torch.float64) * stacks[k].shape[1] for k, mean in enumerate(means)]
        return GramPart(grams, lengths, raw if self.uncentred else [], few)

    def side(self, parts: Sequence[GramPart], start: int = 0) -> GramSide:
        """The side of one chunk, from the parts of all sites, by operations on all sites together."""
        sizes = [tuple((len(gram), gram.shape[-1]) for gram in part.grams) for part in parts]
        paired_rows(*map(_rows, sizes))
        grams = [torch.stack(stack, dim=1).double() for stack in zip(*(part.grams for part in parts), strict=True)]
        raw = [torch.stack(stack, dim=1).double() for stack in zip(*(part.raw for part in parts), strict=True)]
        length = torch.stack([gram.diagonal(dim1=-2, dim2=-1).sum((0, 2)) for gram in grams]).sum(0)
        from_means = []  # the part of Σ‖x‖² that centring removed
        for stack, gram in enumerate(grams):
            zero = gram.new_zeros(len(gram))
            means = [part.from_mean[stack].double() if part.from_mean else zero for part in parts]
            from_means.append(torch.stack(means).sum(1))
        centred = [bool(part.from_mean) for part in parts]
        offset = length.new_zeros(len(parts))
        if not all(centred):
            worst = torch.stack([offsets(gram).amax(0) for gram in grams]).amax(0)
            offset = worst.masked_fill(torch.tensor(centred, device=worst.device), 0.0)
        unbiased = [u_centred(gram) for gram in grams]
        by_row = [torch.einsum("ksij,ksij->ksi", gram, gram) for gram in unbiased]
        return GramSide(
            sizes=sizes[0],
            debiased=[gram.flatten(2) for gram in unbiased],
            norms=[rows.sum(-1) for rows in by_row],
            heaviest=torch.stack([rows.amax((0, 2)) for rows in by_row]).amax(0),
            diagonal=[centred_diagonal(g) / (1 - 1 / g.shape[-1]) for g in grams],
            length=length + torch.stack(from_means).sum(0),
            offset=offset,
            raw=[without_diagonal(gram).flatten(2) for gram in raw],
            raw_diagonal=[gram.diagonal(dim1=-2, dim2=-1) for gram in raw],
            drift=Drift.of(torch.stack([part.few for part in parts], dim=1), sizes[0]),
            halves=[u_centred(_cut_in_two(gram)).flatten(2) for gram in unbiased],
            raw_halves=[without_diagonal(_cut_in_two(gram)).flatten(2) for gram in raw],
        )

    def notice(self, site: str, offset: float) -> None:
        """Centre this site from now on if its mean was this far off, which is known later."""
        if offset > OFFSET_LIMIT:
            self.learnt[site] = True


def offsets(gram: Tensor) -> Tensor:
    """n‖mean‖² / Σ‖x − mean‖² of Gram matrices (…, n, n); infinite where float32 lost the spread."""
    from_mean = gram.sum((-1, -2)) / gram.shape[-1]
    spread = gram.diagonal(dim1=-2, dim2=-1).sum(-1) - from_mean
    lost = torch.where(from_mean > 0, torch.inf, 0.0).to(spread)
    return torch.where(spread > 0, from_mean / spread, lost)


def _largest_offset(grams: Tensor) -> float:
    """The largest of `offsets`, by plain numbers: for one site and chunk, tensors of so few numbers cost more."""
    totals = grams.sum((1, 2), dtype=torch.float64).tolist()
    traces = grams.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64).tolist()
    largest = 0.0
    for total, trace in zip(totals, traces, strict=True):
        from_mean = total / grams.shape[-1]
        spread = trace - from_mean
        largest = max(largest, from_mean / spread if spread > 0 else math.inf if from_mean > 0 else 0.0)
    return largest


@dataclass(frozen=True)
class GramSide:
    """All sites of one side for one chunk, in float64; lists have one entry per stack of blocks."""

    sizes: tuple[tuple[int, int], ...]  # (blocks, b) of each stack
    debiased: list[Tensor]  # (blocks, sites, b·b) U-centred
    diagonal: list[Tensor]  # (blocks, sites, b) of the centred Gram matrix, over 1 − 1/b
    length: Tensor  # (sites,) Σ ‖x‖², the mean included
    offset: Tensor  # (sites,) the largest n‖mean‖² / Σ‖x − mean‖² of an uncentred product
    raw: list[Tensor]  # (blocks, sites, b·b) uncentred, without the diagonal; empty unless wanted
    raw_diagonal: list[Tensor]  # (blocks, sites, b)
    norms: list[Tensor]  # (blocks, sites) Σ Kᵢⱼ² of U-centred Gram matrices
    heaviest: Tensor  # (sites,) the largest Σⱼ Kᵢⱼ² of one row of U-centred Gram matrices
    drift: Drift
    halves: list[Tensor]  # (2 blocks, sites, b/2·b/2) U-centred blocks cut in two; none for fewer than 8 rows
    raw_halves: list[Tensor]

    @property
    def rows(self) -> int:
        return _rows(self.sizes)

    @property
    def blocks(self) -> int:
        return sum(count for count, _ in self.sizes)

    @property
    def check(self) -> Tensor:
        """(2, sites): Σ x², not finite where an activation is not, and how far off the mean is."""
        return torch.stack([self.length, self.offset])


def _cut_in_two(gram: Tensor) -> Tensor:
    """(2 blocks, sites, b/2, b/2): all first halves, then all second halves; an odd row is left out."""
    half = gram.shape[-1] // 2
    if half < 4:
        return gram[:0]
    return torch.cat([gram[..., :half, :half], gram[..., half : 2 * half, half : 2 * half]])


def _rows(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(count * b for count, b in sizes)


# Sums over the blocks of all chunks

GROUPS = 32  # groups of blocks whose sums are kept apart for the jackknife


def _added(a: T, b: T) -> T:
    """The sum of two dataclasses, field by field; None stays None."""
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)]  # type: ignore[arg-type]
    return type(a)(*(None if x is None else x + y for x, y in pairs))


@dataclass(frozen=True)
class Grams:
    """Block sums over paired rows of all sites of two sides; `merge` adds other blocks."""

    block: int  # rows per block; the last of a part of the data may hold more
    blocks: int
    n: int
    debiased: PairSums
    diagonal: PairSums
    trace_a: Tensor  # (G, A)
    trace_b: Tensor  # (G, B)
    length_a: Tensor  # (A,) Σ ‖x‖²
    length_b: Tensor  # (B,)
    pairs: Tensor  # (G,) Σ b (b − 3): the divisor of the debiased sums
    variance: Tensor  # (A, B) of the debiased sum for rows shuffled within blocks: Σ 2 ‖K‖² ‖L‖² / (b (b − 3))
    heaviest_a: Tensor  # (A,) the largest Σⱼ Kᵢⱼ² of one row
    heaviest_b: Tensor
    drift_a: Drift
    drift_b: Drift
    raw: PairSums | None = None
    raw_diagonal: PairSums | None = None
    raw_pairs: Tensor | None = None  # (G,) Σ b (b − 1)
    shuffled: ShuffledSums | None = None  # the same sums with rows shuffled within blocks, for chance
    halved: PairSums | None = None  # the debiased sums of blocks cut in two, which show the error of blocks
    halved_pairs: Tensor | None = None  # (G,)
    raw_halved: PairSums | None = None
    raw_halved_pairs: Tensor | None = None

    supplies = frozenset({Alignment, DebiasedAlignment, UncentredAlignment})  # the last only if wanted

    @classmethod
    def of(
        cls,
        x: Tensor | Sequence[Tensor],
        y: Tensor | Sequence[Tensor],
        *,
        block: int = BLOCK,
        uncentred: bool = True,
        draws: int = 0,
        seed: int = 0,
    ) -> Grams:
        """From paired rows: (n, p) and (n, q), or a list of sites each."""
        a, b = (side_of(GramMaker(block, uncentred), rows) for rows in (x, y))
        return cls.join(a, b, block=block, draws=draws, seed=seed)

    @classmethod
    def join(
        cls, a: GramSide, b: GramSide, *, block: int, first_block: int = 0, draws: int = 0, seed: int = 0
    ) -> Grams:
        """The sums of one chunk, from both sides; blocks are counted over the whole data."""
        paired_rows(a.rows, b.rows)
        # Filled on the device, since sending numbers would make the host wait.
        rows = torch.cat([a.length.new_full((count,), float(size)) for count, size in a.sizes])
        groups = torch.arange(first_block, first_block + len(rows), device=rows.device) % GROUPS
        in_two = zip(groups.split([count for count, _ in a.sizes]), a.halves, strict=True)
        halved_groups = torch.cat([torch.cat([group, group])[: len(half)] for group, half in in_two])
        half = torch.cat([a.length.new_full((len(h),), h.shape[-1] ** 0.5) for h in a.halves])
        norms = zip(a.sizes, a.norms, b.norms, strict=True)
        variance = torch.stack([2 / (size * (size - 3)) * x.T @ y for (_, size), x, y in norms]).sum(0)
        return cls(
            block=block,
            blocks=a.blocks,
            n=a.rows,
            debiased=PairSums.of(a.debiased, b.debiased, groups, (a.norms, b.norms)),
            diagonal=PairSums.of(a.diagonal, b.diagonal, groups),
            trace_a=by_group(torch.cat([d.sum(-1) for d in a.diagonal]), groups),
            trace_b=by_group(torch.cat([d.sum(-1) for d in b.diagonal]), groups),
            length_a=a.length,
            length_b=b.length,
            pairs=by_group(rows * (rows - 3), groups),
            variance=variance,
            heaviest_a=a.heaviest,
            heaviest_b=b.heaviest,
            drift_a=a.drift,
            drift_b=b.drift,
            raw=PairSums.of(a.raw, b.raw, groups) if a.raw else None,
            raw_diagonal=PairSums.of(a.raw_diagonal, b.raw_diagonal, groups) if a.raw else None,
            raw_pairs=by_group(rows * (rows - 1), groups) if a.raw else None,
            shuffled=ShuffledSums.of(a, b, draws=draws, seed=seed, first_block=first_block) if draws else None,
            halved=PairSums.of(a.halves, b.halves, halved_groups),
            halved_pairs=by_group(half * (half - 3), halved_groups),
            raw_halved=PairSums.of(a.raw_halves, b.raw_halves, halved_groups) if a.raw else None,
            raw_halved_pairs=by_group(half * (half - 1), halved_groups) if a.raw else None,
        )

    @property
    def exact(self) -> bool:
        """Whether one block holds all rows."""
        return self.blocks == 1

    @property
    def groups(self) -> Tensor:
        """(G,) bool: the groups that have blocks."""
        return self.pairs > 0

    @property
    def halves(self) -> Grams | None:
        """These sums from blocks cut in two; None if blocks are too small, or the sums were not kept."""
        if self.halved is None or self.halved_pairs is None or not (self.halved_pairs > 0).equal(self.groups):
            return None
        raw = {} if self.raw_halved is None else {"raw": self.raw_halved, "raw_pairs": self.raw_halved_pairs}
        return replace(self, debiased=self.halved, pairs=self.halved_pairs, **raw)  # type: ignore[arg-type]

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """The share of each site's Σ‖x‖² that is variation about the mean: 0 for constant features."""
        return self.trace_a.sum(0) / self.length_a, self.trace_b.sum(0) / self.length_b

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        """An estimate of the trace of each site's centred Gram matrix of all rows."""
        return self.trace_a.sum(0) * (1 - 1 / self.n), self.trace_b.sum(0) * (1 - 1 / self.n)

    @property
    def heaviest_row(self) -> tuple[Tensor, Tensor]:
        """The largest share of each site's ‖K‖² in the row and column of one input."""
        return 2 * self.heaviest_a / self.debiased.xx.sum(0), 2 * self.heaviest_b / self.debiased.yy.sum(0)

    @property
    def drift(self) -> tuple[Tensor, Tensor]:
        """The variance between blocks over that within, for each site: about 1 unless rows come in an order."""
        return self.drift_a.ratios(self.n, self.blocks), self.drift_b.ratios(self.n, self.blocks)

    def describe(self) -> str:
        if self.exact:
            return f"Gram matrices of all {self.n} rows"
        return f"Gram matrices of blocks of {self.block} rows, {self.n} rows in all"

    def merge(self, other: Grams) -> Grams:
        if self.block != other.block:
            raise ValueError(f"these Grams have blocks of {self.block} and of {other.block} rows")
        kept = ("raw", "shuffled", "halved")
        unlike = any((getattr(self, name) is None) != (getattr(other, name) is None) for name in kept)
        if self.debiased.xy.shape != other.debiased.xy.shape or unlike:
            raise ValueError(
                f"these Grams are of other sites: {tuple(self.debiased.xy.shape[1:])} and "
                f"{tuple(other.debiased.xy.shape[1:])}, or only one keeps halved, uncentred or shuffled sums"
            )
        added: dict[str, Any] = {}
        for spec in fields(self):
            mine, theirs = getattr(self, spec.name), getattr(other, spec.name)
            if spec.name.startswith("heaviest"):
                added[spec.name] = torch.maximum(mine, theirs)
            elif spec.name != "block" and mine is not None:
                added[spec.name] = mine + theirs
        return replace(self, **added)

    def alignment(
        self, kind: type[Alignment] = Alignment, *, jackknife: bool = False, shuffled: bool = False
    ) -> Alignment:
        """Inner products of Gram matrices for every pair of sites, scaled to all n rows.

        Debiased ones are sums over the blocks. Biased and uncentred ones add what the diagonals contribute at n rows,
        so that they estimate the value on the whole data, bias included. With `jackknife`, a first dimension leaves out
        each group of blocks in turn. With `shuffled`, xy has a first dimension of draws of shuffled rows.
        """

        def drawn(name: str) -> Tensor | None:
            return getattr(self.shuffled, name) if shuffled else None

        share = _aside(over_groups(self.pairs, jackknife) / self.pairs.sum())  # of the pairs of rows that are left
        if kind is UncentredAlignment:
            if self.raw is None or self.raw_diagonal is None or self.raw_pairs is None:
                raise ValueError("these Grams were made without uncentred sums")
            scale = _aside(self.n * (self.n - 1) / over_groups(self.raw_pairs, jackknife))
            beside = self.raw.total(jackknife, drawn("raw"))
            on = self.raw_diagonal.total(jackknife, drawn("raw_diagonal"))
            return UncentredAlignment(*(scale * x + y / share for x, y in zip(beside, on, strict=True)))
        scale = _aside(self.n * (self.n - 3) / over_groups(self.pairs, jackknife))
        xx, yy, xy = (scale * part for part in self.debiased.total(jackknife, drawn("debiased")))
        if kind is DebiasedAlignment:
            return DebiasedAlignment(xx, yy, xy)
        centre = 1 - 1 / self.n  # the diagonals were taken about the block's mean and divided by 1 − 1/b
        trace_a = over_groups(self.trace_a, jackknife)[..., :, None] * centre / share
        trace_b = over_groups(self.trace_b, jackknife)[..., None, :] * centre / share
        kxx, kyy, kxy = (part * centre**2 / share for part in self.diagonal.total(jackknife, drawn("diagonal")))
        return Alignment(
            xx + diagonal_part(kxx, trace_a, trace_a, self.n),
            yy + diagonal_part(kyy, trace_b, trace_b, self.n),
            xy + diagonal_part(kxy, trace_a, trace_b, self.n),
        )

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """‖K‖² of each site's U-centred Gram matrix, scaled to all n rows."""
        view = self.alignment(DebiasedAlignment)
        return view.xx[:, 0], view.yy[0]


def _aside(number: Tensor) -> Tensor:
    """One number per group (or one in all), shaped to multiply matrices of pairs of sites."""
    return number[..., None, None]


@dataclass(frozen=True)
class PairSums:
    """Sums of products of per-site vectors of two sides, by group of blocks: G groups, A and B sites."""

    xx: Tensor  # (G, A)
    yy: Tensor  # (G, B)
    xy: Tensor  # (G, A, B)

    @classmethod
    def of(
        cls, xs: list[Tensor], ys: list[Tensor], groups: Tensor, norms: tuple[list[Tensor], list[Tensor]] | None = None
    ) -> PairSums:
        """From stacks (blocks, sites, length) of both sides; `groups` is the group of each block, stack after stack.

        `norms` are the sums of squares (blocks, sites), if they are known.
        """
        if norms is None:
            norms = [x.square().sum(-1) for x in xs], [y.square().sum(-1) for y in ys]
        return cls(
            by_group(torch.cat(norms[0]), groups),
            by_group(torch.cat(norms[1]), groups),
            by_group(torch.cat([torch.bmm(x, y.transpose(1, 2)) for x, y in zip(xs, ys, strict=True)]), groups),
        )

    __add__ = _added

    def total(self, jackknife: bool, drawn: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(A, 1), (1, B), (A, B): the sums over all groups or, with a first dimension, over all but each.

        `drawn`, xy (D, A, B) of shuffled rows, replaces xy.
        """
        xx, yy = over_groups(self.xx, jackknife), over_groups(self.yy, jackknife)
        return xx[..., :, None], yy[..., None, :], over_groups(self.xy, jackknife) if drawn is None else drawn


def by_group(blocks: Tensor, groups: Tensor) -> Tensor:
    """(G, …): sums over the entries of each group."""
    return torch.zeros(GROUPS, *blocks.shape[1:], dtype=blocks.dtype, device=blocks.device).index_add(0, groups, blocks)


def over_groups(grouped: Tensor, jackknife: bool) -> Tensor:
    """The sum over all groups, or (G, …) over all but each."""
    return grouped.sum(0) - grouped if jackknife else grouped.sum(0)


# Drift shows whether rows come in an order: blocks of consecutive rows cannot handle data sorted by class

COLUMNS = 32  # of each site that are read


@dataclass(frozen=True)
class Drift:
    """Sums over a few columns of every site, for the spread within and between blocks: S sites, C columns."""

    total: Tensor  # (S, C) Σ x
    squares: Tensor  # (S, C) Σ x²
    by_block: Tensor  # (S, C) Σ over blocks of (Σ x)² / rows

    @classmethod
    def of(cls, rows: Tensor, sizes: tuple[tuple[int, int], ...]) -> Drift:
        """From rows (n, S, C) in blocks of these sizes: ((blocks, b), …)."""
        rows = rows.double()
        by_block = torch.zeros_like(rows[0])
        for stack, (count, b) in zip(rows.split([count * b for count, b in sizes]), sizes, strict=True):
            by_block += stack.reshape(count, b, *rows.shape[1:]).sum(1).square().sum(0) / b
        return cls(rows.sum(0), rows.square().sum(0), by_block)

    __add__ = _added

    def ratios(self, n: int, blocks: int) -> Tensor:
        """(S,): the variance between blocks over that within, by degrees of freedom; about 1 for rows in no order."""
        between = (self.by_block - self.total.square() / n).sum(1) / (blocks - 1)
        within = (self.squares - self.by_block).sum(1) / (n - blocks)
        return torch.where(within > 0, between / within, torch.where(between > 0, torch.inf, 1.0).to(between))


@cache
def columns(width: int, device: torch.device) -> Tensor:
    """The columns of a site that are read, the same for all parts of the data."""
    if width <= COLUMNS:
        return torch.arange(COLUMNS, device=device) % width
    generator = torch.Generator().manual_seed(width)
    return torch.randperm(width, generator=generator)[:COLUMNS].sort().values.to(device)


# Chance: inner products of Gram matrices of blocks, with the rows of one side shuffled

AT_ONCE = 2**24  # numbers of shuffled Gram matrices made at a time


@dataclass(frozen=True)
class ShuffledSums:
    """Sums over blocks for D draws; one draw is one new order of the rows for all pairs of A and B sites."""

    debiased: Tensor  # (D, A, B)
    diagonal: Tensor  # (D, A, B)
    raw: Tensor | None = None
    raw_diagonal: Tensor | None = None

    @classmethod
    def of(cls, a: GramSide, b: GramSide, *, draws: int, seed: int, first_block: int) -> ShuffledSums:
        """The rows of the side with fewer sites are shuffled."""
        if len(a.length) > len(b.length):
            swapped = cls.of(b, a, draws=draws, seed=seed, first_block=first_block)
            sums = {field.name: getattr(swapped, field.name) for field in fields(cls)}
            return cls(**{name: each.transpose(1, 2) for name, each in sums.items() if each is not None})
        orders, block = [], first_block  # (blocks, draws, b) for each stack: new orders of the rows
        for count, size in a.sizes:
            of_blocks = [orders_within_blocks(seed, block + k, draws, size) for k in range(count)]
            orders.append(torch.stack(of_blocks).to(a.length.device))
            block += count
        return cls(
            debiased=_squares(a.debiased, b.debiased, orders),
            diagonal=_vectors(a.diagonal, b.diagonal, orders),
            raw=_squares(a.raw, b.raw, orders) if a.raw else None,
            raw_diagonal=_vectors(a.raw_diagonal, b.raw_diagonal, orders) if a.raw else None,
        )

    def __add__(self, other: ShuffledSums) -> ShuffledSums:
        if self.debiased.shape != other.debiased.shape:
            raise ValueError(f"{len(self.debiased)} and {len(other.debiased)} draws of shuffled rows do not add up")
        return _added(self, other)


def _squares(xs: list[Tensor], ys: list[Tensor], orders: list[Tensor]) -> Tensor:
    """(D, A, B): Σ K ∘ L over blocks, from stacks (blocks, sites, b·b) of symmetric matrices without a diagonal.

    In the upper triangle only.
    """
    total = xs[0].new_zeros(orders[0].shape[1], xs[0].shape[1], ys[0].shape[1])
    size_x, size_y = _sizes(xs), _sizes(ys)
    for x, y, order in zip(xs, ys, orders, strict=True):
        blocks, _, b = order.shape
        i, j = torch.triu_indices(b, b, 1, device=order.device)
        upper = (y[:, :, i * b + j] / size_y).float()  # (blocks, B, pairs): draws need no more digits
        few = max(1, AT_ONCE // (x.shape[1] * len(i)))
        for block in range(blocks):
            source = (x[block] / size_x).float()
            parts = []
            for some in order[block].split(few):
                moved = source[:, some[:, i] * b + some[:, j]]  # (A, draws, pairs)
                parts.append(2 * (moved @ upper[block].T).transpose(0, 1))
            total += torch.cat(parts)
    return total * (size_x * size_y.T)


def _sizes(stacks: list[Tensor]) -> Tensor:
    """(sites, 1): the power of 2 near the largest entry of each site, which brings entries into float32's range."""
    largest = torch.stack([stack.abs().amax((0, 2)) for stack in stacks]).amax(0)[:, None]
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.to(largest))  # torch 2.4 needs its type


def _vectors(xs: list[Tensor], ys: list[Tensor], orders: list[Tensor]) -> Tensor:
    """(D, A, B): the same for diagonals, stacks (blocks, sites, b)."""
    total = xs[0].new_zeros(orders[0].shape[1], xs[0].shape[1], ys[0].shape[1])
    for x, y, order in zip(xs, ys, orders, strict=True):
        for block in range(len(order)):
            total += (x[block][:, order[block]] @ y[block].T).transpose(0, 1)
    return total

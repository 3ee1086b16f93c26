"""Grams: HSIC from the Gram matrices of fixed blocks of rows, for layers too wide for covariances.

Each block's estimate is unbiased, so their sum is; memory does not grow with the rows, and all pairs of
sites come out of one matrix product. Sums are kept for a few groups of blocks: they give the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..linalg import diagonal_part, with_room
from .drift import Drift
from .gram_parts import BLOCK, GramMaker, GramSide
from .gram_shuffles import ShuffledSums
from .views import Alignment, DebiasedAlignment, UncentredAlignment

GROUPS = 32  # groups of blocks whose sums are kept apart for the jackknife


@dataclass(frozen=True)
class PairSums:
    """Sums of products of two lots of per-site vectors, by group of blocks: G groups, A and B sites."""

    xx: Tensor  # (G, A)
    yy: Tensor  # (G, B)
    xy: Tensor  # (G, A, B)

    @classmethod
    def of(
        cls, xs: list[Tensor], ys: list[Tensor], groups: Tensor, norms: tuple[list[Tensor], list[Tensor]] | None = None
    ) -> PairSums:
        """Stacks (blocks, sites, length) of both sides; `groups` names the group of each block, stack after stack.

        `norms` are the sums of squares (blocks, sites), where they are at hand.
        """
        if norms is None:
            norms = [x.square().sum(-1) for x in xs], [y.square().sum(-1) for y in ys]
        return cls(
            _grouped(torch.cat(norms[0]), groups),
            _grouped(torch.cat(norms[1]), groups),
            _grouped(torch.cat([torch.bmm(x, y.transpose(1, 2)) for x, y in zip(xs, ys, strict=True)]), groups),
        )

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(self.xx + other.xx, self.yy + other.yy, self.xy + other.xy)

    def total(self, jackknife: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(A, 1), (1, B), (A, B): the sums over all groups; or, with a dimension in front, over all but each."""
        xx, yy, xy = (_sum(part, jackknife) for part in (self.xx, self.yy, self.xy))
        return xx[..., :, None], yy[..., None, :], xy


class _Drawn(PairSums):
    """Sums whose xy (D, A, B) are draws of shuffled rows, not groups of blocks."""

    def total(self, jackknife: bool) -> tuple[Tensor, Tensor, Tensor]:
        return self.xx.sum(0)[:, None], self.yy.sum(0)[None, :], self.xy


def _variance(a: GramSide, b: GramSide) -> Tensor:
    """Σ over blocks of 2 ‖K‖² ‖L‖² / (b (b − 3)): exact for U-centred matrices whose rows are shuffled."""
    found = []
    for (_, size), x, y in zip(a.sizes, a.norms, b.norms, strict=True):
        found.append(2 / (size * (size - 3)) * x.T @ y)
    return torch.stack(found).sum(0)


def _grouped(blocks: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros(GROUPS, *blocks.shape[1:], dtype=blocks.dtype, device=blocks.device).index_add(0, groups, blocks)


def _sum(grouped: Tensor, jackknife: bool) -> Tensor:
    return grouped.sum(0) - grouped if jackknife else grouped.sum(0)


@dataclass(frozen=True)
class Grams:
    """Block sums over paired rows of all sites of two sides; `merge` joins two lots of blocks."""

    block: int  # rows a block was cut to; the last of a lot may hold more
    blocks: int
    n: int
    debiased: PairSums
    diagonal: PairSums
    trace_a: Tensor  # (G, A)
    trace_b: Tensor  # (G, B)
    length_a: Tensor  # (A,) Σ ‖x‖²
    length_b: Tensor  # (B,)
    pairs: Tensor  # (G,) Σ b (b − 3): what the debiased sums are to be divided by
    variance: Tensor  # (A, B) of the debiased sum when the rows of each block are shuffled, in closed form
    heaviest_a: Tensor  # (A,) the largest Σⱼ Kᵢⱼ² of one row
    heaviest_b: Tensor
    drift_a: Drift
    drift_b: Drift
    raw: PairSums | None = None
    raw_diagonal: PairSums | None = None
    raw_pairs: Tensor | None = None  # (G,) Σ b (b − 1)
    shuffled: ShuffledSums | None = None  # the same sums with rows shuffled within blocks, if chance was asked for
    halved: PairSums | None = None  # the debiased sums of blocks that are cut in two: how much blocks cost
    halved_pairs: Tensor | None = None  # (G,)
    raw_halved: PairSums | None = None
    raw_halved_pairs: Tensor | None = None

    supplies = frozenset({Alignment, DebiasedAlignment, UncentredAlignment})  # the last only if it was asked for

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
        sides = []
        for rows in (x, y):
            maker = GramMaker(block, uncentred)
            sites = [rows] if isinstance(rows, Tensor) else rows
            sides.append(maker.side([maker.part(str(k), with_room(site, f"site {k}")) for k, site in enumerate(sites)]))
        return cls.join(*sides, block=block, draws=draws, seed=seed)

    @classmethod
    def join(
        cls, a: GramSide, b: GramSide, *, block: int, first_block: int = 0, draws: int = 0, seed: int = 0
    ) -> Grams:
        """The sums of one chunk, from what each side made of it; blocks are counted over the whole data."""
        if a.sizes != b.sizes:
            raise ValueError(f"need paired rows, got {a.rows} and {b.rows}")
        # Filled on the device: sending numbers there would make the host wait for it.
        each = torch.cat([a.length.new_full((count,), float(size)) for count, size in a.sizes])
        groups = torch.arange(first_block, first_block + len(each), device=each.device) % GROUPS
        in_two = zip(groups.split([count for count, _ in a.sizes]), a.halves, strict=True)
        halved_groups = torch.cat([torch.cat([group, group])[: len(half)] for group, half in in_two])
        half = torch.cat([a.length.new_full((len(h),), h.shape[-1] ** 0.5) for h in a.halves])
        return cls(
            block=block,
            blocks=a.blocks,
            n=a.rows,
            debiased=PairSums.of(a.debiased, b.debiased, groups, (a.norms, b.norms)),
            diagonal=PairSums.of(a.diagonal, b.diagonal, groups),
            trace_a=_grouped(torch.cat([d.sum(-1) for d in a.diagonal]), groups),
            trace_b=_grouped(torch.cat([d.sum(-1) for d in b.diagonal]), groups),
            length_a=a.length,
            length_b=b.length,
            pairs=_grouped(each * (each - 3), groups),
            variance=_variance(a, b),
            heaviest_a=a.heaviest,
            heaviest_b=b.heaviest,
            drift_a=a.drift,
            drift_b=b.drift,
            raw=PairSums.of(a.raw, b.raw, groups) if a.raw else None,
            raw_diagonal=PairSums.of(a.raw_diagonal, b.raw_diagonal, groups) if a.raw else None,
            raw_pairs=_grouped(each * (each - 1), groups) if a.raw else None,
            shuffled=ShuffledSums.of(a, b, draws=draws, seed=seed, first_block=first_block) if draws else None,
            halved=PairSums.of(a.halves, b.halves, halved_groups),
            halved_pairs=_grouped(half * (half - 3), halved_groups),
            raw_halved=PairSums.of(a.raw_halves, b.raw_halves, halved_groups) if a.raw else None,
            raw_halved_pairs=_grouped(half * (half - 1), halved_groups) if a.raw else None,
        )

    @property
    def exact(self) -> bool:
        """Whether one block holds all rows."""
        return self.blocks == 1

    @property
    def groups(self) -> Tensor:
        """(G,) bool: the groups that hold blocks."""
        return self.pairs > 0

    @property
    def halves(self) -> Grams | None:
        """The same of blocks that are cut in two; none where they are too small, or were not kept."""
        if self.halved is None or self.halved_pairs is None or not (self.halved_pairs > 0).equal(self.groups):
            return None
        raw = {} if self.raw_halved is None else {"raw": self.raw_halved, "raw_pairs": self.raw_halved_pairs}
        return replace(self, debiased=self.halved, pairs=self.halved_pairs, **raw)  # type: ignore[arg-type]

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """For each site, how much of Σ‖x‖² is variation about the mean: nothing for constant features."""
        return self.trace_a.sum(0) / self.length_a, self.trace_b.sum(0) / self.length_b

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        """For each site an estimate of the trace of the centred Gram matrix of all rows."""
        return self.trace_a.sum(0) * (1 - 1 / self.n), self.trace_b.sum(0) * (1 - 1 / self.n)

    @property
    def heaviest_row(self) -> tuple[Tensor, Tensor]:
        """For each site the share of ‖K‖² that one row makes up: its row and its column."""
        return 2 * self.heaviest_a / self.debiased.xx.sum(0), 2 * self.heaviest_b / self.debiased.yy.sum(0)

    @property
    def drift(self) -> tuple[Tensor, Tensor]:
        """For each site, variance between blocks over variance within: about 1 unless rows come in an order."""
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

        The debiased ones are sums over the blocks. The biased and uncentred ones add what the diagonals
        contribute at n rows, so that they estimate the value on the whole data, bias and all. With
        `jackknife` there is a dimension in front: the same with each group of blocks left out in turn. With
        `shuffled` xy has a dimension in front: one draw of shuffled rows each.
        """
        if shuffled:
            return self._by_chance(kind)
        if kind is UncentredAlignment:
            return self._uncentred(jackknife)
        scale = _aside(self.n * (self.n - 3) / _sum(self.pairs, jackknife))
        xx, yy, xy = (scale * part for part in self.debiased.total(jackknife))
        if kind is DebiasedAlignment:
            return DebiasedAlignment(xx, yy, xy)
        share = self._share(jackknife)
        centre = 1 - 1 / self.n  # the diagonals were taken about the block's mean and divided by 1 − 1/b
        trace_a = _sum(self.trace_a, jackknife)[..., :, None] * centre / share
        trace_b = _sum(self.trace_b, jackknife)[..., None, :] * centre / share
        kxx, kyy, kxy = (part * centre**2 / share for part in self.diagonal.total(jackknife))
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

    def _uncentred(self, jackknife: bool) -> UncentredAlignment:
        if self.raw is None or self.raw_diagonal is None or self.raw_pairs is None:
            raise ValueError("these Grams were made without uncentred sums")
        scale = _aside(self.n * (self.n - 1) / _sum(self.raw_pairs, jackknife))
        share = self._share(jackknife)
        beside, on = self.raw.total(jackknife), self.raw_diagonal.total(jackknife)
        return UncentredAlignment(*(scale * x + y / share for x, y in zip(beside, on, strict=True)))

    def _by_chance(self, kind: type[Alignment]) -> Alignment:
        """The sums of pairs of sites replaced by those of shuffled rows."""
        if self.shuffled is None:
            raise ValueError("these Grams were made without shuffled sums")
        swapped: dict[str, PairSums] = {}
        for name in ("debiased", "diagonal", "raw", "raw_diagonal"):
            sums, xy = getattr(self, name), getattr(self.shuffled, name)
            if xy is not None:
                swapped[name] = _Drawn(sums.xx, sums.yy, xy)
        return replace(self, shuffled=None, **swapped).alignment(kind)  # type: ignore[arg-type]

    def _share(self, jackknife: bool) -> Tensor:
        """Which part of the rows is left, by its pairs: all blocks but the last are of one size."""
        return _aside(_sum(self.pairs, jackknife) / self.pairs.sum())


def _aside(number: Tensor) -> Tensor:
    """A number a group (or one), shaped to multiply matrices of pairs of sites."""
    return number[..., None, None]

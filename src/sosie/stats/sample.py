"""Sample: a seeded, order-free sample of paired rows, for measures that need the rows themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import paired_rows
from ..linalg import column_squares, cross_product, lacks_room, once, side_by_side, without_mean, without_rounding
from .row_grams import AllCovariances, AllPairedRows, RowGrams
from .sampling import Fold, RowSampler, Shuffle, row_hash
from .splits import Splits, check_folds, dealt_folds, split_side, splits_of
from .views import (
    Alignment,
    Covariances,
    DebiasedAlignment,
    Neurons,
    PairedRows,
    RowScatter,
    Scatter,
    SiteRows,
    UncentredAlignment,
    check_pairs,
    coordinates,
)

NO_NEURONS = "which are not neurons: pool with rows='mean', raise memory=, or take narrower sites"  # of projected rows


@dataclass(frozen=True)
class SampleSide:
    """The drawn rows of all sites of one side for one chunk."""

    rows: tuple[Tensor, ...]
    index: np.ndarray  # global indices of those rows
    seen: int  # rows they were drawn from
    sampler: RowSampler
    widest: int | None

    @property
    def check(self) -> Tensor:
        """(2, sites): Σ x² of the kept rows, not finite where a row is not; offsets do no harm here."""
        sums = torch.stack([torch.linalg.vector_norm(rows, dtype=torch.float64) for rows in self.rows]).square()
        return torch.stack([sums, torch.zeros_like(sums)])


class SampleMaker:
    """Makes the parts of one model: the drawn rows of each site, folded where they are too wide."""

    def __init__(self, sampler: RowSampler, widest: int | None = None) -> None:
        self.sampler, self.widest = sampler, widest
        self._folds: dict[int, Fold] = {}
        self.learnt: dict[str, Any] = {}  # always empty, since which rows are drawn depends on their index alone

    def part(self, site: str, rows: Tensor, start: int) -> tuple[Tensor, int]:
        """The drawn rows, and how many they were drawn from."""
        count = len(rows)
        drawn = self.sampler.draw(start, count) - start
        if len(drawn) < len(rows):
            rows = rows[torch.from_numpy(drawn).to(rows.device)]
        width = rows.shape[1]
        if self.widest is None or width <= self.widest:
            return rows.clone(), count
        if width not in self._folds:
            self._folds[width] = Fold(width, self.widest, self.sampler.seed)
        return self._folds[width](rows), count

    def side(self, parts: Sequence[tuple[Tensor, int]], start: int) -> SampleSide:
        seen = paired_rows(*(count for _, count in parts))
        kept = tuple(rows for rows, _ in parts)
        return SampleSide(kept, self.sampler.draw(start, seen), seen, self.sampler, self.widest)


@dataclass(frozen=True)
class Sample:
    """Paired rows of all sites of two sides, by global row index; `merge` keeps the smallest hashes."""

    xs: tuple[Tensor, ...]  # (n, p) for each site of A
    ys: tuple[Tensor, ...]
    index: np.ndarray  # (n,) global row indices, ascending
    seen: int  # rows the sample was drawn from
    most: int | None = None  # rows it may hold; None for all
    seed: int = 0
    folded: int | None = None  # width that wider rows were projected to
    inputs: Tensor | None = None  # (n, d) inputs of the networks, if a measure needs them
    split: Tensor | None = field(default=None, repr=False)  # (n,) fold of each row, if given
    noise: Tensor | None = field(default=None, repr=False, metadata={"kept": False})  # (q,) variances of noise in y
    _before: tuple[Sample, Shuffle] | None = field(default=None, repr=False, metadata={"kept": False})

    supplies = frozenset({Alignment, DebiasedAlignment, UncentredAlignment, Covariances, Neurons, PairedRows, Splits})

    @classmethod
    def of(cls, x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor], *, inputs: Tensor | None = None) -> Sample:
        """A sample of all rows: (n, p) and (n, q), or a list of sites each; gradients flow through."""
        xs, ys = (((side,) if isinstance(side, Tensor) else tuple(side)) for side in (x, y))
        n = paired_rows(*(len(rows) for rows in (*xs, *ys, *(() if inputs is None else (inputs,)))))
        if any(rows.dtype != torch.float64 and lacks_room(rows, "rows") for rows in (*xs, *ys)):
            xs, ys = (tuple(rows.double() for rows in side) for side in (xs, ys))
        return cls(xs, ys, np.arange(n), seen=n, inputs=inputs)

    @property
    def n(self) -> int:
        return len(self.index)

    @property
    def exact(self) -> bool:
        return self.n == self.seen and self.folded is None

    @property
    def widths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        a, b = (tuple(rows.shape[1] for rows in side) for side in (self.xs, self.ys))
        return a, b

    def describe(self) -> str:
        rows = f"all {self.n} rows" if self.n == self.seen else f"a seeded sample of {self.n} of {self.seen} rows"
        return rows if self.folded is None else f"{rows}, projected to {self.folded} columns where wider"

    @classmethod
    def join(cls, a: SampleSide, b: SampleSide, inputs: Tensor | None = None, fold_of: Tensor | None = None) -> Sample:
        """The drawn rows of one chunk from both sides, and the inputs if they are wanted; `fold_of` each row."""
        paired_rows(a.seen, b.seen)
        split = None if fold_of is None else fold_of[torch.from_numpy(a.index)]
        return cls(a.rows, b.rows, a.index, a.seen, a.sampler.rows, a.sampler.seed, a.widest, inputs, split)

    def merge(self, *others: Sample) -> Sample:
        """The rows of all samples; the result may hold as many as the smallest limit among them."""
        samples = (self, *others)
        settings = {(s.seed, s.folded, *s.widths) for s in samples}
        if len(settings) != 1:
            raise ValueError(f"these samples were not drawn alike (seed, projection, widths): {settings}")
        index = np.concatenate([s.index for s in samples])
        if len(np.unique(index)) < len(index):
            raise ValueError("these samples overlap: some rows are in both (see sosie.data.DataPart)")
        most = min((s.most for s in samples if s.most is not None), default=None)
        order = np.arange(len(index))
        if most is not None and len(index) > most:
            order = np.argpartition(row_hash(index, self.seed), most)[:most]
        order = order[np.argsort(index[order])]
        take = torch.from_numpy(order)

        def kept(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(parts))[take.to(parts[0].device)]

        xs, ys = (
            tuple(kept(rows) for rows in zip(*(getattr(s, side) for s in samples), strict=True))
            for side in ("xs", "ys")
        )
        seen = sum(s.seen for s in samples)
        of_rows: dict[str, Any] = {}
        for name, what in (("inputs", "the inputs"), ("split", "the folds of their rows")):
            held = [part for s in samples if (part := getattr(s, name)) is not None]
            if len(held) not in (0, len(samples)):
                raise ValueError(f"only some of these samples hold {what}")
            of_rows[name] = kept(held) if held else None
        return replace(self, xs=xs, ys=ys, index=index[order], seen=seen, most=most, **of_rows)

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        """The trace of each site's centred Gram matrix."""
        a, b = (
            torch.stack([without_mean(rows).square().sum(dtype=torch.float64) for rows in side])
            for side in (self.xs, self.ys)
        )
        return a, b

    def shuffled(self, shuffle: Shuffle) -> Sample:
        """This sample with each row of x beside another row of y; what depends on one side alone is not made again."""
        return replace(self, ys=tuple(rows[shuffle.order] for rows in self.ys), _before=(self, shuffle))

    def without(self, rows: Tensor) -> Sample:
        """This sample without those rows."""
        kept = torch.ones(self.n, dtype=torch.bool)
        kept[rows] = False
        xs, ys = (tuple(site[kept.to(site.device)] for site in side) for side in (self.xs, self.ys))
        inputs = None if self.inputs is None else self.inputs[kept.to(self.inputs.device)]
        split = None if self.split is None else self.split[kept]
        return replace(self, xs=xs, ys=ys, index=self.index[kept.numpy()], inputs=inputs, split=split, _before=None)

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """The share of each site's Σ‖x‖² that is variation about the mean: 0 for constant features."""
        a, b = (torch.stack([_spread(rows) for rows in side]) for side in (self.xs, self.ys))
        return a, b

    def alignment(self, kind: type[Alignment] = Alignment) -> Alignment:
        """Inner products of the whole Gram matrices for every pair of sites."""
        return self.grams.alignment(kind)

    @once
    def grams(self) -> RowGrams:
        return RowGrams(self.xs, self.ys)

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """‖K‖² of each site's U-centred Gram matrix."""
        return self.grams.own

    @once
    def _sites(self) -> tuple[list[SiteRows], list[SiteRows]]:
        if self._before is not None:
            original, shuffle = self._before
            return original._sites[0], [site.shuffled(shuffle) for site in original._sites[1]]
        a = [SiteRows(rows) for rows in self.xs]
        return a, a if self._with_itself else [SiteRows(rows) for rows in self.ys]

    @property
    def _with_itself(self) -> bool:
        """Whether both sides are the same tensors, so that one serves as the other."""
        return len(self.xs) == len(self.ys) and all(x is y for x, y in zip(self.xs, self.ys, strict=True))

    @once
    def _inputs(self) -> SiteRows | None:
        return None if self.inputs is None else SiteRows(self.inputs)

    def paired(self, i: int = 0, j: int = 0) -> PairedRows:
        return PairedRows(self._sites[0][i], self._sites[1][j], self._inputs)

    def neurons(self, i: int = 0, j: int = 0) -> Neurons:
        """Variances and covariances of the neurons of site i of A and site j of B, in float64."""
        sites = self._sites[0][i], self._sites[1][j]
        p, q = (site.rows.shape[1] for site in sites)
        if self.folded is not None and max(p, q) >= self.folded:
            raise ValueError(f"these rows were projected to {self.folded} columns, {NO_NEURONS}")
        check_pairs(p, q)
        x, y = (_centred_neurons(site) for site in sites)
        return Neurons(column_squares(x) / self.n, column_squares(y) / self.n, cross_product(x, y) / self.n)

    @once
    def _coordinates(self) -> tuple[list[tuple[Tensor, Scatter]], list[tuple[Tensor, Scatter]]]:
        """The centred rows of each site, in as few columns as they span, and their covariance."""
        if self._before is not None:
            original, shuffle = self._before
            a, b = original._coordinates
            return a, [(rows[shuffle.order], scatter) for rows, scatter in b]
        grad = any(rows.requires_grad for rows in (*self.xs, *self.ys))
        sites = [*self.xs, *(() if self._with_itself else self.ys)]
        in_turn = map if grad or len(sites) == 2 else side_by_side
        made = list(in_turn(partial(coordinates, differentiable=grad), sites))
        return made[: len(self.xs)], made[-len(self.ys) :]

    @property
    def scatters(self) -> tuple[list[Scatter], list[Scatter]]:
        """The covariance of each site."""
        a, b = ([scatter for _, scatter in side] for side in self._coordinates)
        return a, b

    def basis(self, i: int = 0) -> Tensor:
        """(n, k): orthonormal columns that span the centred neurons of site i of A; no gradients."""
        scatter = self.scatters[0][i]
        assert isinstance(scatter, RowScatter)
        return scatter.basis

    def covariances(self, i: int = 0, j: int = 0) -> Covariances:
        """Covariances of site i of A and site j of B, in as few coordinates as the rows span."""
        (x, scatter_x), (y, scatter_y) = self._coordinates[0][i], self._coordinates[1][j]
        order = None if self._before is None else self._before[1].order
        return Covariances(scatter_x, scatter_y, lambda: cross_product(x, y) / self.n, order=order)

    def of_all_pairs(self, reads: type, a: Sequence[int], b: Sequence[int]) -> AllCovariances | AllPairedRows | None:
        """The view of all pairs of these sites at once, if there is one."""
        if issubclass(reads, PairedRows):
            return AllPairedRows(([self._sites[0][i] for i in a], [self._sites[1][j] for j in b]), self._inputs)
        xs, ys = ([side[k] for k in some] for side, some in zip(self.scatters, (a, b), strict=True))
        if not all(isinstance(site, RowScatter) for site in (*xs, *ys)):
            return None
        return AllCovariances((xs, ys), None if self._before is None else self._before[1].order)  # type: ignore[arg-type]

    def splits(self, i: int = 0, j: int = 0, *, folds: int, seed: int) -> Splits:
        """The moments of every fold of site i of A and site j of B, by the given split or the rows' global indices."""
        if self.split is None:
            check_folds(folds, seed)
            fold = dealt_folds(torch.from_numpy(self.index), folds, seed)
        else:
            fold, folds = self.split, int(self.split.max()) + 1
        rows = self._coordinates[0][i][0].double()
        side = self._sites[0][i].memo(("split", folds, seed), lambda _: split_side(rows, fold, folds))
        return splits_of(rows, _centred_neurons(self._sites[1][j]), fold, side, self.noise)


def _centred_neurons(site: SiteRows) -> Tensor:
    # From the rows, not from what `memo` passes: the rounding depends on their precision.
    return site.memo("centred", lambda _: without_rounding(site.rows, torch.float64))


def _spread(rows: Tensor) -> Tensor:
    rows = rows.detach()
    mean = rows.mean(0, keepdim=True, dtype=torch.float64)
    about = column_squares(rows - mean.to(rows.dtype)).sum(dtype=torch.float64)
    return about / (about + len(rows) * mean.square().sum())

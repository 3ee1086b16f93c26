"""Sample: a seeded, order-free sample of paired rows, for measures that need the rows themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..data.draws import row_bits
from ..linalg import column_squares, cross_product, lacks_room, once
from . import from_rows
from .row_grams import RowGrams, shuffled_alignment
from .shuffle import Shuffle
from .views import (
    Alignment,
    Covariances,
    DebiasedAlignment,
    Neurons,
    PairedRows,
    Scatter,
    SiteRows,
    UncentredAlignment,
    check_pairs,
)

# Which rows of a stream are kept, and how rows that are too wide are made narrower: seeded, whatever the order

ROWS = 2048  # rows kept by default


def row_hash(index: np.ndarray, seed: int) -> np.ndarray:
    """A fixed pseudo-random 64-bit number for each global row index (splitmix64's mixing)."""
    return row_bits(seed, torch.from_numpy(np.asarray(index, dtype=np.int64))).numpy().view(np.uint64)


class RowSampler:
    """Which rows of a stream are kept: those with the smallest hash of their global index.

    Shared by both models, so that the rows stay paired. Draws shrink as better rows are met; what was
    drawn too much is dropped when samples merge.
    """

    def __init__(self, rows: int = ROWS, seed: int = 0) -> None:
        if rows < 4:
            raise ValueError(f"a sample needs at least 4 rows, got {rows}")
        self.rows, self.seed = rows, seed
        self._best = np.empty(0, dtype=np.uint64)
        self._drawn: tuple[int, int] | None = None
        self._kept = np.empty(0, dtype=np.int64)

    def draw(self, start: int, count: int) -> np.ndarray:
        """Global indices kept of the rows start … start + count; asking twice for the same rows gives the same."""
        if self._drawn != (start, count):
            index = np.arange(start, start + count)
            hashes = row_hash(index, self.seed)
            self._best = np.sort(np.concatenate([self._best, hashes]))[: self.rows]
            if len(self._best) == self.rows:
                index = index[hashes <= self._best[-1]]
            self._drawn, self._kept = (start, count), index
        return self._kept


class Fold:
    """A seeded random projection of rows: signs, and sums of the columns that fall together, as evenly as can be.

    Inner products are kept on average; their relative error is about 1/√(columns left).
    """

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        self.width, self.to, self.seed = width, to, seed
        self._wide: dict[torch.device, Tensor] = {}

    def __call__(self, rows: Tensor) -> Tensor:
        place = self.place(rows.device)
        added, taken = rows.new_zeros(len(rows), 2 * self.to).index_add_(1, place, rows).split(self.to, 1)
        return added - taken

    def place(self, device: torch.device) -> Tensor:
        """Where each column goes; sites of one width share it, and so do later sketches."""
        if self.width <= _REMEMBERED:
            return _remembered(self.width, self.to, self.seed, device)
        if device not in self._wide:
            self._wide[device] = _places(self.width, self.to, self.seed, device)
        return self._wide[device]


def _places(width: int, to: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + width)  # on the CPU: the same for every device
    length = -(-width // to)
    with torch.inference_mode(False):  # others may differentiate through what is remembered
        signs = torch.randint(0, 2, (width,), generator=generator)
        # What is taken off has places of its own, which saves a copy of the rows with signs.
        place = torch.randperm(to * length, generator=generator)[:width] // length + to * signs
        return place.to(device, non_blocking=True)


_REMEMBERED = 2**19  # columns up to which places are remembered: 4 MiB for one fold
_remembered = lru_cache(maxsize=32)(_places)


NO_NEURONS = (  # why projected rows are of no use to what matches neurons, and what to do
    "which are no neurons any more: pool with rows='mean', raise memory=, or take narrower sites"
)


@dataclass(frozen=True)
class SampleSide:
    """The drawn rows of all sites of one side for one chunk."""

    rows: tuple[Tensor, ...]
    index: np.ndarray  # global indices of those rows
    seen: int  # rows they were drawn from
    lottery: RowSampler
    widest: int | None

    @property
    def check(self) -> Tensor:
        """(2, sites): Σ x² of the kept rows, not finite where one of them was not; offsets do no harm here."""
        sums = torch.stack([torch.linalg.vector_norm(rows, dtype=torch.float64) for rows in self.rows]).square()
        return torch.stack([sums, torch.zeros_like(sums)])


class SampleMaker:
    """Makes the parts of one model: the drawn rows of each site, folded where they are too wide."""

    def __init__(self, lottery: RowSampler, widest: int | None = None) -> None:
        self.lottery, self.widest = lottery, widest
        self._folds: dict[int, Fold] = {}

    def part(self, site: str, rows: Tensor, start: int) -> tuple[Tensor, int]:
        """The drawn rows, and how many they were drawn from."""
        count = len(rows)
        drawn = self.lottery.draw(start, count) - start
        if len(drawn) < len(rows):
            rows = rows[torch.from_numpy(drawn).to(rows.device)]
        width = rows.shape[1]
        if self.widest is None or width <= self.widest:
            return rows.clone(), count
        if width not in self._folds:
            self._folds[width] = Fold(width, self.widest, self.lottery.seed)
        return self._folds[width](rows), count

    def learnt(self) -> None:
        """Nothing: which rows are drawn depends on their index alone."""

    def learn(self, nothing: None) -> None:
        pass

    def side(self, parts: Sequence[tuple[Tensor, int]], start: int) -> SampleSide:
        counts = {count for _, count in parts}
        if len(counts) != 1:
            raise ValueError(f"need paired rows, got {' and '.join(map(str, sorted(counts)))}")
        seen = counts.pop()
        kept = tuple(rows for rows, _ in parts)
        return SampleSide(kept, self.lottery.draw(start, seen), seen, self.lottery, self.widest)


@dataclass(frozen=True)
class Sample:
    """Paired rows of all sites of two sides, by global row index; `merge` keeps the smallest hashes."""

    xs: tuple[Tensor, ...]  # (n, p) a site of A
    ys: tuple[Tensor, ...]
    index: np.ndarray  # (n,) global row indices, ascending
    seen: int  # rows the sample was drawn from
    most: int | None = None  # rows it may hold; None: all
    seed: int = 0
    folded: int | None = None  # width that wider rows were projected to
    inputs: Tensor | None = None  # (n, d) what the networks were given, where a measure needs it
    _before: tuple[Sample, Shuffle] | None = field(default=None, repr=False, metadata={"kept": False})

    supplies = frozenset({Alignment, DebiasedAlignment, UncentredAlignment, Covariances, Neurons, PairedRows})

    @classmethod
    def of(cls, x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor], *, inputs: Tensor | None = None) -> Sample:
        """All of the given rows: (n, p) and (n, q), or a list of sites each; gradients flow through."""
        xs, ys = (((side,) if isinstance(side, Tensor) else tuple(side)) for side in (x, y))
        lengths = {len(rows) for rows in (*xs, *ys, *(() if inputs is None else (inputs,)))}
        if len(lengths) != 1:
            raise ValueError(f"need paired rows, got {' and '.join(map(str, sorted(lengths)))}")
        n = lengths.pop()
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
    def join(cls, a: SampleSide, b: SampleSide, inputs: Tensor | None = None) -> Sample:
        """The drawn rows of one chunk, from what each side kept of it, and of the inputs where they are wanted."""
        if a.seen != b.seen:
            raise ValueError(f"need paired rows, got {a.seen} and {b.seen}")
        return cls(a.rows, b.rows, a.index, a.seen, a.lottery.rows, a.lottery.seed, a.widest, inputs)

    def merge(self, *others: Sample) -> Sample:
        """The rows of all samples; the result may hold as many as the smallest limit among them."""
        lots = (self, *others)
        alike = {(s.seed, s.folded, *(r.shape[1] for r in s.xs), -1, *(r.shape[1] for r in s.ys)) for s in lots}
        if len(alike) != 1:
            raise ValueError(f"these samples were not drawn alike (seed, projection, widths): {alike}")
        index = np.concatenate([s.index for s in lots])
        if len(np.unique(index)) < len(index):
            raise ValueError("these samples overlap: some rows are in both (see sosie.data.DataPart)")
        most = min((s.most for s in lots if s.most is not None), default=None)
        order = np.arange(len(index))
        if most is not None and len(index) > most:
            order = np.argpartition(row_hash(index, self.seed), most)[:most]
        order = order[np.argsort(index[order])]
        take = torch.from_numpy(order)

        def kept(side: str) -> tuple[Tensor, ...]:
            return tuple(
                torch.cat(rows)[take.to(rows[0].device)] for rows in zip(*(getattr(s, side) for s in lots), strict=True)
            )

        seen = sum(s.seen for s in lots)
        given = [s.inputs for s in lots if s.inputs is not None]
        if len(given) not in (0, len(lots)):
            raise ValueError("only some of these samples hold the inputs")
        inputs = torch.cat(given)[take.to(given[0].device)] if given else None
        return replace(self, xs=kept("xs"), ys=kept("ys"), index=index[order], seen=seen, most=most, inputs=inputs)

    def shuffled_alignment(self, kind: type[Alignment], shuffles: Iterable[Shuffle]) -> Alignment:
        """xy (D, A, B): the inner products of each draw of shuffled rows."""
        return shuffled_alignment(self.xs, self.ys, kind, shuffles)

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        """For each site the trace of its centred Gram matrix."""
        a, b = (
            torch.stack([from_rows.without_mean(rows).square().sum(dtype=torch.float64) for rows in side])
            for side in (self.xs, self.ys)
        )
        return a, b

    def shuffled(self, shuffle: Shuffle) -> Sample:
        """Each row of x beside another row of y; what was made of either side's rows alone is not made again."""
        return replace(self, ys=tuple(rows[shuffle.order] for rows in self.ys), _before=(self, shuffle))

    def without(self, rows: Tensor) -> Sample:
        """The same without those rows."""
        kept = torch.ones(self.n, dtype=torch.bool)
        kept[rows] = False
        xs, ys = (tuple(site[kept.to(site.device)] for site in side) for side in (self.xs, self.ys))
        inputs = None if self.inputs is None else self.inputs[kept.to(self.inputs.device)]
        return replace(self, xs=xs, ys=ys, index=self.index[kept.numpy()], inputs=inputs)

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """For each site, how much of Σ‖x‖² is variation about the mean: nothing for constant features."""
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
        """Whether both sides are the same tensors, so that what is made of one serves the other."""
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
    def _coordinates(self) -> tuple[list[from_rows.Coordinates], list[from_rows.Coordinates]]:
        if self._before is not None:
            original, shuffle = self._before
            return original._coordinates[0], [site.shuffled(shuffle) for site in original._coordinates[1]]
        grad = any(rows.requires_grad for rows in (*self.xs, *self.ys))
        a = [from_rows.Coordinates.of(rows, differentiable=grad) for rows in self.xs]
        if self._with_itself:
            return a, a
        return a, [from_rows.Coordinates.of(rows, differentiable=grad) for rows in self.ys]

    @property
    def scatters(self) -> tuple[list[Scatter], list[Scatter]]:
        """Each site's own covariance."""
        a, b = ([site.scatter for site in side] for side in self._coordinates)
        return a, b

    def basis(self, i: int = 0) -> Tensor:
        """(n, k): orthonormal columns that span what the neurons of site i of A span, centred; no gradients."""
        scatter = self._coordinates[0][i].scatter
        assert isinstance(scatter, from_rows.RowScatter)
        return scatter.basis

    def covariances(self, i: int = 0, j: int = 0) -> Covariances:
        """Covariances of site i of A and site j of B, each in as few coordinates as its rows span."""
        return from_rows.covariances(self._coordinates[0][i], self._coordinates[1][j])


def _centred_neurons(site: SiteRows) -> Tensor:
    # Not from what memo passes on: how much rounding there is depends on the precision the rows came in.
    return site.memo("centred", lambda _: from_rows.without_rounding(site.rows, torch.float64))


def _spread(rows: Tensor) -> Tensor:
    rows = rows.detach()
    mean = rows.mean(0, keepdim=True, dtype=torch.float64)
    about = column_squares(rows - mean.to(rows.dtype)).sum(dtype=torch.float64)
    return about / (about + len(rows) * mean.square().sum())

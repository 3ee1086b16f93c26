"""Moments: exact sums over rows, from which CKA, CCA, Procrustes and regression follow in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import paired_rows
from ..linalg import JointMoments, cross_product, diagonal_part, memo, once, self_product, with_room
from .views import (
    Alignment,
    Covariances,
    DebiasedAlignment,
    Neurons,
    Scatter,
    UncentredAlignment,
    check_pairs,
    with_rows,
)

if TYPE_CHECKING:
    from .sample import Sample

TOO_FAR = 10.0  # standard deviations between the provisional centre and the mean before recentring


# A centre (p,), the rows (n, p) about it, their sum (p,), their squared lengths (n,), and Σ x xᵀ (p, p)
MomentPart = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
RowSums = tuple[Tensor, Tensor]  # Σ x (p,) and the squared lengths (n,) of rows


def part_of(centre: Tensor, rows: Tensor, sums: RowSums | None = None) -> MomentPart:
    """The part of one site and chunk from its rows less the centre."""
    return centre, rows, *(_row_sums(rows) if sums is None else sums), self_product(rows).double()


def _row_sums(rows: Tensor) -> RowSums:
    return rows.sum(0, dtype=torch.float64), rows.double().square().sum(1)


class MomentMaker:
    """Makes the parts of one model; keeps a provisional centre for each site, and moves it when it is far off."""

    def __init__(self, products: torch.dtype = torch.float64) -> None:
        self.products = products
        self.learnt: dict[str, Tensor] = {}  # the centres; another process starts from them, so that sums just add up

    def part(self, site: str, rows: Tensor, start: int = 0) -> MomentPart:
        return part_of(*self.about_centre(site, rows))

    def about_centre(self, site: str, rows: Tensor) -> tuple[Tensor, Tensor, RowSums]:
        """The provisional centre of a site, the rows less the centre in the precision of the products, and their sums.

        The centre moves to the mean of these rows if it is far off.
        """
        rows = rows.double() if self.products == torch.float64 or rows.dtype == torch.float64 else rows.float()
        centre = self.learnt.get(site)
        if centre is not None:
            if centre.device != rows.device:  # from another process
                centre = self.learnt[site] = centre.to(rows.device)
            about = rows - centre.to(rows.dtype)
            sums = total, lengths = _row_sums(about)
            away = (total / len(rows)).square().sum()
            if not bool(away > TOO_FAR**2 * (lengths.mean() - away)):
                return centre, about, sums
        mean = rows.mean(0, dtype=torch.float64)
        centre = self.learnt[site] = mean.to(rows.dtype).double()  # so that the subtraction is exact
        about = rows - centre.to(rows.dtype)
        return centre, about, _row_sums(about)

    def side(self, parts: Sequence[MomentPart], start: int = 0) -> MomentSide:
        centres, rows, totals, norms, squares = zip(*parts, strict=True)
        paired_rows(*map(len, rows))
        sums = SideSums(
            widths=tuple(x.shape[1] for x in rows),
            centre=torch.cat(centres),
            total=torch.cat(totals),
            length=torch.stack([lengths.sum() for lengths in norms]),
            cube=torch.cat([lengths @ x.double() for x, lengths in zip(rows, norms, strict=True)]),
            fourth=torch.stack([lengths.square().sum() for lengths in norms]),
            squares=squares,
        )
        return MomentSide(torch.cat(rows, dim=1), torch.stack(norms, dim=1), sums)


def side_of(maker: Any, rows: Tensor | Sequence[Tensor]) -> Any:
    """The side of paired rows: (n, p), or a list of sites."""
    sites = [rows] if isinstance(rows, Tensor) else rows
    return maker.side([maker.part(str(k), with_room(site, f"site {k}")) for k, site in enumerate(sites)])


@dataclass(frozen=True)
class SideSums:
    """Sums of all sites of one side, side by side: P = Σ widths, S sites."""

    widths: tuple[int, ...]
    centre: Tensor  # (P,)
    total: Tensor  # (P,)   Σ x
    length: Tensor  # (S,)  Σ ‖x‖²
    cube: Tensor  # (P,)    Σ ‖x‖² x
    fourth: Tensor  # (S,)  Σ ‖x‖⁴
    squares: tuple[Tensor, ...]  # (p, p) for each site: Σ x xᵀ

    @property
    def membership(self) -> Tensor:
        """(P, S): 1 where a column belongs to a site; turns vectors into block-diagonal matrices."""
        return torch.block_diag(*(torch.ones(w, 1, dtype=torch.float64) for w in self.widths)).to(self.total.device)

    def split(self, stacked: Tensor) -> tuple[Tensor, ...]:
        return stacked.split(self.widths)

    def moved(self, shift: Tensor, n: int) -> SideSums:
        """These sums about centre + shift."""
        member = self.membership
        d = member * shift[:, None]  # (P, S)
        d2 = d.square().sum(0)  # (S,)
        inner = d.T @ self.total  # (S,) dᵀΣx
        outer = [q @ e for q, e in zip(self.squares, self.split(shift), strict=True)]  # Σxxᵀ d
        d_outer = torch.stack([o @ e for o, e in zip(outer, self.split(shift), strict=True)])
        length = self.length - 2 * inner + n * d2
        cube = self.cube - 2 * torch.cat(outer) + (member @ d2) * self.total - (member @ length) * shift
        fourth = (
            self.fourth - 4 * (d.T @ self.cube) + 2 * d2 * self.length + 4 * d_outer - 4 * d2 * inner + n * d2.square()
        )
        squares = tuple(
            q - torch.outer(e, t) - torch.outer(t, e) + n * torch.outer(e, e)
            for q, t, e in zip(self.squares, self.split(self.total), self.split(shift), strict=True)
        )
        return replace(
            self,
            centre=self.centre + shift,
            total=self.total - n * shift,
            length=length,
            cube=cube,
            fourth=fourth,
            squares=squares,
        )

    def plus(self, other: SideSums) -> SideSums:
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("total", "length", "cube", "fourth")}
        return replace(self, **sums, squares=tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)))

    def traces(self, n: int) -> Tensor:
        """(S,): Σ‖x − μ‖² of each site."""
        return self.length - self.membership.T @ self.total.square() / n

    def spread(self, n: int) -> Tensor:
        """(S,): Σ‖x − μ‖² over Σ‖x‖² of each site."""
        trace, mean = self.traces(n), self.centre + self.total / n
        return trace / (trace + n * self.membership.T @ mean.square())

    def norms(self, shift: Tensor, n: int) -> Tensor:
        """(S,): ‖Σ (x + shift)(x + shift)ᵀ‖² of each site."""
        parts = []
        for square, total, by in zip(self.squares, self.split(self.total), self.split(shift), strict=True):
            moved = torch.addr(torch.addr(square, by, total + n * by), total, by)
            parts.append(moved.square().sum())
        return torch.stack(parts)

    def debiased(self, n: int) -> Tensor:
        """(S,): n (n − 3) HSIC_u of each site with itself."""
        trace, kappa = self.traces(n), self.moved(self.total / n, n).fourth  # κ = Σ ‖x − μ‖⁴
        return self.norms(-self.total / n, n) - diagonal_part(kappa, trace, trace, n)

    def scatter(self, index: int, n: int) -> Scatter:
        """The covariance of one site."""
        mean = self.split(self.total)[index] / n
        return Scatter(self.squares[index] / n - torch.outer(mean, mean), n)


@dataclass(frozen=True)
class MomentSide:
    """All sites of one side for one chunk."""

    rows: Tensor  # (n, P) about the centres
    norms: Tensor  # (n, S)
    sums: SideSums

    @property
    def check(self) -> Tensor:
        """(2, sites): Σ x², not finite where an activation is not, and an offset of 0, since rows are centred."""
        return torch.stack([self.sums.length, torch.zeros_like(self.sums.length)])


@dataclass(frozen=True)
class Moments:
    """Sums over paired rows of all sites of two sides, about one centre per site; `merge` adds other rows."""

    n: int
    a: SideSums
    b: SideSums
    cross: Tensor  # (P, Q)  Σ x yᵀ
    weighted_x: Tensor  # (P, B) Σ ‖y‖² x
    weighted_y: Tensor  # (A, Q) Σ ‖x‖² y
    lengths: Tensor  # (A, B) Σ ‖x‖² ‖y‖²
    # The rows, or a sample of them, if they were kept: for sites whose covariance does not show all directions.
    rows: Sample | None = field(default=None, repr=False, compare=False, metadata={"kept": False})

    exact = True  # no row is left out
    supplies = frozenset({Alignment, DebiasedAlignment, UncentredAlignment, Covariances, Neurons})

    @classmethod
    def of(cls, x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor]) -> Moments:
        """From paired rows: (n, p) and (n, q), or a list of sites each."""
        return cls.join(*(side_of(MomentMaker(), rows) for rows in (x, y)))

    @classmethod
    def join(cls, a: MomentSide, b: MomentSide) -> Moments:
        """The moments of one chunk, from both sides."""
        return cls(
            n=paired_rows(len(a.rows), len(b.rows)),
            a=a.sums,
            b=b.sums,
            cross=cross_product(a.rows, b.rows).double(),
            weighted_x=a.rows.double().T @ b.norms,
            weighted_y=a.norms.T @ b.rows.double(),
            lengths=a.norms.T @ b.norms,
        )

    @property
    def widths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.a.widths, self.b.widths

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """The share of each site's Σ‖x‖² that is variation about the mean: 0 for constant features."""
        return self.a.spread(self.n), self.b.spread(self.n)

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        """The trace of each site's centred Gram matrix."""
        return self.a.traces(self.n), self.b.traces(self.n)

    @once
    def own(self) -> tuple[Tensor, Tensor]:
        """‖K‖² of each site's U-centred Gram matrix."""
        return self.a.debiased(self.n), self.b.debiased(self.n)

    def describe(self) -> str:
        return f"moments of all {self.n} rows"

    def alignment(self, kind: type[Alignment] = Alignment) -> Alignment:
        """Inner products of Gram matrices for every pair of sites."""
        return memo(self, kind, self._debiased if kind is DebiasedAlignment else lambda: self._biased(kind))

    def _biased(self, kind: type[Alignment]) -> Alignment:
        """‖Σ x yᵀ‖² about the means, or about the origin if uncentred."""
        a, b = self.a, self.b
        uncentred = kind is UncentredAlignment
        shift_a, shift_b = (a.centre, b.centre) if uncentred else (-a.total / self.n, -b.total / self.n)
        total_b = b.total + self.n * shift_b
        owner = torch.repeat_interleave(
            torch.arange(len(b.widths), device=self.cross.device), torch.tensor(b.widths, device=self.cross.device)
        )
        parts = []  # a site of A at a time, to spare memory
        for block, total, by in zip(self.cross.split(a.widths), a.split(a.total), a.split(shift_a), strict=True):
            columns = torch.addr(torch.addr(block, by, total_b), total, shift_b).square().sum(0)
            parts.append(columns.new_zeros(len(b.widths)).index_add(0, owner, columns))
        return kind(a.norms(shift_a, self.n)[:, None], b.norms(shift_b, self.n)[None, :], torch.stack(parts))

    def _debiased(self) -> DebiasedAlignment:
        """n (n − 3) HSIC_u for every pair of sites, exactly."""
        if self.n < 4:
            raise ValueError(f"the debiased alignment needs at least 4 rows, got {self.n}")
        (xx, yy), (trace_a, trace_b) = self.own, self.traces
        means = [side.membership * (side.total / self.n)[:, None] for side in (self.a, self.b)]
        kappa = self._lengths_about(*means)  # Σ ‖x − μ‖² ‖y − ν‖²
        xy = self.alignment(Alignment).xy - diagonal_part(kappa, trace_a[:, None], trace_b[None, :], self.n)
        return DebiasedAlignment(xx[:, None], yy[None, :], xy)

    @once
    def scatters(self) -> tuple[list[Scatter], list[Scatter]]:
        """The covariance of each site."""
        a, b = ([s.scatter(i, self.n) for i in range(len(s.widths))] for s in (self.a, self.b))
        if self.rows is not None:
            a = [with_rows(scatter, raw) for scatter, raw in zip(a, self.rows.xs, strict=True)]
            b = [with_rows(scatter, raw) for scatter, raw in zip(b, self.rows.ys, strict=True)]
        return a, b

    def beside(self, rows: Sample | None) -> Moments:
        """These moments with the rows, or a sample of them; projected rows are of no use."""
        return self if rows is None or rows.folded is not None else replace(self, rows=rows)

    def covariances(self, i: int = 0, j: int = 0) -> Covariances:
        """The covariances of site i of A and site j of B; the factorisations of each site are made once."""
        block = self.cross.split(self.a.widths)[i].split(self.b.widths, dim=1)[j]
        mean_a, mean_b = self.a.split(self.a.total)[i] / self.n, self.b.split(self.b.total)[j] / self.n
        xy = block / self.n - torch.outer(mean_a, mean_b)
        return Covariances(self.scatters[0][i], self.scatters[1][j], xy)

    def neurons(self, i: int = 0, j: int = 0) -> Neurons:
        """Variances and covariances of the neurons of site i of A and site j of B."""
        check_pairs(self.a.widths[i], self.b.widths[j])
        view = self.covariances(i, j)
        return Neurons(view.x.matrix.diagonal(), view.y.matrix.diagonal(), view.xy)

    def joint(self, i: int = 0, j: int = 0) -> JointMoments:
        """Means and covariances of site i of A and site j of B, in the coordinates of their neurons, for a fit."""
        view = self.covariances(i, j)
        a, b = (side.split(side.centre + side.total / self.n)[k] for side, k in ((self.a, i), (self.b, j)))
        return JointMoments(self.n, a, b, view.x.matrix, view.y.matrix, view.xy)

    def about(self, centre_a: Tensor, centre_b: Tensor) -> Moments:
        """These moments about other centres, in closed form."""
        d, e = centre_a - self.a.centre, centre_b - self.b.centre
        if not bool(d.any()) and not bool(e.any()):
            return self
        dd, ee = self.a.membership * d[:, None], self.b.membership * e[:, None]  # (P, A), (Q, B)
        d2, e2 = dd.square().sum(0), ee.square().sum(0)
        a, b = self.a.moved(d, self.n), self.b.moved(e, self.n)
        return Moments(
            n=self.n,
            a=a,
            b=b,
            cross=self.cross - torch.outer(d, self.b.total) - torch.outer(self.a.total - self.n * d, e),
            weighted_x=self.weighted_x - 2 * self.cross @ ee + self.a.total[:, None] * e2 - d[:, None] * b.length,
            weighted_y=self.weighted_y - 2 * dd.T @ self.cross + d2[:, None] * self.b.total - a.length[:, None] * e,
            lengths=self._lengths_about(dd, ee),
        )

    def _lengths_about(self, dd: Tensor, ee: Tensor) -> Tensor:
        """(A, B): Σ ‖x − d‖² ‖y − e‖², for shifts as block-diagonal matrices (P, A) and (Q, B)."""
        d2, e2 = dd.square().sum(0)[:, None], ee.square().sum(0)[None, :]
        total_a, total_b = (dd.T @ self.a.total)[:, None], ee.T @ self.b.total
        return (
            self.lengths
            - 2 * self.weighted_y @ ee
            - 2 * dd.T @ self.weighted_x
            + 4 * dd.T @ self.cross @ ee
            + self.a.length[:, None] * e2
            + d2 * self.b.length
            - 2 * total_a * e2
            - 2 * d2 * total_b
            + self.n * d2 * e2
        )

    def merge(self, other: Moments) -> Moments:
        if self.a.widths != other.a.widths or self.b.widths != other.b.widths:
            raise ValueError(
                f"these moments are of other sites: widths {self.a.widths} x {self.b.widths} "
                f"and {other.a.widths} x {other.b.widths}"
            )
        other = other.about(self.a.centre, self.b.centre)
        added = ("n", "cross", "weighted_x", "weighted_y", "lengths")
        sums = {name: getattr(self, name) + getattr(other, name) for name in added}
        return Moments(a=self.a.plus(other.a), b=self.b.plus(other.b), **sums)

"""Moments: exact sums over rows, from which CKA, CCA, Procrustes and regression follow in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..linalg import JointMoments, cross_product, diagonal_part, once, self_product, with_room
from . import from_rows
from .views import Alignment, Covariances, DebiasedAlignment, Neurons, Scatter, UncentredAlignment, check_pairs

if TYPE_CHECKING:
    from .sample import Sample


# Views in closed form from moments about the provisional centres


def centred_alignment(m: Moments) -> Alignment:
    """⟨Kc, Lc⟩ = ‖Σ (x − μ)(y − ν)ᵀ‖² for every pair of sites."""
    mean_a, mean_b = m.a.total / m.n, m.b.total / m.n
    return Alignment(
        xx=_own_norms(m.a, -mean_a, m.n)[:, None],
        yy=_own_norms(m.b, -mean_b, m.n)[None, :],
        xy=_pair_norms(m, -mean_a, -mean_b),
    )


def uncentred_alignment(m: Moments) -> UncentredAlignment:
    """⟨K, L⟩ = ‖Σ x yᵀ‖²: the sums moved back to the origin."""
    return UncentredAlignment(
        xx=_own_norms(m.a, m.a.centre, m.n)[:, None],
        yy=_own_norms(m.b, m.b.centre, m.n)[None, :],
        xy=_pair_norms(m, m.a.centre, m.b.centre),
    )


def debiased_alignment(m: Moments) -> DebiasedAlignment:
    """n (n − 3) HSIC_u for every pair of sites, exactly."""
    if m.n < 4:
        raise ValueError(f"the debiased alignment needs at least 4 rows, got {m.n}")
    biased = m.alignment(Alignment)
    trace_a, trace_b = traces(m.a, m.n)[:, None], traces(m.b, m.n)[None, :]
    return DebiasedAlignment(
        xx=own_debiased(m.a, m.n)[:, None],
        yy=own_debiased(m.b, m.n)[None, :],
        xy=biased.xy - diagonal_part(_pair_kappa(m), trace_a, trace_b, m.n),
    )


def own_debiased(side: SideSums, n: int) -> Tensor:
    """(S,): n (n − 3) HSIC_u of each site with itself."""
    trace = traces(side, n)
    return _own_norms(side, -side.total / n, n) - diagonal_part(_own_kappa(side, n), trace, trace, n)


def scatter(side: SideSums, index: int, n: int) -> Scatter:
    """The covariance of one site."""
    mean = side.split(side.total)[index] / n
    return Scatter(side.squares[index] / n - torch.outer(mean, mean), n)


def covariances(m: Moments, i: int, j: int, sides: tuple[Scatter, Scatter]) -> Covariances:
    """The covariances of one pair of sites; `sides` are shared by all pairs."""
    block = m.cross.split(m.a.widths)[i].split(m.b.widths, dim=1)[j]
    mean_a, mean_b = m.a.split(m.a.total)[i] / m.n, m.b.split(m.b.total)[j] / m.n
    return from_rows.between(*sides, block / m.n - torch.outer(mean_a, mean_b))


def joint(m: Moments, i: int, j: int) -> JointMoments:
    """Means and covariances of one pair of sites, in their own coordinates."""
    found = m.covariances(i, j)
    a, b = (side.split(side.centre + side.total / m.n)[k] for side, k in ((m.a, i), (m.b, j)))
    return JointMoments(m.n, a, b, found.x.matrix, found.y.matrix, found.xy)


def _pair_norms(m: Moments, shift_a: Tensor, shift_b: Tensor) -> Tensor:
    """‖Σ (x + shift_a)(y + shift_b)ᵀ‖² for every pair, a site of A at a time to spare memory."""
    total_b = m.b.total + m.n * shift_b
    site_b = torch.repeat_interleave(
        torch.arange(len(m.b.widths), device=m.cross.device), torch.tensor(m.b.widths, device=m.cross.device)
    )
    found = []
    for block, total, shift in zip(m.cross.split(m.a.widths), m.a.split(m.a.total), m.a.split(shift_a), strict=True):
        moved = torch.addr(torch.addr(block, shift, total_b), total, shift_b)
        columns = moved.square().sum(0)
        found.append(
            torch.zeros(len(m.b.widths), dtype=columns.dtype, device=columns.device).index_add(0, site_b, columns)
        )
    return torch.stack(found)


def _own_norms(side: SideSums, shift: Tensor, n: int) -> Tensor:
    found = []
    for square, total, by in zip(side.squares, side.split(side.total), side.split(shift), strict=True):
        moved = torch.addr(torch.addr(square, by, total + n * by), total, by)
        found.append(moved.square().sum())
    return torch.stack(found)


def traces(side: SideSums, n: int) -> Tensor:
    """Σ‖x − μ‖² for each site."""
    return side.length - side.membership.T @ side.total.square() / n


def spread(side: SideSums, n: int) -> Tensor:
    """Σ‖x − μ‖² over Σ‖x‖² for each site."""
    trace = traces(side, n)
    mean = side.centre + side.total / n
    return trace / (trace + n * side.membership.T @ mean.square())


def _own_kappa(side: SideSums, n: int) -> Tensor:
    """κ = Σ ‖x − μ‖⁴: the fourth moment moved to the mean."""
    return side.moved(side.total / n, n).fourth


def _pair_kappa(m: Moments) -> Tensor:
    """κ = Σ ‖x − μ‖² ‖y − ν‖² = A − 2νᵀb − 2μᵀa + 4μᵀSν + ‖ν‖²Tx + ‖μ‖²Ty − 3n‖μ‖²‖ν‖²."""
    mu, nu = m.a.membership * (m.a.total / m.n)[:, None], m.b.membership * (m.b.total / m.n)[:, None]
    mu2, nu2 = mu.square().sum(0)[:, None], nu.square().sum(0)[None, :]
    return (
        m.lengths
        - 2 * m.weighted_y @ nu
        - 2 * mu.T @ m.weighted_x
        + 4 * mu.T @ m.cross @ nu
        + nu2 * m.a.length[:, None]
        + mu2 * m.b.length[None, :]
        - 3 * m.n * mu2 * nu2
    )


FORMS: dict[type[Alignment], Callable[[Moments], Alignment]] = {
    Alignment: centred_alignment,
    DebiasedAlignment: debiased_alignment,
    UncentredAlignment: uncentred_alignment,
}


TOO_FAR = 10.0  # standard deviations between the provisional centre and the mean before recentring


@dataclass(frozen=True)
class MomentPart:
    """One site's rows of one chunk about its provisional centre, and the sums that concern it alone."""

    centre: Tensor  # (p,) float64
    rows: Tensor  # (n, p) less the centre, in the precision of the products
    norms: Tensor  # (n,) squared lengths of those rows, float64
    square: Tensor  # (p, p) Σ x xᵀ


class MomentMaker:
    """Makes the parts of one model: keeps each site's provisional centre, and moves it when it is far off."""

    def __init__(self, products: torch.dtype = torch.float64) -> None:
        self.products = products
        self._centres: dict[str, Tensor] = {}

    def part(self, site: str, rows: Tensor, start: int = 0) -> MomentPart:
        rows = rows.double() if self.products == torch.float64 or rows.dtype == torch.float64 else rows.float()
        mean = rows.mean(0, dtype=torch.float64)
        centre = self._centres.get(site)
        if centre is not None and centre.device != rows.device:  # told by another process
            centre = self._centres[site] = centre.to(rows.device)
        if centre is None or self._far(rows, mean, centre):
            centre = self._centres[site] = mean.to(rows.dtype).double()  # so that the subtraction is exact
        rows = rows - centre.to(rows.dtype)
        return MomentPart(centre, rows, rows.double().square().sum(1), self_product(rows).double())

    def side(self, parts: Sequence[MomentPart], start: int = 0) -> MomentSide:
        return MomentSide.of(parts)

    def learnt(self) -> dict[str, Tensor]:
        """The centres, for another process to begin with: then its sums need not be moved to be added."""
        return {site: centre.cpu() for site, centre in self._centres.items()}

    def learn(self, centres: dict[str, Tensor]) -> None:
        self._centres |= centres

    @staticmethod
    def _far(rows: Tensor, mean: Tensor, centre: Tensor) -> bool:
        spread = (rows - mean.to(rows.dtype)).square().mean(0, dtype=torch.float64).sum()
        return bool((mean - centre).square().sum() > TOO_FAR**2 * spread)


@dataclass(frozen=True)
class SideSums:
    """Sums of all sites of one side, laid side by side: P = Σ widths, S sites."""

    widths: tuple[int, ...]
    centre: Tensor  # (P,)
    total: Tensor  # (P,)   Σ x
    length: Tensor  # (S,)  Σ ‖x‖²
    cube: Tensor  # (P,)    Σ ‖x‖² x
    fourth: Tensor  # (S,)  Σ ‖x‖⁴
    squares: tuple[Tensor, ...]  # (p, p) a site: Σ x xᵀ

    @classmethod
    def of(cls, parts: Sequence[MomentPart]) -> SideSums:
        return cls(
            widths=tuple(part.rows.shape[1] for part in parts),
            centre=torch.cat([part.centre for part in parts]),
            total=torch.cat([part.rows.sum(0, dtype=torch.float64) for part in parts]),
            length=torch.stack([part.norms.sum() for part in parts]),
            cube=torch.cat([part.norms @ part.rows.double() for part in parts]),
            fourth=torch.stack([part.norms.square().sum() for part in parts]),
            squares=tuple(part.square for part in parts),
        )

    @property
    def membership(self) -> Tensor:
        """(P, S): one where a column belongs to a site; turns vectors into block-diagonal matrices."""
        return torch.block_diag(*(torch.ones(w, 1, dtype=torch.float64) for w in self.widths)).to(self.total.device)

    def split(self, stacked: Tensor) -> tuple[Tensor, ...]:
        return stacked.split(self.widths)

    def moved(self, shift: Tensor, n: int) -> SideSums:
        """The same sums about centre + shift."""
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
        return replace(
            self,
            total=self.total + other.total,
            length=self.length + other.length,
            cube=self.cube + other.cube,
            fourth=self.fourth + other.fourth,
            squares=tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
        )


@dataclass(frozen=True)
class MomentSide:
    """All sites of one side for one chunk."""

    rows: Tensor  # (n, P) about the centres
    norms: Tensor  # (n, S)
    sums: SideSums

    @classmethod
    def of(cls, parts: Sequence[MomentPart]) -> MomentSide:
        counts = {len(part.rows) for part in parts}
        if len(counts) != 1:
            raise ValueError(f"need paired rows, got {' and '.join(map(str, sorted(counts)))}")
        rows, norms = torch.cat([p.rows for p in parts], dim=1), torch.stack([p.norms for p in parts], dim=1)
        return cls(rows, norms, SideSums.of(parts))

    @property
    def check(self) -> Tensor:
        """(2, sites): a number that is not finite where an activation was not, and no offset: rows are centred."""
        return torch.stack([self.sums.length, torch.zeros_like(self.sums.length)])


@dataclass(frozen=True)
class Moments:
    """Sums over paired rows of all sites of two sides, about a centre each; `merge` joins two lots of rows."""

    n: int
    a: SideSums
    b: SideSums
    cross: Tensor  # (P, Q)  Σ x yᵀ
    weighted_x: Tensor  # (P, B) Σ ‖y‖² x
    weighted_y: Tensor  # (A, Q) Σ ‖x‖² y
    lengths: Tensor  # (A, B) Σ ‖x‖² ‖y‖²
    # The rows, or a sample of them, where they were kept too: for sites whose covariance does not tell all directions.
    rows: Sample | None = field(default=None, repr=False, compare=False, metadata={"kept": False})

    supplies = frozenset({Alignment, DebiasedAlignment, UncentredAlignment, Covariances, Neurons})

    @classmethod
    def of(cls, x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor]) -> Moments:
        """From paired rows: (n, p) and (n, q), or a list of sites each."""
        sides = []
        for rows in (x, y):
            maker = MomentMaker()
            sites = [rows] if isinstance(rows, Tensor) else rows
            sides.append(maker.side([maker.part(str(k), with_room(site, f"site {k}")) for k, site in enumerate(sites)]))
        return cls.join(*sides)

    @classmethod
    def join(cls, a: MomentSide, b: MomentSide) -> Moments:
        """The moments of one chunk, from what each side made of it."""
        if len(a.rows) != len(b.rows):
            raise ValueError(f"need paired rows, got {len(a.rows)} and {len(b.rows)}")
        return cls(
            n=len(a.rows),
            a=a.sums,
            b=b.sums,
            cross=cross_product(a.rows, b.rows).double(),
            weighted_x=a.rows.double().T @ b.norms,
            weighted_y=a.norms.T @ b.rows.double(),
            lengths=a.norms.T @ b.norms,
        )

    @property
    def exact(self) -> bool:
        return True

    @property
    def widths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.a.widths, self.b.widths

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """For each site, how much of Σ‖x‖² is variation about the mean: nothing for constant features."""
        a, b = (spread(side, self.n) for side in (self.a, self.b))
        return a, b

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        """For each site the trace of its centred Gram matrix."""
        a, b = (traces(side, self.n) for side in (self.a, self.b))
        return a, b

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """‖K‖² of each site's U-centred Gram matrix."""
        a, b = (own_debiased(side, self.n) for side in (self.a, self.b))
        return a, b

    def describe(self) -> str:
        return f"moments of all {self.n} rows"

    def alignment(self, kind: type[Alignment] = Alignment) -> Alignment:
        """Inner products of Gram matrices for every pair of sites."""
        if kind not in self._alignments:
            self._alignments[kind] = FORMS[kind](self)
        return self._alignments[kind]

    @once
    def _alignments(self) -> dict[type[Alignment], Alignment]:
        return {}

    @once
    def scatters(self) -> tuple[list[Scatter], list[Scatter]]:
        """Each site's own covariance."""
        a, b = ([scatter(s, i, self.n) for i in range(len(s.widths))] for s in (self.a, self.b))
        if self.rows is None:
            return a, b
        with_rows_a, with_rows_b = (
            [from_rows.with_rows(scatter, raw) for scatter, raw in zip(side, kept, strict=True)]
            for side, kept in ((a, self.rows.xs), (b, self.rows.ys))
        )
        return with_rows_a, with_rows_b

    def beside(self, rows: Sample | None) -> Moments:
        """The same with these rows beside, or a sample of them; rows that were projected are no use."""
        return self if rows is None or rows.folded is not None else replace(self, rows=rows)

    def covariances(self, i: int = 0, j: int = 0) -> Covariances:
        """The covariances of site i of A and site j of B; each site's factorisations are made once."""
        return covariances(self, i, j, (self.scatters[0][i], self.scatters[1][j]))

    def neurons(self, i: int = 0, j: int = 0) -> Neurons:
        """Variances and covariances of the neurons of site i of A and site j of B."""
        check_pairs(self.a.widths[i], self.b.widths[j])
        found = self.covariances(i, j)
        return Neurons(found.x.matrix.diagonal(), found.y.matrix.diagonal(), found.xy)

    def joint(self, i: int = 0, j: int = 0) -> JointMoments:
        """Means and covariances of site i of A and site j of B: what a fit of A to B reads."""
        return joint(self, i, j)

    def about(self, centre_a: Tensor, centre_b: Tensor) -> Moments:
        """The same moments about other centres, in closed form."""
        d, e = centre_a - self.a.centre, centre_b - self.b.centre
        if not bool(d.any()) and not bool(e.any()):
            return self
        dd, ee = self.a.membership * d[:, None], self.b.membership * e[:, None]  # (P, A), (Q, B)
        d2, e2 = dd.square().sum(0), ee.square().sum(0)
        a, b = self.a.moved(d, self.n), self.b.moved(e, self.n)
        cross_e = self.cross @ ee  # (P, B)
        d_cross = dd.T @ self.cross  # (A, Q)
        total_a, total_b = dd.T @ self.a.total, ee.T @ self.b.total
        lengths = (
            self.lengths
            - 2 * self.weighted_y @ ee
            - 2 * dd.T @ self.weighted_x
            + 4 * d_cross @ ee
            + self.a.length[:, None] * e2
            + d2[:, None] * self.b.length
            - 2 * total_a[:, None] * e2
            - 2 * d2[:, None] * total_b
            + self.n * d2[:, None] * e2
        )
        return Moments(
            n=self.n,
            a=a,
            b=b,
            cross=self.cross - torch.outer(d, self.b.total) - torch.outer(self.a.total - self.n * d, e),
            weighted_x=self.weighted_x - 2 * cross_e + self.a.total[:, None] * e2 - d[:, None] * b.length,
            weighted_y=self.weighted_y - 2 * d_cross + d2[:, None] * self.b.total - a.length[:, None] * e,
            lengths=lengths,
        )

    def merge(self, other: Moments) -> Moments:
        if self.a.widths != other.a.widths or self.b.widths != other.b.widths:
            raise ValueError(
                f"these moments are of other sites: widths {self.a.widths} x {self.b.widths} "
                f"and {other.a.widths} x {other.b.widths}"
            )
        other = other.about(self.a.centre, self.b.centre)
        return Moments(
            n=self.n + other.n,
            a=self.a.plus(other.a),
            b=self.b.plus(other.b),
            cross=self.cross + other.cross,
            weighted_x=self.weighted_x + other.weighted_x,
            weighted_y=self.weighted_y + other.weighted_y,
            lengths=self.lengths + other.lengths,
        )

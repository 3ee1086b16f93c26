"""Views in closed form from moments about the provisional centres."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..linalg import JointMoments, diagonal_part
from . import from_rows
from .views import Alignment, Covariances, DebiasedAlignment, Scatter, UncentredAlignment

if TYPE_CHECKING:
    from .moments import Moments, SideSums


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

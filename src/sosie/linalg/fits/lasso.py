"""Sparse maps: least squares with an L1 penalty, for all outputs at once, from moments."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dense import eigen
from .define import check_count, check_number, define
from .joint import Affine, JointMoments, finished

FLAT = 1e-13  # eigenvalues of correlations below this are rounding
BLOCK = 64  # coordinates visited between two products with the whole correlation matrix


@define
def lasso(m: JointMoments, alpha: float, tolerance: float = 1e-7, sweeps: int = 1000) -> Affine:
    """The smallest ‖S(A) − B‖² / 2n + alpha ‖weight‖₁, with weights that are exactly zero; the bias is free.

    As scikit-learn's Lasso for each output; Eq. 3 of Csiszárik et al. 2021 has a norm that is not squared. Coordinate
    descent over all outputs, with exact steps among the weights in use in between. It ends when the conditions of a
    minimum hold to `tolerance` in units of standard deviations (`violation`). `sparsity` is the share of zeros, `rank`
    the number of neurons of A with any weight.
    """
    alpha, tolerance = check_number("alpha", alpha), check_number("tolerance", tolerance)
    sweeps = check_count("sweeps", sweeps, 10**9)
    live_a, live_b = m.varies_a.cpu(), m.varies_b.cpu()  # thousands of tiny steps: no work for a GPU
    aa, ab = m.cov_aa.cpu()[live_a][:, live_a], m.cov_ab.cpu()[live_a][:, live_b]
    size_a, size_b = aa.diagonal().sqrt(), m.cov_bb.cpu().diagonal()[live_b].sqrt()
    sizes = size_a[:, None] * size_b[None, :]
    problem = _Problem(aa / (size_a[:, None] * size_a[None, :]), ab / sizes, alpha / sizes)
    found, iterations, violation = problem.minimise(tolerance, sweeps)
    weight = torch.zeros(m.widths, dtype=torch.float64)
    rows, columns = live_a.nonzero(), live_b.nonzero().T
    weight[rows, columns] = found * size_b[None, :] / size_a[:, None]
    return finished(
        m,
        weight.T.to(m.cov_ab.device),
        rank=int((weight != 0).any(1).sum()),
        iterations=iterations,
        sparsity=float((weight == 0).double().mean()),
        violation=violation,
    )


class _Problem:
    """½ xᵀRx − cᵀx + Σ w|x| for each column, where R has ones on its diagonal."""

    def __init__(self, correlations: Tensor, targets: Tensor, penalties: Tensor) -> None:
        self.r = correlations  # (p, p)
        self.c = targets  # (p, q)
        self.w = penalties  # (p, q)

    def minimise(self, tolerance: float, sweeps: int) -> tuple[Tensor, int, float]:
        """The solution (p, q), the sweeps it took, and by how much the conditions of a minimum are missed."""
        x = torch.zeros_like(self.c)
        missed = self.violation(x)
        for sweep in range(sweeps + 1):
            remaining = (~(missed <= tolerance)).nonzero()[:, 0]
            if not len(remaining):
                return x, sweep, float(missed.max())
            if sweep == sweeps:
                break
            part = _Problem(self.r, self.c[:, remaining], self.w[:, remaining])
            y = part.swept(x[:, remaining])
            if sweep >= 4 and sweep & (sweep - 1) == 0:  # rarer and rarer: it costs more than a sweep
                settle = part.settled if sweep < 32 else part.completed
                y = torch.stack([settle(y[:, j], j) for j in range(len(remaining))], dim=1)
            x[:, remaining], missed[remaining] = y, part.violation(y)
        raise ValueError(
            f"lasso is not done after {sweeps} sweeps: the conditions of a minimum are missed by "
            f"{float(missed.max()):.1e}, not {tolerance:.1e}. Raise sweeps, tolerance or alpha"
        )

    def violation(self, x: Tensor) -> Tensor:
        """(q,): how far the gradient is from what a minimum has, at worst."""
        downhill = self.c - self.r @ x
        unused = torch.relu(downhill.abs() - self.w)
        return torch.where(x == 0, unused, (downhill - self.w * x.sign()).abs()).amax(0)

    def swept(self, x: Tensor) -> Tensor:
        """Each coordinate in turn at its own minimum, in all columns at once."""
        x = x.clone()
        for block in torch.arange(len(x)).split(BLOCK):
            own = slice(int(block[0]), int(block[-1]) + 1)
            downhill, r = self.c[own] - self.r[own] @ x, self.r[own, own]
            for k, i in enumerate(block.tolist()):
                best = downhill[k] + x[i]
                best = best - torch.minimum(torch.maximum(best, -self.w[i]), self.w[i])
                downhill[k:] -= torch.outer(r[k:, k], best - x[i])
                x[i] = best
        return x

    def completed(self, x: Tensor, column: int) -> Tensor:
        """One column settled, and again with the weight that is most wrongly zero, until none is.

        Where neurons are nearly collinear this ends long before sweeps would (feature-sign search, Lee et al. 2007).
        """
        c, w = self.c[:, column], self.w[:, column]
        for _ in range(2 * len(x)):
            x = self.settled(x, column)
            downhill = c - self.r @ x
            excess = torch.where(x == 0, downhill.abs() - w, -torch.inf)
            worst = excess.argmax()
            if bool(excess[worst] <= FLAT):
                break
            x[worst] = excess[worst] * downhill[worst].sign()
        return x

    def settled(self, x: Tensor, column: int) -> Tensor:
        """One column at the exact minimum over the weights in use with their signs; one that reaches zero is dropped.

        Each step goes down, by the length that is best on its line, however badly conditioned the system is.
        """
        x = x.clone()
        while len(used := x.nonzero()[:, 0]):
            r, now = self.r[used][:, used], x[used]
            downhill = self.c[used, column] - r @ now - self.w[used, column] * now.sign()
            if not bool(downhill.any()):
                break
            step, best = _newton_step(r, downhill)
            reaches_zero = torch.where(now * step < 0, -now / step, torch.inf)
            first = reaches_zero.argmin()
            if bool(best < reaches_zero[first]):
                x[used] = now + best * step
                break
            if bool(reaches_zero[first].isinf()):  # flat, and no weight gets smaller: rounding
                break
            x[used] = now + reaches_zero[first] * step
            x[used[first]] = 0
        return x


def _newton_step(r: Tensor, downhill: Tensor) -> tuple[Tensor, Tensor]:
    """A direction down, and how far along it the minimum is: without end where the neurons in use are collinear."""
    factor, failed = torch.linalg.cholesky_ex(r)
    if bool(failed):
        step = eigen(r)[1][:, 0]
        step = step if bool(downhill @ step >= 0) else -step
    else:
        step = torch.cholesky_solve(downhill[:, None], factor)[:, 0]
    curvature = step @ r @ step
    if bool(curvature <= FLAT * (step @ step)):
        return step, torch.tensor(torch.inf)
    return step, (downhill @ step) / curvature

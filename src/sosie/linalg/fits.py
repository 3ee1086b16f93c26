"""Fits of one site to another: an affine map from joint moments, by a named method ("reduced_rank(k=8)")."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .. import plugins
from ..checks import call_text, check_options, nearest, one_of, parse_call, positive, whole_number
from .products import best_assignment, eigen, eigenvalues, singular
from .spectra import RANK_TOLERANCE, RANK_TOLERANCE_FLOAT32_PRODUCTS, Spectrum, loss_of

ROUNDING_LEFT = 1e-6  # of the largest direction, as a standard deviation, in float64 sums of float32 rows
ROUNDING_LEFT_FLOAT32_PRODUCTS = 3e-4  # the same in float32 products
ROUNDING = 8  # roundings of its mean: a neuron that varies by less is constant


@dataclass(frozen=True)
class JointMoments:
    """Means and covariances (over n, not n − 1) of paired rows: A (n, p) and B (n, q), in float64."""

    n: int
    mean_a: Tensor  # (p,)
    mean_b: Tensor  # (q,)
    cov_aa: Tensor  # (p, p)
    cov_bb: Tensor  # (q, q)
    cov_ab: Tensor  # (p, q)
    products: torch.dtype = torch.float64  # the precision in which rows were multiplied

    def __post_init__(self) -> None:
        for name in ("mean_a", "mean_b", "cov_aa", "cov_bb", "cov_ab"):
            if not bool(getattr(self, name).isfinite().all()):
                raise ValueError(f"{name} is not finite: some activations were not, or overflowed")
        if self.n < 2:
            raise ValueError(f"a fit needs at least 2 rows, got {self.n}")
        for side, varies in (("A", self.varies_a), ("B", self.varies_b)):
            if not bool(varies.any()):
                raise ValueError(f"no feature of {side} varies over the {self.n} rows, so there is nothing to match")

    @property
    def widths(self) -> tuple[int, int]:
        return len(self.mean_a), len(self.mean_b)

    @property
    def varies_a(self) -> Tensor:
        """(p,) bool: the neurons of A that are not constant."""
        return self.cov_aa.diagonal() > (ROUNDING * torch.finfo(self.products).eps * self.mean_a).square()

    @property
    def varies_b(self) -> Tensor:
        return self.cov_bb.diagonal() > (ROUNDING * torch.finfo(self.products).eps * self.mean_b).square()

    @property
    def tolerance(self) -> float:
        """The share of the largest eigenvalue of a correlation that is rounding: 1e-10, 1e-6 for float32 products."""
        return RANK_TOLERANCE if self.products == torch.float64 else RANK_TOLERANCE_FLOAT32_PRODUCTS

    @property
    def rounding(self) -> float:
        """The share of the largest direction, as a standard deviation, that rounding can leave."""
        return ROUNDING_LEFT if self.products == torch.float64 else ROUNDING_LEFT_FLOAT32_PRODUCTS

    def about(self, origin: Literal["mean", "zero"]) -> tuple[Tensor, Tensor, Tensor]:
        """Second moments aa (p, p), bb (q, q) and ab (p, q), about the means or about zero."""
        if origin == "mean":
            return self.cov_aa, self.cov_bb, self.cov_ab
        a, b = self.mean_a, self.mean_b
        return self.cov_aa + torch.outer(a, a), self.cov_bb + torch.outer(b, b), self.cov_ab + torch.outer(a, b)


@dataclass(frozen=True)
class Affine:
    """The map a ↦ weight a + bias, laid out as in `torch.nn.Linear`, with a report of its fit.

    The report always has `r2` (see `explained`), `rank` (directions of A that the map reads), `condition` (of the
    inverted matrix; 1 without one) and `iterations` (0 for a closed form).
    """

    weight: Tensor  # (q, p)
    bias: Tensor  # (q,)
    report: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows (…, p) to (…, q), in their precision."""
        return rows @ self.weight.to(rows).T + self.bias.to(rows)


def check_fits(m: JointMoments, affine: Affine) -> None:
    """Raise unless the map has the widths of the moments."""
    p, q = m.widths
    if affine.weight.shape != (q, p):
        raise ValueError(f"moments of {p} and {q} features need a weight {(q, p)}, got {tuple(affine.weight.shape)}")


def explained(m: JointMoments, affine: Affine, *, about: Literal["mean", "zero"] = "mean") -> float:
    """1 − ‖S(A) − B‖² / ‖B − mean‖²: negative for a map worse than the mean. `about="zero"` divides by ‖B‖².

    Unlike regression_r2, it depends on the map. Csiszárik et al. 2021 (Definition 6.1) divide by ‖B‖², which the mean
    of B alone can bring close to 1.
    """
    check_fits(m, affine)
    weight, bias = affine.weight.to(m.cov_aa), affine.bias.to(m.cov_aa)
    missed = m.mean_b - weight @ m.mean_a - bias
    varies = m.cov_bb.trace() - 2 * (weight.T * m.cov_ab).sum() + ((weight @ m.cov_aa) * weight).sum()
    return float(1 - (varies + missed.square().sum()) / m.about(about)[1].trace())


def finished(m: JointMoments, weight: Tensor, *, intercept: bool = True, **report: float) -> Affine:
    """The map with the best bias, or without one, and its report."""
    bias = m.mean_b - weight @ m.mean_a if intercept else torch.zeros_like(m.mean_b)
    r2 = explained(m, Affine(weight, bias))
    return Affine(weight, bias, {"r2": r2, "condition": 1.0, "iterations": 0, **report})


FITS: dict[str, Fit] = {}


@dataclass(frozen=True)
class Fit:
    """A method that fits an affine map to moments, with its options."""

    name: str  # with the options: "reduced_rank(k=8)"
    function: Callable[..., Affine]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, moments: JointMoments) -> Affine:
        return self.function(moments, **self.options)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters after the moments."""
        return dict(list(inspect.signature(self.function).parameters.items())[1:])

    def using(self, **options: Any) -> Fit:
        """This fit with other options, which are part of its name."""
        base = self.function.__name__
        check_options(options, {name: each.default for name, each in self.parameters.items()}, base)
        changed = {**self.options, **options}
        return replace(self, name=call_text(base, changed), options=changed)


def define(function: Callable[..., Affine]) -> Callable[..., Affine]:
    """Register a function of moments as a fit under its own name."""
    name = function.__name__
    if name in FITS:
        raise ValueError(f"a fit named {name!r} is already defined")
    FITS[name] = Fit(name, function)
    return function


def find_fit(text: str | Fit, *, also: Sequence[str] = ()) -> Fit:
    """The fit of that name; options may follow as Python literals: "ridge(strength=0.1)".

    `also` names other choices of the caller, for the message about an unknown name.
    """
    if isinstance(text, Fit):
        return text
    name, options = parse_call(text)
    if name not in FITS and (function := plugins.load("fits", name, plugins.function)) is not None:
        FITS.setdefault(name, Fit(name, function))
    if name not in FITS:
        raise ValueError(f"no fit is called {name!r}{nearest(name, [*FITS, *plugins.names('fits'), *also])}")
    chosen = FITS[name].using(**options) if options else FITS[name]
    for key, parameter in chosen.parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in chosen.options:
            raise ValueError(f"{name} needs a value for {key}: write {name}({key}=…)")
    return chosen


def fit(text: str | Fit, moments: JointMoments) -> Affine:
    """The affine map from A to B, by the named fit."""
    return find_fit(text)(moments)


# Least squares and its relatives: ridge and reduced rank


def _solve(
    m: JointMoments, intercept: bool, tolerance: float | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """Least squares from one factorisation: weight (q, p), fitted (rank, q), live (q, p), and the report.

    The Gram matrix of `fitted` is the second moment of the fitted values. `live` is True where both neurons vary;
    elsewhere a weight is rounding, and set to 0. Columns are first scaled to unit size, so that a quiet neuron counts
    like a loud one.
    """
    tolerance = m.tolerance if tolerance is None else positive(tolerance, "tolerance")
    aa, bb, ab = m.about("mean" if intercept else "zero")
    live_a, live_b = (m.varies_a, m.varies_b) if intercept else (aa.diagonal() > 0, bb.diagonal() > 0)
    size = aa.diagonal()[live_a].sqrt()
    correlations = aa[live_a][:, live_a] / (size[:, None] * size[None, :])
    spectrum = Spectrum.of(correlations, tolerance)
    whitening = spectrum.whitening / size[:, None]
    fitted = whitening.T @ ab[live_a]
    solution = whitening @ fitted
    if spectrum.rank < len(size):
        # The shortest of all solutions, in the units of A: without a part in directions that A does not have.
        basis = torch.linalg.qr(size[:, None] * spectrum.vectors).Q
        solution = basis @ (basis.T @ solution)
    weight = torch.zeros_like(ab)
    weight[live_a] = solution
    live = live_b[:, None] & live_a
    dropped = 0  # directions of A that are lost in its moments
    if spectrum.rank < len(size):
        sizes = eigenvalues(correlations).clamp_min(0).sqrt()  # below 0 by rounding
        dropped = loss_of(sizes, tolerance**0.5, min(m.rounding, tolerance**0.5)).count
    condition = float(spectrum.values[0] / spectrum.values[-1])
    return weight.T * live, fitted, live, {"rank": spectrum.rank, "condition": condition, "dropped": dropped}


@define
def least_squares(m: JointMoments, intercept: bool = True, tolerance: float | None = None) -> Affine:
    """The map with the smallest squared error; of several, the shortest.

    Neurons are scaled to unit variance (without intercept, to unit mean square); directions with less than `tolerance`
    of the largest eigenvalue of A's correlations are cut: 1e-10, or 1e-6 for moments of float32 products. `condition`
    is that of these correlations, and `dropped` counts directions that were cut although they are above rounding. Where
    A is rank-deficient, the length is that of the weights alone; a pseudoinverse with a column of ones, as in the code
    of Csiszárik et al. 2021, counts the bias too.
    """
    weight, _, _, report = _solve(m, intercept, tolerance)
    return finished(m, weight, intercept=intercept, **report)


@define
def reduced_rank(
    m: JointMoments, k: int, truncate: bool = False, intercept: bool = True, tolerance: float | None = None
) -> Affine:
    """The map of rank k with the smallest squared error: reduced-rank regression (Izenman 1975).

    Least squares, projected on the k directions in which its *fitted values* are largest: M V Vᵀ from the singular
    vectors V of A M. That is also §4.2 of Csiszárik et al. 2021, and the "SVD in the activation space" of their §7;
    their code has neither intercept nor centring there (intercept=False). `truncate=True` keeps the k largest singular
    values of the weights instead, as compression of weight matrices does: it reads no activations, depends on A's units
    and is never the better fit.
    """
    k = whole_number(k, "k", least=1, most=min(m.widths))
    weight, fitted, live, report = _solve(m, intercept, tolerance)
    if truncate:
        left, sizes, right = singular(weight)
        weight = (left[:, :k] * sizes[:k]) @ right[:k]
    else:
        leading = singular(fitted)[2][:k]
        weight = leading.T @ (leading @ weight)
    return finished(m, weight * live, intercept=intercept, **{**report, "rank": min(k, report["rank"])})


@define
def ridge(m: JointMoments, strength: float) -> Affine:
    """The smallest ‖S(A) − B‖² / n + λ ‖weight‖², with λ = strength × the mean variance of A's neurons.

    The bias is not penalised. `strength` has no units and does not depend on n; scikit-learn's alpha is n λ.
    """
    penalty = positive(strength, "strength") * m.cov_aa.diagonal().mean()
    system = m.cov_aa + penalty * torch.eye(len(m.cov_aa), dtype=penalty.dtype, device=penalty.device)
    weight = torch.cholesky_solve(m.cov_ab, torch.linalg.cholesky(system)).T
    weight = weight * (m.varies_b[:, None] & m.varies_a)  # elsewhere covariances are rounding
    values = eigenvalues(system)
    return finished(
        m, weight, rank=int(m.varies_a.sum()), condition=float(values[-1] / values[0]), penalty=float(penalty)
    )


# Maps that keep lengths: rotations, one-to-one matches of neurons, and the identity


@define
def procrustes(m: JointMoments, scale: bool = False, centre: bool = True) -> Affine:
    """The rotation (or reflection) of A that overlaps most with B, from the singular vectors of their covariance.

    Least squares among orthogonal maps (Schönemann 1966), and among semi-orthogonal maps into a wider B. Into a
    narrower B there is no closed form: this is the best rotation onto B padded with zeros, without the padding. `scale`
    also multiplies by the best factor. `centre=False` rotates about zero and has no bias, as in the code of Csiszárik
    et al. 2021. `undetermined` counts directions without covariance, whose rotation is arbitrary.
    """
    aa, _, ab = m.about("mean" if centre else "zero")
    left, sizes, right = singular(ab)
    if not bool(sizes[0] > 0):
        raise ValueError("A and B have no covariance at all, so no rotation is better than another")
    weight = right.T @ left.T
    factor = sizes.sum() / ((weight @ aa) * weight).sum() if scale else torch.ones_like(sizes[0])
    # Singular values of a product of rows are cut at the root of the tolerance for eigenvalues.
    undetermined = int((sizes <= m.tolerance**0.5 * sizes[0]).sum())
    return finished(
        m, factor * weight, intercept=centre, rank=len(sizes), scale=float(factor), undetermined=undetermined
    )


@define
def permutation(m: JointMoments, by: str = "correlation") -> Affine:
    """Neurons matched one to one for the largest sum of correlations, each with weight 1 (Li et al. 2015).

    `by="covariance"` lets loud neurons count for more: for p ≤ q that is least squares among permutations. min(p, q)
    neurons are matched, even with negative correlation; the other outputs are B's means. The bias moves each neuron's
    mean to that of its partner.
    """
    one_of(by, "by", ("correlation", "covariance"))
    scores = m.cov_ab
    if by == "correlation":
        sizes = [
            torch.where(varies, cov.diagonal(), torch.inf).sqrt()  # a constant neuron correlates with none
            for cov, varies in ((m.cov_aa, m.varies_a), (m.cov_bb, m.varies_b))
        ]
        scores = scores / (sizes[0][:, None] * sizes[1][None, :])
    rows, columns = best_assignment(scores)
    weight = torch.zeros_like(m.cov_ab).T.contiguous()
    weight[columns, rows] = 1
    return finished(m, weight, rank=len(rows), score=float(scores[rows, columns].mean()))


@define
def identity(m: JointMoments) -> Affine:
    """The identity, for a stitch without matching. Widths must be equal."""
    p, q = m.widths
    if p != q:
        raise ValueError(f"identity needs equal widths, got {p} and {q}: take procrustes or permutation")
    weight = torch.eye(p, dtype=m.cov_aa.dtype, device=m.cov_aa.device)
    return finished(m, weight, intercept=False, rank=p)


# Sparse maps: least squares with an L1 penalty, for all outputs at once, from moments

FLAT = 1e-13  # eigenvalues of correlations below this are rounding
BLOCK = 64  # coordinates visited between two products with the whole correlation matrix


@define
def lasso(m: JointMoments, alpha: float, tolerance: float = 1e-7, sweeps: int = 1000) -> Affine:
    """The smallest ‖S(A) − B‖² / 2n + alpha ‖weight‖₁, with weights that are exactly zero; the bias is free.

    The same as scikit-learn's Lasso for each output; Eq. 3 of Csiszárik et al. 2021 has a norm without the square.
    Coordinate descent over all outputs, with exact steps among the weights in use in between. It ends when the
    conditions of a minimum hold to `tolerance` in units of standard deviations (`violation`). `sparsity` is the share
    of zeros, `rank` the number of neurons of A with any weight.
    """
    alpha, tolerance = positive(alpha, "alpha"), positive(tolerance, "tolerance")
    sweeps = whole_number(sweeps, "sweeps", least=1)
    live_a, live_b = m.varies_a.cpu(), m.varies_b.cpu()  # a GPU is slow at thousands of tiny steps
    aa, ab = m.cov_aa.cpu()[live_a][:, live_a], m.cov_ab.cpu()[live_a][:, live_b]
    size_a, size_b = aa.diagonal().sqrt(), m.cov_bb.cpu().diagonal()[live_b].sqrt()
    sizes = size_a[:, None] * size_b[None, :]
    problem = _Problem(aa / (size_a[:, None] * size_a[None, :]), ab / sizes, alpha / sizes)
    solution, iterations, violation = problem.minimise(tolerance, sweeps)
    weight = torch.zeros(m.widths, dtype=torch.float64)
    rows, columns = live_a.nonzero(), live_b.nonzero().T
    weight[rows, columns] = solution * size_b[None, :] / size_a[:, None]
    return finished(
        m,
        weight.T.to(m.cov_ab.device),
        rank=int((weight != 0).any(1).sum()),
        iterations=iterations,
        sparsity=float((weight == 0).double().mean()),
        violation=violation,
    )


class _Problem:
    """Minimise ½ xᵀRx − cᵀx + Σ w|x| for each column, where R has ones on its diagonal."""

    def __init__(self, correlations: Tensor, targets: Tensor, penalties: Tensor) -> None:
        self.r = correlations  # (p, p)
        self.c = targets  # (p, q)
        self.w = penalties  # (p, q)

    def minimise(self, tolerance: float, sweeps: int) -> tuple[Tensor, int, float]:
        """The solution (p, q), the number of sweeps, and the violation of the conditions of a minimum."""
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
            if sweep >= 4 and sweep & (sweep - 1) == 0:  # ever more rarely, since it costs more than a sweep
                settle = part.settled if sweep < 32 else part.completed
                y = torch.stack([settle(y[:, j], j) for j in range(len(remaining))], dim=1)
            x[:, remaining], missed[remaining] = y, part.violation(y)
        raise ValueError(
            f"lasso has not converged after {sweeps} sweeps: the conditions of a minimum are missed by "
            f"{float(missed.max()):.1e}, not {tolerance:.1e}. Raise sweeps, tolerance or alpha"
        )

    def violation(self, x: Tensor) -> Tensor:
        """(q,): the largest deviation of the gradient from that at a minimum."""
        downhill = self.c - self.r @ x
        unused = torch.relu(downhill.abs() - self.w)
        return torch.where(x == 0, unused, (downhill - self.w * x.sign()).abs()).amax(0)

    def swept(self, x: Tensor) -> Tensor:
        """x with each coordinate in turn moved to its minimum, in all columns at once."""
        x = x.clone()
        for start in range(0, len(x), BLOCK):
            block = slice(start, start + BLOCK)
            downhill, r = self.c[block] - self.r[block] @ x, self.r[block, block]
            for k, i in enumerate(range(start, start + len(r))):
                best = downhill[k] + x[i]
                best = best - torch.minimum(torch.maximum(best, -self.w[i]), self.w[i])
                downhill[k:] -= torch.outer(r[k:, k], best - x[i])
                x[i] = best
        return x

    def completed(self, x: Tensor, column: int) -> Tensor:
        """One column settled again and again with the most wrongly zero weight, until no zero is wrong.

        For nearly collinear neurons this ends long before sweeps would (feature-sign search, Lee et al. 2007).
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
        """One column at the exact minimum over the weights in use with their signs; weights at zero are dropped.

        Each step goes down by the best length on its line, however badly conditioned the system is.
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
    """A direction down, and the distance to the minimum along it: infinite if the neurons in use are collinear."""
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

"""The moments that a fit reads, the affine map that it gives, and how much of B that map explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..spectra import RANK_TOLERANCE, RANK_TOLERANCE_FLOAT32_PRODUCTS

ROUNDING_LEFT = 1e-6  # of the largest direction, as a standard deviation: where float64 sums of float32 rows end
ROUNDING_LEFT_FLOAT32_PRODUCTS = 3e-4  # the same of float32 products
ROUNDING = 8  # roundings: a neuron that varies by less than this many of its mean's is constant


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
        p, q = self.mean_a.numel(), self.mean_b.numel()
        wanted = {"mean_a": (p,), "mean_b": (q,), "cov_aa": (p, p), "cov_bb": (q, q), "cov_ab": (p, q)}
        for name, shape in wanted.items():
            value: Tensor = getattr(self, name)
            if value.shape != shape:
                raise ValueError(f"{name} should be {shape} for {p} and {q} features, got {tuple(value.shape)}")
            if value.dtype != torch.float64:
                raise ValueError(f"{name} is {value.dtype}: a fit inverts moments, so make them in float64")
            if not bool(value.isfinite().all()):
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
        """(p,): which neurons of A are not constant."""
        return self.cov_aa.diagonal() > (self._rounding * self.mean_a).square()

    @property
    def varies_b(self) -> Tensor:
        return self.cov_bb.diagonal() > (self._rounding * self.mean_b).square()

    @property
    def _rounding(self) -> float:
        return ROUNDING * torch.finfo(self.products).eps

    @property
    def tolerance(self) -> float:
        """Which share of the largest eigenvalue of a correlation is rounding: 1e-10, or 1e-6 for float32 products."""
        return RANK_TOLERANCE if self.products == torch.float64 else RANK_TOLERANCE_FLOAT32_PRODUCTS

    @property
    def rounding(self) -> float:
        """Which share of the largest direction, as a standard deviation, rounding can leave."""
        return ROUNDING_LEFT if self.products == torch.float64 else ROUNDING_LEFT_FLOAT32_PRODUCTS

    def about(self, origin: Literal["mean", "zero"]) -> tuple[Tensor, Tensor, Tensor]:
        """Second moments aa (p, p), bb (q, q) and ab (p, q): covariances, or as they are about zero."""
        if origin == "mean":
            return self.cov_aa, self.cov_bb, self.cov_ab
        a, b = self.mean_a, self.mean_b
        return self.cov_aa + torch.outer(a, a), self.cov_bb + torch.outer(b, b), self.cov_ab + torch.outer(a, b)


@dataclass(frozen=True)
class Affine:
    """a ↦ weight a + bias, laid out as in `torch.nn.Linear`, and what is known about how it was found.

    The report of a fit always has `r2` (see `explained`), `rank` (directions of A that the map reads), `condition`
    (of the matrix that was inverted; 1 if none was) and `iterations` (0 for a closed form).
    """

    weight: Tensor  # (q, p)
    bias: Tensor  # (q,)
    report: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"an affine map has a weight (q, p) and a bias (q,), got {tuple(self.weight.shape)} and "
                f"{tuple(self.bias.shape)}"
            )

    def __call__(self, rows: Tensor) -> Tensor:
        """(…, p) to (…, q), in the rows' own precision."""
        return rows @ self.weight.to(rows).T + self.bias.to(rows)


def check_fits(m: JointMoments, affine: Affine) -> None:
    """Refuse a map of other widths than the moments'."""
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
    """The map with its best bias, or none, and its report."""
    bias = m.mean_b - weight @ m.mean_a if intercept else torch.zeros_like(m.mean_b)
    r2 = explained(m, Affine(weight, bias))
    return Affine(weight, bias, {"r2": r2, "condition": 1.0, "iterations": 0, **report})

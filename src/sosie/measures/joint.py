"""How alike B and a map of A are, at the joint of a stitched network: from moments, for any affine map."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from ..linalg import Affine, JointMoments
from ..linalg.fits.joint import check_fits
from ..stats import Alignment, Covariances, Neurons, Scatter, UncentredAlignment
from .define import Measure, find, settled

AT_THE_JOINT = ("linear_cka", "mean_cca", "svcca", "regression_r2")


def mapped(moments: JointMoments, affine: Affine) -> JointMoments:
    """The moments of S(A) and B."""
    check_fits(moments, affine)
    weight, bias = affine.weight.to(moments.cov_aa), affine.bias.to(moments.cov_aa)
    cov = weight @ moments.cov_aa @ weight.T
    if not bool((cov.diagonal() > 0).any()):
        raise ValueError("the map sends all of A to one point, so there is nothing to compare with B")
    return JointMoments(
        n=moments.n,
        mean_a=weight @ moments.mean_a + bias,
        mean_b=moments.mean_b,
        cov_aa=(cov + cov.T) / 2,
        cov_bb=moments.cov_bb,
        cov_ab=weight @ moments.cov_ab,
        products=moments.products,
    )


def similarity_at_joint(
    moments: JointMoments,
    affine: Affine,
    measures: Iterable[str | Measure] = AT_THE_JOINT,
    *,
    of_b: Scatter | None = None,
) -> dict[str, float]:
    """The measures' values for S(A) and B; those that read covariances, neurons, or the alignment, centred or not.

    Measures that ignore what S does say nothing of it: CKA ignores rotations, mean_cca and regression_r2 any
    invertible map, so regression_r2 of a least squares map is that of A itself; `explained` does depend on the map.
    `of_b`: B's covariance with its factorisations, where many maps are compared with one B.
    """
    return similarities(mapped(moments, affine), map(find, measures), of_b)


def similarities(m: JointMoments, measures: Iterable[Measure], of_b: Scatter | None = None) -> dict[str, float]:
    """The measures' values for A and B as they are."""
    of_a, of_b = scatter(m, "a"), of_b or scatter(m, "b")
    both = Covariances(of_a, of_b, m.cov_ab)
    return {measure.name: float(settled(_value(m, both, measure), measure, m.products)) for measure in measures}


def scatter(m: JointMoments, side: Literal["a", "b"]) -> Scatter:
    """One side's covariance, cut where its products have no more digits."""
    return Scatter(m.cov_aa if side == "a" else m.cov_bb, m.n, tolerance=m.tolerance)


def _value(m: JointMoments, both: Covariances, measure: Measure) -> Tensor:
    if measure.reads in (Alignment, UncentredAlignment):
        # ⟨K, L⟩ = ‖Σ x yᵀ‖²; n² cancels in what measures make of it, and is kept for what the view says it holds.
        seconds = m.about("mean" if measure.reads is Alignment else "zero")
        xx, yy, xy = ((m.n * second).square().sum() for second in seconds)
        return measure(measure.reads(xx, yy, xy))
    if measure.reads is Covariances:
        return measure(both)
    if measure.reads is Neurons:
        p, q = m.widths
        if measure.same_width and p != q:
            raise ValueError(f"{measure.name} compares neuron by neuron, so needs equal widths, got {p} and {q}")
        return measure(Neurons(m.cov_aa.diagonal(), m.cov_bb.diagonal(), m.cov_ab))
    raise ValueError(
        f"{measure.name} reads {measure.reads.__name__}, which means and covariances do not give: apply the map to the "
        "rows and compare them"
    )

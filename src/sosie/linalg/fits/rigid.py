"""Maps that keep lengths: rotations, one-to-one matches of neurons, and none at all."""

from __future__ import annotations

import torch

from ..assignment import best_assignment
from ..dense import singular
from .define import define
from .joint import Affine, JointMoments, finished


@define
def procrustes(m: JointMoments, scale: bool = False, centre: bool = True) -> Affine:
    """The rotation (or reflection) of A that overlaps most with B, from the singular vectors of their covariance.

    The least squares among orthogonal maps (Schönemann 1966), and among semi-orthogonal ones into a wider B. Into a
    narrower B that has no closed form: this is the best rotation onto B padded with zeros, less the padding. `scale`
    also multiplies by the number that fits best. centre=False turns about zero and has no bias, as the code of
    Csiszárik et al. 2021. `undetermined` counts directions that do not vary together, so can turn anywhere.
    """
    aa, _, ab = m.about("mean" if centre else "zero")
    left, sizes, right = singular(ab)
    if not bool(sizes[0] > 0):
        raise ValueError("A and B have no covariance at all, so no rotation is better than another")
    weight = right.T @ left.T
    factor = sizes.sum() / ((weight @ aa) * weight).sum() if scale else torch.ones_like(sizes[0])
    # Singular values of a product of rows, not of its square: the root of what eigenvalues are cut at.
    undetermined = int((sizes <= m.tolerance**0.5 * sizes[0]).sum())
    return finished(
        m, factor * weight, intercept=centre, rank=len(sizes), scale=float(factor), undetermined=undetermined
    )


@define
def permutation(m: JointMoments, by: str = "correlation") -> Affine:
    """Neurons matched one to one so that the sum of their correlations is largest, each with weight 1.

    As Li et al. 2015 match them. by="covariance" lets loud neurons count for more: for p ≤ q that is the least squares
    among permutations. min(p, q) are matched, be their correlation negative; outputs left over are B's means. The
    bias moves each neuron's mean to its partner's.
    """
    if by not in ("correlation", "covariance"):
        raise ValueError(f"neurons are matched by 'correlation' or 'covariance', got by={by!r}")
    scores = m.cov_ab
    if by == "correlation":
        sizes = [
            torch.where(varies, cov.diagonal(), torch.inf).sqrt()  # a constant neuron goes with none
            for cov, varies in ((m.cov_aa, m.varies_a), (m.cov_bb, m.varies_b))
        ]
        scores = scores / (sizes[0][:, None] * sizes[1][None, :])
    rows, columns = best_assignment(scores)
    weight = torch.zeros_like(m.cov_ab).T.contiguous()
    weight[columns, rows] = 1
    return finished(m, weight, rank=len(rows), score=float(scores[rows, columns].mean()))


@define
def identity(m: JointMoments) -> Affine:
    """A as it is: what a stitch without any matching gives. Widths must be equal."""
    p, q = m.widths
    if p != q:
        raise ValueError(f"identity needs equal widths, got {p} and {q}: take procrustes or permutation")
    weight = torch.eye(p, dtype=m.cov_aa.dtype, device=m.cov_aa.device)
    return finished(m, weight, intercept=False, rank=p)

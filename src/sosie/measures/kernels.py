"""Measures that are a cosine of Gram matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import double_centred
from ..stats import Alignment, DebiasedAlignment, PairedRows, UncentredAlignment
from .define import define


def _cosine(a: Alignment) -> Tensor:
    return a.xy / (a.xx.sqrt() * a.yy.sqrt())


@define(
    reads=Alignment,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    paper="kornblith2019",
    cost="n p q or n² (p + q)",
    few_rows="biased",
    chance="about √(p q / ((n + p)(n + q)))",
)
def linear_cka(a: Alignment) -> Tensor:
    """Cosine of the centred Gram matrices: squared cross-covariance over the product of self-covariance norms.

    Biased upwards when n is not much larger than the widths: independent Gaussians give about
    √(pq / ((n + p)(n + q))), not 0.
    """
    return _cosine(a)


@define(
    reads=DebiasedAlignment,
    bounds=(-1, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    paper="song2012, szekely2014",
    cost="n p q or n b (p + q) for blocks of b rows",
    chance="0",
)
def debiased_cka(a: DebiasedAlignment) -> Tensor:
    """Cosine of the U-centred Gram matrices: linear CKA whose value for independent rows is 0 on average.

    May be negative. Minibatch versions elsewhere average ratios or depend on the loader's batch size;
    this one sums numerators and denominators over blocks of a fixed size before dividing.
    """
    return _cosine(a)


@define(
    reads=UncentredAlignment,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale"},
    symmetric=True,
    paper="cristianini2001",
    cost="n p q or n² (p + q)",
    few_rows="biased",
    chance="depends on the means",
)
def kernel_alignment(a: UncentredAlignment) -> Tensor:
    """Cosine of the Gram matrices as they are, not centred: a common mean counts as likeness."""
    return _cosine(a)


@define(
    reads=PairedRows,
    bounds=(0, 1),
    same=1,
    closer="up",
    invariant={"rotation", "scale", "shift"},
    symmetric=True,
    paper="kornblith2019",
    cost="n² (p + q)",
    few_rows="biased",
    chance="above 0, towards 1 as p grows past n",
)
def rbf_cka(rows: PairedRows, bandwidth: float = 0.5) -> Tensor:
    """CKA with Gaussian kernels whose width is `bandwidth` times the median distance of the rows.

    exp(−d² / (2 bandwidth² m)), m the median of all n² squared distances (the zeros of the diagonal among
    them, as in the demo of Kornblith et al.). Biased upwards like linear CKA.
    """
    k, l = (side.memo(("rbf", bandwidth), lambda x: _gaussian(x, bandwidth)) for side in (rows.x, rows.y))
    return (k * l).sum() / (k.norm() * l.norm())


def _gaussian(x: Tensor, bandwidth: float) -> Tensor:
    """The centred Gaussian Gram matrix."""
    x = x - x.mean(0, keepdim=True)  # distances do not change, but their rounding does
    lengths = x.square().sum(1)
    distances = lengths[:, None] + lengths[None, :] - 2 * x @ x.T
    off = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    distances = torch.where(off & (distances > 0), distances, torch.zeros_like(distances))
    flat = distances.flatten().sort().values
    middle = (flat[(len(flat) - 1) // 2] + flat[len(flat) // 2]) / 2
    if not bool(middle > 0):
        raise ValueError(f"rbf_cka needs rows that differ: the median distance of {len(x)} rows is 0")
    return double_centred(torch.exp(-distances / (2 * bandwidth**2 * middle)))

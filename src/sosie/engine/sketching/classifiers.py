"""One site's classifier: kernel ridge regression to the classes, fitted on buckets, asked about rows of new inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...stats import SiteForm, SiteSketch, Sketch
from ...stats.lottery import Fold
from ...stats.sketches import Part, TensorSketch, product_gram
from .ridge import Penalty, ridge_of_gram, ridge_of_rows

CLASSIFIED = ("features", "gradients", "hadamard", "hadamard_of_sketches", "sum", "maps")
UNSIGNED = frozenset({"hadamard_of_sketches"})  # kernels in which the signs of the sketch cancel
FORWARD = frozenset({"features"})  # kernels that need no gradients
FLAT = 64  # times the rounding of a number: what lies closer to its mean than that is constant


@dataclass
class Explicit:
    """t* = t̄ + Wᵀ(ψ(x*) − ψ̄), for a kernel whose map ψ was sketched itself."""

    kernel: str
    weights: Tensor  # (k, C) W
    offset: Tensor  # (C,) t̄ − Wᵀψ̄
    fold: Fold | None
    tensor: TensorSketch | None
    penalty: Penalty
    _kept: Tensor | None = field(default=None, repr=False)

    def features(self, rows: Tensor) -> Tensor | None:
        """Scores where features are all it takes; else they are kept until the gradients are there."""
        if self.kernel == "features":
            return self._scores(_narrow(rows, self.fold))
        if self.kernel != "gradients":
            self._kept = rows if self.tensor is None else self.tensor.features(rows)
        return None

    def gradients(self, rows: Tensor) -> Tensor:
        kept, self._kept = self._kept, None
        if kept is None:
            return self._scores(_narrow(rows, self.fold))
        if self.tensor is not None:
            return self._scores(side_by_side(self.tensor.product(kept, rows)))
        if self.kernel == "maps":
            return self._scores(_narrow(kept * rows, self.fold))
        return self._scores(torch.cat([_narrow(kept, self.fold), _narrow(rows, self.fold)], 1))

    def _scores(self, rows: Tensor) -> Tensor:
        self.weights, self.offset = self.weights.to(rows.device), self.offset.to(rows.device)
        return rows.double() @ self.weights + self.offset


@dataclass
class Product:
    """t* = t̄ + Aᵀ k(x*), with k(x*) the product of what features and gradients of a bucket have with those of x*."""

    f: Tensor  # (M, k)
    g: Tensor
    duals: Tensor  # (M, C) A, with centring worked in
    offset: Tensor  # (C,)
    fold: Fold | None
    penalty: Penalty
    _kept: Tensor | None = field(default=None, repr=False)

    def features(self, rows: Tensor) -> Tensor | None:
        self.f = self.f.to(rows)
        self._kept = _narrow(rows, self.fold) @ self.f.T
        return None

    def gradients(self, rows: Tensor) -> Tensor:
        assert self._kept is not None
        kept, self._kept = self._kept, None
        self.g = self.g.to(rows)
        self.duals, self.offset = self.duals.to(rows.device), self.offset.to(rows.device)
        products = kept.double() * (_narrow(rows, self.fold) @ self.g.T).double()
        return products @ self.duals + self.offset


def fit_site(sketch: Sketch, label: str, kernel: str, alpha: float | None) -> Explicit | Product:
    """The classifier of one site."""
    site = sketch.site(label)
    try:
        if kernel == "hadamard_of_sketches" or (kernel == "hadamard" and sketch.exact):
            return _fit_product(sketch, site, alpha)
        return _fit_explicit(sketch, site, label, kernel, alpha)
    except ValueError as error:
        error.add_note(f"while fitting the classifier of {label}")
        raise


def frequencies(sketch: Sketch) -> Tensor:
    """(C,) how often each class was met."""
    assert sketch.unsigned_labels is not None
    return sketch.unsigned_labels.sum(0) / sketch.unsigned_labels.sum()


def targets(sketch: Sketch, kernel: str) -> Tensor:
    """(M, C): the labels, centred and then sketched as the rows of the kernel are."""
    assert sketch.labels is not None
    assert sketch.unsigned_labels is not None
    if kernel in UNSIGNED:
        # A product of sketches has the square of a row's weight in a bucket, which a stack makes smaller than 1.
        square = sketch.n / sketch.counts.sum()
        return square * (sketch.unsigned_labels - sketch.counts[:, None] * frequencies(sketch))
    return sketch.labels - sketch.ones[:, None] * frequencies(sketch)


def _fit_explicit(sketch: Sketch, site: SiteSketch, label: str, kernel: str, alpha: float | None) -> Explicit:
    rows = sketch.kernel(label, kernel).rows
    names = ("features", "gradients") if kernel == "sum" else (kernel,)
    parts: list[Part] = [getattr(site, name) for name in names]
    copies = TensorSketch.COPIES if kernel == "hadamard" else 1
    raw = sum(float(part.rows.double().square().sum()) for part in parts) / copies
    _check_varied(float(rows.square().sum()), raw, parts[0])
    weights, penalty = ridge_of_rows(rows, targets(sketch, kernel), alpha, balanced=sketch.exact)
    totals = [side_by_side(part.total[:, None])[0] if part.total.ndim == 2 else part.total for part in parts]
    mean = torch.cat(totals) / sketch.n
    form = form_of(sketch, site, names)
    offset = frequencies(sketch) - mean @ weights
    tensor = form.tensor_sketch()
    return Explicit(kernel, weights, offset, None if tensor else form.projection(), tensor, penalty)


def _fit_product(sketch: Sketch, site: SiteSketch, alpha: float | None) -> Product:
    f, g = site.features, site.gradients
    if f is None or g is None:
        raise ValueError(
            "the product of kernels needs a sketch of features and of gradients: make it with "
            "kernels='hadamard_of_sketches' among others"
        )
    raw = product_gram(f, g, sketch.shared, False)
    gram = product_gram(f, g, sketch.shared, True)
    _check_varied(float(gram.trace()), float(raw.trace()), f)
    found, penalty = ridge_of_gram(gram, targets(sketch, "hadamard_of_sketches"), alpha, balanced=True)
    share = sketch.counts / sketch.counts.sum()
    duals = found - share @ found  # the mean comes off every bucket, once for each of its rows
    offset = frequencies(sketch) - (raw.sum(1) / sketch.n) @ duals
    fold = form_of(sketch, site, ("features", "gradients")).projection()
    return Product(f.rows, g.rows, duals, offset, fold, penalty)


def form_of(sketch: Sketch, site: SiteSketch, parts: tuple[str, ...]) -> SiteForm:
    """How a site was sketched, so that rows of new inputs can be projected alike."""
    return SiteForm(site.width, sketch.size, frozenset(parts), sketch.seed, site.folded)


def side_by_side(copies: Tensor) -> Tensor:
    """(n, 2k) from the two copies (2, n, k) of a TensorSketch: products are the mean of theirs."""
    return torch.cat([*copies], 1) / len(copies) ** 0.5


def _narrow(rows: Tensor, fold: Fold | None) -> Tensor:
    return rows if fold is None else fold(rows)


def _check_varied(centred: float, raw: float, part: Part) -> None:
    if centred <= (FLAT * torch.finfo(part.rows.dtype).eps) ** 2 * raw:
        raise ValueError(
            f"all rows are the same here, {tuple(part.rows.shape[-2:])} of them sketched: nothing tells classes apart; "
            "leave this site out"
        )

"""Classes from one sketched pass: kernel ridge regression on the sketch, and how well it answers for new inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from ..capture import RULES, Chunk, Rule, labels_of
from ..engine.stream import Stream
from ..linalg import eigen, self_product
from ..process_state import products
from ..results import Side
from ..stats.sample import Fold
from .build import SiteForm, TensorSketch
from .comparing import open_sketch
from .kernels import KERNELS, Part, SiteSketch, product_gram
from .sketches import Sketch
from .source import BETA, GradientSource, Loss, predictive_of, read_through, source_of

# Ridge regression with its penalty by leaving out one row at a time, in closed form
#
# `balanced`: whether rows, and targets, add up to 0, since their means came off them. A row left out is then minus the
# sum of the others, and would be known exactly where nothing is penalised: the means must be taken anew without it,
# which is what a constant among the columns does.

GRID = tuple(10 ** (half / 2) for half in range(-12, 9))  # penalties tried, in units of the mean eigenvalue


@dataclass(frozen=True)
class Penalty:
    """The penalty α of a ridge regression, and what it was chosen by."""

    alpha: float
    relative: float  # to the mean eigenvalue of the kernel
    error: float  # squared error at rows left out, over that of answering with the mean
    tried: tuple[tuple[float, float], ...]  # every α on the grid and its error; none where α was given

    @property
    def at_edge(self) -> bool:
        """Whether the best of the grid is its first or last, so that the true best may lie beyond."""
        return bool(self.tried) and self.alpha in (self.tried[0][0], self.tried[-1][0])


def ridge_of_rows(rows: Tensor, targets: Tensor, alpha: float | None, *, balanced: bool) -> tuple[Tensor, Penalty]:
    """W (k, C) = Ψᵀ(ΨΨᵀ + αI)⁻¹T for rows Ψ (M, k) and targets T (M, C), by way of the smaller of M and k."""
    if len(rows) < rows.shape[1]:
        duals, penalty = ridge_of_gram(self_product(rows.T), targets, alpha, balanced=balanced)
        return rows.T @ duals, penalty
    spectrum, vectors = _positive(self_product(rows))
    turned = rows @ vectors  # ΨV, with ΨᵀΨ = VΛVᵀ
    along = turned.T @ targets

    def left_out(penalty: float) -> Tensor:
        shrunk = 1 / (spectrum + penalty)
        leverage = turned.square() @ shrunk + (1 / len(rows) if balanced else 0)
        return (targets - turned @ (along * shrunk[:, None])) / (1 - leverage)[:, None]

    penalty = _chosen(left_out, spectrum, targets, alpha)
    return vectors @ (along / (spectrum + penalty.alpha)[:, None]), penalty


def ridge_of_gram(gram: Tensor, targets: Tensor, alpha: float | None, *, balanced: bool) -> tuple[Tensor, Penalty]:
    """(K + αI)⁻¹T for a kernel K (M, M) and targets T (M, C)."""
    if balanced:
        # The direction of ones, which K and T have nothing of, is made the largest and left out.
        spectrum, vectors = (part[..., :-1] for part in _positive(gram + 2 * gram.trace() / len(gram)))
    else:
        spectrum, vectors = _positive(gram)
    along = vectors.T @ targets
    squares = vectors.square()

    def left_out(penalty: float) -> Tensor:
        shrunk = 1 / (spectrum + penalty)
        return (vectors @ (along * shrunk[:, None])) / (squares @ shrunk)[:, None]

    penalty = _chosen(left_out, spectrum, targets, alpha)
    return vectors @ (along / (spectrum + penalty.alpha)[:, None]), penalty


def _positive(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a matrix without negative ones: what is below 0 is rounding."""
    values, vectors = eigen(gram)
    return torch.where(values > 0, values, torch.zeros_like(values)), vectors


def _chosen(left_out: Callable[[float], Tensor], spectrum: Tensor, targets: Tensor, alpha: float | None) -> Penalty:
    """The α that was given, or the one of the grid that answers best for rows left out."""
    mean = float(spectrum.sum()) / len(targets)
    variance = float(targets.square().sum())

    def error(penalty: float) -> float:
        return float(left_out(penalty).square().sum()) / variance

    if alpha is not None:
        rounding = torch.finfo(spectrum.dtype).eps * len(spectrum) * float(spectrum.amax())
        if alpha < rounding:
            raise ValueError(
                f"alpha={alpha:g} is lost in the rounding of a kernel whose largest eigenvalue is "
                f"{float(spectrum.amax()):.3g}: take at least {rounding:.1g}, or None to have it chosen"
            )
        return Penalty(alpha, alpha / mean, error(alpha), ())
    tried = tuple((share * mean, error(share * mean)) for share in GRID)
    best, least = min(tried, key=lambda pair: pair[1])
    return Penalty(best, best / mean, least, tried)


# One site's classifier: kernel ridge regression to the classes, fitted on buckets, asked about rows of new inputs

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


class Options(TypedDict, total=False):
    """How new inputs are read: as those of the sketch were."""

    sites: str | Sequence[str] | None  # some of those that were fitted; None: all
    rows: Rule | None  # None: that of the sketch
    output: str | Loss
    beta: float
    prepare: Callable[[Any], Any] | None
    inputs: Callable[[Any], Any] | None
    device: str | torch.device | None
    max_rows: int | None


@products()
def classify(
    sketch: Sketch | str | os.PathLike[str], kernel: str = "hadamard", *, alpha: float | None = None
) -> Classifiers:
    """Kernel ridge regression from the rows of a sketch, or of a file with one, to its labels, at every site.

    t* = t̄ + T̃ᵀ(K̃ + αI)⁻¹ k(x*), and the largest wins (equations 49 and 50 of Tang and others 2020, whose formula has
    no intercept: here rows and labels are centred before they are sketched, so that class means are not penalised).
    Labels have the signs of the sketch, but for "hadamard_of_sketches", in whose product the signs cancel.
    `alpha`: None takes the best of a grid for buckets left out one at a time, in closed form; a bucket's signed sum of
    residuals has the expected square of the residuals themselves, so that no row is needed that was not sketched.
    A sketch with size=None gives ordinary kernel ridge regression, and with kernel="features" a linear ridge probe.
    """
    if kernel not in CLASSIFIED:
        there = f"the kernel {kernel!r} cannot classify" if kernel in KERNELS else f"no kernel is called {kernel!r}"
        raise ValueError(f"{there}; those that can are {', '.join(CLASSIFIED)}")
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be a number above 0, got {alpha}; None has it chosen")
    sketch = open_sketch(sketch)
    if sketch.labels is None:
        raise ValueError(
            "this sketch has no labels: sketch batches of (inputs, labels), labels being whole numbers from 0 on, "
            "under a rule with one row an input"
        )
    shares = frequencies(sketch)
    if int((shares > 0).sum()) < 2:
        raise ValueError(f"all {sketch.n} labels of this sketch are the same: there is nothing to tell apart")
    sites = {label: fit_site(sketch, label, kernel, alpha) for label in sketch.side.sites}
    return Classifiers(kernel, sites, shares, sketch)


@dataclass(frozen=True, eq=False)
class Classifiers:
    """A fitted classifier for every site of a sketch."""

    kernel: str
    sites: dict[str, Explicit | Product]
    frequencies: Tensor  # (C,) of the classes in training
    sketch: Sketch

    @cached_property
    def _met(self) -> list[int]:
        """Classes that training has seen."""
        found: list[int] = self.frequencies.nonzero().flatten().tolist()
        return found

    @property
    def alphas(self) -> dict[str, float]:
        """The penalty of every site; `sites[…].penalty` has what it was chosen by."""
        return {label: site.penalty.alpha for label, site in self.sites.items()}

    def evaluate(self, model: Any, data: Any, **options: Unpack[Options]) -> dict[str, float]:
        """Share of inputs that are given their label, at every site, in one pass; `options` as of `scores`."""
        right: dict[str, Tensor] = {}
        inputs = 0

        def take(found: dict[str, Tensor], chunk: Chunk) -> None:
            nonlocal inputs
            labels = self._known(labels_of(chunk.batch))
            inputs += chunk.count
            for site, scores in found.items():
                count = (scores.argmax(1) == labels.to(scores.device)).sum()
                right[site] = right[site] + count if site in right else count

        self._read(model, data, take, **options)
        return {site: int(count) / inputs for site, count in right.items()}

    def scores(self, model: Any, data: Any, **options: Unpack[Options]) -> dict[str, Tensor]:
        """t* (inputs, classes) of every site for new inputs, which need no labels.

        `sites`: some of those that were fitted. `rows`, `output`, `beta`, `prepare`, `inputs`: as the sketch was made;
        `device`, `max_rows`: as in `sosie.sketch`. A loss of one's own as `output` is given the batches as they are:
        one that reads labels reads them here too.
        """
        kept: dict[str, list[Tensor]] = {}

        def take(found: dict[str, Tensor], chunk: Chunk) -> None:
            for site, scores in found.items():
                kept.setdefault(site, []).append(scores.cpu())

        self._read(model, data, take, **options)
        return {site: torch.cat(scores) for site, scores in kept.items()}

    def _read(
        self,
        model: Any,
        data: Any,
        take: Callable[[dict[str, Tensor], Chunk], None],
        *,
        sites: str | Sequence[str] | None = None,
        rows: Rule | None = None,
        output: str | Loss = "logits",
        beta: float = BETA,
        prepare: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        device: str | torch.device | None = None,
        max_rows: int | None = None,
    ) -> None:
        """One pass; `take` is given the scores of every chunk."""
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        source = source_of(
            model,
            self._chosen(sites),
            self._rule(rows),
            prepare=prepare,
            inputs=inputs,
            device=device,
            predictive=predictive_of(output, beta),
        )
        self._check_same(source)
        run = _Asking(source, self)
        with source.opened():
            stream = Stream.of(data, [source])
            self._check_widths(source.look(stream.first))
            task = f"classifying with {source.name}"
            read_through(source, stream, lambda chunk: take(run.ask(chunk), chunk), task=task, max_rows=max_rows)

    def _chosen(self, sites: str | Sequence[str] | None) -> list[str]:
        chosen = list(self.sites) if sites is None else [sites] if isinstance(sites, str) else list(sites)
        unknown = [label for label in chosen if label not in self.sites]
        if unknown or not chosen:
            raise ValueError(
                f"no classifier was fitted for {', '.join(unknown) or 'no site'}: there are those of "
                f"{', '.join(self.sites)}"
            )
        return chosen

    def _rule(self, rows: Rule | None) -> Rule:
        made = self.sketch.rows_rule
        if rows is None:
            if made not in RULES:
                raise ValueError(f"the sketch made its rows by a function, {made}: give it again as rows=")
            return made
        named = rows if isinstance(rows, str) else getattr(rows, "__name__", "function")
        if named != made:
            raise ValueError(f"the sketch made its rows by the rule {made!r}, not {named!r}: take the same")
        return rows

    def _check_same(self, source: GradientSource) -> None:
        if source.digest() != self.sketch.model:
            raise ValueError(
                f"{source.name} is not the model that was sketched, {self.sketch.side.name}: its weights, or how its "
                "inputs are prepared, are others. Classify with that one, or sketch this one"
            )
        pulled = source.predictive.describe()
        if self.kernel not in FORWARD and pulled != self.sketch.output:
            raise ValueError(
                f"the gradients of the sketch are of another output, {self.sketch.output!r} and not {pulled!r}: give "
                "output= and beta= as it was made"
            )

    def _check_widths(self, side: Side) -> None:
        for label, width in zip(side.sites, side.widths, strict=True):
            expected = self.sketch.site(label).width
            if width != expected:
                raise ValueError(
                    f"{label} gives rows of {width} features for these inputs, but of {expected} for those of the "
                    "sketch: take inputs of the same size"
                )

    def _known(self, labels: Tensor | None) -> Tensor:
        """Labels that training has seen."""
        if labels is None:
            raise ValueError("these data have no labels to check answers with: give batches of (inputs, labels)")
        met = self._met
        if unknown := sorted(set(labels.tolist()) - set(met)):
            raise ValueError(
                f"these data have classes that the {len(met)} of the sketch do not include: "
                f"{', '.join(map(str, unknown[:5]))}{' …' if len(unknown) > 5 else ''}"
            )
        return labels

    def __repr__(self) -> str:
        return f"<Classifiers by {self.kernel}: {len(self.sites)} sites, {len(self.frequencies)} classes>"


class _Asking:
    """The scores of one chunk after another."""

    def __init__(self, source: GradientSource, fitted: Classifiers) -> None:
        self.source, self.fitted = source, fitted
        self._found: dict[str, Tensor] = {}

    def ask(self, chunk: Chunk) -> dict[str, Tensor]:
        self._found = {}
        forward = self.fitted.kernel in FORWARD
        self.source.read_rows(chunk, self._features, None if forward else self._gradients)
        return {site: self._found[site] for site in self.fitted.sites if site in self._found}

    def _features(self, site: str, rows: Tensor) -> None:
        scores = self.fitted.sites[site].features(rows)
        if scores is not None:
            self._found[site] = scores

    def _gradients(self, site: str, rows: Tensor) -> None:
        with torch.no_grad():
            self._found[site] = self.fitted.sites[site].gradients(rows)

"""Classifiers from one sketched pass: kernel ridge regression on the sketch, and its answers to new inputs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..capture import RULES, Chunk, Rule, labels_of, rule_name
from ..checks import listed, positive
from ..engine.stream import Stream
from ..linalg import eigen, self_product
from ..process_state import products
from .comparing import open_sketch
from .gradients import BETA, GradientNetwork, Loss, predictive_of
from .kernels import KERNELS, product_gram, side_by_side
from .sketches import Sketch, TensorSketch, projection

CLASSIFIED = ("features", "gradients", "hadamard", "hadamard_of_sketches", "sum", "maps")
UNSIGNED = frozenset({"hadamard_of_sketches"})  # kernels in which the signs of the sketch cancel
FLAT = 64  # roundings of a number: rows closer than that to their mean are constant
GRID = tuple(10 ** (half / 2) for half in range(-12, 9))  # penalties tried, in units of the mean eigenvalue


@products()
def classify(
    sketch: Sketch | str | os.PathLike[str], kernel: str = "hadamard", *, alpha: float | None = None
) -> Classifiers:
    """Fit kernel ridge regression from the rows of a sketch, or of its file, to its labels, at every site.

    t* = t̄ + T̃ᵀ(K̃ + αI)⁻¹ k(x*), and the largest wins (equations 49 and 50 of Tang et al. 2020, which have no
    intercept: here rows and labels are centred before they are sketched, so that class means are not penalised).
    Labels have the signs of the sketch, except for "hadamard_of_sketches", where signs cancel in the product.
    `alpha=None` takes the best of a grid, by leaving out one bucket at a time in closed form: the signed sum of a
    bucket's residuals has the same expected square as the residuals, so the rows themselves are not needed. A sketch
    with size=None gives ordinary kernel ridge regression, and with kernel="features" a linear ridge probe.
    """
    if kernel not in CLASSIFIED:
        what = f"the kernel {kernel!r} cannot classify" if kernel in KERNELS else f"no kernel is called {kernel!r}"
        raise ValueError(f"{what}; those that can are {', '.join(CLASSIFIED)}")
    if alpha is not None:
        positive(alpha, "alpha", why="None chooses it")
    sketch = open_sketch(sketch)
    if sketch.labels is None or sketch.unsigned_labels is None:
        raise ValueError(
            "this sketch has no labels: sketch batches of (inputs, labels) with whole numbers from 0 as labels, by a "
            "row rule with one row per input"
        )
    shares = sketch.unsigned_labels.sum(0) / sketch.unsigned_labels.sum()
    if int((shares > 0).sum()) < 2:
        raise ValueError(f"all {sketch.n} labels of this sketch are the same: there is nothing to tell apart")
    targets = sketch.labels - sketch.ones[:, None] * shares  # centred and then sketched, as the rows of the kernel are
    fitted = "hadamard_of_sketches" if kernel == "hadamard" and sketch.exact else kernel
    if fitted in UNSIGNED:
        # A product of sketches squares a row's weight in a bucket, which is below 1 in a stack.
        square = sketch.n / sketch.counts.sum()
        targets = square * (sketch.unsigned_labels - sketch.counts[:, None] * shares)
    fit = SiteClassifier.fit
    sites = {label: fit(sketch, label, fitted, targets, shares, alpha) for label in sketch.side.sites}
    return Classifiers(kernel, sites, shares, sketch)


@dataclass(frozen=True, eq=False)
class Classifiers:
    """A fitted classifier for every site of a sketch."""

    kernel: str
    sites: dict[str, SiteClassifier]
    frequencies: Tensor  # (C,) shares of the classes in training
    sketch: Sketch

    @property
    def alphas(self) -> dict[str, float]:
        """The penalty of every site; `sites[…].errors` has the error of every penalty tried."""
        return {label: site.alpha for label, site in self.sites.items()}

    def evaluate(self, model: Any, data: Any, **options: Any) -> dict[str, float]:
        """The accuracy at every site, from one pass over data with labels; `options` are those of `scores`."""
        known: list[int] = self.frequencies.nonzero().flatten().tolist()
        correct: dict[str, Any] = defaultdict(int)
        inputs = 0
        with closing(self._read(model, data, **options)) as chunks:
            for chunk, scores in chunks:
                labels = labels_of(chunk.batch)
                if labels is None:
                    raise ValueError("these data have no labels: give batches of (inputs, labels)")
                if unknown := sorted(set(labels.tolist()) - set(known)):
                    raise ValueError(f"these data have classes that are not in the sketch: {listed(unknown)}")
                inputs += chunk.count
                for site, score in scores.items():
                    correct[site] += (score.argmax(1) == labels.to(score.device)).sum()
        return {site: int(count) / inputs for site, count in correct.items()}

    def scores(self, model: Any, data: Any, **options: Any) -> dict[str, Tensor]:
        """The scores t* (inputs, classes) of every site for new inputs, which need no labels.

        `sites` selects some of the fitted sites. `rows`, `output`, `beta`, `prepare` and `inputs` are those of the
        sketch; `device` and `max_rows` as in `sosie.sketch`. A loss function as `output` gets whole batches, so if it
        reads labels, the new data need them too.
        """
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for _, scores in self._read(model, data, **options):
            for site, score in scores.items():
                parts[site].append(score.cpu())
        return {site: torch.cat(scores) for site, scores in parts.items()}

    def _read(
        self,
        model: Any,
        data: Any,
        *,
        sites: str | Sequence[str] | None = None,
        rows: Rule | None = None,
        output: str | Loss = "logits",
        beta: float = BETA,
        max_rows: int | None = None,
        **options: Any,
    ) -> Generator[tuple[Chunk, dict[str, Tensor]], None, None]:
        """Yield every chunk of the data with its scores at every site."""
        chosen = list(self.sites) if sites is None else [sites] if isinstance(sites, str) else list(sites)
        unknown = [label for label in chosen if label not in self.sites]
        if unknown or not chosen:
            raise ValueError(f"no classifier for {', '.join(unknown) or 'no site'}; there are {', '.join(self.sites)}")
        rule = self.sketch.rows_rule
        if rows is None and rule not in RULES:
            raise ValueError(f"the sketch made its rows by a function, {rule}: pass it as rows=")
        rows = rule if rows is None else rows
        name = rule_name(rows)
        if name != rule:
            raise ValueError(f"the sketch made its rows by the rule {rule!r}, not {name!r}: use the same rule")
        predictive = predictive_of(output, beta)
        network = GradientNetwork.of(model, sites=chosen, rows=rows, predictive=predictive, **options)
        if network.digest() != self.sketch.model:
            raise ValueError(
                f"{network.name} is not the model that was sketched, {self.sketch.side.name}: its weights or the "
                "preparation of its inputs differ. Classify with that model, or sketch this one"
            )
        if self.kernel != "features" and predictive.words != self.sketch.output:
            raise ValueError(
                f"the gradients of the sketch are of another output, {self.sketch.output!r} and not "
                f"{predictive.words!r}: give its output= and beta="
            )
        scores: dict[str, Tensor] = {}

        def features(site: str, rows: Tensor) -> None:
            if (score := self.sites[site].features(rows)) is not None:
                scores[site] = score

        def gradients(site: str, rows: Tensor) -> None:
            with torch.no_grad():
                scores[site] = self.sites[site].gradients(rows)

        with network.opened():
            stream = Stream.of(data, [network], max_rows)
            side = network.look(stream.first)
            for label, width in zip(side.sites, side.widths, strict=True):
                if width != (expected := self.sketch.site(label).width):
                    raise ValueError(
                        f"{label} gives rows of {width} features for these inputs, but of {expected} in the sketch: "
                        "take inputs of the same size"
                    )
            for chunk in network.chunks(stream, task="classifying with"):
                network.read_rows(chunk, features, None if self.kernel == "features" else gradients)
                yield chunk, {site: scores[site] for site in self.sites if site in scores}

    def __repr__(self) -> str:
        return f"<Classifiers by {self.kernel}: {len(self.sites)} sites, {len(self.frequencies)} classes>"


@dataclass
class SiteClassifier:
    """Kernel ridge regression to the classes at one site: fitted on buckets, evaluated on rows of new inputs.

    t* = t̄ + Wᵀ(ψ(x*) − ψ̄) for a kernel whose map ψ was sketched. For a product of sketches, ψ(x*) has one entry per
    bucket, ⟨features, features of x*⟩ ⟨gradients, gradients of x*⟩, and W includes the centring.
    """

    kernel: str
    errors: dict[float, float]  # of each penalty tried, at rows left out, relative to predicting the mean
    weights: Tensor  # (k, C) W
    offset: Tensor  # (C,) t̄ − Wᵀψ̄
    project: Callable[[Tensor], Tensor]
    tensor: TensorSketch | None = None
    buckets: tuple[Tensor, Tensor] | None = None  # features and gradients (M, k) of a product of sketches
    _pending: Tensor | None = field(default=None, repr=False)  # made of the features, until the gradients are known

    @classmethod
    def fit(
        cls, sketch: Sketch, label: str, kernel: str, targets: Tensor, shares: Tensor, alpha: float | None
    ) -> SiteClassifier:
        site = sketch.site(label)
        names = (kernel,) if kernel in ("features", "gradients", "hadamard", "maps") else ("features", "gradients")
        parts = [site.part(name, kernel) for name in names]
        project = projection(site.width, site.folded, sketch.seed)
        if kernel == "hadamard_of_sketches":
            f, g = parts
            raw = product_gram(f, g, sketch, False)
            gram = product_gram(f, g, sketch, True)
            _check_varied(float(gram.trace()), float(raw.trace()), f.rows, label)
            duals, errors, _ = ridge_of_gram(gram, targets, alpha, balanced=True)
            # The mean is subtracted from every bucket, once for each of its rows.
            duals = duals - (sketch.counts / sketch.counts.sum()) @ duals
            offset = shares - (raw.sum(1) / sketch.n) @ duals
            return cls(kernel, errors, duals, offset, project, buckets=(f.rows, g.rows))
        rows = sketch.kernel(label, kernel).rows
        tensor = TensorSketch(site.width, sketch.height, sketch.seed) if kernel == "hadamard" else None
        squares = sum(float(part.rows.double().square().sum()) for part in parts)
        copies = 1 if tensor is None else tensor.COPIES
        _check_varied(float(rows.square().sum()), squares / copies, parts[0].rows, label)
        weights, errors, _ = ridge_of_rows(rows, targets, alpha, balanced=sketch.exact)
        totals = [part.total if tensor is None else side_by_side(part.total[:, None])[0] for part in parts]
        offset = shares - torch.cat(totals) / sketch.n @ weights
        return cls(kernel, errors, weights, offset, project, tensor)

    @property
    def alpha(self) -> float:
        """The penalty with the smallest error."""
        return best(self.errors)

    def features(self, rows: Tensor) -> Tensor | None:
        """The scores of these features, or None where they need gradients too."""
        if self.kernel == "features":
            return self._scores(self.project(rows))
        if self.buckets is not None:
            self.buckets = (self.buckets[0].to(rows), self.buckets[1].to(rows))
            self._pending = self.project(rows) @ self.buckets[0].T
        elif self.kernel != "gradients":
            self._pending = rows if self.tensor is None else self.tensor.features(rows)
        return None

    def gradients(self, rows: Tensor) -> Tensor:
        """The scores of these gradients, and of the features that came before them."""
        pending, self._pending = self._pending, None
        if pending is None:
            return self._scores(self.project(rows))
        if self.buckets is not None:
            return self._scores(pending.double() * (self.project(rows) @ self.buckets[1].T).double())
        if self.tensor is not None:
            return self._scores(side_by_side(self.tensor.product(pending, rows)))
        if self.kernel == "maps":
            return self._scores(self.project(pending * rows))
        return self._scores(torch.cat([self.project(pending), self.project(rows)], 1))

    def _scores(self, rows: Tensor) -> Tensor:
        self.weights, self.offset = self.weights.to(rows.device), self.offset.to(rows.device)
        return rows.double() @ self.weights + self.offset


def _check_varied(centred: float, raw: float, rows: Tensor, label: str) -> None:
    if centred <= (FLAT * torch.finfo(rows.dtype).eps) ** 2 * raw:
        raise ValueError(f"{label}: all rows are the same, so nothing tells classes apart; leave out this site")


# Ridge regression, with a penalty chosen by leaving out one row at a time, in closed form
#
# `balanced` says that rows and targets sum to 0, because their means were subtracted. A row left out is then minus the
# sum of the others, and would be predicted exactly without a penalty: the means must be computed without it, which is
# what a constant among the columns does.

# Weights for the best penalty, the error of each penalty tried, and what rows left out differ by with the best one
Ridge: TypeAlias = tuple[Tensor, dict[float, float], Tensor]


def ridge_of_rows(rows: Tensor, targets: Tensor, alpha: float | None, *, balanced: bool) -> Ridge:
    """W (k, C) = Ψᵀ(ΨΨᵀ + αI)⁻¹T for rows Ψ (M, k) and targets T (M, C); the cost is that of the smaller of M and k."""
    if len(rows) < rows.shape[1]:
        duals, errors, residuals = ridge_of_gram(self_product(rows.T), targets, alpha, balanced=balanced)
        return rows.T @ duals, errors, residuals
    spectrum, vectors = _positive(self_product(rows))
    turned = rows @ vectors  # ΨV, with ΨᵀΨ = VΛVᵀ
    along = turned.T @ targets

    def left_out(penalty: float) -> Tensor:
        shrunk = 1 / (spectrum + penalty)
        leverage = turned.square() @ shrunk + (1 / len(rows) if balanced else 0)
        return (targets - turned @ (along * shrunk[:, None])) / (1 - leverage)[:, None]

    errors = _errors(left_out, spectrum, targets, alpha)
    penalty = best(errors)
    return vectors @ (along / (spectrum + penalty)[:, None]), errors, left_out(penalty)


def ridge_of_gram(gram: Tensor, targets: Tensor, alpha: float | None, *, balanced: bool) -> Ridge:
    """(K + αI)⁻¹T for a kernel K (M, M) and targets T (M, C)."""
    if balanced:
        # Make the direction of ones, along which K and T are zero, the largest, and leave it out.
        spectrum, vectors = (part[..., :-1] for part in _positive(gram + 2 * gram.trace() / len(gram)))
    else:
        spectrum, vectors = _positive(gram)
    along = vectors.T @ targets
    squares = vectors.square()

    def left_out(penalty: float) -> Tensor:
        shrunk = 1 / (spectrum + penalty)
        return (vectors @ (along * shrunk[:, None])) / (squares @ shrunk)[:, None]

    errors = _errors(left_out, spectrum, targets, alpha)
    penalty = best(errors)
    return vectors @ (along / (spectrum + penalty)[:, None]), errors, left_out(penalty)


def _positive(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a positive semidefinite matrix; values below 0 by rounding become 0."""
    values, vectors = eigen(gram)
    return values.clamp_min(0), vectors


def _errors(
    left_out: Callable[[float], Tensor], spectrum: Tensor, targets: Tensor, alpha: float | None
) -> dict[float, float]:
    """The error of the user's penalty, or of every penalty of the grid, at rows left out."""
    rounding = torch.finfo(spectrum.dtype).eps * len(spectrum) * float(spectrum.amax())
    if alpha is not None and alpha < rounding:
        raise ValueError(
            f"alpha={alpha:g} is lost in the rounding of a kernel whose largest eigenvalue is "
            f"{float(spectrum.amax()):.3g}: take at least {rounding:.1g}, or None to choose it"
        )
    mean, variance = float(spectrum.sum()) / len(targets), float(targets.square().sum())
    tried = [share * mean for share in GRID] if alpha is None else [alpha]
    return {penalty: float(left_out(penalty).square().sum()) / variance for penalty in tried}


def best(errors: dict[float, float]) -> float:
    """The penalty with the smallest error."""
    return min(errors, key=lambda penalty: errors[penalty])

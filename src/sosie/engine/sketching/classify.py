"""Classes from one sketched pass: kernel ridge regression on the sketch, and how well it answers for new inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from ...capture import BETA, RULES, Chunk, Loss, Rule, labels_of, predictive_of
from ...process_state import products
from ...results import Side
from ...stats import KERNELS, Sketch
from ..stream import Stream
from .classifiers import CLASSIFIED, FORWARD, Explicit, Product, fit_site, frequencies
from .comparing import open_sketch
from .source import GradientSource, read_through, source_of


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

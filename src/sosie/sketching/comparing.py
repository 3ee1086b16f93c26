"""Compare sketches like models: values with intervals, chance levels and caveats."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checks import whole_number
from ..engine import caveats
from ..engine.evaluate import by_pair, constant_sites
from ..engine.plan import find_measures
from ..engine.provenance import provenance
from ..engine.uncertainty import FEWEST_GROUPS, around, by_jackknife, judged
from ..measures import Measure, as_array, snap_to_bounds
from ..process_state import products
from ..results import Caveat, Chance, Comparison, Comparisons, Estimate, Interval, Side, rules_in_words
from ..stats import Alignment, DebiasedAlignment, check_seed
from .kernels import SketchPair
from .sketches import Sketch

Array = np.ndarray
DEFAULT = "linear_cka"  # debiased values of small sketches are noisy
UNPAIRED = ("linear_cka", "normalized_bures", "spectral_bures_distance")
DRAWS = 5  # for the chance level of sketches without common rows; draws hardly differ
SLACK = 30  # sums over buckets round more than sums over rows
PRODUCT_ROUNDING = 1e-12  # a product of kernels is centred as a matrix, not by rows, so that rounding is not squared
_OF_BUCKETS = ("bures_distance",)  # reads rows, but only for their covariance, which buckets have too


def open_sketch(thing: Any) -> Sketch:
    """Return the sketch, read from a file if it is a path."""
    is_path = isinstance(thing, (str, os.PathLike))
    if not isinstance(thing, Sketch) and not (is_path and Path(thing).suffix == ".safetensors"):
        got = repr(thing) if is_path else type(thing).__name__
        raise TypeError(f"need a sketch: make one with sosie.sketch(model, data), got {got}")
    return thing if isinstance(thing, Sketch) else Sketch.load(thing)


def compare_sketches(
    things: Sequence[Any],
    measures: str | Measure | Sequence[str | Measure] | None,
    *,
    names: Sequence[str | None],
    draws: int,
    seed: int,
    decided: Mapping[str, Any],
) -> Comparison | Comparisons:
    """Compare all pairs of sketches of the same data, in the same buckets with the same signs.

    `decided` holds the options of `sosie.compare` that are fixed when a sketch is made: all must be None.
    """
    sketches = [named(open_sketch(thing), name) for thing, name in zip(things, names, strict=True)]
    if wrong := [name for name, value in decided.items() if value is not None]:
        raise ValueError(
            f"{', '.join(wrong)}: not for sketches, where this was decided when they were made; sketch.at(…) selects "
            "sites"
        )
    chosen = find_measures(DEFAULT if measures is None else measures, of="layers")
    for other in sketches[1:]:
        sketches[0].check_shared(other)
    pairs = {
        (i, j): _compare(a, b, chosen, draws=draws, seed=seed, shared=True)
        for i, a in enumerate(sketches)
        for j, b in enumerate(sketches)
        if i < j
    }
    return pairs[0, 1] if len(sketches) == 2 else Comparisons(tuple(sketch.side.name for sketch in sketches), pairs)


def named(sketch: Sketch, name: str | None) -> Sketch:
    """The sketch with another name of its model, if one is given."""
    return sketch if name is None else replace(sketch, side=replace(sketch.side, name=name))


def compare_unpaired(
    sketch_a: Any,
    sketch_b: Any,
    *,
    measures: str | Measure | Sequence[str | Measure] = UNPAIRED,
    draws: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare sketches that share no rows: of different data, numbers of rows, or seeds.

    The cosine of kernels without a common row depends only on how their variance is spread over directions and on the
    size of the sketch; the result always has the chance level, from `draws` of other buckets and signs.
    `spectral_bures_distance` compares the spectra directly, and `bures_distance` the covariances of sites whose neurons
    correspond: one network on two data sets.
    """
    a, b = open_sketch(sketch_a), open_sketch(sketch_b)
    chosen = find_measures(measures, of="layers")
    if draws is not None:
        whole_number(draws, "draws", least=2, why="chance is the mean of several")
    check_seed(seed)
    if a.exact or b.exact or a.size != b.size:
        sizes = " and ".join("one that kept every row" if k.exact else str(k.size) for k in (a, b))
        raise ValueError(f"sketches without common rows must have one size, got {sizes}: make both with the same size")
    if debiased := [m.name for m in chosen if m.reads is DebiasedAlignment]:
        raise ValueError(f"{', '.join(debiased)}: needs common rows; take linear_cka, which has a chance level")
    if a is not b and a.difference_from(b) is None:
        raise ValueError(
            "these sketches are of the same rows with one seed: use compare(); for independent sketches make one with "
            "another seed"
        )
    return _compare(a, b, chosen, draws=draws or 0, seed=seed, shared=False)


@products()
def _compare(a: Sketch, b: Sketch, measures: Sequence[Measure], *, draws: int, seed: int, shared: bool) -> Comparison:
    kernel = a.compared
    if b.compared != kernel:
        raise ValueError(f"need one kernel of both sketches, got {kernel!r} and {b.compared!r}: see Sketch.using")
    for measure in measures:
        if measure.reads not in SketchPair.supplies and measure.base not in _OF_BUCKETS:
            raise ValueError(
                f"{measure.name} reads rows or neurons, which a sketch does not have: take linear_cka, debiased_cka, "
                "kernel_alignment, normalized_bures, procrustes_angle or others of Gram matrices or covariances"
            )
    pair = SketchPair(a.kernels(), b.kernels(), a.height, a.exact, a.stack)
    if not shared and a.seed == b.seed:
        # With one seed, the buckets of both hold equally many rows, which would count as similarity of the networks.
        pair = pair.redrawn(seed, -1)
    sides = a.side, b.side
    if a.side.name == b.side.name:
        sides = replace(a.side, name=f"{a.side.name} (A)"), replace(b.side, name=f"{b.side.name} (B)")
    general = [Caveat(str(text)) for text in dict.fromkeys([a.about.get("mixing"), b.about.get("mixing")]) if text]
    if a.output != b.output and kernel != "features":
        general.append(Caveat(f"the gradients are of different losses, {a.output} and {b.output}"))
    estimates = Evaluation(pair, sides, kernel, draws, seed, shared, tuple(general)).estimates(measures)
    settings: dict[str, Any] = {"kernel": kernel, "sketches": [repr(a), repr(b)], "shared": shared}
    settings["gradients of"] = " and ".join(dict.fromkeys([a.output, b.output]))
    models = [*a.about.get("models", []), *b.about.get("models", [])]
    about = provenance(settings=settings, models=models, data=a.about.get("data"))
    rule = rules_in_words(a.rows_rule, b.rows_rule)
    about["inputs"] = a.about.get("inputs", a.n)
    return Comparison(*sides, estimates, f"{rule}, {kernel} kernel", about, kind="sketches")


@dataclass(frozen=True)
class Evaluation:
    """Measures over every pair of sites of two sketches."""

    pair: SketchPair
    sides: tuple[Side, Side]
    kernel: str
    draws: int
    seed: int
    shared: bool  # the sketches share rows and buckets
    general: tuple[Caveat, ...]  # caveats of all measures

    def estimates(self, measures: Sequence[Measure]) -> dict[str, Estimate]:
        matrices = self._matrices(measures, self.pair)
        chances = self._chance(measures, {name: value for name, (value, _) in matrices.items()})
        estimates = {}
        for measure in measures:
            value, undefined = matrices[measure.name]
            chance = chances.get(measure.name)
            interval = self._interval(measure, value)
            notes = [
                *caveats.of_undefined(undefined, *self.sides),
                *self._about_values(measure, value),
                *self._about_the_interval(interval[0], value, chance),
                *caveats.of_draws(self.draws),
                *caveats.of_one_direction(measure, self.pair, *self.sides),
                *caveats.of_bounds(measure, value),
                *caveats.of_left_out(*self.sides),
            ]
            notes += caveats.of_nan(value, notes, *self.sides)
            if chance is not None and not self.draws:
                chance = Chance(chance.mean, chance.spread)
            estimates[measure.name] = Estimate.of(
                measure,
                value,
                n=self.pair.n,
                statistic=self.pair.describe(),
                interval=interval,
                chance=chance,
                caveats=(*notes, *self.general),
            )
        return estimates

    def _matrices(
        self, measures: Sequence[Measure], pair: SketchPair
    ) -> dict[str, tuple[Array, dict[tuple[int, int], str]]]:
        """The values (A, B) of each measure, and why some are missing; measures share the work per pair of sites."""
        shape = (len(pair.a), len(pair.b))
        varied = tuple(~constant for constant in self._constant)
        widths = tuple(tuple(side.widths) for side in self.sides)
        one_by_one = [m for m in measures if not issubclass(m.reads, Alignment)]
        by_pairs = by_pair(one_by_one, pair, widths, *varied)  # type: ignore[arg-type]
        matrices = {}
        for measure in measures:
            pairs = by_pairs.get(measure.name)
            value = measure(pair.alignment(measure.reads)) if pairs is None else pairs.matrix(shape)
            array = as_array(snap_to_bounds(value, measure, torch.float32))
            if measure.reads is DebiasedAlignment and not pair.exact:
                array[np.abs(array) > 1] = np.nan  # from a norm that was estimated far too small
            array[~varied[0], :] = array[:, ~varied[1]] = np.nan
            matrices[measure.name] = array, {} if pairs is None else pairs.undefined
        return matrices

    @cached_property
    def _constant(self) -> tuple[Array, Array]:
        """The sites whose centred kernel is zero: dead ones, those without gradients, and single rows."""
        nil = PRODUCT_ROUNDING if self.pair.exact and self.kernel.startswith("hadamard") else 0
        a, b = (
            constant_sites(share, side, SLACK) | ~(share.numpy() > nil)
            for share, side in zip(self.pair.spread, self.sides, strict=True)
        )
        return a, b

    def _chance(self, measures: Sequence[Measure], values: dict[str, Array]) -> dict[str, Chance]:
        """The values by chance, with other buckets and signs for B: by formula where there is one, else by draws.

        Sketches without common rows have a few draws even if the user wants none.
        """
        chances = {}
        drawn: dict[str, list[Array]] = {}
        for measure in measures:
            if not measure.paired:
                continue
            if self.draws or not issubclass(measure.reads, Alignment):
                if self.draws or not self.shared:
                    drawn[measure.name] = []
                continue
            view = self.pair.alignment(measure.reads)
            if measure.reads is DebiasedAlignment:
                chances[measure.name] = Chance(np.zeros(tuple(view.xy.shape)), None)
                continue
            mean, variance = self.pair.redrawn_moments(measure.reads)
            # These measures are proportional to xy, so its mean and spread give those of the measure.
            spread = None if variance is None else measure(replace(view, xy=variance.sqrt())).numpy()
            chances[measure.name] = Chance(measure(replace(view, xy=mean)).numpy(), spread)
        drawing = [measure for measure in measures if measure.name in drawn]
        for number in range(self.draws or DRAWS) if drawing else ():
            for name, (value, _) in self._matrices(drawing, self.pair.redrawn(self.seed, number)).items():
                drawn[name].append(value)
        return chances | {m.name: judged(m, values[m.name], np.stack(drawn[m.name])) for m in drawing}

    def _interval(self, measure: Measure, value: Array) -> Interval:
        """The interval for other inputs in other buckets, by leaving out each bucket in turn.

        None if the rows of a kernel are not sums over the inputs of a bucket, and without common rows.
        """
        sums = issubclass(measure.reads, Alignment) and self.kernel not in ("midpoint", "hadamard_of_sketches")
        if self.pair.exact or not self.shared or not sums or self.pair.size < FEWEST_GROUPS:
            return None, None
        with np.errstate(invalid="ignore"):
            return around(measure, value, by_jackknife(measure(self.pair.left_out(measure.reads)).numpy()))

    def _about_the_interval(self, low: Array | None, value: Array, chance: Chance | None) -> Iterator[Caveat]:
        if low is None:
            return
        pair = self.pair
        text = f"no interval: with one of {pair.size} buckets left out the value is undefined; take a larger size"
        yield from self._at(np.isnan(low) & np.isfinite(value), text)
        if pair.stack > 1 and pair.n < pair.stack * pair.size:
            yield Caveat(
                f"each input is in {pair.stack} buckets (stack), which the interval counts as different inputs: it is "
                f"too narrow for only {pair.n} inputs in {pair.size} buckets; take stack=1"
            )
        if pair.a[0].halves is not None:
            yield Caveat(
                "the interval covers other buckets, but not other columns of the sketch of f ⊗ g: it is too narrow "
                "where networks are similar"
            )
        if chance is not None and chance.spread is not None:
            yield from caveats.near_chance(value, chance.mean, chance.spread, *self.sides)

    def _about_values(self, measure: Measure, value: Array) -> Iterator[Caveat]:
        pair, debiased = self.pair, measure.reads is DebiasedAlignment
        text = f"rows of the {self.kernel} kernel do not vary: no similarity is defined"
        constant = [[text if is_constant else None for is_constant in side] for side in self._constant]
        yield from caveats.at_sites(constant, *self.sides, undefined=True)
        if debiased and not pair.exact:
            # A debiased norm may be negative, or so small that a cosine exceeds 1.
            vary_a, vary_b = (~constant for constant in self._constant)
            text = f"undefined: the noise of sketching to {pair.size} outweighs the kernel; take a larger size"
            yield from self._at(np.isnan(value) & vary_a[:, None] & vary_b, text, undefined=True)
        if not self.shared and measure.paired:
            yield Caveat(
                f"the sketches share no rows: the value depends on spectra and the {pair.size} buckets, and is close "
                "to chance for any two networks; read it against chance, or take spectral_bures_distance"
            )
        if self.kernel == "hadamard_of_sketches" and not pair.exact:
            yield Caveat(
                "the product of two sketched kernels is not the sketch of their product: values are too high; take "
                "using('hadamard')"
            )
        if not pair.exact and self.shared and pair.n <= pair.size:
            yield Caveat(
                f"{pair.n} rows fit into {pair.size} buckets: size=None (--size all) keeps every row, which is exact"
            )
        if not pair.exact and self.shared and not debiased and measure.paired:
            # Buckets make different rows look alike; the columns of a TensorSketch add to norms alone.
            way = "biased" if pair.a[0].halves is not None else f"biased {measure.closer}"
            yield Caveat(
                f"{pair.n} rows in {pair.size} buckets: {way}; debiased_cka corrects for it, the interval does not"
            )
        folded = [[kernel.folded for kernel in kernels] for kernels in (pair.a, pair.b)]
        texts = [[None if k is None else f"rows were projected to {k} columns" for k in side] for side in folded]
        yield from caveats.at_sites(texts, *self.sides)

    def _at(self, pairs: Array, text: str, *, undefined: bool = False) -> Iterator[Caveat]:
        """A caveat for each of these pairs of sites, (A, B)."""
        for i, j in zip(*np.nonzero(pairs), strict=True):
            yield Caveat(text, self.sides[0].sites[i], self.sides[1].sites[j], undefined)

"""Measures over every pair of sites of two sketches, with chance and caveats beside the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from ...measures import Measure, settled
from ...results import Caveat, Side, Values
from ...stats import Alignment, DebiasedAlignment, Resketch, SketchPair
from .. import caveats, data_caveats
from ..chance import Chance, judged
from ..evaluate import constant_sites
from ..interval import FEWEST_GROUPS, around
from ..pairwise import by_pair
from ..standard_error import by_jackknife

Array = np.ndarray
SLACK = 30  # sums over buckets round more than those over rows
PRODUCT_ROUNDING = 1e-12  # a product of kernels is centred as a matrix, not by rows: rounding is not squared
LARGER = "take a larger size"
DRAWS = 5  # of chance that come unasked: they hardly differ from each other


def is_signed(pair: SketchPair) -> bool:
    """A product of sketches has lost its signs, and rows that were never sketched have none."""
    return pair.a[0].name != "hadamard_of_sketches" and not pair.exact


class Evaluation:
    """All values of one pair of sketches."""

    def __init__(
        self,
        pair: SketchPair,
        sides: tuple[Side, Side],
        kernel: str,
        draws: int,
        seed: int,
        shared: bool,
        losses: tuple[str, str] | None,  # that the gradients are of, where they are not the same
    ) -> None:
        self.pair, self.sides, self.kernel, self.losses = pair, sides, kernel, losses
        self.draws, self.seed, self.shared = draws, seed, shared

    def values(self, measures: Sequence[Measure]) -> dict[str, Values]:
        found = self._matrices(measures, self.pair)
        chance = self._chance(measures, {name: value for name, (value, _) in found.items()})
        return {m.name: self._of(m, *found[m.name], chance.get(m.name)) for m in measures}

    def _of(
        self, measure: Measure, value: Array, undefined: dict[tuple[int, int], str], chance: Chance | None
    ) -> Values:
        low, high = self._interval(measure, value)
        found = [
            *caveats.of_undefined(undefined, *self.sides),
            *self._do_not_vary(),
            *self._too_noisy(measure, value),
            *self._words(measure),
            *self._about_the_interval(low, value, chance),
            *caveats.of_draws(self.draws),
            *data_caveats.of_one_direction(measure, self.pair, *self.sides),
            *caveats.of_bounds(measure, value),
            *caveats.of_left_out(*self.sides),
        ]
        found += caveats.of_nan(value, found, *self.sides)
        return Values(
            value=value,
            n=self.pair.n,
            statistic=self.pair.describe(),
            closer=measure.closer,
            bounds=measure.bounds,
            same=measure.same,
            low=low,
            high=high,
            caveats=tuple(found),
            **({} if chance is None else (chance if self.draws else Chance(chance.null, chance.spread)).fields()),
        )

    def _matrices(
        self, measures: Sequence[Measure], pair: SketchPair
    ) -> dict[str, tuple[Array, dict[tuple[int, int], str]]]:
        """For each measure its values (A, B), and why some are missing; they share what a pair of sites takes."""
        shape = (len(pair.a), len(pair.b))
        varied = tuple(~constant for constant in self._constant)
        widths = tuple(tuple(side.widths) for side in self.sides)
        one_by_one = [m for m in measures if not issubclass(m.reads, Alignment)]
        by_pairs = by_pair(one_by_one, pair, widths, *varied)  # type: ignore[arg-type]
        found = {}
        for measure in measures:
            pairs = by_pairs.get(measure.name)
            value = measure(pair.alignment(measure.reads)) if pairs is None else pairs.matrix(shape)
            array = settled(value, measure, torch.float32).cpu().double().numpy()
            if measure.reads is DebiasedAlignment and not pair.exact:
                array[np.abs(array) > 1] = np.nan  # of a norm that came out far too small
            array[~varied[0], :] = array[:, ~varied[1]] = np.nan
            found[measure.name] = array, {} if pairs is None else pairs.undefined
        return found

    def _chance(self, measures: Sequence[Measure], values: dict[str, Array]) -> dict[str, Chance]:
        """Values with other buckets and signs for B: by formula where there is one; by draws where they are asked for.

        Without common rows a few draws come unasked.
        """
        paired = [m for m in measures if m.paired]
        formula = [] if self.draws else [m for m in paired if issubclass(m.reads, Alignment)]
        found = {m.name: self._by_formula(m) for m in formula}
        drawing = [] if self.shared and not self.draws else [m for m in paired if m.name not in found]
        drawn: dict[str, list[Array]] = {m.name: [] for m in drawing}
        for number in range(self.draws or DRAWS) if drawing else ():
            draw = Resketch.draw(self.pair.size, self.seed, number, signed=is_signed(self.pair))
            for name, (value, _) in self._matrices(drawing, self.pair.redrawn(draw)).items():
                drawn[name].append(value)
        return found | {m.name: judged(m, values[m.name], np.stack(drawn[m.name])) for m in drawing}

    def _by_formula(self, measure: Measure) -> Chance:
        view = self.pair.alignment(measure.reads)
        if measure.reads is DebiasedAlignment:
            return Chance(np.zeros(tuple(view.xy.shape)), None)
        mean, variance = self.pair.redrawn_moments(measure.reads, signed=is_signed(self.pair))
        # These measures are proportional to xy, so that its mean and spread give theirs.
        null = measure(replace(view, xy=mean)).numpy()
        return Chance(null, None if variance is None else measure(replace(view, xy=variance.sqrt())).numpy())

    def _interval(self, measure: Measure, value: Array) -> tuple[Array | None, Array | None]:
        """From each bucket left out in turn: what other inputs in other buckets would give.

        Not for kernels whose rows are no sums over a bucket's inputs. Without common rows chance says all there is.
        """
        sums = issubclass(measure.reads, Alignment) and self.kernel not in ("midpoint", "hadamard_of_sketches")
        if self.pair.exact or not self.shared or not sums or self.pair.size < FEWEST_GROUPS:
            return None, None
        with np.errstate(invalid="ignore"):
            return around(measure, value, by_jackknife(measure(self.pair.left_out(measure.reads)).numpy()))

    def _about_the_interval(self, low: Array | None, value: Array, chance: Chance | None) -> Iterator[Caveat]:
        if low is None:
            return
        for i, j in zip(*np.nonzero(np.isnan(low) & np.isfinite(value)), strict=True):
            text = f"no interval: with one of {self.pair.size} buckets left out the value is undefined; {LARGER}"
            yield Caveat(text, self.sides[0].sites[i], self.sides[1].sites[j])
        if self.pair.stack > 1 and self.pair.n < self.pair.stack * self.pair.size:
            yield Caveat(
                f"each input is in {self.pair.stack} buckets (stack), which the interval takes for other inputs: with "
                f"only {self.pair.n} inputs in {self.pair.size} buckets it is too narrow; take stack=1"
            )
        if self.pair.a[0].halves is not None:
            yield Caveat(
                "the interval is about other buckets, not about other columns of the sketch of f ⊗ g: where networks "
                "are alike it is too narrow"
            )
        if chance is not None and chance.spread is not None:
            yield from caveats.near_chance(value, chance.null, chance.spread, *self.sides)

    def _do_not_vary(self) -> Iterator[Caveat]:
        """Sites whose kernel is nil once it is centred: dead ones, those without gradients, and single rows."""
        for side, constant, where in zip(self.sides, self._constant, ("site_a", "site_b"), strict=True):
            for site in np.array(side.sites, dtype=object)[constant]:
                yield Caveat(f"rows of the {self.kernel} kernel do not vary: no similarity is defined", **{where: site})

    @cached_property
    def _constant(self) -> tuple[Array, Array]:
        nil = PRODUCT_ROUNDING if self.pair.exact and self.kernel.startswith("hadamard") else 0
        a, b = (
            constant_sites(share, side, SLACK) | ~(share.numpy() > nil)
            for share, side in zip(self.pair.spread, self.sides, strict=True)
        )
        return a, b

    def _too_noisy(self, measure: Measure, value: Array) -> Iterator[Caveat]:
        """A debiased norm may come out negative, and then it has no root, or so small that a cosine is above 1."""
        if measure.reads is DebiasedAlignment and not self.pair.exact:
            vary_a, vary_b = (~constant for constant in self._constant)
            for i, j in zip(*np.nonzero(np.isnan(value) & vary_a[:, None] & vary_b), strict=True):
                text = f"undefined: what sketching to {self.pair.size} adds outweighs the kernel; {LARGER}"
                yield Caveat(text, self.sides[0].sites[i], self.sides[1].sites[j])

    def _words(self, measure: Measure) -> Iterator[Caveat]:
        pair = self.pair
        if not self.shared and measure.paired:
            yield Caveat(
                f"the two sketches share no rows: the value is about spectra and the {pair.size} buckets, and chance "
                "gives about the same whatever the networks; read it beside chance, or take spectral_bures_distance"
            )
        if self.kernel == "hadamard_of_sketches" and not pair.exact:
            yield Caveat(
                "the product of two sketched kernels is not the sketch of their product: values come out too high; "
                "kernel='hadamard' sketches the product"
            )
        if self.losses is not None and self.kernel != "features":
            yield Caveat(f"the gradients are of different losses, {self.losses[0]} and {self.losses[1]}")
        if not pair.exact and self.shared and pair.n <= pair.size:
            yield Caveat(
                f"{pair.n} rows fit into {pair.size} buckets: size=None (--size all) keeps them, which is exact"
            )
        if not pair.exact and self.shared and measure.reads is not DebiasedAlignment and measure.paired:
            # Buckets make unlike rows look alike; the columns of a TensorSketch add to norms alone.
            way = "biased" if pair.a[0].halves is not None else f"biased {measure.closer}"
            yield Caveat(
                f"{pair.n} rows in {pair.size} buckets: {way}; debiased_cka corrects for it, the interval does not"
            )
        for side, kernels, where in zip(self.sides, (pair.a, pair.b), ("site_a", "site_b"), strict=True):
            for site, kernel in zip(side.sites, kernels, strict=True):
                if kernel.folded is not None:
                    yield Caveat(f"rows were projected to {kernel.folded} columns", **{where: site})

"""What chance gives: values under shuffled pairing, in closed form where it is known, by draws where it is asked."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..linalg import Invariants, permuted_moments
from ..measures import Measure
from ..progress import Progress
from ..results import LEVEL
from ..stats import Alignment, DebiasedAlignment, Grams, Moments, Sample, Shuffle, Statistic
from .pairwise import Widths, by_pair

Array = np.ndarray
TIE = 1e-9  # how near a shuffled value counts as equal
TIE_IN_FLOAT32 = 1e-5
FEWEST_DRAWS = round(1 / LEVEL) - 1  # below it p is above the level, whatever the value
LONG = 120.0  # seconds of drawing that are announced


@dataclass(frozen=True)
class Chance:
    """Mean and spread of shuffled values, and how often they come as close as the value itself."""

    null: Array
    spread: Array | None
    p: Array | None = None
    p_search: Array | None = None
    rows: int | None = None  # rows the draws rest on, where they are fewer than those of the value

    def fields(self) -> dict[str, Any]:
        """As `Values` has them."""
        return {"null": self.null, "null_spread": self.spread, "p": self.p, "p_search": self.p_search}


def by_formula(measure: Measure, statistic: Statistic) -> Chance | None:
    """Exact mean and spread: over all shuffles for the cosines of Gram matrices; of Gaussian rows from the ranks."""
    if statistic.n < 4:
        return None
    if measure.by_chance is not None and not isinstance(statistic, Grams):
        ranks_a, ranks_b = ([int(scatter.rank) for scatter in side] for side in statistic.scatters)
        found = np.array([[measure.by_chance(statistic.n, r, s) for s in ranks_b] for r in ranks_a])
        return Chance(found[..., 0], found[..., 1])
    if measure.reads is DebiasedAlignment:
        view = statistic.alignment(DebiasedAlignment)
        mean = torch.zeros_like(view.xy)
        if isinstance(statistic, Grams):
            spread = statistic.variance.sqrt() * (statistic.n * (statistic.n - 3) / statistic.pairs.sum())
        else:
            spread = (view.xx * view.yy * 2 / (statistic.n * (statistic.n - 3))).sqrt()
    elif measure.reads is Alignment and not isinstance(statistic, Grams):
        view = statistic.alignment(Alignment)
        x, y = _invariants(statistic, view)
        mean, variance = permuted_moments(x, y, statistic.n)
        spread = variance.sqrt()
    else:
        return None
    # These measures are proportional to xy, so that its mean and spread give theirs.
    return Chance(_array(measure(replace(view, xy=mean))), _array(measure(replace(view, xy=spread))))


def _invariants(statistic: Moments | Sample, biased: Alignment) -> tuple[Invariants, Invariants]:
    """Of each site's centred Gram matrix; Σ Kᵢᵢ² is what tells the biased from the debiased norm."""
    n, unbiased = statistic.n, statistic.alignment(DebiasedAlignment)
    trace_x, trace_y = statistic.traces[0][:, None], statistic.traces[1][None, :]

    def diagonal(gap: Tensor, trace: Tensor) -> Tensor:
        return (gap + trace.square() / ((n - 1) * (n - 2))) * (n - 2) / n

    return (
        Invariants(trace_x, biased.xx, diagonal(biased.xx - unbiased.xx, trace_x)),
        Invariants(trace_y, biased.yy, diagonal(biased.yy - unbiased.yy, trace_y)),
    )


def by_draws(
    measures: Sequence[Measure],
    statistic: Statistic,
    sample: Sample | None,
    widths: Widths,
    defined: tuple[Array, Array],
    *,
    draws: int,
    seed: int,
) -> dict[str, Chance]:
    """For each measure that pairing matters to: from shuffles within blocks, or of sampled rows."""
    measures = [m for m in measures if m.paired]
    found: dict[str, Chance] = {}
    if isinstance(statistic, Grams):
        for measure in measures:
            value = _array(measure(statistic.alignment(measure.reads)))
            drawn = _array(measure(statistic.alignment(measure.reads, shuffled=True)))
            found[measure.name] = judged(measure, value, drawn, TIE_IN_FLOAT32)
        return found
    rows = sample if sample is not None else statistic if isinstance(statistic, Sample) else None
    if rows is None:
        return {}
    fewer = rows.n if rows.n < statistic.n else None
    for name, (value, drawn) in _drawn(measures, rows, widths, defined, draws, seed).items():
        measure = next(m for m in measures if m.name == name)
        found[name] = replace(judged(measure, value, drawn), rows=fewer)
    return found


def _drawn(
    measures: Sequence[Measure], rows: Sample, widths: Widths, defined: tuple[Array, Array], draws: int, seed: int
) -> dict[str, tuple[Array, Array]]:
    """For each measure its value on these rows (A, B), and the draws (D, A, B)."""
    shape = (len(rows.xs), len(rows.ys))
    shuffles = [Shuffle.draw(rows.n, seed, number, rows.xs[0].device) for number in range(draws)]
    found: dict[str, tuple[Array, Array]] = {}
    for measure in measures:
        if issubclass(measure.reads, Alignment):
            value = _array(measure(rows.alignment(measure.reads)))
            found[measure.name] = value, _array(measure(rows.shuffled_alignment(measure.reads, shuffles)))
    others = [m for m in measures if m.name not in found]
    if not others:
        return found
    start = time.monotonic()
    as_they_are = by_pair(others, rows, widths, *defined)
    _foretell((time.monotonic() - start) * draws, draws, [m.name for m in others])
    drawn: dict[str, list[Array]] = {m.name: [] for m in others}
    with Progress(f"chance for {', '.join(drawn)}", draws, "draws") as bar:
        for shuffle in shuffles:
            values = by_pair(others, rows.shuffled(shuffle), widths, *defined)
            for name, each in values.items():
                drawn[name].append(_array(each.matrix(shape)))
            bar.advance()
    for measure in others:
        found[measure.name] = _array(as_they_are[measure.name].matrix(shape)), np.stack(drawn[measure.name])
    return found


def _foretell(seconds: float, draws: int, names: Sequence[str]) -> None:
    """Say so before a long wait; the first time takes longer than each draw, so this is a bound."""
    if seconds > LONG:
        warnings.warn(
            f"{draws} draws of {', '.join(names)} may take up to {seconds / 60:.0f} minutes: fewer draws or sites, or "
            "rows='mean', take less",
            stacklevel=2,
        )


def judged(measure: Measure, value: Array, drawn: Array, tie: float = TIE) -> Chance:
    """Mean, spread, and p-values; the observed value counts as one of the draws, so that p is never 0.

    Fewer than `FEWEST_DRAWS` give no p-values: every value would seem to be what chance gives.

    A draw that is nearer to the value than `tie` is as close: the difference may be rounding.

    For the search over all pairs each pair is put on its own scale, and the closest of all pairs is what a value
    has to beat (Westfall and Young's max statistic).
    """
    mean, spread_of_draws = drawn.mean(0), drawn.std(0, ddof=1) if len(drawn) > 1 else None
    if len(drawn) < FEWEST_DRAWS:
        return Chance(mean, spread_of_draws)
    sign = 1.0 if measure.closer == "up" else -1.0
    everything = sign * np.concatenate([value[None], drawn])
    own = everything[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        slack = tie * np.maximum(1, np.abs(own))
        p = (everything >= own - slack).mean(0)
        spread = everything.std(0)
        standard = np.where(spread > slack, (everything - everything.mean(0)) / spread, 0.0)  # 0: all are alike
        closest = np.nanmax(np.where(np.isfinite(standard), standard, -np.inf), axis=(1, 2))
        p_search = (closest[:, None, None] >= standard[0] - 1e-6).mean(0)
        p_search = np.maximum(p_search, p)
    unknown = ~np.isfinite(value) | ~np.isfinite(drawn).all(0)
    for array in (p, p_search):
        array[unknown] = np.nan
    return Chance(mean, spread_of_draws, p, p_search)


def _array(value: Tensor) -> Array:
    return value.detach().cpu().double().numpy()

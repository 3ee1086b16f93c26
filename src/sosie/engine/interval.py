"""How far a value may be off because the rows are a sample: a 95 % interval with Student's t.

Cosines of Gram matrices come with each group of rows left out at little cost: a delete-one-group jackknife. What is
evaluated pair by pair is evaluated on halves and quarters of the rows.

A bootstrap would draw rows twice, and a row beside itself is as alike as can be: it pushes CKA up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..measures import Measure
from ..progress import Progress
from ..stats import SMALLEST_GROUP, Alignment, Grams, Sample, Statistic
from .pairwise import Widths, by_pair
from .standard_error import HALVED, Error, by_halves, by_jackknife, halves_of_groups, quarters_of_groups, student

FEWEST_GROUPS = 8  # groups of rows below which a jackknife interval says too little
CONFIDENCE = 0.95
CHEAP = 10**11  # multiply-adds that intervals are worth unless they are asked for

Array = np.ndarray


def by_blocks(measure: Measure, statistic: Grams, value: Array) -> tuple[Array | None, Array | None]:
    """From the sums over blocks, which are at hand."""
    groups = statistic.groups
    if int(groups.sum()) < FEWEST_GROUPS:
        return None, None
    left = measure(statistic.alignment(measure.reads, jackknife=True))[groups].cpu().numpy()
    return around(measure, value, by_jackknife(left))


def from_all_rows(measure: Measure, statistic: Statistic) -> Array | None:
    """How far the value from all rows may be from that of blocks (95 %); None where the value is from all rows.

    What single rows do counts in blocks as it does among all rows; what pairs of rows do together is averaged over
    pairs within blocks alone. Its variance falls with the rows of a block, so cutting blocks of b rows in two changes
    the value by as much as putting them together would, but for 1 − b/n: the changes of single groups give its size.
    """
    if not isinstance(statistic, Grams) or statistic.exact or (halves := statistic.halves) is None:
        return None
    groups, kind = statistic.groups, measure.reads
    count = int(groups.sum())
    changes, left = (
        measure(statistic.alignment(kind, jackknife=without)) - measure(halves.alignment(kind, jackknife=without))
        for without in (False, True)
    )
    single = count * changes - (count - 1) * left[groups]  # pseudo-values, which are 0 on average
    size = (single.square().sum(0) * (1 - 1 / statistic.blocks)).sqrt() / count
    return _array(size) * student(count, CONFIDENCE)


def by_rows(
    measures: Sequence[Measure],
    statistic: Statistic,
    sample: Sample,
    widths: Widths,
    values: dict[str, Array],
    *,
    every: bool,
) -> dict[str, tuple[Array | None, Array | None]]:
    """From the rows themselves; for cosines of Gram matrices, or for every measure."""
    cheap = work(sample) <= CHEAP
    wanted = [m for m in measures if every or (cheap and issubclass(m.reads, Alignment))]
    # A measure that draws rows of its own would draw others for every group.
    wanted = [m for m in wanted if not m.defaults.get("rows", sample.n) < sample.n]
    count = sample.grams.groups
    if not wanted or count < FEWEST_GROUPS:
        return {}
    of_grams = [m for m in wanted if issubclass(m.reads, Alignment)]
    errors = {m.name: by_jackknife(_array(m(sample.grams.left_out(m.reads)))) for m in of_grams}
    finite = np.any([np.isfinite(values[m.name]) for m in wanted], axis=0)
    defined = [finite.any(axis) for axis in (1, 0)]
    errors |= _pair_by_pair([m for m in wanted if m.name not in errors], sample, widths, defined, count)
    # The sample may hold fewer rows than the value rests on: an error shrinks with the root of the rows.
    shrink = (sample.n / statistic.n) ** 0.5
    return {m.name: around(m, values[m.name], errors[m.name], shrink) for m in wanted}


def _pair_by_pair(
    measures: Sequence[Measure], sample: Sample, widths: Widths, defined: Sequence[Array], count: int
) -> dict[str, Error]:
    """From halves and quarters of the rows; by the jackknife where these are too few rows, which is rather too wide."""

    def evaluated(kept: Array, some: Sequence[Measure]) -> dict[str, Array]:
        """For each measure its values (…, A, B) on the rows of the groups that are kept (…, groups)."""
        found = _on_parts(some, sample, widths, defined, kept.reshape(-1, kept.shape[-1]))
        return {name: values.reshape(*kept.shape[:-1], *values.shape[1:]) for name, values in found.items()}

    if not measures:
        return {}
    errors: dict[str, tuple[Error, Array]] = {}
    if sample.n >= HALVED * SMALLEST_GROUP:
        halves, quarters = (evaluated(kept, measures) for kept in (halves_of_groups(), quarters_of_groups()))
        errors = {m.name: by_halves(halves[m.name], quarters[m.name]) for m in measures}
    doubtful = [m for m in measures if m.name not in errors or not errors[m.name][1].all()]
    left = evaluated(~np.eye(count, dtype=bool), doubtful) if doubtful else {}
    jackknifed = {name: by_jackknife(values) for name, values in left.items()}
    sure = {name: error.where(holds, jackknifed.get(name, error)) for name, (error, holds) in errors.items()}
    return jackknifed | sure


def _on_parts(
    measures: Sequence[Measure], sample: Sample, widths: Widths, defined: Sequence[Array], kept: Array
) -> dict[str, Array]:
    """For each measure its values (parts, A, B) on parts of the rows: groups that are kept (parts, groups)."""
    parts: dict[str, list[Array]] = {m.name: [] for m in measures}
    group = np.arange(sample.n) % kept.shape[1]
    with Progress(f"intervals for {', '.join(parts)}", len(kept), "parts of the rows") as bar:
        for groups in kept:
            part = sample.without(torch.from_numpy(np.flatnonzero(~groups[group])))
            for name, found in by_pair(measures, part, widths, defined[0], defined[1]).items():
                parts[name].append(_array(found.matrix((len(part.xs), len(part.ys)))))
            bar.advance()
    return {name: np.stack(found) for name, found in parts.items()}


def work(sample: Sample) -> int:
    """Multiply-adds that intervals of cosines of Gram matrices take."""
    p, q = (sum(widths) for widths in sample.widths)
    return sample.n * min(p * q, sample.n * (p + q))


def _array(value: Tensor) -> Array:
    return value.detach().cpu().double().numpy()


def around(measure: Measure, value: Array, error: Error, shrink: float = 1.0) -> tuple[Array, Array]:
    """The interval about a value, from its standard error."""
    below, above = error.reach(CONFIDENCE)
    low, high = value - below * shrink, value + above * shrink
    bottom, top = measure.bounds
    # An interval may end at a bound of the measure, since no value lies beyond; the value itself is not touched.
    return (
        low if bottom is None else np.maximum(low, bottom),
        high if top is None else np.minimum(high, top),
    )

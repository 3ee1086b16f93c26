"""How far a value may be off because the rows are a sample: a delete-one-group jackknife with Student's t.

A bootstrap would draw rows twice, and a row beside itself is as alike as can be: it pushes CKA up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..measures import Measure
from ..progress import Progress
from ..stats import Alignment, Grams, Sample, Statistic
from .pairwise import Widths, by_pair

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
    return around(measure, value, left)


def by_rows(
    measures: Sequence[Measure],
    statistic: Statistic,
    sample: Sample,
    widths: Widths,
    values: dict[str, Array],
    *,
    every: bool,
) -> dict[str, tuple[Array | None, Array | None]]:
    """From the rows themselves, each group left out in turn; for cosines of Gram matrices, or for every measure."""
    cheap = work(sample) <= CHEAP
    wanted = [m for m in measures if every or (cheap and issubclass(m.reads, Alignment))]
    # A measure that draws rows of its own would draw others for every group.
    wanted = [m for m in wanted if not m.defaults.get("rows", sample.n) < sample.n]
    count = sample.grams.groups
    if not wanted or count < FEWEST_GROUPS:
        return {}
    of_grams = [m for m in wanted if issubclass(m.reads, Alignment)]
    left = {m.name: _array(m(sample.grams.left_out(m.reads))) for m in of_grams}
    finite = np.any([np.isfinite(values[m.name]) for m in wanted], axis=0)
    defined = [finite.any(axis) for axis in (1, 0)]
    left |= _pair_by_pair([m for m in wanted if m.name not in left], sample, widths, defined, count)
    # The sample may hold fewer rows than the value rests on: an error shrinks with the root of the rows.
    shrink = (sample.n / statistic.n) ** 0.5
    return {m.name: around(m, values[m.name], left[m.name], shrink) for m in wanted}


def _pair_by_pair(
    measures: Sequence[Measure], sample: Sample, widths: Widths, defined: Sequence[Array], count: int
) -> dict[str, Array]:
    """For each measure its values with each group left out (groups, A, B)."""
    if not measures:
        return {}
    left: dict[str, list[Array]] = {m.name: [] for m in measures}
    with Progress(f"intervals for {', '.join(left)}", count, "groups of rows") as bar:
        for group in range(count):
            part = sample.without(torch.arange(group, sample.n, count))
            for name, found in by_pair(measures, part, widths, defined[0], defined[1]).items():
                left[name].append(_array(found.matrix((len(part.xs), len(part.ys)))))
            bar.advance()
    return {name: np.stack(found) for name, found in left.items()}


def work(sample: Sample) -> int:
    """Multiply-adds that intervals of cosines of Gram matrices take."""
    p, q = (sum(widths) for widths in sample.widths)
    return sample.n * min(p * q, sample.n * (p + q))


def _array(value: Tensor) -> Array:
    return value.detach().cpu().double().numpy()


def around(measure: Measure, value: Array, left: Array, shrink: float = 1.0) -> tuple[Array, Array]:
    """The interval about a value, from the values with each group left out (groups, A, B)."""
    from scipy.special import stdtrit

    count = len(left)
    error = np.sqrt((count - 1) / count * np.square(left - left.mean(0)).sum(0))
    reach = stdtrit(count - 1, (1 + CONFIDENCE) / 2) * error * shrink
    low, high = value - reach, value + reach
    bottom, top = measure.bounds
    # An interval may end at a bound of the measure, since no value lies beyond; the value itself is not touched.
    return (
        low if bottom is None else np.maximum(low, bottom),
        high if top is None else np.minimum(high, top),
    )

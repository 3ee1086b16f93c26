"""How far a value may be off because the rows are a sample: a delete-one-group jackknife with Student's t.

A bootstrap would draw rows twice, and a row beside itself is as alike as can be: it pushes CKA up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..measures import Measure
from ..progress import Progress
from ..stats import Alignment, Grams, Sample, Statistic
from .pairwise import Widths, by_pair

FEWEST_GROUPS = 8  # groups of rows below which a jackknife interval says too little
SMALLEST_GROUP = 4  # rows
GROUPS = 20  # that sampled rows are dealt out to
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
    count = min(GROUPS, sample.n // SMALLEST_GROUP)
    if not wanted or count < FEWEST_GROUPS:
        return {}
    left: dict[str, list[Array]] = {m.name: [] for m in wanted}
    finite = np.any([np.isfinite(values[m.name]) for m in wanted], axis=0)
    defined = [finite.any(axis) for axis in (1, 0)]
    with Progress(f"intervals for {', '.join(left)}", count, "groups of rows") as bar:
        for group in range(count):
            part = sample.without(torch.arange(group, sample.n, count))
            pairwise = [m for m in wanted if not issubclass(m.reads, Alignment)]
            found = by_pair(pairwise, part, widths, *defined)
            for measure in wanted:
                if measure.name in found:
                    value = found[measure.name].matrix((len(part.xs), len(part.ys)))
                else:
                    value = measure(part.alignment(measure.reads))
                left[measure.name].append(value.detach().cpu().double().numpy())
            bar.advance()
    # The sample may hold fewer rows than the value rests on: an error shrinks with the root of the rows.
    shrink = (sample.n / statistic.n) ** 0.5
    return {m.name: around(m, values[m.name], np.stack(left[m.name]), shrink) for m in wanted}


def work(sample: Sample) -> int:
    """Multiply-adds that intervals of cosines of Gram matrices take."""
    p, q = (sum(widths) for widths in sample.widths)
    return GROUPS * sample.n * min(p * q, sample.n * (p + q))


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

"""Whether rows come in an order that makes values from blocks of rows wrong.

Rows of different blocks are never compared. If near-duplicates lie together (views of an input one after the other)
or never share a block (classes that take turns), blocks see too many or too few of them, and every block is wrong
alike: the blocks themselves cannot tell. A sample of rows over the whole data can. At a few sites of each network it is
kept during the pass, and debiased CKA of these sites from the sample is compared with that from the blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..linalg import u_centred
from ..measures import as_array, debiased_cka
from ..results import Side
from ..stats import DebiasedAlignment, Fold, Grams, RowSampler, Sample, on_device
from .uncertainty import FEWEST_GROUPS, Error, block_deviation, by_jackknife, student

ROWS = 384  # of the whole data, that are kept
COLUMNS = 384  # of each of two projections of wider rows
AT_ONCE = 64  # rows that are projected at a time,
NUMBERS = 2**23  # or so many numbers of a site
SITES = 2  # of each network, spread over its depth, the last one included
FALSE_ALARMS = 1e-4  # how often shuffled rows may look ordered
LEAST = 0.02  # difference, as a share of the value, that is worth a caveat


class OrderTest:
    """Keeps a seeded sample of rows at a few sites of one network, during the pass.

    Wide rows are projected twice: inner products of two Gram matrices with independent errors have no bias. A sample
    holds the first projections as the rows of A and the second ones as those of B; rows that are not projected have
    none of the second.
    """

    def __init__(self, sampler: RowSampler, side: Side) -> None:
        self.sites = [side.sites[k] for k in tested_sites(side)]
        self._sampler, self._folds = sampler, [_projections(side.widths[k], sampler.seed) for k in tested_sites(side)]
        self._places: dict[torch.device, tuple[int, int, Tensor]] = {}  # of the sampled rows in a chunk
        self._rows: dict[str, list[Tensor]] = {site: [] for site in self.sites}  # not yet projected
        self._index: list[np.ndarray] = []  # of these rows among all
        self._parts: list[Sample] = []
        self._complete = True

    def keep(self, site: str, rows: Tensor, start: int) -> None:
        """Keep the sampled rows of one site and chunk. Without any, nothing is launched on a GPU."""
        drawn = self._sampler.draw(start, len(rows))
        if len(drawn):
            places = self._places.get(rows.device)
            if places is None or places[:2] != (start, len(rows)):
                index = torch.from_numpy(drawn - start).to(rows.device, non_blocking=True)  # a GPU is not waited for
                places = self._places[rows.device] = start, len(rows), index
            self._rows[site].append(rows[places[2]])

    def end_chunk(self, start: int, count: int, device: torch.device) -> None:
        """Project what was kept once there is enough of it: for a few rows at a time that takes long."""
        if len(drawn := self._sampler.draw(start, count)):
            self._index.append(drawn)
            for kept in self._rows.values():
                kept[-1] = kept[-1].to(device)
            waiting = sum(map(len, self._index))
            if waiting >= AT_ONCE or waiting * max(kept[-1].shape[1] for kept in self._rows.values()) >= NUMBERS:
                self._project()

    def _project(self) -> None:
        """Make what was kept a part of the sample."""
        if not self._index:
            return
        sides = []
        for kept, folds in zip(self._rows.values(), self._folds, strict=True):
            rows = torch.cat(kept)
            rows = rows if rows.dtype == torch.float64 else rows.float()
            sides.append((folds[0](rows), folds[1](rows)) if folds else (rows, rows[:, :0]))
            kept.clear()
        index, (xs, ys) = np.concatenate(self._index), zip(*sides, strict=True)
        self._parts.append(Sample(xs, ys, index, len(index), ROWS, self._sampler.seed))
        self._index = []

    def add(self, sample: Sample | None) -> None:
        """Add the sample of other rows; None: there is none, and so no sample over the whole data."""
        if sample is None:
            self._complete = False
        else:
            self._parts.insert(0, sample)

    def sample(self) -> Sample | None:
        """The sample so far."""
        self._project()
        if len(self._parts) > 1:
            first, *rest = self._parts
            self._parts = [on_device(first, rest[0].xs[0].device).merge(*rest)]
        return self._parts[0] if self._parts and self._complete else None


def tested_sites(side: Side) -> list[int]:
    """Which sites of a network are looked at."""
    count = len(side.sites)
    return sorted({-(-(k + 1) * count // SITES) - 1 for k in range(SITES)})


def _projections(width: int, seed: int) -> list[Fold]:
    return [Fold(width, COLUMNS, 2 * seed + k) for k in (1, 2)] if width > 2 * COLUMNS else []


# What the samples say about the blocks


def largest_gap(
    statistic: Grams, samples: tuple[Sample | None, Sample | None], side_a: Side, side_b: Side
) -> str | None:
    """Words on the pair of sites where debiased CKA from blocks and from the sample over all rows differ most.

    None if they differ nowhere by more than chance, or if there are too few rows.

    With 8 blocks or more. The difference has three sources if rows are shuffled: single rows that the sample lacks
    (the larger error of both, since either may have missed rare rows), pairs of rows that blocks lack (as in
    `block_error`), and projections.
    """
    of_a, of_b = samples
    if of_a is None or of_b is None or not np.array_equal(of_a.index, of_b.index):
        return None
    if int(statistic.groups.sum()) < FEWEST_GROUPS or statistic.halves is None:
        return None
    sites_a, sites_b = tested_sites(side_a), tested_sites(side_b)
    a, b = _grams(of_a), _grams(of_b)
    last = max(len(a), len(b))
    pairs = [(min(k, len(a) - 1), min(k, len(b) - 1)) for k in range(last)]
    values = as_array(debiased_cka(statistic.alignment(DebiasedAlignment)))
    left = as_array(debiased_cka(statistic.alignment(DebiasedAlignment, jackknife=True))[statistic.groups])
    deviation = as_array(block_deviation(debiased_cka, statistic))
    m, n, gaps = of_a.n, statistic.n, []
    for i, j in pairs:
        here = (slice(None), sites_a[i], sites_b[j])
        found, own, folded = _from_sample(a[i], b[j])
        of_blocks = by_jackknife(left[here])
        rare = max(own.size**2, of_blocks.size**2 * n / m) * max(0.0, 1 - m / n)
        error = float(np.sqrt(rare + folded + deviation[here[1:]] ** 2))
        reach = student(own.freedom + of_blocks.freedom, 1 - FALSE_ALARMS / len(pairs)) * error
        allowed = max(float(reach), LEAST * abs(found))
        value = float(values[here[1:]])
        text = (
            f"debiased_cka of {side_a.sites[sites_a[i]]} and {side_b.sites[sites_b[j]]} is {value:.2f} from blocks of "
            f"{statistic.block} rows, but {found:.2f} ± {float(np.sqrt(own.size**2 + folded)):.2f} from {m} rows of "
            "the whole data"
        )
        gaps.append((abs(value - found) / allowed, text))
    return max((gap for gap in gaps if gap[0] > 1), key=lambda gap: gap[0], default=(1.0, None))[1]


SiteGrams = tuple[Tensor, Tensor, float]


def _grams(sample: Sample) -> list[SiteGrams]:
    """U-centred Gram matrices (m, m) of each site, from two projections, or twice the same without any.

    With projections also ‖K‖² over the squared trace, one over the number of directions; 0 without.
    """
    made = []
    for x, y in zip(sample.xs, sample.ys, strict=True):
        size = x.abs().amax()  # of both projections: if each had its own, products across sites would differ by it
        first, trace = _gram(x, size)
        second = _gram(y, size)[0] if y.shape[1] else first
        made.append((first, second, float((first * second).sum() / trace**2) if y.shape[1] else 0.0))
    return made


def _gram(rows: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows / torch.where(size > 0, size, 1)  # fourth powers would overflow float32; a layer may be all zeros
    rows = rows - rows.mean(0, keepdim=True, dtype=torch.float64).to(rows.dtype)
    gram = (rows @ rows.T).double()
    return u_centred(gram), gram.diagonal().sum()


def _from_sample(a: SiteGrams, b: SiteGrams) -> tuple[float, Error, float]:
    """Debiased CKA, its error from what each row does to it, and the variance that projections add."""
    (first_a, second_a, share_a), (first_b, second_b, share_b) = a, b
    xy = ((first_a * second_b).sum(1) + (second_a * first_b).sum(1)) / 2
    xx, yy = (first_a * second_a).sum(1), (first_b * second_b).sum(1)
    total_xx, total_yy, total_xy = (float(part.sum()) for part in (xx, yy, xy))
    if not (total_xx > 0 and total_yy > 0):
        return np.nan, Error(*(np.array(np.nan) for _ in range(3))), 0.0
    value = total_xy / (total_xx * total_yy) ** 0.5
    effects = as_array(2 * xy / (total_xx * total_yy) ** 0.5 - value * (xx / total_xx + yy / total_yy))
    rows = len(effects)
    error = Error.of((rows - 1) / rows * np.square(effects).sum(), rows - 1, effects)
    return value, error, value**2 / COLUMNS * (share_a + share_b)

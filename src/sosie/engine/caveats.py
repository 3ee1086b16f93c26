"""The caveats of values. Each function is one rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..checks import listed
from ..linalg import row_squares, self_product
from ..measures import Measure
from ..results import LEVEL, Caveat, Chance, Estimate, Side
from ..stats import SMALLEST_GROUP, Alignment, Covariances, Grams, PairViews, RowScatter, Sample, Scatter, Statistic
from .order import largest_gap
from .uncertainty import FEWEST_DRAWS, FEWEST_GROUPS, HALVED, TIE

DRIFT = 0.05  # share of the variance between blocks above which there is a caveat
OF_POSITIONS = Caveat(
    "rows are positions of the same inputs and so are correlated: no interval and no chance level; rows='mean' has both"
)
OF_GROUPS = Caveat("inputs come in groups, whose rows may be correlated: no interval and no chance level")
NEAR_CHANCE = 3.0  # spreads of shuffled values within which an interval is unreliable
BIASED = 0.1  # nats of bias in information from which there is a caveat
WIDE_CHANCE = 0.1  # spread of shuffled values above which hardly any value is distinguishable from chance
ROUNDING = 3e-7  # share of the largest direction that rounding of float64 products can leave
ROUNDING_IN_FLOAT32 = 1e-6  # the same for float32 activations
SHOWN = 3  # sites left out that are named
FALSE_ALARMS = 1e-4  # how often a column of rows in no order may look ordered


def at_sites(
    texts: Iterable[Iterable[str | None]], side_a: Side, side_b: Side, *, undefined: bool = False
) -> Iterator[Caveat]:
    """A caveat for each site that has a text, first those of A's sites, then those of B's."""
    of_a, of_b = texts
    yield from (Caveat(text, site, None, undefined) for site, text in zip(side_a.sites, of_a, strict=True) if text)
    yield from (Caveat(text, None, site, undefined) for site, text in zip(side_b.sites, of_b, strict=True) if text)


def of_constants(
    statistic: Statistic, side_a: Side, side_b: Side, constant_a: np.ndarray, constant_b: np.ndarray
) -> Iterator[Caveat]:
    where = f" within blocks of {statistic.block} rows" if isinstance(statistic, Grams) and not statistic.exact else ""
    text = f"features do not vary{where}: no similarity is defined"
    texts = [[text if is_constant else None for is_constant in side] for side in (constant_a, constant_b)]
    yield from at_sites(texts, side_a, side_b, undefined=True)


def of_left_out(*sides: Side) -> Iterator[Caveat]:
    """Sites that a pattern, a type or the default selected but that gave no rows."""
    for side in sides:
        if side.left_out:
            sites = listed((f"{site} {why}" for site, why in side.left_out), SHOWN, "; ")
            yield Caveat(f"left out of {side.name}: {sites}")


def of_undefined(undefined: dict[tuple[int, int], str], side_a: Side, side_b: Side) -> Iterator[Caveat]:
    for (i, j), reason in undefined.items():
        yield Caveat(f"undefined: {reason}", side_a.sites[i], side_b.sites[j], undefined=True)


def of_widths(measure: Measure, statistic: Statistic, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    """Too few rows for the width, and what that does to this measure."""
    if measure.few_rows == "biased":
        if measure.defaults.get("unbiased"):
            return
        # Few paired rows look alike; distances of covariances or spectra may be biased either way.
        n, way = statistic.n, f"biased {measure.closer}" if measure.paired else "biased"
        texts = [
            [f"n={n} < width={width}: {way}" if n < width else None for width in side.widths]
            for side in (side_a, side_b)
        ]
        yield from at_sites(texts, side_a, side_b)
    elif measure.few_rows == "infinite":
        yield from _of_information(measure, statistic, side_a, side_b)
    elif measure.few_rows is not None:
        yield from _of_ranks(measure, statistic, side_a, side_b)


def _of_ranks(measure: Measure, statistic: Statistic, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    """Values that any rows would give: large enough subspaces of n − 1 dimensions intersect."""
    assert not isinstance(statistic, Grams)
    n, free = statistic.n, statistic.n - 1
    ranks_a, ranks_b = (_ranks(measure, scatters) for scatters in statistic.scatters)
    of_x = measure.few_rows == "saturates in x"
    fits = "the regression fits anything" if of_x else "all correlations are 1"
    texts = [
        [f"{rank} dimensions for n={n} rows: {fits}" if rank >= free else None for rank in ranks]
        for ranks in (ranks_a, [0] * len(ranks_b) if of_x else ranks_b)
    ]
    yield from at_sites(texts, side_a, side_b)
    if of_x:
        return
    for site_a, r in zip(side_a.sites, ranks_a, strict=True):
        for site_b, s in zip(side_b.sites, ranks_b, strict=True):
            if r + s > free > max(r, s):
                text = f"{r} and {s} dimensions for n={n} rows: {r + s - free} of {min(r, s)} correlations"
                yield Caveat(f"{text} are 1 whatever the rows", site_a, site_b)


def _of_information(measure: Measure, statistic: Statistic, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    """The information that unrelated rows have on average, unless it is small."""
    assert not isinstance(statistic, Grams)
    assert measure.by_chance is not None
    ranks_a, ranks_b = (_ranks(measure, scatters) for scatters in statistic.scatters)
    for site_a, r in zip(side_a.sites, ranks_a, strict=True):
        for site_b, s in zip(side_b.sites, ranks_b, strict=True):
            mean, _ = measure.by_chance(statistic.n, r, s)
            if mean >= BIASED:
                text = f"{r} and {s} dimensions for n={statistic.n} rows: biased up by {mean:.2g} (its chance level)"
                yield Caveat(text, site_a, site_b)


def of_lost_directions(measure: Measure, statistic: Statistic, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    """Directions of the data that are lost to rounding when covariances are inverted."""
    inverts = measure.few_rows not in (None, "biased") and measure.defaults.get("keep", 1) == 1
    if not (inverts or measure.defaults.get("alpha", 1) < 1):
        return
    assert not isinstance(statistic, Grams)
    lost: list[list[str | None]] = [[], []]
    sampled: list[list[str | None]] = [[], []]
    for k, (side, scatters) in enumerate(zip((side_a, side_b), statistic.scatters, strict=True)):
        counts = k == 0 or measure.few_rows != "saturates in x"  # a regression inverts the covariance of x alone
        for dtype, scatter in zip(side.dtypes or [""] * len(scatters), scatters, strict=True):
            by_rows = isinstance(scatter, RowScatter) and scatter.direct
            lost[k].append(_lost(scatter, dtype, by_rows) if counts else None)
            sampled[k].append(_sampled(scatter, statistic.n) if counts and by_rows else None)
    yield from at_sites(lost, side_a, side_b)
    yield from at_sites(sampled, side_a, side_b)


def _lost(scatter: Scatter, dtype: str, by_rows: bool) -> str | None:
    loss = scatter.loss(ROUNDING if dtype == "float64" else ROUNDING_IN_FLOAT32)
    why = "the digits of the rows do not carry them" if by_rows else "sums of products do not carry them"
    text = f"{loss.count} of {loss.of} directions dropped at condition {loss.condition:.0e}: {why}"
    return text if loss.count else None


def _sampled(scatter: Scatter, n: int) -> str | None:
    if not (isinstance(scatter, RowScatter) and scatter.sampled):
        return None
    text = f"rests on a sample of {len(scatter.raw)} of {n} rows: sums of products do not carry all directions"
    return f"{text} at condition {scatter.span.condition:.0e}"


def _ranks(measure: Measure, scatters: Sequence[Scatter]) -> list[int]:
    keep, count = measure.defaults.get("keep"), measure.defaults.get("directions")
    if count is not None:
        return [count] * len(scatters)
    return [int(s.rank) if keep is None else s.leading_count(keep) for s in scatters]


def of_order(
    statistic: Statistic, samples: tuple[Sample | None, Sample | None], side_a: Side, side_b: Side
) -> Iterator[Caveat]:
    """Rows that are more alike within blocks than across blocks, or less: sorted by class, views side by side."""
    if not isinstance(statistic, Grams) or statistic.blocks < 2:
        return
    from scipy.special import fdtri

    size, sites = statistic.n / statistic.blocks, [*side_a.sites, *side_b.sites]
    ratio = torch.cat(statistic.drift).cpu().numpy()
    worst = int(ratio.argmax())
    by_chance = fdtri(statistic.blocks - 1, statistic.n - statistic.blocks, 1 - FALSE_ALARMS)
    share = (ratio[worst] - 1) / (ratio[worst] - 1 + size) if np.isfinite(ratio[worst]) else 1.0
    if ratio[worst] > by_chance and share > DRIFT:
        yield Caveat(
            f"the rows come in an order: {share:.0%} of the variance at {sites[worst]} lies between blocks of "
            f"{statistic.block} rows, which blocks do not see; shuffle the data, or take exact=True"
        )
    elif (gap := largest_gap(statistic, samples, side_a, side_b)) is not None:
        yield Caveat(
            f"the rows come in an order: {gap} (near-duplicates, or rows of a class, lie together or apart); shuffle "
            "the data, or take exact=True"
        )


def of_statistic(statistic: Statistic, block_error: np.ndarray | None) -> Iterator[Caveat]:
    """Rows or pairs of rows that the statistic leaves out."""
    if isinstance(statistic, Grams) and not statistic.exact:
        known = [] if block_error is None else block_error[np.isfinite(block_error)]
        size = f"within about {max(known):.2g} of" if len(known) else "not quite"
        yield Caveat(f"from blocks of {statistic.block} rows: {size} the value from all rows, which exact=True gives")
    if isinstance(statistic, Sample) and not statistic.exact:
        yield Caveat(f"rests on {statistic.describe()}")


def of_offsets(side_a: Side, side_b: Side, strained: dict[tuple[str, str], float]) -> Iterator[Caveat]:
    """Means so large that products in float32 lost digits before the centre was moved."""
    text = "the mean of some rows is large against their spread: digits may be lost; precision='float64' keeps them"
    texts = [[text if (side.name, site) in strained else None for site in side.sites] for side in (side_a, side_b)]
    yield from at_sites(texts, side_a, side_b)


def of_nan(value: np.ndarray, known: Iterable[Caveat], side_a: Side, side_b: Side) -> Iterator[Caveat]:
    """The reason for each NaN that no known caveat explains: a denominator of zero."""
    unexplained = np.isnan(value)
    sites_a, sites_b = np.array(side_a.sites, dtype=object), np.array(side_b.sites, dtype=object)
    for caveat in known:
        if caveat.undefined:
            rows = np.full(len(sites_a), True) if caveat.site_a is None else sites_a == caveat.site_a
            columns = np.full(len(sites_b), True) if caveat.site_b is None else sites_b == caveat.site_b
            unexplained[np.ix_(rows, columns)] = False
    for i, j in zip(*np.nonzero(unexplained), strict=True):
        text = "undefined: nothing of one side is left to compare (its centred Gram matrix is zero)"
        yield Caveat(text, side_a.sites[i], side_b.sites[j], undefined=True)


def of_draws(draws: int) -> Iterator[Caveat]:
    """The reason for missing p-values if there are too few draws; `draws` is 0 if none were requested."""
    if 0 < draws < FEWEST_DRAWS:
        yield Caveat(f"no p-values: p ≤ {LEVEL:g} needs at least {FEWEST_DRAWS} draws, got draws={draws}")


def of_chance(
    measure: Measure,
    values: Estimate,
    by_chance: Chance | None,
    side_a: Side,
    side_b: Side,
    *,
    draws: int,
    interval: bool,
) -> Iterator[Caveat]:
    """Chance levels or intervals that are missing, rest on fewer rows, or are unreliable."""
    if draws and not measure.paired:
        yield Caveat("does not depend on the pairing of rows, so shuffling them gives no chance level")
    elif draws and values.p is None:
        yield next(of_draws(draws), Caveat("no p-values: the rows they need do not fit the budget; raise memory="))
    if interval and values.low is None:
        blocks = f"it takes {FEWEST_GROUPS} blocks of rows; take more rows, a smaller block, or exact=True"
        rows = "too few rows, or they do not fit the memory budget"
        yield Caveat(f"no interval: {blocks if issubclass(measure.reads, Alignment) else rows}")
    if values.low is not None and values.n < HALVED * SMALLEST_GROUP and not issubclass(measure.reads, Alignment):
        yield Caveat(f"n={values.n} rows are few: the interval may be too wide")
    if by_chance is not None and by_chance.rows is not None and by_chance.p is not None:
        yield Caveat(f"p-values rest on a sample of {by_chance.rows} of {values.n} rows")
    if values.null_spread is not None and np.nanmax(values.null_spread, initial=0) > WIDE_CHANCE:
        yield Caveat(
            f"n={values.n} rows: chance alone spreads by {np.nanmax(values.null_spread):.2f} (standard deviation)"
        )
    if values.low is None or values.null is None or values.null_spread is None:
        return
    yield from near_chance(values.value, values.null, values.null_spread, side_a, side_b)


def near_chance(
    value: np.ndarray, null: np.ndarray, spread: np.ndarray, side_a: Side, side_b: Side
) -> Iterator[Caveat]:
    for i, j in zip(*np.nonzero(np.abs(value - null) < np.maximum(NEAR_CHANCE * spread, TIE)), strict=True):
        yield Caveat("close to chance, where the interval is unreliable", side_a.sites[i], side_b.sites[j])


def of_bounds(measure: Measure, value: np.ndarray) -> Iterator[Caveat]:
    low, high = measure.bounds
    outside = np.zeros_like(value, dtype=bool)
    if low is not None:
        outside |= value < low
    if high is not None:
        outside |= value > high
    if outside.any():
        worst = value[outside][0]
        yield Caveat(f"{int(outside.sum())} values lie outside [{low}, {high}] by more than rounding, e.g. {worst:.6g}")


# About the data: one direction, one row or one mean may decide the value of a measure

ONE_DIRECTION = 0.8  # Σλ² / (Σλ)² above which a single direction holds some nine tenths of the variance
ONE_ROW = 0.5  # share of the squared Gram matrix that a single row may make up
HARDLY = 1e-6  # Σ‖x − mean‖² / Σ‖x‖² below which features hardly vary
MANY_NEIGHBOURS = 0.1  # share of the rows that k neighbours may be
WORK = 10**9  # multiply-adds per site up to which single rows are looked at


def of_one_direction(
    measure: Measure, statistic: Statistic | PairViews, side_a: Side, side_b: Side
) -> Iterator[Caveat]:
    """One direction with nearly all the variance, which decides measures that weigh directions by variance."""
    if "linear" in measure.invariant or not issubclass(measure.reads, (Alignment, Covariances)) or statistic.n < 4:
        return
    shares = [squares / trace.square() for squares, trace in zip(statistic.own, statistic.traces, strict=True)]
    text = "one direction holds about {:.0%} of the variance and dominates the value"
    yield from _at(shares, side_a, side_b, lambda share: share > ONE_DIRECTION, lambda s: text.format(s**0.5))


def of_one_row(
    measure: Measure, statistic: Statistic, rows: Sample | None, side_a: Side, side_b: Side
) -> Iterator[Caveat]:
    """An outlier that makes up most of a Gram matrix, and so decides CKA."""
    if not issubclass(measure.reads, Alignment):
        return
    shares: Iterable[Tensor]
    if isinstance(statistic, Grams):
        shares = statistic.heaviest_row
    elif rows is not None:
        shares = rows.grams.heaviest or [torch.stack([_heaviest(site) for site in side]) for side in (rows.xs, rows.ys)]
    else:
        return
    text = "one row makes up {:.0%} of the Gram matrix: without it the value may be different"
    yield from _at(shares, side_a, side_b, lambda share: share > ONE_ROW, text.format)


def of_hardly_varying(statistic: Statistic, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    text = "features hardly vary ({:.1g} of their size): the value may reflect rounding in the network"
    yield from _at(statistic.spread, side_a, side_b, lambda s: 0 < s < HARDLY, lambda s: text.format(s**0.5))


def of_neighbours(measure: Measure, statistic: Statistic) -> Iterator[Caveat]:
    k = measure.defaults.get("k")
    if isinstance(k, int) and k > MANY_NEIGHBOURS * (statistic.n - 1):
        by_chance = min(1.0, k / (statistic.n - 1))
        yield Caveat(f"k={k} neighbours of n={statistic.n} rows: by chance {by_chance:.0%} of neighbours are shared")


def _heaviest(site: Tensor) -> Tensor:
    """The largest share of one row in ‖K‖², from K or from the covariance, whichever is smaller."""
    n, width = site.shape
    if n * width * min(n, width) > WORK:
        return torch.zeros((), device=site.device)
    x = site.float() - site.mean(0, dtype=torch.float64).float()
    x = x / x.abs().amax()  # fourth powers would overflow, and a share does not depend on the scale
    rows = ((x @ self_product(x)) * x).sum(1) if width <= n else self_product(x.T).square().sum(1)
    return ((2 * rows - row_squares(x).square()) / rows.sum()).amax()


def _at(
    shares: Iterable[Tensor],
    side_a: Side,
    side_b: Side,
    doubtful: Callable[[float], bool],
    words: Callable[[float], str],
) -> Iterator[Caveat]:
    """A caveat for each site whose share is doubtful."""
    texts = [[words(x) if doubtful(x) else None for x in of_side.detach().cpu().tolist()] for of_side in shares]
    yield from at_sites(texts, side_a, side_b)

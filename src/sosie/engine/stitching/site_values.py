"""What stitching at many sites found, as a comparison: how the stitched networks do, and what the indices say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...capture import Site
from ...measures import Measure
from ...measures.joint import similarities
from ...results import Caveat, Closer, Comparison, Side, Values
from ...stats import Alignment, Covariances, JointSums, Neurons, UncentredAlignment
from ..provenance import describe_inputs, describe_model, provenance
from .halves import Half
from .pairing import Pair, SitePairs
from .tally import Tally

# What a stitched network does: which way is better, its bounds, and what B stitched to itself gives.
FOUND: dict[str, tuple[Closer, tuple[float | None, float | None], float | None]] = {
    "relative_accuracy": ("up", (0.0, None), 1.0),
    "accuracy": ("up", (0.0, 1.0), None),
    "agreement_b": ("up", (0.0, 1.0), 1.0),
    "agreement_a": ("up", (0.0, 1.0), 1.0),
    "cross_entropy": ("down", (0.0, None), None),
}
_READABLE = (Alignment, UncentredAlignment, Covariances, Neurons)
_DIAGONAL = (
    "sites were stitched in their order, so there is nothing off the diagonal; pairs='all' stitches each to each"
)
_NOT_HELD_OUT = "evaluated on the data of the fit, not on held-out data: give test="
_POSITIONS = "every position of an input is a row, as in the fit; they hang together, so no interval is told"
_UNLABELLED = "the test data have no labels, so there is no accuracy"


def check_measures(measures: Sequence[Measure]) -> None:
    for measure in measures:
        if measure.reads not in _READABLE:
            raise ValueError(
                f"{measure.name} reads more of the rows than the sums that stitching keeps; "
                "sosie.compare(…, rows='positions') gives it"
            )


def comparison_of(
    halves: tuple[Half, Half],
    found: SitePairs,
    sums: dict[Pair, JointSums],
    tallies: dict[Pair, Tally],
    measures: Sequence[Measure],
    *,
    mixing: Sequence[str | None],
    settings: dict[str, str],
    data: Any,
    test: Any,
) -> Comparison:
    sides = _side(halves[0], found.a), _side(halves[1], found.b)
    shared = [Caveat(f"undefined: {why}", *_labels(found, pair)) for pair, why in found.refused.items()]
    if settings["pairs"] == "diagonal" and len(found.a) > 1:
        shared.append(Caveat(_DIAGONAL))
    if found.leaking:
        shared.append(
            Caveat(f"left out, since something goes around these sites of {halves[1].name}: {', '.join(found.leaking)}")
        )
    shared += [Caveat(text) for text in dict.fromkeys(mixing) if text]
    values = {}
    some = next(iter(tallies.values()))
    known = some.numbers()
    for name in FOUND:
        if name in known:
            values[name] = _tallied(name, tallies, found, settings["fit"], shared, held_out=test is not None)
    if "accuracy" not in known:
        told = values["agreement_b"]
        values["agreement_b"] = replace(told, caveats=(*told.caveats, Caveat(_UNLABELLED)))
    for measure in measures:
        values[measure.name] = _measured(measure, sums, found, shared)
    about = provenance(
        settings=settings,
        models=[describe_model(half.model, half.name, half.weights, describe_inputs(half.prepare)) for half in halves],
        data=data,
        test=test,
        inputs=some.n,
    )
    if "accuracy_b" in known:
        about["accuracy"] = [known.get("accuracy_a"), known["accuracy_b"]]
    return Comparison(*sides, values, "positions", about)


def _tallied(
    name: str, tallies: dict[Pair, Tally], found: SitePairs, fit: str, shared: list[Caveat], *, held_out: bool
) -> Values:
    closer, bounds, same = FOUND[name]
    caveats = list(shared) + ([] if held_out else [Caveat(_NOT_HELD_OUT)])
    if any(name not in tally.numbers() for tally in tallies.values()):
        caveats.append(Caveat("undefined: B gets no input right"))
    ranges = {pair: tally.interval(name) for pair, tally in tallies.items()}
    low, high = (
        _matrix(found, {pair: reach[k] for pair, reach in ranges.items() if reach is not None}) for k in (0, 1)
    )
    how = "Wilson's interval" if bounds[1] is not None else "intervals by the error of a mean"
    how = "intervals by the delta method for a ratio" if name == "relative_accuracy" else how
    return Values(
        _matrix(found, {pair: tally.numbers().get(name, math.nan) for pair, tally in tallies.items()}),
        n=next(iter(tallies.values())).n,
        statistic=f"answers of networks stitched by {fit}; {how}",
        closer=closer,
        bounds=bounds,
        same=same,
        low=low,
        high=high,
        caveats=tuple(caveats),
    )


def _measured(measure: Measure, sums: dict[Pair, JointSums], found: SitePairs, shared: list[Caveat]) -> Values:
    values, caveats = {}, list(shared)
    for pair, total in sums.items():
        if pair in found.refused:
            continue
        try:
            (values[pair],) = similarities(total.joint(*pair), [measure]).values()
        except ValueError as error:
            caveats.append(Caveat(f"undefined: {error}", *_labels(found, pair)))
        widths = [len(side[k].total) for side, k in zip((total.a, total.b), pair, strict=True)]
        if measure.few_rows is not None and total.n <= max(widths):
            caveats.append(Caveat(f"n={total.n} rows for width={max(widths)}: biased up", *_labels(found, pair)))
    rows = sorted({total.n for total in sums.values()})
    if any(joint.target.space for joint in found.joints.values()):
        caveats.append(Caveat(_POSITIONS))
    between = f"{rows[0]:,} to {rows[-1]:,}" if len(rows) > 1 else f"{rows[0]:,}"
    products = str(next(iter(sums.values())).products).removeprefix("torch.")
    return Values(
        _matrix(found, values),
        n=rows[0],
        statistic=f"the sums of the fit: {between} rows a pair, {products} products",
        closer=measure.closer,
        bounds=measure.bounds,
        same=measure.same,
        caveats=tuple(caveats),
    )


def _matrix(found: SitePairs, values: dict[Pair, float]) -> np.ndarray:
    matrix = np.full((len(found.a), len(found.b)), np.nan)
    for pair, value in values.items():
        matrix[pair] = value
    return matrix


def _labels(found: SitePairs, pair: Pair) -> tuple[str, str]:
    return found.a[pair[0]].label, found.b[pair[1]].label


def _side(half: Half, sites: Sequence[Site]) -> Side:
    channels = tuple(site.shape[-1] if site.channels_last else site.shape[0] for site in sites)
    return Side(half.name, tuple(site.label for site in sites), channels, tuple(site.shape for site in sites))

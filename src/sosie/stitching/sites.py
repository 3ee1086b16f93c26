"""Stitching at many sites: one pass of both networks for all fits, one more to evaluate what was stitched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture import NoData, Site, Watch, as_found, labels_of, watch
from ..engine.network import number_duplicates
from ..engine.provenance import describe_inputs, describe_model, provenance
from ..linalg import Affine, Fit
from ..measures import Measure, find
from ..progress import Progress
from ..results import Caveat, Closer, Comparison, Estimate, Side
from ..stats import Alignment, Covariances, Neurons, UncentredAlignment
from .cuts import Cut
from .fitting import Tally, Way, check_options, fill
from .halves import (
    CHUNK,
    PRECISIONS,
    CutModel,
    Pair,
    Pairs,
    Precision,
    SitePairs,
    answer_of,
    check_precision,
    chunks_of,
    find_pairs,
    joint_part,
    look_into,
    no_padding,
    open_network,
    refuse_padding,
)
from .joint import Form, JointMaker, JointSums, Resize, similarities
from .task_loss import TaskLoss, UserLoss, find_way, in_chunks, read_inputs
from .training import JointTrainer

# What stitching at many sites found, as a comparison: how the stitched networks do, and what the indices say

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
    halves: tuple[CutModel, CutModel],
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
    return Comparison(*sides, values, "positions", about, kind="stitching")


def _tallied(
    name: str, tallies: dict[Pair, Tally], found: SitePairs, fit: str, shared: list[Caveat], *, held_out: bool
) -> Estimate:
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
    return Estimate(
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


def _measured(measure: Measure, sums: dict[Pair, JointSums], found: SitePairs, shared: list[Caveat]) -> Estimate:
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
    return Estimate(
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


def _side(half: CutModel, sites: Sequence[Site]) -> Side:
    channels = tuple(site.shape[-1] if site.channels_last else site.shape[0] for site in sites)
    return Side(half.name, tuple(site.label for site in sites), channels, tuple(site.shape for site in sites))


HELD = 256 * 2**20  # bytes of activations of both networks that are held at a time
MEASURES = ("linear_cka", "regression_r2")


def stitch_sites(
    model_a: Any,
    model_b: Any,
    data: Any,
    *,
    test: Any = None,
    sites_a: Any = None,
    sites_b: Any = None,
    pairs: Pairs = "diagonal",
    fit: Way = "least_squares",
    validation: Any = None,
    loss: UserLoss | None = None,
    measures: str | Measure | Sequence[str | Measure] = MEASURES,
    precision: Precision = "float32",
    resize: Resize = "interpolate",
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    max_rows: int | None = None,
) -> Comparison:
    """At which layers can B do its job with A's representation, and does an index of similarity say so?

    Stitches every pair of sites as `stitch` does, from one pass of both networks over `data`: with pairs="diagonal"
    the first site of A with the first of B and so on, with "all" each with each. The stitched networks are evaluated
    on `test`, which should be held out (None: on `data`, with a caveat). Values are relative_accuracy and accuracy
    (with labels), agreement_b, agreement_a and cross_entropy, as in `Stitch.evaluate`, with 95 % intervals over inputs;
    and the `measures`, from the same sums as the fits, so over every position of every input.

    `sites_a`, `sites_b`: as in `compare`; by default its sites, without those of B that something goes around (a skip
    connection): these are left out with a caveat, and refused where they were asked for. `fit` is a closed form, or
    task_loss, which is trained for one pair after the other. `max_rows`: inputs to fit on, and to evaluate on. For the
    rest see `stitch`.
    """
    check_precision(precision)
    way = find_way(fit)
    check_options([way] if isinstance(way, TaskLoss) else [], validation, loss)
    chosen = tuple(find(m) for m in ([measures] if isinstance(measures, (str, Measure)) else measures))
    check_measures(chosen)
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    kept = read_inputs(data, max_rows) if isinstance(way, TaskLoss) else None  # gone through many times
    fitted = data if kept is None else in_chunks(kept)
    if test is None and isinstance(fitted, Iterator):
        raise ValueError("these data can be read but once, by the fit: give test=, or data that can be read again")
    first, batches = look_into(fitted)
    halves = open_network(model_a, prepare_a, inputs), open_network(model_b, prepare_b, inputs)
    number_duplicates(halves)
    found = find_pairs(halves, (sites_a, sites_b), pairs, first, resize)
    mixing = [half.mixing(sites, first) for half, sites in zip(halves, (found.a, found.b), strict=True)]
    sums = sums_of_pairs(halves, found, batches, precision, max_rows)
    if isinstance(way, TaskLoss):
        affine_of = _trained(way, sums, halves, found, first, kept, validation, loss)
    else:
        affine_of = _fitted(way, sums)
    affines = fit_pairs(affine_of, found, halves[1])
    tallies = evaluate_pairs(halves, found, affines, fitted if test is None else test, max_rows)
    settings = {"fit": way.name, "pairs": pairs, "precision": precision, "resize": resize}
    if max_rows is not None:
        settings["max_rows"] = str(max_rows)
    return comparison_of(halves, found, sums, tallies, chosen, mixing=mixing, settings=settings, data=data, test=test)


def sums_of_pairs(
    halves: tuple[CutModel, CutModel], found: SitePairs, data: Any, precision: Precision, max_rows: int | None
) -> dict[Pair, JointSums]:
    """What the fits and measures of every pair read, from one forward of each network."""
    groups = found.groups()
    makers = {form: JointMaker(PRECISIONS[precision]) for form in groups}
    totals: dict[Form, JointSums] = {}
    names = " to ".join(half.name for half in halves)
    with ExitStack() as stack, Progress(f"stitching {names}", None, "inputs") as bar:
        stack.enter_context(as_found([half.model for half in halves]))
        watched = [
            stack.enter_context(watch(half.model, [site.label for site in sites]))
            for half, sites in zip(halves, (found.a, found.b), strict=True)
        ]
        for chunk in chunks_of(data, max_rows, chunk_size(found)):
            (a, of_a), (b, of_b) = (
                _activations(half, seen, sites, chunk.batch)
                for half, seen, sites in zip(halves, watched, (found.a, found.b), strict=True)
            )
            for form, pairs in groups.items():
                shaped = {i: found.joints[i, j].shaped(a[i]) for i, j in pairs}
                keep = _kept_by_all([no_padding(found.joints[i, j], of_a[i], of_b[j]) for i, j in pairs])
                part = joint_part(makers[form], shaped, {j: b[j] for _, j in pairs}, pairs, form, keep)
                totals[form] = part if form not in totals else totals[form].merge(part)
            bar.advance(chunk.count)
    return {pair: totals[form] for form, pairs in groups.items() for pair in pairs}


def _activations(
    half: CutModel, seen: Watch, sites: Sequence[Site], batch: Any
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Of every site, and where each has no padding."""
    args, kwargs = half.call(batch)
    seen.run(*args, **kwargs)
    found = [seen[site.label] for site in sites]
    return found, [half.no_padding(each, site, batch, kwargs) for each, site in zip(found, sites, strict=True)]


def _kept_by_all(masks: Sequence[Tensor | None]) -> Tensor | None:
    """Positions that are padding at no site; None: all of them."""
    known = [mask for mask in masks if mask is not None]
    return functools.reduce(torch.logical_and, known) if known else None


def chunk_size(found: SitePairs) -> int:
    """Inputs a forward: as many as for one site, unless the activations of all sites would take too much."""
    numbers = sum(math.prod(site.shape) for site in (*found.a, *found.b))
    return max(1, min(CHUNK, HELD // (4 * numbers)))


def _fitted(way: Fit, sums: dict[Pair, JointSums]) -> Callable[[Pair], Affine]:
    return lambda pair: way(sums[pair].joint(*pair))


def _trained(
    task: TaskLoss,
    sums: dict[Pair, JointSums],
    halves: tuple[CutModel, CutModel],
    found: SitePairs,
    batch: Any,
    inputs: Any,
    validation: Any,
    loss: UserLoss | None,
) -> Callable[[Pair], Affine]:
    args, kwargs = halves[0].call(batch)
    held_out = None if validation is None else read_inputs(validation, None)

    @functools.cache
    def cut_of_a(i: int) -> Cut:
        return Cut(halves[0].model, found.a[i].label, *args, **kwargs)

    def train(pair: Pair) -> Affine:
        lower = replace(halves[0], cut=cut_of_a(pair[0]))
        upper = replace(halves[1], cut=found.cuts[pair[1]])
        bench = JointTrainer(lower, upper, found.joints[pair], sums[pair].joint(*pair), inputs, held_out, loss)
        return bench.train([task])[0].affine

    return train


def fit_pairs(affine_of: Callable[[Pair], Affine], found: SitePairs, upper: CutModel) -> dict[Pair, Affine]:
    """Every joint filled; a pair that cannot be fitted is moved to those refused, with the reason."""
    affines = {}
    for pair in list(found.joints):
        try:
            affines[pair] = affine_of(pair)
        except (ValueError, torch.linalg.LinAlgError) as error:
            found.refused[pair] = str(error)
            del found.joints[pair]
        else:
            fill(found.joints[pair], affines[pair], like=upper.model)
    if not affines:
        raise ValueError(f"no pair of sites can be fitted: {next(iter(found.refused.values()))}")
    return affines


@torch.no_grad()
def evaluate_pairs(
    halves: tuple[CutModel, CutModel], found: SitePairs, affines: dict[Pair, Affine], data: Any, max_rows: int | None
) -> dict[Pair, Tally]:
    """Each network answers once; of the stitched ones only what comes after the joint is run."""
    lower, upper = halves
    tallies = {pair: Tally() for pair in affines}
    with ExitStack() as stack, Progress(f"evaluating {len(affines)} stitched networks", None, "inputs") as bar:
        stack.enter_context(as_found([half.model for half in halves]))
        seen = stack.enter_context(watch(lower.model, [site.label for site in found.a]))
        for chunk in chunks_of(data, max_rows, chunk_size(found)):
            given_a = lower.call(chunk.batch)
            answer_a = answer_of(lower.model(*given_a[0], **given_a[1]))
            activations = [seen[site.label] for site in found.a]
            padded = [
                lower.no_padding(each, site, chunk.batch, given_a[1])
                for each, site in zip(activations, found.a, strict=True)
            ]
            args, kwargs = upper.call(chunk.batch)
            answer_b = answer_of(upper.model(*args, **kwargs))
            labels = labels_of(chunk.batch)
            for (i, j), tally in tallies.items():
                refuse_padding(found.joints[i, j], padded[i])
                cut = found.cuts[j]
                given = (args, kwargs) if cut.needs_input else ((), {})
                mapped = found.joints[i, j](activations[i].to(found.joints[i, j].weight))
                tally.add(answer_of(cut.task(mapped, *given[0], **given[1])), answer_a, answer_b, labels)
            bar.advance(chunk.count)
    if not next(iter(tallies.values())).n:
        raise NoData("the test data yielded no inputs")
    return tallies

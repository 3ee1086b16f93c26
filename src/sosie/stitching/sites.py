"""Stitching at many sites: one pass of both networks for all fits, one more to evaluate what was stitched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..capture import Site, as_found, count_inputs, cut, kept_attributes, to_rows, watch
from ..checks import one_of
from ..engine.caveats import of_left_out
from ..engine.network import number_duplicates
from ..engine.provenance import provenance
from ..linalg import Affine
from ..measures import Measure, find
from ..results import Caveat, Closer, Comparison, Estimate, Side
from ..stats import Alignment, Covariances, Neurons, UncentredAlignment
from .cuts import Cut, CutModel, LeakingCut
from .fitting import PROPORTIONS, Tally, Way, check_options, evaluate_joints, filled, find_way
from .joint import (
    PRECISIONS,
    TRIED,
    Form,
    Joint,
    JointSums,
    Pair,
    Precision,
    Resize,
    in_chunks,
    look_into,
    read_inputs,
    similarities,
    sums_of_pairs,
)
from .task_loss import JointTrainer, TaskLoss, UserLoss

Pairs = Literal["diagonal", "all"]
MEASURES = ("linear_cka", "regression_r2")


class Number(NamedTuple):
    """A number of a stitched network: which way is better, its bounds, and its value for B stitched to itself."""

    closer: Closer
    bounds: tuple[float | None, float | None]
    same: float | None


NUMBERS = {
    "relative_accuracy": Number("up", (0.0, None), 1.0),
    "accuracy": Number("up", (0.0, 1.0), None),
    "agreement_b": Number("up", (0.0, 1.0), 1.0),
    "agreement_a": Number("up", (0.0, 1.0), 1.0),
    "cross_entropy": Number("down", (0.0, None), None),
}
_DIAGONAL = (
    "sites were stitched in their order, so there is nothing off the diagonal; pairs='all' stitches each with each"
)
_NOT_HELD_OUT = "evaluated on the data of the fit, not on held-out data: give test="
_POSITIONS = "every position of an input is a row, as in the fit; such rows are correlated, so there is no interval"
_UNLABELLED = "the test data have no labels, so there is no accuracy"


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

    `sites_a`, `sites_b`: as in `compare`, with its default. Sites of B that something goes around (a skip connection)
    are left out with a caveat, or refused if `sites_b` chose them. `fit` is a closed form, or task_loss, which is
    trained for one pair after the other. `max_rows`: how many inputs to fit on, and to evaluate on. For the rest see
    `stitch`.
    """
    one_of(precision, "precision", PRECISIONS)
    one_of(pairs, "pairs", ("diagonal", "all"))
    way = find_way(fit)
    check_options([way] if isinstance(way, TaskLoss) else [], validation, loss)
    chosen = tuple(find(m) for m in ([measures] if isinstance(measures, (str, Measure)) else measures))
    for measure in chosen:
        if measure.reads not in (Alignment, UncentredAlignment, Covariances, Neurons):
            raise ValueError(
                f"{measure.name} needs more than the sums that stitching keeps; "
                "sosie.compare(…, rows='positions') gives it"
            )
    kept = read_inputs(data, max_rows) if isinstance(way, TaskLoss) else None  # training reads them many times
    given = data if kept is None else in_chunks(kept)
    if test is None and isinstance(given, Iterator):
        raise ValueError("these data can be read only once, by the fit: give test=, or data that can be read again")
    first, batches = look_into(given)
    models = (
        CutModel.of(model_a, prepare=prepare_a, inputs=inputs),
        CutModel.of(model_b, prepare=prepare_b, inputs=inputs),
    )
    number_duplicates(models)
    grid = find_pairs(models, (sites_a, sites_b), pairs, first, resize)
    mixing = [model.mixing_at(sites, first) for model, sites in zip(models, (grid.a, grid.b), strict=True)]
    sums = sums_of_pairs(models, (grid.a, grid.b), grid.joints, batches, precision, max_rows)
    held_out = None if validation is None else read_inputs(validation, None)

    @functools.cache
    def lower(i: int) -> CutModel:
        return replace(models[0]).cut_at(grid.a[i].label, first)

    def affine_of(pair: Pair) -> Affine:
        moments = sums[pair].joint(*pair)
        if not isinstance(way, TaskLoss):
            return way(moments)
        upper = replace(models[1])
        upper.cut = grid.cuts[pair[1]]
        trainer = JointTrainer(lower(pair[0]), upper, grid.joints[pair], moments, kept, held_out, loss)
        return trainer.train([way])[0].affine

    grid.fill(affine_of, models[1])
    tallies = evaluate_joints(models, grid.a, grid.joints, grid.cuts, given if test is None else test, max_rows)
    settings = {"fit": way.name, "pairs": pairs, "precision": precision, "resize": resize}
    if max_rows is not None:
        settings["max_rows"] = str(max_rows)

    # The results, as a comparison: how the stitched networks do, and what the measures say
    side_a, side_b = map(_side, models, (grid.a, grid.b), grid.left_out)
    shared = [Caveat(f"undefined: {why}", *grid.labels(pair), undefined=True) for pair, why in grid.refused.items()]
    if pairs == "diagonal" and len(grid.a) > 1:
        shared.append(Caveat(_DIAGONAL))
    if grid.leaking:
        left_out = ", ".join(grid.leaking)
        shared.append(Caveat(f"left out, since something goes around these sites of {models[1].name}: {left_out}"))
    shared += of_left_out(side_a, side_b)
    shared += [Caveat(text) for text in dict.fromkeys(mixing) if text]
    some = next(iter(tallies.values()))
    known = some.numbers()
    values = {}
    for name in NUMBERS:
        if name in known:
            extra = [] if test is not None else [Caveat(_NOT_HELD_OUT)]
            if name == "agreement_b" and "accuracy" not in known:
                extra.append(Caveat(_UNLABELLED))
            values[name] = _counted(name, tallies, grid, way.name, [*shared, *extra])
    for measure in chosen:
        values[measure.name] = _measured(measure, sums, grid, shared)
    about = provenance(
        settings=settings, models=[model.describe() for model in models], data=data, test=test, inputs=some.n
    )
    if "accuracy_b" in known:
        about["accuracy"] = [known.get("accuracy_a"), known["accuracy_b"]]
    return Comparison(side_a, side_b, values, "positions", about, kind="stitching")


# Which sites are stitched, and how: pairs, cuts of B, and the joint of each


@dataclass
class SitePairs:
    """The sites of both networks, numbered in execution order, and the joints between them."""

    a: tuple[Site, ...]
    b: tuple[Site, ...]
    cuts: tuple[Cut, ...]  # of B, one per site
    leaking: tuple[str, ...]  # sites of B left out because something goes around them
    left_out: tuple[dict[str, str], dict[str, str]]  # sites of A, of B that give no rows, and why
    joints: dict[Pair, Joint] = field(default_factory=dict)
    refused: dict[Pair, str] = field(default_factory=dict)  # pairs that cannot be joined or fitted, and why

    def labels(self, pair: Pair) -> tuple[str, str]:
        return self.a[pair[0]].label, self.b[pair[1]].label

    def matrix(self, values: dict[Pair, float]) -> np.ndarray:
        matrix = np.full((len(self.a), len(self.b)), np.nan)
        for pair, value in values.items():
            matrix[pair] = value
        return matrix

    def fill(self, affine_of: Callable[[Pair], Affine], upper: CutModel) -> None:
        """Fit every joint; a pair that cannot be fitted moves to `refused`, with the reason."""
        for pair in list(self.joints):
            try:
                filled(self.joints[pair], affine_of(pair), upper.model)
            except (ValueError, torch.linalg.LinAlgError) as error:
                self.refused[pair] = str(error)
                del self.joints[pair]
        if not self.joints:
            raise ValueError(f"no pair of sites can be fitted: {next(iter(self.refused.values()))}")


def find_pairs(
    models: tuple[CutModel, CutModel], sites: tuple[Any, Any], pairs: Pairs, batch: Any, resize: Resize
) -> SitePairs:
    """Pair up the sites, cut B at each of its own, and see which pairs can be joined."""
    (a, without_a), (b, without_b) = (_look(model, chosen, batch) for model, chosen in zip(models, sites, strict=True))
    if pairs == "diagonal" and len(a) != len(b):
        names = [", ".join(site.label for site in side[:4]) + (", …" if len(side) > 4 else "") for side in (a, b)]
        raise ValueError(
            f"sites pair up in their order, but there are {len(a)} of A ({names[0]}) and {len(b)} of B ({names[1]}): "
            "choose as many with sites_a= and sites_b=, or pairs='all'"
        )
    args, kwargs = models[1].call(batch)
    cuts: dict[int, Cut] = {}
    leaking = []
    for j, site in enumerate(b):
        try:
            one = Cut(models[1].model, site.label, *args, **kwargs)
            one.check(*args, **kwargs)
            cuts[j] = one
        except LeakingCut:
            if sites[1] is not None:  # the user chose them
                raise
            leaking.append(site.label)
    if not cuts:
        raise LeakingCut(f"something goes around every site of {models[1].name}: {', '.join(leaking)}")
    of_a = [a[j] for j in cuts] if pairs == "diagonal" else a
    of_b, left_out = tuple(b[j] for j in cuts), (without_a, without_b)
    grid = SitePairs(tuple(of_a), of_b, tuple(cuts.values()), tuple(leaking), left_out)
    for j in range(len(grid.b)):
        for i in [j] if pairs == "diagonal" else range(len(grid.a)):
            try:
                source, target = (Form.of(site.shape, site.channels_last) for site in (grid.a[i], grid.b[j]))
                grid.joints[i, j] = Joint(source, target, resize)
            except ValueError as error:
                grid.refused[i, j] = str(error)
    if not grid.joints:
        raise ValueError(f"no pair of sites can be joined: {next(iter(grid.refused.values()))}")
    return grid


def _look(model: CutModel, sites: Any, batch: Any) -> tuple[tuple[Site, ...], dict[str, str]]:
    """The sites that a first run reaches, in execution order, and those that give no rows, with the reason."""
    count = min(TRIED, count_inputs(batch))
    args, kwargs = model.call(cut(batch, 0, count))

    def check(site: Site, activation: Tensor) -> None:
        to_rows(activation, "flatten", site=site, inputs=count)  # raises at what gives no rows, which is left out

    with as_found(model.model), kept_attributes(model.model), watch(model.model, sites, sink=check) as seen:
        seen.run(*args, **kwargs)
        return seen.sites, dict(seen.left_out)


# The values


def _counted(name: str, tallies: dict[Pair, Tally], grid: SitePairs, fit: str, caveats: list[Caveat]) -> Estimate:
    """One number of every stitched network, with its interval."""
    values = {pair: tally.numbers().get(name, math.nan) for pair, tally in tallies.items()}
    if any(map(math.isnan, values.values())):
        caveats = [*caveats, Caveat("undefined: B gets no input right", undefined=True)]
    intervals = {pair: interval for pair, tally in tallies.items() if (interval := tally.interval(name)) is not None}
    how = "Wilson's interval" if name in PROPORTIONS else "intervals by the error of a mean"
    how = "intervals by the delta method for a ratio" if name == "relative_accuracy" else how
    return Estimate.of(
        NUMBERS[name],
        grid.matrix(values),
        n=next(iter(tallies.values())).n,
        statistic=f"answers of networks stitched by {fit}; {how}",
        interval=(
            grid.matrix({pair: low for pair, (low, _) in intervals.items()}),
            grid.matrix({pair: high for pair, (_, high) in intervals.items()}),
        ),
        caveats=caveats,
    )


def _measured(measure: Measure, sums: dict[Pair, JointSums], grid: SitePairs, shared: list[Caveat]) -> Estimate:
    """A measure's values, from the sums of the fits."""
    values, caveats = {}, list(shared)
    for pair in grid.joints:
        moments = sums[pair].joint(*pair)
        try:
            (values[pair],) = similarities(moments, [measure]).values()
        except ValueError as error:
            caveats.append(Caveat(f"undefined: {error}", *grid.labels(pair), undefined=True))
        if measure.few_rows is not None and moments.n <= max(moments.widths):
            text = f"n={moments.n} rows for width={max(moments.widths)}: biased up"
            caveats.append(Caveat(text, *grid.labels(pair)))
    rows = sorted({total.n for total in sums.values()})
    if any(joint.target.space for joint in grid.joints.values()):
        caveats.append(Caveat(_POSITIONS))
    between = f"{rows[0]:,} to {rows[-1]:,}" if len(rows) > 1 else f"{rows[0]:,}"
    products = str(next(iter(sums.values())).products).removeprefix("torch.")
    return Estimate.of(
        measure,
        grid.matrix(values),
        n=rows[0],
        statistic=f"the sums of the fit: {between} rows per pair, {products} products",
        caveats=caveats,
    )


def _side(model: CutModel, sites: Sequence[Site], left_out: dict[str, str]) -> Side:
    channels = tuple(site.shape[-1] if site.channels_last else site.shape[0] for site in sites)
    labels, shapes = tuple(site.label for site in sites), tuple(site.shape for site in sites)
    return Side(model.name, labels, channels, shapes, left_out=tuple(left_out.items()))

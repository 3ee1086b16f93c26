"""Stitching at many sites: one pass of both networks for all fits, one more to evaluate what was stitched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...capture import Cut, NoData, Site, as_found, labels_of, watch
from ...capture.watch import Seen
from ...linalg import Affine, Fit
from ...measures import Measure, find
from ...models.joint import Form, Resize
from ...progress import Progress
from ...results import Comparison
from ...stats import JointMaker, JointSums
from ..sources import tell_apart
from .fitting import Way, check_options, fill
from .halves import CHUNK, Half, answer_of, chunks_of, look_into, open_network, refuse_padding
from .kept import in_chunks, read_inputs
from .losses import UserLoss
from .pairing import Pair, Pairs, SitePairs, find_pairs
from .site_values import check_measures, comparison_of
from .sums import PRECISIONS, Precision, check_precision, joint_part, no_padding
from .tally import Tally
from .task_loss import TaskLoss, find_way
from .training import Bench

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
    tell_apart(halves)
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
    halves: tuple[Half, Half], found: SitePairs, data: Any, precision: Precision, max_rows: int | None
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


def _activations(half: Half, seen: Seen, sites: Sequence[Site], batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
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
    halves: tuple[Half, Half],
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
        bench = Bench(lower, upper, found.joints[pair], sums[pair].joint(*pair), inputs, held_out, loss)
        return bench.train([task])[0].affine

    return train


def fit_pairs(affine_of: Callable[[Pair], Affine], found: SitePairs, upper: Half) -> dict[Pair, Affine]:
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
    halves: tuple[Half, Half], found: SitePairs, affines: dict[Pair, Affine], data: Any, max_rows: int | None
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

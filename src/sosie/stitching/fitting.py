"""Stitching: the lower part of A, an affine layer, the upper part of B (Csiszárik et al. 2021).

`stitch` joins two networks at one site each, and returns a `Stitch`, which evaluates the stitched network and can be
saved and loaded. `stitch_sites` joins them at many sites, from one pass of both networks for all fits and one more to
evaluate what was stitched, and returns a `Comparison`.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import Site, as_found, count_inputs, cut, kept_attributes, to_rows, watch
from ..capture.batches import CallArguments
from ..checks import listed, one_of, parse_call
from ..engine.caveats import of_left_out
from ..engine.network import for_each, models_and_data, number_duplicates
from ..engine.plan import find_measures
from ..engine.provenance import digest_of, provenance
from ..files import check_schema, plain_json, read_tensors, reading, write_tensors
from ..linalg import Affine, Fit, find_fit
from ..measures import Measure
from ..notebook import html_facts
from ..results import Caveat, Comparison, Estimate, Number, Side
from ..stats import Alignment, Covariances, Neurons, UncentredAlignment
from .cuts import Cut, CutModel, LeakingCut, is_mask
from .joint import (
    PRECISIONS,
    PROPORTIONS,
    TRIED,
    Form,
    Joint,
    JointSums,
    Pair,
    Precision,
    Resize,
    StitchedNetwork,
    Tally,
    evaluate_joints,
    in_chunks,
    look_into,
    read_inputs,
    similarities,
    sums_of_pairs,
)
from .task_loss import NAME, JointTrainer, TaskLoss

AnyFit = str | Fit | TaskLoss


def stitch(
    model_a: Any,
    site_a: str,
    model_b: Any,
    site_b: str,
    data: Any,
    *,
    fit: AnyFit | Sequence[AnyFit] = "least_squares",
    precision: Precision = "float32",
    resize: Resize = "interpolate",
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    max_rows: int | None = None,
) -> Stitch | list[Stitch]:
    """Can B do its job with A's representation? Join A up to `site_a` to B from `site_b` on, by an affine layer.

    The layer is fitted to the activations of both networks on `data`, exactly and in one pass, whatever the batch size:
    `fit` is least_squares, ridge(strength=…), procrustes, reduced_rank(k=…), permutation, lasso(alpha=…) or identity.
    With task_loss and the options of `TaskLoss` it is trained instead, with both networks frozen. A list of fits gives
    a list of results from one pass, with all task losses trained together. The layer acts on channels: every pixel or
    token is a row. If the sites differ in shape, A's activation is first resized to the shape of B's; see `resize` and
    sosie.stitching.joint. A cut that something bypasses, such as a skip connection, is refused.

    `precision` is that of the products of activations; sums are in float64. float32 gives fitted values to about 1e-4
    of the exact ones, and leaves out directions of A with less than 1e-6 of the largest; float64 equals a least squares
    solver on all rows.

    `result.model(x)` is the stitched network, `result.evaluate(data)` measures how well it does, and `result.caveats`
    names what may mislead: random weights, or inputs of a batch that are mixed.
    """
    one_of(precision, "precision", PRECISIONS)
    as_list = [fit] if isinstance(fit, (str, Fit, TaskLoss)) else fit
    fits = find_fits(as_list)
    if not fits:
        raise ValueError("fit is an empty list: name at least one")
    tasks = [f for f in fits if isinstance(f, TaskLoss)]
    kept = read_inputs(data, max_rows) if tasks else None  # training reads them many times
    first, batches = look_into(data if kept is None else in_chunks(kept))
    lower = CutModel.of(model_a, prepare=prepare_a, inputs=inputs).cut_at(site_a, first)
    upper = CutModel.of(model_b, prepare=prepare_b, inputs=inputs).cut_at(site_b, first, check=True)
    models, sites = (lower, upper), ([lower.cut.site], [upper.cut.site])
    joints = [Joint(Form.of(lower.cut.site), Form.of(upper.cut.site), resize) for _ in fits]
    caveats = [f"{model.name} has {model.weights}" for model in models if model.weights.startswith("random weights")]
    caveats += [text for model in models if (text := model.mixing_at([model.cut.site], first))]
    moments = sums_of_pairs(models, sites, {(0, 0): joints[0]}, batches, precision, max_rows)[0, 0].joint(0, 0)
    trained = JointTrainer(lower, upper, joints[0], moments, kept).train(tasks) if tasks else []
    results = []
    for how, joint in zip(fits, joints, strict=True):
        lines: list[dict[str, float]] = []
        if isinstance(how, TaskLoss):
            history = trained.pop(0)
            affine, lines = history.affine, history.lines
        else:
            affine = how(moments)
        model = StitchedNetwork(lower, filled(joint, affine, upper.model), upper)
        results.append(Stitch(model, how.name, dict(affine.report), moments.n, lines, tuple(dict.fromkeys(caveats))))
    return results if as_list is fit else results[0]


def find_fits(fits: Sequence[AnyFit]) -> list[Fit | TaskLoss]:
    """Closed forms, or training, by name and options; equal validation data are read once."""
    read: dict[int, Any] = {}
    resolved: list[Fit | TaskLoss] = []
    for fit in fits:
        if isinstance(fit, str):
            name, options = parse_call(fit)
            fit = TaskLoss.parse(options) if name == NAME else find_fit(fit, also=(NAME,))
        elif not isinstance(fit, (Fit, TaskLoss)):
            raise TypeError(f"a fit is named by a text like 'least_squares' or 'task_loss(seed=1)', got {fit!r}")
        if isinstance(fit, TaskLoss) and fit.validation is not None:
            if id(fit.validation) not in read:
                read[id(fit.validation)] = read_inputs(fit.validation, None)
            fit = replace(fit, validation=read[id(fit.validation)])
        resolved.append(fit)
    return resolved


@torch.no_grad()
def filled(joint: Joint, affine: Affine, like: nn.Module) -> Joint:
    """Copy these numbers into the joint, in the precision and on the device of the network above it; return it."""
    first = next(like.parameters(), affine.weight)
    joint.to(first.device, first.dtype)
    joint.weight.copy_(affine.weight)
    if joint.bias is not None:
        joint.bias.copy_(affine.bias)
    return joint


@dataclass(frozen=True)
class Stitch:
    """A stitched network, and how its joint was fitted or trained."""

    model: StitchedNetwork
    fit: str
    report: dict[str, Any]
    n: int  # rows that the fit rests on
    history: list[dict[str, float]] = field(default_factory=list)  # the start and each epoch of training
    caveats: tuple[str, ...] = ()  # about the two networks; not saved

    def __repr__(self) -> str:
        """Name the networks, sites and fit; printing the modules would fill a screen."""
        a, b = self.model.lower, self.model.upper
        ends = f"{a.name} up to {a.cut.site.label!r}, {b.name} from {b.cut.site.label!r} on"
        return f"Stitch({ends}, fit={self.fit!r}, n={self.n})"

    def _repr_html_(self) -> str:
        a, b = self.model.lower, self.model.upper
        numbers = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in self.report.items()}
        last = {f"after training: {name}": f"{value:.4g}" for name, value in (self.history or [{}])[-1].items()}
        facts = {
            "from": f"{a.name}, up to {a.cut.site.label}",
            "into": f"{b.name}, from {b.cut.site.label} on",
            "fit": self.fit,
            "rows": f"{self.n:,}",
            **numbers,
            **last,
            "caveats": "; ".join(self.caveats),
        }
        return html_facts("Stitched network", facts)

    def evaluate(self, data: Any, *, max_rows: int | None = None) -> dict[str, float]:
        """Measure how well B does its job with A's representation; `data` should not be those of the fit.

        agreement_a, agreement_b: share of inputs that get the same answer as from A, or from B. cross_entropy: to B's
        soft answers, in nats. With labels also accuracy, accuracy_a, accuracy_b, and relative_accuracy, which is the
        accuracy divided by B's (left out if B gets nothing right).
        """
        a, b = self.model.lower, self.model.upper
        tally = evaluate_joints(a, [a.cut.site], {(0, 0): self.model.joint}, [b], data, max_rows)[0, 0]
        return {**tally.numbers(), "n": float(tally.n)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the joint and how it was fitted, but not the models, to a safetensors file for `Stitch.load`."""
        joint = self.model.joint
        about = {
            "fit": self.fit,
            "n": self.n,
            "report": self.report,
            "history": self.history,
            "resize": joint.resize,
            "a": _describe(self.model.lower, joint.source),
            "b": _describe(self.model.upper, joint.target),
        }
        text = json.dumps(plain_json(about), allow_nan=False)
        return write_tensors(path, KIND, VERSION, dict(joint.named_parameters()), {"about": text})

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        model_a: Any,
        model_b: Any,
        *,
        example: Any = None,
        prepare_a: Callable[[Any], Any] | None = None,
        prepare_b: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
    ) -> Stitch:
        """Load what `save` wrote, given the same two models (modules or specifications).

        Models whose weights differ are refused. `prepare_a`, `prepare_b` and `inputs` are functions, which a file
        cannot hold: pass those that `stitch` got. `example`: a batch of data to try the cuts on, needed only if the
        models take more than tensors; otherwise numbers of the right shape are made up.
        """
        about, joint, examples = _read(Path(path))
        batch = None if example is None else look_into(example)[0]
        lower, upper = (
            _cut_as_saved(CutModel.of(model, prepare=prepare, inputs=inputs), side, about[side], batch, examples[side])
            for side, model, prepare in (("a", model_a, prepare_a), ("b", model_b, prepare_b))
        )
        for model, form in ((lower, joint.source), (upper, joint.target)):
            site = model.cut.site
            if Form.of(site) != form:
                raise ValueError(f"{model.name} has {Form.of(site)} at {site.label!r}, but the joint is for {form}")
        like = next(upper.model.parameters(), joint.weight)
        joint.to(like.device, like.dtype)
        return Stitch(StitchedNetwork(lower, joint, upper), about["fit"], about["report"], about["n"], about["history"])


# Stitching at many sites

Pairs = Literal["diagonal", "all"]
MEASURES = ("linear_cka", "regression_r2")


# The numbers of a stitched network: which way is better, bounds, the value for B stitched to itself, what it is.
NUMBERS = {
    "relative_accuracy": Number(
        "up",
        (0.0, None),
        1.0,
        "Accuracy of the stitched network over that of B alone: 1 if B does as well with what A represents.",
    ),
    "accuracy": Number("up", (0.0, 1.0), None, "Share of inputs that the stitched network answers correctly."),
    "agreement_b": Number("up", (0.0, 1.0), 1.0, "Share of inputs that the stitched network answers as B does."),
    "agreement_a": Number("up", (0.0, 1.0), 1.0, "Share of inputs that the stitched network answers as A does."),
    "cross_entropy": Number(
        "down",
        (0.0, None),
        None,
        "Mean cross-entropy of the stitched network's soft answers against those of B, in nats.",
    ),
}
_DIAGONAL = "sites were stitched in order, so there are no values off the diagonal; pairs='all' stitches every pair"
_NOT_HELD_OUT = "evaluated on the data of the fit, not on held-out data: give test="
_POSITIONS = "every position of an input is a row, as in the fit; such rows are correlated, so there is no interval"
_UNLABELLED = "the test data have no labels, so there is no accuracy"


def stitch_sites(
    model_a: Any,
    model_b: Any,
    data: Any = None,
    *,
    test: Any = None,
    names: Sequence[str | None] | None = None,
    sites: Any = None,
    sites_a: Any = None,
    sites_b: Any = None,
    pairs: Pairs = "diagonal",
    fit: AnyFit = "least_squares",
    measures: str | Measure | Sequence[str | Measure] = MEASURES,
    precision: Precision = "float32",
    resize: Resize = "interpolate",
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    max_rows: int | None = None,
) -> Comparison:
    """At which layers can B do its job with A's representation, and do similarity measures agree?

    Stitch pairs of sites as `stitch` does, from one pass of both networks over `data`: with pairs="diagonal" the first
    site of A with the first of B and so on, with "all" every pair. The stitched networks are evaluated on `test`, which
    should be held out (None: on `data`, with a caveat). Values are relative_accuracy and accuracy (with labels),
    agreement_b, agreement_a and cross_entropy, as in `Stitch.evaluate`, with 95 % intervals over inputs; and the
    `measures`, from the same sums as the fits, so over every position of every input.

    `sites`, `sites_a`, `sites_b`: as in `compare`, with its default. Sites of B that something bypasses (a skip
    connection) are left out with a caveat, or refused if they are named. `names` gives the models names, as does
    `stitch_sites({"base": a, "tuned": b}, data)`. `fit` is a closed form, or task_loss, which is trained for one pair
    after the other. `max_rows`: how many inputs to fit on, and to evaluate on. For the rest see `stitch`.
    """
    one_of(precision, "precision", PRECISIONS)
    one_of(pairs, "pairs", ("diagonal", "all"))
    (how,) = find_fits([fit])
    things, all_names, data = models_and_data(model_a, model_b, data, names)
    if len(things) != 2:
        raise ValueError(f"two models are stitched, the lower part of A to the upper part of B; got {len(things)}")
    (model_a, model_b), (name_a, name_b) = things, all_names
    if data is None:
        raise TypeError("stitching needs data, the third argument: (model_a, model_b, data)")
    chosen = find_measures(measures, of="layers") if measures else ()
    for measure in chosen:
        if measure.reads not in (Alignment, UncentredAlignment, Covariances, Neurons):
            raise ValueError(
                f"{measure.name} needs more than the sums that stitching keeps; "
                "sosie.compare(…, rows='positions') gives it"
            )
    kept = read_inputs(data, max_rows) if isinstance(how, TaskLoss) else None  # training reads them many times
    source = data if kept is None else in_chunks(kept)
    if test is None and isinstance(source, Iterator):
        raise ValueError("these data can be read only once, by the fit: give test=, or data that can be read again")
    first, batches = look_into(source)
    models = (
        CutModel.of(model_a, name=name_a, prepare=prepare_a, inputs=inputs),
        CutModel.of(model_b, name=name_b, prepare=prepare_b, inputs=inputs),
    )
    number_duplicates(models)
    grid = find_pairs(models, for_each("sites", 2, sites_a, sites_b, sites), pairs, first, resize)
    mixing = [model.mixing_at(sites, first) for model, sites in zip(models, (grid.a, grid.b), strict=True)]
    sums = sums_of_pairs(models, (grid.a, grid.b), grid.joints, batches, precision, max_rows)

    cut_a = functools.cache(lambda i: models[0].cut_at(grid.a[i].label, first))
    for (i, j), joint in list(grid.joints.items()):
        try:
            moments = sums[i, j].joint(i, j)
            if isinstance(how, TaskLoss):
                affine = JointTrainer(cut_a(i), grid.uppers[j], joint, moments, kept).train([how])[0].affine
            else:
                affine = how(moments)
            filled(joint, affine, models[1].model)
        except (ValueError, torch.linalg.LinAlgError) as error:
            grid.refused[i, j] = str(error)
            del grid.joints[i, j]
    if not grid.joints:
        raise ValueError(f"no pair of sites can be fitted: {next(iter(grid.refused.values()))}")
    tallies = evaluate_joints(models[0], grid.a, grid.joints, grid.uppers, source if test is None else test, max_rows)

    # The results, as a comparison: how the stitched networks do, and the values of the measures
    side_a, side_b = map(_side, models, (grid.a, grid.b), grid.left_out)
    shared = [Caveat(f"undefined: {why}", *grid.labels(pair), undefined=True) for pair, why in grid.refused.items()]
    if pairs == "diagonal" and len(grid.a) > 1:
        shared.append(Caveat(_DIAGONAL))
    if grid.leaking:
        left_out = ", ".join(grid.leaking)
        shared.append(Caveat(f"left out, since something goes around these sites of {models[1].name}: {left_out}"))
    shared += of_left_out(side_a, side_b)
    shared += [Caveat(text) for text in dict.fromkeys(mixing) if text]
    tally = next(iter(tallies.values()))
    numbers = tally.numbers()
    values = {}
    for name in NUMBERS:
        if name in numbers:
            caveats = shared if test is not None else [*shared, Caveat(_NOT_HELD_OUT)]
            if name == "agreement_b" and "accuracy" not in numbers:
                caveats = [*caveats, Caveat(_UNLABELLED)]
            values[name] = _counted(name, tallies, grid, how.name, caveats)
    for measure in chosen:
        values[measure.name] = _measured(measure, sums, grid, shared)
    settings = {"fit": how.name, "pairs": pairs, "precision": precision, "resize": resize}
    settings |= {} if max_rows is None else {"max_rows": str(max_rows)}
    described = [model.describe() for model in models]
    about = provenance(settings=settings, models=described, data=data, test=test, inputs=tally.n)
    if "accuracy_b" in numbers:
        about["accuracy"] = [numbers.get("accuracy_a"), numbers["accuracy_b"]]
    return Comparison(side_a, side_b, values, "positions", about, kind="stitching")


# Which sites are stitched, and how: pairs, cuts of B, and the joint of each


@dataclass
class SitePairs:
    """The sites of both networks, numbered in execution order, and the joints between them."""

    a: tuple[Site, ...]
    b: tuple[Site, ...]
    uppers: tuple[CutModel, ...]  # B, cut at each of its sites
    leaking: tuple[str, ...]  # sites of B left out because something bypasses them
    left_out: tuple[dict[str, str], dict[str, str]]  # sites of A and of B that give no rows, and why
    joints: dict[Pair, Joint] = field(default_factory=dict)
    refused: dict[Pair, str] = field(default_factory=dict)  # pairs that cannot be joined or fitted, and why

    def labels(self, pair: Pair) -> tuple[str, str]:
        return self.a[pair[0]].label, self.b[pair[1]].label

    def matrix(self, values: dict[Pair, float]) -> np.ndarray:
        matrix = np.full((len(self.a), len(self.b)), np.nan)
        for pair, value in values.items():
            matrix[pair] = value
        return matrix


def find_pairs(
    models: tuple[CutModel, CutModel], sites: Sequence[Any], pairs: Pairs, batch: Any, resize: Resize
) -> SitePairs:
    """Pair up the sites, cut B at each of its own, and see which pairs can be joined."""
    (a, without_a), (b, without_b) = (_look(model, chosen, batch) for model, chosen in zip(models, sites, strict=True))
    if pairs == "diagonal" and len(a) != len(b):
        names = [listed((site.label for site in side), 4) for side in (a, b)]
        raise ValueError(
            f"sites are paired in order, but there are {len(a)} of A ({names[0]}) and {len(b)} of B ({names[1]}): "
            "choose equally many with sites_a= and sites_b=, or pairs='all'"
        )
    uppers: dict[int, CutModel] = {}
    leaking = []
    for j, site in enumerate(b):
        try:
            uppers[j] = models[1].cut_at(site.label, batch, check=True)
        except LeakingCut:
            if sites[1] is not None:  # the user chose them
                raise
            leaking.append(site.label)
    if not uppers:
        raise LeakingCut(f"something goes around every site of {models[1].name}: {', '.join(leaking)}")
    of_a = tuple(a[j] for j in uppers) if pairs == "diagonal" else a
    of_b = tuple(b[j] for j in uppers)
    grid = SitePairs(of_a, of_b, tuple(uppers.values()), tuple(leaking), (without_a, without_b))
    for j in range(len(grid.b)):
        for i in [j] if pairs == "diagonal" else range(len(grid.a)):
            try:
                grid.joints[i, j] = Joint(Form.of(grid.a[i]), Form.of(grid.b[j]), resize)
            except ValueError as error:
                grid.refused[i, j] = str(error)
    if not grid.joints:
        raise ValueError(f"no pair of sites can be joined: {next(iter(grid.refused.values()))}")
    return grid


def _look(model: CutModel, sites: Any, batch: Any) -> tuple[tuple[Site, ...], dict[str, str]]:
    """The sites that a first run reaches, in execution order, and the sites that give no rows, with the reason."""
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
    low, high = (grid.matrix({pair: ends[k] for pair, ends in intervals.items()}) for k in (0, 1))
    how = "Wilson's interval" if name in PROPORTIONS else "intervals by the error of a mean"
    how = "intervals by the delta method for a ratio" if name == "relative_accuracy" else how
    return Estimate.of(
        NUMBERS[name],
        grid.matrix(values),
        n=next(iter(tallies.values())).n,
        statistic=f"answers of networks stitched by {fit}; {how}",
        interval=(low, high),
        caveats=caveats,
    )


def _measured(measure: Measure, sums: dict[Pair, JointSums], grid: SitePairs, shared: list[Caveat]) -> Estimate:
    """The values of a measure, from the sums of the fits."""
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


# A saved stitch: the joint's numbers as safetensors, the rest as JSON in the metadata

KIND, VERSION = "stitch", 2
MADE_UP = 2  # inputs of a made-up example
WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXAMPLES = (*WEIGHTS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_TENSOR = {"shape": [int], "dtype": str, "mask": bool}
_NUMBERS = {str: (float, bool, str, None)}
_SIDE = {
    "name": str,
    "site": str,
    "form": {"channels": int, "space": [int], "tokens": bool},
    "digest": str,
    "prepared": (str, None),
    "example": ({"args": [_TENSOR], "kwargs": {str: _TENSOR}}, None),
}
_SCHEMA = {"fit": str, "n": int, "report": _NUMBERS, "history": [_NUMBERS], "resize": str, "a": _SIDE, "b": _SIDE}


def _describe(model: CutModel, form: Form) -> dict[str, Any]:
    def tensor(name: str, value: Tensor) -> dict[str, Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape[1:]), "dtype": dtype, "mask": is_mask(name, value)}

    call = model.cut.example
    example = None  # of a model that is called with more than tensors
    if all(isinstance(value, Tensor) for value in (*call.args, *call.kwargs.values())):
        described = call.map(tensor)
        example = {"args": list(described.args), "kwargs": described.kwargs}
    return {
        "name": model.name,
        "site": model.cut.site.label,
        "form": asdict(form),
        "digest": digest_of(model.model.state_dict()),
        "prepared": None if model.prepare is None else repr(model.prepare).partition(" at 0x")[0],
        "example": example,
    }


def _read(path: Path) -> tuple[dict[str, Any], Joint, dict[str, Any]]:
    """Return the record in a file, its joint, and for each side an example of the model's arguments, or None."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    text, tensors = read_tensors(path, KIND, VERSION)
    with reading(path):
        about = json.loads(text["about"])
        check_schema(path, about, _SCHEMA)
        if not 2 <= about["n"] < 2**63:
            raise ValueError(f"a fit cannot rest on {str(about['n'])[:20]} rows")
        forms = [Form(**{**about[side]["form"], "space": tuple(about[side]["form"]["space"])}) for side in "ab"]
        for form in forms:  # before the joint, which allocates as much memory as the forms say
            if min(form.channels, *form.space, 1) < 1 or form.channels > 2**20:
                raise ValueError(f"an activation cannot have {form.channels} channels at {form.space} positions")
        shapes = {"weight": (forms[1].channels, forms[0].channels), "bias": (forms[1].channels,)}
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes.get(name):
                raise ValueError(f"{name} is {tuple(tensor.shape)}, but a joint of these sites has {shapes}")
            if tensor.dtype not in WEIGHTS or not bool(tensor.isfinite().all()):
                raise ValueError(f"the {name} is of type {tensor.dtype}, or not finite")
        joint = Joint(forms[0], forms[1], about["resize"], bias="bias" in tensors)
        joint.to(tensors["weight"].dtype).load_state_dict(tensors)
        examples = {side: about[side]["example"] and _made_up(about[side]["example"]) for side in "ab"}
    return about, joint, examples


def _made_up(example: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Seeded numbers between 0 and 1 in the shapes of an example; tokens are 0, and nothing is masked."""
    generator = torch.Generator().manual_seed(0)

    def tensor(facts: dict[str, Any]) -> Tensor:
        dtype, shape = getattr(torch, facts["dtype"], None), [MADE_UP, *facts["shape"]]
        if dtype not in EXAMPLES or min(shape) < 1 or math.prod(shape) > 2**30:
            raise ValueError(f"an input cannot be {facts['dtype']!r} of shape {shape}")
        if facts["mask"]:
            return torch.ones(shape, dtype=dtype)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        return torch.rand(shape, generator=generator).to(dtype)

    return tuple(map(tensor, example["args"])), {key: tensor(facts) for key, facts in example["kwargs"].items()}


def _cut_as_saved(model: CutModel, side: str, record: dict[str, Any], batch: Any, example: Any) -> CutModel:
    """Cut a model at the site in the file, if it is the model that was stitched; `batch` or `example` to try it on."""
    name = f"model {side.upper()}"
    if digest_of(model.model.state_dict()) != record["digest"]:
        raise ValueError(f"{name} is not the model that was stitched ({record['name']}): its weights differ")
    before = record["prepared"]
    if (model.prepare is None) != (before is None):
        how = f"was prepared by {before}: give prepare_{side}=" if before else "was not prepared"
        raise ValueError(f"when it was stitched, the input of {name} {how}")
    if batch is not None:
        return model.cut_at(record["site"], batch)
    if example is None:
        raise ValueError(f"{name} takes more than tensors, so give a batch of its data as example=")
    call = CallArguments(*example).map(lambda _, leaf: leaf.to(model.home))
    try:
        model.cut = Cut(model.model, record["site"], *call.args, **call.kwargs)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(
            f"{name} fails on made-up numbers in the shapes of the file, so give a batch of its data as example=: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model

"""A measure: a pure function of a view, and the facts about it that the laws test checks."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .. import plugins
from ..checks import call_text, check_options, parse_call
from ..linalg import near_one, widened
from ..notebook import html_facts
from ..process_state import without_autocast
from ..stats import View
from ..stats.entries import Entries
from ..stats.outputs import Outputs, OutputSums
from ..stats.repetitions import PairedRepetitions, Repetitions
from ..stats.sample import Sample
from ..stats.splits import Splits
from ..stats.views import Alignment, Covariances, Neurons, PairedRows
from ..stats.weights import Atoms, LinearMaps, Weights, linear_maps
from .transforms import Aligner

MEASURES: dict[str, Measure] = {}

FewRows = Literal["biased", "saturates", "saturates in x", "infinite"]
ByChance = Callable[[int, int, int], tuple[float, float]]

# Transformations of the rows of x that may leave the value unchanged; the laws test has one for each.
TRANSFORMATIONS = {
    "permutation": "neurons in another order",
    "rotation": "any orthogonal map of the neurons",
    "stretch": "each neuron times a positive number of its own",
    "linear": "any invertible map of the neurons",
    "scale": "all times one positive number",
    "shift": "a vector added to every row",
}
UNKNOWN = "unknown"  # a fact that nobody has declared; a measure of sosie's declares them all
FACTS = (
    "name", "summary", "reads", "bounds", "same", "closer", "invariant", "symmetric", "differentiable", "paired",
    "same_width", "needs", "aligned_by", "chance", "cost", "paper", "defaults",
)  # fmt: skip
USUAL = ("debiased_cka", "linear_cka", "mean_cca", "cca_r2", "procrustes_distance", "procrustes_angle")
IMPLIED = {"rotation": {"permutation"}, "linear": {"permutation", "rotation", "stretch", "scale"}, "stretch": {"scale"}}


class UnknownMeasure(KeyError):
    """No measure has that name; the message names the nearest."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Measure:
    """A measure of the similarity of two sets of rows, with declared facts."""

    name: str  # with its options: "mutual_knn(k=5)"
    function: Callable[..., Tensor]
    reads: type
    bounds: tuple[float | None, float | None]
    same: float | None  # the value of rows with themselves; None if it depends on the rows, or is infinite
    closer: Literal["up", "down"]
    invariant: frozenset[str]  # transformations of either side that leave the value unchanged
    summary: str  # the first line of the docstring
    symmetric: bool = True
    differentiable: bool = True
    precise: bool = False  # needs float64 products, since it inverts covariances or is the root of a small difference
    cost: str = UNKNOWN  # of a pair of sites, for n rows of p and q neurons
    paper: str = UNKNOWN  # keys of `sosie.papers.PAPERS`, separated by commas
    chance: str = UNKNOWN  # the value of unrelated rows, in words
    few_rows: FewRows | None = None  # the failure when a side has more neurons than there are rows
    paired: bool = True  # row i of x must belong to row i of y
    same_width: bool = False  # both sides must have equally many neurons
    needs: frozenset[str] = frozenset()  # what it reads beside x and y: "inputs", "labels"
    all_pairs: bool = False  # whether it also takes `AllCovariances` or `AllPairedRows`, the views of all pairs at once
    share: bool = False  # whether it is the share of inputs that count, which has an exact interval
    by_chance: ByChance | None = None  # mean and spread by chance, from n and both ranks
    aligned_by: Aligner | None = None  # what `sosie.align` returns for it
    options: dict[str, Any] = field(default_factory=dict)
    # By option: the facts that are others once it is set, to anything but None and False.
    with_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, view: View) -> Tensor:
        """The value from a view: a scalar, or every pair of sites at once where the view broadcasts."""
        return self.function(view, **self.options)

    def of(
        self,
        x: Tensor,
        y: Tensor,
        inputs: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        kind: str = "auto",
    ) -> Tensor:
        """The value for two sets of paired rows, in float32 at least; differentiable where the measure is.

        `labels` and `kind` are for measures that read outputs: see `sosie.measure`.
        """
        with without_autocast(y.device.type):
            if self.reads_outputs:
                return self.from_outputs(OutputSums.of(x, y, labels=labels, kind=kind))
            if self.reads_repetitions:
                return self(PairedRepetitions(Repetitions.of(x, "x"), Repetitions.of(y, "y")))
            x, y = widened(x), widened(y)
            if issubclass(self.reads, LinearMaps):
                return self(linear_maps(x, y, self.reads))
            if self.reads is Atoms:
                return self(Atoms(x.flatten(1)[None], y.flatten(1)[None])).squeeze()
            if "scale" in self.invariant:
                x, y = near_one(x), near_one(y)
            return self.from_sample(Sample.of(x, y, inputs=None if inputs is None else near_one(inputs)))

    def __reduce__(self) -> tuple[Any, ...]:
        return find, (self.name,)  # by name, since the name of the function is that of the measure

    def _repr_html_(self) -> str:
        low, high = self.bounds
        extent = f"{'−∞' if low is None else f'{low:g}'} to {'∞' if high is None else f'{high:g}'}"
        facts = {
            "what it is": self.summary,
            "range": f"{extent}, {'higher' if self.closer == 'up' else 'lower'} is more alike",
            "with itself": "depends on the rows" if self.same is None else f"{self.same:g}",
            "invariant to": ", ".join(sorted(self.invariant)),
            "by chance": self.chance,
            "with few rows": self.few_rows,
            "needs": ", ".join(sorted(self.needs)),
            "aligned by": None if self.aligned_by is None else self.aligned_by.name,
            "symmetric": "yes" if self.symmetric else "no",
            "differentiable": "yes" if self.differentiable else "no",
            "cost": self.cost,
            "paper": self.paper,
        }
        return html_facts(self.name, facts)

    @property
    def reads_outputs(self) -> bool:
        """Whether it compares the outputs of models, not rows of neurons."""
        return issubclass(self.reads, Outputs)

    @property
    def reads_entries(self) -> bool:
        """Whether it compares entry by entry, which takes two sites that belong together."""
        return issubclass(self.reads, Entries)

    @property
    def reads_weights(self) -> bool:
        """Whether it compares the weights of models, without data."""
        return issubclass(self.reads, Weights)

    @property
    def reads_repetitions(self) -> bool:
        """Whether it compares noisy responses, (n, repeats, p)."""
        return issubclass(self.reads, PairedRepetitions)

    @property
    def reads_layers(self) -> bool:
        """Whether it compares rows of neurons, as `compare` does: none of the above."""
        return not (self.reads_outputs or self.reads_entries or self.reads_weights or self.reads_repetitions)

    def from_outputs(self, sums: OutputSums, *, jackknife: bool = False) -> Tensor:
        """The value from sums over outputs; with `jackknife`, one value for each group of inputs left out."""
        return self(sums.view(self.reads, jackknife=jackknife))

    def from_sample(self, sample: Sample) -> Tensor:
        """The value for the first site of each side of a sample."""
        if "inputs" in self.needs and sample.inputs is None:
            raise ValueError(f"{self.name} also needs the inputs of the networks: inputs= (n, …), paired with the rows")
        self.check_widths(sample.xs[0].shape[1], sample.ys[0].shape[1])
        if issubclass(self.reads, Entries):
            return self(Entries.of(sample.xs[0], sample.ys[0]))
        if issubclass(self.reads, Alignment):
            return self(sample.alignment(self.reads)).squeeze()
        if issubclass(self.reads, Covariances):
            return self(sample.covariances())
        if issubclass(self.reads, Neurons):
            return self(sample.neurons())
        if self.reads is Splits:
            return self(sample.splits(**self.folds))
        return self(sample.paired())

    def check_widths(self, x: int, y: int) -> None:
        """Raise if the measure compares neuron by neuron, and the sides have other numbers of them."""
        if self.same_width and x != y:
            raise ValueError(f"{self.name} compares neuron by neuron, so needs equal widths, got {x} and {y}")

    def using(self, **options: Any) -> Measure:
        """This measure with other options, which are part of its name."""
        check_options(options, self.defaults, self.base)
        changed = {**self.options, **options}
        facts: dict[str, Any] = {}
        for option, others in self.with_options.items():
            if changed.get(option) not in (None, False):
                facts |= others
        return replace(self, name=call_text(self.base, changed), options=changed, **facts)

    @property
    def folds(self) -> dict[str, int]:
        """Which folds a measure of held-out rows reads."""
        return {name: self.defaults[name] for name in ("folds", "seed")} if self.reads is Splits else {}

    @property
    def base(self) -> str:
        return self.function.__name__

    @property
    def defaults(self) -> dict[str, Any]:
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return {p.name: self.options.get(p.name, p.default) for p in parameters}

    def facts(self) -> dict[str, Any]:
        """The declared facts by name, as JSON holds them, with the options as "defaults"."""
        return {
            **{name: getattr(self, name) for name in FACTS},
            "reads": self.reads.__name__,
            "reads_rows": issubclass(self.reads, PairedRows),
            "invariant": sorted(self.invariant),
            "needs": sorted(self.needs),
            "package": self.function.__module__.partition(".")[0],
            "aligned_by": None if self.aligned_by is None else self.aligned_by.name,
        }


def define(
    *,
    reads: type,
    bounds: tuple[float | None, float | None],
    closer: Literal["up", "down"],
    invariant: Iterable[str],
    same: float | Literal["closest"] | None = "closest",
    needs: Iterable[str] = (),
    **facts: Any,
) -> Callable[[Callable[..., Tensor]], Measure]:
    """Register a function of a view as a measure under its own name, with its facts, which are the fields of `Measure`.

    Invariances that follow from others need not be declared, nor the value of rows with themselves if it is the bound
    on the side of `closer`: 1 for a cosine, 0 for a distance. `chance`, `cost` and `paper` are for people, and may be
    left out of a measure of your own.
    """
    unknown = set(invariant) - set(TRANSFORMATIONS)
    if unknown:
        raise ValueError(f"no transformation is called {sorted(unknown)}; there are {', '.join(TRANSFORMATIONS)}")
    low, high = (None if bound is None else float(bound) for bound in bounds)
    if same == "closest":
        same = high if closer == "up" else low
    every = frozenset(invariant).union(*(IMPLIED.get(name, set()) for name in invariant))

    def register(function: Callable[..., Tensor]) -> Measure:
        name, summary = function.__name__, inspect.cleandoc(function.__doc__ or "").split("\n", 1)[0]
        if (known := MEASURES.get(name)) and known.function.__module__ != function.__module__:
            raise ValueError(f"a measure named {name!r} is already defined in {known.function.__module__}")
        needed = frozenset(needs)
        measure = Measure(name, function, reads, (low, high), same, closer, every, summary, needs=needed, **facts)
        MEASURES[name] = measure
        return measure

    return register


def find(measure: str | Measure) -> Measure:
    """The measure of that name; options may follow as Python literals: "mutual_knn(k=5)"."""
    if isinstance(measure, Measure):
        return measure
    if callable(measure):
        raise TypeError(
            f"{getattr(measure, '__name__', measure)!r} is a function without facts: declare it a measure with "
            "@sosie.measures.define(reads=sosie.stats.PairedRows, bounds=(0, 1), closer='up', invariant={…}), where "
            "pair.x.rows and pair.y.rows are the two sides"
        )
    if not isinstance(measure, str):
        raise TypeError(f"a measure is given by its name, got {type(measure).__name__}")
    name, options = parse_call(measure)
    if name not in MEASURES and not _load(name):
        small = name.lower()
        known = [*MEASURES, *plugins.names("measures")]
        inside = [m for m in known if small and small in m]
        # The usual ones come first: of CKA debiased_cka and linear_cka.
        inside = sorted(inside, key=lambda m: USUAL.index(m) if m in USUAL else len(USUAL))[:4]
        near = inside or difflib.get_close_matches(small, known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnknownMeasure(f"no measure is called {name!r}{hint} (`sosie measures` lists them)")
    return MEASURES[name].using(**options) if options else MEASURES[name]


def _load(name: str) -> bool:
    """Return whether another package defines a measure of that name."""

    def defined(_: Any) -> bool:
        if name not in MEASURES:
            raise ValueError("importing it defines no measure of that name (with sosie.measures.define)")
        return True

    return bool(plugins.load("measures", name, defined))


def load_all() -> list[Measure]:
    """All measures, with those of other packages."""
    for name in plugins.names("measures"):
        if name not in MEASURES:
            try:
                _load(name)
            except plugins.BrokenPlugin as error:
                warnings.warn(f"{error}; it is left out", stacklevel=2)
    return list(MEASURES.values())


def find_all(measures: str | Measure | Iterable[str | Measure]) -> list[Measure]:
    """The measures of these names, or of a single one."""
    found = [find(m) for m in ([measures] if isinstance(measures, str) or callable(measures) else measures)]
    if not found:
        raise ValueError("no measures given; `sosie measures` lists them")
    return found


def snap_to_bounds(value: Tensor, measure: Measure, digits: torch.dtype = torch.float64) -> Tensor:
    """The value, set to a bound if it exceeds it by rounding alone; larger excesses stay visible."""
    slack = 1e-12 if digits == torch.float64 else 1e-6
    low, high = measure.bounds
    if low is not None:
        value = torch.where((value < low) & (value >= low - slack), torch.full_like(value, low), value)
    if high is not None:
        value = torch.where((value > high) & (value <= high + slack), torch.full_like(value, high), value)
    return value


def as_array(value: Tensor) -> np.ndarray:
    """The value as results hold it: in float64, on the CPU."""
    return value.detach().cpu().double().numpy()

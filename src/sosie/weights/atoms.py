"""Filter atoms layer by layer: of models that share their coefficients, or that are decomposed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import unwrap
from ..engine.uncertainty import Chance, judged
from ..measures import Measure, atom_cosine, snap_to_bounds
from ..models import AtomConv2d, atom_layers, recompose, share_coefficients
from ..models.atoms import check_count, check_shared, check_weight, relative_error, replace_convolutions, why_not
from ..progress import Progress
from ..results import Array, Caveat, Estimate, Side
from ..stats import Atoms, AtomTable
from .maps import WeightSource, shuffled
from .matching import match_weights
from .tensors import ALL, tensor_sites

OTHERS = (
    "NaN for pairs of different layers: their coefficients are not shared, so that no atom of one belongs to another"
)
SIZES = "NaN where two layers do not have as many atoms of one size"
STARTED = (
    "models that started from the same atoms are near 1 before they have learned anything: base= gives the cosine of "
    "how far they moved"
)
NO_ATOMS = "it is not made of atoms"

Layers = dict[str, Tensor]  # of each layer its atoms (m, height × width), in float64


@dataclass(frozen=True, eq=False)
class AtomSide:
    """A model's atoms, and the sites asked for."""

    name: str
    sites: tuple[str, ...]
    layers: Layers

    @property
    def side(self) -> Side:
        shapes = [tuple(self.layers[site].shape) if site in self.layers else () for site in self.sites]
        return Side(self.name, self.sites, tuple(shape[0] if shape else 0 for shape in shapes), tuple(shapes))


def atom_sites(model: nn.Module, sites: Any, layers: Sequence[str]) -> tuple[str, ...]:
    """Names of the sites asked for; None: layers of atoms in the order of registration, then "all"."""
    return (*layers, ALL) if sites is None else tuple(tensor_sites(model, sites))


def atoms_of(model: nn.Module) -> Layers:
    """The atoms of a model's layers as they are."""
    return {name: layer.atoms.detach().double().flatten(1).cpu() for name, layer in atom_layers(unwrap(model)).items()}


def shared_layers(
    named: Sequence[tuple[str, nn.Module]], base: nn.Module | None, measures: Sequence[Measure]
) -> list[Layers]:
    """The atoms of models that must share their coefficients; with a base, less those of the base."""
    for name, model in [*named, *([] if base is None else [("the base", base)])]:
        if not atom_layers(unwrap(model)):
            raise ValueError(
                f"{name} has no layer of atoms; joint=m decomposes models together (joint=9, say), and decompose(model"
                ", m) takes one model apart, whose copies can then be trained on coefficients that they share"
            )
    # The span of atoms does not depend on coefficients; their differences and their cosine do.
    if base is not None or any("linear" not in measure.invariant for measure in measures):
        every = [*named, *([] if base is None else [("the base", base)])]
        check_shared([(name, unwrap(model)) for name, model in every])
    found = [atoms_of(model) for _, model in named]
    return found if base is None else [less(layers, atoms_of(base)) for layers in found]


def less(layers: Layers, base: Layers) -> Layers:
    """What training made of the atoms."""
    if layers.keys() != base.keys():
        raise ValueError(f"the base has layers of atoms {', '.join(base)}, the model {', '.join(layers)}")
    return {name: atoms - base[name] for name, atoms in layers.items()}


@dataclass(frozen=True, eq=False)
class AtomComparison:
    """All pairs of models by their atoms."""

    sides: Sequence[AtomSide]
    measures: Sequence[Measure]
    statistic: str
    anywhere: bool = False  # whether different layers can be compared too
    caveats: tuple[Caveat, ...] = ()
    redrawn: Callable[[int, int, int], tuple[Layers, Layers]] | None = (
        None  # of a pair and a draw, B's weights shuffled
    )
    draws: int = 0

    def values(self, i: int, j: int) -> dict[str, Estimate]:
        a, b = self.sides[i], self.sides[j]
        drawn = self._drawn(i, j)
        found = {}
        for measure in self.measures:
            value, more = matrix(measure, a, b, self._anywhere(measure))
            chance = judged(measure, value, np.stack(drawn[measure.name])) if drawn else None
            found[measure.name] = self._values(measure, value, more, chance, a)
        return found

    def value(self, i: int, j: int, name: str) -> Array:
        measure = next(measure for measure in self.measures if measure.name == name)
        return matrix(measure, self.sides[i], self.sides[j], self._anywhere(measure))[0]

    def whole(self, name: str) -> Array | None:
        """Model by model, from one table; None where models are not alike enough to be stacked."""
        measure = next((measure for measure in self.measures if measure.name == name), None)
        first = self.sides[0]
        shapes = {layer: atoms.shape for layer, atoms in first.layers.items()}
        alike = all({layer: atoms.shape for layer, atoms in side.layers.items()} == shapes for side in self.sides)
        if measure is None or not alike or any(side.sites != first.sites for side in self.sides):
            return None
        wanted = list(first.layers) if first.sites[-1:] == (ALL,) else list(first.sites)
        if first.sites not in ((*wanted, ALL), (ALL,), tuple(wanted)) or any(site not in shapes for site in wanted):
            return None
        try:
            table = AtomTable.stacked(
                {layer: torch.stack([side.layers[layer] for side in self.sides]) for layer in wanted},
                dtype=torch.float64,
            )
            if measure.function is atom_cosine.function:
                value = table.cosines()
            else:
                value = torch.stack([measure(table.at(layer)) for layer in wanted]).mean(0)
        except ValueError:  # of some pair there is no value: the pairs say why
            return None
        return snap_to_bounds(value, measure).numpy()

    def _anywhere(self, measure: Measure) -> bool:
        return self.anywhere or "linear" in measure.invariant

    def _drawn(self, i: int, j: int) -> dict[str, list[Array]]:
        drawn: dict[str, list[Array]] = {}
        if self.redrawn is None or not self.draws:
            return drawn
        a, b = self.sides[i], self.sides[j]
        with Progress(f"chance for {a.name} and {b.name}", self.draws, "shuffled copies") as bar:
            for draw in range(self.draws):
                ours, theirs = self.redrawn(i, j, draw)
                x, y = AtomSide(a.name, a.sites, ours), AtomSide(b.name, b.sites, theirs)
                for measure in self.measures:
                    drawn.setdefault(measure.name, []).append(matrix(measure, x, y, self._anywhere(measure))[0])
                bar.advance()
        return drawn

    def _values(
        self, measure: Measure, value: Array, more: list[Caveat], chance: Chance | None, side: AtomSide
    ) -> Estimate:
        low, high = measure.bounds
        return Estimate(
            value,
            n=sum(atoms.numel() for atoms in side.layers.values()),
            statistic=self.statistic,
            closer=measure.closer,
            bounds=(low, high),
            same=measure.same,
            null=None if chance is None else chance.null,
            null_spread=None if chance is None else chance.spread,
            p=None if chance is None else chance.p,
            p_search=None if chance is None else chance.p_search,
            caveats=(*self.caveats, *more),
        )


def matrix(measure: Measure, a: AtomSide, b: AtomSide, anywhere: bool) -> tuple[Array, list[Caveat]]:
    """Site by site; NaN, and a caveat, where atoms cannot be compared."""
    value, caveats = np.full((len(a.sites), len(b.sites)), np.nan), []
    general: set[str] = set()
    for i, site_a in enumerate(a.sites):
        if site_a != ALL and site_a not in a.layers:
            caveats.append(Caveat(f"{site_a} of {a.name}: {NO_ATOMS}", site_a=site_a))
        for j, site_b in enumerate(b.sites):
            try:
                if ALL in (site_a, site_b):
                    if site_a == site_b:
                        value[i, j] = _mean(measure, a, b)
                        caveats.append(Caveat(f"all: the mean over {len(a.layers)} layers of atoms", ALL, ALL))
                elif site_a in a.layers and site_b in b.layers:
                    if site_a != site_b and not anywhere:
                        general.add(OTHERS)
                    elif site_a != site_b and a.layers[site_a].shape != b.layers[site_b].shape:
                        general.add(SIZES)
                    else:
                        value[i, j] = _one(measure, a.layers[site_a], b.layers[site_b])
            except ValueError as error:
                caveats.append(Caveat(f"{measure.name}: {error}", site_a, site_b))
    caveats += [Caveat(f"{s} of {b.name}: {NO_ATOMS}", site_b=s) for s in b.sites if s != ALL and s not in b.layers]
    return value, [*map(Caveat, sorted(general)), *caveats]


def _mean(measure: Measure, a: AtomSide, b: AtomSide) -> float:
    if a.layers.keys() != b.layers.keys():
        raise ValueError("the models have other layers of atoms, so there is no mean over them")
    return float(np.mean([_one(measure, x, b.layers[name], f"{name}: ") for name, x in a.layers.items()]))


def _one(measure: Measure, x: Tensor, y: Tensor, where: str = "") -> float:
    if x.shape != y.shape:
        raise ValueError(f"{where}{_atoms_text(x)} and {_atoms_text(y)} are not as many of one size")
    try:
        return float(snap_to_bounds(measure(Atoms(x[None], y[None])), measure))
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error


def _atoms_text(atoms: Tensor) -> str:
    return f"{atoms.shape[0]} atoms of {atoms.shape[1]} entries"


# Atoms of models that never shared anything: common coefficients for all, or a basis that each layer has itself


@dataclass(frozen=True, eq=False)
class JointAtoms:
    """Models in atom form that hold the same coefficients, and what that cost."""

    models: tuple[nn.Module, ...]  # copies; neurons in the order of the first where they were matched
    atoms: dict[str, int]  # of each layer that was decomposed: how many
    errors: dict[str, tuple[float, ...]]  # of each such layer: ‖W − αD‖ / ‖W‖ of every model
    left: dict[str, str]  # layers of weights that stayed as they were, and why
    caveats: tuple[str, ...]  # what matching has to say

    def table(self) -> AtomTable:
        """The atoms of all models, so that all pairs are one product."""
        return AtomTable.of([{name: layer.atoms for name, layer in atom_layers(m).items()} for m in self.models])

    def __repr__(self) -> str:
        worst = max(max(each) for each in self.errors.values())
        return (
            f"<JointAtoms of {len(self.models)} models: {len(self.atoms)} layers of up to {max(self.atoms.values())} "
            f"atoms, errors up to {worst:.2g}>"
        )


def decompose_together(
    models: Sequence[nn.Module],
    atoms: int,
    *,
    match: bool = True,
    seed: int = 0,
    input_shape: Sequence[int] | None = None,
) -> JointAtoms:
    """Models of one architecture made of atoms with common coefficients α, αᵀα = I, as near to them as `atoms` allow.

    `match` first puts the neurons of every model into the order of the first's (`match_weights`); models that started
    from the same weights need none of it. The weights of each layer side by side, (kernels, models × entries of a
    kernel), have α as their leading left singular vectors; a model's atoms are αᵀW. There may be as many atoms as there
    are columns: then all is exact, and the atom cosine is the cosine of the weights.
    """
    check_count(atoms)
    plain, caveats = aligned(models, match=match, seed=seed, input_shape=input_shape)
    kernels = [kernels_of(model) for model in plain]
    check_layers(kernels)
    parts = {name: common_atoms(torch.stack([each[name] for each in kernels]), atoms) for name in kernels[0]}
    errors: dict[str, list[float]] = {name: [] for name in parts}
    made: list[nn.Module] = []
    left: dict[str, str] = {}
    for k, model in enumerate(plain):

        def joint(name: str, layer: nn.Conv2d, k: int = k) -> nn.Module:
            coefficients, own = parts[name]
            new = AtomConv2d.like(layer, coefficients.shape[1], empty=True)
            with torch.no_grad():
                new.coefficients.copy_(coefficients.view_as(new.coefficients))
                new.atoms.copy_(own[k].view_as(new.atoms))
                if new.bias is not None and layer.bias is not None:
                    new.bias.copy_(layer.bias)
            errors[name].append(relative_error(layer.weight, new.weight))
            return new

        model, left = replace_convolutions(model, joint)
        made.append(model)
    share_coefficients(made[0], made)  # the first too, so that an error has the number of its model
    counts = {name: own.shape[1] for name, (_, own) in parts.items()}
    return JointAtoms(tuple(made), counts, {name: tuple(each) for name, each in errors.items()}, left, caveats)


def aligned(
    models: Sequence[nn.Module], *, match: bool, seed: int = 0, input_shape: Sequence[int] | None = None
) -> tuple[list[nn.Module], tuple[str, ...]]:
    """Plain copies, each with its neurons in the order of the first's; and what matching could not do."""
    if len(models) < 2:
        raise ValueError(f"need at least two models to decompose together, got {len(models)}")
    plain = [recompose(unwrap(model)) for model in models]
    caveats: list[str] = []
    for k in range(1, len(plain) if match else 0):
        found = match_weights(plain[0], plain[k], seed=seed, input_shape=input_shape)
        plain[k] = found.model_b
        caveats += found.caveats
    return plain, tuple(dict.fromkeys(caveats))


def kernels_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of every convolution that atoms can stand for, (kernels, entries of a kernel) in float64."""
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | AtomConv2d) and (isinstance(layer, AtomConv2d) or why_not(layer) is None):
            check_weight(name, layer.weight)
            found[name] = layer.weight.detach().double().flatten(2).flatten(0, 1)
    if not found:
        raise ValueError("nothing to decompose: the model has no convolution of kernels with more than one entry")
    return found


def check_layers(kernels: Sequence[Mapping[str, Tensor]], names: Sequence[str] | None = None) -> None:
    """Refuse layers that no common coefficients could stand for."""
    first = {name: tuple(each.shape) for name, each in kernels[0].items()}
    for k, other in enumerate(kernels[1:], 1):
        own = {name: tuple(each.shape) for name, each in other.items()}
        if odd := [name for name in {**first, **own} if first.get(name) != own.get(name)]:
            a, b = (names[0], names[k]) if names else ("the first model", f"model {k}")
            raise ValueError(
                f"{odd[0]}: {_kernels_text(first.get(odd[0]))} in {a}, {_kernels_text(own.get(odd[0]))} in {b}; "
                "common coefficients need layers of one shape. joint='polar' compares convolutions of any "
                "number of channels"
            )


def common_atoms(weights: Tensor, atoms: int) -> tuple[Tensor, Tensor]:
    """Of weights (models, kernels, entries): orthonormal coefficients (kernels, m), and atoms (models, m, entries)."""
    count, rows, entries = weights.shape
    side_by_side = weights.movedim(0, 1).reshape(rows, count * entries)
    u, _, _ = torch.linalg.svd(side_by_side, full_matrices=False)
    sign = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()  # known up to it: the largest entry is positive
    coefficients = (u * sign)[:, :atoms]
    # From the weights, not from the other singular vectors: a model of zeros has atoms of zeros, not of rounding.
    return coefficients, coefficients.T @ weights


def polar_atoms(kernels: Tensor) -> Tensor:
    """P = (WᵀW)^½ of W (kernels, entries): what is left of W = QP, QᵀQ = I, without Q: kernels in any order."""
    _, s, vh = torch.linalg.svd(kernels, full_matrices=False)
    return vh.mT @ (s[:, None] * vh)


def _kernels_text(shape: tuple[int, ...] | None) -> str:
    return "no such layer" if shape is None else f"{shape[0]} kernels of {shape[1]} entries"


# Where atoms come from: models that share coefficients, a joint decomposition, or each layer's own polar factor

POLAR = "polar"
SHOWN = 6  # layers that are named
UNMATCHED = "neurons were not matched first: match='weights' does that, for models that started from different weights"
WITHOUT_CHANCE = (
    "common atoms are chosen for what the models share, so chance gives high values, the higher the fewer atoms: "
    "null='weights' measures it"
)
NEVER_NEGATIVE = (
    "polar factors are positive, so their cosine is never negative, and far from 0 for any two layers: read it beside "
    "what shuffled weights give"
)

Joint = int | Literal["polar"] | None


@dataclass(frozen=True)
class AtomOptions:
    """How models are brought to atoms; see `compare_weights`."""

    joint: Joint = None
    base: nn.Module | None = None
    match: bool = False
    input_shape: Sequence[int] | None = None
    draws: int = 0
    seed: int = 0


def open_atoms(sources: Sequence[WeightSource], measures: Sequence[Measure], options: AtomOptions) -> AtomComparison:
    """Everything that is needed to compare any two of the models."""
    if options.joint is None:
        named = [(source.name, source.model) for source in sources]
        layers = shared_layers(named, options.base, measures)
        statistic = "atoms on shared coefficients" + ("" if options.base is None else ", less those of a common base")
        sides = _sides(sources, layers)
        doubts = [Caveat(STARTED)] if options.base is None else list(_unmoved(sides))
        return AtomComparison(sides, measures, statistic, caveats=tuple(doubts))
    return (_polar if options.joint == POLAR else _joint)(sources, measures, options)


def _unmoved(sides: Sequence[AtomSide]) -> Iterator[Caveat]:
    for side in sides:
        if still := [name for name, change in side.layers.items() if not change.any()]:
            more = f" and {len(still) - SHOWN} more" if len(still) > SHOWN else ""
            told = f"{', '.join(still[:SHOWN])}{more}"
            yield Caveat(f"{side.name} has the atoms of the base at {told}: it did not move, so there is no direction")


def _sides(sources: Sequence[WeightSource], layers: Sequence[Layers]) -> list[AtomSide]:
    return [
        AtomSide(source.name, atom_sites(source.model, source.sites, list(own)), own)
        for source, own in zip(sources, layers, strict=True)
    ]


def _polar(sources: Sequence[WeightSource], measures: Sequence[Measure], options: AtomOptions) -> AtomComparison:
    plain, _ = aligned([source.model for source in sources], match=False)
    layers = [_polar_layers(model) for model in plain]

    def redrawn(i: int, j: int, draw: int) -> tuple[Layers, Layers]:
        return layers[i], _polar_layers(shuffled(replace(sources[j], model=plain[j]), options.seed, draw).model)

    return AtomComparison(
        _sides(sources, layers),
        measures,
        "polar factors (WᵀW)^½ of the kernels of each layer",
        anywhere=True,
        caveats=(Caveat(NEVER_NEGATIVE),),
        redrawn=redrawn,
        draws=options.draws,
    )


def _polar_layers(model: nn.Module) -> Layers:
    return {name: polar_atoms(kernels).cpu() for name, kernels in kernels_of(model).items()}


def _joint(sources: Sequence[WeightSource], measures: Sequence[Measure], options: AtomOptions) -> AtomComparison:
    assert isinstance(options.joint, int)
    count, start = options.joint, [] if options.base is None else [options.base]
    matching: dict[str, Any] = {"seed": options.seed, "input_shape": options.input_shape}
    plain, notes = aligned([*start, *(source.model for source in sources)], match=options.match, **matching)
    kernels = [kernels_of(model) for model in plain]
    check_layers(kernels, [*(["the base"] if start else []), *(source.name for source in sources)])
    layers, errors = _decomposed(kernels, count, bool(start))

    def redrawn(i: int, j: int, draw: int) -> tuple[Layers, Layers]:
        k = j + len(start)
        model = shuffled(replace(sources[j], model=plain[k]), options.seed, draw).model
        if options.match:
            model = match_weights(plain[0], model, **matching).model_b
        again, _ = _decomposed([*kernels[:k], kernels_of(model), *kernels[k + 1 :]], count, bool(start))
        return again[i], again[j]

    told = f"{float(errors.min()):.2g} to {float(errors.max()):.2g}"
    doubts = [f"{count} common atoms of {len(plain)} models leave out {told} of the norm of a layer's weights", *notes]
    doubts += [] if options.match else [UNMATCHED]
    doubts += [] if options.draws else [WITHOUT_CHANCE]
    return AtomComparison(
        _sides(sources, layers),
        measures,
        f"joint decomposition of {len(plain)} models into {count} atoms, coefficients with orthonormal columns"
        + (", less those of a common base" if start else ""),
        caveats=tuple(Caveat(text) for text in doubts),
        redrawn=redrawn,
        draws=options.draws,
    )


def _decomposed(kernels: Sequence[dict[str, Tensor]], count: int, based: bool) -> tuple[list[Layers], Tensor]:
    """The atoms of each model (less those of the first, where that is the base), and all relative errors."""
    found: list[Layers] = [{} for _ in kernels]
    errors = []
    for name in kernels[0]:
        weights = torch.stack([each[name].cpu() for each in kernels])
        coefficients, own = common_atoms(weights, count)
        for k, layers in enumerate(found):
            layers[name] = own[k]
        sizes, lost = weights.flatten(1).norm(dim=1), (weights - coefficients @ own).flatten(1).norm(dim=1)
        errors.append(torch.where(sizes > 0, lost / sizes, 0.0))  # as `relative_error` has it
    return [less(layers, found[0]) for layers in found[1:]] if based else found, torch.cat(errors)

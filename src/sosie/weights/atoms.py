"""Filter atoms layer by layer, for models that share their coefficients or that are decomposed together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import unwrap
from ..checks import listed
from ..engine.network import Network
from ..engine.uncertainty import judged
from ..measures import Measure, atom_cosine, snap_to_bounds
from ..models import AtomConv2d, atom_layers, recompose, share_coefficients
from ..models.atoms import check_count, check_shared, check_weight, replace_convolutions, why_not
from ..progress import track
from ..results import Array, Caveat, Estimate, Side
from ..stats import Atoms, AtomTable
from .maps import shuffled
from .matching import match_weights
from .tensors import ALL, side_of, tensor_sites

POLAR = "polar"
NO_ATOMS = "it is not made of atoms"
OTHERS = "NaN for pairs of different layers: they share no coefficients, so their atoms do not correspond"
SIZES = "NaN if two layers differ in the number or size of atoms"
STARTED = (
    "models that started from the same atoms are near 1 before they have learned anything: base= compares how far they "
    "moved"
)
UNMATCHED = "neurons were not matched first: use match='weights' for models that started from different weights"
WITHOUT_CHANCE = (
    "common atoms are chosen for what the models share, so chance gives high values, higher with fewer atoms: "
    "null='weights' measures it"
)
NEVER_NEGATIVE = (
    "polar factors are positive, so their cosine is never negative, and far from 0 for any two layers: compare it with "
    "the value of shuffled weights"
)

Joint = int | Literal["polar"] | None
Layers = dict[str, Tensor]  # the atoms of each layer, (m, height × width) in float64


# All pairs of models by their atoms


@dataclass(frozen=True, eq=False)
class AtomComparison:
    """The atoms of all models, to compare any pair of them or all at once."""

    sides: Sequence[Side]
    layers: Sequence[Layers]  # of each model
    measures: Sequence[Measure]
    statistic: str
    caveats: Sequence[str]
    anywhere: bool = False  # whether different layers can be compared too
    redraw: Callable[[int, int, int], tuple[Layers, Layers]] | None = None  # a pair with B's weights shuffled
    draws: int = 0

    def values(self, i: int, j: int) -> dict[str, Estimate]:
        """All measures of a pair, with what chance gives if there are draws."""
        a, b = self.layers[i], self.layers[j]
        names = f"{self.sides[i].name} and {self.sides[j].name}"
        shuffled = []
        for draw in track(range(self.draws), f"chance for {names}", self.draws, "shuffled copies"):
            assert self.redraw is not None
            shuffled.append(self.redraw(i, j, draw))
        count = sum(atoms.numel() for atoms in a.values())
        values = {}
        for measure in self.measures:
            value, more = self._matrix(measure, i, j, a, b)
            drawn = [self._matrix(measure, i, j, *pair)[0] for pair in shuffled]
            chance = judged(measure, value, np.stack(drawn)) if drawn else None
            known = [*map(Caveat, self.caveats), *more]
            values[measure.name] = Estimate.of(
                measure, value, n=count, statistic=self.statistic, chance=chance, caveats=known
            )
        return values

    def value(self, i: int, j: int, measure: Measure) -> Array:
        """The values of a pair, without chance and caveats."""
        return self._matrix(measure, i, j, self.layers[i], self.layers[j])[0]

    def whole(self, name: str) -> Array | None:
        """The values of all pairs of models, from one table; None if the models differ in layers or sites."""
        measure = next((measure for measure in self.measures if measure.name == name), None)
        shapes = [{layer: atoms.shape for layer, atoms in layers.items()} for layers in self.layers]
        sites = self.sides[0].sites
        if measure is None or any(s != shapes[0] for s in shapes) or any(s.sites != sites for s in self.sides):
            return None
        names = list(shapes[0]) if sites[-1:] == (ALL,) else list(sites)
        if sites not in ((*names, ALL), (ALL,), tuple(names)) or any(site not in shapes[0] for site in names):
            return None
        try:
            stacks = {layer: torch.stack([layers[layer] for layers in self.layers]) for layer in names}
            table = AtomTable.stacked(stacks, dtype=torch.float64)
            if measure.function is atom_cosine.function:
                value = table.cosines()
            else:
                value = torch.stack([measure(table.at(layer)) for layer in names]).mean(0)
        except ValueError:  # some pair has no value: its own comparison gives the reason
            return None
        return snap_to_bounds(value, measure).numpy()

    def _matrix(self, measure: Measure, i: int, j: int, a: Layers, b: Layers) -> tuple[Array, list[Caveat]]:
        """The values site by site; NaN, and a caveat, if atoms cannot be compared."""
        side_a, side_b, anywhere = self.sides[i], self.sides[j], self.anywhere or "linear" in measure.invariant
        value = np.full((len(side_a.sites), len(side_b.sites)), np.nan)
        caveats = [
            Caveat(f"{site} of {side.name}: {NO_ATOMS}", **{key: site})  # type: ignore[arg-type]
            for side, layers, key in ((side_a, a, "site_a"), (side_b, b, "site_b"))
            for site in side.sites
            if site != ALL and site not in layers
        ]
        general: set[str] = set()
        for (k, site_a), (l, site_b) in itertools.product(enumerate(side_a.sites), enumerate(side_b.sites)):
            try:
                if site_a == site_b == ALL:
                    if a.keys() != b.keys():
                        raise ValueError("the models have different layers of atoms, so there is no mean over layers")
                    value[k, l] = np.mean([_value(measure, x, b[name], f"{name}: ") for name, x in a.items()])
                    caveats.append(Caveat(f"all: the mean over {len(a)} layers of atoms", ALL, ALL))
                elif site_a in a and site_b in b:
                    if site_a != site_b and not anywhere:
                        general.add(OTHERS)
                    elif site_a != site_b and a[site_a].shape != b[site_b].shape:
                        general.add(SIZES)
                    else:
                        value[k, l] = _value(measure, a[site_a], b[site_b])
            except ValueError as error:
                caveats.append(Caveat(f"{measure.name}: {error}", site_a, site_b))
        return value, [*map(Caveat, sorted(general)), *caveats]


def _value(measure: Measure, x: Tensor, y: Tensor, prefix: str = "") -> float:
    try:
        if x.shape != y.shape:
            counts = " and ".join(f"{len(atoms)} atoms of {atoms.shape[1]} entries" for atoms in (x, y))
            raise ValueError(f"{counts} cannot be compared one by one")
        return float(snap_to_bounds(measure(Atoms(x[None], y[None])), measure))
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


# Where atoms come from: models that share coefficients, a joint decomposition, or each layer's own polar factor


def open_atoms(
    networks: Sequence[Network],
    measures: Sequence[Measure],
    *,
    joint: Joint = None,
    base: nn.Module | None = None,
    match: bool = False,
    input_shape: Sequence[int] | None = None,
    draws: int = 0,
    seed: int = 0,
) -> AtomComparison:
    """The atoms of all networks, to compare any two of them; options as those of `compare_weights`."""
    if joint is None:
        layers = _shared_layers(networks, base, measures)
        statistic = "atoms on shared coefficients" + ("" if base is None else ", minus those of a common base")
        texts = [STARTED] if base is None else _of_unmoved(networks, layers)
        return AtomComparison(_sides(networks, layers), layers, measures, statistic, texts)
    if joint == POLAR:
        plain = [recompose(unwrap(network.model)) for network in networks]
        layers = [_polar_layers(model) for model in plain]

        def redraw_polar(i: int, j: int, draw: int) -> tuple[Layers, Layers]:
            return layers[i], _polar_layers(shuffled(plain[j], seed, draw))

        statistic, sides = "polar factors (WᵀW)^½ of the kernels of each layer", _sides(networks, layers)
        return AtomComparison(sides, layers, measures, statistic, [NEVER_NEGATIVE], True, redraw_polar, draws)
    assert isinstance(joint, int)
    count, start = joint, [] if base is None else [base]
    matching: dict[str, Any] = {"seed": seed, "input_shape": input_shape}
    plain, texts = _aligned([*start, *(network.model for network in networks)], match=match, **matching)
    kernels = [_kernels(model, "cpu") for model in plain]
    _check_kernels(kernels, [*["the base" for _ in start], *(network.name for network in networks)])

    def decomposed(kernels: Sequence[Layers]) -> tuple[list[Layers], dict[str, tuple[float, ...]]]:
        _, atoms, errors = _decompose(kernels, count)
        return _minus_base(atoms) if start else atoms, errors

    def redraw(i: int, j: int, draw: int) -> tuple[Layers, Layers]:
        k = j + len(start)
        model = shuffled(plain[k], seed, draw)
        if match:
            model = match_weights(plain[0], model, **matching).model_b
        atoms, _ = decomposed([*kernels[:k], _kernels(model, "cpu"), *kernels[k + 1 :]])
        return atoms[i], atoms[j]

    layers, errors = decomposed(kernels)
    lost = list(itertools.chain(*errors.values()))
    texts = [
        f"{count} common atoms of {len(plain)} models leave out {min(lost):.2g} to {max(lost):.2g} of the norm of a "
        "layer's weights",
        *texts,
        *([] if match else [UNMATCHED]),
        *([] if draws else [WITHOUT_CHANCE]),
    ]
    statistic = f"joint decomposition of {len(plain)} models into {count} atoms, coefficients with orthonormal columns"
    statistic += ", minus those of a common base" if start else ""
    return AtomComparison(_sides(networks, layers), layers, measures, statistic, texts, redraw=redraw, draws=draws)


def _shared_layers(networks: Sequence[Network], base: nn.Module | None, measures: Sequence[Measure]) -> list[Layers]:
    """The atoms of models that must share their coefficients; with a base, minus those of the base."""
    named = [(network.name, unwrap(network.model)) for network in networks]
    if base is not None:
        named.append(("the base", unwrap(base)))
    for name, model in named:
        if not atom_layers(model):
            raise ValueError(
                f"{name} has no layer of atoms: joint=m decomposes models together (such as joint=9); decompose(model"
                ", m) decomposes one model, whose copies can then be trained on shared coefficients"
            )
    # The span of atoms does not depend on coefficients; their differences and their cosine do.
    if base is not None or any("linear" not in measure.invariant for measure in measures):
        check_shared(named)
    layers = [
        {name: layer.atoms.detach().double().flatten(1).cpu() for name, layer in atom_layers(model).items()}
        for _, model in named
    ]
    return layers if base is None else _minus_base([layers[-1], *layers[:-1]])


def _minus_base(models: Sequence[Layers]) -> list[Layers]:
    """The atoms of each model minus those of the first one, the base."""
    base, *models = models
    for layers in models:
        if layers.keys() != base.keys():
            raise ValueError(f"the base has layers of atoms {', '.join(base)}, the model {', '.join(layers)}")
    return [{name: atoms - base[name] for name, atoms in layers.items()} for layers in models]


def _of_unmoved(networks: Sequence[Network], models: Sequence[Layers]) -> list[str]:
    texts = []
    for network, layers in zip(networks, models, strict=True):
        if still := [name for name, change in layers.items() if not change.any()]:
            texts.append(f"{network.name} has the atoms of the base at {listed(still, 3)}: they did not move")
    return texts


def _sides(networks: Sequence[Network], models: Sequence[Layers]) -> list[Side]:
    """The chosen sites of each network; by default layers of atoms in the order of registration, then "all"."""
    sides = []
    for network, layers in zip(networks, models, strict=True):
        sites = [*layers, ALL] if network.sites is None else tensor_sites(network.model, network.sites)
        sides.append(side_of(network.name, {site: layers.get(site, NO_ATOMS) for site in sites}))
    return sides


def polar_atoms(kernels: Tensor) -> Tensor:
    """P = (WᵀW)^½ of W (kernels, entries): W = QP, QᵀQ = I; only Q depends on the order of the kernels."""
    _, s, vh = torch.linalg.svd(kernels, full_matrices=False)
    return vh.mT @ (s[:, None] * vh)


def _polar_layers(model: nn.Module) -> Layers:
    return {name: polar_atoms(kernels).cpu() for name, kernels in _kernels(model).items()}


# Common coefficients for models that share none


@dataclass(frozen=True, eq=False)
class JointAtoms:
    """Models in atom form with common coefficients, and the errors of the decomposition."""

    models: tuple[nn.Module, ...]  # copies; if matched, with neurons in the order of the first
    atoms: dict[str, int]  # number of atoms of each layer that was decomposed
    errors: dict[str, tuple[float, ...]]  # ‖W − αD‖ / ‖W‖ of every model, for each such layer
    left: dict[str, str]  # layers of weights that stayed as they were, and why
    caveats: tuple[str, ...]  # of matching

    def table(self) -> AtomTable:
        """A table of the atoms of all models, so that all pairs are one product."""
        return AtomTable.of([{name: layer.atoms for name, layer in atom_layers(m).items()} for m in self.models])

    def __repr__(self) -> str:
        worst = max(itertools.chain(*self.errors.values()))
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
    """Approximate models of one architecture by atoms with common coefficients α, αᵀα = I.

    `match` first puts the neurons of every model into the order of the first's (`match_weights`); models that started
    from the same weights do not need it. α are the leading left singular vectors of the weights of a layer side by
    side, (kernels, models × entries of a kernel); the atoms of a model are αᵀW. With as many atoms as there are columns
    the decomposition is exact, and the atom cosine is the cosine of the weights.
    """
    check_count(atoms)
    plain, caveats = _aligned(models, match=match, seed=seed, input_shape=input_shape)
    kernels = [_kernels(model) for model in plain]
    _check_kernels(kernels, ["the first model", *(f"model {k}" for k in range(1, len(plain)))])
    coefficients, layers, errors = _decompose(kernels, atoms)
    made: list[nn.Module] = []
    left: dict[str, str] = {}
    for k, model in enumerate(plain):

        def in_atoms(name: str, layer: nn.Conv2d, k: int = k) -> nn.Module:
            new = AtomConv2d.like(layer, coefficients[name].shape[1], empty=True)
            with torch.no_grad():
                new.coefficients.copy_(coefficients[name].view_as(new.coefficients))
                new.atoms.copy_(layers[k][name].view_as(new.atoms))
                if new.bias is not None and layer.bias is not None:
                    new.bias.copy_(layer.bias)
            return new

        model, left = replace_convolutions(model, in_atoms)
        made.append(model)
    share_coefficients(made[0], made)  # the first too, so that an error gives the number of its model
    counts = {name: alpha.shape[1] for name, alpha in coefficients.items()}
    return JointAtoms(tuple(made), counts, errors, left, tuple(caveats))


def _aligned(
    models: Sequence[nn.Module], *, match: bool, seed: int, input_shape: Sequence[int] | None
) -> tuple[list[nn.Module], list[str]]:
    """Plain copies, with their neurons in the order of the first's if `match`; and the caveats of matching."""
    if len(models) < 2:
        raise ValueError(f"need at least two models to decompose together, got {len(models)}")
    plain = [recompose(unwrap(model)) for model in models]
    caveats: dict[str, None] = {}
    for k in range(1, len(plain) if match else 0):
        matched = match_weights(plain[0], plain[k], seed=seed, input_shape=input_shape)
        plain[k] = matched.model_b
        caveats |= dict.fromkeys(matched.caveats)
    return plain, list(caveats)


def _kernels(model: nn.Module, device: str | None = None) -> dict[str, Tensor]:
    """The weights of every convolution that atoms can stand for, (kernels, entries of a kernel) in float64."""
    kernels: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and why_not(layer) is None:
            check_weight(name, layer.weight)
            kernels[name] = layer.weight.detach().to(device).double().flatten(2).flatten(0, 1)
    if not kernels:
        raise ValueError("nothing to decompose: the model has no convolution of kernels with more than one entry")
    return kernels


def _check_kernels(kernels: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> None:
    """Raise if layers differ in shape, so that they cannot have common coefficients."""
    first, *others = [
        {layer: f"{len(x)} kernels of {x.shape[1]} entries" for layer, x in model.items()} for model in kernels
    ]
    for name, model in zip(names[1:], others, strict=True):
        if odd := [layer for layer in {**first, **model} if first.get(layer) != model.get(layer)]:
            expected, shape = (shapes.get(odd[0], "no such layer") for shapes in (first, model))
            raise ValueError(
                f"{odd[0]}: {expected} in {names[0]}, {shape} in {name}; common coefficients need layers of one shape. "
                "joint='polar' compares convolutions of any number of channels"
            )


def _decompose(
    kernels: Sequence[Mapping[str, Tensor]], count: int
) -> tuple[Layers, list[Layers], dict[str, tuple[float, ...]]]:
    """The common coefficients of each layer, the atoms of each model, and the relative errors of each layer."""
    coefficients: Layers = {}
    atoms: list[Layers] = [{} for _ in kernels]
    errors = {}
    for name in kernels[0]:
        weights = torch.stack([model[name] for model in kernels])
        coefficients[name], stacked = common_atoms(weights, count)
        for layers, atoms_of_model in zip(atoms, stacked, strict=True):
            layers[name] = atoms_of_model
        sizes = weights.flatten(1).norm(dim=1)
        lost = (weights - coefficients[name] @ stacked).flatten(1).norm(dim=1)
        errors[name] = tuple(torch.where(sizes > 0, lost / sizes, 0.0).tolist())
    return coefficients, atoms, errors


def common_atoms(weights: Tensor, atoms: int) -> tuple[Tensor, Tensor]:
    """Orthonormal coefficients (kernels, m) and atoms (models, m, entries) of weights (models, kernels, entries)."""
    count, rows, entries = weights.shape
    side_by_side = weights.movedim(0, 1).reshape(rows, count * entries)
    u, _, _ = torch.linalg.svd(side_by_side, full_matrices=False)
    sign = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()  # makes the largest entry positive
    coefficients = (u * sign)[:, :atoms]
    # From the weights, not from the right singular vectors: a model of zeros has atoms of zeros, not of rounding.
    return coefficients, coefficients.T @ weights

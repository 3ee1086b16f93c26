"""Filter atoms layer by layer: of models that share their coefficients, or that are decomposed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...capture import unwrap
from ...measures import Measure, atom_cosine, settled
from ...models import atom_layers
from ...models.atoms import check_shared
from ...progress import Progress
from ...results import Array, Caveat, Side, Values
from ...stats import Atoms, AtomTable
from ..chance import Chance, judged
from .layers import ALL, tensor_sites

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

    def values(self, i: int, j: int) -> dict[str, Values]:
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
        return settled(value, measure).numpy()

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
    ) -> Values:
        low, high = measure.bounds
        return Values(
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
        raise ValueError(f"{where}{_told(x)} and {_told(y)} are not as many of one size")
    try:
        return float(settled(measure(Atoms(x[None], y[None])), measure))
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error


def _told(atoms: Tensor) -> str:
    return f"{atoms.shape[0]} atoms of {atoms.shape[1]} entries"

"""Where atoms come from: models that share coefficients, a joint decomposition, or each layer's own polar factor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...measures import Measure
from ...results import Caveat
from .atoms import STARTED, AtomComparison, AtomSide, Layers, atom_sites, less, shared_layers
from .joint_atoms import aligned, check_layers, common_atoms, kernels_of, polar_atoms
from .matching import match_weights
from .shuffling import shuffled
from .sources import WeightSource

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

"""Weights layer by layer: the tensors of one model against those of another, as they are and after matching."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.sites import named_parameters, unwrap
from ..checks import matching as names_matching
from ..checks import one_of
from ..measures import MEASURES, Measure, find, snap_to_bounds
from ..results import WHOLE, Caveat, Estimate, Side
from ..stats import TensorPair
from .maps import check_finite
from .matching import check_same_tensors, match_weights

ALL = WHOLE  # the site that stands for every parameter of a model, as one vector
OUTPUT = "output"  # a site of wcka: the whole network, which is not a single tensor
AFTER = " after matching"  # added to a measure's name

Model: TypeAlias = nn.Module | Mapping[str, Tensor]
Sites: TypeAlias = str | type | Sequence[str | type] | None
BySite: TypeAlias = dict[str, Tensor | str]  # the weights of each site, or the reason why there are none


def tensor_values(
    model_a: Model,
    model_b: Model,
    measures: Sequence[str | Measure] = ("weight_cosine", "weight_distance"),
    *,
    base: Model | None = None,
    match: str | None = None,
    sites_a: Sites = None,
    sites_b: Sites = None,
    names: tuple[str, str] = ("A", "B"),
    **matching: Any,
) -> tuple[Side, Side, dict[str, Estimate]]:
    """Compare every pair of layers of equal shape by each measure of weights, in float64; other pairs are NaN.

    Takes models or their state dicts. Sites are layers (their weight, without bias), parameters by name, globs and
    types of either, or "all"; by default every layer with a matrix of weights in the order of registration, then "all".
    With `base`, task vectors are compared: the difference of each model to that common base. With `match="weights"`
    every measure has a second value, computed after the neurons of B were put in the order of A's (with a base: those
    of both in the base's order); `matching` is passed to `match_weights`.
    """
    chosen = [find(measure) for measure in measures]
    if others := [measure.name for measure in chosen if measure.reads is not TensorPair]:
        known = ", ".join(name for name, measure in MEASURES.items() if measure.reads is TensorPair)
        raise ValueError(f"{', '.join(others)} do not compare pairs of tensors; {known} do")
    if match is not None:
        one_of(match, "match", ["weights"])
    models, labels = (model_a, model_b), (tensor_sites(model_a, sites_a), tensor_sites(model_b, sites_b))

    def by_site(*pair: Model) -> tuple[BySite, BySite]:
        a, b = (_by_site(*facts, base) for facts in zip(pair, labels, names, strict=True))
        return a, b

    a, b = by_site(*models)
    shapes_a, shapes_b = ({name: x.shape for name, x in named_parameters(model).items()} for model in models)
    if ALL in b and shapes_a != shapes_b:
        b[ALL] = f"its parameters differ from those of {names[0]}"
    values = _values(chosen, a, b, names, base is not None)
    if match:
        onto = model_a if base is None else base
        if not all(isinstance(model, nn.Module) for model in (onto, *models)):
            raise TypeError("matching reads a forward: give models, not state dicts")
        moving = models[1:] if base is None else models
        matched = [match_weights(onto, model, **matching) for model in moving]  # type: ignore[arg-type]
        caveats = [Caveat(text) for text in dict.fromkeys(text for m in matched for text in m.caveats)]
        pair = [model_a, *(m.model_b for m in matched)][-2:]
        after = _values(chosen, *by_site(*pair), names, base is not None, caveats)
        values |= {name + AFTER: value for name, value in after.items()}
    return side_of(names[0], a), side_of(names[1], b), values


def tensor_sites(model: Model, sites: Sites = None) -> list[str]:
    """Names of the sites; None: layers with a matrix of weights in the order of registration, and "all"."""
    weights, modules = _weights(model), _modules(model)
    layers = [name.removesuffix(".weight") for name, tensor in weights.items() if tensor.ndim > 1]
    if sites is None:
        return [*layers, ALL]
    chosen: dict[str, None] = {}
    for site in [sites] if isinstance(sites, (str, type)) else sites:
        if isinstance(site, type):
            names = [name for name, module in modules.items() if isinstance(module, site)]
            if not names:
                raise ValueError(f"no layer is a {site.__name__}")
        elif site in (ALL, OUTPUT) or site in modules:
            names = [site]
        else:
            names = names_matching(dict.fromkeys([*layers, *weights]), site, "no layer and no parameter is called")
        chosen |= dict.fromkeys(names)
    return list(chosen)


def task_vector(model: Model, base: Model, names: tuple[str, str] = ("the model", "its base")) -> dict[str, Tensor]:
    """The change by training: each parameter minus that of the base model, in float64."""
    return _change(named_parameters(model), named_parameters(base), names)


def _change(weights: Mapping[str, Tensor], start: Mapping[str, Tensor], names: tuple[str, str]) -> dict[str, Tensor]:
    check_same_tensors(weights, start, names)
    check_finite(start, names[1])
    return {name: tensor.double() - start[name].to(tensor.device).double() for name, tensor in weights.items()}


def _modules(model: Model) -> dict[str, nn.Module]:
    return dict(unwrap(model).named_modules()) if isinstance(model, nn.Module) else {}


def _weights(model: Model) -> dict[str, Tensor]:
    """Parameters by name; the kernels of a convolution made of atoms are its `.weight`."""
    parameters = named_parameters(model)
    weights: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        layer, dot, part = name.rpartition(".")
        other = parameters.get(f"{layer}{dot}{ {'coefficients': 'atoms', 'atoms': 'coefficients'}.get(part) }")
        if other is None or {tensor.ndim, other.ndim} != {3}:
            weights[name] = tensor
        elif part == "coefficients":
            weights[f"{layer}{dot}weight"] = torch.einsum("oim,mhw->oihw", tensor.double(), other.double())
    return weights


def _by_site(model: Model, sites: Sequence[str], label: str, base: Model | None) -> BySite:
    """The weights of each site in float64, or their difference to the base's; or, in words, why there are none."""
    weights, modules = _weights(model), _modules(model)
    if not weights:
        raise ValueError(f"{label} has no weights")
    check_finite(weights, label)
    nothing = "all its weights are 0"
    if base is not None:
        weights, nothing = _change(weights, _weights(base), (label, "the base")), "its weights are those of the base"
    by_site: BySite = {}
    for site in sites:
        name = site if site in weights else f"{site}.weight" if site else "weight"
        if name in weights:
            tensor = weights[name].double()
            # The second axis of a transposed convolution is that of the neurons.
            if isinstance(modules.get(name.rpartition(".")[0]), nn.modules.conv._ConvTransposeNd) and tensor.ndim > 1:
                tensor = tensor.transpose(0, 1).contiguous()
        elif site == ALL:
            # By name, since the other model may have registered them in a different order.
            tensor = torch.cat([weights[name].double().flatten() for name in sorted(weights)])
        else:
            by_site[site] = "it holds no matrix of weights of its own"
            continue
        by_site[site] = tensor if bool(tensor.any()) else nothing
    return by_site


def side_of(name: str, by_site: BySite) -> Side:
    """A side with the widths and shapes of the tensors."""
    shapes = [() if isinstance(tensor, str) else tuple(tensor.shape) for tensor in by_site.values()]
    return Side(name, tuple(by_site), tuple(shape[0] if shape else 0 for shape in shapes), tuple(shapes))


def _values(
    measures: Sequence[Measure], a: BySite, b: BySite, names: Sequence[str], based: bool, caveats: Sequence[Caveat] = ()
) -> dict[str, Estimate]:
    known = [
        *caveats,
        *(Caveat(f"{site} of {names[0]}: {why}", site_a=site) for site, why in a.items() if isinstance(why, str)),
        *(Caveat(f"{site} of {names[1]}: {why}", site_b=site) for site, why in b.items() if isinstance(why, str)),
    ]
    count = sum(tensor.numel() for site, tensor in a.items() if not isinstance(tensor, str) and site != ALL)
    statistic = "differences of weights to a common base" if based else "the weights themselves"
    pairs: list[tuple[int, int, TensorPair]] = []
    spectra: dict[int, Tensor] = {}
    shapes_differ = False
    for (i, (site_a, x)), (j, (site_b, y)) in itertools.product(enumerate(a.items()), enumerate(b.items())):
        if isinstance(x, str) or isinstance(y, str):
            continue
        if x.shape == y.shape and (site_a == ALL) == (site_b == ALL):
            pairs.append((i, j, TensorPair(x, y, spectra)))
        else:
            shapes_differ = True
    known += [Caveat("NaN where the weights of two layers differ in shape")] if shapes_differ else []
    values = {}
    for measure in measures:
        value, undefined = np.full((len(a), len(b)), np.nan), []
        for i, j, pair in pairs:
            try:
                value[i, j] = float(snap_to_bounds(measure(pair), measure))
            except ValueError as error:  # no direction, no spectrum
                undefined.append(Caveat(f"{measure.name}: {error}", list(a)[i], list(b)[j]))
        values[measure.name] = Estimate.of(measure, value, n=count, statistic=statistic, caveats=[*known, *undefined])
    return values

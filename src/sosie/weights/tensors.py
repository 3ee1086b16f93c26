"""Weights layer by layer: the tensors of one model against those of another, as they are and once matched."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import unwrap
from ..checks import one_of
from ..measures import MEASURES, Measure, find, snap_to_bounds
from ..results import WHOLE, Array, Caveat, Estimate, Side
from ..stats import TensorPair
from .maps import estimate
from .matching import check_finite, check_same_tensors, match_weights

ALL = WHOLE  # the site that stands for every parameter of a model, as one vector
OUTPUT = "output"  # a site of other measures of weights: the whole network, which is no one tensor
NO_WEIGHTS = "it holds no matrix of weights of its own"
RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # in a state dict, but no parameters
AFTER = " after matching"  # what is added to a measure's name
SHAPES = "NaN where the weights of two layers do not have one shape"

Model: TypeAlias = nn.Module | Mapping[str, Tensor]
Sites: TypeAlias = str | type | Sequence[str | type] | None
BySite: TypeAlias = dict[str, Tensor | str]  # the weights of each site, or why there are none


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
    """Each measure of weights for every pair of layers of one shape, in float64; other pairs are NaN.

    Models, or their state dicts. Sites are layers (their weight, without bias), parameters by name, globs and types of
    either, or "all"; by default every layer with a matrix of weights in the order of registration, then "all". With
    `base` what is compared are task vectors: each model's difference to that common base. With `match="weights"` every
    measure is there twice, the second time after the neurons of B were put in the order of A's (with a base: those of
    both in the base's order); `matching` goes to `match_weights`.
    """
    chosen = [find(measure) for measure in measures]
    if others := [measure.name for measure in chosen if measure.reads is not TensorPair]:
        known = ", ".join(name for name, measure in MEASURES.items() if measure.reads is TensorPair)
        raise ValueError(f"{', '.join(others)} do not compare pairs of tensors; {known} do")
    if match is not None:
        one_of(match, "match", ["weights"])
    labels = tensor_sites(model_a, sites_a), tensor_sites(model_b, sites_b)
    a, b = _tensors(model_a, base, labels[0], names[0]), _tensors(model_b, base, labels[1], names[1])
    if ALL in b and not _one_architecture(model_a, model_b):
        b[ALL] = f"{names[0]} has other parameters"
    values = _values(chosen, a, b, names, base is not None)
    if match:
        onto = model_a if base is None else base
        if not all(isinstance(model, nn.Module) for model in (onto, model_a, model_b)):
            raise TypeError("matching reads a forward: give models, not state dicts")
        moving = (model_b,) if base is None else (model_a, model_b)
        matched = [match_weights(onto, model, **matching) for model in moving]  # type: ignore[arg-type]
        again = [model_a, *(each.model_b for each in matched)][-2:]
        caveats = [Caveat(text) for text in dict.fromkeys(text for each in matched for text in each.caveats)]
        x, y = (_tensors(m, base, sites, name) for m, sites, name in zip(again, labels, names, strict=True))
        after = _values(chosen, x, y, names, base is not None, caveats)
        values |= {name + AFTER: value for name, value in after.items()}
    return _side(names[0], a), _side(names[1], b), values


def tensor_sites(model: Model, sites: Sites = None) -> list[str]:
    """Names of the sites asked for; None: layers that hold a matrix of weights, as they are registered, and "all"."""
    weights, modules = _weights(model), _modules(model)
    layers = [name.removesuffix(".weight") for name, tensor in weights.items() if tensor.ndim > 1]
    if sites is None:
        return [*layers, ALL]
    chosen: list[str] = []
    for asked in [sites] if isinstance(sites, (str, type)) else sites:
        if isinstance(asked, type):
            fitting = [name for name, module in modules.items() if isinstance(module, asked)]
        elif asked in (ALL, OUTPUT) or asked in modules or asked in weights or asked in layers:
            fitting = [asked]
        else:
            fitting = [name for name in dict.fromkeys([*layers, *weights]) if fnmatchcase(name, asked)]
        if not fitting:
            near = difflib.get_close_matches(str(asked), [*layers, *modules, *weights], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no layer and no parameter is called {asked!r}{hint}")
        chosen += fitting
    return list(dict.fromkeys(chosen))


def task_vector(model: Model, base: Model, names: tuple[str, str] = ("the model", "its base")) -> dict[str, Tensor]:
    """What training changed: each parameter less that of the base model, in float64."""
    return _change(_parameters(model), _parameters(base), names)


def _change(weights: Mapping[str, Tensor], start: Mapping[str, Tensor], names: tuple[str, str]) -> dict[str, Tensor]:
    check_same_tensors(weights, start, names)
    check_finite(start, names[1])
    return {name: tensor.double() - start[name].to(tensor.device).double() for name, tensor in weights.items()}


def _parameters(model: Model) -> dict[str, Tensor]:
    if isinstance(model, nn.Module):
        return {name: parameter.detach() for name, parameter in unwrap(model).named_parameters()}
    return {name: tensor.detach() for name, tensor in model.items() if not name.endswith(RUNNING)}


def _modules(model: Model) -> dict[str, nn.Module]:
    return dict(unwrap(model).named_modules()) if isinstance(model, nn.Module) else {}


def _one_architecture(model_a: Model, model_b: Model) -> bool:
    """Whether both have parameters of the same names and shapes."""
    a, b = ({name: tensor.shape for name, tensor in _parameters(model).items()} for model in (model_a, model_b))
    return a == b


def _weights(model: Model) -> dict[str, Tensor]:
    """Parameters by name, with the kernels of a convolution made of atoms put together as its `.weight`."""
    parameters = _parameters(model)
    weights: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        layer, dot, part = name.rpartition(".")
        other = parameters.get(f"{layer}{dot}{ {'coefficients': 'atoms', 'atoms': 'coefficients'}.get(part) }")
        if other is None or {tensor.ndim, other.ndim} != {3}:
            weights[name] = tensor
        elif part == "coefficients":
            weights[f"{layer}{dot}weight"] = torch.einsum("oim,mhw->oihw", tensor.double(), other.double())
    return weights


def _tensors(model: Model, base: Model | None, sites: Sequence[str], label: str) -> BySite:
    """For each site its weights in float64, or how they differ from the base's; or, in words, why there are none."""
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
            # Of a transposed convolution the second axis is that of the neurons.
            if isinstance(modules.get(name.rpartition(".")[0]), nn.modules.conv._ConvTransposeNd) and tensor.ndim > 1:
                tensor = tensor.transpose(0, 1).contiguous()
        elif site == ALL:
            tensor = torch.cat([each.double().flatten() for each in weights.values()])
        else:
            by_site[site] = NO_WEIGHTS
            continue
        by_site[site] = tensor if bool(tensor.any()) else nothing
    return by_site


def _side(name: str, by_site: BySite) -> Side:
    shapes = [() if isinstance(tensor, str) else tuple(tensor.shape) for tensor in by_site.values()]
    return Side(name, tuple(by_site), tuple(shape[0] if shape else 0 for shape in shapes), tuple(shapes))


def _values(
    measures: Sequence[Measure],
    a: BySite,
    b: BySite,
    names: Sequence[str],
    based: bool,
    known: Sequence[Caveat] = (),
) -> dict[str, Estimate]:
    missing_a, missing_b = ({site: why for site, why in side.items() if isinstance(why, str)} for side in (a, b))
    known = [
        *known,
        *(Caveat(f"{site} of {names[0]}: {why}", site_a=site) for site, why in missing_a.items()),
        *(Caveat(f"{site} of {names[1]}: {why}", site_b=site) for site, why in missing_b.items()),
    ]
    count = sum(tensor.numel() for site, tensor in a.items() if not isinstance(tensor, str) and site != ALL)
    statistic = "differences of weights to a common base" if based else "the weights themselves"
    spectra: dict[int, Tensor] = {}
    values = {}
    for measure in measures:
        value, caveats = _matrix(measure, a, b, spectra)
        values[measure.name] = estimate(measure, value, count, statistic, [*known, *caveats])
    return values


def _matrix(measure: Measure, a: BySite, b: BySite, spectra: dict[int, Tensor]) -> tuple[Array, list[Caveat]]:
    value, caveats, unlike = np.full((len(a), len(b)), np.nan), [], False
    for i, (site_a, x) in enumerate(a.items()):
        for j, (site_b, y) in enumerate(b.items()):
            if isinstance(x, str) or isinstance(y, str):
                continue
            if x.shape != y.shape or (site_a == ALL) != (site_b == ALL):
                unlike = True
                continue
            try:
                value[i, j] = float(snap_to_bounds(measure(TensorPair(x, y, spectra)), measure))
            except ValueError as error:  # no direction, no spectrum
                caveats.append(Caveat(f"{measure.name}: {error}", site_a, site_b))
    return value, [Caveat(SHAPES), *caveats] if unlike else caveats

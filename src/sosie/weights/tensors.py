"""Layer by layer: the weights of one model against those of another, as they are and once matched."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import unwrap
from ..measures import MEASURES, Measure, find, snap_to_bounds
from ..results import WHOLE, Caveat, Estimate, Side
from ..stats import TensorPair
from .matching import Matched, check_finite, check_same_tensors, match_weights

# The weights of a model by layer: which there are, and the tensor that stands for each

ALL = WHOLE  # the site that stands for every parameter of a model, as one vector
OUTPUT = "output"  # a site of other measures of weights: the whole network, which is no one tensor
NO_WEIGHTS = "it holds no matrix of weights of its own"
RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # in a state dict, but no parameters

Model: TypeAlias = nn.Module | Mapping[str, Tensor]
Sites: TypeAlias = str | type | Sequence[str | type] | None
Found: TypeAlias = dict[str, Tensor | str]  # by site: its weights, or why there are none


def tensor_sites(model: Model, sites: Sites = None) -> list[str]:
    """Names of the sites asked for; None: layers that hold a matrix of weights, as they are registered, and "all"."""
    weights, modules = weights_of(model), _modules(model)
    layers = [name.removesuffix(".weight") for name, tensor in weights.items() if tensor.ndim > 1]
    if sites is None:
        return [*layers, ALL]
    found: list[str] = []
    for asked in [sites] if isinstance(sites, (str, type)) else sites:
        if isinstance(asked, type):
            matching = [name for name, module in modules.items() if isinstance(module, asked)]
        elif asked in (ALL, OUTPUT) or asked in modules or asked in weights or asked in layers:
            matching = [asked]
        else:
            matching = [name for name in dict.fromkeys([*layers, *weights]) if fnmatchcase(name, asked)]
        if not matching:
            near = difflib.get_close_matches(str(asked), [*layers, *modules, *weights], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no layer and no parameter is called {asked!r}{hint}")
        found += matching
    return list(dict.fromkeys(found))


def parameters_of(model: Model) -> dict[str, Tensor]:
    """Parameters by name, of a model or a state dict."""
    if isinstance(model, nn.Module):
        return {name: parameter.detach() for name, parameter in unwrap(model).named_parameters()}
    return {name: tensor.detach() for name, tensor in model.items() if not name.endswith(RUNNING)}


def one_architecture(model_a: Model, model_b: Model) -> bool:
    """Whether both have parameters of the same names and shapes."""
    shapes = [{name: tensor.shape for name, tensor in parameters_of(model).items()} for model in (model_a, model_b)]
    return shapes[0] == shapes[1]


def task_vector(model: Model, base: Model, names: tuple[str, str] = ("the model", "its base")) -> dict[str, Tensor]:
    """What training changed: each parameter less that of the base model, in float64."""
    return _moved(parameters_of(model), parameters_of(base), names)


def _moved(weights: Mapping[str, Tensor], start: Mapping[str, Tensor], names: tuple[str, str]) -> dict[str, Tensor]:
    check_same_tensors(weights, start, names)
    check_finite(start, names[1])
    return {name: tensor.double() - start[name].to(tensor.device).double() for name, tensor in weights.items()}


def weights_of(model: Model) -> dict[str, Tensor]:
    """The same with the kernels of a convolution made of atoms put together: `.weight` for coefficients and atoms."""
    found = parameters_of(model)
    joined: dict[str, Tensor] = {}
    for name, tensor in found.items():
        layer, dot, part = name.rpartition(".")
        other = found.get(f"{layer}{dot}{ {'coefficients': 'atoms', 'atoms': 'coefficients'}.get(part) }")
        if other is None or {tensor.ndim, other.ndim} != {3}:
            joined[name] = tensor
        elif part == "coefficients":
            joined[f"{layer}{dot}weight"] = torch.einsum("oim,mhw->oihw", tensor.double(), other.double())
    return joined


def tensors_at(model: Model, base: Model | None, sites: Sequence[str], label: str) -> Found:
    """For each site its weights in float64, or what became of them since the base; or, in words, why there are none."""
    weights = weights_of(model)
    if not weights:
        raise ValueError(f"{label} has no weights")
    check_finite(weights, label)
    nothing = "all its weights are 0"
    if base is not None:
        weights, nothing = _moved(weights, weights_of(base), (label, "the base")), "its weights are those of the base"
    found: Found = {}
    for site in sites:
        tensor = _tensor_at(site, weights, _modules(model))
        found[site] = NO_WEIGHTS if tensor is None else tensor if bool(tensor.any()) else nothing
    return found


def _modules(model: Model) -> dict[str, nn.Module]:
    return dict(unwrap(model).named_modules()) if isinstance(model, nn.Module) else {}


def _tensor_at(site: str, weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> Tensor | None:
    name = site if site in weights else f"{site}.weight" if site else "weight"
    if name in weights:
        # Of a transposed convolution the second axis is that of the neurons.
        turned = isinstance(modules.get(name.rpartition(".")[0]), nn.modules.conv._ConvTransposeNd)
        tensor = weights[name].double()
        return tensor.transpose(0, 1).contiguous() if turned and tensor.ndim > 1 else tensor
    if site == ALL:
        return torch.cat([tensor.double().flatten() for tensor in weights.values()])
    return None


AFTER = " after matching"  # what is added to a measure's name
SHAPES = "NaN where the weights of two layers are not of one shape"


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
        raise ValueError(f"{', '.join(others)}: not of pairs of weights; there are {', '.join(_of_tensors())}")
    if match not in (None, "weights"):
        raise ValueError(f"match={match!r}: 'weights', or None for the weights as they are")
    labels = tensor_sites(model_a, sites_a), tensor_sites(model_b, sites_b)
    models: tuple[Model, Model] = model_a, model_b
    sides = [tensors_at(m, base, sites, name) for m, sites, name in zip(models, labels, names, strict=True)]
    if ALL in sides[1] and not one_architecture(*models):
        sides[1][ALL] = f"{names[0]} has other parameters"
    found = _values(chosen, sides, base is not None, names)
    if match:
        matched, caveats = _matched(model_a, model_b, base, matching)
        again = [tensors_at(m, base, sites, name) for m, sites, name in zip(matched, labels, names, strict=True)]
        after = _values(chosen, again, base is not None, names, caveats)
        found |= {name + AFTER: values for name, values in after.items()}
    return _side(names[0], sides[0]), _side(names[1], sides[1]), found


def _side(name: str, found: Found) -> Side:
    shapes = [() if isinstance(tensor, str) else tuple(tensor.shape) for tensor in found.values()]
    return Side(name, tuple(found), tuple(shape[0] if shape else 0 for shape in shapes), tuple(shapes))


def _of_tensors() -> list[str]:
    return [name for name, measure in MEASURES.items() if measure.reads is TensorPair]


def _matched(
    model_a: Model, model_b: Model, base: Model | None, options: dict[str, Any]
) -> tuple[tuple[Model, Model], list[Caveat]]:
    moved = [_match(model_a if base is None else base, model_b, options)]
    if base is not None:
        moved.insert(0, _match(base, model_a, options))
    caveats = [Caveat(text) for text in dict.fromkeys(text for each in moved for text in each.caveats)]
    return (model_a if base is None else moved[0].model_b, moved[-1].model_b), caveats


def _match(onto: Model, model: Model, options: dict[str, Any]) -> Matched:
    if not (isinstance(onto, nn.Module) and isinstance(model, nn.Module)):
        raise TypeError("matching reads a forward: give models, not state dicts")
    return match_weights(onto, model, **options)


def _values(
    chosen: Iterable[Measure], sides: Sequence[Found], moved: bool, names: Sequence[str], known: Sequence[Caveat] = ()
) -> dict[str, Estimate]:
    caveats = list(known)
    for side, name, place in zip(sides, names, ("site_a", "site_b"), strict=True):
        missing = {site: why for site, why in side.items() if isinstance(why, str)}
        caveats += [Caveat(f"{site} of {name}: {why}", **{place: site}) for site, why in missing.items()]
    kept: dict[int, Tensor] = {}
    count = sum(tensor.numel() for site, tensor in sides[0].items() if not isinstance(tensor, str) and site != ALL)
    statistic = "differences of weights to a common base" if moved else "the weights themselves"
    found = {}
    for measure in chosen:
        value, more = _matrix(measure, sides[0], sides[1], kept)
        found[measure.name] = Estimate(
            value,
            n=count,
            statistic=statistic,
            closer=measure.closer,
            bounds=measure.bounds,
            same=measure.same,
            caveats=(*caveats, *more),
        )
    return found


def _matrix(measure: Measure, a: Found, b: Found, kept: dict[int, Tensor]) -> tuple[np.ndarray[Any, Any], list[Caveat]]:
    value, caveats, unlike = np.full((len(a), len(b)), np.nan), [], False
    for i, (site_a, x) in enumerate(a.items()):
        for j, (site_b, y) in enumerate(b.items()):
            if isinstance(x, str) or isinstance(y, str):
                continue
            if x.shape != y.shape or (site_a == ALL) != (site_b == ALL):
                unlike = True
                continue
            try:
                value[i, j] = float(snap_to_bounds(measure(TensorPair(x, y, kept)), measure))
            except ValueError as error:  # no direction, no spectrum
                caveats.append(Caveat(f"{measure.name}: {error}", site_a, site_b))
    return value, [Caveat(SHAPES), *caveats] if unlike else caveats

"""Layer by layer: the weights of one model against those of another, as they are and once matched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from ...measures import MEASURES, Measure, find, settled
from ...results import Caveat, Side, Values
from ...stats import TensorPair
from .layers import ALL, Found, Model, Sites, one_architecture, tensor_sites, tensors_at
from .matching import Matched, match_weights

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
) -> tuple[Side, Side, dict[str, Values]]:
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
) -> dict[str, Values]:
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
        found[measure.name] = Values(
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
                value[i, j] = float(settled(measure(TensorPair(x, y, kept)), measure))
            except ValueError as error:  # no direction, no spectrum
                caveats.append(Caveat(f"{measure.name}: {error}", site_a, site_b))
    return value, [Caveat(SHAPES), *caveats] if unlike else caveats

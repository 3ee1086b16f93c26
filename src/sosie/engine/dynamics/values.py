"""Every time against every other at each site: one product for all pairs where the maths allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...linalg import u_centred
from ...measures import Measure, settled
from ...progress import track
from ...results import Caveat, DamagedFile, Values
from ...stats import Alignment, Atoms, DebiasedAlignment, Sample, TensorPair, UncentredAlignment
from ...train.run_folder import Run
from ..evaluate import CONSTANT
from ..pairwise import by_pair
from .caveats import of_states, of_widths

MEMORY = 2**31  # bytes of states that are held at a time
NOTHING_LEFT = 1e-12  # share of ‖K‖² that is rounding, once its diagonal is taken off

Combine = Callable[[list[Any], list[Any], bool], Tensor]


class _Undefined(ValueError):
    """A state that has no value with anything, and why."""


def site_values(measure: Measure, a: Run, b: Run, sites: Sequence[str], budget: int, known: Sequence[Caveat]) -> Values:
    """One measure at all sites; a site that it cannot be computed at is NaN, with the reason."""
    found = np.full((len(sites), len(a.frames), len(b.frames)), np.nan)
    caveats, refused = list(known), []
    for k, site in enumerate(track(sites, measure.name, len(sites), "sites")):
        try:
            value, doubts = _at_site(measure, a, b, site, budget)
        except DamagedFile:
            raise
        except (ValueError, ImportError, torch.linalg.LinAlgError) as error:
            refused.append(error)
            caveats.append(Caveat(f"undefined: {error}", site))
            continue
        found[k] = settled(value, measure).numpy()
        caveats += doubts
    if len(refused) == len(sites):
        raise ValueError(f"{measure.name} is undefined at every site; {sites[0]}: {refused[0]}") from refused[0]
    what, shape = a.about.what, a.shape(sites[0])
    low, high = (None if bound is None else float(bound) for bound in measure.bounds)
    return Values(
        found,
        n=shape[0] if what == "activations" else sum(math.prod(a.shape(site)) for site in sites),
        statistic=f"all {shape[0]} rows" if what == "activations" else f"the {what} themselves",
        closer=measure.closer,
        bounds=(low, high),
        same=None if measure.same is None else float(measure.same),
        caveats=tuple(caveats),
    )


def _at_site(measure: Measure, a: Run, b: Run, site: str, budget: int) -> tuple[Tensor, list[Caveat]]:
    shapes = a.shape(site), b.shape(site)
    size = 8 * max(map(math.prod, shapes))
    prepare: Callable[[Tensor], Any]
    if issubclass(measure.reads, Atoms):
        prepare, combine = _atoms, _of_atoms(measure)
    elif measure.base == "weight_cosine":
        prepare, combine = _direction, _products
    elif issubclass(measure.reads, TensorPair):
        prepare, combine = _tensor, _of_tensors(measure)
    elif issubclass(measure.reads, Alignment):
        prepare, combine, size = _gram(measure.reads), _of_grams(measure), 8 * shapes[0][0] ** 2
    else:
        prepare, combine = _rows, _of_rows(measure)
    found, undefined = _tiled(a, b, site, prepare, combine, max(1, budget // (2 * size)), measure.symmetric)
    doubts = [caveat for run, why in zip((a, b), undefined, strict=True) for caveat in of_states(run, site, why)]
    if a.about.what == "activations":
        doubts += of_widths(measure, (a, b), site)
    return found, list(dict.fromkeys(doubts))


def _tiled(
    a: Run, b: Run, site: str, prepare: Callable[[Tensor], Any], combine: Combine, count: int, symmetric: bool
) -> tuple[Tensor, tuple[dict[int, str], dict[int, str]]]:
    """All pairs of states, `count` states of each side held at a time; and why some states have no value."""
    found = torch.full((len(a.frames), len(b.frames)), torch.nan, dtype=torch.float64)
    undefined: tuple[dict[int, str], dict[int, str]] = ({}, {})
    mirrored = a is b and symmetric

    def read(run: Run, states: range, why: dict[int, str]) -> dict[int, Any]:
        kept = {}
        for k in states:
            try:
                kept[k] = prepare(run.tensor(k, site))
            except _Undefined as error:
                why[k] = str(error)
        return kept

    for rows in _ranges(len(a.frames), count):
        left = read(a, rows, undefined[0])
        for columns in _ranges(len(b.frames), count):
            if mirrored and columns.start < rows.start:
                continue
            same = a is b and columns.start == rows.start
            right = left if same else read(b, columns, undefined[1])
            if left and right:
                part = combine(list(left.values()), list(right.values()), mirrored and same)
                found[np.ix_(list(left), list(right))] = part.double().cpu()
    if mirrored:
        found = torch.triu(found) + torch.triu(found, 1).T
    return found, ({**undefined[0], **undefined[1]}, {}) if a is b else undefined


def _ranges(total: int, count: int) -> Iterator[range]:
    for start in range(0, total, count):
        yield range(start, min(start + count, total))


# What is made of one state


def _tensor(given: Tensor) -> Tensor:
    found = given.double()
    if bad := int((~torch.isfinite(found)).sum()):
        raise _Undefined(f"{bad} of {found.numel()} numbers are NaN or infinite")
    return found


def _atoms(given: Tensor) -> Tensor:
    found = _tensor(given).flatten(1)
    if not bool(found.any()):
        raise _Undefined("all atoms are 0: they have no direction")
    return found


def _direction(given: Tensor) -> Tensor:
    found = _tensor(given).flatten()
    norm = found.norm()
    if not float(norm):
        raise _Undefined("all weights are 0: they have no direction")
    return found / norm


def _rows(given: Tensor) -> Tensor:
    found = _tensor(given)
    _centred(found)
    return found


def _centred(rows: Tensor) -> Tensor:
    found = rows - rows.mean(0, keepdim=True)
    if not float(found.square().sum()) > CONSTANT["float64"] * float(rows.square().sum()):
        raise _Undefined("features do not vary: no similarity is defined")
    return found


def _gram(kind: type[Alignment]) -> Callable[[Tensor], Tensor]:
    def make(given: Tensor) -> Tensor:
        rows = _tensor(given)
        centred = _centred(rows)
        used = rows if kind is UncentredAlignment else centred
        gram = used @ used.T
        if kind is not DebiasedAlignment:
            return gram.flatten()
        hollow = u_centred(gram)
        if not float(hollow.square().sum()) > NOTHING_LEFT * float(gram.square().sum()):
            raise _Undefined("all rows are equally far apart: nothing is left once the diagonal is taken off")
        return hollow.flatten()

    return make


# All pairs of two lots of states; `once` asks for those on and above the diagonal only


def _products(left: list[Tensor], right: list[Tensor], once: bool) -> Tensor:
    x = torch.stack(left)
    return x @ (x if left is right else torch.stack(right)).T


def _of_atoms(measure: Measure) -> Combine:
    return lambda left, right, once: measure(Atoms(torch.stack(left), torch.stack(right)))


def _of_grams(measure: Measure) -> Combine:
    def combine(left: list[Tensor], right: list[Tensor], once: bool) -> Tensor:
        xx, yy = (torch.stack([gram @ gram for gram in side]) for side in (left, right))
        return measure(measure.reads(xx[:, None], yy[None, :], _products(left, right, once)))

    return combine


def _of_tensors(measure: Measure) -> Combine:
    def combine(left: list[Tensor], right: list[Tensor], once: bool) -> Tensor:
        kept: dict[int, Tensor] = {}  # spectra of single states
        found = torch.full((len(left), len(right)), torch.nan, dtype=torch.float64)
        for i, x in enumerate(track(left, measure.name, len(left), "states")):
            for j, y in enumerate(right):
                if i <= j or not once:
                    found[i, j] = measure(TensorPair(x, y, kept))
        return found

    return combine


def _of_rows(measure: Measure) -> Combine:
    def combine(left: list[Tensor], right: list[Tensor], once: bool) -> Tensor:
        everywhere = [np.ones(len(side), dtype=bool) for side in (left, right)]
        widths = tuple(rows.shape[1] for rows in left), tuple(rows.shape[1] for rows in right)
        found = by_pair([measure], Sample.of(left, right), widths, *everywhere, once=once)[measure.name]
        if found.undefined:
            raise ValueError(next(iter(found.undefined.values())))
        return found.matrix((len(left), len(right)))

    return combine

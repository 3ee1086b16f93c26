"""Models that are in the zoo more than once: with the same weights, or alike at every site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..results import Array, Duplicates
from .kinds import standard_deviation
from .questions import asked_of, vectors_of
from .search import about
from .vectors import Floats, Vectors, Whole

if TYPE_CHECKING:
    from .zoo import Zoo

SAME = 1 - 1e-5
SURE = 6  # standard deviations that short vectors may be off


def find_duplicates(zoo: Zoo, threshold: float, kind: str, filters: Mapping[str, Any]) -> Duplicates:
    """See `Zoo.duplicates`."""
    if not 0.5 <= threshold <= 1:
        raise ValueError(f"threshold must be a similarity from 0.5 to 1, got {threshold!r}")
    vectors = vectors_of(zoo, kind, **filters)
    exact = zoo.store.exact() if kind == "cka" else None
    found: list[tuple[int, int, float, bool, str]] = []  # model, the one before it, similarity, by whole vectors, why
    counts = dict(zip(vectors.models.tolist(), vectors.count.tolist(), strict=True))
    first: dict[str, int] = {}
    for model, digest in zoo.store.same_digests(vectors.kind, **filters):
        if model in counts:  # else it came meanwhile
            other = first.setdefault(digest, model)
            if other != model and counts[other] == counts[model]:
                found.append((model, other, *_lowest_cosine(vectors, exact, other, model), "same weights"))
    left = vectors.part(~np.isin(vectors.models, [one[0] for one in found]))
    off = SURE * standard_deviation(threshold, vectors.rows.shape[1]) + 1e-6  # rounding of float32
    taken: set[int] = set()  # duplicates, which nothing else is held against
    for model, others in near_models(left, threshold - off, taken):
        for other in others.tolist():
            value, by_whole = _lowest_cosine(vectors, exact, other, model)
            if value >= threshold:
                taken.add(model)
                found.append((model, other, value, by_whole, "alike at every site"))
                break
    found.sort(key=lambda one: one[0])  # numbers go up in the order in which models were added
    facts = zoo.store.describe(sorted({model for one in found for model in one[:2]}), vectors.kind)
    rows = [
        {"name": facts[model]["name"], "same_as": facts[other]["name"], "why": why, "value": value, "exact": by_whole}
        | about(facts[model])
        for model, other, value, by_whole, why in found
        if model in facts and other in facts  # else one was removed meanwhile
    ]
    asked = {"kind": kind, "threshold": threshold, "models": len(vectors.models)}
    note = "Alike at every site: the lowest similarity over sites, in order, is at least the threshold."
    return Duplicates(asked_of(zoo, asked, filters), tuple(rows), (note,))


def _lowest_cosine(short: Vectors, exact: Vectors | None, a: int, b: int) -> tuple[float, bool]:
    """The lowest cosine of two models at a site, and whether by the whole vectors."""
    for vectors in (exact, short):
        if vectors is not None:
            mine, theirs = vectors.of_model(a), vectors.of_model(b)
            if mine is not None and theirs is not None:
                return float((mine * theirs).sum(1).min()), vectors is exact
    raise AssertionError("both have short vectors")


# Which models may be copies of which, by the short vectors: without a look at most pairs, and none is missed
#
# Vectors of length 1 with a cosine of c are √(2 − 2c) apart, and on any axis no farther: models are sorted along the
# one on which they differ most, by their last site, and held only against those within that distance.

BLOCK = 512  # models that are held against those before them at a time
STRIP = 64  # of them, next to each other on the axis
MOST_OTHERS = 4096  # models that these are held against at a time
SAMPLED = 2000  # models that the axis is made from
CHECKED = 64  # candidates that are looked at site by site at a time
ROUNDING = 1e-5  # of float32, in squared distances


def near_models(vectors: Vectors, least: float, taken: Set[int]) -> Iterator[tuple[int, Whole]]:
    """Each model that has some before it with as many sites and a cosine of at least `least` at each, and those.

    `taken`: models that are no longer of interest, which may become more meanwhile.
    """
    vectors.verify()
    models = vectors.models
    if not len(models):
        return
    sampled = np.unique(np.linspace(0, len(models) - 1, min(len(models), SAMPLED)).astype(np.int64))
    apart = _last_rows(vectors, sampled)
    apart = apart - apart.mean(0)
    axis = np.linalg.eigh(apart.T @ apart)[1][:, -1]
    before = np.empty(0, np.int64)  # places of models, sorted along the axis
    along = np.empty(0)
    longest = 0.0  # squared: files of others have vectors of nearly length 1
    for start in range(0, len(models), BLOCK):
        block = np.arange(start, min(start + BLOCK, len(models)))
        here = _last_rows(vectors, block)
        at = (here @ axis).astype(np.float64)
        longest = max(longest, float(np.square(here).sum(1).max()))
        radius = (max(2 * longest - 2 * least, 0.0) + ROUNDING) ** 0.5
        inside = np.argwhere(np.tril(_close(vectors, least, block, here, block), -1))
        pairs = [(inside[:, 0], block[inside[:, 1]])]  # places in the block, and among all
        for strip in np.split(np.argsort(at), range(STRIP, len(block), STRIP)):
            first = int(np.searchsorted(along, at[strip[0]] - radius))
            stop = int(np.searchsorted(along, at[strip[-1]] + radius, side="right"))
            for reach in range(first, stop, MOST_OTHERS):
                others = before[reach : min(reach + MOST_OTHERS, stop)]
                a, b = np.nonzero(_close(vectors, least, block[strip], here[strip], others))
                pairs.append((strip[a], others[b]))
        a, b = (np.concatenate(each) for each in zip(*pairs, strict=True))
        for k in np.unique(a).tolist():
            some = np.sort(b[a == k])
            some = some[[int(model) not in taken for model in models[some]]]
            if len(some := _near_everywhere(vectors, least, start + k, some)):
                yield int(models[start + k]), models[some]
        left = np.array([int(model) not in taken for model in models[block]], bool)
        before, along = np.concatenate([before, block[left]]), np.concatenate([along, at[left]])
        order = np.argsort(along, kind="stable")
        before, along = before[order], along[order]


def _last_rows(vectors: Vectors, places: Whole) -> Floats:
    """The vectors of the last site."""
    return np.asarray(vectors.rows[vectors.first[places] + vectors.count[places] - 1])


def _close(vectors: Vectors, least: float, some: Whole, here: Floats, others: Whole) -> NDArray[np.bool_]:
    """Which models have as many sites as others, and are near them by the last: (some, others)."""
    close: NDArray[np.bool_] = here @ _last_rows(vectors, others).T >= least
    close &= vectors.count[some][:, None] == vectors.count[others][None]
    return close


def _near_everywhere(vectors: Vectors, least: float, place: int, others: Whole) -> Whole:
    """Those of the others that are near a model at every other site, too."""
    first, count = vectors.first, int(vectors.count[place])
    own = vectors.rows[first[place] : first[place] + count]
    near = [np.empty(0, np.int64)]
    for start in range(0, len(others), CHECKED):
        some = others[start : start + CHECKED]
        rows: Array = np.asarray(vectors.rows[first[some][:, None] + np.arange(count)[None]])
        near.append(some[(rows * own[None]).sum(2).min(1) >= least])
    return np.concatenate(near)

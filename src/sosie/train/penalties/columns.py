"""Columns: the layers that are compared, one an activation, and which two of them make a pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ...capture import SiteError, nearest
from ..taps import Shown

Pairs = str | Sequence[tuple[str, str]] | None
KINDS = ("stage", "all", "same")
Pair = tuple[int, int]  # places among the columns


@dataclass(frozen=True, eq=False)
class Column:
    """One layer of one model, or what goes into a stage of it."""

    label: str
    model: int  # which of the models; −1 is the target
    shown: Shown


Choose = Callable[[Sequence[Sequence[Shown]]], tuple[list[Column], list[Pair]]]


class Plan:
    """What was chosen in the last step: worked out anew only where other sites are shown, or others share a value."""

    def __init__(self) -> None:
        self._key: Any = None
        self._places: list[tuple[str, int, int]] = []
        self._pairs: Sequence[Pair] = ()

    def columns(self, sides: Sequence[Sequence[Shown]], choose: Choose) -> tuple[list[Column], Sequence[Pair]]:
        shown = [each for side in sides for each in side]
        first: dict[int, int] = {}
        values = [(each.site, each.is_input, first.setdefault(id(each.value), k)) for k, each in enumerate(shown)]
        key = [len(side) for side in sides], values
        if key != self._key:
            columns, self._pairs = choose(sides)
            place = {id(each): k for k, each in enumerate(shown)}
            self._places = [(column.label, column.model, place[id(column.shown)]) for column in columns]
            self._key = key
        return [Column(label, model, shown[k]) for label, model, k in self._places], self._pairs


def check_pairs(pairs: Pairs, *, alone: bool) -> Pairs:
    """What is asked for, the default put in: pairs within a stage of one model, the same site of several."""
    if pairs is None:
        return "stage" if alone else "same"
    if isinstance(pairs, str):
        if pairs not in KINDS:
            raise ValueError(f"pairs={pairs!r}: 'stage', 'all', 'same' or a list of (site, site)")
        if alone == (pairs == "same"):
            raise ValueError(
                "pairs='same' compares one site of several models: give a list of models, or target="
                if alone
                else f"pairs={pairs!r} is for one model; several are compared at the same site, or by (site, site)"
            )
        return pairs
    listed = [tuple(pair) for pair in pairs]
    if not listed or any(len(pair) != 2 or not all(isinstance(site, str) for site in pair) for pair in listed):
        raise ValueError(f"pairs is a list of (site, site), two names each; got {pairs!r}")
    return listed  # type: ignore[return-value]


def stages(shown: Sequence[Shown]) -> list[list[Shown]]:
    """Sites that run one after the other under one parent with outputs of one shape, and first what goes in.

    `layer1.0`, `layer1.1`, … of a residual network; the blocks of a transformer; in a plain chain of layers, as VGG's,
    all layers of one resolution and width. A layer that fits no neighbour is a stage of its own, with its input.
    """
    found: list[list[Shown]] = []
    entered: dict[str, Shown] = {}
    before: tuple[Any, ...] | None = None
    for each in shown:
        if each.is_input:
            entered[each.site.label] = each
            continue
        key = (each.site.module_name.rpartition(".")[0], each.site.shape)
        if key != before:
            found.append([entered[each.site.label]] if each.site.label in entered else [])
        found[-1].append(each)
        before = key
    return found


def of_one(shown: Sequence[Shown], pairs: Pairs) -> tuple[list[Column], list[Pair]]:
    """The columns of one model, and each two that are compared, once."""
    if pairs == "stage":
        columns: list[Column] = []
        chosen: list[Pair] = []
        for stage in stages(shown):
            start = len(columns)
            columns += [Column(each.label, 0, each) for each in stage]
            chosen += combinations(range(start, len(columns)), 2)
    else:
        columns = [Column(each.label, 0, each) for each in shown if not each.is_input]
        chosen = list(combinations(range(len(columns)), 2)) if pairs == "all" else _listed(columns, columns, pairs)
    if not chosen:
        raise SiteError(
            f"the sites give one layer only ({columns[0].label!r}): a penalty within a model needs at least two, so "
            "name more, or leave sites out"
        )
    return columns, chosen


def of_several(shown: Sequence[Sequence[Shown]], pairs: Pairs) -> tuple[list[Column], list[Pair]]:
    """The columns of several models, and each two of different models that are compared, once."""
    models = [
        [Column(f"{each.label} of model {k}", k, each) for each in model if not each.is_input]
        for k, model in enumerate(shown)
    ]
    columns = [column for model in models for column in model]
    if pairs != "same":
        chosen = [
            pair
            for a, b in combinations(models, 2)
            for pair in _listed(a, b, pairs, start_a=columns.index(a[0]), start_b=columns.index(b[0]))
        ]
        return columns, chosen
    by_label = [{column.shown.label: columns.index(column) for column in model} for model in models]
    for k, labels in enumerate(by_label[1:], 1):
        _same_labels(by_label[0], labels, f"model {k}")
    return columns, [(a[label], b[label]) for label in by_label[0] for a, b in combinations(by_label, 2)]


def with_target(shown: Sequence[Shown], target: Sequence[Shown], pairs: Pairs) -> tuple[list[Column], list[Pair]]:
    """The columns of a model and of what it is to become like, and which belongs to which."""
    own = [Column(each.label, 0, each) for each in shown if not each.is_input]
    theirs = [Column(f"{each.label} of the target", -1, each) for each in target]
    if pairs != "same":
        return own + theirs, _listed(own, theirs, pairs, start_b=len(own))
    ours, there = ({column.shown.label: k for k, column in enumerate(side)} for side in (own, theirs))
    _same_labels(ours, there, "the target")
    return own + theirs, [(k, len(own) + there[label]) for label, k in ours.items()]


def used(columns: Sequence[Column], pairs: Sequence[Pair]) -> tuple[list[Column], list[Pair]]:
    """Without the columns that are in no pair; what goes into a stage is the column of the layer that gave it."""
    order = sorted({k for pair in pairs for k in pair})
    index: dict[int, int] = {}
    kept: list[Column] = []
    at: dict[int, int] = {}
    for k in order:
        column = columns[k]
        same = at.setdefault(id(column.shown.value), len(kept))
        if same == len(kept) or not (column.shown.is_input or kept[same].shown.is_input):
            same = len(kept)  # also of a layer that passes on what it got: it keeps its name
            kept.append(replace(column))
        index[k] = same
    return kept, [(index[a], index[b]) for a, b in pairs]


def _listed(a: Sequence[Column], b: Sequence[Column], pairs: Any, *, start_a: int = 0, start_b: int = 0) -> list[Pair]:
    found = []
    for left, right in pairs:
        ends = []
        for label, side, start in ((left, a, start_a), (right, b, start_b)):
            known = [column.shown.label for column in side]
            if label not in known:
                raise SiteError(f"pairs names {label!r}, which is none of the sites{nearest(label, known)}")
            ends.append(start + known.index(label))
        if ends[0] == ends[1]:
            raise SiteError(f"pairs has {left!r} with itself, which is always the same")
        found.append((ends[0], ends[1]))
    return found


def _same_labels(a: Mapping[str, int], b: Mapping[str, int], who: str) -> None:
    missing = [label for label in a if label not in b]
    if missing:
        raise SiteError(
            f"{who} has no site {missing[0]!r}{nearest(missing[0], b)}; say which belongs to which: "
            "pairs=[(site, site), …]"
        )

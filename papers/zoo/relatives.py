"""Experiment `relatives`: how often does a zoo find the true relative of a network, by each kind of fingerprint?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from counting import auroc, share
from filling import Known, filled, known
from networks import COPIES
from settings import Settings

from sosie import Zoo
from sosie.linalg import adjusted_rand_index

Networks = dict[str, Known]
Is = Callable[[Known, Known], bool]
Nearest = Callable[[str, str, str | None], str | None]  # of a network, in a way, among those of a tag

WAYS: dict[str, dict[str, Any]] = {  # of searching; all but the first two rest on the default `exact=True`
    "cka_short": {"kind": "cka", "exact": False},
    "cka": {"kind": "cka"},
    "cka_symmetric": {"kind": "cka", "symmetric": True},
    "weights": {"kind": "weights"},
    "weights_symmetric": {"kind": "weights", "symmetric": True},
    "atoms": {"kind": "atoms"},
}
RELATIONS: dict[str, Is] = {
    "parent": lambda one, other: other.name == one.parent,
    "family": lambda one, other: other.root == one.root,
    "seed": lambda one, other: (one.architecture, one.dataset) == (other.architecture, other.dataset),
    "data": lambda one, other: one.dataset == other.dataset,
    "architecture": lambda one, other: one.architecture == other.architecture,
}
# Who asks, among whom (a tag; None: all), and what a right answer is.
QUESTIONS: dict[str, tuple[tuple[str, ...], str | None, tuple[str, ...]]] = {
    "fine_tuned": (("fine_tuned",), None, ("parent", "family", "data", "architecture")),
    **{kind: ((kind,), None, ("parent", "family")) for kind in COPIES},
    "parents": (("parents",), None, ("family",)),
    "scratch": (("scratch",), "scratch", ("seed", "data", "architecture")),
    "published": (("published",), None, ("seed",)),
}
SCORES = ("score", "above", "cka", "weights", "early")  # what `family` says of a candidate
THRESHOLDS = (1 - 1e-5, 0.9999, 0.999, 0.99, 0.95, 0.9)  # the first is the default of `duplicates`


def relatives(s: Settings) -> dict[str, Any]:
    networks = known(s)
    zoo = filled(s, networks)
    parents = {each.parent for each in networks.values()}
    kinds = {row["name"]: set(row["kinds"]) for row in zoo.list()}
    families = {name: zoo.family(name, k=len(zoo)).rows() for name in networks}

    def nearest(name: str, way: str, among: str | None) -> str | None:
        if way == "family":  # which has no filter
            rows = [row for row in families[name] if among is None or among in row["tags"]]
        else:
            rows = zoo.search(name, k=1, tag=among, **WAYS[way]).rows()
        return rows[0]["name"] if rows else None

    table = {
        question: {way: _asked(nearest, networks, kinds, parents, question, way) for way in (*WAYS, "family")}
        for question in QUESTIONS
    }
    bases = [
        _base(families[name][0], networks, parents, name)
        for name, each in networks.items()
        if each.relation != "published"
    ]
    found = {
        "models": dict(Counter(each.relation for each in networks.values())),
        "nearest": table,
        "bases": _bases(bases),
        "duplicates": {f"{threshold:g}": _duplicates(zoo, networks, threshold) for threshold in THRESHOLDS},
        "clusters": _clusters(zoo, networks),
        "map": _map(zoo, networks),
    }
    return {"numbers": _numbers(found), **found}


# The nearest


def _asked(
    find: Nearest, networks: Networks, kinds: dict[str, set[str]], parents: set[str | None], question: str, way: str
) -> dict[str, Any]:
    """For each relation how often the nearest network has it, and how often one drawn at random would."""
    who, among, relations = QUESTIONS[question]
    hits: dict[str, list[bool]] = {relation: [] for relation in relations}
    chances: dict[str, list[float]] = {relation: [] for relation in relations}
    silent = 0
    for name, one in networks.items():
        if not _asks(one, who, parents, networks):
            continue
        others = _candidates(networks, kinds, one, way, among)
        nearest = find(name, way, among) if others else None
        if nearest is None:
            silent += 1
            continue
        for relation in relations:
            right = RELATIONS[relation]
            hits[relation].append(right(one, networks[nearest]))
            chances[relation].append(sum(right(one, other) for other in others) / len(others))
    return {"silent": silent, **{relation: share(hits[relation], chances[relation]) for relation in relations}}


def _asks(one: Known, who: Sequence[str], parents: set[str | None], networks: Networks) -> bool:
    if "parents" in who:
        return one.name in parents
    if one.relation == "published":  # those of which there is another seed
        like = sum(RELATIONS["seed"](one, other) for other in networks.values())
        return "published" in who and like > 1
    return one.relation in who


def _candidates(networks: Networks, kinds: dict[str, set[str]], one: Known, way: str, among: str | None) -> list[Known]:
    """Those that a search goes through: with such vectors, and of atoms with the same coefficients."""
    kind = "cka" if way == "family" else WAYS[way]["kind"]
    own = {key for key in kinds[one.name] if key.partition("-")[0] == kind}
    return [
        other
        for other in networks.values()
        if other.name != one.name and own & kinds[other.name] and (among is None or among in other.tags)
    ]


# Which base?


def _base(first: dict[str, Any], networks: Networks, parents: set[str | None], name: str) -> dict[str, Any]:
    """Which base `family` names first for a network, and how sure it is."""
    one, other = networks[name], networks[first["name"]]
    return {
        "name": name,
        "relation": one.relation,
        "orphan": one.parent is None and name not in parents,  # has no relative at all
        "parent": RELATIONS["parent"](one, other),
        "family": RELATIONS["family"](one, other),
        **{score: first[score] for score in SCORES},
    }


def _bases(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Children against orphans: does a score tell whether the base that is named is one?"""
    children = [row for row in rows if row["relation"] == "fine_tuned" or row["relation"] in COPIES]
    orphans = [row for row in rows if row["orphan"]]
    found: dict[str, Any] = {"children": len(children), "orphans": len(orphans), "scores": {}}
    for score in SCORES:
        some, none = ([row for row in part if row[score] is not None] for part in (children, orphans))
        halves = [some[k::2] for k in range(2)], [none[k::2] for k in range(2)]
        best = _best_threshold(halves[0][0], halves[1][0], score)
        found["scores"][score] = {
            "auroc": auroc([row[score] for row in some], [row[score] for row in none]),
            "auroc_fine_tuned": auroc(
                [row[score] for row in some if row["relation"] == "fine_tuned"], [row[score] for row in none]
            ),
            "chosen": best,  # on one half, what it gives on the other:
            "elsewhere": _judged(halves[0][1], halves[1][1], score, best),
            "curve": [_judged(some, none, score, threshold) for threshold in _thresholds(some + none, score)],
        }
    return found


def _thresholds(rows: Sequence[dict[str, Any]], score: str, most: int = 25) -> list[float]:
    values = sorted({row[score] for row in rows})
    return [values[round(k * (len(values) - 1) / (most - 1))] for k in range(most)] if len(values) > most else values


def _judged(
    children: Sequence[dict[str, Any]], orphans: Sequence[dict[str, Any]], score: str, threshold: float
) -> dict[str, Any]:
    """A base is named where the score is at least this: right if it is the parent, or of the family."""
    named = [row for row in children if row[score] >= threshold]
    wrong = sum(row[score] >= threshold for row in orphans)
    found: dict[str, Any] = {"threshold": threshold, "orphans_named": wrong / len(orphans)}
    for what in ("parent", "family"):
        right = sum(row[what] for row in named)
        given = len(named) + wrong
        found |= {f"{what}_precision": right / given if given else None, f"{what}_recall": right / len(children)}
    return found


def _best_threshold(children: Sequence[dict[str, Any]], orphans: Sequence[dict[str, Any]], score: str) -> float:
    """That with the largest F1 = 2 right / (named + children), for the family."""

    def f1(threshold: float) -> float:
        right = sum(row["family"] for row in children if row[score] >= threshold)
        named = sum(row[score] >= threshold for row in (*children, *orphans))
        return 2 * right / (named + len(children))

    return max(sorted({row[score] for row in (*children, *orphans)}), key=f1)


# Copies, groups, a map


def _duplicates(zoo: Zoo, networks: Networks, threshold: float) -> dict[str, Any]:
    """Of each kind of copy the share that is listed beside one of its family, and how many unrelated ones are."""
    rows = [(networks[row["name"]], networks[row["same_as"]]) for row in zoo.duplicates(threshold, tag="ours")]
    right = {one.name for one, other in rows if one.root == other.root}
    of = {kind: [each.name for each in networks.values() if each.relation == kind] for kind in (*COPIES, "fine_tuned")}
    return {
        "listed": len(rows),
        "unrelated": sum(one.root != other.root for one, other in rows),
        **{kind: sum(name in right for name in names) / len(names) for kind, names in of.items()},
    }


def _clusters(zoo: Zoo, networks: Networks) -> dict[str, Any]:
    """How far groups agree with data, architecture and lineage: as many groups as there are, and as many as found."""
    found: dict[str, Any] = {}
    for kind in ("cka", "weights"):
        found[kind] = {}
        for what in ("dataset", "architecture", "root"):
            many = len({getattr(each, what) for each in networks.values() if "ours" in each.tags})
            found[kind][what] = _agreement(zoo, networks, kind, what, many)
        found[kind]["chosen"] = {
            what: _agreement(zoo, networks, kind, what, None) for what in ("dataset", "architecture", "root")
        }
    return found


def _agreement(zoo: Zoo, networks: Networks, kind: str, what: str, many: int | None) -> dict[str, Any]:
    answer = zoo.clusters(many, kind, tag="ours")
    rows = answer.rows()
    truth = [getattr(networks[row["name"]], what) for row in rows]
    found, wanted = (np.unique(each, return_inverse=True)[1] for each in ([row["cluster"] for row in rows], truth))
    rand = adjusted_rand_index(torch.from_numpy(found), torch.from_numpy(wanted))
    return {"groups": answer.asked["clusters"], "rand": rand}


def _map(zoo: Zoo, networks: Networks) -> dict[str, Any]:
    answer = zoo.map("cka")
    points = [
        [row["name"], networks[row["name"]].architecture, networks[row["name"]].dataset,
         networks[row["name"]].relation, round(row["x"], 4), round(row["y"], 4)]
        for row in answer.rows()
    ]  # fmt: skip
    return {"stress": answer.asked["stress"], "points": points}


def _numbers(found: dict[str, Any]) -> dict[str, float | None]:
    """What claims name: {who}_{relation}_{way}, and the rest."""
    numbers: dict[str, float | None] = {}
    for question, ways in found["nearest"].items():
        for way, cells in ways.items():
            for relation in QUESTIONS[question][2]:
                numbers[f"{question}_{relation}_{way}"] = cells[relation]["share"]
                numbers[f"{question}_{relation}_{way}_over_chance"] = _over_chance(cells[relation])
    whole, short = (numbers[f"fine_tuned_parent_{way}"] for way in ("cka", "cka_short"))
    numbers["fine_tuned_parent_lost_by_short"] = None if whole is None or short is None else whole - short
    for score, cells in found["bases"]["scores"].items():
        numbers |= {f"base_auroc_{score}": cells["auroc"], f"base_auroc_fine_tuned_{score}": cells["auroc_fine_tuned"]}
        numbers |= {f"base_elsewhere_{key}_{score}": value for key, value in cells["elsewhere"].items()}
    for place, cells in enumerate(found["duplicates"].values()):
        numbers |= {f"duplicates_{place}_{key}": value for key, value in cells.items()}
    for kind, cells in found["clusters"].items():
        numbers |= {f"clusters_{what}_{kind}": cells[what]["rand"] for what in ("dataset", "architecture", "root")}
    return numbers


def _over_chance(cell: dict[str, Any]) -> float | None:
    """How far the interval is above chance."""
    return None if cell["share"] is None else cell["low"] - cell["chance"]

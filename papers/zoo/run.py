"""A zoo whose relations are known: does a fingerprint find relatives, and does `recommend` find the best start?

    python papers/zoo/run.py --only train,finetune,finetune-again    # 200 networks and 800 fine-tunings, on a GPU
    python papers/zoo/run.py --only relatives,recommend --device cpu # what the zoo says of them: minutes on a CPU
    python papers/zoo/run.py --small                                 # a smoke run on a CPU: its numbers mean nothing
    python papers/zoo/draw.py                                        # the figures, from results/*.json

The networks lie in nets/, or the folder that SOSIE_CHECKPOINTS names, each in a file of its own that is written when it
is trained: a run that was ended goes on where it was. SOSIE_DATA names the folders with the images (README.md says
which).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosie import Zoo
from sosie.factory import listed_folders
from sosie.linalg import adjusted_rand_index
from sosie.results import TRANSFER

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import running
from counting import Array, auroc, bootstrapped, kendall, random_best, regret, share, spearman
from networks import (
    COPIES,
    Architecture,
    Job,
    Recipe,
    Source,
    Target,
    all_jobs,
    finetune,
    finetune_again,
    path_of,
    record_of,
    scratch_jobs,
    specification,
    task,
    tested,
    train,
)

# How much of everything: the networks, what they are trained on, and a smoke run.


ARCHITECTURES = (
    Architecture("cnn", "small_cnn", (("width", 10), ("channels", 3), ("size", 32))),
    Architecture("atoms", "small_cnn", (("width", 10), ("channels", 3), ("size", 32), ("atoms", 6))),
    Architecture("resnet8", "resnet8", (("width", 0.5),)),
    Architecture("tiny10", "tiny10", (("width", 0.75),)),
)
SOURCES = (  # in a circle: a network is fine-tuned on the next two
    Source("mnist", 10, 5000),
    Source("cifar10", 10, 5000),
    Source("fashion-mnist", 10, 5000),
    Source("tiny-imagenet", 100, 1250),
    Source("cifar100", 50, 5000),
)
TARGETS = (
    Target("cifar100-50s", "cifar100", range(50, 60), 1000),
    Target("cifar100-60s", "cifar100", range(60, 70), 1000),
    Target("cifar100-70s", "cifar100", range(70, 80), 1000),
    Target("tiny-imagenet-180s", "tiny-imagenet", range(180, 200), 500),
    Target("inverted-mnist", "mnist", range(10), 500, inverted=True),
)


@dataclass(frozen=True)
class Settings:
    """The real run."""

    device: str
    results: Path
    nets: Path  # the trained networks, and what is known of each: experiments share them
    synthetic: bool = False  # random images: no data are needed
    at_once: int = 16  # networks trained side by side
    mixed: bool = True
    architectures: tuple[Architecture, ...] = ARCHITECTURES
    sources: tuple[Source, ...] = SOURCES
    targets: tuple[Target, ...] = TARGETS
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    parents: tuple[int, ...] = (0, 1)  # the seeds whose networks have children
    further: int = 2  # data sets that each parent is fine-tuned on
    scratch: Recipe = Recipe(steps=2000, rate=2e-3)
    fine_tune: Recipe = Recipe(steps=800, rate=1e-3)
    train_on: Recipe = Recipe(steps=500, rate=5e-4)  # near copies
    real: Recipe = Recipe(steps=300, rate=1e-3, batch=50)  # fine-tuning on the targets
    tested: int = 2000  # images at most
    coefficients: int = 12345  # the seed of those that all networks of atoms share
    workers: int = 2  # processes of what needs no GPU
    probes: int = 256  # images that fingerprints are taken on
    rows: int = 500  # images that `recommend` looks at
    draws: int = 2000  # of the bootstrap


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    once = Recipe(steps=2, rate=1e-3, batch=12)
    return replace(
        full,
        synthetic=True,
        mixed=False,
        architectures=(
            Architecture("atoms", "small_cnn", (("width", 2), ("channels", 3), ("size", 32), ("atoms", 3))),
            Architecture("resnet8", "resnet8", (("width", 0.25),)),
        ),
        sources=tuple(replace(each, classes=3, half=24) for each in full.sources[:3]),
        targets=tuple(
            replace(each, classes=range(4, 7), images=24, inverted=inverted)
            for each, inverted in zip(full.targets[:2], (False, True), strict=True)
        ),
        seeds=(0, 1),
        parents=(0,),
        scratch=once,
        fine_tune=once,
        train_on=once,
        real=once,
        tested=24,
        workers=0,
        probes=32,
        rows=24,
        draws=100,
    )


# The networks in a sosie zoo, without a word about who comes from whom.


PUBLISHED = {  # files of SOSIE_WEIGHTS, and what opens them; networks of 224 × 224 images are left out
    "akamaster-resnet20-cifar10": "resnet20",
    "akamaster-resnet32-cifar10": "resnet32",
    "akamaster-resnet56-cifar10": "resnet56",
    **{f"drfrankenstein-resnet20w1-cifar10-seed{k:02}": "resnet20" for k in range(2)},
    **{f"drfrankenstein-tiny10-cifar10-seed{k:02}": "tiny10" for k in range(12)},
}


@dataclass(frozen=True)
class Known:
    """What is true of a network, and the zoo is not told."""

    name: str
    architecture: str
    dataset: str
    relation: str
    parent: str | None
    specification: str

    @property
    def root(self) -> str:
        """The network from scratch that it comes from: itself, or its parent."""
        return self.parent or self.name

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.relation,) if self.relation == "published" else (self.relation, "ours")


def known(s: Settings) -> dict[str, Known]:
    """All networks by name: ours, and the published ones that are there."""
    if missing := [job.name for job in all_jobs(s) if not path_of(s, job).is_file()]:
        raise FileNotFoundError(f"{len(missing)} networks, {missing[0]} the first, are not in {s.nets}: --only train")
    found = [_known(s, job) for job in all_jobs(s)]
    for name, network in PUBLISHED.items() if not s.synthetic else ():
        for folder in listed_folders("SOSIE_WEIGHTS"):
            if (folder / f"{name}.safetensors").is_file():
                kind = "-".join(name.split("-")[:2])  # who published it, and the architecture
                text = f"{network}@{folder / name}.safetensors"
                found.append(Known(name, kind, "cifar10", "published", None, text))
                break
    return {each.name: each for each in found}


def _known(s: Settings, job: Job) -> Known:
    return Known(job.name, job.architecture, job.dataset, job.relation, job.parent, specification(s, job))


def filled(s: Settings, networks: dict[str, Known]) -> Zoo:
    """A zoo of these networks; those that it has already stay."""
    zoo = Zoo(s.nets / "zoo", data=[probe(s)], inputs=s.probes)
    if gone := [name for name in zoo if name not in networks]:
        zoo.remove(*gone)
    facts = {each.name: {"tags": each.tags} for each in networks.values()}
    done = zoo.add({name: each.specification for name, each in networks.items()}, facts=facts, workers=s.workers)
    if done.failed:  # trained anew since
        again = {name: networks[name].specification for name in done.failed}
        done = zoo.add(again, facts={name: facts[name] for name in again}, replace=True)
    if done.failed:
        raise RuntimeError(f"{len(done.failed)} networks have no fingerprint: {done.failed}")
    return zoo


def probe(s: Settings) -> torch.Tensor:
    """The first test images of all data sets, in turn."""
    each = -(-s.probes // len(s.sources))
    images = torch.stack([tested(s, source).images[:each] for source in s.sources], 1).flatten(0, 1)
    if len(images) < s.probes:
        raise ValueError(f"{len(images)} images to probe with, {s.probes} are wanted")
    return images[: s.probes].cpu().float() / 255


# Experiment `relatives`: how often does a zoo find the true relative of a network, by each kind of fingerprint?


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


# Experiment `recommend`: do the scores of `Zoo.recommend` rank networks as real fine-tuning does?


LAST = {"small_cnn": "relu4", "CifarResNet": "layer3.0"}  # what reaches the head, where place -2 is another layer
PROBE, PROBE_LAST = "probe_accuracy", "probe_last"
BASELINES = ("source_accuracy", "parameters")
RECOMMENDED_SCORES = (*TRANSFER, PROBE, PROBE_LAST, *BASELINES)


def recommend(s: Settings) -> dict[str, Any]:
    """Every score of every network from scratch for every target, against the accuracy that fine-tuning gave."""
    truths = _truths(s)
    zoo = filled(s, known(s))
    scores = _scores(s, zoo)
    facts = {job.name: record_of(s, job) for job in scratch_jobs(s)}
    for of_target in scores.values():
        for name, row in of_target.items():
            row |= {"source_accuracy": facts[name]["accuracy"], "parameters": facts[name]["parameters"]}
    groups: dict[str, list[str]] = {}
    for name, fact in facts.items():
        groups.setdefault(fact["architecture"], []).append(name)
    judged = {score: _judged_choice(s, score, scores, truths[0], groups) for score in RECOMMENDED_SCORES}
    chance = {target: _chance(truth) for target, truth in truths[0].items()}
    again = _again(truths)
    return {"numbers": _numbers_of_choices(judged, chance), "scores": judged, "chance": chance, "again": again}


def _truths(s: Settings) -> list[dict[str, dict[str, float]]]:
    """{target: {network: accuracy}}: the mean of both runs, then each, where there are two."""
    runs = []
    for name in ("finetune", "finetune-again"):
        path = s.results / f"{name}.json"
        if path.is_file():
            found = json.loads(path.read_text("utf-8"))
            runs.append({
                target: dict(zip(found["models"], reached, strict=True))
                for target, reached in found["accuracies"].items()
            })  # fmt: skip
        elif not runs:
            raise FileNotFoundError(f"no {path}: --only finetune makes it")
    mean = {
        target: {name: sum(run[target][name] for run in runs) / len(runs) for name in of_target}
        for target, of_target in runs[0].items()
    }
    return [mean, *runs] if len(runs) > 1 else [mean]


# What the zoo says


def _scores(s: Settings, zoo: Zoo) -> dict[str, dict[str, dict[str, Any]]]:
    """{target: {network: {score: value}}}."""
    ask = partial(_asked_of_tasks, s, zoo)
    if not s.workers:
        return dict(zip((each.name for each in s.targets), map(ask, s.targets), strict=True))
    fresh = get_context("spawn")  # a fork would take over locks that threads hold
    with ProcessPoolExecutor(s.workers, fresh, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return dict(zip((each.name for each in s.targets), pool.map(ask, s.targets), strict=True))


def _asked_of_tasks(s: Settings, zoo: Zoo, target: Target) -> dict[str, dict[str, Any]]:
    images = task(s, target, "train")
    x = images.images.cpu().float() / 255
    data = list(zip(x.split(250), images.labels.cpu().split(250), strict=True))
    answer = zoo.recommend(data, len(zoo), probe_layer=-2, max_rows=s.rows, tag="scratch")
    if answer.asked["failed"]:
        raise RuntimeError(f"{target.name}: {[row for row in answer.rows() if row['reason']]}")
    found = {row["name"]: {score: row[score] for score in (*TRANSFER, PROBE)} for row in answer.rows()}
    for row in answer.rows():
        found[row["name"]][PROBE_LAST] = row[PROBE]
    for architecture, layer in LAST.items():
        other = {row["name"]: row["source"] for row in answer.rows() if row["architecture"] == architecture}
        other = {name: source for name, source in other.items() if _probed(answer.rows(), name) != layer}
        if other:
            again = zoo.recommend(data, len(other), other, probe_layer=layer, max_rows=s.rows)
            for row in again.rows():
                found[row["name"]][PROBE_LAST] = row[PROBE]
    return found


def _probed(rows: Sequence[dict[str, Any]], name: str) -> str:
    site: str = next(row["probe_site"] for row in rows if row["name"] == name)
    return site


# How good that is


def _judged_choice(
    s: Settings,
    score: str,
    scores: dict[str, dict[str, dict[str, Any]]],
    truth: dict[str, dict[str, float]],
    groups: dict[str, list[str]],
) -> dict[str, Any]:
    """For each target ρ, τ and regret over all networks, and ρ within architectures; means over targets."""
    names = [name for group in groups.values() for name in group]
    sides = {target: _sides(score, scores[target], truth[target], names) for target in truth}
    found: dict[str, Any] = {"targets": {}}
    for target, (x, y) in sides.items():
        within = [spearman(*_sides(score, scores[target], truth[target], group)) for group in groups.values()]
        found["targets"][target] = {
            "spearman": spearman(x, y),
            "kendall": kendall(x, y),
            "within": _mean(within),
            "regret_1": regret(y, x, 1),
            "regret_5": regret(y, x, 5),
        }
    for key in ("spearman", "kendall", "within", "regret_1", "regret_5"):
        found[key] = _mean([cell[key] for cell in found["targets"].values()])
    found["interval"] = bootstrapped(list(sides.values()), s.draws, seed=0)
    return found


def _sides(
    score: str, scores: dict[str, dict[str, Any]], truth: dict[str, float], names: Sequence[str]
) -> tuple[Array, Array]:
    """The score, turned so that more is better, and the accuracy; what is undefined comes last."""
    sign = -1.0 if score in TRANSFER else 1.0
    values = [scores[name][score] for name in names]
    x = np.array([-np.inf if value is None else sign * value for value in values])
    return x, np.array([truth[name] for name in names])


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _chance(truth: dict[str, float]) -> dict[str, float]:
    """The regret of networks drawn at random, on average over all draws."""
    values = list(truth.values())
    return {f"regret_{k}": max(values) - random_best(values, min(k, len(values))) for k in (1, 5)}


def _again(truths: Sequence[dict[str, dict[str, float]]]) -> dict[str, float | None]:
    """ρ of the two runs of real fine-tuning: what no score can be much above."""
    if len(truths) < 3:
        return {}
    first, second = truths[1:]
    return {target: spearman(list(of.values()), [second[target][name] for name in of]) for target, of in first.items()}


def _numbers_of_choices(judged: dict[str, Any], chance: dict[str, dict[str, float]]) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    for score, found in judged.items():
        numbers |= {f"{score}_{key}": found[key] for key in ("spearman", "kendall", "within", "regret_1", "regret_5")}
        numbers[f"{score}_low"] = found["interval"][0] if found["interval"] else None
    for key in ("regret_1", "regret_5"):
        numbers[f"random_{key}"] = _mean([cell[key] for cell in chance.values()])
        numbers[f"probe_share_{key}"] = _ratio(numbers[f"{PROBE}_{key}"], numbers[f"random_{key}"])
    best = max(numbers[f"{score}_spearman"] or -1.0 for score in BASELINES)
    numbers["probe_over_baselines"] = (numbers[f"{PROBE}_spearman"] or -1.0) - best
    return numbers


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


EXPERIMENTS = {
    "train": train,
    "finetune": finetune,
    "finetune-again": finetune_again,
    "relatives": relatives,
    "recommend": recommend,
}

if __name__ == "__main__":
    running.start(PAPER, EXPERIMENTS, Settings, small)

"""A well-calibrated measure of weight similarity (wCKA): its figures, on networks of our own training.

    python papers/wcka/run.py                             # all of it, on a GPU and some cores
    python papers/wcka/run.py --only figure-3 --resume    # the networks are kept in between
    python papers/wcka/run.py --small                     # a smoke run on a CPU: its numbers mean nothing
    python papers/wcka/draw.py                            # the figures, from results/*.json

SOSIE_DATA names the folder with MNIST (README.md says which files).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import sosie
from sosie.benchmark import SCALES, Scale
from sosie.benchmark.candidates import Candidate, CandidateValues, open_candidates
from sosie.benchmark.population import ALL, ATTACKED, CLEAN, CORRUPTED, GROUPS, PAIR_KINDS, Images, probing_images
from sosie.benchmark.trials import (
    COEFFICIENTS,
    MANIPULATIONS,
    Bench,
    CalibrationNetworks,
    auc,
    difference,
    ground,
    manipulate,
)
from sosie.data import CORRUPTIONS
from sosie.measures import find
from sosie.weights import match_weights

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import running
from networks import HEADS, SCRATCH, Study, agree, each, networks, say, study, train_population
from running import remember

# How much of everything: the real run, and a smoke run. The paper leaves most of these numbers out.


OWN = "wcka"
RIVALS = ("normalized_bures", "linear_cka", "deconfounded_cka")  # the paper's: Procrustes as a similarity, CKA, dCKA
OTHERS = (  # which the paper did not test
    "debiased_cka",
    "deconfounded_cka(positive=False)",  # negative eigenvalues kept: dCKA can be below zero
    "kernel_alignment",  # CKA without centring, as equation 3 is printed
    "wcka_uncentred",  # as equation 5 is printed
    "wcka_lit",  # of the pixels that are lit in some training image
    "weight_cosine_matched",
    "mean_cca",
    "mutual_knn",
    "soft_correlation_match",
)

ATTACKS = (
    "fgsm(epsilon=0.1)",
    "fast_fgsm(epsilon=0.1)",
    "gaussian(epsilon=0.1)",
    "pgd(epsilon=0.1)",
    "trades(epsilon=0.1)",
)
PGD = "pgd(epsilon=0.1, steps=5)"  # to train against

SCRATCH_SCALE = replace(
    SCALES["paper"],
    name="wcka: from scratch",
    data=("mnist",),
    strategies=("standard", "fgsm(epsilon=0.1)", PGD),
    corruptions=tuple(CORRUPTIONS),
    attacks=ATTACKS,
    numbers=(10, 30, 100, 300, 1000),
    converged=10,
    checkpoints=11,
    converged_epochs=105,
)
HEADS_SCALE = replace(
    SCRATCH_SCALE,
    name="wcka: heads on a frozen trunk",
    architectures=((1, 32), (1, 1024), (10, 32)),
    epochs=(5, 10, 15, 20, 25),
    strategies=("standard", PGD),
    random=0,
    converged=0,
)


@dataclass(frozen=True)
class Settings:
    """The real run."""

    device: str  # that heads are trained and networks attacked on; perceptrons are trained, and measured, on the CPU
    results: Path
    cache: Path  # networks, and how far they agree
    workers: int  # processes; 0: none but this one
    seed: int = 0
    scratch: Scale = SCRATCH_SCALE
    heads: Scale = HEADS_SCALE
    measures: tuple[str, ...] = (OWN, *RIVALS, *OTHERS)
    head_measures: tuple[str, ...] = (OWN, *RIVALS, "debiased_cka", "kernel_alignment", "wcka_uncentred", "mutual_knn")
    head_rows: int = 1_500  # images at most that heads are compared on: one is 1,024 wide
    trunk_epochs: int = 24
    trunk_images: int = 60_000
    trunk_batch: int = 128
    paired_rows: int = 500  # images at most for measures of pairs of rows, where networks are many; figure 1 has 1,000
    manipulated: int = 5  # converged networks
    populations: tuple[int, ...] = (0, 1, 2)  # seeds: figure 3 again on other perceptrons
    head_populations: tuple[int, ...] = (0, 1, 2, 3)  # figure 4


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    scratch = replace(
        full.scratch,
        train=48,
        test=36,
        architectures=((1, 8), (2, 8)),
        seeds=2,
        epochs=(1, 2),
        strategies=("standard", "fgsm(epsilon=0.1)"),
        corruptions=("fog", "impulse_noise"),
        attacks=("fgsm(epsilon=0.1)",),
        calibrated=(2, 8),
        random=4,
        converged=2,
        checkpoints=2,
        converged_epochs=4,
        numbers=(12, 24),
        paired_rows=30,
        draws=50,
        batch=16,
        rate=3e-3,
    )
    heads = replace(
        scratch,
        name=full.heads.name,
        architectures=((1, 8), (2, 8)),
        strategies=("standard", "pgd(epsilon=0.1, steps=2)"),
        random=0,
        converged=0,
    )
    return replace(
        full,
        scratch=scratch,
        heads=heads,
        trunk_epochs=1,
        trunk_images=100,
        trunk_batch=50,
        paired_rows=20,
        head_rows=30,
        manipulated=2,
        populations=(0, 1),
        head_populations=(0, 1),
    )


# The measures under test, as the benchmark takes them.


def factors(model: nn.Sequential) -> list[Tensor]:
    """Of a chain of layers: (inputs, width), (width, width) …"""
    return [part.weight.detach().T for part in model if isinstance(part, nn.Linear)]


def wcka_lit(lit: Tensor) -> Callable[[Any, Any], float]:
    """wCKA of the inputs in `lit` alone: weights on the others never met a gradient, and are as they were drawn."""

    def value(a: nn.Sequential, b: nn.Sequential) -> float:
        first, second = (
            [part[lit.to(part.device)] if k == 0 else part for k, part in enumerate(factors(m))] for m in (a, b)
        )
        return sosie.measure("wcka", first, second)

    value.__name__ = "wcka_lit"
    value.of, value.closer = "models", "up"  # type: ignore[attr-defined]
    return value


def weight_cosine_matched(a: nn.Module, b: nn.Module) -> float:
    """Cosine of all parameters, once the neurons of B are in the order that fits those of A best."""
    if [p.shape for p in a.parameters()] != [p.shape for p in b.parameters()]:
        raise ValueError("networks of different shapes have no parameters to match")
    first, second = (parameters_to_vector(m.parameters()).double() for m in (a, match_weights(a, b).model_b))
    return float(torch.dot(first, second) / (first.norm() * second.norm()))


weight_cosine_matched.of, weight_cosine_matched.closer = "models", "up"  # type: ignore[attr-defined]


def candidate(
    name: str, scale: Scale, images: Images, *, paired_rows: int | None = None, rows: int | None = None
) -> Candidate:
    """`images`: what the first layer of the weights reads. `rows`, `paired_rows` (of measures of pairs): at most."""
    scale = replace(scale, paired_rows=paired_rows or scale.paired_rows)
    given: Any = name
    if name == "wcka_lit":
        given = wcka_lit((images.train.flatten(1) != 0).any(0))
    elif name == "weight_cosine_matched":
        given = weight_cosine_matched
    (found,) = open_candidates([given], scale)
    return replace(found, rows=min(found.rows or scale.test, rows or scale.test))


def reads_weights(name: str) -> bool:
    return name in ("wcka_lit", "weight_cosine_matched") or find(name).reads_weights


def mixed(kinds: dict[str, Tensor], seed: int) -> Tensor:
    """Every image once, clean or corrupted, as drawn."""
    stacked = torch.stack(list(kinds.values()))
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(stacked), (stacked.shape[1],), generator=random).to(stacked.device)
    return stacked[drawn, torch.arange(stacked.shape[1], device=stacked.device)]


# Figures 1 and 5: networks that were never trained against consecutive checkpoints of converged ones.


MIXED = "mixed"  # clean and corrupted images together, as the text of section 3.1 has it


@lru_cache
def probes_of(settings: Settings, kind: str) -> CalibrationNetworks:
    """Of a kind of images; the networks are the same."""
    at = study(settings, SCRATCH)
    if kind != MIXED:
        return at.probes
    kinds = {k: probing_images(k, at.images, settings.seed) for k in (CLEAN, *at.scale.corruptions)}
    images = replace(at.images, test=mixed(kinds, settings.seed))
    return CalibrationNetworks(at.scale, images, at.population, seed=settings.seed)


def probe(settings: Settings, name: str, kind: str, number: int, paired_rows: int | None = None) -> dict[str, Any]:
    """One measure on that many images of one kind: its values of pairs alike and unlike."""
    at = study(settings, SCRATCH)
    measure = candidate(name, at.scale, at.images, paired_rows=paired_rows)
    most = number if reads_weights(name) else min(number, measure.rows or number)
    found = probes_of(settings, kind).values(measure, CLEAN if kind == MIXED else kind, most)
    alike, unlike = (_values(one) for one in found)
    return {"number": most, "alike": alike, "unlike": unlike, "undefined": sum(len(f.values) for f in found)
            - len(alike) - len(unlike), **_summary(np.array(alike), np.array(unlike))}  # fmt: skip


def _values(found: CandidateValues) -> list[float]:
    return [round(value, 6) for value in found.values[found.defined].tolist()]


def _summary(alike: np.ndarray, unlike: np.ndarray) -> dict[str, Any]:
    if not len(alike) or not len(unlike):
        return {"auc": None, "gap": None}
    return {
        "auc": auc(alike, unlike, "up"),
        "gap": float(alike.min() - unlike.max()),  # below 0: the two overlap
        "alike_mean": float(alike.mean()),
        "alike_min": float(alike.min()),
        "unlike_mean": float(unlike.mean()),
        "unlike_sd": float(unlike.std(ddof=1)),
        "unlike_max": float(unlike.max()),
    }


def figure_1(settings: Settings) -> dict[str, Any]:
    """(a) All images, clean and mixed; (b) by their number; (c) time for one pair."""
    at = study(settings, SCRATCH)
    most = len(at.images.test)
    numbers = [*(n for n in at.scale.numbers if n < most), most]
    tasks = [(name, MIXED, most) for name in sorted(settings.measures, key=lambda n: n not in RIVALS)]
    tasks += [(name, CLEAN, n) for name in settings.measures for n in (numbers if not reads_weights(name) else [most])]
    found = dict(zip(tasks, each(settings, probe, tasks, "figure-1"), strict=True))
    both = {kind: {n: found[n, kind, most] for n in settings.measures} for kind in (CLEAN, MIXED)}
    by_number = {
        name: [[n, {k: v for k, v in found[name, CLEAN, n].items() if k not in ("alike", "unlike")}] for n in numbers]
        for name in settings.measures
        if not reads_weights(name)
    }
    settled = {
        name: _paired(found[name, CLEAN, numbers[-2]], found[name, CLEAN, most]) for name in RIVALS
    }  # of each pair of networks: from many images to all
    seconds = times(settings, numbers)
    return {
        "numbers": {**_calibrated(both), **_by_number(by_number, numbers), **_slowdowns(seconds), **_chance(at, both)},
        "distributions": both, "by_number": by_number, "settled": settled, "pair_seconds": seconds,
        "images": most,
    }  # fmt: skip


def _paired(many: dict[str, Any], whole: dict[str, Any]) -> list[float]:
    """How far each pair of networks that were not trained moves; nothing where a value is missing, or images are."""
    if many["undefined"] or whole["undefined"] or many["number"] == whole["number"]:
        return []
    return [round(b - a, 6) for a, b in zip(many["unlike"], whole["unlike"], strict=True)]


def _calibrated(both: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    for kind, by_measure in both.items():
        for name, found in by_measure.items():
            for key in ("auc", "gap", "alike_mean", "alike_min", "unlike_mean", "unlike_sd", "unlike_max"):
                numbers[f"{kind}_{name}_{key}"] = found.get(key)
        gaps = [by_measure[name]["gap"] for name in RIVALS]
        numbers[f"{kind}_rivals_that_overlap"] = None if None in gaps else sum(gap <= 0 for gap in gaps)
    return numbers


def _by_number(by_number: dict[str, Any], numbers: list[int]) -> dict[str, float | None]:
    """How the values of networks that were not trained settle; few images, many, and all that a measure gets."""
    few, many = numbers[0], numbers[-2]
    found: dict[str, float | None] = {}
    for name, rows in by_number.items():
        at = {n: row for n, row in rows if row.get("unlike_mean") is not None}
        if not {few, many, numbers[-1]} <= set(at):
            found |= dict.fromkeys(f"{name}_{k}" for k in ("drop", "settled", "narrowed"))
            continue
        found[f"{name}_drop"] = at[few]["unlike_mean"] - at[many]["unlike_mean"]
        found[f"{name}_settled"] = abs(at[many]["unlike_mean"] - at[numbers[-1]]["unlike_mean"])
        found[f"{name}_narrowed"] = at[few]["unlike_sd"] / at[many]["unlike_sd"]
    return found


def _chance(at: Study, both: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """Linear CKA of independent Gaussian maps of this size: √(p q / ((n + p) (n + q))), rows the inputs."""
    chance = at.images.classes / (at.images.inputs + at.images.classes)
    return {"wcka_chance": chance, "wcka_unlike_over_chance": both[CLEAN][OWN]["unlike_mean"] / chance}


def times(settings: Settings, numbers: list[int]) -> dict[str, list[list[float]]]:
    """Seconds for one pair by number of images, nothing known beforehand; here, on the CPU, with nothing beside it."""
    at = study(settings, SCRATCH)
    found: dict[str, list[list[float]]] = {}
    for name in (OWN, *RIVALS, "debiased_cka"):
        measure = candidate(name, at.scale, at.images)
        probes = CalibrationNetworks(replace(at.scale, budget=60.0), at.images, at.population, seed=settings.seed)
        own = [n for n in numbers if reads_weights(name) or n <= (measure.rows or n)]
        probes.seconds(measure, own[0])  # what is loaded at first use is no cost of the measure
        found[name] = [[n, probes.seconds(measure, n)] for n in own]
        say(f"figure-1: {name} takes {found[name][0][1] * 1e3:.2f} to {found[name][-1][1] * 1e3:.2f} ms")
    a, b = (factors(model) for model in at.population.converged[0][:2])
    found["wcka, matrices given"] = [[n, _seconds(lambda: sosie.measure("wcka", a, b))] for n in numbers]
    return found


def _seconds(call: Callable[[], float]) -> float:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _slowdowns(seconds: dict[str, list[list[float]]]) -> dict[str, float]:
    last = {name: rows[-1][1] for name, rows in seconds.items()}
    found = {f"{name}_slowdown".replace(", ", "_").replace(" ", "_"): rows[-1][1] / rows[0][1]
             for name, rows in seconds.items()}  # fmt: skip
    own = [value for _, value in seconds[OWN]]
    return {
        **found,
        "wcka_slowest_over_fastest": max(own) / min(own),
        "least_rival_over_wcka": min(last[name] for name in RIVALS) / last[OWN],
        "least_rival_over_wcka_matrices_given": min(last[name] for name in RIVALS) / last["wcka, matrices given"],
    }


def figure_5(settings: Settings) -> dict[str, Any]:
    """Networks that were not trained, by the kind of images that probe them."""
    at = study(settings, SCRATCH)
    names = [name for name in settings.measures if not reads_weights(name)]
    kinds = (CLEAN, *at.scale.corruptions)
    order = sorted(names, key=lambda n: n not in RIVALS[::-1])
    tasks = [(name, kind, len(at.images.test), settings.paired_rows) for kind in kinds for name in order]
    found = dict(zip(tasks, each(settings, probe, tasks, "figure-5"), strict=True))
    table = {name: {task[1]: found[task] for task in tasks if task[0] == name} for name in names}
    numbers: dict[str, float | None] = {}
    for name, by_kind in table.items():
        means = [row.get("unlike_mean") for row in by_kind.values()]
        spreads = [row.get("unlike_sd") for row in by_kind.values()]
        fog, noise = by_kind["fog"], by_kind["impulse_noise"]
        complete = None not in means
        numbers[f"{name}_fog_minus_impulse_noise"] = fog["unlike_mean"] - noise["unlike_mean"] if complete else None
        numbers[f"{name}_fog_sd_over_impulse_noise"] = fog["unlike_sd"] / noise["unlike_sd"] if complete else None
        numbers[f"{name}_range_of_means"] = max(means) - min(means) if complete else None
        numbers[f"{name}_range_of_sds"] = max(spreads) - min(spreads) if complete else None
        numbers[f"{name}_mean"] = float(np.mean(means)) if complete else None
    for by_kind in table.values():
        for row in by_kind.values():
            row.pop("alike")
    return {"numbers": numbers, "kinds": table}


# Figures 3 and 4: does a measure say how far networks agree, where they differ in one respect?


WORDS = ("seed", "architecture", "strategy")  # where the paper finds wCKA ahead; epochs: all alike
SLOW = ("deconfounded_cka", "normalized_bures", "weight_cosine_matched", "wcka_lit")  # begun first


def correlate(settings: Settings, population: str, name: str, kind: str) -> dict[str, Any]:
    """One measure over the pairs that differ in `kind`; in words where it has no value at all."""
    at = study(settings, population)
    rows = settings.head_rows if population == HEADS else None
    measure = candidate(name, at.scale, at.seen, paired_rows=settings.paired_rows, rows=rows)
    try:
        found = ground(measure, measure.closer or "up", at.ground, kind)
    except ValueError as error:
        return {"why": str(error), "groups": {}, "values": [], "sign": 1}
    found["values"] = found["values"].tolist()
    return found | {"sign": 1 if measure.closer != "down" else -1}


def lead(settings: Settings, population: str, rival: str, kind: str, own: Any, other: Any) -> dict[str, Any]:
    """How much better wCKA correlates than one rival: for each group of conditions and either coefficient."""
    at = study(settings, population).ground
    return {
        group: {
            name: difference(np.array(own), np.array(other), at, kind, group, ranks=name == "spearman")
            for name in COEFFICIENTS
        }
        for group in GROUPS
    }


def agreed(settings: Settings, population: str) -> dict[str, Any]:
    """How far pairs agree: quartiles for each kind and group of conditions."""
    at = study(settings, population).ground
    return {
        "agreement": {kind: {group: _quartiles(at.agreed(kind, group)) for group in GROUPS} for kind in PAIR_KINDS},
        "pairs": {kind: len(at.pairs(kind)) for kind in PAIR_KINDS},
        "epoch": at.agreed("epoch", ALL).tolist(),
    }


def figure_3(settings: Settings) -> dict[str, Any]:
    return _populations(settings, SCRATCH, settings.measures, settings.populations)


def figure_4(settings: Settings) -> dict[str, Any]:
    return _populations(settings, HEADS, settings.head_measures, settings.head_populations)


def _populations(settings: Settings, name: str, measures: tuple[str, ...], seeds: tuple[int, ...]) -> dict[str, Any]:
    """What the first population shows, and means over all of them; each is written when it is done."""
    parts = []
    for seed in seeds:
        asked = {"seed": seed, "name": name, "measures": measures, "rows": [settings.head_rows, settings.paired_rows]}
        asked |= {"scale": repr(settings.scratch if name == SCRATCH else settings.heads)}
        make = partial(_population, settings, seed, name, measures)
        parts.append(remember(settings.cache, f"{name}-population{seed}", asked, make))
    numbers = {}
    for key in parts[0]["numbers"]:
        values = [part["numbers"][key] for part in parts]
        numbers[key] = None if None in values else statistics.fmean(values)
        if key.endswith(("_lead_p", "_lead_low")):
            numbers[key] = values[0]  # of one population
    numbers |= _counts(numbers)
    shown = {key: parts[0][key] for key in ("correlations", "leads", "agreement", "pairs", "scatter")}
    return {"numbers": numbers, **shown, "populations": [_of_four(part) for part in parts]}


def _population(settings: Settings, seed: int, name: str, measures: tuple[str, ...]) -> dict[str, Any]:
    """A population of another seed has a folder of its own, and no networks for figure 1."""
    if seed != settings.seed:
        scratch = replace(settings.scratch, random=0, converged=0)
        settings = replace(settings, seed=seed, cache=settings.cache / f"seed{seed}", scratch=scratch)
        train_population(settings, name)
    return _figure(settings, name, measures)


def _of_four(part: dict[str, Any]) -> dict[str, Any]:
    """Of the paper's four measures over all conditions."""
    return {
        "numbers": part["numbers"],
        "correlations": {
            name: {
                kind: {"groups": {ALL: found["groups"].get(ALL, {})}}
                for kind, found in part["correlations"][name].items()
            }
            for name in (OWN, *RIVALS)
        },
        "leads": {
            name: {kind: {ALL: found.get(ALL, {})} for kind, found in part["leads"][name].items()} for name in RIVALS
        },
    }


def _figure(settings: Settings, population: str, measures: tuple[str, ...]) -> dict[str, Any]:
    agree(settings, population)
    slow_first = sorted(measures, key=lambda name: name not in SLOW)
    tasks = [(population, name, kind) for name in slow_first for kind in PAIR_KINDS]
    found = dict(zip(tasks, each(settings, correlate, tasks, f"correlations, {population}"), strict=True))
    table = {name: {kind: found[population, name, kind] for kind in PAIR_KINDS} for name in measures}
    pairs = [(rival, kind) for rival in measures for kind in PAIR_KINDS
             if rival != OWN and table[rival][kind]["values"]]  # fmt: skip
    tests = each(settings, lead, [(population, rival, kind, _oriented(table[OWN][kind]), _oriented(table[rival][kind]))
                                  for rival, kind in pairs], f"leads, {population}")  # fmt: skip
    leads = {name: {kind: test for (rival, kind), test in zip(pairs, tests, strict=True) if rival == name}
             for name in measures if name != OWN}  # fmt: skip
    (facts,) = each(settings, agreed, [(population,)], f"agreement of pairs, {population}")
    scatter = {name: [v if np.isfinite(v) else None for v in table[name]["epoch"]["values"]] for name in (OWN, *RIVALS)}
    numbers = {**_coefficients(table), **_leads(leads), **_all_similar(table)}
    numbers |= _counts(numbers)
    for by_kind in table.values():
        for one in by_kind.values():
            one.pop("values")
    return {
        "numbers": numbers, "correlations": table, "leads": leads, "agreement": facts["agreement"],
        "pairs": facts["pairs"], "scatter": {"agreement": facts["epoch"], **scatter},
    }  # fmt: skip


def _oriented(found: dict[str, Any]) -> list[float]:
    return [value * found["sign"] for value in found["values"]]


def _quartiles(values: np.ndarray) -> list[float]:
    return np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()


def _coefficient(table: dict[str, Any], name: str, kind: str, group: str, coefficient: str) -> float | None:
    found = table[name][kind]["groups"].get(group, {}).get(coefficient)
    return None if found is None else found["value"]


def _coefficients(table: dict[str, Any]) -> dict[str, float | None]:
    return {
        f"{kind}_{coefficient}_{name}": _coefficient(table, name, kind, ALL, coefficient)
        for kind in PAIR_KINDS
        for coefficient in COEFFICIENTS
        for name in table
    }


def _leads(leads: dict[str, Any]) -> dict[str, float | None]:
    """Over the best of the paper's three, and over each of the others; by Fisher's z and over models."""
    numbers: dict[str, float | None] = {}
    for kind in PAIR_KINDS:
        for coefficient in COEFFICIENTS:
            for group in GROUPS:
                over = [leads[name].get(kind, {}).get(group, {}).get(coefficient, {}) for name in RIVALS]
                end = "" if group == ALL else f"_{group}"
                whole = all("value" in one for one in over)
                numbers[f"{kind}_{coefficient}_lead{end}"] = min(o["value"] for o in over) if whole else None
                if group == ALL:
                    # a rival that is ahead has no p-value for wCKA's lead: it counts as 1
                    least = max(o["p"] if o["value"] > 0 else 1.0 for o in over) if whole else None
                    numbers[f"{kind}_{coefficient}_lead_p"] = least
                    lows = [o.get("over_models") for o in over]
                    numbers[f"{kind}_{coefficient}_lead_low"] = None if None in lows else min(low for low, _ in lows)
            for name in leads:
                one = leads[name].get(kind, {}).get(ALL, {}).get(coefficient, {})
                numbers[f"{kind}_{coefficient}_over_{name}"] = one.get("value")
    return numbers


def _counts(numbers: dict[str, float | None]) -> dict[str, float | None]:
    """In how many of the paper's comparisons wCKA is ahead."""
    found: dict[str, float | None] = {}
    for coefficient in COEFFICIENTS:
        ahead = [numbers[f"{kind}_{coefficient}_lead{end}"] for kind in WORDS
                 for end in ("", *(f"_{group}" for group in (CLEAN, CORRUPTED, ATTACKED)))]  # fmt: skip
        found[f"{coefficient}_ahead_of_12"] = None if None in ahead else sum(value > 0 for value in ahead)
    every = [numbers[f"{kind}_{coefficient}_lead"] for kind in PAIR_KINDS for coefficient in COEFFICIENTS]
    found["ahead_of_8"] = None if None in every else sum(value > 0 for value in every)
    debiased = [numbers.get(f"{kind}_{c}_over_debiased_cka") for kind in WORDS for c in COEFFICIENTS]
    found["ahead_of_debiased_cka_of_6"] = None if None in debiased else sum(value > 0 for value in debiased)
    return found


def _all_similar(table: dict[str, Any]) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    for kind in PAIR_KINDS:
        for coefficient in COEFFICIENTS:
            values = [_coefficient(table, name, kind, ALL, coefficient) for name in (OWN, *RIVALS)]
            rivals = values[1:]
            numbers[f"{kind}_{coefficient}_range_of_four"] = None if None in values else max(values) - min(values)
            numbers[f"{kind}_{coefficient}_least_of_four"] = None if None in values else min(values)
            numbers[f"{kind}_{coefficient}_best_rival"] = None if None in rivals else max(rivals)
            numbers[f"{kind}_{coefficient}_worst_rival"] = None if None in rivals else min(rivals)
            best = max(table, key=lambda name: _coefficient(table, name, kind, ALL, coefficient) or -2.0)
            top, own = (_coefficient(table, name, kind, ALL, coefficient) for name in (best, OWN))
            numbers[f"{kind}_{coefficient}_behind_the_best"] = None if top is None or own is None else top - own
    return numbers


# What wCKA does not move for, and what it moves for: networks changed with and without a change of function.


ROLLED, BIASED, DARK, SAME = "classes rolled", "biased", "dark pixels", ("permuted", "rescaled")


@lru_cache
def bench_of(settings: Settings) -> Bench:
    """Converged networks of 4 × 32, changed in every way that the benchmark knows."""
    at = study(settings, SCRATCH)
    models = [run[-1] for run in at.population.converged[: settings.manipulated]]
    return Bench(models, at.images.test, seed=settings.seed)


def manipulated(settings: Settings, name: str) -> dict[str, Any]:
    at = study(settings, SCRATCH)
    measure = candidate(name, at.scale, at.images, paired_rows=settings.paired_rows)
    far = at.probes.values(measure, CLEAN, measure.rows or len(at.images.test))[1]
    try:
        return manipulate(measure, float(far.values[far.defined].mean()), bench_of(settings))
    except ValueError as error:
        return {"why": str(error)}


def blind(settings: Settings) -> dict[str, Any]:
    tasks = [(name,) for name in settings.measures]
    found = dict(zip(settings.measures, each(settings, manipulated, tasks, "blind"), strict=True))
    own = found[OWN]["manipulations"]
    value = {m.name: own[m.name].get("value") for m in MANIPULATIONS}
    agreement = {m.name: own[m.name]["agreement"] for m in MANIPULATIONS}
    return {
        "numbers": {
            "permuted_and_rescaled_farthest_from_1": max(abs(1 - value[name]) for name in SAME),
            "permuted_and_rescaled_agreement": min(agreement[name] for name in SAME),
            "rolled_wcka": value[ROLLED], "rolled_agreement": agreement[ROLLED],
            "biased_wcka": value[BIASED], "biased_agreement": agreement[BIASED],
            "dark_pixels_wcka": value[DARK], "dark_pixels_agreement": agreement[DARK],
            "dark_pixels_wcka_lit": found["wcka_lit"]["manipulations"][DARK].get("value"),
            "dark_pixels_linear_cka": found["linear_cka"]["manipulations"][DARK].get("value"),
            "rescaled_linear_cka": found["linear_cka"]["manipulations"]["rescaled"].get("value"),
            "untrained_wcka": found[OWN]["far"],
        },
        "measures": found,
    }  # fmt: skip


EXPERIMENTS = {
    "networks": networks,
    "figure-1": figure_1,
    "figure-3": figure_3,
    "figure-5": figure_5,
    "blind": blind,
    "figure-4": figure_4,  # the longest
}


def settings(device: str, results: Path, nets: Path) -> Settings:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = int(os.environ.get("SOSIE_WORKERS", min(cores, 16) if cores > 2 else 0))
    return Settings(device, results, nets, workers)


if __name__ == "__main__":
    running.start(PAPER, EXPERIMENTS, settings, small)

"""Figures 1 and 5: networks that were never trained against consecutive checkpoints of converged ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from measures import candidate, factors, mixed, reads_weights
from networks import SCRATCH, Study, study
from parallel import each, say
from settings import OWN, RIVALS, Settings

import sosie
from sosie.benchmark.candidates import CandidateValues
from sosie.benchmark.population import CLEAN, probing_images
from sosie.benchmark.trials import Probes, auc

MIXED = "mixed"  # clean and corrupted images together, as the text of section 3.1 has it


@lru_cache
def probes_of(settings: Settings, kind: str) -> Probes:
    """Of a kind of images; the networks are the same."""
    at = study(settings, SCRATCH)
    if kind != MIXED:
        return at.probes
    kinds = {k: probing_images(k, at.images, settings.seed) for k in (CLEAN, *at.scale.corruptions)}
    images = replace(at.images, test=mixed(kinds, settings.seed))
    return Probes(at.scale, images, at.population, seed=settings.seed)


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
        "numbers": {**_calibrated(both), **_by_number(by_number, numbers), **_timed(seconds), **_chance(at, both)},
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
        probes = Probes(replace(at.scale, budget=60.0), at.images, at.population, seed=settings.seed)
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


def _timed(seconds: dict[str, list[list[float]]]) -> dict[str, float]:
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

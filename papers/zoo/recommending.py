"""Experiment `recommend`: do the scores of `Zoo.recommend` rank networks as real fine-tuning does?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from counting import Array, bootstrapped, kendall, random_best, regret, spearman
from data import task
from filling import filled, known
from networks import record_of, scratch_jobs
from settings import Settings, Target

from sosie import Zoo
from sosie.results import TRANSFER

LAST = {"small_cnn": "relu4", "CifarResNet": "layer3.0"}  # what reaches the head, where place -2 is another layer
PROBE, PROBE_LAST = "probe_accuracy", "probe_last"
BASELINES = ("source_accuracy", "parameters")
SCORES = (*TRANSFER, PROBE, PROBE_LAST, *BASELINES)


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
    judged = {score: _judged(s, score, scores, truths[0], groups) for score in SCORES}
    chance = {target: _chance(truth) for target, truth in truths[0].items()}
    again = _again(truths)
    return {"numbers": _numbers(judged, chance), "scores": judged, "chance": chance, "again": again}


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
    ask = partial(_asked, s, zoo)
    if not s.workers:
        return dict(zip((each.name for each in s.targets), map(ask, s.targets), strict=True))
    fresh = get_context("spawn")  # a fork would take over locks that threads hold
    with ProcessPoolExecutor(s.workers, fresh, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return dict(zip((each.name for each in s.targets), pool.map(ask, s.targets), strict=True))


def _asked(s: Settings, zoo: Zoo, target: Target) -> dict[str, dict[str, Any]]:
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


def _judged(
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


def _numbers(judged: dict[str, Any], chance: dict[str, dict[str, float]]) -> dict[str, float | None]:
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

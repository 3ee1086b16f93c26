"""Intervals of what was measured: over networks where the results hold their scatter, else over sites or cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scatter import Found, Interval, Read, of_error, of_mean, of_share, of_summary
from scipy import stats

NETWORKS = 5  # of each data set
DRAWS = 10  # sketches
TEN, HUNDRED, DIGITS = "cifar10", "cifar100", "mnist"
SAME = tuple(f"{data}-{data}" for data in (TEN, HUNDRED, DIGITS))
NATURAL, TEN_DIGITS, HUNDRED_DIGITS = f"{TEN}-{HUNDRED}", f"{TEN}-{DIGITS}", f"{HUNDRED}-{DIGITS}"
ACROSS = (NATURAL, TEN_DIGITS, HUNDRED_DIGITS)
LATE, EARLY = slice(8, 10), slice(0, 7)
SIZE = 512


def intervals(read: Read) -> Found:
    return {
        **figure_1(read("figure-1")),
        **figures_2_and_3(read("figure-2"), read("figure-3")),
        **figure_4(read("figure-4")),
        **figure_5(read("figure-5")),
        **figures_11_to_14(read),
        **bounds(read("bounds").get("rows", [])),
    }


def error(pair: str, spread: float) -> float:
    """Of a mean over pairs of networks that share networks: at most this."""
    return spread * math.sqrt((2 if pair in SAME else 1) / NETWORKS)


def figure_1(found: dict[str, Any]) -> Found:
    """Sites at which a desideratum surely holds, to those at which it may hold."""
    edge = float(stats.t.ppf(0.975, NETWORKS - 1))
    counts: Found = {}
    for sharing, kernels in found.get("curves", {}).items():
        for kernel, measures in kernels.items():
            for measure, curves in measures.items():
                if not {*SAME, *ACROSS} <= set(curves):
                    continue
                name = f"figure-1/{sharing}_{kernel}_{measure}"
                counts |= {f"{name}_{key}": interval for key, interval in _desiderata(curves, edge).items()}
    return counts


def _desiderata(curves: dict[str, Any], edge: float) -> Found:
    sites = list(curves[NATURAL])

    def above(one: str, other: str, site: str) -> tuple[bool, bool]:
        """Surely, and perhaps."""
        a, b = curves[one][site], curves[other][site]
        if None in (a["mean"], b["mean"], a["spread"], b["spread"]):
            return False, True
        half = edge * math.hypot(error(one, a["spread"]), error(other, b["spread"]))
        return a["mean"] - b["mean"] > half, a["mean"] - b["mean"] > -half

    wanted = {
        "first": [(same, other) for same in SAME for other in ACROSS],
        "second": [(NATURAL, TEN_DIGITS), (NATURAL, HUNDRED_DIGITS)],
        "third": [(TEN_DIGITS, HUNDRED_DIGITS)],
    }
    wanted["all"] = [pair for pairs in wanted.values() for pair in pairs]
    of = f"sites, surely or perhaps, over {NETWORKS} networks of each data set"
    held: Found = {}
    for key, pairs in wanted.items():
        each = [[above(one, other, site) for one, other in pairs] for site in sites]
        sure, perhaps = (sum(all(case[k] for case in site) for site in each) for k in (0, 1))
        held[f"{key}_at"] = Interval(sure, perhaps, of, NETWORKS)
    gaps = [(abs(c["mean"] - c["chance"]), edge * error(p, c["spread"])) for p in ACROSS for c in curves[p].values()]
    low, high = max(max(gap - half, 0) for gap, half in gaps), max(gap + half for gap, half in gaps)
    held["strangers_farthest_from_chance"] = Interval(low, high, f"{NETWORKS} networks of each data set", NETWORKS)
    return held


def figures_2_and_3(task2vec: dict[str, Any], fisher: dict[str, Any]) -> Found:
    of = f"{NETWORKS} networks of each data set"
    found: Found = {}
    if similar := task2vec.get("similarity"):
        across = [error(p, similar[p]["spread"]) / 2 for p in (TEN_DIGITS, HUNDRED_DIGITS)]
        whole = math.hypot(error(SAME[2], similar[SAME[2]]["spread"]), *across)
        value = task2vec["numbers"]["digits_within_less_across"]
        found["figure-2/digits_within_less_across"] = of_error(value, whole, of, NETWORKS)
    if distance := fisher.get("distance"):

        def relative(pair: str) -> float:
            return error(pair, distance[pair]["spread"]) / distance[pair]["mean"]

        for key, pairs in (
            ("ten_from_others_over_hundred_from_digits", (NATURAL, HUNDRED_DIGITS)),
            ("hundred_and_digits_over_same", (HUNDRED_DIGITS, SAME[0])),
        ):
            value, half = fisher["numbers"][key], 1.96 * math.hypot(*map(relative, pairs))
            found[f"figure-3/{key}"] = Interval(value * math.exp(-half), value * math.exp(half), of, NETWORKS)
    return found


def figure_4(found: dict[str, Any]) -> Found:
    if not found:
        return {}
    numbers, curves = found["numbers"], found["curves"]
    cases = {"mean_embedding_larger_on_other_data": 168, "mean_over_norm_larger_on_own_data": 168,
             "mean_over_trace_highest_for_digits": 84}  # fmt: skip
    cases |= {f"{score}_digits_above_cifar100_for_cifar10": 28
              for score in ("mean_embedding", "kernel_norm", "kernel_trace")}  # fmt: skip
    held: Found = {f"figure-4/{key}": of_share(numbers[key], n, "cases of data and site") for key, n in cases.items()}
    deep, flat = (curves.get(name, {}).get("mean_embedding", {}) for name in ("resnet50", "resnet18"))
    ratios = [np.mean(deep[pair]) / np.mean(flat[pair]) for pair in SAME if pair in deep and pair in flat]
    held["figure-4/resnet50_over_resnet18"] = of_mean(ratios, "data sets, one ResNet-50 each")
    return held


def figure_5(found: dict[str, Any]) -> Found:
    maps = found.get("maps", {})
    held: Found = {}
    for kernel, name in (("hadamard", "figure-5/"), ("algorithm_1", "figure-5/algorithm_1_")):
        of = {pair: np.array(each["value"]) for pair, each in maps.get(kernel, {}).items()}
        if NATURAL in of and TEN_DIGITS in of and HUNDRED_DIGITS in of:
            late = np.concatenate([of[TEN_DIGITS][LATE, LATE].ravel(), of[HUNDRED_DIGITS][LATE, LATE].ravel()])
            held[f"{name}late_digits_with_late_cifar"] = of_mean(late, "pairs of blocks")
            early = of[NATURAL][EARLY].mean(0)
            held[f"{name}cifar100_with_early_cifar10"] = of_mean(early, "blocks of CIFAR-100")
        value = found.get("numbers", {}).get(f"{name.partition('/')[2]}largest_steps_at_3_and_8")
        if value is not None:
            held[f"{name}largest_steps_at_3_and_8"] = of_share(value, 4, "steps of two networks")
    return held


def figures_11_to_14(read: Read) -> Found:
    held: Found = {}
    maps = read("figure-11").get("maps", {}).get("resnet18-resnet50", {})
    depths = [np.array(maps[pair]["value"]).argmax(1) for pair in SAME if pair in maps]
    rises = [np.corrcoef(np.arange(len(d)), d)[0, 1] for d in depths if d.std() > 0]
    held["figure-11/best_match_deepens"] = of_mean(rises, "data sets")
    networks = read("figure-13")
    for way, name in (("curves", "imagenet"), ("algorithm_1", "algorithm_1_imagenet")):
        logs = {
            data: np.array(of["log_mean_over_norm"]) for data, of in networks.get(way, {}).get("imagenet", {}).items()
        }
        if {TEN, HUNDRED} <= set(logs):
            from_site = len(logs[TEN]) * 2 // 3
            late = (logs[HUNDRED] - logs[TEN])[from_site:]
            held[f"figure-13/{name}_cifar100_less_cifar10_late"] = of_mean(late, "late sites of one network")
            share = networks["numbers"][f"{name}_digits_highest"]
            held[f"figure-13/{name}_digits_highest"] = of_share(share, len(logs[TEN]), "sites of one network")
    cases = [case for of in read("figure-14").get("accuracy", {}).values() for case in of.values()]
    features = [np.array(case["features"]) for case in cases]
    of = "pairs of network and task"
    up = [np.corrcoef(np.arange(len(f)), f)[0, 1] for f in features if f.std() > 0]
    held["figure-14/features_rises_with_depth"] = of_mean(up, of)
    for key in ("one_epoch", "converged"):
        less = [f.max() - case[f"probe_{key}"] for f, case in zip(features, cases, strict=True)]
        held[f"figure-14/features_best_less_{key}"] = of_mean(less, of)
    return held


def bounds(rows: list[dict[str, Any]]) -> Found:
    """The site with the largest bias."""
    held: Found = {}
    for kernel, measure in {(row["kernel"], row["measure"]) for row in rows}:
        at = [row for row in rows if (row["kernel"], row["measure"], row["size"]) == (kernel, measure, SIZE)]
        at = [row for row in at if row["bias"] is not None and row["spread"] is not None]
        if at:
            most = max(at, key=lambda row: abs(row["bias"]))
            number = DRAWS - most["undefined"]
            name = f"bounds/{kernel}_{measure}_largest_bias"
            held[name] = of_summary(abs(most["bias"]), most["spread"], number, "sketches at one site")
    return held

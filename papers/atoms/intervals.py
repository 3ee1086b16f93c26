"""Intervals of what was measured: over seeds, clients, pairs of networks, or the bootstraps that the results hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import numpy as np
from scatter import Found, Interval, Read, held, of_correlation, of_difference, of_error, of_mean, of_share

METHODS = ("fedavg", "ditto", "fedrep", "fedprox", "fedper", "pretrain")
SEEDS = "seeds of ten networks each"
MEASURES = ("cca", "linear_cka", "debiased_cka", "rbf_cka", "grassmann", "weights")


def intervals(read: Read) -> Found:
    pairs = read("figure-4-table-long").get("seeds", [])
    return {
        **figure_2(read("figure-2").get("arms", {})),
        **figure_2_seeds(read("figure-2-seeds").get("arms", {}) | read("figure-2-seeds").get("more", {})),
        **figure_4b(read("figure-4b")),
        **by_seed(pairs, "figure-4-table-long/{}", pairs[0] if pairs else (), "pairs of networks"),
        **figure_5(read("figure-5")),
        **by_seed(read("figure-4b-long").get("seeds", []), "figure-4b-long/{}", ("strongest", "gain")),
        **by_seed(
            read("figure-5-long").get("seeds", []), "figure-5-long/alexnet_atoms_{}", ("depth_0.99", "first_0.99")
        ),
        **figure_12(read("figure-12").get("seeds", [])),
        **figure_6(read("figure-6")),
        **figure_9(read("figure-9a"), read("figure-9b")),
        **table_1(read("table-1-short")),
        **table_2(read("table-2")),
        **table_3(read("table-3"), "table-3"),
        **table_3(read("table-3-cifar10"), "table-3-cifar10"),
    }


def figure_2(arms: dict[str, Any]) -> Found:
    of = "10 networks, drawn again"
    found: Found = {}
    for arm, part in arms.items():
        for kind, prefix in (("atoms", ""), ("updates", "updates_")):
            for measure, of_measure in part["correlations"].get(kind, {}).items():
                interval = of_measure["network"]["pearson"].get("over_models")
                found[f"figure-2/{arm}_{prefix}{measure}"] = held(interval, of, 10)
    return found


def figure_2_seeds(arms: dict[str, Any]) -> Found:
    found: Found = {}
    for arm in {name.rpartition("_seed")[0] for name in arms}:
        seeds = [part["correlations"] for name, part in arms.items() if name.rpartition("_seed")[0] == arm]
        for kind, prefix in (("atoms", ""), ("updates", "updates_")):
            for measure in MEASURES:
                held_by = [seed[kind][measure] for seed in seeds if measure in seed.get(kind, {})]
                values = [one["network"]["pearson"]["value"] for one in held_by]
                found[f"figure-2-seeds/{arm}_{prefix}{measure}"] = of_mean(values, SEEDS)
    return found


def figure_4b(found: dict[str, Any]) -> Found:
    arms = found.get("arms", {})
    of = "10 networks, drawn again"
    by_arm = {name: held(arm["correlation"]["pearson"].get("over_models"), of, 10) for name, arm in arms.items()}
    strongest, without = by_arm.get("0.003"), by_arm.get("0")
    return {
        "figure-4b/strongest": strongest,
        "figure-4b/normalised_strongest": by_arm.get("cosines_0.003"),
        "figure-4b/gain": of_difference(strongest, without, found["numbers"]["gain"]) if arms else None,
        # A step of the correlation is up or down; each is smaller than the interval of either end.
        "figure-4b/steps_up": of_share(found["numbers"]["steps_up"] / 4, 4, "steps", times=4) if arms else None,
    }


def by_seed(seeds: list[dict[str, Any]], name: str, keys: Iterable[str], of: str = "seeds") -> Found:
    return {name.format(key): of_mean([one[key] for one in seeds], of) for key in keys} if seeds else {}


def figure_12(seeds: list[dict[str, list[float]]]) -> Found:
    of = "seeds of several pairs of tasks"
    keys = ("first_less_middle", "last_less_middle") if seeds else ()
    return {f"figure-12/alexnet_{key}": of_mean([fmean(one[key]) for one in seeds], of) for key in keys}


def figure_5(found: dict[str, Any]) -> Found:
    """Of the rank correlation over layers of one network."""
    result: Found = {}
    for name, run in found.get("runs", {}).items():
        number = len(run["sites"])
        for key in (f"{name}_depth_0.99", f"{name}_kernels_depth"):
            value = found["numbers"].get(key)
            if value is not None:
                result[f"figure-5/{key}"] = of_correlation(value, number, "layers of one network")
    return result


def figure_6(found: dict[str, Any]) -> Found:
    """Tasks are left out one by one, and what is left is clustered again: a jackknife."""
    if not found:
        return {}
    groups = np.array(found["groups"])
    last = max(found["maps"], key=int)
    first = min(found["maps"], key=int)
    result: Found = {}
    for name, epoch, kind in (
        ("atoms", last, "atoms"), ("cca", last, "cca"), ("updates", last, "updates"),
        (f"early_{first}", first, "atoms"),
    ):  # fmt: skip
        upper = found["maps"][epoch].get(kind)
        if upper is None or len(set(groups.tolist())) < 4:
            continue
        similarity = np.eye(len(groups))
        similarity[np.triu_indices(len(groups), 1)] = upper
        similarity = np.maximum(similarity, similarity.T)
        for key in ("tasks_ari", "kinds_ari"):
            value = found["numbers"][f"{name}_{key}"]
            left = [_agreement(similarity, groups, key, out) for out in sorted(set(groups.tolist()))[:-1]]
            n = len(left)
            spread = math.sqrt((n - 1) / n * sum((one - fmean(left)) ** 2 for one in left))
            result[f"figure-6/{name}_{key}"] = of_error(value, spread, f"{n} tasks, left out one by one", n)
    for epoch, parts in found["early"].items():
        for key in ("tasks_ari", "kinds_ari"):
            result[f"figure-6/early_{epoch}_{key}"] = of_mean([part[key] for part in parts], "seeds")
    share = found["numbers"]["atoms_nearest_shares_task"]
    result["figure-6/atoms_nearest_shares_task"] = of_share(share, int((groups < groups.max()).sum()), "clients")
    return result


def _agreement(similarity: np.ndarray, groups: np.ndarray, key: str, out: int) -> float:
    import torch

    from sosie.linalg import adjusted_rand_index, cluster

    digits = groups.max()
    kept = groups != out
    if key == "tasks_ari":
        kept &= groups != digits
    of = torch.tensor(similarity[np.ix_(kept, kept)])
    labels = groups[kept] if key == "tasks_ari" else (groups[kept] == digits).astype(int)
    numbered = torch.tensor(np.unique(labels, return_inverse=True)[1])
    return float(adjusted_rand_index(numbered, cluster(of, int(numbered.max()) + 1)))


def figure_9(atoms: dict[str, Any], points: dict[str, Any]) -> Found:
    result: Found = {}
    if atoms:
        for key in atoms["numbers"]:
            result[f"figure-9a/{key}"] = of_mean([one[key] for one in atoms["seeds"]], "seeds")
    for key, values in points.get("values", {}).items():
        interval = of_mean(values, "pairs of regressions")
        if interval:  # a similarity is no larger than 1
            result[f"figure-9b/{key}"] = Interval(interval.low, min(interval.high, 1.0), interval.of, interval.units)
    return result


def table_1(found: dict[str, Any]) -> Found:
    """Standard errors over clients and seeds."""
    numbers = found.get("numbers", {})
    of = "300 clients of three seeds"
    result: Found = {}
    for pair in ("base", "random", "own", "cca"):
        errors = []
        for method in METHODS:
            value, error = (numbers.get(f"{method}_atoms_less_{pair}{end}") for end in ("", "_error"))
            errors.append(error)
            result[f"table-1-short/{method}_atoms_less_{pair}"] = of_error(value, error, of, 300)
        if None not in errors:
            whole = math.hypot(*errors) / len(errors)
            result[f"table-1-short/mean_atoms_less_{pair}"] = of_error(
                numbers.get(f"mean_atoms_less_{pair}"), whole, of, 300
            )
    gains = [result.get(f"table-1-short/{method}_atoms_less_base") for method in METHODS]
    known = [gain for gain in gains if gain is not None]
    if len(known) == len(METHODS):
        sure, perhaps = (sum(at > 0 for at in ends) / len(METHODS)
                         for ends in ([g.low for g in known], [g.high for g in known]))  # fmt: skip
        result["table-1-short/methods_better"] = Interval(sure, perhaps, f"methods, surely or perhaps, over {of}", 300)
    return result


def table_2(found: dict[str, Any]) -> Found:
    """Of tasks, all seeds of a task as one."""
    rows = found.get("rows", [])
    if not rows:
        return {}
    kinds = rows[0]["accuracy"]
    by_task = {kind: np.mean([row["accuracy"][kind] for row in rows], 0) for kind in kinds}
    of = "tasks, three seeds each"
    return {
        "table-2/base": of_mean(by_task["base"], of),
        **{f"table-2/{kind}_gain": of_mean(by_task[kind] - by_task["base"], of) for kind in kinds if kind != "base"},
        **{f"table-2/atoms_less_{kind}": of_mean(by_task["atoms"] - by_task[kind], of)
           for kind in kinds if kind not in ("base", "atoms")},
    }  # fmt: skip


def table_3(found: dict[str, Any], table: str) -> Found:
    rows = found.get("rows", [])
    by_name = {f"{row['data']}_{row['classes']}_{row['method']}": np.array(row["accuracy"]) for row in rows}
    of = "clients"
    result: Found = {f"{table}/{name}": of_mean(values, of) for name, values in by_name.items()}
    for place in {name.rpartition("_")[0] for name in by_name}:
        ours, alone = by_name.get(f"{place}_atoms"), by_name.get(f"{place}_local")
        others = [by_name[f"{place}_{method}"] for method in METHODS[:5] if f"{place}_{method}" in by_name]
        best = max((o for o in others), key=lambda values: values.mean(), default=None)
        if ours is not None and alone is not None and best is not None:
            result[f"{table}/{place}_atoms_less_local"] = of_mean(ours - alone, of)
            value = found["numbers"].get(f"{place}_atoms_less_best")
            error = float(np.std(ours - best, ddof=1)) / math.sqrt(len(ours))
            result[f"{table}/{place}_atoms_less_best"] = of_error(value, error, f"{len(ours)} {of}", len(ours))
    return result

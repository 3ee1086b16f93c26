"""Figures 2 and 3: the same networks by Task2Vec and by the Fisher-Rao distance, one number per pair."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

from represent import batches, mean, network, spread
from settings import Study

from sosie.sketching import fisher_rao_norm, task2vec


def figure_2(study: Study) -> dict[str, Any]:
    """Cosine similarity of the diagonals of the Fisher information, without the heads, whose sizes differ."""
    found = {
        key: task2vec(
            network(*key, study), batches(key[0], study.norm_images, study), leave_out="fc.*", average="filters"
        )
        for key in itertools.product(study.training.datasets, study.seeds)
    }
    rows = by_data({pair: 1 - found[pair[0]].distance(found[pair[1]]) for pair in itertools.combinations(found, 2)})
    within = rows.get("mnist-mnist", rows["cifar10-mnist"])["mean"]
    across = mean([rows[f"{d}-mnist"]["mean"] for d in ("cifar10", "cifar100")])
    return {"numbers": {"digits_within_less_across": within - across}, "similarity": rows}


def figure_3(study: Study) -> dict[str, Any]:
    """|a − b| / √(a b) of two Fisher-Rao norms."""
    found = {
        key: fisher_rao_norm(network(*key, study), batches(key[0], study.norm_images, study), under="labels")
        for key in itertools.product(study.training.datasets, study.seeds)
    }
    rows = by_data({pair: found[pair[0]].distance(found[pair[1]]) for pair in itertools.combinations(found, 2)})
    same = mean([value["mean"] for key, value in rows.items() if len(set(key.split("-"))) == 1] or [0.0])
    return {
        "numbers": {
            "hundred_and_digits": rows["cifar100-mnist"]["mean"],
            "ten_and_hundred": rows["cifar10-cifar100"]["mean"],
            "ten_and_digits": rows["cifar10-mnist"]["mean"],
            "same_data": same,
            "hundred_and_digits_over_same": rows["cifar100-mnist"]["mean"] / same if same else None,
            "ten_from_others_over_hundred_from_digits": (
                min(rows["cifar10-cifar100"]["mean"], rows["cifar10-mnist"]["mean"]) / rows["cifar100-mnist"]["mean"]
            ),
        },
        "norms": {f"{d} {s}": norm.norm for (d, s), norm in found.items()},
        "distance": rows,
    }


def by_data(values: dict[Any, float]) -> dict[str, Any]:
    groups: dict[str, list[float]] = defaultdict(list)
    for (a, b), value in values.items():
        groups["-".join(sorted((a[0], b[0])))].append(value)
    return {key: {"mean": mean(group), "spread": spread(group)} for key, group in groups.items()}

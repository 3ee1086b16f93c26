"""Equations 15 and 16: what sketching does to CKA as the sketch grows, on networks of one data set.

For features the exact CKA of all rows is known; so is it for features and gradients together. ε is measured as
the paper's proof has it: the largest error of an inner product of two columns, relative to their lengths.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from represent import mean, represent, spread
from settings import Study

import sosie

SITES = ("layer2.1", "layer4.1", "avgpool")
KERNELS = ("features", "hadamard", "hadamard_of_sketches")
MEASURES = ("linear_cka", "debiased_cka")


def bounds(study: Study) -> dict[str, Any]:
    networks = (("cifar10", 0), ("cifar10", min(1, max(study.seeds))))
    options: dict[str, Any] = {"count": study.bound_images, "sites": SITES}
    exact = [represent(*key, study, kernels=KERNELS, size=None, **options) for key in networks]
    truth = {
        (kernel, m): values(exact, kernel, m) for kernel, m in itertools.product(("features", "hadamard"), MEASURES)
    }
    rows = []
    for size in study.bound_sizes:
        found: dict[tuple[str, str, str], list[float]] = {}
        held: dict[str, list[bool]] = {"15": [], "16": [], "39": []}
        for seed in range(study.bound_seeds):
            pair = [represent(*key, study, kernels=KERNELS, size=size, sketch_seed=seed, **options) for key in networks]
            for kernel, measure in itertools.product(KERNELS, MEASURES):
                if (kernel, measure) != ("hadamard_of_sketches", "debiased_cka"):
                    for site, value in values(pair, kernel, measure).items():
                        found.setdefault((kernel, measure, site), []).append(value)
            for equation, ok in equations(exact, pair, truth["features", "linear_cka"]["avgpool"]).items():
                held[equation].append(ok)
        for (kernel, measure, site), drawn in found.items():
            true = truth["hadamard" if kernel != "features" else kernel, measure][site]
            drawn = [value for value in drawn if value == value]  # no value where noise outweighs the kernel
            rows.append(
                {
                    "size": size,
                    "kernel": kernel,
                    "measure": measure,
                    "site": site,
                    "exact": true,
                    "bias": mean(drawn) - true if drawn else None,
                    "spread": spread(drawn) if drawn else None,
                    "undefined": study.bound_seeds - len(drawn),
                    **{f"equation_{key}_held": mean(list(map(float, oks))) for key, oks in held.items()},
                }
            )
        print(f"  size {size}", flush=True)
    return {"numbers": numbers(rows, study), "rows": rows}


def values(pair: list[Any], kernel: str, measure: str) -> dict[str, float]:
    c = sosie.compare(*(k.using(kernel) for k in pair), measures=measure)
    matrix = c.matrix(measure)
    return {site: float(matrix[i, i]) for i, site in enumerate(c.sites_a)}


def equations(exact: list[Any], pair: list[Any], cka: float) -> dict[str, bool]:
    """Whether Eq. 15, 16 and 39 hold for centred features at the pooled output, with the ε that was measured."""
    x, y = (sketch.kernel("avgpool", "features").rows for sketch in exact)
    u, v = (sketch.kernel("avgpool", "features").rows for sketch in pair)
    lengths = x.norm(dim=0)[:, None] * y.norm(dim=0)
    epsilon = float(((u.T @ v - x.T @ y).abs() / torch.where(lengths > 0, lengths, torch.inf)).max())
    whole, sketched = float((x.T @ y).norm()), float((u.T @ v).norm())
    added = (epsilon**2 + 2 * epsilon) * float(x.norm() ** 2 * y.norm() ** 2)
    scka = sketched**2 / float((u.T @ u).norm() * (v.T @ v).norm())
    limit = 4 * epsilon / (1 - epsilon) ** 2 * cka if epsilon < 1 else float("inf")
    return {
        "15": abs(sketched - whole) <= epsilon * whole,
        "16": abs(scka - cka) <= limit,
        "39": abs(sketched**2 - whole**2) <= added * (1 + 1e-9),
    }


def numbers(rows: list[dict[str, Any]], study: Study) -> dict[str, float | None]:
    at = study.size if study.size in study.bound_sizes else study.bound_sizes[-1]
    found: dict[str, float | None] = {}
    for kernel, measure in itertools.product(KERNELS, MEASURES):
        biases = [abs(r["bias"]) for r in rows if (r["size"], r["kernel"], r["measure"]) == (at, kernel, measure)
                  and r["bias"] is not None]  # fmt: skip
        found[f"{kernel}_{measure}_largest_bias"] = max(biases, default=None)  # none where no value was defined
    for equation in ("15", "16", "39"):
        found[f"equation_{equation}_held"] = min(r[f"equation_{equation}_held"] for r in rows)
    return found

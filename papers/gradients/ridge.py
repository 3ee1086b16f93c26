"""Figure 14: kernel ridge classification from one sketched pass, block by block, against a linear probe.

Networks of ImageNet (EfficientNet-Lite0) and of CIFAR-100 are the base; the tasks are the three data sets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from norms import bases, enlarged
from represent import batches, mean
from settings import Study

import sosie
from sosie.benchmark import linear_probe
from sosie.sketching import classify
from sosie.train import Recipe

KERNELS = ("features", "hadamard", "hadamard_of_sketches")


def figure_14(study: Study) -> dict[str, Any]:
    accuracy: dict[str, Any] = {}
    for base, model, sites in bases(study):
        made = enlarged if base == "imagenet" else batches
        rule = "mean" if base == "imagenet" else "flatten"
        for task in study.training.datasets:
            if task == base:
                continue  # its own task is no transfer
            train, test = made(task, study.images, study), made(task, study.norm_images, study, study.held_out)
            options: dict[str, Any] = {"rows": rule, "device": study.device}
            sketch = sosie.sketch(model, train, sites=sites, size=study.size, kernels=KERNELS, **options)
            found: dict[str, Any] = {"sites": list(sketch.side.sites)}
            for kernel in KERNELS:
                reached = classify(sketch, kernel).evaluate(model, test, **options)
                found[kernel] = [reached[site] for site in sketch.side.sites]
            last = sketch.side.sites[-1]
            for name, recipe in (("probe_one_epoch", Recipe(epochs=1, rate=1e-2)), ("probe_converged", None)):
                found[name] = linear_probe(model, train, test, sites=last, recipe=recipe, **options)[last]
            accuracy.setdefault(base, {})[task] = found
            print(f"  {base} on {task}", flush=True)
    return {"numbers": numbers(accuracy), "accuracy": accuracy}


def numbers(accuracy: dict[str, Any]) -> dict[str, float]:
    cases = [found for tasks in accuracy.values() for found in tasks.values()]
    found: dict[str, float] = {}
    for kernel in KERNELS:
        rises = [np.corrcoef(np.arange(len(c[kernel])), c[kernel])[0, 1] for c in cases if np.std(c[kernel]) > 0]
        found[f"{kernel}_rises_with_depth"] = float(np.mean(rises)) if rises else 0.0
        found[f"{kernel}_best"] = mean([max(c[kernel]) for c in cases])
        found[f"{kernel}_last"] = mean([c[kernel][-1] for c in cases])
        found[f"{kernel}_best_less_one_epoch"] = mean([max(c[kernel]) - c["probe_one_epoch"] for c in cases])
        found[f"{kernel}_best_less_converged"] = mean([max(c[kernel]) - c["probe_converged"] for c in cases])
    found["probe_one_epoch"] = mean([c["probe_one_epoch"] for c in cases])
    found["probe_converged"] = mean([c["probe_converged"] for c in cases])
    return found

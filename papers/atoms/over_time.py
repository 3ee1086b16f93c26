"""Figures 5 and 10 to 13: when layers settle, and where two tasks lead the same network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from data import Lessons, Pool, Prepare, class_tasks, pool
from networks import make
from settings import Recipe, Settings
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import sosie
from sosie.history import Recorder
from sosie.models import atom_layers, freeze
from sosie.results.dynamics import rank_correlation
from sosie.train import Recipe as TrainingRecipe
from sosie.train import accuracy, fit

ATOMS = 9
THRESHOLDS = (0.99, 0.999)


def learn(
    settings: Settings,
    kind: str,
    images: Pool,
    tasks: list[list[int]],
    recipe: Recipe,
    *,
    trains: str,
    name: str,
    kernels: list[dict[str, Tensor]] | None = None,
) -> tuple[Path, nn.Module]:
    """Train a network on the first of some tasks, and record its atoms after every epoch; the folder, and the network.

    `trains`: "atoms" (and the linear layers) on random coefficients, or "all". `kernels` gets α × D of every layer.
    """
    model = make(settings, kind, len(tasks[0]), ATOMS, settings.seed)
    if trains == "atoms":
        freeze(model, "coefficients")
    lessons = Lessons.of(images, tasks[:1], recipe.images)
    folder = settings.cache / "runs" / f"{kind}-{name}"
    shutil.rmtree(folder, ignore_errors=True)

    def after_epoch(epoch: int) -> None:
        recorder.record(epoch)
        if kernels is not None:
            kernels.append({layer: conv.weight.detach() for layer, conv in atom_layers(model).items()})

    with Recorder(folder, model, "atoms") as recorder:
        fit(
            model,
            images.images[lessons.index[0]],
            lessons.labels[0],
            recipe=TrainingRecipe(
                epochs=recipe.epochs,
                batch=recipe.batch,
                rate=recipe.rate,
                optimiser="sgd",
                momentum=recipe.momentum,
                schedule="constant",
                prepare=Prepare(settings),
            ),
            seed=settings.seed,
            after_epoch=after_epoch,
            task=name,
        )
    return folder, model


def figure_5(settings: Settings) -> dict[str, Any]:
    """AlexNet and VGG-11 on CIFAR-100, each with its atoms trained and with all of it."""
    images, test = pool(settings, "cifar100", "train"), pool(settings, "cifar100", "test")
    whole = [list(range(100))]
    numbers: dict[str, float | None] = {}
    runs: dict[str, Any] = {}
    for label, kind, recipe in (
        ("alexnet", settings.network, settings.dynamics),
        ("vgg11", settings.deep, settings.deep_dynamics),
    ):
        for trains in ("atoms", "all"):
            name = f"{label}_{trains}"
            kernels: list[dict[str, Tensor]] = []
            folder, model = learn(settings, kind, images, whole, recipe, trains=trains, name=name, kernels=kernels)
            found = sosie.dynamics(folder, measures=["atom_cosine"])
            right = accuracy(model, test.images, test.labels, prepare=Prepare(settings))
            runs[name] = {**described(found), "accuracy": right}
            numbers |= {f"{name}_{key}": value for key, value in settling(found, recipe.epochs).items()}
            numbers[f"{name}_accuracy"] = right
            steps = settled_kernels(kernels, THRESHOLDS[0])
            runs[name]["kernels_settled"] = steps
            numbers[f"{name}_kernels_depth"] = rank_correlation(list(enumerate(steps)))
    return {"numbers": numbers, "runs": runs}


def settling(found: Any, epochs: int) -> dict[str, float | None]:
    """When the first and the last layer settle, as shares of the training, and whether that goes with depth."""
    numbers: dict[str, float | None] = {}
    for threshold in THRESHOLDS:
        steps = list(found.settled(threshold).values())
        first, last = (None if step is None else step / epochs for step in (steps[0], steps[-1]))
        numbers |= {
            f"first_{threshold}": first,
            f"last_{threshold}": last,
            f"depth_{threshold}": found.order(threshold).correlation,
            f"last_less_first_{threshold}": None if first is None or last is None else last - first,
        }
    start = found.matrix()[:, 0, -1]
    numbers["least_start_to_end"] = float(start.min())
    return numbers


def settled_kernels(kernels: list[dict[str, Tensor]], threshold: float) -> list[int]:
    """The epoch from which on each layer's whole kernels stay that near their last state."""
    found = []
    for layer, last in kernels[-1].items():
        near = [
            float(cosine_similarity(each[layer].flatten(), last.flatten(), 0)) >= threshold for each in kernels[:-1]
        ]
        found.append(0 if all(near) else len(near) - near[::-1].index(False))
    return found


def described(found: Any) -> dict[str, Any]:
    return {
        "sites": list(found.sites),
        "steps": list(found.steps),
        "settled": {str(threshold): found.settled(threshold) for threshold in THRESHOLDS},
        "maps": np.round(found.matrix(), 5).tolist(),
    }


def figure_12(settings: Settings) -> dict[str, Any]:
    """The same network from the same start, its atoms trained on two tasks of CIFAR-100; 13 is VGG-11."""
    images = pool(settings, "cifar100", "train")
    tasks = class_tasks(2, 10)
    numbers: dict[str, float | None] = {}
    runs: dict[str, Any] = {}
    for label, kind in (("alexnet", settings.network), ("vgg11", settings.deep)):
        folders = [
            learn(settings, kind, images, [task], settings.two_tasks, trains="atoms", name=f"{label}-task-{k}")[0]
            for k, task in enumerate(tasks)
        ]
        found = sosie.dynamics(*folders, measures=["atom_cosine"])
        maps = found.matrix()
        end = maps[:, -1, -1]
        middle = end[2:-1] if len(end) > 3 else end[1:-1]
        runs[label] = {
            "sites": list(found.sites),
            "steps": list(found.steps),
            "maps": np.round(maps, 5).tolist(),
            "same_time": np.round(np.diagonal(maps, axis1=1, axis2=2), 5).tolist(),
        }
        numbers |= {
            f"{label}_first_less_middle": float(end[:2].mean() - middle.mean()),
            f"{label}_last_less_middle": float(end[-1] - middle.mean()),
            f"{label}_lowest_layer": int(end.argmin()) / (len(end) - 1),
            f"{label}_least": float(end.min()),
        }
    return {"numbers": numbers, "runs": runs}

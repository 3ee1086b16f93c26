"""Table 2: ten tasks learnt one after another, and networks of similar tasks called in to help."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from data import Lessons, Prepare, class_tasks, pool, probes
from networks import make
from settings import Settings
from similarity import by_atoms, by_stimulus, look, mean
from torch import Tensor

from sosie.linalg import most_similar
from sosie.train import Recipe
from sosie.train.continual import Continual, Task, learn_tasks
from sosie.train.heads import features, refit_head
from sosie.train.many_networks import stacked_state

CLASSES, ATOMS, MEMBERS = 10, 9, 3
CHOICES = ("atoms", "cca", "linear_cka")


def table_2(settings: Settings) -> dict[str, Any]:
    """Accuracy alone, with members chosen by each measure, with members at random, and with the head fitted again."""
    rows: list[dict[str, Any]] = []
    for seed in settings.continual_seeds:
        tasks = tasks_of(settings)
        found = learn_tasks(
            lambda seed=seed: make(settings, settings.network, CLASSES, ATOMS, seed),
            tasks,
            recipe=Recipe(
                epochs=settings.continual.epochs,
                batch=settings.continual.batch,
                rate=settings.continual.rate,
                optimiser="sgd",
                momentum=settings.continual.momentum,
                schedule="constant",
                prepare=Prepare(settings),
            ),
            seed=seed,
        )
        seconds, pairs = similarities(settings, found)
        own, others = answers(settings, found, tasks, seed)
        right = {"base": scores(own, tasks)}
        generator = torch.Generator().manual_seed(seed)
        count = min(MEMBERS, len(tasks) - 1)
        for name in CHOICES:
            right[name] = scores(helped(own, others, most_similar(pairs[name], count)), tasks)
        noise = torch.rand(5, len(tasks), len(tasks), generator=generator)
        drawn = [most_similar(each + each.T, count) for each in noise]
        right["random"] = np.mean([scores(helped(own, others, members), tasks) for members in drawn], 0)
        themselves = torch.arange(len(tasks))[:, None]
        right["refitted"] = scores(helped(own, others, themselves), tasks)
        right["all"] = scores(helped(own, others, themselves.T.expand(len(tasks), -1)), tasks)
        rows.append({
            "seed": seed,
            "accuracy": {name: [float(x) for x in each] for name, each in right.items()},
            "seconds": seconds,
            "similarity": {name: each.tolist() for name, each in pairs.items()},
            "forgetting": found.forgetting,
        })  # fmt: skip
    return {"numbers": numbers_of(rows), "rows": rows}


def numbers_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over seeds and tasks; gains over the base, and their standard error over seeds."""
    of = {name: np.array([row["accuracy"][name] for row in rows]) for name in rows[0]["accuracy"]}
    numbers = {name: float(each.mean()) for name, each in of.items()}
    for name in ("atoms", "cca", "linear_cka", "random", "refitted"):
        gains = (of[name] - of["base"]).mean(1)
        numbers[f"{name}_gain"] = float(gains.mean())
        if len(gains) > 1:
            numbers[f"{name}_gain_error"] = float(gains.std(ddof=1) / len(gains) ** 0.5)
    numbers["atoms_less_random"] = numbers["atoms"] - numbers["random"]
    numbers["atoms_less_cca"] = numbers["atoms"] - numbers["cca"]
    numbers["atoms_less_linear_cka"] = numbers["atoms"] - numbers["linear_cka"]
    for name in CHOICES:
        numbers[f"{name}_seconds"] = float(np.min([row["seconds"][name] for row in rows]))
    numbers["cca_time_ratio"] = numbers["cca_seconds"] / numbers["atoms_seconds"]
    numbers["forgetting"] = float(np.mean([row["forgetting"] for row in rows]))
    return numbers


def tasks_of(settings: Settings) -> list[Task]:
    images, test = (pool(settings, "cifar100", split) for split in ("train", "test"))
    lists = class_tasks(settings.tasks, CLASSES)
    learnt, tested = Lessons.of(images, lists, settings.continual.images), Lessons.of(test, lists)
    return [
        (images.images[learnt.index[k]], learnt.labels[k], test.images[tested.index[k]], tested.labels[k])
        for k in range(settings.tasks)
    ]


def similarities(settings: Settings, found: Continual) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Of all pairs of tasks by each measure, and the seconds that took: what is shown to networks included."""
    models = [found.model(task) for task in range(len(found))]
    state = stacked_state(models)
    seconds, pairs = {}, {}
    for name in CHOICES:
        wait(settings)
        start = time.perf_counter()
        if name == "atoms":
            pairs[name] = mean(by_atoms(state))
        else:
            pairs[name] = mean(by_stimulus(look(settings, models[0], state, probes(settings), (name,)), (name,))[name])
        wait(settings)
        seconds[name] = time.perf_counter() - start
    return seconds, pairs


def answers(settings: Settings, found: Continual, tasks: list[Task], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """For each task's test images, softmax answers of its own network, and of all networks with heads fitted again.

    (n, classes) and (networks, n, classes). A member's features of the task's training images are made once, and heads
    of all networks are fitted at once: any choice of members is then a mean.
    """
    models = [found.model(task) for task in range(len(found))]
    prepare = Prepare(settings)
    own, others = [], []
    for k, (images, labels, test, _) in enumerate(tasks):
        seen = torch.stack([features(model, images, prepare=prepare) for model in models])
        asked = torch.stack([features(model, test, prepare=prepare) for model in models])
        heads = refit_head(
            seen, labels, CLASSES, recipe=Recipe(epochs=settings.continual_head_epochs, batch=500, rate=1e-3), seed=seed
        )
        others.append(heads(asked).softmax(2))
        layer = models[k].get_submodule(found.head)
        own.append(layer(asked[k]).softmax(1).detach())
    return own, others


def helped(own: list[Tensor], others: list[Tensor], members: Tensor) -> list[Tensor]:
    """Mean answers of each task's network and its members."""
    return [
        torch.cat([mine[None], theirs[members[k].to(theirs.device)]]).mean(0)
        for k, (mine, theirs) in enumerate(zip(own, others, strict=True))
    ]


def scores(answers: list[Tensor], tasks: list[Task]) -> np.ndarray:
    right = [(answer.argmax(1) == task[3]).double().mean() for answer, task in zip(answers, tasks, strict=True)]
    return np.array([float(share) for share in right])


def wait(settings: Settings) -> None:
    """Until the device has done what it was told."""
    if settings.device.startswith("cuda"):
        torch.cuda.synchronize()

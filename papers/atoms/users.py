"""Figures 6 and 8: do 120 clients that never met fall into the groups of their tasks?"""

from __future__ import annotations

from typing import Any

import torch
from data import Lessons, Pool, class_tasks, own_labels, pool, probes
from networks import State, atoms_of, copies, make, part
from settings import Settings
from similarity import by_atoms, by_stimulus, by_weights, look, mean
from torch import Tensor
from training import accuracies, train

from sosie.linalg import adjusted_rand_index, cluster
from sosie.train.many_networks import stacked_state

CLASSES = 5  # a task
ATOMS = 9
STIMULUS = ("cca", "linear_cka")
SHOWN = ("atoms", "updates", "cca")


def clients(settings: Settings, images: Pool) -> tuple[Lessons, Tensor, list[list[int]]]:
    """What each client learns, its group, and its classes: shares of CIFAR-100's tasks, then digits.

    The clients of a CIFAR task share its images among them, classes in balance. Each client of digits has five classes
    drawn at random, and as many images as the others.
    """
    tasks = class_tasks(settings.cifar_tasks, CLASSES)
    index, classes = [], []
    for task in tasks:
        rounds = images.of(task).view(-1, CLASSES)  # one image of each class
        for k in range(settings.a_task):
            index.append(rounds[k :: settings.a_task].flatten())
            classes.append(task)
    count = min(len(one) for one in index)
    random = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.digit_clients):
        task = (100 + torch.randperm(10, generator=random)[:CLASSES]).tolist()
        rounds = images.of(task).view(-1, CLASSES)
        chosen = torch.randperm(len(rounds), generator=random)[: -(-count // CLASSES)].to(rounds.device)
        index.append(rounds[chosen].flatten())
        classes.append(task)
    rows = torch.stack([one[:count] for one in index])
    groups = torch.arange(settings.cifar_tasks).repeat_interleave(settings.a_task)
    groups = torch.cat([groups, torch.full((settings.digit_clients,), settings.cifar_tasks)])
    return Lessons(rows, own_labels(images.labels[rows], classes)), groups, classes


def figure_6(settings: Settings) -> dict[str, Any]:
    """The same coefficients and first atoms for all, or first atoms of their own; at several epochs."""
    images = pool(settings, "cifar100", "train").merge(pool(settings, "mnist", "train"))
    test = pool(settings, "cifar100", "test").merge(pool(settings, "mnist", "test"))
    lessons, groups, classes = clients(settings, images)
    base = make(settings, "small_cnn", CLASSES, ATOMS, settings.seed)
    count, recipe = len(groups), settings.users
    models = [*copies(base, count), *copies(base, count, redraw=1000)]
    found = train(
        settings, models, images, lessons.repeat(2), recipe, seed=settings.seed, keep=settings.users_at
    )  # fmt: skip
    own = slice(0, count)
    right = accuracies(settings, base, part(found[recipe.epochs], own), test, Lessons.of(test, classes, 500))
    start = {layer: atoms[0] for layer, atoms in atoms_of(stacked_state([base])).items()}
    maps: dict[str, dict[str, Tensor]] = {}
    for epoch in settings.users_at:
        state = found[epoch]
        last = epoch == recipe.epochs
        maps[str(epoch)] = similarities(settings, base, part(state, own), start, stimulus=last)
        maps[str(epoch)]["other_start"] = mean(by_atoms(part(state, slice(count, 2 * count))))
    scores = {epoch: {name: judged(m, groups) for name, m in each.items()} for epoch, each in maps.items()}
    numbers: dict[str, float] = {
        "accuracy": float(right.mean()),
        "digits_accuracy": float(right[groups.max() == groups].mean()),
    }
    for name, score in scores[str(recipe.epochs)].items():
        numbers |= {f"{name}_{key}": value for key, value in score.items()}
    early = str(settings.users_at[0])
    numbers |= {f"early_{key}": value for key, value in scores[early]["atoms"].items()}
    shown = {early, str(settings.users_at[len(settings.users_at) // 2]), str(recipe.epochs)}
    kept = {epoch: {name: upper(m) for name, m in each.items() if name in SHOWN} for epoch, each in maps.items()
            if epoch in shown}  # fmt: skip
    return {"numbers": numbers, "groups": groups.tolist(), "scores": scores, "maps": kept}


def similarities(settings: Settings, model: Any, state: State, start: State, stimulus: bool) -> dict[str, Tensor]:
    found = {
        "atoms": mean(by_atoms(state)),
        "updates": mean(by_atoms(state, start)),
        "weights": mean(by_weights(state)),
    }
    if stimulus:
        sites = look(settings, model, state, probes(settings), STIMULUS)
        found |= {name: mean(pairs) for name, pairs in by_stimulus(sites, STIMULUS).items()}
    return found


def judged(similarity: Tensor, groups: Tensor) -> dict[str, float]:
    """How far clusters are the groups, and mean similarities within and between."""
    digits = groups == groups.max()
    cifar = ~digits
    tasks = groups[cifar]
    inner = similarity[cifar][:, cifar]
    same = (tasks[:, None] == tasks[None, :]) & ~torch.eye(len(tasks), dtype=torch.bool)
    other = tasks[:, None] != tasks[None, :]
    count = int(digits.sum())
    within_digits = (similarity[digits][:, digits].sum() - similarity.diagonal()[digits].sum()) / (count * (count - 1))
    return {
        "tasks_ari": adjusted_rand_index(tasks, cluster(inner, len(tasks.unique()))),
        "kinds_ari": adjusted_rand_index(digits.long(), cluster(similarity, 2)),
        "same_task": float(inner[same].mean()),
        "other_task": float(inner[other].mean()),
        "digits": float(within_digits),
        "digits_cifar": float(similarity[digits][:, cifar].mean()),
        "nearest_shares_task": nearest_share(inner, tasks),
    }


def nearest_share(similarity: Tensor, tasks: Tensor) -> float:
    """How often a client's nearest other client has its task."""
    others = similarity.clone().fill_diagonal_(-torch.inf)
    return float((tasks[others.argmax(1)] == tasks).double().mean())


def upper(similarity: Tensor) -> list[float]:
    """What is above the diagonal, row by row, for the figures."""
    rows, columns = torch.triu_indices(len(similarity), len(similarity), 1)
    return [round(value, 5) for value in similarity[rows, columns].tolist()]

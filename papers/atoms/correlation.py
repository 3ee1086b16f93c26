"""Figure 2 and its table, and figure 4b: does the cosine of atoms say what CCA and CKA say?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from data import Lessons, Pool, class_tasks, pool, probes
from networks import State, atoms_of, copies, make, part, sites_of
from running import remember
from settings import Settings
from similarity import Pairs, by_atoms, by_grassmann, by_stimulus, by_weights, correlation, look, mean
from torch import Tensor, nn
from training import accuracies, train

from sosie.train import decorrelation
from sosie.train.many_networks import stacked_state

CLASSES = 10  # a task
SAME, DIFFERENT = "same", "different"


def first_task(settings: Settings, atoms: int, images: Pool) -> nn.Module:
    """A network of which all was trained on the first task: its coefficients, and atoms to start from."""
    model = make(settings, settings.network, CLASSES, atoms, settings.seed)
    lessons = Lessons.of(images, class_tasks(1, CLASSES), settings.first.images)
    state = train(settings, [model], images, lessons, settings.first, seed=settings.seed)[settings.first.epochs]
    model.load_state_dict({name: value[0] for name, value in state.items()})
    return model


def figure_2(settings: Settings) -> dict[str, Any]:
    """Ten tasks: coefficients drawn at random or from the first task, six atoms or nine, other atoms at first."""
    arms: dict[str, Any] = {}
    for atoms in settings.atoms:
        arms |= arms_of(settings, atoms, (SAME, DIFFERENT) if atoms == settings.atoms[0] else (SAME,))
    numbers: dict[str, float | None] = {
        f"{name}_{key}": value for name, arm in arms.items() for key, value in summary(arm).items()
    }
    both = [numbers[f"{source}_m{settings.atoms[0]}_cca"] for source in ("random", "first_task")]
    numbers["best_cca"] = max(value for value in both if value is not None)
    return {"numbers": numbers, "tasks": settings.tasks, "arms": arms}


def figure_2_seeds(settings: Settings) -> dict[str, Any]:
    """The paper's nine atoms and all images of the tasks, several times: other coefficients, first atoms and orders."""
    parts = []
    for seed in settings.figure_2_seeds:
        own = replace(settings, seed=seed, task=settings.whole_task)
        asked = {key: asdict(getattr(own, key)) for key in ("task", "first", "probes")}
        asked |= {key: getattr(own, key) for key in ("seed", "tasks", "network", "hidden", "width", "limit")}
        parts.append(remember(settings.cache, f"figure-2-seed{seed}", asked, partial(arms_of, own, 9, (SAME,))))
    arms = {f"{name}_seed{part['asked']['seed']}": part[name] for part in parts for name in part if "_m9" in name}
    numbers: dict[str, float | None] = {}
    for name in ("random_m9", "first_task_m9"):
        found = [summary(part[name]) for part in parts]
        for key in found[0]:
            of = [each[key] for each in found if each[key] is not None]
            if of:
                numbers |= {
                    f"{name}_{key}": fmean(of),
                    f"{name}_{key}_lowest": min(of),
                    f"{name}_{key}_highest": max(of),
                }
    return {"numbers": numbers, "tasks": settings.tasks, "arms": arms}


def arms_of(settings: Settings, atoms: int, starts: Sequence[str]) -> dict[str, Any]:
    """So many atoms, both kinds of coefficients, and these kinds of first atoms: all networks in one stack."""
    images, test = pool(settings, "cifar100", "train"), pool(settings, "cifar100", "test")
    tasks = class_tasks(settings.tasks, CLASSES)
    bases = {
        "random": make(settings, settings.network, CLASSES, atoms, settings.seed),
        "first_task": first_task(settings, atoms, images),
    }
    plan = [(source, start) for source in bases for start in starts]
    models = [
        model
        for source, start in plan
        for model in copies(bases[source], len(tasks), redraw=None if start == SAME else 100)
    ]
    lessons = Lessons.of(images, tasks, settings.task.images).repeat(len(plan))
    found = train(settings, models, images, lessons, settings.task, seed=settings.seed)[settings.task.epochs]
    right = accuracies(settings, models[0], found, test, Lessons.of(test, tasks).repeat(len(plan)))
    arms: dict[str, Any] = {}
    for k, (source, start) in enumerate(plan):
        own = slice(k * len(tasks), (k + 1) * len(tasks))
        name = f"{source}_m{atoms}" + ("" if start == SAME else "_other_atoms")
        base = {layer: x[0] for layer, x in atoms_of(stacked_state([bases[source]])).items()} if start == SAME else None
        arms[name] = compared(settings, bases[source], part(found, own), base)
        arms[name]["accuracy"] = right[own].tolist()
    return arms


def compared(settings: Settings, model: nn.Module, state: State, base: State | None) -> dict[str, Any]:
    """Every measure for all pairs of networks, and how the cosine of atoms goes with each: of networks, of layers."""
    pairs: dict[str, Pairs] = by_stimulus(look(settings, model, state, probes(settings)))
    pairs["grassmann"], pairs["weights"] = by_grassmann(state), by_weights(state)
    own = {"atoms": by_atoms(state)}
    if base is not None:
        own["updates"] = by_atoms(state, base)
    upper = torch.triu_indices(len(state[next(iter(state))]), len(state[next(iter(state))]), 1).unbind()
    with_atoms: dict[str, Any] = {}
    for ours, by_layer in own.items():
        for name, theirs in pairs.items():
            if not theirs:
                continue
            shared = {layer: by_layer[layer] for layer in theirs}  # Grassmann has fewer layers
            with_atoms.setdefault(ours, {})[name] = {
                "network": correlation(mean(shared), mean(theirs), settings.draws),
                "layers": {layer: correlation(shared[layer], theirs[layer], settings.draws) for layer in theirs},
            }
    values = {name: mean(by_layer)[upper].tolist() for name, by_layer in (own | pairs).items() if by_layer}
    return {"correlations": with_atoms, "pairs": values, "sites": list(sites_of(model))}


def summary(arm: dict[str, Any]) -> dict[str, float | None]:
    """Pearson's r of atoms with each measure, of updates with CCA, and what similarities there were."""
    found = {name: one["network"]["pearson"]["value"] for name, one in arm["correlations"]["atoms"].items()}
    cca = arm["correlations"]["atoms"]["cca"]["network"]
    found["cca_spearman"] = cca["spearman"]["value"]
    found["cca_low"] = (cca["pearson"]["over_models"] or (None,))[0]
    if "updates" in arm["correlations"]:
        found["updates_cca"] = arm["correlations"]["updates"]["cca"]["network"]["pearson"]["value"]
        found["least_update"] = min(arm["pairs"]["updates"])
    found["least_atoms"] = min(arm["pairs"]["atoms"])
    found["mean_cca"] = sum(arm["pairs"]["cca"]) / len(arm["pairs"]["cca"])
    found["accuracy"] = sum(arm["accuracy"]) / len(arm["accuracy"]) if "accuracy" in arm else None
    return {key: value for key, value in found.items() if key != "accuracy" or value is not None}


def penalties(activations: list[Tensor]) -> Tensor:
    """Σ_{i≠j} (ZᵀZ)²ᵢⱼ summed over layers: of Z over the root of its rows, and of Z with columns of length 1."""
    printed = [decorrelation(z / (z.numel() / z.shape[1]) ** 0.5) for z in activations]
    cosines = [decorrelation(z, normalised=True) * z.shape[1] * (z.shape[1] - 1) for z in activations]
    return torch.stack([torch.stack(printed).sum(), torch.stack(cosines).sum()])


def figure_4b(settings: Settings) -> dict[str, Any]:
    """The same ten tasks with the decorrelation penalty at several weights, all in one stack."""
    images, test = pool(settings, "cifar100", "train"), pool(settings, "cifar100", "test")
    tasks, recipe = class_tasks(settings.tasks, CLASSES), settings.decorrelated
    base = make(settings, settings.network, CLASSES, settings.atoms[0], settings.seed)
    plan = [(weight, 0.0) for weight in settings.weights] + [(0.0, weight) for weight in settings.cosine_weights]
    weights = torch.tensor(plan, device=settings.device).repeat_interleave(len(tasks), 0)
    lessons = Lessons.of(images, tasks, recipe.images).repeat(len(plan))
    models = copies(base, len(tasks) * len(plan))
    state = train(
        settings, models, images, lessons, recipe, seed=settings.seed, penalty=penalties, weights=weights
    )[recipe.epochs]  # fmt: skip
    right = accuracies(settings, base, state, test, Lessons.of(test, tasks).repeat(len(plan)))
    arms: dict[str, Any] = {}
    for k, (printed, normalised) in enumerate(plan):
        own = slice(k * len(tasks), (k + 1) * len(tasks))
        name = f"cosines_{normalised:g}" if normalised else f"{printed:g}"
        sites = look(settings, base, part(state, own), probes(settings), ("cca",))
        cca, atoms = mean({layer: site.cca for layer, site in sites.items()}), mean(by_atoms(part(state, own)))
        upper = torch.triu_indices(len(tasks), len(tasks), 1).unbind()
        arms[name] = {
            "correlation": correlation(atoms, cca, settings.draws),
            "squared_cosine_of_channels": off_diagonal(site.rows for site in sites.values()),
            "accuracy": float(right[own].mean()),
            "pairs": {"atoms": atoms[upper].tolist(), "cca": cca[upper].tolist()},
        }
    r = {name: arm["correlation"]["pearson"]["value"] for name, arm in arms.items()}
    printed = [r[f"{weight:g}"] for weight in settings.weights]
    numbers = {
        "without": printed[0],
        "strongest": printed[-1],
        "gain": printed[-1] - printed[0],
        "steps_up": sum(b > a for a, b in itertools.pairwise(printed)),
        "normalised_strongest": r[f"cosines_{settings.cosine_weights[-1]:g}"],
        "channels_without": arms["0"]["squared_cosine_of_channels"],
        "channels_strongest": arms[f"{settings.weights[-1]:g}"]["squared_cosine_of_channels"],
        "accuracy_without": arms["0"]["accuracy"],
        "accuracy_strongest": arms[f"{settings.weights[-1]:g}"]["accuracy"],
    }
    return {"numbers": numbers, "arms": arms}


def off_diagonal(layers: Iterable[Tensor]) -> float | None:
    """Mean squared cosine of two channels of a network (uncentred, as the penalty): small where Assumption 1 holds.

    None where a network died: one of its layers has fewer than two channels that answer.
    """
    found = []
    for one in (network for rows in layers for network in rows):
        alive = one[:, one.square().sum(0) > 0]
        count = alive.shape[1]
        if count < 2:
            return None
        unit = alive / alive.norm(dim=0)
        squares = (unit.T @ unit).square()
        found.append(float((squares.sum() - squares.diagonal().sum()) / (count * (count - 1))))
    return sum(found) / len(found)

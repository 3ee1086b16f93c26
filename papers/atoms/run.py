"""Exploring neural network representational similarity using filter subspaces: its figures and tables, run again.

    python papers/atoms/run.py                              # all of it, on a GPU
    python papers/atoms/run.py --only figure-2,table-1 --resume
    python papers/atoms/run.py --small                      # a smoke run on a CPU: its numbers mean nothing
    python papers/atoms/draw.py                             # the figures, from results/*.json

Experiments share a GPU: run this a few times side by side, with another `--only` each; their seconds are then of a busy
machine. Tables 1 and 3 write each method and seed when it is done, figure-2-seeds, figure-4b-long and figures 6, 9a and
12 each seed, figure-4-table-long each arm (nets/, or the folder SOSIE_CHECKPOINTS), and a run that was ended goes on
behind it. SOSIE_DATA names the folders with the images (README.md says which).
"""

from __future__ import annotations

import copy
import itertools
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.flop_counter import FlopCounterMode

import sosie
from sosie.capture import watch
from sosie.files import write_atomically
from sosie.history import Recorder
from sosie.linalg import adjusted_rand_index, cluster, most_similar
from sosie.models import AtomConv2d, atom_layers, freeze
from sosie.results.dynamics import rank_correlation
from sosie.train import Recipe as TrainingRecipe
from sosie.train import accuracy, decorrelation, fit
from sosie.train.continual import Continual, Task, learn_tasks
from sosie.train.heads import features, refit_head
from sosie.train.many_networks import stacked_state

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import running
from federated import Federation, table_1, table_1_short, table_3, table_3_cifar10
from networks import (
    Lessons,
    Pairs,
    Pool,
    Prepare,
    Probes,
    Recipe,
    State,
    accuracies,
    atoms_of,
    by_atoms,
    by_grassmann,
    by_stimulus,
    by_weights,
    class_tasks,
    copies,
    correlation,
    draw_atoms,
    joined,
    look,
    make,
    mean,
    own_labels,
    part,
    pool,
    probes,
    sites_of,
    train,
    wait,
)
from running import part_path, remember

# How much of everything: the real run, and a smoke run. What the paper has instead is in [brackets].


@dataclass(frozen=True)
class Settings:
    """The real run."""

    device: str
    results: Path
    cache: Path  # networks that several experiments use
    seed: int = 0
    limit: int | None = None  # images of a data set, at most
    network: str = "alexnet"
    deep: str = "vgg11"
    hidden: int = 1024  # of AlexNet's head
    width: int = 32  # of the clients' network
    probes: Probes = field(default_factory=Probes)
    draws: int = 1000  # of a bootstrap over networks

    tasks: int = 10
    atoms: tuple[int, ...] = (6, 9)
    task: Recipe = Recipe(epochs=12, rate=0.01, images=2450, clip=1.0)  # figure 2; half of a task's images
    whole_task: Recipe = Recipe(epochs=12, rate=0.01, clip=1.0)  # figure-2-seeds: all of a task's images
    figure_2_seeds: tuple[int, ...] = tuple(range(24))
    figure_2_six: tuple[int, ...] = tuple(range(20))  # seeds of six atoms, coefficients drawn at random
    figure_2_drawn: int = 5  # seeds whose every pair is written, for the figure
    first: Recipe = Recipe(epochs=12, rate=0.01, clip=1.0)  # coefficients from the first task
    weights: tuple[float, ...] = (0.0, 1e-4, 3e-4, 1e-3, 3e-3)  # figure 4b: of the penalty as it is printed
    cosine_weights: tuple[float, ...] = (3e-4, 3e-3)  # of the penalty of normalised channels
    decorrelated: Recipe = Recipe(epochs=8, rate=0.01, images=2450, clip=1.0)
    decorrelated_long: Recipe = Recipe(epochs=60, rate=0.01, images=2450, clip=1.0)  # the first weight and the last
    decorrelated_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    pair: Recipe = Recipe(epochs=4, rate=0.02, images=25_000, clip=1.0)  # figure 4's table; diverged without clipping
    long_pair: Recipe = Recipe(epochs=60, batch=256, rate=0.04, clip=1.0)  # figure-4-table-long
    long_pair_at: tuple[int, ...] = (4, 15, 30, 60)  # epochs that are looked at
    long_pair_seeds: tuple[int, ...] = (0, 1, 2)  # learnt coefficients: of the first alone
    bound_draws: int = 500
    untrained: Recipe = Recipe(epochs=8, rate=0.02, images=10_000)  # figure 9a
    untrained_seeds: tuple[int, ...] = tuple(range(10))
    toys: int = 10  # figure 9b
    toy_steps: int = 300

    dynamics: Recipe = Recipe(epochs=30, batch=256, rate=0.02)  # figure 5, AlexNet [150 epochs]
    long_dynamics: Recipe = Recipe(epochs=150, batch=256, rate=0.02)  # AlexNet again, atoms alone
    long_dynamics_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # [one]
    deep_dynamics: Recipe = Recipe(epochs=20, batch=256, rate=0.02)  # VGG-11 [20 epochs on ImageNet]
    two_tasks: Recipe = Recipe(epochs=20, rate=0.02)  # figures 12 and 13
    two_tasks_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    two_tasks_pairs: int = 5  # of tasks [one]

    users: Recipe = Recipe(epochs=90, batch=50)  # figure 6
    users_at: tuple[int, ...] = (1, 5, 15, 30, 90)  # epochs that are looked at
    early_seeds: tuple[int, ...] = tuple(range(20))  # as far as the first two of them
    cifar_tasks: int = 20
    a_task: int = 5  # clients that share a task
    digit_clients: int = 20

    federation: Federation = field(default_factory=Federation)
    short_federation: Federation = Federation(rounds=15)  # table-1-short
    continual: Recipe = Recipe(epochs=15, batch=128, rate=0.02)
    continual_head_epochs: int = 50
    continual_seeds: tuple[int, ...] = (0, 1, 2)
    cost_probes: tuple[int, ...] = (100, 300, 1000, 3000, 10_000)


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    tiny = Recipe(epochs=1, batch=8, images=16)
    few = Federation(
        clients=10,
        many_clients=20,
        rounds=1,
        epochs=1,
        share=0.3,
        batch=5,
        seeds=(0,),
        pretrained_epochs=1,
        head_epochs=2,
        random_members=2,
    )
    return replace(
        full,
        limit=800,
        network="small_cnn",
        deep="small_cnn",
        width=4,
        probes=Probes(images=24, positions=2000),
        draws=50,
        tasks=4,
        atoms=(6, 9),
        task=tiny,
        whole_task=tiny,
        figure_2_seeds=(0, 1),
        figure_2_six=(0, 1),
        figure_2_drawn=1,
        first=tiny,
        weights=(0.0, 3e-3),
        cosine_weights=(3e-3,),
        decorrelated=tiny,
        decorrelated_long=tiny,
        decorrelated_seeds=(0, 1),
        pair=tiny,
        long_pair=replace(tiny, epochs=2),
        long_pair_at=(1, 2),
        long_pair_seeds=(0, 1),
        untrained_seeds=(0, 1),
        two_tasks_seeds=(0, 1),
        two_tasks_pairs=2,
        early_seeds=(0, 1),
        bound_draws=20,
        untrained=tiny,
        toys=2,
        toy_steps=20,
        dynamics=replace(tiny, epochs=2, images=100),
        long_dynamics=replace(tiny, epochs=3, images=100),
        long_dynamics_seeds=(0, 1),
        deep_dynamics=replace(tiny, epochs=2, images=100),
        two_tasks=replace(tiny, epochs=2),
        users=Recipe(epochs=5, batch=8),
        users_at=(1, 5),
        cifar_tasks=3,
        a_task=2,
        digit_clients=4,
        federation=few,
        short_federation=few,  # the clients of table 1
        continual=tiny,
        continual_head_epochs=2,
        continual_seeds=(0, 1),
        cost_probes=(8, 16),
    )


# Figure 2 and its table, and figure 4b: does the cosine of atoms say what CCA and CKA say?


OF_TASK = 10  # a task
SAME, DIFFERENT = "same", "different"


def first_task(settings: Settings, atoms: int, images: Pool) -> nn.Module:
    """A network of which all was trained on the first task: its coefficients, and atoms to start from."""
    model = make(settings, settings.network, OF_TASK, atoms, settings.seed)
    lessons = Lessons.of(images, class_tasks(1, OF_TASK), settings.first.images)
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
    """All images of the tasks, several times: other coefficients, first atoms and orders; the paper's nine atoms, and
    six on coefficients drawn at random."""
    drawn: dict[str, Any] = {}
    more: dict[str, Any] = {}
    numbers: dict[str, float | None] = {}
    for atoms, seeds, sources in (
        (9, settings.figure_2_seeds, ("random", "first_task")),
        (6, settings.figure_2_six, ("random",)),
    ):
        parts = [seed_of_figure_2(settings, seed, atoms, sources) for seed in seeds]
        for name in (f"{source}_m{atoms}" for source in sources):
            of_seeds = [summary(each[name]) for each in parts]
            for key in of_seeds[0]:
                of = [each[key] for each in of_seeds if each[key] is not None]
                if of:
                    numbers |= {
                        f"{name}_{key}": fmean(of),
                        f"{name}_{key}_lowest": min(of),
                        f"{name}_{key}_highest": max(of),
                    }
            for seed, found in zip(seeds, parts, strict=True):
                whole = atoms == 9 and seed in settings.figure_2_seeds[: settings.figure_2_drawn]
                (drawn if whole else more)[f"{name}_seed{seed}"] = found[name] if whole else of_networks(found[name])
    return {"numbers": numbers, "tasks": settings.tasks, "arms": drawn, "more": more}


def seed_of_figure_2(settings: Settings, seed: int, atoms: int, sources: Sequence[str]) -> dict[str, Any]:
    own = replace(settings, seed=seed, task=settings.whole_task)
    asked = {key: asdict(getattr(own, key)) for key in ("task", "first", "probes")}
    asked |= {key: getattr(own, key) for key in ("seed", "tasks", "network", "hidden", "width", "limit")}
    name = f"figure-2-seed{seed}" if atoms == 9 else f"figure-2-six-seed{seed}"
    return remember(settings.cache, name, asked, partial(arms_of, own, atoms, (SAME,), sources))


def of_networks(arm: dict[str, Any]) -> dict[str, Any]:
    """The correlations over pairs of networks alone, without those of single layers."""
    correlations = {
        ours: {measure: {"network": found["network"]} for measure, found in by_measure.items()}
        for ours, by_measure in arm["correlations"].items()
    }
    return {"correlations": correlations}


def arms_of(
    settings: Settings, atoms: int, starts: Sequence[str], sources: Sequence[str] = ("random", "first_task")
) -> dict[str, Any]:
    """So many atoms, these kinds of coefficients and of first atoms: all networks in one stack."""
    images, test = pool(settings, "cifar100", "train"), pool(settings, "cifar100", "test")
    tasks = class_tasks(settings.tasks, OF_TASK)
    bases = {"random": make(settings, settings.network, OF_TASK, atoms, settings.seed)}
    if "first_task" in sources:
        bases["first_task"] = first_task(settings, atoms, images)
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
    plan = [(weight, 0.0) for weight in settings.weights] + [(0.0, weight) for weight in settings.cosine_weights]
    arms = penalised(settings, plan, settings.decorrelated)
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


def figure_4b_long(settings: Settings) -> dict[str, Any]:
    """Without the penalty and with the strongest, for longer and several times; each seed is written."""
    plan, recipe = [(settings.weights[0], 0.0), (settings.weights[-1], 0.0)], settings.decorrelated_long
    asked: dict[str, Any] = {"plan": plan, "recipe": asdict(recipe), "probes": asdict(settings.probes)}
    asked |= {key: getattr(settings, key) for key in ("tasks", "network", "hidden", "width", "limit", "draws")}
    seeds = []
    for seed in settings.decorrelated_seeds:
        make = partial(penalised, replace(settings, seed=seed), plan, recipe)
        arms = remember(settings.cache, f"figure-4b-long-seed{seed}", asked, make)
        without, strongest = (arms[f"{weight:g}"] for weight, _ in plan)
        r = [arm["correlation"]["pearson"]["value"] for arm in (without, strongest)]
        seeds.append({
            "without": r[0],
            "strongest": r[1],
            "gain": r[1] - r[0],
            "accuracy_without": without["accuracy"],
            "accuracy_strongest": strongest["accuracy"],
        })  # fmt: skip
    return {"numbers": {key: fmean(one[key] for one in seeds) for key in seeds[0]}, "seeds": seeds}


def penalised(settings: Settings, plan: Sequence[tuple[float, float]], recipe: Recipe) -> dict[str, Any]:
    """Ten tasks for each pair of weights, of the penalty as it is printed and of normalised channels."""
    images, test = pool(settings, "cifar100", "train"), pool(settings, "cifar100", "test")
    tasks = class_tasks(settings.tasks, OF_TASK)
    base = make(settings, settings.network, OF_TASK, settings.atoms[0], settings.seed)
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
    return arms


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


# Figure 4a, figure 4's table, figures 9a and 9b: a bound, other probing data, untrained networks, a toy.


PROBES = ("cifar100", "mnist", "tiny-imagenet")  # [CIFAR-100 and SVHN]


def figure_4a(settings: Settings) -> dict[str, Any]:
    """Proposition 1: a layer's features, as its atoms move and all else stays; and what two layers do together."""
    torch.manual_seed(settings.seed)
    first, second = AtomConv2d(3, 8, 3, 9, padding=1, bias=False), AtomConv2d(8, 8, 3, 9, padding=1, bias=False)
    for layer in (first, second):
        nn.init.normal_(layer.coefficients)
    x = torch.randn(1, 3, 32, 32)
    points: dict[str, list[tuple[float, float]]] = {"layer": [], "both_layers": []}
    with torch.no_grad():
        z = first(x).relu()
        alone, together = bound(first, x), bound(second, z)
        for k in range(settings.bound_draws):
            by = (k + 1) / settings.bound_draws
            moved = [moved_by(layer, by) for layer in (first, second)]
            distances = [float((a.atoms - b.atoms).norm()) for a, b in zip((first, second), moved, strict=True)]
            other = moved[0](x).relu()
            points["layer"].append((distances[0], float((z - other).norm()) / (alone * distances[0])))
            change = float((second(z).relu() - moved[1](other).relu()).norm())
            points["both_layers"].append((distances[1], change / (together * distances[1])))
    shares = {name: np.array([ratio for _, ratio in each]) for name, each in points.items()}
    numbers = {
        "largest_share_of_bound": float(shares["layer"].max()),
        "mean_share_of_bound": float(shares["layer"].mean()),
        "both_layers_largest_share": float(shares["both_layers"].max()),
    }
    return {"numbers": numbers, "points": points}


def bound(layer: AtomConv2d, x: Tensor) -> float:
    """‖α‖_F λ √|B|: λ the largest norm of a patch, over all channels."""
    patches = nn.functional.unfold(x, layer.kernel_size, padding=1)  # type: ignore[arg-type]
    return float(layer.coefficients.norm() * patches.norm(dim=1).max() * patches.shape[-1] ** 0.5)


def moved_by(layer: AtomConv2d, size: float) -> AtomConv2d:
    other = copy.deepcopy(layer)
    other.atoms.copy_(layer.atoms + size * torch.randn_like(layer.atoms))
    return other


def figure_4_table(settings: Settings) -> dict[str, Any]:
    """Two networks on the same 100 classes that share coefficients, probed with their own data and with others.

    They differ in the order of their images; a third starts from other atoms. Coefficients are random, or those of a
    network of which all was trained.
    """
    drawn = make(settings, settings.network, 100, 9, settings.seed)
    bases = {"random": drawn, "learnt": learnt_base(settings, drawn, settings.pair)}
    arms = {name: pair_on(settings, base, settings.pair)[str(settings.pair.epochs)] for name, base in bases.items()}
    return {"numbers": pair_numbers(arms), "arms": arms}


def figure_4_table_long(settings: Settings) -> dict[str, Any]:
    """The same after more epochs on all images, and at several of them; the learnt base, then each arm, is written."""
    seeds = [long_arms(settings, seed) for seed in settings.long_pair_seeds]
    by_epoch = {
        str(epoch): {name: found[str(epoch)] for name, found in seeds[0].items()} for epoch in settings.long_pair_at
    }
    numbers = {
        f"{key}_after_{epoch}": value for epoch, arms in by_epoch.items() for key, value in pair_numbers(arms).items()
    }
    last = str(settings.long_pair.epochs)
    of_seeds = [pair_numbers({"random": found["random"][last]}) for found in seeds]
    numbers |= pair_numbers(by_epoch[last]) | {key: fmean(each[key] for each in of_seeds) for key in of_seeds[0]}
    return {"numbers": numbers, "arms": by_epoch[last], "by_epoch": by_epoch, "seeds": of_seeds}


def long_arms(settings: Settings, seed: int) -> dict[str, Any]:
    own = replace(settings, seed=seed)
    asked = {key: getattr(own, key) for key in ("seed", "network", "hidden", "width", "limit", "long_pair_at")}
    asked |= {"recipe": asdict(own.long_pair), "probes": asdict(own.probes)}
    names = ("random", "learnt") if seed == settings.long_pair_seeds[0] else ("random",)
    return {
        name: remember(settings.cache, f"figure-4-table-long-{name}", asked, partial(long_arm, own, name, asked))
        for name in names
    }


def learnt_base(settings: Settings, drawn: nn.Module, recipe: Recipe) -> nn.Module:
    """A network of which all is trained, from the one that was drawn."""
    images, model = pool(settings, "cifar100", "train"), copy.deepcopy(drawn)
    lessons = Lessons.of(images, [list(range(100))], recipe.images)
    state = train(settings, [model], images, lessons, recipe, seed=settings.seed)[recipe.epochs]
    model.load_state_dict({name: value[0] for name, value in state.items()})
    return model


def long_arm(settings: Settings, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """One arm; the base of learnt coefficients is written as well."""
    base = make(settings, settings.network, 100, 9, settings.seed)
    if name == "learnt":
        path = part_path(settings.cache, "figure-4-table-long-base", asked, "safetensors")
        if not path.is_file():
            state = learnt_base(settings, base, settings.long_pair).state_dict()
            own = {key: value.cpu().contiguous() for key, value in state.items()}
            write_atomically(path, lambda temporary: save_file(own, temporary))
        base.load_state_dict(load_file(path))
    return pair_on(settings, base, settings.long_pair, settings.long_pair_at)


def pair_on(settings: Settings, base: nn.Module, recipe: Recipe, at: Sequence[int] = ()) -> dict[str, dict[str, float]]:
    """Two networks with the base's coefficients and atoms, and one with other first atoms; after the epochs `at`."""
    images, test = pool(settings, "cifar100", "train"), pool(settings, "cifar100", "test")
    whole = [list(range(100))]
    models = [*copies(base, 2), *copies(base, 1, redraw=100)]
    lessons = Lessons.of(images, whole, recipe.images).repeat(3)
    states = train(settings, models, images, lessons, recipe, seed=settings.seed + 1, keep=at)
    found = {}
    for epoch, state in states.items():
        atoms = mean(by_atoms(state))
        arm = {"atoms": float(atoms[0, 1]), "atoms_other_start": float(atoms[0, 2])}
        for data in PROBES:
            for measure, pairs in by_stimulus(look(settings, base, state, probes(settings, data))).items():
                arm[f"{measure}_{data}"] = float(mean(pairs)[0, 1])
                arm[f"{measure}_{data}_other_start"] = float(mean(pairs)[0, 2])
        arm["accuracy"] = float(accuracies(settings, base, state, test, Lessons.of(test, whole).repeat(3))[:2].mean())
        found[str(epoch)] = arm
    return found


def pair_numbers(arms: dict[str, dict[str, float]]) -> dict[str, float]:
    numbers = {f"{name}_{key}": value for name, arm in arms.items() for key, value in arm.items()}
    for name in arms:
        for measure in ("cca", "linear_cka"):
            own, other = (numbers[f"{name}_{measure}_{data}"] for data in ("cifar100", "mnist"))
            numbers[f"{name}_{measure}_drop"] = own - other
    return numbers


def figure_9a(settings: Settings) -> dict[str, Any]:
    """Two networks on CIFAR-10, two on CIFAR-100, and atoms that were never trained, on the same coefficients."""
    keys = ("network", "hidden", "width", "limit")
    asked = {"recipe": asdict(settings.untrained)} | {key: getattr(settings, key) for key in keys}
    seeds = [
        remember(settings.cache, f"figure-9a-seed{seed}", asked, partial(seed_of_9a, replace(settings, seed=seed)))
        for seed in settings.untrained_seeds
    ]
    numbers = {key: fmean(part["numbers"][key] for part in seeds) for key in seeds[0]["numbers"]}
    first = {key: seeds[0][key] for key in ("names", "cosines")}
    return {"numbers": numbers, **first, "seeds": [part["numbers"] for part in seeds]}


def seed_of_9a(settings: Settings) -> dict[str, Any]:
    images = pool(settings, "cifar100", "train").merge(pool(settings, "cifar10", "train"))
    tasks = [list(range(100)), list(range(100)), list(range(100, 110)), list(range(100, 110))]
    recipe = settings.untrained
    each = [Lessons.of(images, [task], recipe.images) for task in tasks]
    count = min(one.index.shape[1] for one in each)
    lessons = Lessons(*(torch.cat([getattr(one, side)[:, :count] for one in each]) for side in ("index", "labels")))
    base = make(settings, settings.network, 100, 9, settings.seed)
    models = [*copies(base, 4), *copies(base, 4, redraw=100)]
    state = train(settings, models, images, lessons.repeat(2), recipe, seed=settings.seed)[recipe.epochs]
    fresh = stacked_state([base, *(draw_atoms(copy.deepcopy(base), 500 + k) for k in range(3))])
    cosines = mean(by_atoms(joined([part(state, slice(0, 8)), fresh]))).tolist()
    names = [*(f"CIFAR-100 {k}" for k in (1, 2)), *(f"CIFAR-10 {k}" for k in (1, 2))]
    names = [*names, *(f"{name}, other start" for name in names), "their start", *(f"untrained {k}" for k in (1, 2, 3))]
    at = np.array(cosines)
    off = np.triu_indices(4, 1)
    numbers = {
        "cifar100": at[0, 1],
        "cifar10": at[2, 3],
        "across": at[:2, 2:4].mean(),
        "with_untrained": np.abs(at[:4, 9:]).max(),
        "with_their_start": at[:4, 8].mean(),
        "start_less_trained": at[:4, 8].mean() - at[:4, :4][off].mean(),
        "other_starts": np.abs(at[4:8, 4:8][off]).max(),
        "least_trained": at[:4, :4][off].min(),
    }
    return {"numbers": {key: float(value) for key, value in numbers.items()}, "names": names, "cosines": cosines}


class Toy(nn.Module):
    """(x, y) as an image of two pixels, 16 kernels of two atoms each, and one number out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = AtomConv2d(1, 16, (1, 2), 2)
        self.out = nn.Linear(16, 1)

    def features(self, points: Tensor) -> Tensor:
        return self.conv(points[:, None, None, :]).relu().flatten(1)

    def forward(self, points: Tensor) -> Tensor:
        return self.out(self.features(points))[:, 0]


def figure_9b(settings: Settings) -> dict[str, Any]:
    """Two regressions learnt where x = 0, probed there ("red") and where y = 0 ("blue")."""
    found: dict[str, list[float]] = {}
    for seed in range(settings.toys):
        torch.manual_seed(seed)
        base = Toy()
        for start in ("same", "other"):
            pair = [freeze(copy.deepcopy(base), "coefficients") for _ in range(2)]
            if start == "other":
                draw_atoms(pair[1], 100 + seed)
            for k, model in enumerate(pair):
                regress(model, 1000 * seed + k, settings.toy_steps)
            y = 0.5 + 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(seed))
            points = {"red": torch.stack([0 * y, y], 1), "blue": torch.stack([y, 0 * y], 1)}
            atoms = [atom_layers(model)["conv"].atoms.detach().flatten() for model in pair]
            found.setdefault(f"{start}_atoms", []).append(float(nn.functional.cosine_similarity(*atoms, 0)))
            for colour, probe in points.items():
                rows = [model.features(probe).detach().double() for model in pair]
                for measure in ("linear_cka", "cca_r2"):
                    if all(float(z.var(0).sum()) > 0 for z in rows):  # a toy of which nothing answers has no value
                        value = sosie.measure(measure, *rows)
                        found.setdefault(f"{start}_{measure}_{colour}", []).append(value)
    numbers = {name: float(np.mean(values)) for name, values in found.items()}
    return {"numbers": numbers, "values": found}


def regress(model: nn.Module, seed: int, steps: int) -> None:
    """z = sin 3y + noise, 500 points where x = 0, Adam."""
    generator = torch.Generator().manual_seed(seed)
    y, noise = (0.5 + 0.1 * torch.randn(500, generator=generator) for _ in range(2))
    points, z = torch.stack([0 * y, y], 1), torch.sin(3 * y) + noise
    stepper = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    for _ in range(steps):
        loss = (model(points) - z).square().mean()
        stepper.zero_grad()
        loss.backward()
        stepper.step()


# Figures 5 and 10 to 13: when layers settle, and where two tasks lead the same network.


DYNAMICS_ATOMS = 9
THRESHOLDS = (0.99, 0.999)


def train_with_checkpoints(
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
    model = make(settings, kind, len(tasks[0]), DYNAMICS_ATOMS, settings.seed)
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
            folder, model = train_with_checkpoints(
                settings, kind, images, whole, recipe, trains=trains, name=name, kernels=kernels
            )
            found = sosie.dynamics(folder, measures=["atom_cosine"])
            right = accuracy(model, test.images, test.labels, prepare=Prepare(settings))
            runs[name] = {**described(found), "accuracy": right}
            numbers |= {f"{name}_{key}": value for key, value in settling(found, recipe.epochs).items()}
            numbers[f"{name}_accuracy"] = right
            steps = settled_kernels(kernels, THRESHOLDS[0])
            runs[name]["kernels_settled"] = steps
            numbers[f"{name}_kernels_depth"] = rank_correlation(list(enumerate(steps)))
    return {"numbers": numbers, "runs": runs}


def figure_5_long(settings: Settings) -> dict[str, Any]:
    """AlexNet with its atoms trained as long as the paper's, several times side by side: when its layers settle."""
    images, recipe = pool(settings, "cifar100", "train"), settings.long_dynamics
    seeds = settings.long_dynamics_seeds
    models = [model for seed in seeds for model in copies(make(settings, settings.network, 100, 9, seed), 1)]
    lessons = Lessons.of(images, [list(range(100))], recipe.images).repeat(len(seeds))
    states = train(settings, models, images, lessons, recipe, seed=settings.seed, keep=range(recipe.epochs + 1))
    found = []
    for k in range(len(seeds)):
        kernels = [{layer: x[k] for layer, x in atoms_of(states[epoch]).items()} for epoch in sorted(states)]
        steps = settled_kernels(kernels, THRESHOLDS[0])
        depth = rank_correlation(list(enumerate(steps)))
        found.append({"settled": steps, "depth_0.99": depth, "first_0.99": steps[0] / recipe.epochs})
    test = pool(settings, "cifar100", "test")
    whole = Lessons.of(test, [list(range(100))]).repeat(len(seeds))
    right = accuracies(settings, models[0], states[recipe.epochs], test, whole)
    numbers: dict[str, float | None] = {"accuracy": float(right.mean())}
    for key in ("depth_0.99", "first_0.99"):
        known = [one[key] for one in found if one[key] is not None]
        numbers[f"alexnet_atoms_{key}"] = fmean(known) if known else None
    return {"numbers": numbers, "layers": list(atoms_of(states[0])), "seeds": found}


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
            train_with_checkpoints(
                settings, kind, images, [task], settings.two_tasks, trains="atoms", name=f"{label}-task-{k}"
            )[0]
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
    asked = {"recipe": asdict(settings.two_tasks), "pairs": settings.two_tasks_pairs}
    asked |= {key: getattr(settings, key) for key in ("network", "hidden", "width", "limit")}
    seeds = [
        remember(settings.cache, f"figure-12-seed{seed}", asked, partial(many_tasks, replace(settings, seed=seed)))
        for seed in settings.two_tasks_seeds
    ]
    for key in ("first_less_middle", "last_less_middle"):
        numbers[f"alexnet_{key}"] = fmean(value for part in seeds for value in part[key])
    return {"numbers": numbers, "runs": runs, "seeds": seeds}


def many_tasks(settings: Settings) -> dict[str, Any]:
    """AlexNet on several pairs of tasks, all networks in one stack: how alike the atoms of a pair end, by layer."""
    images, tasks = pool(settings, "cifar100", "train"), class_tasks(2 * settings.two_tasks_pairs, 10)
    base = make(settings, settings.network, 10, DYNAMICS_ATOMS, settings.seed)
    recipe, lessons = settings.two_tasks, Lessons.of(images, tasks, settings.two_tasks.images)
    state = train(settings, copies(base, len(tasks)), images, lessons, recipe, seed=settings.seed)[recipe.epochs]
    ends = [[float(one[k, k + 1]) for one in by_atoms(state).values()] for k in range(0, len(tasks), 2)]
    middle = [fmean(end[2:-1] if len(end) > 3 else end[1:-1]) for end in ends]
    return {
        "ends": ends,
        "first_less_middle": [fmean(end[:2]) - one for end, one in zip(ends, middle, strict=True)],
        "last_less_middle": [end[-1] - one for end, one in zip(ends, middle, strict=True)],
    }


# Table 2: ten tasks learnt one after another, and networks of similar tasks called in to help.


OF_CONTINUAL_TASK, ATOMS, MEMBERS = 10, 9, 3
TASK_CHOICES = ("atoms", "cca", "linear_cka")


def table_2(settings: Settings) -> dict[str, Any]:
    """Accuracy alone, with members chosen by each measure, with members at random, and with the head fitted again."""
    rows: list[dict[str, Any]] = []
    for seed in settings.continual_seeds:
        tasks = tasks_of(settings)
        found = learn_tasks(
            lambda seed=seed: make(settings, settings.network, OF_CONTINUAL_TASK, ATOMS, seed),
            tasks,
            recipe=TrainingRecipe(
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
        seconds, pairs = similarities_of_tasks(settings, found)
        own, others = answers(settings, found, tasks, seed)
        right = {"base": scores(own, tasks)}
        generator = torch.Generator().manual_seed(seed)
        count = min(MEMBERS, len(tasks) - 1)
        for name in TASK_CHOICES:
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
    return {"numbers": numbers_of_tasks(rows), "rows": rows}


def numbers_of_tasks(rows: list[dict[str, Any]]) -> dict[str, float]:
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
    for name in TASK_CHOICES:
        numbers[f"{name}_seconds"] = float(np.min([row["seconds"][name] for row in rows]))
    numbers["cca_time_ratio"] = numbers["cca_seconds"] / numbers["atoms_seconds"]
    numbers["forgetting"] = float(np.mean([row["forgetting"] for row in rows]))
    return numbers


def tasks_of(settings: Settings) -> list[Task]:
    images, test = (pool(settings, "cifar100", split) for split in ("train", "test"))
    lists = class_tasks(settings.tasks, OF_CONTINUAL_TASK)
    learnt, tested = Lessons.of(images, lists, settings.continual.images), Lessons.of(test, lists)
    return [
        (images.images[learnt.index[k]], learnt.labels[k], test.images[tested.index[k]], tested.labels[k])
        for k in range(settings.tasks)
    ]


def similarities_of_tasks(settings: Settings, found: Continual) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Of all pairs of tasks by each measure, and the seconds that took: what is shown to networks included."""
    models = [found.model(task) for task in range(len(found))]
    state = stacked_state(models)
    seconds, pairs = {}, {}
    for name in TASK_CHOICES:
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
            seen,
            labels,
            OF_CONTINUAL_TASK,
            recipe=TrainingRecipe(epochs=settings.continual_head_epochs, batch=500, rate=1e-3),
            seed=seed,
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


# Figure 3: what comparing two networks takes, as the images that they are probed with grow in number.


COSTED_ATOMS = 9


def figure_3(settings: Settings) -> dict[str, Any]:
    """FLOPs, seconds and memory of one pair of AlexNets, all positions of all layers; with the paper's own count.

    FLOPs of the forward passes are counted by torch, those of the statistics by their products: covariances of each
    and of both, and 22 c³ for the factorisation of each, for CCA; Gram matrices and their products for CKA.
    """
    base = make(settings, settings.network, 10, COSTED_ATOMS, settings.seed)
    state = stacked_state([base, draw_atoms(copies(base, 1)[0], 100)])
    shapes = shapes_of(settings, base)
    with FlopCounterMode(display=False) as counter:
        base(torch.zeros(1, 3, 32, 32, device=settings.device))
    forward = 2 * counter.get_total_flops()  # of both networks, an image
    entries = sum(layer.atoms.numel() for layer in atom_layers(base).values())
    atoms = 6 * entries  # a product of the two and of each with itself
    images = pool(settings, "cifar100", "test").images
    rows = []
    for count in settings.cost_probes:
        row = {"probes": count, "atoms": atoms, "cca": forward * count + cca_flops(shapes, count)}
        row |= {"linear_cka": forward * count + cka_flops(shapes, count), "paper": paper_flops(base, shapes, count)}
        asked = replace(settings, probes=replace(settings.probes, images=count))
        row["seconds"] = {
            name: timed(asked, base, state, images[:count], name) for name in ("atoms", "cca", "linear_cka")
        }
        rows.append(row)
    last = rows[-1]
    numbers = {
        "cca_ratio": last["cca"] / atoms,
        "linear_cka_ratio": last["linear_cka"] / atoms,
        "paper_ratio": last["paper"] / entries,
        "growth": last["cca"] / rows[0]["cca"],
        "probes_growth": last["probes"] / rows[0]["probes"],
        "cca_time_ratio": last["seconds"]["cca"][0] / last["seconds"]["atoms"][0],
        "atoms_seconds": last["seconds"]["atoms"][0],
        "cca_gigabytes": last["seconds"]["cca"][1],
    }
    return {"numbers": numbers, "atom_entries": entries, "rows": rows}


def shapes_of(settings: Settings, model: nn.Module) -> dict[str, tuple[int, int]]:
    """Channels and places of each layer's output."""
    sites = sites_of(model)
    with torch.no_grad(), watch(copy.deepcopy(model), list(sites.values())) as seen:
        seen.run(torch.zeros(1, 3, 32, 32, device=settings.device))
        return {layer: (seen[site].shape[1], seen[site][0, 0].numel()) for layer, site in sites.items()}


def cca_flops(shapes: dict[str, tuple[int, int]], n: int) -> float:
    """Three covariances of all rows, two factorisations, two products with them."""
    return sum(6.0 * n * places * c**2 + 2 * 22 * c**3 + 4 * c**3 for c, places in shapes.values())


def cka_flops(shapes: dict[str, tuple[int, int]], n: int) -> float:
    """Two Gram matrices and three products of them."""
    return sum(4.0 * n**2 * c * places + 6 * n**2 for c, places in shapes.values())


def paper_flops(model: nn.Module, shapes: dict[str, tuple[int, int]], n: int) -> float:
    """n h′w′ k² c c′ + n² h w c of section 2.3, summed over layers; the paper divides it by m k²."""
    total = 0.0
    for name, layer in atom_layers(model).items():
        c, places = shapes[name]
        kernel = layer.atoms[0].numel()
        total += n * places * kernel * c * layer.in_channels + n**2 * places * c  # strides are 1: h′w′ is hw
    return total


def timed(settings: Settings, model: nn.Module, state: Any, images: torch.Tensor, name: str) -> tuple[float, float]:
    """Seconds (the best of three) and the GPU memory at its highest beyond the networks, in GB."""
    best, memory = float("inf"), 0.0
    on_gpu = settings.device.startswith("cuda")
    for _ in range(3):
        wait(settings)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        if name == "atoms":
            mean(by_atoms(state))
        else:
            mean(by_stimulus(look(settings, model, state, images, (name,)), (name,))[name])
        wait(settings)
        best = min(best, time.perf_counter() - start)
        if on_gpu:
            memory = (torch.cuda.max_memory_allocated() - before) / 1e9
    return best, memory


# Figures 6 and 8: do 120 clients that never met fall into the groups of their tasks?


OF_CLIENT = 5  # a task
USERS_ATOMS = 9
USERS_STIMULUS = ("cca", "linear_cka")
SHOWN = ("atoms", "updates", "cca")


def clients(settings: Settings, images: Pool) -> tuple[Lessons, Tensor, list[list[int]]]:
    """What each client learns, its group, and its classes: shares of CIFAR-100's tasks, then digits.

    The clients of a CIFAR task share its images among them, classes in balance. Each client of digits has five classes
    drawn at random, and as many images as the others.
    """
    tasks = class_tasks(settings.cifar_tasks, OF_CLIENT)
    index, classes = [], []
    for task in tasks:
        rounds = images.of(task).view(-1, OF_CLIENT)  # one image of each class
        for k in range(settings.a_task):
            index.append(rounds[k :: settings.a_task].flatten())
            classes.append(task)
    count = min(len(one) for one in index)
    random = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.digit_clients):
        task = (100 + torch.randperm(10, generator=random)[:OF_CLIENT]).tolist()
        rounds = images.of(task).view(-1, OF_CLIENT)
        chosen = torch.randperm(len(rounds), generator=random)[: -(-count // OF_CLIENT)].to(rounds.device)
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
    base = make(settings, "small_cnn", OF_CLIENT, USERS_ATOMS, settings.seed)
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
        maps[str(epoch)] = similarities_of_users(settings, base, part(state, own), start, stimulus=last)
        maps[str(epoch)]["other_start"] = mean(by_atoms(part(state, slice(count, 2 * count))))
    scores = {epoch: {name: judged(m, groups) for name, m in each.items()} for epoch, each in maps.items()}
    numbers: dict[str, float] = {
        "accuracy": float(right.mean()),
        "digits_accuracy": float(right[groups.max() == groups].mean()),
    }
    for name, score in scores[str(recipe.epochs)].items():
        numbers |= {f"{name}_{key}": value for key, value in score.items()}
    early: dict[str, Any] = {}
    for epoch in settings.users_at[:2]:
        parts = early[str(epoch)] = [early_users(settings, seed, epoch) for seed in settings.early_seeds]
        numbers |= {f"early_{epoch}_{key}": fmean(part[key] for part in parts) for key in scores[str(epoch)]["atoms"]}
    shown = {str(settings.users_at[k]) for k in (0, len(settings.users_at) // 2, -1)}
    kept = {epoch: {name: upper(m) for name, m in each.items() if name in SHOWN} for epoch, each in maps.items()
            if epoch in shown}  # fmt: skip
    return {"numbers": numbers, "groups": groups.tolist(), "scores": scores, "maps": kept, "early": early}


def early_users(settings: Settings, seed: int, epoch: int) -> dict[str, Any]:
    """Clients of another seed, trained as far as one epoch: how far atoms tell them apart."""
    own, recipe = replace(settings, seed=seed), replace(settings.users, epochs=epoch)
    keys = ("width", "limit", "cifar_tasks", "a_task", "digit_clients")
    asked = {"recipe": asdict(recipe)} | {key: getattr(settings, key) for key in keys}

    def score() -> dict[str, Any]:
        images = pool(settings, "cifar100", "train").merge(pool(settings, "mnist", "train"))
        lessons, groups, _ = clients(own, images)
        models = copies(make(own, "small_cnn", OF_CLIENT, USERS_ATOMS, seed), len(groups))
        return judged(mean(by_atoms(train(own, models, images, lessons, recipe, seed=seed)[epoch])), groups)

    return remember(settings.cache, f"figure-6-early-seed{seed}", asked, score)


def similarities_of_users(
    settings: Settings, model: Any, state: State, start: State, stimulus: bool
) -> dict[str, Tensor]:
    found = {
        "atoms": mean(by_atoms(state)),
        "updates": mean(by_atoms(state, start)),
        "weights": mean(by_weights(state)),
    }
    if stimulus:
        sites = look(settings, model, state, probes(settings), USERS_STIMULUS)
        found |= {name: mean(pairs) for name, pairs in by_stimulus(sites, USERS_STIMULUS).items()}
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


EXPERIMENTS = {
    "figure-2": figure_2,
    "figure-2-seeds": figure_2_seeds,
    "figure-4a": figure_4a,
    "figure-4b": figure_4b,
    "figure-4b-long": figure_4b_long,
    "figure-4-table": figure_4_table,
    "figure-4-table-long": figure_4_table_long,
    "figure-9a": figure_9a,
    "figure-9b": figure_9b,
    "figure-5": figure_5,  # 10 and 11 too
    "figure-5-long": figure_5_long,
    "figure-12": figure_12,  # 13 too
    "table-2": table_2,
    "figure-3": figure_3,
    "figure-6": figure_6,  # 8 too
    "table-1": table_1,
    "table-1-short": table_1_short,  # 15 rounds
    "table-3": table_3,
    "table-3-cifar10": table_3_cifar10,
}

if __name__ == "__main__":
    running.start(PAPER, EXPERIMENTS, Settings, small)

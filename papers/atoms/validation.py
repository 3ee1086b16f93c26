"""Figure 4a, figure 4's table, figures 9a and 9b: a bound, other probing data, untrained networks, a toy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from data import Lessons, pool, probes
from networks import copies, draw_atoms, joined, make, part
from running import part_path, remember
from safetensors.torch import load_file, save_file
from settings import Recipe, Settings
from similarity import by_atoms, by_stimulus, look, mean
from torch import Tensor, nn
from training import accuracies, train

import sosie
from sosie.files import write_atomically
from sosie.models import AtomConv2d, atom_layers, freeze
from sosie.train.many_networks import stacked_state

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
    recipe = settings.long_pair
    asked = {key: getattr(settings, key) for key in ("seed", "network", "hidden", "width", "limit", "long_pair_at")}
    asked |= {"recipe": asdict(recipe), "probes": asdict(settings.probes)}
    by_arm = {
        name: remember(settings.cache, f"figure-4-table-long-{name}", asked, partial(long_arm, settings, name, asked))
        for name in ("random", "learnt")
    }
    by_epoch = {
        str(epoch): {name: found[str(epoch)] for name, found in by_arm.items()} for epoch in settings.long_pair_at
    }
    numbers = {
        f"{key}_after_{epoch}": value for epoch, arms in by_epoch.items() for key, value in pair_numbers(arms).items()
    }
    last = by_epoch[str(recipe.epochs)]
    return {"numbers": {**pair_numbers(last), **numbers}, "arms": last, "by_epoch": by_epoch}


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

"""The scale of a benchmark, its folder, its networks in pairs that differ in one respect only, and their agreement."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import CORRUPTIONS, attack, corrupt, open_images
from ..files import DamagedFile, plain_json, read_json, read_tensors, write_json, write_tensors
from ..progress import track
from ..train import Recipe, fit_together
from ..train.many_networks import build

# The size of a benchmark: networks, images and shifts

Architecture = tuple[int, int]  # hidden layers, neurons in each
Cohort = tuple[int, ...]  # numbers of networks, every two of which differ in one respect


@dataclass(frozen=True)
class Scale:
    """The size of a benchmark: networks, images and draws."""

    name: str
    data: tuple[str, ...]  # the first of these that is found
    train: int  # images at most
    test: int  # images at most, for measures and for agreement
    architectures: tuple[Architecture, ...]
    seeds: int
    epochs: tuple[int, ...]  # whose checkpoints are kept; training ends at the last
    strategies: tuple[str, ...]
    corruptions: tuple[str, ...]
    attacks: tuple[str, ...]
    calibrated: Architecture  # for calibration and manipulation
    random: int  # untrained networks
    converged: int  # networks whose last checkpoints, an epoch apart, are compared
    checkpoints: int  # of each converged network
    converged_epochs: int
    numbers: tuple[int, ...]  # of probing images
    paired_rows: int  # images at most for measures whose cost grows with their square
    draws: int  # of the bootstrap
    budget: float  # seconds a measure may take over the pairs of one kind, or over one set of probing images
    batch: int = 64
    rate: float = 1e-3
    classes: tuple[int, ...] = (0, 1, 2)


SCALES = {
    "smoke": Scale(
        name="smoke", data=("demo",), train=300, test=120,
        architectures=((1, 16), (2, 16)), seeds=3, epochs=(1, 3, 6), strategies=("standard", "fgsm(epsilon=0.1)"),
        corruptions=("fog", "impulse_noise"), attacks=("fgsm(epsilon=0.1)",),
        calibrated=(2, 16), random=6, converged=2, checkpoints=4, converged_epochs=12, numbers=(20, 60),
        paired_rows=60, draws=200, budget=20.0, rate=3e-3,
    ),
    "small": Scale(
        name="small", data=("mnist", "demo"), train=1200, test=300,
        architectures=((1, 8), (1, 32), (4, 32)), seeds=4, epochs=(2, 6, 15),
        strategies=("standard", "fgsm(epsilon=0.1)", "pgd(epsilon=0.1, steps=5)"),
        corruptions=tuple(CORRUPTIONS), attacks=("fgsm(epsilon=0.1)", "pgd(epsilon=0.1)"),
        calibrated=(4, 32), random=20, converged=5, checkpoints=5, converged_epochs=40, numbers=(10, 30, 100),
        paired_rows=150, draws=500, budget=30.0, batch=128, rate=3e-3,
    ),
    "paper": Scale(
        name="paper", data=("mnist", "demo"), train=20_000, test=3147,
        architectures=((1, 8), (1, 32), (4, 8), (4, 32), (10, 32)), seeds=5, epochs=(10, 25, 50, 75, 100),
        strategies=("standard", "fgsm(epsilon=0.1)", "pgd(epsilon=0.1)"),
        corruptions=tuple(CORRUPTIONS),
        attacks=("fgsm(epsilon=0.1)", "fast_fgsm(epsilon=0.1)", "gaussian(epsilon=0.1)", "pgd(epsilon=0.1)",
                 "trades(epsilon=0.1)"),
        calibrated=(4, 32), random=100, converged=20, checkpoints=6, converged_epochs=100,
        numbers=(10, 30, 100, 300, 1000), paired_rows=1000, draws=1000, budget=600.0,
    ),
}  # fmt: skip

# Images at most, for measures whose cost grows faster than their square, or that are slow by nature.
SLOW = {"rtd": (32, "persistent homology"), "rsa": (1000, "ranks of all pairs of rows")}


# The folder of a benchmark: every unit of work is a file, written whole, and not repeated

KIND, VERSION = "benchmark-unit", 2
SETTINGS = "settings.json"
MEASURES_FOLDER = "measures"


class BenchmarkFolder:
    """Units of work by name, in the folder of one benchmark, which is identified by its settings."""

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any], *, resume: bool = True) -> None:
        self.folder = Path(folder)
        self.resume = resume
        self._made: set[Path] = set()  # in this run; without resume, older files are not used
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file: a benchmark needs a folder of its own")
        path = self.folder / SETTINGS
        settings = json.loads(json.dumps(plain_json(settings)))
        if path.exists():
            before = _read(path)["settings"]
            if different := [key for key in settings if before.get(key) != settings[key]]:
                raise ValueError(f"{self.folder} holds another benchmark ({', '.join(different)}): name another folder")
        _write(path, {"settings": settings})

    def json(self, name: str, make: Callable[[], dict[str, Any]], *, made_of: str = "") -> dict[str, Any]:
        """Read a unit from its file, or `make` and write it; `made_of` distinguishes versions of a measure."""
        path = self.folder / f"{name}.json"
        if self._exists(path):
            unit = _read(path)
            if unit.get("made_of") == made_of:
                return unit["found"]
        return self.write(name, make(), made_of=made_of)

    def write(self, name: str, content: dict[str, Any], *, made_of: str = "") -> dict[str, Any]:
        """Write a unit, also over an older one, and return it as it would be read."""
        path, plain = self.folder / f"{name}.json", plain_json(content)
        _write(path, {"made_of": made_of, "found": plain})
        self._made.add(path)
        return json.loads(json.dumps(plain))

    def tensors(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Read tensors from their file, or `make` and write them; on the CPU."""
        path = self.folder / f"{name}.safetensors"
        if not self._exists(path):
            write_tensors(path, KIND, VERSION, make(), {})
            self._made.add(path)
        return read_tensors(path, KIND, VERSION)[1]

    def of_measures(self) -> list[dict[str, Any]]:
        """The entry of every measure that was tested here."""
        paths = sorted((self.folder / MEASURES_FOLDER).glob("*/about.json"))
        return [_read(path)["found"] for path in paths if self._exists(path)]

    def _exists(self, path: Path) -> bool:
        return path.exists() and (self.resume or path in self._made)


def measure_folder(name: str) -> str:
    """The subfolder of a measure's units: readable, and unique for each name."""
    readable = re.sub(r"[^\w.=-]+", "-", name).strip("-")[:60]
    return f"{MEASURES_FOLDER}/{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _write(path: Path, content: dict[str, Any]) -> None:
    write_json(path, {"format": f"sosie-{KIND}", "version": VERSION, **content})


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, f"sosie-{KIND}", VERSION, "unit of a benchmark")
    except DamagedFile as error:
        raise DamagedFile(f"{error}; remove it, so that it is made again") from error


PAIR_KINDS = ("seed", "epoch", "architecture", "strategy")
UNTRAINED_SEED = 10_000  # the first seed of untrained networks, beyond those of the others
CONVERGED_SEED = 20_000


@dataclass(frozen=True)
class Images:
    """Images of the classes of the benchmark in [0, 1], with labels from 0; test images in a seeded order."""

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: int

    @property
    def inputs(self) -> int:
        return self.test[0].numel()


def open_benchmark_images(scale: Scale, *, seed: int, device: torch.device) -> Images:
    """Images of the first of the scale's data sets that is found."""
    for name in scale.data:
        try:
            parts = [open_images(name, split=split) for split in ("train", "test")]
            break
        except FileNotFoundError:
            if name == scale.data[-1]:
                raise
    tensors: list[Tensor] = []
    classes = torch.tensor(scale.classes)
    for part, most in zip(parts, (scale.train, scale.test), strict=True):
        images, labels = part.read(0, len(part))
        chosen = torch.isin(labels, classes).nonzero().flatten()
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
        chosen = chosen[order[:most]]
        numbered = (labels[chosen][:, None] == classes).int().argmax(1)
        tensors += [images[chosen].to(device), numbered.to(device)]
    train, train_labels, test, test_labels = tensors
    return Images(name, train, train_labels, test, test_labels, len(classes))


def perceptron(architecture: Architecture, inputs: int, classes: int) -> nn.Sequential:
    """A fully connected network with ReLUs; the output of all modules but the last is the last hidden layer."""
    layers, width = architecture
    widths = [inputs, *[width] * layers]
    hidden = [part for p, q in itertools.pairwise(widths) for part in (nn.Linear(p, q), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


@torch.no_grad()
def last_hidden(model: nn.Module, images: Tensor) -> Tensor:
    """The activations (n, p) of the last hidden layer, in float64."""
    return nn.Sequential(*list(model.children())[:-1])(images).double()


@dataclass(frozen=True)
class Member:
    """The training of one network of the population."""

    architecture: Architecture
    strategy: str
    seed: int
    epoch: int

    @property
    def run(self) -> Hashable:
        """The training run; its checkpoints are not independent networks."""
        return self.architecture, self.strategy, self.seed


@dataclass(frozen=True)
class Population:
    """All networks, including those for calibration."""

    members: tuple[Member, ...]
    models: tuple[nn.Sequential, ...]
    untrained: tuple[nn.Sequential, ...]
    converged: tuple[tuple[nn.Sequential, ...], ...]  # the last checkpoints of each training run, an epoch apart

    @cached_property
    def cohorts(self) -> dict[str, list[Cohort]]:
        return {kind: [cohort for cohort in cohorts_of(self.members, kind) if len(cohort) > 1] for kind in PAIR_KINDS}

    @cached_property
    def runs(self) -> list[int]:
        """The number of the training run of each member."""
        numbers = {run: k for k, run in enumerate(dict.fromkeys(m.run for m in self.members))}
        return [numbers[member.run] for member in self.members]


def cohorts_of(members: Sequence[Member], kind: str) -> list[Cohort]:
    """The numbers of members that are alike in all but `kind`."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for k, member in enumerate(members):
        alike[tuple(getattr(member, other) for other in PAIR_KINDS if other != kind)].append(k)
    return [tuple(numbers) for numbers in alike.values()]


def pairs_of(cohort: Cohort) -> list[tuple[int, int]]:
    return list(itertools.combinations(cohort, 2))


def make_population(
    scale: Scale,
    images: Images,
    store: BenchmarkFolder,
    *,
    seed: int,
    make: Callable[[Architecture], nn.Sequential] | None = None,
) -> Population:
    """Train the networks that the folder does not hold yet: one file for each architecture and strategy.

    `make` returns a network of an architecture, whose last module reads the last hidden layer; None: a perceptron.
    """
    device = images.train.device
    members: list[Member] = []
    models: list[nn.Sequential] = []
    make = make or (lambda architecture: perceptron(architecture, images.inputs, images.classes))
    recipes = list(itertools.product(scale.architectures, scale.strategies))
    for architecture, strategy in track(recipes, "training networks", len(recipes), "recipes"):
        make_one = functools.partial(make, architecture)
        seeds = [seed + k for k in range(scale.seeds)]
        states = store.tensors(
            f"networks/{architecture[0]}x{architecture[1]}-{strategy.partition('(')[0]}",
            functools.partial(_trained, make_one, images, scale, seeds, scale.epochs, strategy),
        )
        for epoch, k in itertools.product(scale.epochs, range(scale.seeds)):
            members.append(Member(architecture, strategy, seeds[k], epoch))
            models.append(_restored(make_one, states, epoch, k, device))
    calibrated = functools.partial(make, scale.calibrated)
    untrained = [
        build(calibrated, seed + UNTRAINED_SEED + k, device).requires_grad_(False).eval() for k in range(scale.random)
    ]
    last = range(scale.converged_epochs - scale.checkpoints + 1, scale.converged_epochs + 1)
    seeds = [seed + CONVERGED_SEED + k for k in range(scale.converged)]
    states = {}
    if seeds:
        states = store.tensors(
            "networks/converged", lambda: _trained(calibrated, images, scale, seeds, last, "standard")
        )
    converged = [[_restored(calibrated, states, epoch, k, device) for epoch in last] for k in range(scale.converged)]
    return Population(tuple(members), tuple(models), tuple(untrained), tuple(map(tuple, converged)))


def _trained(
    make: Callable[[], nn.Sequential],
    images: Images,
    scale: Scale,
    seeds: Sequence[int],
    epochs: Sequence[int],
    strategy: str,
) -> dict[str, Tensor]:
    attack = None if strategy == "standard" else strategy
    recipe = Recipe(max(epochs), scale.batch, scale.rate, schedule="constant", attack=attack)
    checkpoints = fit_together(
        make, len(seeds), images.train, images.train_labels, recipe=recipe, seeds=seeds, keep=epochs,
        task=f"training {len(seeds)} networks, {strategy}",
    )  # fmt: skip
    return {f"{checkpoint.epoch}/{key}": value for checkpoint in checkpoints for key, value in checkpoint.state.items()}


def _restored(
    make: Callable[[], nn.Sequential], states: dict[str, Tensor], epoch: int, k: int, device: torch.device
) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        model = make()
    start = f"{epoch}/"
    model.load_state_dict({key.removeprefix(start): v[k] for key, v in states.items() if key.startswith(start)})
    return model.to(device).eval().requires_grad_(False)


# Behaviour of networks: the share of images on which two of them agree, under each condition

CLEAN, CORRUPTED, ATTACKED, ALL = "clean", "corrupted", "attacked", "all"
GROUPS = (ALL, CLEAN, CORRUPTED, ATTACKED)
Agreement = dict[str, np.ndarray]  # condition -> (models, models), NaN for two that are not paired


def agreements(scale: Scale, images: Images, population: Population, store: BenchmarkFolder, *, seed: int) -> Agreement:
    """The agreement of two networks under each condition, and its mean over each group of conditions."""
    agreement: Agreement = {}
    pairs = sorted({pair for cohorts in population.cohorts.values() for cohort in cohorts for pair in pairs_of(cohort)})
    conditions = [CLEAN, *scale.corruptions, *(f"attack: {a}" for a in scale.attacks)]
    for condition in track(conditions, "agreement of networks", len(conditions), "conditions"):
        values = store.json(
            f"agreement/{condition.replace('attack: ', 'attack-').partition('(')[0]}",
            lambda c=condition: {"values": _agreement(c, images, population, pairs, seed)},  # type: ignore[misc]
        )["values"]
        agreement[condition] = matrix = np.full((len(population.models),) * 2, np.nan)
        for (a, b), value in zip(pairs, values, strict=True):
            matrix[a, b] = matrix[b, a] = value
    for group, names in groups(scale).items():
        agreement[group] = np.mean([agreement[name] for name in names], axis=0)
    return agreement


def groups(scale: Scale) -> dict[str, list[str]]:
    """The conditions that each group is the mean of."""
    corrupted, attacked = list(scale.corruptions), [f"attack: {a}" for a in scale.attacks]
    names = {CLEAN: [CLEAN], CORRUPTED: corrupted, ATTACKED: attacked, ALL: [CLEAN, *corrupted, *attacked]}
    return {group: conditions for group, conditions in names.items() if conditions}


def _agreement(
    condition: str, images: Images, population: Population, pairs: Sequence[tuple[int, int]], seed: int
) -> list[float]:
    models = population.models
    if not condition.startswith("attack: "):
        x = probing_images(condition, images, seed)
        answers = [predictions(model, x) for model in models]
        return [float((answers[a] == answers[b]).double().mean()) for a, b in pairs]
    # The mean of two agreements: on images that attack A, and on images that attack B.
    kind = condition.removeprefix("attack: ")
    partners: dict[int, list[int]] = defaultdict(list)
    for a, b in pairs:
        partners[a].append(b)
        partners[b].append(a)
    agreed: dict[tuple[int, int], Tensor] = {}
    for a in track(partners, f"attacking by {kind}", len(partners), "networks"):
        x = attack(models[a], images.test, images.test_labels, kind, seed=seed)
        answers_of_a = predictions(models[a], x)
        for b in partners[a]:
            agreed[a, b] = (answers_of_a == predictions(models[b], x)).double().mean()
    return [float(agreed[a, b] + agreed[b, a]) / 2 for a, b in pairs]


def probing_images(kind: str, images: Images, seed: int) -> Tensor:
    """The test images, as they are or corrupted."""
    return images.test if kind == CLEAN else corrupt(images.test, kind, seed=seed)


@torch.no_grad()
def predictions(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax(1)

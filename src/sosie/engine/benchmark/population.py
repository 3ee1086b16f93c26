"""The networks of a benchmark: trained once, kept, and paired so that two differ in one respect only."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ...data import ImageData, ImageFolder, open_images
from ...progress import track
from ...train import fit_together
from .scales import Architecture, Scale
from .store import Store

KINDS = ("seed", "epoch", "architecture", "strategy")
UNTRAINED_SEED = 10_000  # seeds of networks that are not trained, and of those for calibration, begin beyond others
CONVERGED_SEED = 20_000


@dataclass(frozen=True)
class Images:
    """Images of the classes of the benchmark in [0, 1], labels numbered from 0; test images in a seeded order."""

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
    """The first of the scale's data sets that is found."""
    for name in scale.data:
        try:
            parts = [open_images(name, split=split) for split in ("train", "test")]
        except FileNotFoundError:
            if name == scale.data[-1]:
                raise
            continue
        break
    train, test = (
        _of_classes(part, scale.classes, most, seed, device)
        for part, most in zip(parts, (scale.train, scale.test), strict=True)
    )
    return Images(name, *train, *test, classes=len(scale.classes))


def _of_classes(
    data: ImageData | ImageFolder, classes: Sequence[int], most: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    images, labels = data.read(0, len(data))
    chosen = torch.isin(labels, torch.tensor(classes)).nonzero().flatten()
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    chosen = chosen[order[:most]]
    numbered = (labels[chosen][:, None] == torch.tensor(classes)).int().argmax(1)
    return images[chosen].to(device), numbered.to(device)


def perceptron(architecture: Architecture, inputs: int, classes: int) -> nn.Sequential:
    """Fully connected, with ReLUs; all but the last module give the last hidden layer."""
    layers, width = architecture
    widths = [inputs, *[width] * layers]
    hidden = [part for p, q in itertools.pairwise(widths) for part in (nn.Linear(p, q), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


@torch.no_grad()
def last_hidden(model: nn.Module, images: Tensor) -> Tensor:
    """(n, p) activations of the last hidden layer, float64."""
    return nn.Sequential(*list(model.children())[:-1])(images).double()


@dataclass(frozen=True)
class Member:
    """One network of the population: how it came about."""

    architecture: Architecture
    strategy: str
    seed: int
    epoch: int

    @property
    def run(self) -> Hashable:
        """Checkpoints of one training run are no independent networks."""
        return self.architecture, self.strategy, self.seed


@dataclass(frozen=True)
class Block:
    """Networks every two of which differ in one respect."""

    kind: str
    members: tuple[int, ...]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(itertools.combinations(self.members, 2))


@dataclass(frozen=True)
class Population:
    """All networks, trained ones and those for calibration."""

    members: tuple[Member, ...]
    models: tuple[nn.Sequential, ...]
    untrained: tuple[nn.Sequential, ...]
    converged: tuple[tuple[nn.Sequential, ...], ...]  # of each training run the last checkpoints, an epoch apart

    @cached_property
    def blocks(self) -> dict[str, list[Block]]:
        return {kind: [b for b in blocks_of(self.members, kind) if len(b.members) > 1] for kind in KINDS}

    @cached_property
    def runs(self) -> list[int]:
        """The number of the training run of each member."""
        numbers = {run: k for k, run in enumerate(dict.fromkeys(m.run for m in self.members))}
        return [numbers[member.run] for member in self.members]


def blocks_of(members: Sequence[Member], kind: str) -> list[Block]:
    """Members that are alike in all but `kind`."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for k, member in enumerate(members):
        alike[tuple(getattr(member, other) for other in KINDS if other != kind)].append(k)
    return [Block(kind, tuple(numbers)) for numbers in alike.values()]


def make_population(
    scale: Scale,
    images: Images,
    store: Store,
    *,
    seed: int,
    make: Callable[[Architecture], nn.Sequential] | None = None,
) -> Population:
    """Train what is not in the folder yet: one file for each architecture and strategy.

    `make`: a network of an architecture, whose last module reads the last hidden layer; None: a perceptron.
    """
    device = images.train.device
    members: list[Member] = []
    models: list[nn.Sequential] = []
    recipes = list(itertools.product(scale.architectures, scale.strategies))
    for architecture, strategy in track(recipes, "training networks", len(recipes), "recipes"):
        own_make = _maker(architecture, images, make)
        seeds = [seed + k for k in range(scale.seeds)]
        found = store.tensors(
            f"networks/{architecture[0]}x{architecture[1]}-{strategy.partition('(')[0]}",
            lambda a=own_make, s=seeds, t=strategy: _trained(a, images, scale, s, scale.epochs, t),  # type: ignore[misc]
        )
        for epoch, own in itertools.product(scale.epochs, range(scale.seeds)):
            members.append(Member(architecture, strategy, seeds[own], epoch))
            models.append(_restored(own_make, found, epoch, own, device))
    calibrated = _maker(scale.calibrated, images, make)
    with torch.random.fork_rng(devices=[]):
        untrained = [_seeded(calibrated, seed + UNTRAINED_SEED + k).to(device).eval() for k in range(scale.random)]
    last = range(scale.converged_epochs - scale.checkpoints + 1, scale.converged_epochs + 1)
    seeds = [seed + CONVERGED_SEED + k for k in range(scale.converged)]
    kept = {}
    if seeds:
        kept = store.tensors("networks/converged", lambda: _trained(calibrated, images, scale, seeds, last, "standard"))
    converged = [[_restored(calibrated, kept, epoch, k, device) for epoch in last] for k in range(scale.converged)]
    return Population(tuple(members), tuple(models), tuple(untrained), tuple(map(tuple, converged)))


def _maker(
    architecture: Architecture, images: Images, make: Callable[[Architecture], nn.Sequential] | None
) -> Callable[[], nn.Sequential]:
    if make is not None:
        return lambda: make(architecture)
    return lambda: perceptron(architecture, images.inputs, images.classes)


def _trained(
    make: Callable[[], nn.Sequential],
    images: Images,
    scale: Scale,
    seeds: Sequence[int],
    epochs: Sequence[int],
    strategy: str,
) -> dict[str, Tensor]:
    found = fit_together(
        make, len(seeds), images.train, images.train_labels, epochs=max(epochs), seeds=seeds, strategy=strategy,
        keep=epochs, batch=scale.batch, rate=scale.rate, task=f"training {len(seeds)} networks, {strategy}",
    )  # fmt: skip
    return {f"{checkpoint.epoch}/{key}": value for checkpoint in found for key, value in checkpoint.state.items()}


def _restored(
    make: Callable[[], nn.Sequential], found: dict[str, Tensor], epoch: int, k: int, device: torch.device
) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        model = make()
    start = f"{epoch}/"
    model.load_state_dict({key.removeprefix(start): v[k] for key, v in found.items() if key.startswith(start)})
    return model.to(device).eval().requires_grad_(False)


def _seeded(make: Callable[[], nn.Sequential], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return make().requires_grad_(False)

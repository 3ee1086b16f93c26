"""How much of everything: the networks, what they are trained on, and a smoke run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Recipe:
    """How networks are trained: by Adam, the rate falling as a cosine, images shifted by up to two pixels."""

    steps: int  # about: whole epochs
    rate: float
    batch: int = 125
    decay: float = 0.01

    def epochs(self, images: int) -> int:
        """So many that every data set gets the same number of steps."""
        return max(1, round(self.steps / -(-images // self.batch)))


@dataclass(frozen=True)
class Architecture:
    """One of sosie's, all of at most 90,000 parameters."""

    name: str  # here
    network: str  # in sosie.models
    options: Options


@dataclass(frozen=True)
class Source:
    """A data set that networks are trained on from scratch: some of its classes, in two halves of equally many."""

    name: str
    classes: int  # the first so many
    half: int  # images


@dataclass(frozen=True)
class Target:
    """A small task that no network was trained on: some classes of a data set, which may be changed first."""

    name: str
    dataset: str
    classes: range
    images: int  # to train on; the rest of the test images to test on
    inverted: bool = False


ARCHITECTURES = (
    Architecture("cnn", "small_cnn", (("width", 10), ("channels", 3), ("size", 32))),
    Architecture("atoms", "small_cnn", (("width", 10), ("channels", 3), ("size", 32), ("atoms", 6))),
    Architecture("resnet8", "resnet8", (("width", 0.5),)),
    Architecture("tiny10", "tiny10", (("width", 0.75),)),
)
SOURCES = (  # in a circle: a network is fine-tuned on the next two
    Source("mnist", 10, 5000),
    Source("cifar10", 10, 5000),
    Source("fashion-mnist", 10, 5000),
    Source("tiny-imagenet", 100, 1250),
    Source("cifar100", 50, 5000),
)
TARGETS = (
    Target("cifar100-50s", "cifar100", range(50, 60), 1000),
    Target("cifar100-60s", "cifar100", range(60, 70), 1000),
    Target("cifar100-70s", "cifar100", range(70, 80), 1000),
    Target("tiny-imagenet-180s", "tiny-imagenet", range(180, 200), 500),
    Target("inverted-mnist", "mnist", range(10), 500, inverted=True),
)


@dataclass(frozen=True)
class Settings:
    """The real run."""

    device: str
    results: Path
    nets: Path  # the trained networks, and what is known of each: experiments share them
    synthetic: bool = False  # random images: no data are needed
    at_once: int = 16  # networks trained side by side
    mixed: bool = True
    architectures: tuple[Architecture, ...] = ARCHITECTURES
    sources: tuple[Source, ...] = SOURCES
    targets: tuple[Target, ...] = TARGETS
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    parents: tuple[int, ...] = (0, 1)  # the seeds whose networks have children
    further: int = 2  # data sets that each parent is fine-tuned on
    scratch: Recipe = Recipe(steps=2000, rate=2e-3)
    fine_tune: Recipe = Recipe(steps=800, rate=1e-3)
    train_on: Recipe = Recipe(steps=500, rate=5e-4)  # near copies
    real: Recipe = Recipe(steps=300, rate=1e-3, batch=50)  # fine-tuning on the targets
    tested: int = 2000  # images at most
    coefficients: int = 12345  # the seed of those that all networks of atoms share
    workers: int = 2  # processes of what needs no GPU
    probes: int = 256  # images that fingerprints are taken on
    rows: int = 500  # images that `recommend` looks at
    draws: int = 2000  # of the bootstrap


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    once = Recipe(steps=2, rate=1e-3, batch=12)
    return replace(
        full,
        synthetic=True,
        mixed=False,
        architectures=(
            Architecture("atoms", "small_cnn", (("width", 2), ("channels", 3), ("size", 32), ("atoms", 3))),
            Architecture("resnet8", "resnet8", (("width", 0.25),)),
        ),
        sources=tuple(replace(each, classes=3, half=24) for each in full.sources[:3]),
        targets=tuple(
            replace(each, classes=range(4, 7), images=24, inverted=inverted)
            for each, inverted in zip(full.targets[:2], (False, True), strict=True)
        ),
        seeds=(0, 1),
        parents=(0,),
        scratch=once,
        fine_tune=once,
        train_on=once,
        real=once,
        tested=24,
        workers=0,
        probes=32,
        rows=24,
        draws=100,
    )

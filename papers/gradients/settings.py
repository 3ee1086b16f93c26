"""How much of everything: the real run, and a smoke run. What the paper has instead is in [brackets]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

RESNET18, RESNET50 = "resnet18", "resnet50"


@dataclass(frozen=True)
class DataSet:
    """Images of 32 × 32 × 3, and what of the training depends on them."""

    classes: int
    normalise: str  # mean and deviation of its training images, as sosie reads it
    rate: float  # the highest of the cycle [0.1, divided by ten every 80 epochs]
    mirror: bool  # whether a mirror image keeps its label


DATA_SETS = {
    # The deviations that the public code of the paper's networks has; the pixels' own are .2470 .2435 .2616.
    "cifar10": DataSet(10, "mean .4914 .4822 .4465 std .2023 .1994 .2010", rate=0.2, mirror=True),
    "cifar100": DataSet(100, "mean .5075 .4867 .4411 std .2673 .2565 .2762", rate=0.2, mirror=True),
    # In place of SVHN: grey digits with a black border of two pixels, repeated on three channels.
    "mnist": DataSet(10, "mean .1004 .1004 .1004 std .2755 .2755 .2755", rate=0.1, mirror=False),
}


@dataclass(frozen=True)
class Recipe:
    """All that decides how one network is trained, but for its seed and the images that are at hand."""

    dataset: str
    architecture: str
    epochs: int
    batch: int
    rate: float
    decay: float
    pad: int  # crops are taken from images with a black border this wide
    mirror: bool
    normalise: str
    mixed: bool  # bfloat16 and channels last
    train_images: int | None  # at most; None for all that are found
    test_images: int | None


@dataclass(frozen=True)
class Settings:
    """The real run."""

    datasets: tuple[str, ...] = tuple(DATA_SETS)  # [SVHN in place of MNIST]
    resnet18_seeds: int = 5  # [ten]
    resnet50_seeds: int = 1
    resnet18_epochs: int = 30  # [200]
    resnet50_epochs: int = 30  # [200]
    batch: int = 512  # [128]
    decay: float = 5e-4  # [1e-4, over seven times the epochs]
    pad: int = 4
    mixed: bool = True
    train_images: int | None = None
    test_images: int | None = None

    def networks(self) -> list[tuple[str, str, int]]:
        """Data set, architecture and seed of each; in an order that leaves a run cut short with some of all."""
        sizes = ((RESNET18, self.resnet18_seeds), (RESNET50, self.resnet50_seeds))
        return [(data, name, seed) for name, seeds in sizes for seed in range(seeds) for data in self.datasets]

    def recipe(self, dataset: str, architecture: str) -> Recipe:
        if dataset not in DATA_SETS:
            raise ValueError(f"no data set {dataset!r} in this study; there are {', '.join(DATA_SETS)}")
        epochs = {RESNET18: self.resnet18_epochs, RESNET50: self.resnet50_epochs}
        if architecture not in epochs:
            raise ValueError(f"no architecture {architecture!r} in this study; there are {', '.join(epochs)}")
        data = DATA_SETS[dataset]
        return Recipe(
            dataset,
            architecture,
            epochs=epochs[architecture],
            batch=self.batch,
            rate=data.rate,
            decay=self.decay,
            pad=self.pad,
            mirror=data.mirror,
            normalise=data.normalise,
            mixed=self.mixed,
            train_images=self.train_images,
            test_images=self.test_images,
        )


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    return replace(
        full,
        resnet18_seeds=1,
        resnet18_epochs=1,
        resnet50_epochs=1,
        batch=8,
        train_images=16,
        test_images=16,
    )


@dataclass(frozen=True)
class Study:
    """What is measured on the networks."""

    device: str
    results: Path
    cache: Path
    training: Settings = Settings()
    images: int = 10_000  # of each data set that a network is represented on
    whole_images: int = 50_000  # the same for figures 4, 5, 6, 9, 10 and 13, at most: the training images, as the paper
    norm_images: int = 2_000  # for Task2Vec and the Fisher-Rao norm
    size: int = 512  # buckets of a sketch, as in the paper
    batch: int = 500
    other_seeds: int = 2  # networks a data set for the representations of figures 7 and 8
    bound_images: int = 2_000
    bound_sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    bound_seeds: int = 10
    enlarged: int = 128  # pixels a side that EfficientNet-Lite0 gets 32 × 32 images at
    held_out: str = "test"  # the part of a data set that classifiers are tested on

    @property
    def seeds(self) -> range:
        return range(self.training.resnet18_seeds)


def small_study(full: Study) -> Study:
    """A smoke run on a CPU, with networks trained for one epoch on sixteen images."""
    return replace(
        full,
        training=small(full.training),
        images=16,
        whole_images=16,
        norm_images=16,
        size=8,
        batch=8,
        other_seeds=1,
        bound_images=16,
        bound_sizes=(4, 8),
        bound_seeds=2,
        enlarged=32,
        held_out="train",  # sixteen images of two parts need not have the same classes
    )

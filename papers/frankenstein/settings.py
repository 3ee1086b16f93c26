"""How much of everything: the real run, and a smoke run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

TINY_SITES = tuple(f"bn{i}" for i in range(1, 9))  # before the ReLU, as in the authors' code
RESNET_SITES = ("conv1", *(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)))
TINY_PAIRS = tuple((k, k + 1) for k in range(10))  # of twelve published seeds: A is the first, B the second
RESNET_PAIRS = ((0, 1), (1, 0))  # of two published seeds, both ways


@dataclass(frozen=True)
class Recipe:
    """How ResNet-20s of our own differ: what section 5.1 says was tried, with no details."""

    rate: float
    optimiser: Literal["adam", "sgd"] = "sgd"
    decay: float = 5e-4
    clip: float | None = None  # the gradient to this length
    batch_norm: bool = True


RECIPES = {
    "sgd": Recipe(0.1),
    "adam": Recipe(2e-3, optimiser="adam", decay=0.05),
    "plain": Recipe(0.1, clip=2.0, batch_norm=False),  # each batch norm a scale and a shift of the channels
}


@dataclass(frozen=True)
class Settings:
    """The real run; what the paper has instead is in brackets."""

    device: str
    results: Path
    nets: Path  # where networks trained here are kept
    mixed: bool = True  # bfloat16 in training networks [float32]

    # Images: joints are found on training images and evaluated on test images
    fit_images: int = 10_000  # [50,000]
    test_images: int = 10_000
    train_images: int = 50_000
    batch: int = 2_000  # that stitched networks are tested on

    # Task-loss training of a joint: Adam, the rate divided by ten at each third. 390 steps here, 11,700 in the authors'
    # code, so at a higher rate [30 epochs of 50,000 at batch 128, rate 1e-3]
    epochs: int = 10
    task_batch: int = 256
    rate: float = 5e-3

    # Figure 2 and 4
    tiny_sites: tuple[str, ...] = TINY_SITES
    tiny_pairs: tuple[tuple[int, int], ...] = TINY_PAIRS
    resnet_sites: tuple[str, ...] = RESNET_SITES
    resnet_pairs: tuple[tuple[int, int], ...] = RESNET_PAIRS
    label_pairs: int = 3  # pairs that are also trained on labels instead of B's answers

    cka_images: int = 500  # for CKA with an image a row

    # Ten ResNet-20s of our own (figure-2-ten), and others by other recipes (further-results)
    ten: int = 10
    few: int = 5
    own_epochs: int = 40
    own_batch: int = 128
    at_once: int = 10  # networks trained side by side, and written

    # Figure 3: networks of our own, two seeds a width [ten pairs; trained longer]
    widths: tuple[int, ...] = (1, 2, 3, 4)
    width_sites: tuple[str, ...] = ("conv1", "layer1.1", "layer2.0", "layer3.1")
    net_epochs: int = 12
    net_batch: int = 512
    net_rate: float = 0.4
    vit_epochs: int = 20

    # Figure 5
    penalties: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)  # weights of the CKA penalty
    penalty_width: int = 3

    # Figure 6 and mode connectivity
    starts: int = 50
    start_sites: tuple[str, ...] = ("bn2", "bn5")
    start_images: int = 5_000  # for Figure 6: a hundred joints at once
    start_epochs: int = 30  # a random start has further to go: steps × rate as in the authors' code
    start_batch: int = 128
    start_rate: float = 1e-2
    modes: int = 4  # random starts a layer
    steps: int = 8  # between two maps
    good: float = 0.8  # relative accuracy that a map must have to count

    # Figure 7 and 8
    ranks: tuple[int, ...] = (4, 8, 16)
    rank_pairs: int = 2
    sparse_sites: tuple[str, ...] = ("bn3", "bn5", "bn7")
    alphas: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 4e-1)  # of the lasso
    l1s: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 0.06, 0.1, 0.2, 0.4)  # of the task loss
    threshold: float = 1e-4  # weights below are set to zero, as in Figure 8

    # Across data sets and architectures
    across_sites: tuple[str, ...] = ("layer1.0", "layer2.0", "layer3.0", "layer3.2")
    across_pairs: int = 3  # of sites between two architectures

    def task(self, **options: object) -> str:
        """Task-loss matching as the text that sosie.stitch reads."""
        given = {"epochs": self.epochs, "batch": self.task_batch, "rate": self.rate, **options}
        return f"task_loss({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    def long_task(self, **options: object) -> str:
        """The same where training starts at random."""
        return self.task(epochs=self.start_epochs, batch=self.start_batch, rate=self.start_rate, **options)


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    return replace(
        full,
        mixed=False,
        fit_images=64,
        test_images=100,
        train_images=64,
        batch=64,
        epochs=2,
        task_batch=32,
        tiny_sites=("bn3", "bn8"),
        tiny_pairs=TINY_PAIRS[:2],
        resnet_sites=("conv1", "layer1.0"),
        resnet_pairs=RESNET_PAIRS[:1],
        label_pairs=1,
        cka_images=64,
        ten=2,
        few=2,
        own_epochs=1,
        own_batch=32,
        widths=(1, 2),
        width_sites=("layer3.1",),
        net_epochs=1,
        net_batch=32,
        net_rate=0.1,
        vit_epochs=1,
        penalties=(1.0,),
        penalty_width=2,
        starts=2,
        start_sites=("bn7",),
        start_images=64,
        start_epochs=2,
        start_batch=32,
        modes=2,
        steps=2,
        good=0.0,
        ranks=(4, 8, 16),
        rank_pairs=1,
        sparse_sites=("bn5",),
        alphas=(0.1, 1.0),
        l1s=(0.1,),
        across_sites=("layer3.1",),
        across_pairs=1,
    )

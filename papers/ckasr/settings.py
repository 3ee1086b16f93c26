"""How much of everything: the real run, and a smoke run. What the paper has instead is in [brackets].

python papers/ckasr/settings.py 0.5      # net-epochs an experiment, and minutes at so many seconds each
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How networks are trained; images are cropped and mirrored."""

    epochs: int
    batch: int = 128
    rate: float = 0.1
    decay: float = 5e-4
    optimiser: str = "sgd"
    warmup: float = 0  # epochs in which the rate rises
    images: int | None = None  # at most
    schedule: str = "cosine"  # of the rate


@dataclass(frozen=True)
class Arm:
    """A penalty on how alike a network's layers are; weight 0 is none."""

    name: str
    weight: float = 8e-4
    measure: str = "linear_cka"
    pairs: str = "stage"
    reduce: str = "sum"
    rows: int | None = None  # of each batch; None: all
    every: int = 1  # steps
    rule: str = "flatten"


NONE = Arm("none", 0.0)
CKA_SR = Arm("cka_sr")  # ordered pairs within a stage, its input among them, summed
AUGMENTED = Arm("augcka_sr", pairs="all", reduce="mean")  # as the listing: a mean over all pairs of blocks
CCA = Arm("cca", measure="mean_cca", rule="mean", every=10)  # [every step]: decompositions keep a GPU waiting


@dataclass(frozen=True)
class Tokens:
    """Table 1, scaled down [DeiT-Tiny on ImageNet]: a small vision transformer, and the same with tokens dropped."""

    dataset: str = "cifar10"
    depth: int = 6
    width: int = 192
    patch: int = 4
    keeps: tuple[float, ...] = (0.7, 0.9)
    first: Recipe = Recipe(epochs=30, warmup=2, batch=512, rate=1e-3, decay=0.05, optimiser="adam")
    then: Recipe = Recipe(epochs=8, batch=512, rate=2e-4, decay=0.05, optimiser="adam")
    gamma: float = 0.5  # of token CKA in the score [1, and a sum over tokens instead of a mean]
    calibration: int = 256  # training images that token CKA is measured on
    ratio_weight: float = 2.0  # of the term that holds the share of tokens kept (Rao et al. 2021)


@dataclass(frozen=True)
class Settings:
    """The real run."""

    device: str
    results: Path
    cache: Path  # what is known of every network that was trained: experiments share them
    synthetic: bool = False  # random images: no data are needed
    at_once: int = 10  # networks trained side by side
    mixed: bool = True
    probes: int = 1000  # test images that layers are compared on, in evaluation mode
    few: int = 128  # as many as a batch has: what the penalty itself sees
    map_seeds: tuple[int, ...] = (0,)  # whose layers are all compared with each other
    epsilons: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    relative_epsilon: float = 0.1  # in root mean squares of a layer's kept weights
    bins: int = 81
    limit: float = 0.2  # weights of histograms lie within ± this

    network: str = "resnet20"
    width: float = 1.0
    dense: Recipe = Recipe(epochs=60)
    dense_seeds: tuple[int, ...] = tuple(range(10))
    table_5: Recipe = Recipe(epochs=12)
    table_5_sparsities: tuple[float, ...] = (0.95, 0.98)
    table_5_seeds: tuple[int, ...] = tuple(range(10))  # [one]
    table_5_rest: tuple[float, ...] = (0.70, 0.85, 0.90, 0.998)  # the first seed alone
    table_5_longer: Recipe = Recipe(epochs=24)  # the first sparsity again
    table_5_full: Recipe = Recipe(epochs=160, schedule="steps")  # and as the code that the paper builds on trains
    sparse: Recipe = Recipe(epochs=12)  # tables 2 and 3, figure 2: CIFAR-10
    sparsity: float = 0.95
    table_3_seeds: tuple[int, ...] = tuple(range(5))  # [one]
    table_2_seeds: tuple[int, ...] = (0, 1, 2)  # [one]; the baseline is table 3's
    weights: tuple[float, ...] = (1e-4, 8e-4, 1e-2)  # [1e-5 to 1e-2, twelve]
    samples: tuple[tuple[int | None, int], ...] = ((None, 1), (8, 5), (8, 10))  # rows, every
    table_4_networks: tuple[str, ...] = ("resnet18", "resnet50")
    table_4_options: tuple[tuple[str, Any], ...] = (("stem", "cifar"),)
    table_4: Recipe = Recipe(epochs=12, warmup=2)  # [and ImageNet]
    deep: str = "resnet56"
    figure_1: Recipe = Recipe(epochs=16)
    figure_1_weights: tuple[float, ...] = (8e-4, 1e-2)  # and none
    tokens: Tokens = field(default_factory=Tokens)

    tokens_of_paper: int = 196  # lemmas: of a ViT with patches of 16 pixels
    draws: int = 20_000  # lemmas: rows of Gaussian samples

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """Of CIFAR's residual networks."""
        return (("width", self.width),)


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    tiny = Recipe(epochs=1, batch=12, images=24)
    by_adam = replace(tiny, rate=1e-3, optimiser="adam", decay=0.05)
    return replace(
        full,
        synthetic=True,
        mixed=False,
        probes=24,
        few=12,
        network="resnet8",
        width=0.125,
        dense=tiny,
        dense_seeds=(0, 1),
        table_5=tiny,
        table_5_sparsities=(0.5, 0.6),
        table_5_seeds=(0, 1),
        table_5_rest=(0.2, 0.3, 0.4, 0.7),
        table_5_longer=tiny,  # the networks of table 5
        table_5_full=replace(tiny, schedule="steps"),
        sparse=tiny,
        sparsity=0.5,
        table_3_seeds=(0, 1),
        table_2_seeds=(0, 1),
        samples=((None, 1), (4, 1), (4, 2)),
        table_4_networks=("resnet8", "resnet14"),
        table_4_options=(("width", 0.125),),
        table_4=tiny,
        deep="resnet14",
        figure_1=tiny,
        tokens=Tokens(depth=3, width=24, patch=8, first=by_adam, then=by_adam),
        tokens_of_paper=16,
        draws=2000,
    )


def sampled(rows: int | None, every: int, weight: float) -> Arm:
    """An arm of table 2: CKA-SR on so many rows of a batch, once in so many batches."""
    if rows is None and every == 1 and weight == CKA_SR.weight:
        return CKA_SR  # table 3 has it
    return Arm(f"{'all' if rows is None else rows}_rows_every_{every}_{weight:g}", weight, rows=rows, every=every)


def net_epochs(s: Settings) -> dict[str, float]:
    """Epochs of all networks of an experiment; a network that others have is counted where it comes first."""
    arms = len(s.samples) * len(s.weights) - 1
    return {
        "dense": len(s.dense_seeds) * s.dense.epochs,
        "table-5": 3 * len(s.table_5_seeds) * len(s.table_5_sparsities) * s.table_5.epochs,
        "table-3": 3 * len(s.table_3_seeds) * s.sparse.epochs,
        "table-2": arms * len(s.table_2_seeds) * s.sparse.epochs,
        "table-1 (ViT)": 2 * s.tokens.first.epochs + 2 * len(s.tokens.keeps) * s.tokens.then.epochs,
        "table-4 (ResNet-18, -50)": 2 * len(s.table_4_networks) * s.table_4.epochs,
        "figure-1 (ResNet-56)": (1 + len(s.figure_1_weights)) * s.figure_1.epochs,
        "table-5-rest": 3 * len(s.table_5_rest) * s.table_5.epochs,
        "table-5-longer": 3 * len(s.table_5_seeds) * s.table_5_longer.epochs,
        "table-5-full": 3 * len(s.table_5_seeds) * s.table_5_full.epochs,
    }


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    planned = net_epochs(Settings("cpu", Path(), Path()))
    for name, epochs in {**planned, "in all": sum(planned.values())}.items():
        print(f"{name:26} {epochs:6.0f} net-epochs {epochs * seconds / 60:6.1f} min")

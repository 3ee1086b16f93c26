"""ResNet-20s trained on one GPU side by side, with and without a penalty, against `fit` on one after the other."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

import torch
from measuring import show, wait, write
from torch import Tensor, nn

from sosie.models import cifar_resnet
from sosie.train import Augment, Penalty, Recipe, fit, fit_side_by_side

IMAGES, EPOCH, EPOCHS = 12_800, 50_000, 3
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "8 rows, every 5": {"rows": 8, "every": 5},
    "all rows, every step": {"rows": None, "every": 1},
}
RECIPE = Recipe(EPOCHS, 128, 0.1, "sgd", decay=5e-4, schedule="cosine", augment=Augment(), mixed=True)


class Clock:
    """Seconds of the epochs after the first, which records and chooses algorithms."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def __call__(self, *told: int) -> None:
        wait()
        self.at[told[-1]] = time.perf_counter()

    @property
    def an_epoch(self) -> float:
        return (self.at[EPOCHS] - self.at[1]) / (EPOCHS - 1)


def networks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [cifar_resnet(20).cuda() for _ in range(count)]


def beside(count: int, way: dict[str, Any] | None, images: Tensor, labels: Tensor) -> float:
    clock, models = Clock(), networks(count)
    with ExitStack() as attached:
        penalties = None if way is None else [attached.enter_context(Penalty(model, **way)) for model in models]
        fit_side_by_side(
            models,
            images,
            labels,
            seeds=range(count),
            penalties=penalties,
            at_once=count,
            after_epoch=clock,
            recipe=RECIPE,
        )
    return clock.an_epoch / count


def alone(way: dict[str, Any] | None, images: Tensor, labels: Tensor) -> float:
    clock, (model,) = Clock(), networks(1)
    with ExitStack() as attached:
        penalty = None if way is None else attached.enter_context(Penalty(model, **way))
        fit(model, images, labels, seed=0, penalty=penalty, after_epoch=clock, recipe=RECIPE)
    return clock.an_epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 10, 20])
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("side by side: needs a GPU")
        return
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), generator=random, dtype=torch.uint8).cuda()
    labels = torch.randint(0, 10, (IMAGES,), generator=random).cuda()
    spent = {("fit", 1, way): alone(options, images, labels) for way, options in WAYS.items()}
    for count in asked.counts:
        for way, options in WAYS.items():
            spent["fit_side_by_side", count, way] = beside(count, options, images, labels)
    rows = [
        {"by": by, "networks": count, "penalty": way, "s a network and epoch": seconds * EPOCH / IMAGES,
         "of the plain step": seconds / spent[by, count, "plain"],
         "times as fast as fit": spent["fit", 1, way] / seconds}
        for (by, count, way), seconds in spent.items()
    ]  # fmt: skip
    show("ResNet-20, batch 128, bfloat16, an epoch of 50,000 images", rows)
    write("side-by-side-gpu", {"what": __doc__, "rows": rows})


if __name__ == "__main__":
    main()

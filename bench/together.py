"""100 networks 784-32-32-32-32-3 trained together, against one after another: 640 images in batches of 64."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from measuring import show, timed, write
from torch import nn

from sosie.train import Recipe, fit, fit_together

COUNT, IMAGES, STRATEGIES = 100, 640, ("standard", "fgsm", "fast_fgsm", "pgd")


def make() -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), *hidden, nn.Linear(32, 3))


def recipe_of(strategy: str) -> Recipe:
    attack = None if strategy == "standard" else strategy
    return Recipe(epochs=1, rate=1e-3, schedule="constant", attack=attack)


def one_after_another(count: int, data: tuple[torch.Tensor, torch.Tensor], strategy: str) -> None:
    for seed in range(count):
        torch.manual_seed(seed)
        fit(make().to(data[0].device), *data, recipe=recipe_of(strategy), seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--alone", type=int, default=20, help="networks trained one after another, then scaled up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    data = tuple(
        part.to(asked.device)
        for part in (
            torch.rand(IMAGES, 1, 28, 28, generator=generator),
            torch.randint(0, 3, (IMAGES,), generator=generator),
        )
    )
    table: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        spent = timed(
            {
                "together": lambda: fit_together(make, asked.count, *data, recipe=recipe_of(strategy)),  # noqa: B023
                "alone": lambda: one_after_another(asked.alone, data, strategy),  # noqa: B023
            },
            repeats=asked.repeats,
        )
        alone = spent["alone"] * asked.count / asked.alone
        table.append({"strategy": strategy, "together, s": spent["together"], "one after another, s": alone,
                      "times as fast": alone / spent["together"]})  # fmt: skip
    show(f"{asked.count} networks on {asked.device}", table)
    if asked.count == COUNT:
        write("together" if asked.device == "cpu" else "together-gpu", {"what": __doc__, "rows": table})


if __name__ == "__main__":
    main()

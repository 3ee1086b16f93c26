"""The diagonal Fisher information of a ResNet-18 (CIFAR stem) on 256 and 1,024 random images, one label per image.

One backward pass per image, torch.func's vmap of grad, and sosie.sketching.task2vec, on the same labels. Random
weights, which cost as much as others.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from measuring import show, timed, write
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sosie.models import resnet18
from sosie.sketching import task2vec
from sosie.sketching.fisher import drawn_labels

IMAGES, BATCH = (256, 1024), 256
AT_A_TIME = 16  # images whose gradients vmap holds: 0.7 GB


def labels_of(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        log_p = torch.cat([torch.log_softmax(model(x).double(), 1) for x in images.split(BATCH)])
    return drawn_labels(log_p, 0, seed=0, draw=0)


def one_by_one(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """One backward pass per image; the usual lines."""
    found = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for x, y in zip(images.split(1), labels.split(1), strict=True):
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            found[name] += parameter.grad.square()
    model.zero_grad(set_to_none=True)
    return {name: (total / len(images)).cpu() for name, total in found.items()}


def by_vmap(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, values, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    found = {name: torch.zeros_like(value) for name, value in values.items()}
    for x, y in zip(images.split(AT_A_TIME), labels.split(AT_A_TIME), strict=True):
        for name, gradients in each(values, x, y).items():
            found[name] += gradients.square().sum(0)
    return {name: (total / len(images)).cpu() for name, total in found.items()}


def largest_difference(found: Any, expected: Any) -> float:
    """Relative, over tensors."""
    return max(float((found[name].double() - each.double()).norm() / each.norm()) for name, each in expected.items())


def measured(model: nn.Module, count: int, device: str, repeats: int) -> list[dict[str, Any]]:
    images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    labels = labels_of(model, images)
    results: dict[str, Any] = {}
    ways = {
        "one backward per image": lambda: results.update(one=one_by_one(model, images, labels)),
        "torch.func, vmap of grad": lambda: results.update(vmap=by_vmap(model, images, labels)),
        "sosie": lambda: results.update(sosie=task2vec(model, images.split(BATCH)).fisher),
    }
    seconds = timed(ways, repeats=repeats)
    return [
        {
            "images": count,
            "way": name,
            "seconds": seconds[name],
            "times faster": seconds["one backward per image"] / seconds[name],
            "largest difference": largest_difference(results[key], results["one"]),
        }
        for name, key in zip(ways, ("one", "vmap", "sosie"), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, nargs="+", default=IMAGES, help="others than these: nothing is written")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = resnet18(classes=10, stem="cifar").to(asked.device).eval()
    rows = [row for count in asked.images for row in measured(model, count, asked.device, asked.repeats)]
    show(f"Fisher information of ResNet-18, {asked.device}", rows)
    if tuple(asked.images) == IMAGES:
        write("task2vec", {"what": __doc__, "device": asked.device, "rows": rows})


if __name__ == "__main__":
    main()

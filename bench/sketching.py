"""Features and gradients of the 8 blocks of a ResNet-18 (CIFAR stem) on 2,000 images, sketched to 512 buckets.

Against the bare passes: a forward and a backward pass down to the first block, without gradients of parameters, which
is all that a sketch needs; and an ordinary loss.backward() with them. Random weights cost as much as others. Peak
memory as the images double.
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import Any

import torch
from measuring import high_water, show, timed, wait, write
from torch import Tensor, nn

import sosie
from sosie.models import resnet18

IMAGES, BATCH, SIZE = 2_000, 250, 512
BLOCKS = [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]
KERNELS = {"all three kernels": ("features", "gradients", "hadamard"), "features × gradients": ("hadamard",)}


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return resnet18(classes=10, stem="cifar").to(device).eval()


def batches(images: int, device: str) -> list[Tensor]:
    made = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    return list(made.split(BATCH))


def lean(model: nn.Module, data: list[Tensor]) -> None:
    """Up, and down to the first block; parameters get no gradient."""
    starts: list[Tensor] = []

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        starts.append(output.detach().requires_grad_())
        return starts[-1]

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    hook = model.get_submodule(BLOCKS[0]).register_forward_hook(start)
    for x in data:
        starts.clear()
        logits = model(x)
        pull = logits.detach().softmax(1) - (logits.detach() / 2).softmax(1)
        torch.autograd.grad(logits, starts, pull)
    hook.remove()
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def ordinary(model: nn.Module, data: list[Tensor]) -> None:
    for x in data:
        logits = model(x)
        pull = logits.detach().softmax(1) - (logits.detach() / 2).softmax(1)
        logits.backward(pull)
        model.zero_grad(set_to_none=True)


def sketch(model: nn.Module, data: list[Tensor], kernels: tuple[str, ...]) -> Any:
    return sosie.sketch(model, data, sites=BLOCKS, size=SIZE, kernels=kernels)


def peaks(device: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """GiB at most, each in a process of its own on a CPU."""
    rows = []
    for images in sizes:
        if device.startswith("cuda"):
            found = [_peak(images, device, sketched) for sketched in (False, True)]
        else:
            found = []
            for sketched in (False, True):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found.append(pool.apply(_peak, (images, device, sketched)))
        rows.append({"images": images, "GiB, lean passes": found[0], "GiB, sketch": found[1]})
    return rows


def _peak(images: int, device: str, sketched: bool) -> float:
    """Of the lean passes, or of a sketch of features × gradients, beyond the network and the data."""
    model, data = network(device), batches(images, device)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = high_water() * 2**10
    sketch(model, data, ("hadamard",)) if sketched else lean(model, data)
    wait()
    after = torch.cuda.max_memory_allocated() if device.startswith("cuda") else high_water() * 2**10
    return (after - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=IMAGES, help="fewer than the default: nothing is written")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    model, data = network(asked.device), batches(asked.images, asked.device)
    ways = {"lean": lambda: lean(model, data), "ordinary": lambda: ordinary(model, data)}
    ways |= {name: (lambda kernels=kernels: sketch(model, data, kernels)) for name, kernels in KERNELS.items()}
    seconds = timed(ways, repeats=asked.repeats)
    words = {"lean": "forward and backward, no parameters", "ordinary": "forward and loss.backward()"}
    rows = [
        {"way": words.get(name, f"sosie.sketch, {name}"), "seconds": seconds[name],
         "× lean": seconds[name] / seconds["lean"], "× ordinary": seconds[name] / seconds["ordinary"]}
        for name in ways
    ]  # fmt: skip
    show(f"8 blocks of ResNet-18, {asked.images} images, {asked.device}", rows)
    memory = peaks(asked.device, (asked.images // 4, asked.images // 2, asked.images, 2 * asked.images))
    show("peak memory", memory)
    if asked.images == IMAGES:
        name = "sketching" if asked.device == "cpu" else "sketching-gpu"
        write(name, {"what": __doc__, "device": asked.device, "rows": rows, "memory": memory})


if __name__ == "__main__":
    main()

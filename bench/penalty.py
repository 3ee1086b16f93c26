"""What a similarity penalty adds to a training step, in time and memory; and against the paper's listing (§4.1)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from measuring import high_water, show, timed, write
from torch import Tensor, nn
from torch.nn import functional

from sosie.models import cifar_resnet
from sosie.train import Penalty

BATCH, STEPS = 128, 10  # two due steps of five
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "8 rows, every 5": {"rows": 8, "every": 5},
    "all rows, every step": {"rows": None, "every": 1},
}


def written_out(blocks: list[Tensor]) -> Tensor:
    """The listing's way: both Gram matrices of each pair, centred by products with H, three times a pair."""
    n = len(blocks[0])
    centring = torch.eye(n, device=blocks[0].device) - 1 / n

    def hsic(x: Tensor, y: Tensor) -> Tensor:
        return ((centring @ (x @ x.T) @ centring) * (centring @ (y @ y.T) @ centring)).sum()

    total = blocks[0].new_zeros(())
    for i in range(len(blocks)):
        for j in range(i + 1, len(blocks)):
            x, y = (block.flatten(1).float() for block in (blocks[i], blocks[j]))
            total = total + hsic(x, y) / (hsic(x, x).sqrt() * hsic(y, y).sqrt())
    return 2 * total / (len(blocks) * (len(blocks) - 1))


def layers_of(model: nn.Module) -> list[str]:
    """Every convolution: all layers of a ResNet but its head."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]


@contextmanager
def listed(model: nn.Module, layers: list[str]) -> Iterator[Callable[[], Tensor]]:
    """The listing on all layers, fed by hooks."""
    kept: list[Tensor] = []
    handles = [
        model.get_submodule(name).register_forward_hook(lambda module, args, output: kept.append(output))
        for name in layers
    ]
    try:

        def penalty() -> Tensor:
            found = written_out(kept)
            kept.clear()
            return found

        yield penalty
    finally:
        for handle in handles:
            handle.remove()


def step(model: nn.Module, optimiser: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], penalty: Any) -> None:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    if penalty is not None:
        loss = loss + penalty()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def setting(depth: int, device: str, size: int = BATCH) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = cifar_resnet(depth=depth).to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator).to(device)
    labels = torch.randint(0, 10, (size,), generator=generator).to(device)
    return model, torch.optim.SGD(model.parameters(), 0.01, 0.9), (images, labels)


@contextmanager
def steps_of(way: str, device: str) -> Iterator[Callable[[], None]]:
    """Some steps of ResNet-20, with the penalty attached: that is done once, before a training."""
    model, optimiser, batch = setting(20, device)
    options = WAYS[way]
    with nullcontext() if options is None else Penalty(model, **options) as penalty:

        def steps() -> None:
            for _ in range(STEPS):
                step(model, optimiser, batch, penalty)

        yield steps


def against_the_listing(device: str, size: int, repeats: int) -> list[dict[str, Any]]:
    """The penalty alone, forward and backward, on all layers of ResNet-56; the network's own passes are taken off."""
    model, _, batch = setting(56, device, size)
    layers = layers_of(model)
    values: dict[str, float] = {}

    def plain() -> None:
        functional.cross_entropy(model(batch[0]), batch[1]).backward()

    with Penalty(model, sites=layers, weight=1.0, pairs="all", reduce="mean", rows=None, every=1) as ours:

        def with_ours() -> None:
            loss = functional.cross_entropy(model(batch[0]), batch[1]) + ours()
            values["sosie"] = float(loss.detach())
            loss.backward()

        mine = timed({"sosie": with_ours}, repeats=repeats)
    with listed(model, layers) as theirs:

        def with_theirs() -> None:
            loss = functional.cross_entropy(model(batch[0]), batch[1]) + theirs()
            values["listing"] = float(loss.detach())
            loss.backward()

        other = timed({"listing": with_theirs}, repeats=max(1, repeats // 2))
    alone = timed({"plain": plain}, repeats=repeats)["plain"]
    ours_s, theirs_s = mine["sosie"] - alone, other["listing"] - alone
    return [
        {
            "layers": len(layers),
            "batch": size,
            "sosie, s": ours_s,
            "listing, s": theirs_s,
            "times as fast": theirs_s / ours_s,
            "step with sosie, s": mine["sosie"],
            "step with listing, s": other["listing"],
            "difference of values": abs(values["sosie"] - values["listing"]),
        }
    ]


def peak(way: str, device: str) -> float:
    """MiB at most, of a few steps: on a GPU of tensors, on a CPU of a process of its own."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with steps_of(way, device) as steps:
            steps()
        return torch.cuda.max_memory_allocated() / 2**20
    command = [sys.executable, __file__, "--only-peak", way, "--device", device]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--listing-batch", type=int, default=BATCH, help="inputs of a batch of ResNet-56")
    parser.add_argument("--only-peak", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only_peak:
        with steps_of(asked.only_peak, asked.device) as steps:
            steps()
        print(high_water() / 1024)
        return
    with ExitStack() as attached:
        ways = {way: attached.enter_context(steps_of(way, asked.device)) for way in WAYS}
        spent = timed(ways, repeats=asked.repeats)
    memory = {way: peak(way, asked.device) for way in WAYS}
    table = [
        {"way": way, "step, s": spent[way] / STEPS, "of the plain step": spent[way] / spent["plain"],
         "peak, MiB": memory[way], "of the plain peak": memory[way] / memory["plain"]}
        for way in WAYS
    ]  # fmt: skip
    show(f"ResNet-20, batch {BATCH}, on {asked.device}", table)
    listing = against_the_listing(asked.device, asked.listing_batch, asked.repeats)
    show("all layers of ResNet-56", listing)
    if asked.repeats >= 3 and asked.listing_batch == BATCH:
        name = "penalty" if asked.device == "cpu" else "penalty-gpu"
        write(name, {"what": __doc__, "rows": table, "listing": listing})


if __name__ == "__main__":
    main()

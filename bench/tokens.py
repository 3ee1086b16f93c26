"""What dropping tokens saves: FLOPs, and time of a forward in evaluation; a vision transformer like DeiT-S."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from measuring import show, timed, write
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sosie.models import dynamic_vit, vit

SIZES: dict[str, Any] = {"classes": 1000, "size": 224, "patch": 16, "depth": 12, "width": 384}
KEPT = (0.9, 0.7, 0.5)


def flops(model: nn.Module, images: Tensor) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.inference_mode():
        model(images)
    return int(counter.get_total_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="images of a batch: 256 on a GPU, 8 on a CPU; others write nothing")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    usual = 256 if asked.device == "cuda" else 8
    batch = asked.batch or usual
    torch.manual_seed(0)
    models = {"vit": vit(**SIZES), **{f"dynamic_vit, keep {keep}": dynamic_vit(**SIZES, keep=keep) for keep in KEPT}}
    images = torch.rand(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(asked.device)
    for model in models.values():
        model.eval().to(asked.device)

    def forward(model: nn.Module) -> None:
        with torch.inference_mode(), torch.autocast(asked.device, torch.bfloat16, enabled=asked.device == "cuda"):
            model(images)

    counted = {name: flops(model, images[:1]) for name, model in models.items()}
    spent = timed({name: lambda model=model: forward(model) for name, model in models.items()}, repeats=asked.repeats)  # type: ignore[misc]
    table = [
        {"network": name, "GFLOPs an image": counted[name] / 1e9, "of the plain FLOPs": counted[name] / counted["vit"],
         "batch of images, s": spent[name], "of the plain time": spent[name] / spent["vit"]}
        for name in models
    ]  # fmt: skip
    show(f"batch {batch} on {asked.device}", table)
    if batch == usual and asked.repeats >= 3:
        write("tokens" if asked.device == "cpu" else "tokens-gpu", {"what": __doc__, "batch": batch, "rows": table})


if __name__ == "__main__":
    main()

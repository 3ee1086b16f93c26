"""ResNet-20 x ResNet-56, all leaf modules, 1024 CIFAR-10 test images in batches of 256: debiased CKA on a CPU."""

from __future__ import annotations

import contextlib
import io
import warnings

import torch
from measuring import show, timed, write
from torch.utils.data import DataLoader, TensorDataset
from truth import leaves, whole_data

import sosie
from sosie.data import open_data
from sosie.models import open_model

IMAGES, BATCH = 1024, 256
FILES = ["resnet20@akamaster-resnet20-cifar10.safetensors", "resnet56@akamaster-resnet56-cifar10.safetensors"]


def main() -> None:
    named = [open_model(spec) for spec in FILES]
    a, b = (each.model for each in named)
    images = torch.cat([named[0].prepare(x) for x, _ in open_data("cifar10", batch=BATCH, max_rows=IMAGES)])
    batches = list(images.split(BATCH))
    loader = DataLoader(TensorDataset(images, torch.zeros(len(images))), batch_size=BATCH)
    results: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def forward() -> None:
        for x in batches:
            a(x)
            b(x)

    def ours(block: int):
        def run() -> None:
            c = sosie.compare(a, b, batches, sites_a="leaves", sites_b="leaves", block=block)
            results[f"sosie, blocks of {block}"] = torch.from_numpy(c.matrix())

        return run

    def pytorch_cka() -> None:
        from cka import compute_cka

        results["pytorch-cka 1.1.3"] = compute_cka(
            a, b, loader, layers=leaves(a), model2_layers=leaves(b), progress=False
        )[0].double()

    def torch_cka() -> None:
        from torch_cka import CKA

        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            peer = CKA(a, b, "a", "b", leaves(a), leaves(b))
            peer.compare(loader)
            results["torch_cka 0.21"] = peer.export()["CKA"].double()

    ways = {"forward passes": forward, **{f"sosie, blocks of {n}": ours(n) for n in (64, 128, 32)}}
    seconds = timed({**ways, "pytorch-cka 1.1.3": pytorch_cka})
    seconds |= timed({"torch_cka 0.21": torch_cka}, repeats=1, warm=False)
    truth = whole_data(a, b, batches)
    rows = [row(name, seconds, results.get(name), truth) for name in seconds]
    show(f"{len(leaves(a))} x {len(leaves(b))} leaf modules, {IMAGES} images, batches of {BATCH}, CPU", rows)
    write("cpu", {"what": __doc__, "rows": rows})


def row(name: str, seconds: dict[str, float], found: torch.Tensor | None, truth: torch.Tensor) -> dict:
    error = None if found is None else float((found - truth).square().mean().sqrt())
    worst = None if found is None else float((found - truth).abs().max())
    return {
        "way": name,
        "seconds": seconds[name],
        "of the forward passes": seconds[name] / seconds["forward passes"],
        "rms error": error,
        "largest error": worst,
    }


if __name__ == "__main__":
    main()

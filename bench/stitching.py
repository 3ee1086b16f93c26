"""A pair of Tiny-10s stitched at its 8 layers over 10,000 images, against forward passes and a pseudoinverse."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import high_water, show, timed, write

import sosie
from sosie.capture import watch
from sosie.data import open_data
from sosie.models import NamedModel, open_model

IMAGES, BATCH, LAYERS = 10_000, 128, [f"bn{k}" for k in range(1, 9)]
ONE = "bn3"  # the layer of the comparison with a pseudoinverse
WEIGHTS = "tiny10@drfrankenstein-tiny10-cifar10-seed0{}.safetensors"


def networks() -> tuple[NamedModel, NamedModel]:
    return open_model(WEIGHTS.format(0)), open_model(WEIGHTS.format(1))


def batches(images: int) -> list[Any]:
    return list(open_data("cifar10", split="train", batch=BATCH, max_rows=images))


def prepared(model: NamedModel, batch: Any) -> torch.Tensor:
    images = batch[0]
    return images if model.prepare is None else model.prepare(images)


@torch.no_grad()
def forward(data: list[Any], pair: tuple[NamedModel, NamedModel]) -> None:
    for batch in data:
        for model in pair:
            model.model(prepared(model, batch))


@torch.no_grad()
def by_pseudoinverse(data: list[Any], pair: tuple[NamedModel, NamedModel], layers: list[str]) -> torch.Tensor:
    """All rows of all layers at once, in float64, then a pseudoinverse with a column of ones: the usual few lines."""
    rows: dict[tuple[int, str], list[torch.Tensor]] = {}
    for k, model in enumerate(pair):
        with watch(model.model, layers) as seen:
            for batch in data:
                seen.run(prepared(model, batch))
                for layer in layers:
                    rows.setdefault((k, layer), []).append(seen[layer].movedim(1, -1).flatten(0, -2).clone())
    found = torch.empty(0)
    for layer in layers:
        a, b = (torch.cat(rows.pop((k, layer))).double() for k in (0, 1))
        found = torch.linalg.pinv(torch.cat([a, torch.ones(len(a), 1)], dim=1)) @ b
    return found


def by_stitching(data: list[Any], pair: tuple[NamedModel, NamedModel], layers: list[str]) -> None:
    """The fits alone: they are evaluated on a single image."""
    few = [(data[0][0][:1], data[0][1][:1])]
    sosie.stitch_sites(*pair, data, test=few, sites_a=layers, sites_b=layers, measures=())


def memory(way: Callable[..., Any], images: int, layers: list[str]) -> float:
    """GiB that a way takes at most beyond what the data and the networks do, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (way, images, layers))


def _peak(way: Callable[..., Any], images: int, layers: list[str]) -> float:
    data, pair = batches(images), networks()
    forward(data[:1], pair)
    before = high_water()
    way(data, pair, layers)
    return (high_water() - before) / 2**20


def _spent(way: Callable[[], Any]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    data, pair = batches(asked.images), networks()
    ways: dict[str, Callable[[], Any]] = {
        "both forward passes": lambda: forward(data, pair),
        "stitch_sites, 8 layers": lambda: by_stitching(data, pair, LAYERS),
        f"stitch_sites, {ONE}": lambda: by_stitching(data, pair, [ONE]),
        f"rows and pinv, {ONE}": lambda: by_pseudoinverse(data, pair, [ONE]),
    }
    seconds = timed(ways, repeats=asked.repeats)
    least = seconds["both forward passes"]
    peaks = {
        "stitch_sites, 8 layers": memory(by_stitching, asked.images, LAYERS),
        f"stitch_sites, {ONE}": memory(by_stitching, asked.images, [ONE]),
        f"rows and pinv, {ONE}": memory(by_pseudoinverse, asked.images, [ONE]),
    }
    once = {
        # One layer after the other: the rows of all of them together would take some 20 GiB.
        "rows and pinv, 8 layers": _spent(lambda: [by_pseudoinverse(data, pair, [layer]) for layer in LAYERS]),
        "stitch_sites, 8 layers, evaluated on as many images": _spent(
            lambda: sosie.stitch_sites(*pair, data, test=data, sites_a=LAYERS, sites_b=LAYERS)
        ),
    }
    table = [
        {"way": name, "s": spent, "times the forward passes": spent / least, "peak, GiB": peaks.get(name)}
        for name, spent in {**seconds, **once}.items()
    ]
    show(f"{asked.images} images, float32 products", table)
    if asked.images == IMAGES:
        write("stitching", {"what": __doc__, "rows": table})


if __name__ == "__main__":
    main()

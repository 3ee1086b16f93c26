"""Figure 3: what comparing two networks takes, as the images that they are probed with grow in number."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import torch
from continual import wait
from data import pool
from networks import copies, draw_atoms, make, sites_of
from settings import Settings
from similarity import by_atoms, by_stimulus, look, mean
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sosie.capture import watch
from sosie.models import atom_layers
from sosie.train.many_networks import stacked_state

ATOMS = 9


def figure_3(settings: Settings) -> dict[str, Any]:
    """FLOPs, seconds and memory of one pair of AlexNets, all positions of all layers; with the paper's own count.

    FLOPs of the forward passes are counted by torch, those of the statistics by their products: covariances of each
    and of both, and 22 c³ for the factorisation of each, for CCA; Gram matrices and their products for CKA.
    """
    base = make(settings, settings.network, 10, ATOMS, settings.seed)
    state = stacked_state([base, draw_atoms(copies(base, 1)[0], 100)])
    shapes = shapes_of(settings, base)
    with FlopCounterMode(display=False) as counter:
        base(torch.zeros(1, 3, 32, 32, device=settings.device))
    forward = 2 * counter.get_total_flops()  # of both networks, an image
    entries = sum(layer.atoms.numel() for layer in atom_layers(base).values())
    atoms = 6 * entries  # a product of the two and of each with itself
    images = pool(settings, "cifar100", "test").images
    rows = []
    for count in settings.cost_probes:
        row = {"probes": count, "atoms": atoms, "cca": forward * count + cca_flops(shapes, count)}
        row |= {"linear_cka": forward * count + cka_flops(shapes, count), "paper": paper_flops(base, shapes, count)}
        asked = replace(settings, probes=replace(settings.probes, images=count))
        row["seconds"] = {
            name: timed(asked, base, state, images[:count], name) for name in ("atoms", "cca", "linear_cka")
        }
        rows.append(row)
    last = rows[-1]
    numbers = {
        "cca_ratio": last["cca"] / atoms,
        "linear_cka_ratio": last["linear_cka"] / atoms,
        "paper_ratio": last["paper"] / entries,
        "growth": last["cca"] / rows[0]["cca"],
        "probes_growth": last["probes"] / rows[0]["probes"],
        "cca_time_ratio": last["seconds"]["cca"][0] / last["seconds"]["atoms"][0],
        "atoms_seconds": last["seconds"]["atoms"][0],
        "cca_gigabytes": last["seconds"]["cca"][1],
    }
    return {"numbers": numbers, "atom_entries": entries, "rows": rows}


def shapes_of(settings: Settings, model: nn.Module) -> dict[str, tuple[int, int]]:
    """Channels and places of each layer's output."""
    sites = sites_of(model)
    with torch.no_grad(), watch(copy.deepcopy(model), list(sites.values())) as seen:
        seen.run(torch.zeros(1, 3, 32, 32, device=settings.device))
        return {layer: (seen[site].shape[1], seen[site][0, 0].numel()) for layer, site in sites.items()}


def cca_flops(shapes: dict[str, tuple[int, int]], n: int) -> float:
    """Three covariances of all rows, two factorisations, two products with them."""
    return sum(6.0 * n * places * c**2 + 2 * 22 * c**3 + 4 * c**3 for c, places in shapes.values())


def cka_flops(shapes: dict[str, tuple[int, int]], n: int) -> float:
    """Two Gram matrices and three products of them."""
    return sum(4.0 * n**2 * c * places + 6 * n**2 for c, places in shapes.values())


def paper_flops(model: nn.Module, shapes: dict[str, tuple[int, int]], n: int) -> float:
    """n h′w′ k² c c′ + n² h w c of section 2.3, summed over layers; the paper divides it by m k²."""
    total = 0.0
    for name, layer in atom_layers(model).items():
        c, places = shapes[name]
        kernel = layer.atoms[0].numel()
        total += n * places * kernel * c * layer.in_channels + n**2 * places * c  # strides are 1: h′w′ is hw
    return total


def timed(settings: Settings, model: nn.Module, state: Any, images: torch.Tensor, name: str) -> tuple[float, float]:
    """Seconds (the best of three) and the GPU memory at its highest beyond the networks, in GB."""
    best, memory = float("inf"), 0.0
    on_gpu = settings.device.startswith("cuda")
    for _ in range(3):
        wait(settings)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        if name == "atoms":
            mean(by_atoms(state))
        else:
            mean(by_stimulus(look(settings, model, state, images, (name,)), (name,))[name])
        wait(settings)
        best = min(best, time.perf_counter() - start)
        if on_gpu:
            memory = (torch.cuda.max_memory_allocated() - before) / 1e9
    return best, memory

"""How many weights each layer keeps: uniform or by Erdős–Rényi–Kernel, to the very number asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

Spread = Literal["erk", "uniform"]
Shape = tuple[int, ...]


def check_sparsity(sparsity: float) -> None:
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity!r}: the share of weights that are 0, from 0 to below 1")


def kept_of(weights: int, sparsity: float) -> int:
    """How many weights are kept; the number that goes is rounded, as torch.nn.utils.prune does."""
    return weights - round(sparsity * weights)


def densities_of(shapes: Mapping[str, Shape], sparsity: float, how: Spread = "erk") -> dict[str, float]:
    """The share of weights each layer keeps, before whole numbers are made of them.

    "erk" (Mocanu et al. 2018, Evci et al. 2020): in proportion to the sum of a weight's sides over their product, for a
    convolution (inputs + outputs + height + width) / (inputs × outputs × height × width). Where that would pass 1 the
    layer is dense and the others share the rest.
    """
    if how not in ("erk", "uniform"):
        raise ValueError(f"how={how!r}: 'erk' or 'uniform'")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    kept = kept_of(sum(sizes.values()), sparsity)
    if how == "uniform":
        return dict.fromkeys(shapes, kept / sum(sizes.values()))
    raw = {name: sum(shape) / math.prod(shape) for name, shape in shapes.items()}
    full: set[str] = set()
    while True:
        rest = [name for name in shapes if name not in full]
        room = kept - sum(sizes[name] for name in full)
        scale = room / sum(raw[name] * sizes[name] for name in rest) if rest else 0.0
        over = {name for name in rest if scale * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in full else scale * raw[name] for name in shapes}
        full |= over


def counts_of(shapes: Mapping[str, Shape], sparsity: float, how: Spread = "erk") -> dict[str, int]:
    """How many weights each layer keeps: whole numbers by largest remainder, whose sum is exact."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    shares = {name: density * sizes[name] for name, density in densities_of(shapes, sparsity, how).items()}
    # A whole share that rounding left a hair below its number is that number.
    counts = {name: min(math.floor(share + 1e-9 * max(share, 1)), sizes[name]) for name, share in shares.items()}
    missing = kept_of(sum(sizes.values()), sparsity) - sum(counts.values())
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
    for name in [each for each in by_remainder if counts[each] < sizes[each]][:missing]:
        counts[name] += 1
    if empty := [name for name, count in counts.items() if count == 0]:
        raise ValueError(
            f"sparsity {sparsity} leaves no weight in {', '.join(map(repr, empty[:5]))}, which would cut the network: "
            f"take a lower sparsity{', how=' + repr('erk') if how == 'uniform' else ''}, or name such layers in dense"
        )
    return counts

"""Sketches of given rows, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sosie.linalg import u_centred
from sosie.results import Side
from sosie.sketching import Sketch
from sosie.sketching.sketches import Spans, plan_sites
from sosie.stats import Buckets

ALL = ("features", "gradients", "hadamard", "maps")


def random_rows(n: int, width: int, seed: int, rank: int | None = None) -> Tensor:
    """Float64, with a mean that is not 0 and a spectrum that falls."""
    random = torch.Generator().manual_seed(seed)
    basis = torch.randn(rank or width, width, generator=random, dtype=torch.float64)
    scores = torch.randn(n, rank or width, generator=random, dtype=torch.float64)
    scale = 1 / torch.arange(1, (rank or width) + 1, dtype=torch.float64)
    return (scores * scale) @ basis + torch.randn(width, generator=random, dtype=torch.float64)


def sketch_of(
    sites: Mapping[str, tuple[Tensor, Tensor]],
    size: int | None = 16,
    *,
    seed: int = 0,
    stack: int = 1,
    parts: Sequence[str] = ALL,
    start: int = 0,
    step: int | None = None,
    memory: int = 2**30,
    labels: Tensor | None = None,
    data: int = 0,
    name: str = "net",
) -> Sketch:
    """Rows f and g by site; `start` is the index of the first, `step` how many come at once."""
    n = len(next(iter(sites.values()))[0])
    buckets = None if size is None else Buckets(size, seed, stack)
    kept = frozenset(parts) - (frozenset({"hadamard"}) if size is None else frozenset())
    widths = [f.shape[1] for f, _ in sites.values()]
    makers = plan_sites(widths, size, kept, seed=seed, memory=memory, rows=n)
    for first in range(0, n, step or n):
        rows = slice(first, min(first + (step or n), n))
        drawn = None if buckets is None else buckets.draw(start + first, rows.stop - first)
        for maker, (f, g) in zip(makers, sites.values(), strict=True):
            maker.features(f[rows], drawn)
            if maker.with_gradients:
                maker.gradients(g[rows], drawn, start + first)
    numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(data), dtype=torch.float64)[start : start + n]
    coded = None if labels is None else torch.nn.functional.one_hot(labels).double()

    def summed(rows: Tensor, *, signed: bool = True) -> Tensor:
        if buckets is None:
            return rows
        drawn, total = buckets.draw(start, n), rows.new_zeros(buckets.size, *rows.shape[1:])
        drawn.add(total, rows, signed=signed)
        return total

    ones = torch.ones(n, dtype=torch.float64)
    return Sketch(
        side=Side(name, tuple(sites), tuple(widths), tuple((w,) for w in widths)),
        sites=tuple(maker.finish() for maker in makers),
        n=n,
        size=size,
        seed=seed,
        stack=stack,
        ones=summed(ones),
        counts=summed(ones, signed=False),
        fingerprint=summed(numbers),
        spans=Spans(((start, start + n),)),
        rows_rule="flatten",
        output="logits, beta 0.5",
        labels=None if coded is None else summed(coded),
        unsigned_labels=None if coded is None else summed(coded, signed=False),
        about={"inputs": n},
    )


def matrix(buckets: Buckets, n: int) -> Tensor:
    """S itself, (size, n)."""
    found = torch.zeros(buckets.size, n, dtype=torch.float64)
    buckets.draw(0, n).add(found, torch.eye(n, dtype=torch.float64))
    return found


def hadamard(f: Tensor, g: Tensor) -> Tensor:
    return (f @ f.T) * (g @ g.T)


def debiased(k: Tensor, m: Tensor) -> float:
    """⟨U-centred K, U-centred M⟩, what the debiased numerator estimates."""
    return float((u_centred(k) * u_centred(m)).sum())


def z_score(values: Sequence[float], truth: float) -> float:
    """How many standard errors the mean lies from the truth."""
    array = np.asarray(values)
    return float((array.mean() - truth) / (array.std(ddof=1) / len(array) ** 0.5))

"""How close weights are to 0: ε-sparsity, and histograms along training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .layers import mask_of, maskable, named, weight_of

Numbers = np.ndarray[Any, np.dtype[Any]]


@torch.no_grad()
def epsilon_sparsity(model: nn.Module, epsilon: float, *, layers: str | Iterable[str] = "*") -> float:
    """The share of weights w with |w| ≤ ε among those of convolutions and linear layers; of ε = 0, the sparsity.

    It depends on the scale of the weights: before a batch norm all of them can be made smaller than any ε, and the
    network computes the same. `layers`: names or globs.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon={epsilon!r}: a number from 0 on")
    weights = [weight_of(module) for module in _chosen(model, layers).values()]
    small = torch.stack([(weight.abs() <= epsilon).sum().cpu() for weight in weights]).sum()
    return int(small) / sum(weight.numel() for weight in weights)


@dataclass(frozen=True)
class Histogram:
    """How many weights are in each bin; the last bin has its right edge, as in NumPy."""

    counts: Numbers  # (bins,)
    edges: Numbers  # (bins + 1,)
    outside: int  # beyond the limit on either side


@torch.no_grad()
def weight_histogram(
    model: nn.Module,
    bins: int = 100,
    limit: float | None = None,
    *,
    layers: str | Iterable[str] = "*",
    masked: bool = False,
) -> Histogram:
    """A histogram over [−limit, limit] of the weights of convolutions and linear layers; limit=None: the largest |w|.

    Weights that a mask sets to 0 are left out unless `masked`. `layers`: names or globs.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins={bins!r}: how many bins, from 1 on")
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise ValueError(f"limit={limit!r}: a number above 0, or None for the largest weight")
    parts = []
    for module in _chosen(model, layers).values():
        weight, mask = weight_of(module).detach(), mask_of(module)
        parts.append((weight.flatten() if mask is None or masked else weight[mask != 0]).double().cpu())
    values = torch.cat(parts).numpy()
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} weights of the model are NaN or infinite")
    if limit is None:
        limit = float(np.abs(values).max(initial=0))
        if limit == 0:
            raise ValueError("all weights are 0: a histogram needs a limit")
    counts, edges = np.histogram(values, bins, (-limit, limit))
    return Histogram(counts, edges, int(len(values) - counts.sum()))


class WeightHistograms:
    """Histograms along training: `fit(…, after_epoch=histograms.record)`, or `record(step)` in any loop.

    All have the same bins, so `limit` is needed; `counts` is (steps, bins).
    """

    def __init__(
        self,
        model: nn.Module,
        bins: int = 100,
        limit: float = 0.5,
        *,
        layers: str | Iterable[str] = "*",
        masked: bool = False,
    ) -> None:
        self._model, self._options = model, {"bins": bins, "limit": limit, "layers": layers, "masked": masked}
        self.edges = weight_histogram(model, **self._options).edges  # type: ignore[arg-type]
        self.steps: list[int] = []
        self._found: list[Histogram] = []

    def record(self, step: int) -> None:
        self._found.append(weight_histogram(self._model, **self._options))  # type: ignore[arg-type]
        self.steps.append(step)

    @property
    def counts(self) -> Numbers:
        return np.array([each.counts for each in self._found]).reshape(len(self._found), len(self.edges) - 1)

    @property
    def outside(self) -> list[int]:
        """How many weights were beyond the limit at each step."""
        return [each.outside for each in self._found]


def _chosen(model: nn.Module, layers: str | Iterable[str]) -> dict[str, nn.Module]:
    known = maskable(model)
    wanted = named(known, layers, "layers")
    return {name: module for name, module in known.items() if name in wanted}

"""Parameters and operations of a network, dense and as far as its masks keep them; how close its weights are to 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ...capture import as_found, unwrap
from ...capture.sites import Names
from ...checks import positive, whole_number
from ...process_state import Shared, attention_in_parts
from .masks import layers_of, mask_of, maskable, named, weight_of


@dataclass(frozen=True)
class SparseCost:
    """What a network has and does, `dense` as it stands in memory and `kept` after its masks.

    FLOPs are those of one forward, a multiplication and an addition being two; elementwise work is not counted.
    """

    parameters: int
    kept_parameters: int
    flops: int
    kept_flops: int
    layers: list[dict[str, Any]]  # one row per layer with a weight: layer, weights, kept, flops, kept_flops

    @property
    def sparsity(self) -> float:
        """The share of 0 among all parameters, those without a mask among them."""
        return 1 - self.kept_parameters / self.parameters


def sparse_cost(model: nn.Module, *args: Any, **kwargs: Any) -> SparseCost:
    """Count a network and its forward on these inputs, with torch's FlopCounterMode.

    Products and convolutions with a masked weight count kept / weights of their FLOPs, which is a whole number: each
    weight takes part in the same number of multiplications. All others count whole. It is the work that is needed, not
    what torch does: masked weights are multiplied all the same, and pruned channels stay in the tensors, also as inputs
    of the next layer. A weight that several modules share is counted once among parameters, and in every product.
    """
    core = unwrap(model)
    modules = Names.of(core).by_name
    rows: dict[tuple[int, int], dict[str, Any]] = {}  # by where the weight is in memory
    for name in layers_of(core):
        weight, mask = weight_of(modules[name]), mask_of(modules[name])
        kept = weight.numel() if mask is None else int((mask != 0).sum())
        rows[_where(weight)] = {"layer": name, "weights": weight.numel(), "kept": kept, "flops": 0}

    def noting(formula: Callable[..., int]) -> Callable[..., int]:
        """The formula of an operation, which also notes the layer whose weight is among what the operation takes."""

        def noted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            flops = formula(*args, out_val=out_val, **kwargs)
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            if row := next((rows[_where(each)] for each in tensors if _where(each) in rows), None):
                row["flops"] += flops
            return flops

        noted._get_raw = True  # type: ignore[attr-defined]  # the tensors, not only their shapes
        return noted

    counter = FlopCounterMode(
        display=False, custom_mapping={packet: noting(formula) for packet, formula in flop_registry.items()}
    )
    device = next((p.device.type for p in core.parameters()), "cpu")
    # Without autocast, which multiplies copies of the weights that could not be told from other tensors.
    with as_found(core), attention_in_parts, _PLAIN_ATTENTION, torch.autocast(device, enabled=False), counter:
        core(*args, **kwargs)
    for row in rows.values():
        row["kept_flops"] = row["flops"] * row["kept"] // row["weights"]
    parameters, flops = sum(p.numel() for p in core.parameters()), counter.get_total_flops()
    return SparseCost(
        parameters=parameters,
        kept_parameters=parameters - sum(row["weights"] - row["kept"] for row in rows.values()),
        flops=flops,
        kept_flops=flops - sum(row["flops"] - row["kept_flops"] for row in rows.values()),
        layers=list(rows.values()),
    )


# As plain products: torch's counter does not see those of the fused transformer layer and of flash on a CPU.
_PLAIN_ATTENTION = Shared(lambda: sdpa_kernel(SDPBackend.MATH))


def _where(tensor: Tensor) -> tuple[int, int]:
    """The memory a tensor starts in: the same for a weight and its transpose."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


# How close weights are to 0: ε-sparsity, and histograms along training

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
    whole_number(bins, "bins", least=1)
    if limit is not None:
        positive(limit, "limit", why="None takes the largest weight")
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
        self._histogram = partial(weight_histogram, model, bins, limit, layers=layers, masked=masked)
        self.edges = self._histogram().edges
        self.steps: list[int] = []
        self.outside: list[int] = []  # how many weights were beyond the limit at each step
        self._counts: list[Numbers] = []

    def record(self, step: int) -> None:
        found = self._histogram()
        self.steps.append(step)
        self.outside.append(found.outside)
        self._counts.append(found.counts)

    @property
    def counts(self) -> Numbers:
        return np.array(self._counts).reshape(len(self._counts), len(self.edges) - 1)


def _chosen(model: nn.Module, layers: str | Iterable[str]) -> dict[str, nn.Module]:
    known = maskable(model)
    wanted = named(known, layers, "layers")
    return {name: module for name, module in known.items() if name in wanted}

"""Parameters and operations of a network, dense and as far as its masks keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ...capture import as_found, unwrap
from ...capture.names import Names
from ...process_state import Shared, attention_in_parts
from .layers import layers_of, mask_of, weight_of


@dataclass(frozen=True)
class SparseCost:
    """What a network has and does, `dense` as it stands in memory and `kept` after its masks.

    FLOPs are those of one forward, a multiplication and an addition being two; elementwise work is not counted.
    """

    parameters: int
    kept_parameters: int
    flops: int
    kept_flops: int
    layers: list[dict[str, Any]]  # a row a layer with a weight: layer, weights, kept, flops, kept_flops

    @property
    def sparsity(self) -> float:
        """The share of 0 among all parameters, those without a mask among them."""
        return 1 - self.kept_parameters / self.parameters


@dataclass
class _Layer:
    name: str
    weights: int
    kept: int
    flops: int = 0


def sparse_cost(model: nn.Module, *args: Any, **kwargs: Any) -> SparseCost:
    """Count a network and its forward on these inputs, with torch's FlopCounterMode.

    Products and convolutions with a masked weight count kept / weights of their FLOPs, which is a whole number: each
    weight takes part in the same number of multiplications. All others count whole. It is the work that is needed, not
    what torch does: masked weights are multiplied all the same, and pruned channels stay in the tensors, also as inputs
    of the next layer. A weight that several modules share is counted once among parameters, and in every product.
    """
    core = unwrap(model)
    modules = Names.of(core).by_name
    tally: dict[tuple[int, int], _Layer] = {}
    for name in layers_of(core):
        module = modules[name]
        weight, mask = weight_of(module), mask_of(module)
        kept = weight.numel() if mask is None else int((mask != 0).sum())
        tally[_where(weight)] = _Layer(name, weight.numel(), kept)
    counter = FlopCounterMode(
        display=False, custom_mapping={packet: _noting(formula, tally) for packet, formula in flop_registry.items()}
    )
    device = next((p.device.type for p in core.parameters()), "cpu")
    # Without autocast, which multiplies copies of the weights that could not be told from other tensors.
    with as_found(core), attention_in_parts, _PLAIN_ATTENTION, torch.autocast(device, enabled=False), counter:
        core(*args, **kwargs)
    rows: list[dict[str, Any]] = [
        {
            "layer": each.name,
            "weights": each.weights,
            "kept": each.kept,
            "flops": each.flops,
            "kept_flops": each.flops * each.kept // each.weights,
        }
        for each in tally.values()
    ]
    parameters, flops = sum(p.numel() for p in core.parameters()), counter.get_total_flops()
    return SparseCost(
        parameters=parameters,
        kept_parameters=parameters - sum(each.weights - each.kept for each in tally.values()),
        flops=flops,
        kept_flops=flops - sum(row["flops"] - row["kept_flops"] for row in rows),
        layers=rows,
    )


def _noting(formula: Callable[..., int], tally: dict[tuple[int, int], _Layer]) -> Callable[..., int]:
    """The formula of an operation, which also notes the layer whose weight is among what the operation takes."""

    def noted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        flops = formula(*args, out_val=out_val, **kwargs)
        for each in tree_leaves((args, kwargs)):
            layer = tally.get(_where(each)) if isinstance(each, Tensor) else None
            if layer is not None:
                layer.flops += flops
                break
        return flops

    noted._get_raw = True  # type: ignore[attr-defined]  # the tensors, not only their shapes
    return noted


# As plain products: torch's counter does not see those of the fused transformer layer and of flash on a CPU.
_PLAIN_ATTENTION = Shared(lambda: sdpa_kernel(SDPBackend.MATH))


def _where(tensor: Tensor) -> tuple[int, int]:
    """The memory a tensor starts in: the same for a weight and its transpose."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())

"""Masks made at random, or by what torch.nn.utils.prune would prune."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import prune

from .densities import Spread, check_sparsity, counts_of, kept_of
from .layers import MASK, listed, mask_of, maskable, shapes_of, weight_of
from .masks import Masks, new_masks

Criterion = Literal["magnitude", "magnitude_of_layer", "channels"]


def random_masks(
    model: nn.Module, sparsity: float, *, how: Spread = "erk", seed: int = 0, dense: str | Iterable[str] = ()
) -> Masks:
    """Masks drawn at random, and the weights they mask set to 0.

    `sparsity` is that of all weights with a mask together, met to the very weight: those of convolutions and linear
    layers, less the layers named in `dense` (names or globs). `how` spreads it over layers: "erk" keeps more of small
    layers (Erdős–Rényi–Kernel, Evci et al. 2020), "uniform" the same share of each. The masks come from `seed` alone,
    the same on every device. A model that has masks is refused.
    """
    check_sparsity(sparsity)
    layers = maskable(model, dense)
    if known := [name for name, module in layers.items() if mask_of(module) is not None]:
        which = f"{listed(known)} {'has a mask' if len(known) == 1 else 'have masks'}"
        raise ValueError(f"{which} already: Masks.of(model).remove() takes all off")
    counts = counts_of(shapes_of(layers), sparsity, how)
    generator = torch.Generator().manual_seed(seed)
    masks = {name: _drawn(weight_of(module), counts[name], generator) for name, module in layers.items()}
    return new_masks(layers, masks)


def pruned_masks(
    model: nn.Module, sparsity: float, *, how: Criterion = "magnitude", dense: str | Iterable[str] = ()
) -> Masks:
    """Masks of what torch.nn.utils.prune would prune, and the weights they mask set to 0.

    "magnitude": the smallest weights of all layers together (global_unstructured with L1Unstructured);
    "magnitude_of_layer": the same share of each layer (l1_unstructured); "channels": whole output channels of each
    layer, those with the smallest L1 norm (ln_structured), the same share of each: name the last layer in `dense`,
    whose channels are the answers. `sparsity` and `dense` as for `random_masks`. A model that has masks is pruned
    further, to `sparsity` in all; masks that an optimiser holds follow.
    """
    check_sparsity(sparsity)
    layers = maskable(model, dense)
    if odd := [name for name, module in layers.items() if bool(weight_of(module).isnan().any())]:
        raise ValueError(f"weights of {listed(odd)} are NaN, so none is the smallest: was the training cut short?")
    if how == "magnitude":
        found = _of_all(layers, sparsity)
    elif how == "magnitude_of_layer":
        found = {name: _of_layer(name, module, sparsity) for name, module in layers.items()}
    elif how == "channels":
        found = {name: _of_channels(name, module, sparsity) for name, module in layers.items()}
    else:
        raise ValueError(f"how={how!r}: 'magnitude', 'magnitude_of_layer' or 'channels'")
    return new_masks(layers, found)


def _drawn(weight: Tensor, kept: int, generator: torch.Generator) -> Tensor:
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[torch.randperm(weight.numel(), generator=generator)[:kept]] = True
    return mask.view(weight.shape)


class _Bare(nn.Module):
    """A weight and its mask alone: torch prunes this in place of the layer, which keeps its parameter."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_of(module).detach(), requires_grad=False)
        own = mask_of(module)
        if own is not None:
            prune.custom_from_mask(self, "weight", own.to(self.weight.dtype))

    @property
    def mask(self) -> Tensor:
        found = self._buffers.get(MASK)
        return torch.ones_like(self.weight, dtype=torch.bool) if found is None else found != 0


def _of_all(layers: Mapping[str, nn.Module], sparsity: float) -> dict[str, Tensor]:
    bare = {name: _Bare(module) for name, module in layers.items()}
    gone = sum(int((~each.mask).sum()) for each in bare.values())
    weights = sum(each.mask.numel() for each in bare.values())
    amount = _further(weights - kept_of(weights, sparsity), gone, "the model", "weights", sparsity)
    pairs = [(each, "weight") for each in bare.values()]
    prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=amount)
    return {name: each.mask for name, each in bare.items()}


def _of_layer(name: str, module: nn.Module, sparsity: float) -> Tensor:
    bare = _Bare(module)
    weights, gone = bare.mask.numel(), int((~bare.mask).sum())
    prune.l1_unstructured(
        bare, "weight", _further(weights - kept_of(weights, sparsity), gone, repr(name), "weights", sparsity)
    )
    return bare.mask


def _of_channels(name: str, module: nn.Module, sparsity: float) -> Tensor:
    bare = _Bare(module)
    if isinstance(module, _ConvTransposeNd) and module.groups > 1:
        raise ValueError(
            f"{name!r} is a transposed convolution in groups: its weight has no axis of output channels; name it in "
            "dense"
        )
    axis = 1 if isinstance(module, _ConvTransposeNd) else 0
    channels = bare.mask.movedim(axis, 0).flatten(1).any(1)
    if len(channels) - kept_of(len(channels), sparsity) == len(channels):
        raise ValueError(
            f"sparsity {sparsity} leaves none of the {len(channels)} channels of {name!r}: name it in dense"
        )
    gone = int((~channels).sum())
    amount = _further(len(channels) - kept_of(len(channels), sparsity), gone, repr(name), "channels", sparsity)
    prune.ln_structured(bare, "weight", amount, n=1, dim=axis)
    return bare.mask


def _further(wanted: int, gone: int, where: str, what: str, sparsity: float) -> int:
    if wanted < gone:
        raise ValueError(
            f"{gone} {what} of {where} are pruned already, more than the {wanted} of sparsity {sparsity}: pruning "
            "brings none back; ask for a higher sparsity"
        )
    return wanted - gone

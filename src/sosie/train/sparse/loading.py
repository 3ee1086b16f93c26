"""Models with masks, read back."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...capture import unwrap
from ...capture.names import Names
from ...models import read_weights
from ...models.weights import PREFIXES, fit_weights
from .layers import KINDS, MASK, listed, mask_of, weight_of
from .masks import Masks


def load_masked(model: nn.Module, state: Mapping[str, Tensor] | str | os.PathLike[str]) -> Masks:
    """Fill a model from a state dict, or a file of one (.safetensors, .pt), that has masks; every name must agree.

    Also from one that torch.nn.utils.prune left (`weight_orig`, `weight_mask`). A mask that does not fit is refused,
    and so is a weight that is not 0 where it is masked; the model is then as it was.
    """
    source = "the state dict" if isinstance(state, Mapping) else str(state)
    given = _plain_names(state) if isinstance(state, Mapping) else read_weights(state)[0]
    model = unwrap(model)
    tensors = _as_ours(given)
    masks = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] == MASK}
    if not masks:
        raise ValueError(f"{source} has no masks (no name ends in '{MASK}'): load_weights reads a dense model")
    added = _register(model, masks, source)
    try:
        _check_zeros(tensors, masks, source)
        fit_weights(model, tensors, source=source)
    except BaseException:
        for module in added:
            module._buffers.pop(MASK)
        raise
    return Masks.of(model)


def _plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefix that torch.compile and DataParallel leave."""
    found = dict(state)
    for prefix in PREFIXES:
        if found and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _as_ours(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer, _, last = name.rpartition(".")
        dot = "." if layer else ""
        if last == MASK:
            found[name] = tensor != 0
        elif last == "weight_orig" and _masks_it(mask := state.get(f"{layer}{dot}{MASK}"), tensor):
            found[f"{layer}{dot}weight"] = tensor * (mask != 0)
        else:
            found[name] = tensor
    return found


def _masks_it(mask: Tensor | None, weight: Tensor) -> bool:
    return mask is not None and mask.shape == weight.shape


def _register(model: nn.Module, masks: Mapping[str, Tensor], source: str) -> list[nn.Module]:
    """Room for the masks in the layers they belong to, and the layers that had none."""
    modules = Names.of(model).by_name
    strangers: list[str] = []
    misfits: list[str] = []
    found: list[nn.Module] = []
    owner: dict[int, tuple[str, nn.Module]] = {}  # modules may share a weight, which has one mask
    for name, mask in masks.items():
        layer = name.rpartition(".")[0]
        module = modules.get(layer)
        if not isinstance(module, KINDS) or module._parameters.get("weight") is None:
            strangers.append(layer)
        elif weight_of(module).shape != mask.shape:
            misfits.append(f"{layer} (weight {tuple(weight_of(module).shape)}, mask {tuple(mask.shape)})")
        elif (first := owner.setdefault(id(weight_of(module)), (layer, module)))[1] is not module:
            misfits.append(f"{layer} (shares the weight of {first[0]}, which has a mask of its own)")
        elif mask_of(module) is None:
            found.append(module)
    if strangers or misfits:
        lines = [f"the masks of {source} do not fit the model:"]
        if strangers:
            lines.append(f"  {len(strangers)} for layers it does not have: {listed(strangers)}")
        if misfits:
            lines.append(f"  {len(misfits)} for other weights: {', '.join(misfits[:5])}")
        raise ValueError("\n".join(lines))
    for module in found:
        module.register_buffer(MASK, torch.ones_like(weight_of(module), dtype=torch.bool))
    return found


def _check_zeros(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor], source: str) -> None:
    for name, mask in masks.items():
        weight = tensors.get(name.removesuffix("_mask"))
        wrong = 0 if weight is None or weight.shape != mask.shape else int((weight[~mask] != 0).sum())
        if wrong:
            raise ValueError(
                f"{source}: {wrong} weights of {name.rpartition('.')[0]!r} are not 0 where they are masked; was it "
                "trained without holding its masks?"
            )

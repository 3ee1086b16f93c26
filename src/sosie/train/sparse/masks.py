"""Masks that hold through training: buffers beside the weights they set to 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ...capture import unwrap
from ...capture.names import Names
from .layers import KINDS, MASK, listed, mask_of, weight_of


class Masks(Mapping[str, Tensor]):
    """The masks of a model: `masks["conv1"]` is True where the layer's weight is kept; `Masks.of(model)` finds them.

    Each is a boolean buffer `weight_mask` beside the `weight` it masks, so that it is saved with the model and moves
    with it; the weight stays a parameter, exactly 0 where the mask is False. Nothing of the forward changes.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = dict(layers)
        self._held: list[torch.optim.Optimizer] = []
        self._factors: dict[str, tuple[Tensor, int, Tensor]] = {}

    @classmethod
    def of(cls, model: nn.Module) -> Masks:
        """The masks a model has. Those of torch.nn.utils.prune are taken over.

        That is: `weight_orig` becomes the parameter `weight` again (the same object, so an optimiser keeps it), 0 where
        pruned, and the mask stays.
        """
        found: dict[str, nn.Module] = {}
        for name, module in Names.of(unwrap(model)).unique().items():
            if isinstance(module, KINDS) and mask_of(module) is not None:
                _take_over(module)
                found[name] = module
        if not found:
            raise ValueError(
                "no convolution or linear layer of the model has a mask: random_masks and pruned_masks make them, "
                "load_masked reads a model with masks"
            )
        masks = cls(found)
        masks._check_shared()
        masks.apply()
        return masks

    def __getitem__(self, layer: str) -> Tensor:
        mask = mask_of(self._layers[layer])
        if mask is None:
            raise RuntimeError(f"{layer!r} has no mask any more: its masks were removed")
        return mask

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __eq__(self, other: object) -> bool:
        return self is other  # not entry by entry, as mappings do: tensors have no single answer

    __hash__ = object.__hash__

    def weight(self, layer: str) -> nn.Parameter:
        """The weight that this mask masks."""
        return weight_of(self._layers[layer])

    @property
    def sparsity(self) -> float:
        """The share of 0 among all weights that have a mask."""
        rows = self.densities()
        return 1 - sum(row["kept"] for row in rows) / sum(row["weights"] for row in rows)

    def densities(self) -> list[dict[str, Any]]:
        """A row a layer: layer, shape, weights, kept, density."""
        kept = torch.stack([mask.sum().cpu() for mask in self.values()]).tolist()
        return [
            {
                "layer": layer,
                "shape": tuple(mask.shape),
                "weights": mask.numel(),
                "kept": count,
                "density": count / mask.numel(),
            }
            for (layer, mask), count in zip(self.items(), kept, strict=True)
        ]

    @torch.no_grad()
    def set(self, layer: str, mask: Tensor) -> None:
        """Another mask for a layer, written in place; weights that are no longer kept become 0."""
        own = self[layer]
        if mask.shape != own.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"the mask of {layer!r} is boolean with shape {tuple(own.shape)}, got {mask.dtype} of "
                f"{tuple(mask.shape)}"
            )
        own.copy_(mask)
        weight = self.weight(layer)
        weight.masked_fill_(~own, 0)

    @torch.no_grad()
    def apply(self) -> None:
        """Set the weights to 0 where they are masked."""
        torch._foreach_mul_([self.weight(layer) for layer in self], [self._factor(layer) for layer in self])

    @contextmanager
    def hold(self, optimiser: torch.optim.Optimizer) -> Iterator[Masks]:
        """Every step of the optimiser keeps the masks: gradients are masked before it, weights after it.

        So momentum and the moments of Adam stay exactly 0 where the weights are; what they have there from before is
        cleared. Nothing waits for a GPU. A closure given to `step` is followed by the masking of its gradients.
        """
        self._check(optimiser)
        self.apply()
        self.clear(optimiser)
        before = before_update(optimiser, self._mask_gradients)
        after = optimiser.register_step_post_hook(lambda *_: self.apply())
        self._held.append(optimiser)
        try:
            yield self
        finally:
            self._held.remove(optimiser)
            before.remove()
            after.remove()

    @torch.no_grad()
    def clear(self, optimiser: torch.optim.Optimizer) -> None:
        """Set what the optimiser remembers of masked weights to 0."""
        for layer, mask in self.items():
            weight = self.weight(layer)
            for kept in optimiser.state.get(weight, {}).values():
                if isinstance(kept, Tensor) and kept.shape == weight.shape and kept.is_floating_point():
                    kept.mul_(mask)

    def remove(self) -> None:
        """Take the masks off; the weights stay 0 until they are trained."""
        if self._held:
            raise RuntimeError("these masks are held by an optimiser: remove them after the with block")
        for module in self._layers.values():
            module._buffers.pop(MASK, None)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint needs beside the model, which has the masks: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if state:
            raise ValueError(f"masks that do not change have no state, got {listed(state)}: were they regrown before?")

    def __repr__(self) -> str:
        rows = self.densities()
        kept, weights = sum(row["kept"] for row in rows), sum(row["weights"] for row in rows)
        return f"<Masks of {len(self)} layers: {kept:,} of {weights:,} weights kept, sparsity {1 - kept / weights:.4f}>"

    def _check_shared(self) -> None:
        owner: dict[int, str] = {}
        for layer in self:
            first = owner.setdefault(id(self.weight(layer)), layer)
            if first != layer:
                raise ValueError(
                    f"{first!r} and {layer!r} share one weight and have a mask each: which one holds? Take one off "
                    f"(del its {MASK})"
                )

    def _check(self, optimiser: torch.optim.Optimizer) -> None:
        if any(held is optimiser for held in self._held):
            raise RuntimeError("these masks are held through this optimiser's steps already")
        trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
        if not any(id(self.weight(layer)) in trained for layer in self):
            raise ValueError(
                f"the optimiser trains none of the {len(self)} masked weights: is it of a copy of the model? "
                "Masks.of(copy) gives the masks of a copy"
            )

    @torch.no_grad()
    def _mask_gradients(self) -> None:
        found = {layer: grad for layer in self if (grad := self.weight(layer).grad) is not None}
        if found:
            torch._foreach_mul_(list(found.values()), [self._factor(layer) for layer in found])

    def _factor(self, layer: str) -> Tensor:
        """The mask as 0 and 1 of the weight's type: equal types share a single kernel.

        Written to in place when the mask changed: a recorded step goes on reading the same memory.
        """
        mask, weight = self[layer], self.weight(layer)
        known = self._factors.get(layer)
        if known is None or known[2].dtype != weight.dtype or known[2].device != mask.device:
            known = mask, mask._version, mask.to(weight.dtype)
        elif known[0] is not mask or known[1] != mask._version:
            known = mask, mask._version, known[2].copy_(mask)
        self._factors[layer] = known
        return known[2]


def new_masks(layers: Mapping[str, nn.Module], masks: Mapping[str, Tensor]) -> Masks:
    """Give layers these masks; one that a layer has already is overwritten in place."""
    for name, module in layers.items():
        mask = masks[name].to(weight_of(module).device)
        own = mask_of(module)
        if own is None:
            # Laid out as the weight: products of the two then run at full speed.
            module.register_buffer(MASK, torch.empty_like(weight_of(module), dtype=torch.bool).copy_(mask))
        else:
            own.copy_(mask)
    made = Masks(layers)
    made.apply()
    return made


def before_update(optimiser: torch.optim.Optimizer, act: Callable[[], None]) -> Any:
    """Call `act` in every step once the gradients are there: before it, or after the closure that makes them."""

    def hook(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            act()
            return None

        def followed() -> Any:
            loss = closure()
            act()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": followed}
        return (args[0], followed, *args[2:]), kwargs

    return optimiser.register_step_pre_hook(hook)


def _take_over(module: nn.Module) -> None:
    mask = mask_of(module)
    assert mask is not None
    if "weight_orig" in module._parameters:
        mask = mask.clone()
        prune.remove(module, "weight")  # the parameter itself goes back to its name
    if mask.dtype != torch.bool or mask_of(module) is None:
        module._buffers.pop(MASK, None)
        module.register_buffer(MASK, mask != 0)

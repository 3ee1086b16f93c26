"""Masks of a model: which weights can have one, how they hold through training, and models with masks read back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune

from ...capture import nearest, unwrap
from ...capture.sites import Names
from ...models import read_weights
from ...models.weights import PREFIXES, fit_weights

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, _ConvTransposeNd)
MASK = "weight_mask"  # the name torch.nn.utils.prune gives the buffer


def layers_of(model: nn.Module) -> dict[str, list[str]]:
    """The first name of each layer with a weight of its own, not empty, and every name that its weight goes by.

    Modules that share a parameter (tied weights), and names that share a module, are one layer.
    """
    modules = Names.of(unwrap(model)).by_name
    found: dict[int, list[str]] = {}
    for name, module in modules.items():
        weight = module._parameters.get("weight")
        if isinstance(module, KINDS) and weight is not None and (is_lazy(weight) or weight.numel()):
            found.setdefault(id(weight), []).append(name)
    return {names[0]: names for names in found.values()}


def maskable(model: nn.Module, dense: str | Iterable[str] = ()) -> dict[str, nn.Module]:
    """The layers to be masked by name; `dense`: names or globs of layers that stay whole."""
    modules, layers = Names.of(unwrap(model)).by_name, layers_of(model)
    aliases = {alias: name for name, names in layers.items() for alias in names}
    kinds = {name: module for name, module in modules.items() if isinstance(module, KINDS)}
    computed = [name for name, module in kinds.items() if module._parameters.get("weight") is None]
    whole = named([*aliases, *computed], dense, "dense")
    if odd := [name for name in computed if name not in whole]:
        raise ValueError(
            f"the weight of {listed(odd)} is no parameter: where torch.nn.utils.prune masked it, Masks.of(model) takes "
            "the masks over; remove a parametrisation, or name the layer in dense"
        )
    whole = {aliases.get(name, name) for name in whole}
    found = {name: modules[name] for name in layers if name not in whole}
    if lazy := [name for name, module in found.items() if is_lazy(weight_of(module))]:
        raise ValueError(f"{listed(lazy)} has no shape yet: call the model once first")
    if not found:
        left = f"; all {len(layers)} stay dense" if layers else ": it has no convolution or linear layer with a weight"
        raise ValueError(f"nothing to mask in {type(unwrap(model)).__name__}{left}")
    return found


def named(known: Iterable[str], wanted: str | Iterable[str], word: str) -> set[str]:
    """The known names that are wanted, an exact name before a glob; one that fits nothing is refused."""
    known = list(known)
    found: set[str] = set()
    for each in [wanted] if isinstance(wanted, str) else wanted:
        fits = {each} & set(known) or {name for name in known if fnmatchcase(name, each)}
        if not fits:
            raise ValueError(f"{word}: no convolution or linear layer is called {each!r}{nearest(each, known)}")
        found |= fits
    return found


def weight_of(module: nn.Module) -> nn.Parameter:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def shapes_of(layers: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight_of(module).shape) for name, module in layers.items()}


def mask_of(module: nn.Module) -> Tensor | None:
    """The mask that a module has, if any; of its own weight only, not of its children's."""
    return module._buffers.get(MASK)


def listed(names: Iterable[str], shown: int = 5) -> str:
    names = list(names)
    rest = f" … and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + rest


# Masks that hold through training: buffers beside the weights they set to 0


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
            mask = mask_of(module) if isinstance(module, KINDS) else None
            if mask is None:
                continue
            if "weight_orig" in module._parameters:
                mask = mask.clone()
                prune.remove(module, "weight")  # the parameter itself goes back to its name
            module.register_buffer(MASK, mask if mask.dtype == torch.bool else mask != 0)
            found[name] = module
        if not found:
            raise ValueError(
                "no convolution or linear layer of the model has a mask: random_masks and pruned_masks make them, "
                "load_masked reads a model with masks"
            )
        owner: dict[int, str] = {}
        for layer, module in found.items():
            if (first := owner.setdefault(id(weight_of(module)), layer)) != layer:
                raise ValueError(
                    f"{first!r} and {layer!r} share one weight and have a mask each: which one holds? Take one off "
                    f"(del its {MASK})"
                )
        masks = cls(found)
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
        """One row per layer: layer, shape, weights, kept, density."""
        kept = torch.stack([mask.sum().cpu() for mask in self.values()]).tolist()
        return [
            {"layer": layer, "shape": tuple(mask.shape), "weights": mask.numel(), "kept": count,
             "density": count / mask.numel()}
            for (layer, mask), count in zip(self.items(), kept, strict=True)
        ]  # fmt: skip

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
        if any(held is optimiser for held in self._held):
            raise RuntimeError("these masks are held through this optimiser's steps already")
        trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
        if not any(id(self.weight(layer)) in trained for layer in self):
            raise ValueError(
                f"the optimiser trains none of the {len(self)} masked weights: is it of a copy of the model? "
                "Masks.of(copy) gives the masks of a copy"
            )
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


# Models with masks, read back


def load_masked(model: nn.Module, state: Mapping[str, Tensor] | str | os.PathLike[str]) -> Masks:
    """Fill a model from a state dict, or a file of one (.safetensors, .pt), that has masks; every name must agree.

    Also from one that torch.nn.utils.prune left (`weight_orig`, `weight_mask`). A mask that does not fit is refused,
    and so is a weight that is not 0 where it is masked; the model is then as it was.
    """
    source = "the state dict" if isinstance(state, Mapping) else str(state)
    if isinstance(state, Mapping):
        given = dict(state)
        for prefix in PREFIXES:  # that torch.compile and DataParallel leave
            if given and all(name.startswith(prefix) for name in given):
                given = {name.removeprefix(prefix): tensor for name, tensor in given.items()}
    else:
        given = read_weights(state)[0]
    model = unwrap(model)
    tensors: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if name.rpartition(".")[2] == MASK:
            tensor = tensor != 0
        elif name.rpartition(".")[2] == "weight_orig":
            mask = given.get(name.removesuffix("orig") + "mask")
            if mask is not None and mask.shape == tensor.shape:
                name, tensor = name.removesuffix("_orig"), tensor * (mask != 0)
        tensors[name] = tensor
    masks = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] == MASK}
    if not masks:
        raise ValueError(f"{source} has no masks (no name ends in '{MASK}'): load_weights reads a dense model")
    added = _register(model, masks, source)
    try:
        for name, mask in masks.items():
            weight = tensors.get(name.removesuffix("_mask"))
            wrong = 0 if weight is None or weight.shape != mask.shape else int((weight[~mask] != 0).sum())
            if wrong:
                raise ValueError(
                    f"{source}: {wrong} weights of {name.rpartition('.')[0]!r} are not 0 where they are masked; was it "
                    "trained without holding its masks?"
                )
        fit_weights(model, tensors, source=source)
    except BaseException:
        for module in added:
            module._buffers.pop(MASK)
        raise
    return Masks.of(model)


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

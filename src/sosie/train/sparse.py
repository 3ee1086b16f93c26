"""Sparse training: make, hold, regrow, load and count masks of weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..capture import as_found, unwrap
from ..capture.sites import Names
from ..checks import listed, matching, one_of, positive, whole_number
from ..models import read_weights
from ..models.weights import PREFIXES, fit_weights
from ..process_state import SharedContext, attention_in_parts

MASKABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, _ConvTransposeNd)
MASK = "weight_mask"  # the name torch.nn.utils.prune gives the buffer


def layers_of(model: nn.Module) -> dict[str, list[str]]:
    """For the first name of each layer with a weight that is not empty: all names by which that weight is known.

    Modules that share a parameter (tied weights), and names that share a module, are one layer.
    """
    names_of: dict[int, list[str]] = {}
    for name, module in Names.of(unwrap(model)).by_name.items():
        weight = module._parameters.get("weight")
        if isinstance(module, MASKABLE) and weight is not None and 0 not in weight.shape:
            names_of.setdefault(id(weight), []).append(name)
    return {names[0]: names for names in names_of.values()}


def maskable(model: nn.Module, dense: str | Iterable[str] = ()) -> dict[str, nn.Module]:
    """Return the layers to mask, by name; `dense`: names or globs of layers that stay dense."""
    modules, layers = Names.of(unwrap(model)).by_name, layers_of(model)
    aliases = {alias: name for name, names in layers.items() for alias in names}
    computed = [
        name for name, each in modules.items() if isinstance(each, MASKABLE) and each._parameters.get("weight") is None
    ]
    whole = _named_layers([*aliases, *computed], dense, "dense")
    if odd := [name for name in computed if name not in whole]:
        raise ValueError(
            f"the weight of {_quoted(odd)} is not a parameter: if torch.nn.utils.prune masked it, Masks.of(model) "
            "takes the masks over; remove a parametrisation, or name the layer in dense"
        )
    whole = {aliases.get(name, name) for name in whole}
    masked = {name: modules[name] for name in layers if name not in whole}
    if not masked:
        left = f"; all {len(layers)} stay dense" if layers else ": it has no convolution or linear layer with a weight"
        raise ValueError(f"nothing to mask in {type(unwrap(model)).__name__}{left}")
    return masked


def _named_layers(known: Iterable[str], wanted: str | Iterable[str], option: str) -> set[str]:
    what = f"{option}: no convolution or linear layer is called"
    globs = [wanted] if isinstance(wanted, str) else wanted
    return {name for glob in globs for name in matching(known, glob, what)}


def weight_of(module: nn.Module) -> nn.Parameter:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def mask_of(module: nn.Module) -> Tensor | None:
    """The mask of a module's weight, if it has one."""
    return module._buffers.get(MASK)


def _quoted(names: Iterable[str]) -> str:
    return listed(map(repr, names))


class Masks(Mapping[str, Tensor]):
    """The masks of a model: `masks["conv1"]` is True where the layer's weight is kept. `Masks.of(model)` finds them.

    A mask is a boolean buffer `weight_mask` beside the `weight` it masks: it is saved with the model and moves with it.
    The weight stays a parameter, exactly 0 where the mask is False. The forward does not change.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = dict(layers)
        self._held: list[torch.optim.Optimizer] = []
        self._factors: dict[str, tuple[Tensor, int, Tensor]] = {}  # a mask, its version, and it as floating point

    @classmethod
    def of(cls, model: nn.Module) -> Masks:
        """Find the masks of a model, and take over those of torch.nn.utils.prune.

        `weight_orig` becomes the parameter `weight` again (the same object, so an optimiser keeps it), 0 where pruned.
        """
        layers: dict[str, nn.Module] = {}
        owner: dict[int, str] = {}
        for name, module in Names.of(unwrap(model)).unique().items():
            mask = mask_of(module) if isinstance(module, MASKABLE) else None
            if mask is None:
                continue
            if "weight_orig" in module._parameters:
                mask = mask.clone()
                prune.remove(module, "weight")  # the parameter itself goes back to its name
            module.register_buffer(MASK, mask if mask.dtype == torch.bool else mask != 0)
            layers[name] = module
            if (first := owner.setdefault(id(weight_of(module)), name)) != name:
                raise ValueError(
                    f"{first!r} and {name!r} share one weight and have a mask each: remove one of the masks "
                    f"(del its {MASK})"
                )
        if not layers:
            raise ValueError(
                "no convolution or linear layer of the model has a mask: random_masks and pruned_masks make them, "
                "load_masked reads a model with masks"
            )
        masks = cls(layers)
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
        return self is other  # mappings compare entry by entry, which tensors cannot

    __hash__ = object.__hash__

    def weight(self, layer: str) -> nn.Parameter:
        """The masked weight of a layer."""
        return weight_of(self._layers[layer])

    @property
    def sparsity(self) -> float:
        """The share of masked weights among all weights of masked layers."""
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
        """Replace the mask of a layer in place; weights that are no longer kept become 0."""
        current = self[layer]
        if mask.shape != current.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"the mask of {layer!r} is boolean with shape {tuple(current.shape)}, got {mask.dtype} of "
                f"{tuple(mask.shape)}"
            )
        current.copy_(mask)
        self.weight(layer).masked_fill_(~current, 0)

    def apply(self) -> None:
        """Set the weights to 0 where they are masked."""
        self._multiply({layer: self.weight(layer) for layer in self})

    @contextmanager
    def hold(self, optimiser: torch.optim.Optimizer) -> Iterator[Masks]:
        """Keep the masks through every step of the optimiser: gradients are masked before it, weights after it.

        Momentum and the moments of Adam are then exactly 0 where the weights are; earlier values there are cleared.
        Nothing waits for a GPU. Gradients that a closure computes inside `step` are masked too.
        """
        if any(held is optimiser for held in self._held):
            raise RuntimeError("this optimiser holds these masks already")
        trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
        if not any(id(self.weight(layer)) in trained for layer in self):
            raise ValueError(
                f"the optimiser trains none of the {len(self)} masked weights. If it belongs to a copy of the model, "
                "use Masks.of(copy)"
            )
        self.apply()
        self.clear(optimiser)
        before = before_update(
            optimiser, lambda: self._multiply({k: g for k in self if (g := self.weight(k).grad) is not None})
        )
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
        """Set the optimiser's state (momentum, moments) to 0 where weights are masked."""
        for layer, mask in self.items():
            for state in optimiser.state.get(self.weight(layer), {}).values():
                if isinstance(state, Tensor) and state.shape == mask.shape and state.is_floating_point():
                    state.mul_(mask)

    def remove(self) -> None:
        """Remove the masks; the weights stay 0 until they are trained."""
        if self._held:
            raise RuntimeError("an optimiser holds these masks: remove them after the with block")
        for module in self._layers.values():
            module._buffers.pop(MASK, None)

    def state_dict(self) -> dict[str, int]:
        """Return nothing: a checkpoint stores the masks with the model."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if state:
            raise ValueError(f"masks that do not change have no state, got {_quoted(state)}: did a Regrow save it?")

    def __repr__(self) -> str:
        kept, weights = (sum(row[key] for row in self.densities()) for key in ("kept", "weights"))
        return f"<Masks of {len(self)} layers: {kept:,} of {weights:,} weights kept, sparsity {1 - kept / weights:.4f}>"

    @torch.no_grad()
    def _multiply(self, tensors: Mapping[str, Tensor]) -> None:
        """Multiply weights or gradients by the masks of their layers, on a GPU in a single kernel."""
        if tensors:
            torch._foreach_mul_(list(tensors.values()), [self._factor(layer) for layer in tensors])

    def _factor(self, layer: str) -> Tensor:
        """The mask as 0 and 1 in the weight's type: a single kernel needs equal types, and a CPU is twice as fast.

        It is updated in place when the mask changes: a recorded step keeps reading the same memory.
        """
        mask, dtype = self[layer], self.weight(layer).dtype
        source, version, factor = self._factors.get(layer, (None, 0, None))
        if factor is None or factor.dtype != dtype or factor.device != mask.device:
            factor = mask.to(dtype)
        elif source is not mask or version != mask._version:
            factor.copy_(mask)
        self._factors[layer] = mask, mask._version, factor
        return factor


def new_masks(layers: Mapping[str, nn.Module], masks: Mapping[str, Tensor]) -> Masks:
    """Give layers these masks; existing ones are overwritten in place."""
    for name, module in layers.items():
        if mask_of(module) is None:
            # In the weight's memory layout, for which products of the two are fastest.
            module.register_buffer(MASK, torch.empty_like(weight_of(module), dtype=torch.bool))
        module.get_buffer(MASK).copy_(masks[name])
    result = Masks(layers)
    result.apply()
    return result


def before_update(optimiser: torch.optim.Optimizer, act: Callable[[], None]) -> Any:
    """Call `act` in every step once the gradients exist: before the step, or after the closure that computes them."""

    def hook(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            act()
            return None

        def closure_then_act() -> Any:
            loss = closure()
            act()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_act}
        return (args[0], closure_then_act, *args[2:]), kwargs

    return optimiser.register_step_pre_hook(hook)


def load_masked(model: nn.Module, state: Mapping[str, Tensor] | str | os.PathLike[str]) -> Masks:
    """Load a state dict with masks, or a file of one (.safetensors, .pt), into a model; every name must match.

    State dicts of torch.nn.utils.prune (`weight_orig`, `weight_mask`) work too. Masks that do not fit, and weights that
    are not 0 where they are masked, raise; the model is then unchanged.
    """
    source = "the state dict" if isinstance(state, Mapping) else str(state)
    tensors = dict(state) if isinstance(state, Mapping) else read_weights(state)[0]
    for prefix in PREFIXES:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    masks = {name: tensor != 0 for name, tensor in tensors.items() if name.rpartition(".")[2] == MASK}
    if not masks:
        raise ValueError(f"{source} has no masks (no name ends in '{MASK}'): load_weights reads a dense model")
    core = unwrap(model)
    modules = Names.of(core).by_name
    wrong: list[str] = []
    bare: list[nn.Module] = []  # layers without a mask so far
    owner: dict[int, tuple[str, nn.Module]] = {}  # modules may share a weight, which has one mask
    for name, mask in masks.items():
        layer, weight = name.rpartition(".")[0], tensors.get(name.removesuffix("_mask"))
        module = modules.get(layer)
        if not isinstance(module, MASKABLE) or module._parameters.get("weight") is None:
            wrong.append(f"{layer!r} is not a layer with a weight")
            continue
        first, holder = owner.setdefault(id(weight_of(module)), (layer, module))
        if weight_of(module).shape != mask.shape:
            wrong.append(f"{layer!r} has a weight {tuple(weight_of(module).shape)} but a mask {tuple(mask.shape)}")
        elif holder is not module:
            wrong.append(f"{layer!r} shares the weight of {first!r}, which has its own mask")
        elif weight is not None and weight.shape == mask.shape and (count := int((weight[~mask] != 0).sum())):
            wrong.append(f"{count} weights of {layer!r} are not 0 where they are masked: was it trained without hold?")
        elif mask_of(module) is None:
            bare.append(module)
    if wrong:
        raise ValueError(f"the masks of {source} do not fit the model: {listed(wrong, separator='; ')}")
    for module in bare:
        module.register_buffer(MASK, torch.ones_like(weight_of(module), dtype=torch.bool))
    tensors |= masks
    for name, mask in masks.items():
        if (original := tensors.pop(f"{name.removesuffix('mask')}orig", None)) is not None:
            tensors[name.removesuffix("_mask")] = original * mask
    try:
        fit_weights(core, tensors, source=source)
    except BaseException:
        for module in bare:
            module._buffers.pop(MASK)
        raise
    return Masks.of(core)


# Random masks, and those of torch.nn.utils.prune

Allocation = Literal["erk", "uniform"]
Criterion = Literal["magnitude", "magnitude_of_layer", "channels"]
Shape = tuple[int, ...]


def check_sparsity(sparsity: float) -> None:
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity!r}: need a share of weights from 0 to below 1")


def kept_of(weights: int, sparsity: float) -> int:
    """The number of weights that are kept; the number of pruned ones is rounded, as in torch.nn.utils.prune."""
    return weights - round(sparsity * weights)


def densities_of(shapes: Mapping[str, Shape], sparsity: float, how: Allocation = "erk") -> dict[str, float]:
    """The share of weights that each layer keeps, before rounding to whole numbers.

    "erk" (Mocanu et al. 2018, Evci et al. 2020) is proportional to the sum of a weight's sides over their product, for
    a convolution (inputs + outputs + height + width) / (inputs × outputs × height × width). Where that exceeds 1 the
    layer is dense and the others share the rest.
    """
    one_of(how, "how", ("erk", "uniform"))
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    kept = kept_of(sum(sizes.values()), sparsity)
    if how == "uniform":
        return dict.fromkeys(shapes, kept / sum(sizes.values()))
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    full: set[str] = set()
    while True:
        rest = [name for name in shapes if name not in full]
        room = kept - sum(sizes[name] for name in full)
        scale = room / sum(raw[name] * sizes[name] for name in rest) if rest else 0.0
        over = {name for name in rest if scale * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in full else scale * raw[name] for name in shapes}
        full |= over


def counts_of(shapes: Mapping[str, Shape], sparsity: float, how: Allocation = "erk") -> dict[str, int]:
    """The number of weights that each layer keeps, rounded by largest remainder; the sum is exact."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    shares = {name: density * sizes[name] for name, density in densities_of(shapes, sparsity, how).items()}
    # A share that should be whole may lie just below its number.
    counts = {name: min(math.floor(share + 1e-9 * max(share, 1)), sizes[name]) for name, share in shares.items()}
    missing = kept_of(sum(sizes.values()), sparsity) - sum(counts.values())
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
    for name in [each for each in by_remainder if counts[each] < sizes[each]][:missing]:
        counts[name] += 1
    if empty := [name for name, count in counts.items() if count == 0]:
        raise ValueError(
            f"sparsity {sparsity} leaves no weight in {_quoted(empty)}, which would cut the network: take a lower "
            f"sparsity{', how=' + repr('erk') if how == 'uniform' else ''}, or name such layers in dense"
        )
    return counts


def random_masks(
    model: nn.Module, sparsity: float, *, how: Allocation = "erk", seed: int = 0, dense: str | Iterable[str] = ()
) -> Masks:
    """Draw random masks, and set the masked weights to 0.

    `sparsity` is met exactly over all convolutions and linear layers except those in `dense` (names or globs). `how`
    distributes it over layers: "erk" keeps more of small layers (Erdős–Rényi–Kernel, Evci et al. 2020), "uniform" the
    same share of each. The masks depend on `seed` alone, and are the same on every device. Raises if the model has
    masks.
    """
    check_sparsity(sparsity)
    layers = maskable(model, dense)
    if known := [name for name, module in layers.items() if mask_of(module) is not None]:
        which = f"{_quoted(known)} {'has a mask' if len(known) == 1 else 'have masks'}"
        raise ValueError(f"{which} already: Masks.of(model).remove() removes all")
    shapes = {name: tuple(weight_of(module).shape) for name, module in layers.items()}
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for name, count in counts_of(shapes, sparsity, how).items():
        mask = torch.zeros(shapes[name], dtype=torch.bool)
        mask.view(-1)[torch.randperm(mask.numel(), generator=generator)[:count]] = True
        masks[name] = mask
    return new_masks(layers, masks)


def pruned_masks(
    model: nn.Module, sparsity: float, *, how: Criterion = "magnitude", dense: str | Iterable[str] = ()
) -> Masks:
    """Mask the weights that torch.nn.utils.prune would prune, and set them to 0.

    "magnitude": the smallest weights of all layers together (global_unstructured with L1Unstructured);
    "magnitude_of_layer": the same share of each layer (l1_unstructured); "channels": in each layer the same share of
    output channels, those with the smallest L1 norm (ln_structured). Name the last layer, whose channels are the
    classes, in `dense`. `sparsity` and `dense` as for `random_masks`. A model with masks is pruned further, to
    `sparsity` in total; masks that an optimiser holds are updated.
    """
    check_sparsity(sparsity)
    layers = maskable(model, dense)
    one_of(how, "how", ("magnitude", "magnitude_of_layer", "channels"))
    if odd := [name for name, module in layers.items() if bool(weight_of(module).isnan().any())]:
        raise ValueError(f"weights of {_quoted(odd)} are NaN, so none is the smallest: did training diverge?")
    bare = {name: _bare(module) for name, module in layers.items()}
    if how == "magnitude":
        kept = torch.cat([_mask(each).flatten() for each in bare.values()])
        amount = _further(kept, sparsity, "weights of the model")
        pairs = [(each, "weight") for each in bare.values()]
        prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=amount)
    elif how == "magnitude_of_layer":
        for name, each in bare.items():
            prune.l1_unstructured(each, "weight", _further(_mask(each), sparsity, f"weights of {name!r}"))
    else:
        for name, each in bare.items():
            transposed = isinstance(layers[name], _ConvTransposeNd)
            if transposed and layers[name].groups > 1:  # type: ignore[operator]
                raise ValueError(
                    f"{name!r} is a transposed convolution in groups: its weight has no axis of output channels; name "
                    "it in dense"
                )
            kept = _mask(each).movedim(int(transposed), 0).flatten(1).any(1)
            if not kept_of(len(kept), sparsity):
                raise ValueError(f"sparsity {sparsity} leaves no channel of {name!r} ({len(kept)}): name it in dense")
            amount = _further(kept, sparsity, f"channels of {name!r}")
            prune.ln_structured(each, "weight", amount, n=1, dim=int(transposed))
    return new_masks(layers, {name: _mask(each) for name, each in bare.items()})


def _bare(module: nn.Module) -> nn.Module:
    """A module with only the weight and its mask: torch prunes it instead of the layer, which keeps its parameter."""
    bare = nn.Module()
    bare.weight = nn.Parameter(weight_of(module).detach(), requires_grad=False)
    if (mask := mask_of(module)) is not None:
        prune.custom_from_mask(bare, "weight", mask.to(bare.weight.dtype))
    return bare


def _mask(module: nn.Module) -> Tensor:
    """The mask of a module's weight, True everywhere if it has none."""
    mask = mask_of(module)
    return torch.ones_like(weight_of(module), dtype=torch.bool) if mask is None else mask != 0


def _further(kept: Tensor, sparsity: float, what: str) -> int:
    gone, wanted = int((~kept).sum()), kept.numel() - kept_of(kept.numel(), sparsity)
    if wanted < gone:
        raise ValueError(
            f"{gone} {what} are pruned already, more than the {wanted} of sparsity {sparsity}, and pruning does not "
            "restore any; choose a higher sparsity"
        )
    return wanted - gone


# Masks that change during training: small weights are dropped and as many others grow (RigL, SET)

Growth = Literal["gradient", "random"]


class Regrow:
    """Regularly drop a layer's smallest weights and grow as many: `with RigL(masks, steps).hold(optimiser)`.

    `how` chooses the weights that grow: those with the largest gradient ("gradient": RigL, Evci et al. 2020) or random
    ones ("random": SET, Mocanu et al. 2018). At every `every`-th of the optimiser's `steps`, before `until` × steps,
    the share `fraction` / 2 × (1 + cos(π step / (until × steps))) of a layer's kept weights is dropped, rounded down,
    and as many masked ones grow; a weight that was just dropped may grow back with its value. A layer's density never
    changes. The step of an update trains the weights that stay; new ones are 0 after it, without momentum, and train
    from the next step on. An update is skipped if a gradient is not finite.

    Use it wherever masks are used (`hold`, `fit(…, masks=)`); do not hold the masks themselves as well.
    """

    def __init__(
        self,
        masks: Masks,
        steps: int,
        *,
        how: Growth = "gradient",
        every: int = 100,
        fraction: float = 0.3,
        until: float = 0.75,
        seed: int = 0,
    ) -> None:
        one_of(how, "how", ("gradient", "random"))
        whole_number(steps, "steps", least=1, why="steps of the optimiser")
        whole_number(every, "every", least=1, why="steps of the optimiser")
        if not 0 < fraction < 1:
            raise ValueError(f"fraction={fraction!r}: need a share of kept weights between 0 and 1")
        if not 0 < until <= 1:
            raise ValueError(f"until={until!r}: need a share of the steps, above 0 and at most 1")
        self.masks, self.steps, self.how, self.every = masks, steps, how, every
        self.fraction, self.until, self.seed = fraction, until, seed
        self.step = 0  # steps of the optimiser so far
        self.last: list[dict[str, Any]] = []  # the last update: layer, number dropped, number new among the grown

    @property
    def due(self) -> bool:
        """Whether the next step changes the masks, so that it cannot be recorded in a CUDA graph."""
        step = self.step + 1
        return step % self.every == 0 and step < self.until * self.steps

    def fraction_at(self, step: int) -> float:
        """The share of kept weights that an update at this step drops."""
        return self.fraction / 2 * (1 + math.cos(math.pi * step / (self.until * self.steps)))

    @contextmanager
    def hold(self, optimiser: torch.optim.Optimizer) -> Iterator[Regrow]:
        """Keep the masks through the optimiser's steps (see `Masks.hold`), and change them when an update is due."""

        def before_step() -> None:
            if self.due:
                self._update(optimiser)
            self.step += 1

        update = before_update(optimiser, before_step)  # registered first: it needs the gradients unmasked
        try:
            with self.masks.hold(optimiser):
                yield self
        finally:
            update.remove()

    def settings(self) -> dict[str, Any]:
        """The options, which a checkpoint compares."""
        return {name: getattr(self, name) for name in ("steps", "how", "every", "fraction", "until", "seed")}

    def state_dict(self) -> dict[str, int]:
        """The steps so far; a checkpoint stores the masks with the model."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step = int(state["step"])

    def __repr__(self) -> str:
        return f"<Regrow by {self.how} at step {self.step} of {self.steps}: {self.masks!r}>"

    @torch.no_grad()
    def _update(self, optimiser: torch.optim.Optimizer) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot record this step, which changes masks: run `due` steps outside it")
        trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
        weights = {layer: self.masks.weight(layer) for layer in self.masks}
        gradients = {layer: w.grad for layer, w in weights.items() if id(w) in trained and w.grad is not None}
        if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            return
        entropy = np.random.SeedSequence([self.seed, self.step]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(entropy))
        share = self.fraction_at(self.step + 1)
        self.last = []
        for layer, gradient in gradients.items():
            score = gradient.abs()
            if self.how == "random":  # drawn on the CPU: the same on every device
                score = torch.rand(gradient.shape, generator=generator, dtype=torch.float64).to(gradient.device)
            mask, weight = self.masks[layer], self.masks.weight(layer)
            before = mask.flatten().clone()  # the mask itself is about to change
            count = math.floor(share * int(before.sum()))
            dropped = weight.abs().flatten().masked_fill(~before, math.inf).topk(count, largest=False).indices
            after = before.index_fill(0, dropped, False)
            grown = score.flatten().masked_fill(after, -1).topk(count).indices
            after = after.index_fill(0, grown, True)
            gradient.mul_(mask)  # new weights train from the next step on
            self.masks.set(layer, after.view(mask.shape))
            self.last.append({"layer": layer, "dropped": count, "new": int((after & ~before).sum())})
        self.masks.clear(optimiser)


RigL = partial(Regrow, how="gradient")
SET = partial(Regrow, how="random")


# The cost of a network, dense and with its masks


@dataclass(frozen=True)
class SparseCost:
    """Parameters and FLOPs of a network, dense and (`kept_…`) with its masks.

    FLOPs are those of one forward, with two for a multiplication and addition; elementwise operations do not count.
    """

    parameters: int
    kept_parameters: int
    flops: int
    kept_flops: int
    layers: list[dict[str, Any]]  # one row per layer: layer, weights, kept, flops, kept_flops

    @property
    def sparsity(self) -> float:
        """The share of masked parameters among all, including those without a mask."""
        return 1 - self.kept_parameters / self.parameters


def sparse_cost(model: nn.Module, *args: Any, **kwargs: Any) -> SparseCost:
    """Count the parameters of a network and the FLOPs of a forward on these inputs, by torch's FlopCounterMode.

    A product or convolution with a masked weight counts kept / weights of its FLOPs, a whole number since each weight
    takes part in equally many multiplications; all others count fully. This is the work that is needed, not what torch
    does: it multiplies masked weights too, and pruned channels stay in the tensors, also as inputs of the next layer.
    A weight that several modules share counts once among parameters, and in every product.
    """
    core = unwrap(model)
    modules = Names.of(core).by_name
    rows: dict[tuple[int, int], dict[str, Any]] = {}  # by where the weight is in memory
    for name in layers_of(core):
        weight, kept = weight_of(modules[name]), int(_mask(modules[name]).sum())
        rows[_where(weight)] = {"layer": name, "weights": weight.numel(), "kept": kept, "flops": 0}

    def recording(formula: Callable[..., int]) -> Callable[..., int]:
        """Wrap the formula of an operation, to add its FLOPs to the layer whose weight it takes."""

        def recorded(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            flops = formula(*args, out_val=out_val, **kwargs)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if row := next((rows[_where(leaf)] for leaf in tensors if _where(leaf) in rows), None):
                row["flops"] += flops
            return flops

        recorded._get_raw = True  # type: ignore[attr-defined]  # the tensors, not only their shapes
        return recorded

    formulas = {packet: recording(formula) for packet, formula in flop_registry.items()}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    device = next((p.device.type for p in core.parameters()), "cpu")
    # Without autocast, whose copies of the weights could not be recognised.
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


# Torch's counter does not see the products of the fused transformer layer, or of flash attention on a CPU.
_PLAIN_ATTENTION = SharedContext(lambda: sdpa_kernel(SDPBackend.MATH))


def _where(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor starts in memory: the same for a weight and its transpose."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


# Small weights

Numbers = np.ndarray[Any, np.dtype[Any]]


@torch.no_grad()
def epsilon_sparsity(model: nn.Module, epsilon: float, *, layers: str | Iterable[str] = "*") -> float:
    """The share of weights of convolutions and linear layers with |w| ≤ ε; with ε = 0 the sparsity.

    It depends on the scale of the weights: before a batch norm all of them can be made smaller than any ε without
    changing what the network computes. `layers`: names or globs.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon={epsilon!r}: need a number of at least 0")
    weights = [weight_of(module) for module in _chosen(model, layers).values()]
    small = torch.stack([(weight.abs() <= epsilon).sum().cpu() for weight in weights]).sum()
    return int(small) / sum(weight.numel() for weight in weights)


@torch.no_grad()
def weight_histogram(
    model: nn.Module,
    bins: int = 100,
    limit: float | None = None,
    *,
    layers: str | Iterable[str] = "*",
    masked: bool = False,
) -> tuple[Numbers, Numbers, int]:
    """A histogram over [−limit, limit] of the weights of convolutions and linear layers; limit=None: the largest |w|.

    Counts (bins,) and edges (bins + 1,) as NumPy's, and the number of weights beyond the limit. Masked weights are left
    out unless `masked`. `layers`: names or globs.
    """
    whole_number(bins, "bins", least=1)
    if limit is not None:
        positive(limit, "limit", why="None takes the largest weight")
    parts = []
    for module in _chosen(model, layers).values():
        weight = weight_of(module).detach()
        parts.append((weight.flatten() if masked else weight[_mask(module)]).double().cpu())
    values = torch.cat(parts).numpy()
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} weights of the model are NaN or infinite")
    if limit is None:
        limit = float(np.abs(values).max(initial=0))
        if limit == 0:
            raise ValueError("all weights are 0: a histogram needs a limit")
    counts, edges = np.histogram(values, bins, (-limit, limit))
    return counts, edges, int(len(values) - counts.sum())


class WeightHistograms:
    """Histograms during training: `fit(…, after_epoch=histograms.record)`, or `record(step)` in any loop.

    All have the same bins, so `limit` is needed; `counts` is (steps, bins). `layers` and `masked` as for
    `weight_histogram`.
    """

    def __init__(self, model: nn.Module, bins: int = 100, limit: float = 0.5, **options: Any) -> None:
        self._histogram = partial(weight_histogram, model, bins, limit, **options)
        self.edges = self._histogram()[1]
        self.counts = np.zeros((0, bins), dtype=np.int64)
        self.steps: list[int] = []
        self.outside: list[int] = []  # the number of weights beyond the limit at each step

    def record(self, step: int) -> None:
        counts, _, outside = self._histogram()
        self.steps.append(step)
        self.outside.append(outside)
        self.counts = np.concatenate([self.counts, counts[None]])


def _chosen(model: nn.Module, layers: str | Iterable[str]) -> dict[str, nn.Module]:
    known = maskable(model)
    chosen = _named_layers(known, layers, "layers")
    return {name: module for name, module in known.items() if name in chosen}

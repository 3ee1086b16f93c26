"""Masks made at random or by what torch.nn.utils.prune would prune, and masks that change while a network trains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import prune

from ...checks import one_of, whole_number
from .masks import Masks, before_update, listed, mask_of, maskable, new_masks, shapes_of, weight_of

# How many weights each layer keeps: uniform or by Erdős–Rényi–Kernel, to the very number asked for

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
    one_of(how, "how", ("erk", "uniform"))
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
    masks = {}
    for name, shape in shapes_of(layers).items():
        mask = torch.zeros(math.prod(shape), dtype=torch.bool)
        mask[torch.randperm(len(mask), generator=generator)[: counts[name]]] = True
        masks[name] = mask.view(shape)
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
    one_of(how, "how", ("magnitude", "magnitude_of_layer", "channels"))
    if odd := [name for name, module in layers.items() if bool(weight_of(module).isnan().any())]:
        raise ValueError(f"weights of {listed(odd)} are NaN, so none is the smallest: was the training cut short?")
    bare = {name: _bare(module) for name, module in layers.items()}
    if how == "magnitude":
        together = torch.cat([_mask(each).flatten() for each in bare.values()])
        amount = _further(together, sparsity, "weights of the model")
        pairs = [(each, "weight") for each in bare.values()]
        prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=amount)
    for name, each in bare.items() if how != "magnitude" else ():
        if how == "magnitude_of_layer":
            prune.l1_unstructured(each, "weight", _further(_mask(each), sparsity, f"weights of {name!r}"))
            continue
        transposed = isinstance(layers[name], _ConvTransposeNd)
        if transposed and layers[name].groups > 1:  # type: ignore[operator]
            raise ValueError(
                f"{name!r} is a transposed convolution in groups: its weight has no axis of output channels; name it "
                "in dense"
            )
        channels = _mask(each).movedim(int(transposed), 0).flatten(1).any(1)
        if not kept_of(len(channels), sparsity):
            raise ValueError(
                f"sparsity {sparsity} leaves none of the {len(channels)} channels of {name!r}: name it in dense"
            )
        amount = _further(channels, sparsity, f"channels of {name!r}")
        prune.ln_structured(each, "weight", amount, n=1, dim=int(transposed))
    return new_masks(layers, {name: _mask(each) for name, each in bare.items()})


def _bare(module: nn.Module) -> nn.Module:
    """A weight and its mask alone: torch prunes this in place of the layer, which keeps its parameter."""
    bare = nn.Module()
    bare.weight = nn.Parameter(weight_of(module).detach(), requires_grad=False)
    own = mask_of(module)
    if own is not None:
        prune.custom_from_mask(bare, "weight", own.to(bare.weight.dtype))
    return bare


def _mask(bare: nn.Module) -> Tensor:
    mask, weight = mask_of(bare), bare.weight
    assert isinstance(weight, Tensor)
    return torch.ones_like(weight, dtype=torch.bool) if mask is None else mask != 0


def _further(kept: Tensor, sparsity: float, what: str) -> int:
    """How many of these still have to go."""
    gone, wanted = int((~kept).sum()), kept.numel() - kept_of(kept.numel(), sparsity)
    if wanted < gone:
        raise ValueError(
            f"{gone} {what} are pruned already, more than the {wanted} of sparsity {sparsity}: pruning brings none "
            "back; ask for a higher sparsity"
        )
    return wanted - gone


# Masks that change while a network trains: small weights are dropped, as many others grow (RigL, SET)

Growth = Literal["gradient", "random"]


class Regrow:
    """Now and then drops a layer's smallest weights and grows as many: `with RigL(masks, steps).hold(optimiser)`.

    `how`: those with the largest gradient grow ("gradient": RigL, Evci et al. 2020) or random ones ("random": SET,
    Mocanu et al. 2018). At every `every`-th of the optimiser's `steps`, before `until` × steps, the share
    `fraction` / 2 × (1 + cos(π step / (until × steps))) of a layer's kept weights is dropped, rounded down, and as many
    of those that are not kept grow; one that was dropped may grow back, and then keeps its weight. So a layer's density
    never changes. The step of an update trains the weights that stay; new ones are 0 after it, with no momentum, and
    train from the next step on. An update whose gradients are not all finite is left out.

    It is used wherever masks are (`hold`, `fit(…, masks=)`); the masks themselves must not be held beside it.
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
            raise ValueError(f"fraction={fraction!r}: the share of kept weights the first update changes, in (0, 1)")
        if not 0 < until <= 1:
            raise ValueError(f"until={until!r}: the share of the steps in which masks change, above 0 and up to 1")
        self.masks, self.steps, self.how, self.every = masks, steps, how, every
        self.fraction, self.until, self.seed = fraction, until, seed
        self.step = 0  # of the optimiser, so far
        self.last: list[dict[str, Any]] = []  # of the last update: layer, dropped, and how many of the grown are new

    @property
    def due(self) -> bool:
        """Whether the next step changes the masks: such a step cannot be recorded in a CUDA graph."""
        step = self.step + 1
        return step % self.every == 0 and step < self.until * self.steps

    def fraction_at(self, step: int) -> float:
        """The share of kept weights that an update at this step drops."""
        return self.fraction / 2 * (1 + math.cos(math.pi * step / (self.until * self.steps)))

    @contextmanager
    def hold(self, optimiser: torch.optim.Optimizer) -> Iterator[Regrow]:
        """As `Masks.hold`, and the masks change when an update is due."""
        first = before_update(optimiser, partial(self._before_step, optimiser))  # before gradients are masked
        try:
            with self.masks.hold(optimiser):
                yield self
        finally:
            first.remove()

    def settings(self) -> dict[str, Any]:
        """What was asked for, as far as a checkpoint can compare it."""
        kept = ("steps", "how", "every", "fraction", "until", "seed")
        return {name: getattr(self, name) for name in kept}

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint needs beside the model, which has the masks."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step = int(state["step"])

    def __repr__(self) -> str:
        return f"<Regrow by {self.how} at step {self.step} of {self.steps}: {self.masks!r}>"

    def _before_step(self, optimiser: torch.optim.Optimizer) -> None:
        if self.due:
            self._update(optimiser)
        self.step += 1

    @torch.no_grad()
    def _update(self, optimiser: torch.optim.Optimizer) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "masks change in this step, which a CUDA graph cannot record: take steps that are `due` apart"
            )
        trained = {id(p) for group in optimiser.param_groups for p in group["params"] if p.grad is not None}
        layers = [layer for layer in self.masks if id(self.masks.weight(layer)) in trained]
        gradients = {layer: _gradient(self.masks.weight(layer)) for layer in layers}
        if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            return
        entropy = np.random.SeedSequence([self.seed, self.step]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(entropy))
        share = self.fraction_at(self.step + 1)
        self.last = []
        for layer, gradient in gradients.items():
            # Drawn on the CPU: the same on every device.
            drawn = (
                torch.rand(gradient.shape, generator=generator, dtype=torch.float64) if self.how == "random" else None
            )
            self._change(layer, share, gradient.abs() if drawn is None else drawn.to(gradient.device))
        self.masks.clear(optimiser)

    def _change(self, layer: str, share: float, score: Tensor) -> None:
        mask, weight = self.masks[layer], self.masks.weight(layer)
        before = mask.flatten().clone()  # the mask itself is about to change
        count = math.floor(share * int(before.sum()))
        dropped = weight.abs().flatten().masked_fill(~before, math.inf).topk(count, largest=False).indices
        after = before.index_fill(0, dropped, False)
        grown = score.flatten().masked_fill(after, -1).topk(count).indices
        after = after.index_fill(0, grown, True)
        _gradient(weight).mul_(mask)  # what is new waits for the next step
        self.masks.set(layer, after.view(mask.shape))
        self.last.append({"layer": layer, "dropped": count, "new": int((after & ~before).sum())})


RigL = partial(Regrow, how="gradient")
SET = partial(Regrow, how="random")


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad

"""How a network is trained: a recipe with its optimiser and schedule, and the augmentation of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from ..capture.batches import explain_types, types_of
from ..capture.restore import evaluating
from ..checks import one_of, positive, whole_number
from ..data import Attack
from ..data.draws import derived, uniforms
from ..data.images import to_float
from ..data.shifts import open_attack

Prepare = Callable[[Tensor], Tensor]
Schedule = Literal["one_cycle", "cosine", "steps", "constant"]
AUGMENT_SEED = 2**32  # the number of the seed derived for crops: attacks use small ones


@dataclass(frozen=True)
class Augment:
    """Random crops of images padded with black, and random mirror images, made on the images' device.

    `draws` makes the random numbers of a whole epoch; the images of a batch then depend only on the padded images,
    their indices and their draws.
    """

    pad: int = 4
    mirror: bool = True

    def draws(self, count: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
        """Top, left and mirrored (count, 3) for each position in an epoch; the same on every device."""
        places = torch.arange(count, device=device)
        drawn = uniforms(derived(derived(seed, AUGMENT_SEED), epoch), places, 3)
        many = torch.tensor([2 * self.pad + 1] * 2 + [2 if self.mirror else 1], device=device)
        return (drawn * many).long()

    def __call__(self, padded: Tensor, index: Tensor, draws: Tensor) -> Tensor:
        """Crop and mirror the images of these indices of a padded set, in a single gather."""
        height, width = (size - 2 * self.pad for size in padded.shape[-2:])
        device = padded.device
        top, left, mirrored = draws.unsqueeze(-1).unbind(1)  # each (batch, 1)
        along = torch.arange(width, device=device)
        columns = left + torch.where(mirrored == 1, width - 1 - along, along)
        rows = top + torch.arange(height, device=device)
        channels = torch.arange(padded.shape[1], device=device)[None, :, None, None]
        return padded[index[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None, :]]

    def padded(self, images: Tensor) -> Tensor:
        return functional.pad(images, [self.pad] * 4)


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: `fit(model, images, labels, recipe=Recipe(epochs=3, rate=0.1), seed=0)`.

    `optimiser`: "adam", with decoupled weight `decay`, or "sgd" with Nesterov `momentum` (0: plain). `schedule`: the
    rate rises and falls once ("one_cycle"), falls by a half "cosine" to 0, by a tenth in "steps" at the middle and at
    three quarters, or is "constant"; with `warmup` it first rises, over that many epochs. `clip` is the largest norm of
    the gradients, of all parameters together. `average` (0.999) returns the running average of the weights and of the
    statistics of batch norms, instead of the last ones.

    `attack` ("pgd", "fgsm(epsilon=0.1)") changes every batch before its step, against the current model and before
    `prepare`; the clean images are not used (Madry et al. 2017). `augment` crops and mirrors. `prepare` is applied to
    images last (a normalisation). `mixed` computes in bfloat16 with channels last, much faster on a recent GPU; the
    weights stay float32. `compiled` trains through torch.compile.
    """

    epochs: int
    batch: int = 64
    rate: float = 5e-3
    optimiser: Literal["adam", "sgd"] = "adam"
    momentum: float = 0.9
    decay: float = 0.0
    schedule: Schedule = "one_cycle"
    warmup: float = 0.0
    clip: float | None = None
    average: float | None = None
    attack: str | Attack | None = None
    augment: Augment | None = None
    prepare: Prepare | None = None
    mixed: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        whole_number(self.epochs, "epochs", least=1)
        whole_number(self.batch, "batch", least=1, why="the number of images of a step")
        positive(self.rate, "rate")
        one_of(self.optimiser, "optimiser", ("adam", "sgd"))
        one_of(self.schedule, "schedule", ("one_cycle", "cosine", "steps", "constant"))
        if self.clip is not None:
            positive(self.clip, "clip", why="the largest norm of the gradients; None does not clip")
        if self.average is not None and not 0 < self.average < 1:
            raise ValueError(f"average={self.average!r}: need the share of the average kept by a step, between 0 and 1")
        if self.schedule == "one_cycle" and self.warmup:
            raise ValueError("the one-cycle schedule has its own rise: use warmup with 'cosine' or 'constant'")

    def refuse(self, who: str, *names: str) -> None:
        """Raise if one of these fields, which `who` does not support, is not at its default."""
        defaults = {field.name: field.default for field in fields(self)}
        if changed := [name for name in names if getattr(self, name) != defaults[name]]:
            raise ValueError(f"{who} cannot train with {changed[0]}={getattr(self, changed[0])!r}: use fit for that")

    def steps(self, count: int) -> int:
        """The number of steps of an epoch over `count` images; the last batch may be short."""
        return -(-count // self.batch)

    def make_optimiser(
        self, parameters: Iterable[Tensor], *, fused: bool | None = None, capturable: bool = False
    ) -> Optimizer:
        """Make the optimiser. `capturable`: a CUDA graph can record its step; the rate is a tensor for schedules."""
        learnt = list(parameters)
        rate = torch.tensor(self.rate, device=learnt[0].device) if capturable else self.rate
        optimiser: Optimizer
        if self.optimiser == "adam":
            optimiser = torch.optim.AdamW(learnt, rate, weight_decay=self.decay, fused=fused, capturable=capturable)
        else:
            options: dict[str, Any] = {"weight_decay": self.decay, "nesterov": self.momentum > 0, "fused": fused}
            optimiser = torch.optim.SGD(learnt, rate, self.momentum, **options)
        for group in optimiser.param_groups:
            group["initial_lr"] = self.rate  # a number: schedules would wait for a GPU to read a tensor
        return optimiser

    def make_schedule(self, optimiser: Optimizer, an_epoch: int) -> LRScheduler:
        """Make the schedule of the rate, for epochs of `an_epoch` steps."""
        steps, warmup = self.epochs * an_epoch, round(self.warmup * an_epoch)
        if not 0 <= warmup < steps:
            raise ValueError(f"a warm-up of {warmup} steps does not fit into {steps} steps of training")
        if self.schedule == "one_cycle":
            # The cycle would give plain SGD a momentum.
            plain = any(group.get("momentum") == 0 for group in optimiser.param_groups)
            return OneCycleLR(optimiser, self.rate, total_steps=steps, cycle_momentum=not plain)

        def part(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            if self.schedule == "cosine":
                return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
            # A tenth from the middle on and a hundredth in the last quarter, as for residual networks on CIFAR.
            return 0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps)) if self.schedule == "steps" else 1.0

        return LambdaLR(optimiser, part)

    def rates(self, an_epoch: int) -> Tensor:
        """The rate of every step in advance, for steps that are recorded."""
        if self.schedule == "one_cycle" and self.momentum > 0:
            raise ValueError("recorded steps cannot move the momentum, as the one-cycle schedule does: use 'cosine'")
        optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], self.rate)
        schedule = self.make_schedule(optimiser, an_epoch)
        rates = torch.empty(self.epochs * an_epoch)
        optimiser.step()  # schedules expect the optimiser to step first
        for step in range(len(rates)):
            rates[step] = optimiser.param_groups[0]["lr"]
            if step + 1 < len(rates):
                schedule.step()
        return rates

    def padded(self, images: Tensor) -> Tensor:
        """The images as `augment` takes them."""
        return images if self.augment is None else self.augment.padded(images)

    def prepared(self, x: Tensor) -> Tensor:
        """A batch as the model takes it."""
        x = floats(x, self.prepare)
        return x.contiguous(memory_format=torch.channels_last) if self.mixed else x

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if self.mixed else nullcontext()

    def opened_attack(self) -> Attack | None:
        return None if self.attack is None else open_attack(self.attack)


def floats(x: Tensor, prepare: Prepare | None = None) -> Tensor:
    """Images in floating point (uint8 is divided by 255), then prepared."""
    x = to_float(x) if x.dtype == torch.uint8 else x
    return x if prepare is None else prepare(x)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients."""
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learnt:
        raise ValueError("nothing to train: no parameter of the model requires gradients")
    return learnt


def check_data(images: Any, labels: Any) -> None:
    for name, value in (("images", images), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} are a {type(value).__name__}: torch.as_tensor({name}) makes a tensor of them")
    if not len(images):
        raise ValueError(f"there is nothing to learn from: images of shape {tuple(images.shape)}")
    if len(images) != len(labels):
        raise ValueError(f"need one label per image, got {len(images)} images and {len(labels)} labels")


@torch.no_grad()
def check_types(model: nn.Module, images: Tensor, recipe: Recipe) -> None:
    """Raise if the model does not take images of this type; if the types differ, one image is tried."""
    x = floats(images[:1])
    if x.dtype in types_of(model):
        return
    try:
        with evaluating(model), torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.mixed):
            model(floats(x, recipe.prepare))
    except RuntimeError as error:
        explain_types(error, model, [x], "images")

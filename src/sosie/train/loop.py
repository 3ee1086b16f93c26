"""A short loop that trains an image classifier on data held in memory, on the device where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.attacks import Attack, open_attack
from ..progress import track
from .adversarial import Attacked, Prepare, floats
from .checks import check_epochs, check_types

Schedule = Literal["one_cycle", "constant"]
LOOKS = 50  # steps between looks at the losses: each look waits for the device


@dataclass(frozen=True)
class Augment:
    """Random crops of images padded with black, and random mirror images, made on the images' own device."""

    pad: int = 4
    mirror: bool = True

    def __call__(self, padded: Tensor, index: Tensor, generator: torch.Generator) -> Tensor:
        """The images of these indices from a set that was padded: crop and mirror in a single gather."""
        size, count, device = padded.shape[-1] - 2 * self.pad, len(index), padded.device
        top, left = torch.randint(0, 2 * self.pad + 1, (2, count, 1), generator=generator, device=device)
        along = torch.arange(size, device=device).expand(count, size)
        if self.mirror:
            flipped = torch.rand(count, 1, generator=generator, device=device) < 0.5
            along = torch.where(flipped, size - 1 - along, along)
        rows = top + torch.arange(padded.shape[-2] - 2 * self.pad, device=device)
        channels = torch.arange(padded.shape[1], device=device)[None, :, None, None]
        return padded[index[:, None, None, None], channels, rows[:, None, :, None], (left + along)[:, None, None, :]]

    def padded(self, images: Tensor) -> Tensor:
        return functional.pad(images, [self.pad] * 4)


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    seed: int,
    batch: int = 64,
    rate: float = 5e-3,
    optimiser: Literal["adam", "sgd"] = "adam",
    momentum: float = 0.9,
    decay: float = 0.0,
    schedule: Schedule = "one_cycle",
    attack: str | Attack | None = None,
    augment: Augment | None = None,
    prepare: Prepare | None = None,
    mixed: bool = False,
    penalty: Callable[[], Tensor] | None = None,
    after_epoch: Callable[[int], None] | None = None,
    task: str = "training",
) -> nn.Module:
    """Train what requires gradients; the order of the images, and how they are changed, come from `seed` alone.

    Images are floating point as the model takes them, or uint8, which become [0, 1] batch by batch and go through
    `prepare` (a normalisation). Model and images are on one device. `decay` is the weight decay (with Adam, apart
    from the gradient); SGD has Nesterov `momentum` (0: plain). `schedule`: the rate rises and falls once ("one_cycle"),
    or is "constant". `attack` ("pgd", "fgsm(epsilon=0.1)") changes every batch before its step, on the model as it is
    then and before `prepare`; the clean images are not shown. `mixed` computes in bfloat16 with channels last: much
    faster on a recent GPU, and the weights stay float32. `penalty()` is called after each forward and added to the
    loss. `after_epoch` is called with 0 before training and with each epoch's number after it; it may look at the model
    in any mode, and must leave its weights. A loss that is no number ends the training.
    """
    check_epochs(epochs)
    check_types(model, images, prepare=prepare, mixed=mixed)
    device = images.device
    an_epoch = -(-len(images) // batch)
    steps = epochs * an_epoch
    stepper = optimiser_of(_trained(model), optimiser, rate, decay, momentum)
    plan = schedule_of(stepper, schedule, rate, steps)
    attacked = None if attack is None else Attacked(model, open_attack(attack), prepare, seed)
    changes = torch.Generator(device).manual_seed(seed)
    source = augment.padded(images) if augment else images
    if mixed:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    losses = _Losses(an_epoch, device)
    _tell(after_epoch, 0, model.train())
    for step, index in enumerate(track(shuffled(len(images), epochs, batch, seed, device), task, steps, "steps"), 1):
        x = augment(source, index, changes) if augment else source[index]
        with _precision(mixed, device):
            if attacked is not None:
                x = attacked(x, labels[index], index)
            loss = functional.cross_entropy(model(_prepared(x, prepare, mixed)), labels[index])
        if penalty is not None:
            loss = loss + penalty()
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        plan.step()
        losses.note(loss, step)
        if step % an_epoch == 0:
            _tell(after_epoch, step // an_epoch, model)
    return model.eval()


@torch.no_grad()
def accuracy(
    model: nn.Module, images: Tensor, labels: Tensor, *, batch: int = 500, prepare: Prepare | None = None
) -> float:
    """Share of images whose largest output is their label."""
    right = sum(
        int((model(_prepared(x, prepare)).argmax(1) == y).sum())
        for x, y in zip(images.split(batch), labels.split(batch), strict=True)
    )
    return right / len(images)


def shuffled(count: int, epochs: int, batch: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """The numbers of the images of each batch, every epoch in a new order."""
    order = torch.Generator().manual_seed(seed)  # on the CPU: the same order on every device
    for _ in range(epochs):
        yield from torch.randperm(count, generator=order).to(device).split(batch)


def optimiser_of(
    parameters: Iterable[Tensor], name: str, rate: float, decay: float, momentum: float, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.AdamW(parameters, rate, weight_decay=decay, fused=fused)
    if name == "sgd":
        nesterov = momentum > 0
        return torch.optim.SGD(parameters, rate, momentum, weight_decay=decay, nesterov=nesterov, fused=fused)
    raise ValueError(f"no optimiser is called {name!r}; there are 'adam' and 'sgd'")


def schedule_of(
    stepper: torch.optim.Optimizer, name: str, rate: float, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    if name == "one_cycle":
        # The cycle would give plain SGD a momentum.
        plain = any(group.get("momentum") == 0 for group in stepper.param_groups)
        return torch.optim.lr_scheduler.OneCycleLR(stepper, rate, total_steps=steps, cycle_momentum=not plain)
    if name == "constant":
        return torch.optim.lr_scheduler.ConstantLR(stepper, factor=1.0)
    raise ValueError(f"no schedule is called {name!r}; there are 'one_cycle' and 'constant'")


class _Losses:
    """Finds the first loss that is no number, without waiting for the device at every step."""

    def __init__(self, an_epoch: int, device: torch.device) -> None:
        self._an_epoch = an_epoch
        self._bad = torch.zeros((), dtype=torch.long, device=device)  # the first such step; 0: none yet

    def note(self, loss: Tensor, step: int) -> None:
        first = ~torch.isfinite(loss.detach()) & (self._bad == 0)
        self._bad = torch.where(first, step, self._bad)
        if (step % LOOKS == 0 or step % self._an_epoch == 0) and (bad := int(self._bad)):
            raise ValueError(
                f"the loss of step {bad} (epoch {-(-bad // self._an_epoch)}) is NaN or infinite: look for such values "
                "in the images, else take a lower rate or a smaller penalty"
            )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise ValueError("nothing to train: no parameter of the model requires gradients")
    return found


def _tell(after_epoch: Callable[[int], None] | None, epoch: int, model: nn.Module) -> None:
    if after_epoch is not None:
        after_epoch(epoch)
        model.train()


def _prepared(x: Tensor, prepare: Prepare | None, mixed: bool = False) -> Tensor:
    x = floats(x)
    x = prepare(x) if prepare else x
    return x.contiguous(memory_format=torch.channels_last) if mixed else x


def _precision(mixed: bool, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()

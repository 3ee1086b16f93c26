"""A short loop that trains an image classifier on data held in memory, on the device where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from ..data.attacks import Attack, open_attack
from ..progress import track
from .adversarial import Attacked, Prepare
from .augment import Augment
from .schedules import Schedule, optimiser_of, schedule_of
from .training import Holds, Training, prepared, trained

LOOKS = 50  # steps between looks at the losses: each look waits for the device


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
    warmup: float = 0.0,
    clip: float | None = None,
    attack: str | Attack | None = None,
    augment: Augment | None = None,
    prepare: Prepare | None = None,
    mixed: bool = False,
    compiled: bool = False,
    penalty: Callable[[], Tensor] | None = None,
    masks: Holds | None = None,
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
    device = images.device
    an_epoch = -(-len(images) // batch)
    steps = epochs * an_epoch
    stepper = optimiser_of(trained(model), optimiser, rate, decay, momentum)
    plan = schedule_of(stepper, schedule, rate, steps, round(warmup * an_epoch))
    attacked = None if attack is None else Attacked(model, open_attack(attack), prepare, seed)
    training = Training(
        model,
        augment.padded(images) if augment else images,
        labels,
        stepper=stepper,
        augment=augment,
        prepare=prepare,
        mixed=mixed,
        compiled=compiled,
        attack=attacked,
        penalty=penalty,
        masks=masks,
        clip=clip,
    )
    _tell(after_epoch, 0, model.train())
    with training:
        batches = shuffled(len(images), epochs, batch, seed, device, augment)
        for step, (index, draws) in enumerate(track(batches, task, steps, "steps"), 1):
            training.step(index, draws)
            plan.step()
            if step % LOOKS == 0 or step % an_epoch == 0:
                training.look(an_epoch)
            if step % an_epoch == 0:
                _tell(after_epoch, step // an_epoch, model)
    return model.eval()


@torch.no_grad()
def accuracy(
    model: nn.Module, images: Tensor, labels: Tensor, *, batch: int = 500, prepare: Prepare | None = None
) -> float:
    """Share of images whose largest output is their label."""
    right = sum(
        int((model(prepared(x, prepare)).argmax(1) == y).sum())
        for x, y in zip(images.split(batch), labels.split(batch), strict=True)
    )
    return right / len(images)


def shuffled(
    count: int, epochs: int, batch: int, seed: int, device: torch.device, augment: Augment | None = None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The numbers of the images of each batch, every epoch in a new order, and the draws of their changes."""
    order = torch.Generator().manual_seed(seed)  # on the CPU: the same order on every device
    for epoch in range(epochs):
        batches = torch.randperm(count, generator=order).to(device).split(batch)
        if augment is None:
            yield from ((index, None) for index in batches)
        else:
            yield from zip(batches, augment.draws(count, seed, epoch, device).split(batch), strict=True)


def _tell(after_epoch: Callable[[int], None] | None, epoch: int, model: nn.Module) -> None:
    if after_epoch is not None:
        after_epoch(epoch)
        model.train()

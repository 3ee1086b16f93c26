"""A short loop that trains an image classifier on data held in memory, on the device where they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..data.attacks import Attack, open_attack
from ..progress import track
from .adversarial import Attacked, Prepare
from .augment import Augment
from .average import Average
from .checks import check_data, check_epochs, check_types
from .resume import Saved, digest, named, rewind
from .schedules import Schedule, optimiser_of, schedule_of
from .training import Holds, Training, prepared, trained

PLAIN = (  # settings that are numbers or text
    *("epochs", "seed", "batch", "rate", "optimiser", "momentum", "decay", "schedule", "warmup", "average", "clip"),
    *("mixed", "compiled"),
)
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
    average: float | None = None,
    clip: float | None = None,
    attack: str | Attack | None = None,
    augment: Augment | None = None,
    prepare: Prepare | None = None,
    mixed: bool = False,
    compiled: bool = False,
    penalty: Callable[[], Tensor] | None = None,
    masks: Holds | None = None,
    after_epoch: Callable[[int], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    task: str = "training",
) -> nn.Module:
    """Train what requires gradients; the order of the images, and how they are changed, come from `seed` alone.

    Images are floating point as the model takes them, or uint8, which become [0, 1] batch by batch and go through
    `prepare` (a normalisation). Model and images are on one device. `decay` is the weight decay (with Adam, apart
    from the gradient); SGD has Nesterov `momentum` (0: plain). `schedule`: the rate rises and falls once ("one_cycle"),
    falls by half a "cosine" to 0, or is "constant"; with `warmup` it first rises, over so many epochs. `clip` shortens
    gradients to this length. `average` (0.999) returns the running average of the weights, and of the statistics of
    batch norms, in place of the last ones.

    `attack` ("pgd", "fgsm(epsilon=0.1)") changes every batch before its step, on the model as it is then and before
    `prepare`; the clean images are not shown. `mixed` computes in bfloat16 with channels last: much faster on a recent
    GPU, and the weights stay float32. `compiled` trains through torch.compile. `penalty()` is called after each forward
    and added to the loss. `masks`: those that `masks.hold(optimiser)` makes the steps respect.

    `after_epoch` is called with 0 before training and with each epoch's number after it; it may look at the model
    in any mode, and must leave its weights. `checkpoint`: a .safetensors file, written after every `save_every` epochs
    and the last; where it is there already, training goes on from it. A loss that is no number ends the training.
    """
    given = dict(locals())
    check_epochs(epochs)
    check_data(images, labels, batch)
    check_types(model, images, prepare=prepare, mixed=mixed)
    if isinstance(save_every, bool) or not isinstance(save_every, int) or save_every < 1:
        raise ValueError(f"save_every={save_every!r}: 1 for a checkpoint after every epoch, 5 after every fifth")
    an_epoch = -(-len(images) // batch)
    stepper = optimiser_of(trained(model), optimiser, rate, decay, momentum)
    plan = schedule_of(stepper, schedule, rate, epochs * an_epoch, round(warmup * an_epoch))
    training = Training(
        model,
        augment.padded(images) if augment else images,
        labels,
        stepper=stepper,
        augment=augment,
        prepare=prepare,
        mixed=mixed,
        compiled=compiled,
        attack=None if attack is None else Attacked(model, open_attack(attack), prepare, seed),
        penalty=penalty,
        masks=masks,
        clip=clip,
    )
    averaged = None if average is None else Average(model, average)  # of the weights as Training lays them out
    with training:
        saved = None if checkpoint is None else Saved(checkpoint, model, _parts(training, plan, averaged), _said(given))
        first = _begun(training, saved, after_epoch, an_epoch)
        batches = shuffled(len(images), range(first, epochs), batch, seed, images.device, augment)
        tracked = track(batches, task, (epochs - first) * an_epoch, "steps")
        for epoch in _epochs(training, plan, averaged, tracked, first, an_epoch):
            _tell(after_epoch, epoch, model)
            if saved is not None and (epoch % save_every == 0 or epoch == epochs):
                saved.save(epoch)
    if averaged is not None:
        averaged.put_into(model, masked=masks is not None)
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
    count: int, epochs: range, batch: int, seed: int, device: torch.device, augment: Augment | None = None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The numbers of the images of each batch, every epoch in a new order, and the draws of their changes."""
    orders = torch.Generator().manual_seed(seed)  # on the CPU: the same order on every device
    for epoch in range(epochs.stop):
        order = torch.randperm(count, generator=orders)
        if epoch < epochs.start:
            continue
        batches = order.to(device).split(batch)
        if augment is None:
            yield from ((index, None) for index in batches)
        else:
            yield from zip(batches, augment.draws(count, seed, epoch, device).split(batch), strict=True)


def _begun(training: Training, saved: Saved | None, after_epoch: Callable[[int], None] | None, an_epoch: int) -> int:
    """The epochs done before, which are not told again."""
    first = 0 if saved is None else saved.load()
    training.model.train()
    training.taken.fill_(first * an_epoch)
    if first:
        rewind(after_epoch, first)
    else:
        _tell(after_epoch, 0, training.model)
    return first


def _epochs(
    training: Training,
    plan: LRScheduler,
    averaged: Average | None,
    batches: Iterable[tuple[Tensor, Tensor | None]],
    first: int,
    an_epoch: int,
) -> Iterator[int]:
    """Train, and stop after each epoch with its number."""
    for step, (index, draws) in enumerate(batches, first * an_epoch + 1):
        training.step(index, draws)
        plan.step()
        if averaged is not None:
            averaged.update()
        if step % LOOKS == 0 or step % an_epoch == 0:
            training.look(an_epoch)
        if step % an_epoch == 0:
            yield step // an_epoch


def _tell(after_epoch: Callable[[int], None] | None, epoch: int, model: nn.Module) -> None:
    if after_epoch is not None:
        after_epoch(epoch)
        model.train()


def _parts(training: Training, plan: LRScheduler, averaged: Average | None) -> dict[str, Any]:
    """What else than the model has a past on which the next step depends."""
    return {
        "optimiser": training.stepper,
        "schedule": plan,
        "average": averaged,
        "attack": training.attack,
        "penalty": training.penalty,
        "masks": training.masks,
    }


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a training, as a checkpoint keeps them to know its own."""
    images, attack, augment = given["images"], given["attack"], given["augment"]
    return {
        **{name: given[name] for name in PLAIN},
        **{name: named(given[name]) for name in ("prepare", "penalty", "masks")},
        "attack": None if attack is None else repr(open_attack(attack)),
        "augment": None if augment is None else repr(augment),
        "device": images.device.type,
        "images": digest(images),
        "labels": digest(given["labels"]),
    }

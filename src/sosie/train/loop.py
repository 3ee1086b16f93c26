"""A short loop that trains an image classifier on data held in memory, on the device where they are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..data import Attack
from ..data.attacks import open_attack
from ..files import DamagedFile, check_writable, read_nested, write_nested
from ..progress import track
from .step import (
    Attacked,
    Augment,
    MaskHolder,
    Prepare,
    Schedule,
    Training,
    check_data,
    check_epochs,
    check_types,
    optimiser_of,
    prepared,
    schedule_of,
    trained,
)

# A running average of a model's numbers while it is trained


class Average:
    """average ← decay × average + (1 − decay) × model after each step, starting with the model after the first.

    Of every number that is floating point: parameters, and the running statistics of batch norms with them. Counts and
    masks are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"average={decay!r}: how much of the average stays at a step, between 0 and 1, or None")
        self._live = _Floats(model)
        self._kept = AveragedModel(self._live, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)

    def update(self) -> None:
        self._kept.update_parameters(self._live)

    @torch.no_grad()
    def put_into(self, model: nn.Module, *, masked: bool = False) -> None:
        """Make the model the average; `masked`: a weight that its mask leaves out is 0, also if it was not always."""
        for live, kept in zip(self._live.buffers(), self._kept.module.buffers(), strict=True):
            live.copy_(kept)
        for module in model.modules() if masked else ():
            mask, weight = getattr(module, "weight_mask", None), module._parameters.get("weight")
            if isinstance(mask, Tensor) and weight is not None:
                weight.mul_(mask)

    def state_dict(self) -> dict[str, Any]:
        return self._kept.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.load_state_dict(state)


class _Floats(nn.Module):
    """The floating-point numbers of a model, in the same memory: a copy of this has none of the model's hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for k, number in enumerate([*model.parameters(), *model.buffers()]):
            if number.is_floating_point():
                self.register_buffer(str(k), number.detach())


# A training that goes on where it was interrupted: everything the next step depends on, in one file

KIND, VERSION = "training", 2


@runtime_checkable
class Stateful(Protocol):
    """What has a past that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Settled(Protocol):
    """What tells its settings, so that a training with others is known as another."""

    def settings(self) -> dict[str, Any]: ...


class Saved:
    """The checkpoint of one training: `load()` gives the epoch it goes on from, `save(epoch)` writes the file anew.

    `parts`: optimiser, schedule, penalty …; those without a `state_dict` have no past to keep. The numbers of the
    model, masks among them, are kept whole, and so is the state of torch's random numbers (dropout). `settings` must
    be those of the file.
    """

    def __init__(
        self, path: str | os.PathLike[str], model: nn.Module, parts: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self.path = Path(path)
        check_writable(self.path)
        self._model = model
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}
        shapes = {name: f"{each.dtype} {tuple(each.shape)}" for name, each in _numbers(model).items()}
        learnt = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        kept = {"model": shapes, "trained": learnt, "with a state": sorted(self._parts), **settings}
        self._about: dict[str, Any] = json.loads(json.dumps(kept))

    def save(self, epoch: int) -> None:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        whole = {"epoch": epoch, "model": _numbers(self._model), "random": self._random(), **state}
        write_nested(self.path, KIND, VERSION, self._about, whole)

    @torch.no_grad()
    def load(self) -> int:
        """The epochs done, 0 where there is no file; model, parts and random numbers are then as they were."""
        if not self.path.exists():
            return 0
        about, state = read_nested(self.path, KIND, VERSION)
        self._check(about)
        try:
            for name, number in _numbers(self._model).items():
                number.copy_(state["model"][name])
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            torch.set_rng_state(state["random"]["cpu"])
            if "cuda" in state["random"]:
                torch.cuda.set_rng_state(state["random"]["cuda"], self._device)
            return int(state["epoch"])
        except KeyError as error:
            raise DamagedFile(f"{self.path} is damaged: it has no {error}") from error

    def _check(self, about: Mapping[str, Any]) -> None:
        different = [
            line
            for name in {**about, **self._about}
            for line in _differences(name, about.get(name), self._about.get(name))
        ]
        if different:
            more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
            raise ValueError(
                f"{self.path} is the checkpoint of another training: {'; '.join(different[:5])}{more}. Name another "
                "file, or give what it was begun with"
            )

    @property
    def _device(self) -> torch.device:
        return next(iter(_numbers(self._model).values())).device

    def _random(self) -> dict[str, Tensor]:
        found = {"cpu": torch.get_rng_state()}
        return {**found, "cuda": torch.cuda.get_rng_state(self._device)} if self._device.type == "cuda" else found


def named(thing: Any) -> Any:
    """What can be compared of an object that shapes the training: its name, and its settings where it tells them."""
    if thing is None or isinstance(thing, str):
        return thing
    if isinstance(thing, Settled):
        return {"kind": type(thing).__name__, **thing.settings()}
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def digest(tensor: Tensor) -> str:
    """Type, shape and numbers in a few letters."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def rewind(after_epoch: Callable[[int], None] | None, epoch: int) -> None:
    """A recorder may have written epochs that are now trained again."""
    owner = getattr(after_epoch, "__self__", None)
    if callable(resume := getattr(owner, "resume", None)):
        resume(epoch)


def _numbers(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter and buffer once, also those that a state dict leaves out."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def _differences(name: str, there: Any, here: Any) -> list[str]:
    if there == here:
        return []
    if isinstance(there, dict) and isinstance(here, dict):
        return [
            line for key in {**there, **here} for line in _differences(f"{name} {key}", there.get(key), here.get(key))
        ]
    return [f"{name} is {_setting_text(there)} in the file and {_setting_text(here)} now"]


def _setting_text(value: Any) -> str:
    if isinstance(value, dict) and "kind" in value:
        return f"{value['kind']}({', '.join(f'{name}={each!r}' for name, each in value.items() if name != 'kind')})"
    return "not there" if value is None else str(value)


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
    masks: MaskHolder | None = None,
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
        saved = (
            None
            if checkpoint is None
            else Saved(checkpoint, model, _parts(training, plan, averaged), _settings_of(given))
        )
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


def _settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
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

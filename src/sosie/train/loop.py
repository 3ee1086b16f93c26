"""A short loop that trains an image classifier on data held in memory, on the device of the data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..checks import listed, whole_number
from ..data.draws import derived
from ..files import DamagedFile, check_writable, read_nested, write_nested
from ..progress import track
from .recipe import Augment, Prepare, Recipe, check_data, check_types, floats, trainable

KIND, VERSION = "training", 2  # of the checkpoint
LOOKS = 50  # steps between looks at the losses: each look waits for the device


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    recipe: Recipe,
    seed: int,
    penalty: Callable[[], Tensor] | None = None,
    masks: Any = None,
    after_epoch: Callable[[int], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    task: str = "training",
) -> nn.Module:
    """Train the parameters that require gradients by a recipe; `seed` decides the order and augmentation of the images.

    Images are floating point as the model takes them, or uint8, which are divided by 255 batch by batch. Model and
    images are on one device. `penalty()` is called after each forward and added to the loss. `masks`: `Masks` to keep
    during training, or a `Regrow` that changes them.

    `after_epoch` is called with 0 before training and with each epoch's number after it; it may put the model into
    any mode, and must not change its weights. `checkpoint`: a .safetensors file, written every `save_every` epochs and
    after the last; if it exists, training resumes from it. A loss that is NaN or infinite ends the training.
    """
    check_data(images, labels)
    check_types(model, images, recipe)
    whole_number(save_every, "save_every", least=1, why="1 for a checkpoint after every epoch, 5 after every fifth")
    an_epoch = recipe.steps(len(images))
    training = Training(model, recipe.padded(images), labels, recipe, seed=seed, penalty=penalty, masks=masks)
    schedule = recipe.make_schedule(training.optimiser, an_epoch)
    live = _floating_point(model)  # in the memory layout that Training sets
    averaged: AveragedModel | None = None
    if recipe.average is not None:
        averaged = AveragedModel(live, multi_avg_fn=get_ema_multi_avg_fn(recipe.average), use_buffers=True)

    def notify(epoch: int) -> None:
        if after_epoch is not None:
            after_epoch(epoch)
            model.train()

    with training:
        saved, first = None, 0
        if checkpoint is not None:
            parts = {"optimiser": training.optimiser, "schedule": schedule, "average": averaged, "penalty": penalty,
                     "masks": masks, "attack": None if recipe.attack is None else training}  # fmt: skip
            saved = TrainingFile(checkpoint, model, parts, _settings(recipe, seed, images, labels, penalty, masks))
            first = saved.load()
        model.train()
        training.taken.fill_(first * an_epoch)
        if not first:
            notify(0)
        elif callable(resume := getattr(getattr(after_epoch, "__self__", None), "resume", None)):
            resume(first)  # a recorder may have recorded epochs that are now trained again
        batches = shuffled(len(images), range(first, recipe.epochs), recipe.batch, seed, images.device, recipe.augment)
        tracked = track(batches, task, (recipe.epochs - first) * an_epoch, "steps")
        for step, (index, draws) in enumerate(tracked, first * an_epoch + 1):
            training.step(index, draws)
            schedule.step()
            if averaged is not None:
                averaged.update_parameters(live)
            epoch, rest = divmod(step, an_epoch)
            if step % LOOKS == 0 or not rest:
                training.look(an_epoch)
            if not rest:
                notify(epoch)
                if saved is not None and (epoch % save_every == 0 or epoch == recipe.epochs):
                    saved.save(epoch)
    if averaged is not None:
        _put_back(model, live, averaged, masked=masks is not None)
    return model.eval()


def epoch_orders(count: int, seed: int) -> Iterator[Tensor]:
    """The order of `count` images in each epoch, drawn on the CPU so that it is the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randperm(count, generator=generator)


def shuffled(
    count: int, epochs: range, batch: int, seed: int, device: torch.device, augment: Augment | None = None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The indices of the images of each batch, in a new order every epoch, and the draws for their augmentation."""
    for epoch, order in zip(range(epochs.stop), epoch_orders(count, seed), strict=False):
        if epoch < epochs.start:
            continue
        batches = order.to(device).split(batch)
        if augment is None:
            yield from ((index, None) for index in batches)
        else:
            yield from zip(batches, augment.draws(count, seed, epoch, device).split(batch), strict=True)


def _floating_point(model: nn.Module) -> nn.Module:
    """A module of the model's parameters and running statistics, in the same memory, without counts and masks.

    Its copy, the average, has none of the model's hooks.
    """
    numbers = nn.Module()
    for k, number in enumerate([*model.parameters(), *model.buffers()]):
        if number.is_floating_point():
            numbers.register_buffer(str(k), number.detach())
    return numbers


@torch.no_grad()
def _put_back(model: nn.Module, live: nn.Module, averaged: AveragedModel, *, masked: bool) -> None:
    """Write the average into the model; with `masked`, weights that are masked at the end become 0."""
    for number, average in zip(live.buffers(), averaged.module.buffers(), strict=True):
        number.copy_(average)
    for module in model.modules() if masked else ():
        mask, weight = getattr(module, "weight_mask", None), module._parameters.get("weight")
        if isinstance(mask, Tensor) and weight is not None:
            weight.mul_(mask)


@torch.no_grad()
def accuracy(
    model: nn.Module, images: Tensor, labels: Tensor, *, batch: int = 500, prepare: Prepare | None = None
) -> float:
    """The share of images for which the largest output is that of their label."""
    right = sum(
        int((model(floats(x, prepare)).argmax(1) == y).sum())
        for x, y in zip(images.split(batch), labels.split(batch), strict=True)
    )
    return right / len(images)


# One step


class Training(AbstractContextManager["Training"]):
    """A model, its optimiser and its images: `with Training(…) as training: training.step(index, draws)`.

    `images` are padded (`recipe.padded`). Apart from the penalty, nothing in a step waits for the device, draws random
    numbers (an attack does both) or depends on the step's number. `optimiser`: one instead of the recipe's; the
    caller steps the schedule (`recipe.make_schedule`). Gradients are clipped after they are masked.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        recipe: Recipe,
        *,
        seed: int = 0,
        optimiser: Optimizer | None = None,
        penalty: Callable[[], Tensor] | None = None,
        masks: Any = None,
    ) -> None:
        check_data(images, labels)
        if masks is not None and not hasattr(masks, "hold"):
            raise TypeError(f"masks={masks!r}: give masks, such as random_masks(model, 0.9), or a Regrow")
        if recipe.mixed:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model, self.images, self.labels, self.recipe = model, images, labels, recipe
        self.optimiser = recipe.make_optimiser(trainable(model)) if optimiser is None else optimiser
        self.penalty, self.masks = penalty, masks
        self._attack, self._seed = recipe.opened_attack(), seed
        self._attacks = 0  # so far
        self._answer: Callable[[Tensor], Tensor] = torch.compile(model) if recipe.compiled else model
        self._held = ExitStack()
        self.taken = torch.zeros((), dtype=torch.long, device=images.device)  # steps so far
        self.failed = torch.zeros_like(self.taken)  # the first step whose loss is NaN or infinite; 0: none yet

    def __enter__(self) -> Self:
        if self.masks is not None:
            self._held.enter_context(self.masks.hold(self.optimiser))
        if self.recipe.clip is not None:
            # After the hook of the masks: clipping must not count masked gradients.
            self._held.callback(self.optimiser.register_step_pre_hook(self._shorten).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def step(self, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """Train on the images of these indices, augmented by the draws; returns the loss, detached."""
        return self.learn(self.batch(index, draws), self.labels[index], index)

    def batch(self, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """The images of these indices, augmented by the draws."""
        if self.recipe.augment is None:
            return self.images[index]
        if draws is None:
            raise ValueError("the recipe augments images, so a step needs draws: augment.draws makes those of an epoch")
        return self.recipe.augment(self.images, index, draws)

    def learn(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Take one step on these images, as `batch` returns them."""
        with self.recipe.precision(x.device):
            if self._attack is not None:
                x = self._attacked(x, y, index)
            loss = functional.cross_entropy(self._answer(self.recipe.prepared(x)), y)
        if self.penalty is not None:
            loss = loss + self.penalty()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        loss = loss.detach()
        self.taken += 1  # in place, so that a recorded step counts as well
        first = ~torch.isfinite(loss) & (self.failed == 0)
        self.failed.copy_(torch.where(first, self.taken, self.failed))
        return loss

    def look(self, an_epoch: int) -> None:
        """Raise if a loss was NaN or infinite. Waits for the device."""
        if bad := int(self.failed):
            raise ValueError(
                f"the loss of step {bad} (epoch {-(-bad // an_epoch)}) is NaN or infinite: look for such values "
                "in the images, or take a lower rate or a smaller penalty"
            )

    def state_dict(self) -> dict[str, int]:
        """The number of attacks so far: random starts depend on it and the seed alone."""
        return {"steps": self._attacks}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._attacks = state["steps"]

    def _attacked(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        assert self._attack is not None
        seed = derived(self._seed, self._attacks)
        self._attacks += 1
        training = self.model.training
        self.model.eval()  # batch norms must not learn from the attack's steps
        try:
            prepare = self.recipe.prepare
            return self._attack(lambda z: self.model(floats(z, prepare)), floats(x), y, seed=seed, index=index)
        finally:
            self.model.train(training)

    def _shorten(self, optimiser: Optimizer, *_: Any) -> None:
        assert self.recipe.clip is not None
        nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], self.recipe.clip)


class TrainingFile:
    """The checkpoint of one training: `load()` returns the epoch to resume from, `save(epoch)` writes the file.

    It holds everything that the next step depends on: all parameters and buffers (masks among them), the `state_dict`
    of each of the `parts` that has one (optimiser, schedule, penalty …), and torch's random state (for dropout). The
    `settings` must be those of the file.
    """

    def __init__(
        self, path: str | os.PathLike[str], model: nn.Module, parts: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self.path = Path(path)
        check_writable(self.path)
        # Each parameter and buffer once, including those that a state dict leaves out.
        self._numbers = dict([*model.named_parameters(), *model.named_buffers()])
        self._device = next(iter(self._numbers.values())).device
        self._parts = {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}
        shapes = {name: f"{number.dtype} {tuple(number.shape)}" for name, number in self._numbers.items()}
        learnt = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        about = {"model": shapes, "trained": learnt, "with a state": sorted(self._parts), **settings}
        self._about: dict[str, Any] = json.loads(json.dumps(about))

    def save(self, epoch: int) -> None:
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        past = {name: part.state_dict() for name, part in self._parts.items()}
        content = {"epoch": epoch, "model": self._numbers, "random": random, **past}
        write_nested(self.path, KIND, VERSION, self._about, content)

    @torch.no_grad()
    def load(self) -> int:
        """Restore the model, the parts and the random state; returns the epochs done, 0 if there is no file."""
        if not self.path.exists():
            return 0
        about, state = read_nested(self.path, KIND, VERSION)
        names = {**about, **self._about}
        if lines := [line for name in names for line in _differences(name, about.get(name), self._about.get(name))]:
            raise ValueError(
                f"{self.path} is the checkpoint of another training: {listed(lines, separator='; ')}. Name another "
                "file, or use the same settings"
            )
        try:
            for name, number in self._numbers.items():
                number.copy_(state["model"][name])
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            torch.set_rng_state(state["random"]["cpu"])
            if "cuda" in state["random"]:
                torch.cuda.set_rng_state(state["random"]["cuda"], self._device)
            return int(state["epoch"])
        except KeyError as error:
            raise DamagedFile(f"{self.path} is damaged: it has no {error}") from error


def _settings(
    recipe: Recipe, seed: int, images: Tensor, labels: Tensor, penalty: object, masks: object
) -> dict[str, Any]:
    """The settings of a training, under the names that checkpoints give them."""
    options = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    return {
        **options,
        "seed": seed,
        "prepare": _named(recipe.prepare),
        "penalty": _named(penalty),
        "masks": _named(masks),
        "attack": None if recipe.attack is None else repr(recipe.opened_attack()),
        "augment": None if recipe.augment is None else repr(recipe.augment),
        "device": images.device.type,
        "images": _digest(images),
        "labels": _digest(labels),
    }


def _named(thing: Any) -> Any:
    """The name of an object that affects the training, with its settings if it has some."""
    if thing is None:
        return None
    if hasattr(thing, "settings"):
        return {"kind": type(thing).__name__, **thing.settings()}
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _digest(tensor: Tensor) -> str:
    """Type, shape and a short hash of the values."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def _differences(name: str, before: Any, now: Any) -> list[str]:
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        names = {**before, **now}
        return [line for key in names for line in _differences(f"{name} {key}", before.get(key), now.get(key))]
    return [f"{name} is {_setting_text(before)} in the file and {_setting_text(now)} now"]


def _setting_text(value: Any) -> str:
    if isinstance(value, dict) and "kind" in value:
        return f"{value['kind']}({', '.join(f'{name}={item!r}' for name, item in value.items() if name != 'kind')})"
    return "not set" if value is None else str(value)

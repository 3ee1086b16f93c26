"""One step of training, all of it on the device: what `fit` repeats, and what can be recorded into a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from ..capture.arguments import explain_types, types_of
from ..capture.restore import evaluating
from ..data import Attack
from ..data.draws import derived, uniforms
from ..data.images import to_float

# Adversarial training: every batch is changed against the model as it is, then learnt (Madry et al. 2017)

Prepare = Callable[[Tensor], Tensor]


@dataclass
class Attacked:
    """Batches as an attack changes them; the random starts of each step come from the seed and the step alone."""

    model: nn.Module
    attack: Attack
    prepare: Prepare | None
    seed: int
    _steps: int = field(default=0, init=False)

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        seed = derived(self.seed, self._steps)
        self._steps += 1
        training = self.model.training
        self.model.eval()  # a training batch-norm would learn from the steps of the attack
        try:
            return self.attack(self._answer, floats(x), y, seed=seed, index=index)
        finally:
            self.model.train(training)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._steps = state["steps"]

    def _answer(self, x: Tensor) -> Tensor:
        found = self.model(x if self.prepare is None else self.prepare(x))
        assert isinstance(found, Tensor)
        return found


def floats(x: Tensor) -> Tensor:
    """uint8 as [0, 1]; floating point as it is."""
    return to_float(x) if x.dtype == torch.uint8 else x


# Random crops and mirror images, made on the images' own device from numbers drawn beforehand

USE = 2**32  # which seed derived from the training's is that of the changes: attacks take those of small numbers


@dataclass(frozen=True)
class Augment:
    """Random crops of images padded with black, and random mirror images.

    `draws` gives the random numbers of a whole epoch; the images of a batch are then a function of the padded images,
    their numbers and their draws alone.
    """

    pad: int = 4
    mirror: bool = True

    def draws(self, count: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
        """(count, 3): top, left and mirrored of each place of an epoch, the same on every device."""
        places = torch.arange(count, device=device)
        drawn = uniforms(derived(derived(seed, USE), epoch), places, 3)
        many = torch.tensor([2 * self.pad + 1] * 2 + [2 if self.mirror else 1], device=device)
        return (drawn * many).long()

    def __call__(self, padded: Tensor, index: Tensor, draws: Tensor) -> Tensor:
        """The images of these numbers from a set that was padded: crop and mirror in a single gather."""
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


class MaskHolder(Protocol):
    """Masks, or what moves them: as long as the block lasts, the optimiser's steps respect them."""

    def hold(self, optimiser: Optimizer, /) -> AbstractContextManager[Any]: ...


class Training(AbstractContextManager["Training"]):
    """A model, its optimiser and the images it learns: `with Training(…) as training: training.step(index, draws)`.

    `images` are padded (`augment.padded`) where `augment` is given. Nothing in a step waits for the device, draws
    random numbers of its own (an attack does both) or depends on its number, but for what `penalty` does. The rate is
    the optimiser's, and schedules are stepped by the caller. `clip`: gradients longer than this, all parameters
    together and as masks leave them, are shortened to it.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        stepper: Optimizer,
        augment: Augment | None = None,
        prepare: Prepare | None = None,
        mixed: bool = False,
        compiled: bool = False,
        attack: Attacked | None = None,
        penalty: Callable[[], Tensor] | None = None,
        masks: MaskHolder | None = None,
        clip: float | None = None,
    ) -> None:
        if len(images) != len(labels):
            raise ValueError(f"need one label an image, got {len(images)} images and {len(labels)} labels")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip={clip!r}: the longest gradient that is left as it is, a number over 0, or None")
        if masks is not None and not callable(getattr(masks, "hold", None)):
            raise TypeError(
                f"masks={masks!r}: the masks themselves, such as random_masks(model, 0.9), or a Regrow that moves them"
            )
        if mixed:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model, self.images, self.labels, self.stepper = model, images, labels, stepper
        self.augment, self.prepare, self.mixed, self.attack = augment, prepare, mixed, attack
        self.penalty, self.masks, self.clip = penalty, masks, clip
        self._answer: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model
        self._held = ExitStack()
        self.taken = torch.zeros((), dtype=torch.long, device=images.device)  # steps so far
        self.failed = torch.zeros_like(self.taken)  # the first step whose loss is no number; 0: none yet

    def __enter__(self) -> Self:
        if self.masks is not None:
            self._held.enter_context(self.masks.hold(self.stepper))
        if self.clip is not None:
            # After that of the masks: what they take away should not count.
            self._held.callback(self.stepper.register_step_pre_hook(self._shorten).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def step(self, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """Learn from the images of these numbers, changed as drawn; the loss, of which no gradient is left."""
        return self.learn(self.batch(index, draws), self.labels[index], index)

    def batch(self, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """The images of these numbers, changed as drawn."""
        if self.augment is None:
            return self.images[index]
        if draws is None:
            raise ValueError("the images are to be changed, so a step needs draws: augment.draws gives an epoch's")
        return self.augment(self.images, index, draws)

    def learn(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """One step on these images, as `batch` gives them."""
        loss = self._loss(x, y, index)
        self.stepper.zero_grad()
        loss.backward()
        self.stepper.step()
        self._note(loss.detach())
        return loss.detach()

    def _loss(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        with precision(self.mixed, x.device):
            if self.attack is not None:
                x = self.attack(x, y, index)
            loss = functional.cross_entropy(self._answer(prepared(x, self.prepare, self.mixed)), y)
        return loss if self.penalty is None else loss + self.penalty()

    def _shorten(self, stepper: Optimizer, *_: Any) -> None:
        assert self.clip is not None
        nn.utils.clip_grad_norm_([p for group in stepper.param_groups for p in group["params"]], self.clip)

    # Losses that are no numbers

    def _note(self, loss: Tensor) -> None:
        """In place, so that a recorded step counts as well."""
        self.taken += 1
        first = ~torch.isfinite(loss) & (self.failed == 0)
        self.failed.copy_(torch.where(first, self.taken, self.failed))

    def look(self, an_epoch: int) -> None:
        """Raise if a loss was no number; this waits for the device."""
        if bad := int(self.failed):
            raise ValueError(
                f"the loss of step {bad} (epoch {-(-bad // an_epoch)}) is NaN or infinite: look for such values "
                "in the images, else take a lower rate or a smaller penalty"
            )


def trained(model: nn.Module) -> list[nn.Parameter]:
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise ValueError("nothing to train: no parameter of the model requires gradients")
    return found


def prepared(x: Tensor, prepare: Prepare | None, mixed: bool = False) -> Tensor:
    x = floats(x)
    x = prepare(x) if prepare else x
    return x.contiguous(memory_format=torch.channels_last) if mixed else x


def precision(mixed: bool, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()


# Optimisers by name, and how the learning rate goes

Schedule = Literal["one_cycle", "cosine", "steps", "constant"]


def optimiser_of(
    parameters: Iterable[Tensor],
    name: str,
    rate: float,
    decay: float,
    momentum: float,
    *,
    fused: bool | None = None,
    capturable: bool = False,
) -> Optimizer:
    """`capturable`: its step can be recorded into a CUDA graph, the rate being a tensor that schedules write to."""
    trained = list(parameters)
    own = torch.tensor(rate, device=trained[0].device) if capturable else rate
    if name == "adam":
        made: Optimizer = torch.optim.AdamW(trained, own, weight_decay=decay, fused=fused, capturable=capturable)
    elif name == "sgd":
        made = torch.optim.SGD(trained, own, momentum, weight_decay=decay, nesterov=momentum > 0, fused=fused)
    else:
        raise ValueError(f"no optimiser is called {name!r}; there are 'adam' and 'sgd'")
    for group in made.param_groups:
        group["initial_lr"] = rate  # a number: schedules would wait for a GPU to read a tensor
    return made


def schedule_of(stepper: Optimizer, name: str, rate: float, steps: int, warmup: int = 0) -> LRScheduler:
    """The rate of each of so many steps; `warmup`: in the first so many it rises to `rate` in equal parts."""
    if not 0 <= warmup < max(steps, 1):
        raise ValueError(f"a warm-up of {warmup} steps does not fit into {steps} steps of training")
    if name == "one_cycle":
        if warmup:
            raise ValueError("the one-cycle schedule has a rise of its own: warmup is for 'cosine' and 'constant'")
        # The cycle would give plain SGD a momentum.
        plain = any(group.get("momentum") == 0 for group in stepper.param_groups)
        return OneCycleLR(stepper, rate, total_steps=steps, cycle_momentum=not plain)
    if name not in ("cosine", "steps", "constant"):
        raise ValueError(f"no schedule is called {name!r}; there are 'one_cycle', 'cosine', 'steps' and 'constant'")

    def part(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if name == "cosine":
            return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        # A tenth from the middle on and a hundredth in the last quarter, as residual networks are trained on CIFAR.
        return 0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps)) if name == "steps" else 1.0

    return LambdaLR(stepper, part)


def rates_of(name: str, rate: float, steps: int, warmup: int = 0, *, momentum: float = 0.0) -> Tensor:
    """The rate of every step, for a training that cannot ask its schedule in between."""
    if name == "one_cycle" and momentum > 0:
        raise ValueError(
            "the one-cycle schedule moves the momentum too, which recorded steps cannot: take 'cosine' or 'constant'"
        )
    stepper = torch.optim.SGD([torch.zeros(1, requires_grad=True)], rate)
    plan = schedule_of(stepper, name, rate, steps, warmup)
    found = torch.empty(steps)
    stepper.step()  # schedules want the optimiser to go first
    for step in range(steps):
        found[step] = stepper.param_groups[0]["lr"]
        if step + 1 < steps:
            plan.step()
    return found


# What cannot be trained or probed, told in words before torch does in its own


def check_epochs(epochs: int) -> None:
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs={epochs!r}: a whole number of at least 1")


def check_data(images: Tensor, labels: Tensor, batch: int) -> None:
    for name, given in (("images", images), ("labels", labels)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} are a {type(given).__name__}: torch.as_tensor({name}) makes a tensor of them")
    if not len(images):
        raise ValueError(f"there is nothing to learn from: images of shape {tuple(images.shape)}")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch={batch!r}: how many images a step learns from, a whole number of at least 1")


@torch.no_grad()
def check_types(model: nn.Module, images: Tensor, *, prepare: Prepare | None = None, mixed: bool = False) -> None:
    """Refuse images of a type that the model does not take; tried on one image where the types are not the same."""
    x = floats(images[:1])
    if not len(x) or x.dtype in types_of(model):
        return
    try:
        with evaluating(model), torch.autocast(x.device.type, torch.bfloat16, enabled=mixed):
            model(prepare(x) if prepare else x)
    except RuntimeError as error:
        explain_types(error, model, [x], "images")

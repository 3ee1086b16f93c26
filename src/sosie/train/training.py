"""One step of training, all of it on the device: what `fit` repeats, and what can be recorded into a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from .adversarial import Attacked, Prepare, floats
from .augment import Augment


class Holds(Protocol):
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
        masks: Holds | None = None,
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

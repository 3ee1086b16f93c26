"""Several networks on one GPU, each trained as if it were alone: their steps are recorded and replayed side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from ..process_state import Shared, switched
from ..progress import Progress
from .adversarial import Prepare
from .augment import Augment
from .checks import check_data, check_epochs, check_types
from .loop import fit
from .recorded import Penalty, Recorded
from .schedules import Schedule, optimiser_of, rates_of
from .training import Holds, Training, trained

T = TypeVar("T")
LOOKS = 5  # epochs between looks at the losses, for which the GPU is waited for


def fit_side_by_side(
    models: Sequence[nn.Module],
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    seeds: Sequence[int],
    batch: int = 128,
    rate: float = 0.1,
    optimiser: Literal["adam", "sgd"] = "sgd",
    momentum: float = 0.9,
    decay: float = 5e-4,
    schedule: Schedule = "cosine",
    warmup: float = 0.0,
    clip: float | None = None,
    augment: Augment | None = None,
    prepare: Prepare | None = None,
    mixed: bool = False,
    penalties: Sequence[Penalty | None] | None = None,
    masks: Sequence[Holds | None] | None = None,
    at_once: int = 10,
    after_epoch: Callable[[int, int], None] | None = None,
    task: str = "training side by side",
) -> list[nn.Module]:
    """Train every model as `fit` with its seed trains it, to rounding; they may be of different architectures.

    A small network leaves most of a GPU idle, which waits for the next kernel to be asked for. Here the whole step of
    each network (images, passes, penalty, optimiser, rate) is recorded once as a CUDA graph, and the graphs of
    `at_once` networks run on streams of their own: on an H200 ten ResNet-20s at batch 128 take as long as `fit` takes
    for one. On a CPU they train one after the other.

    `penalties` and `masks`: one for each model, or None. Penalties are attached by the caller (inside their `with`
    blocks). Masks stay as they are: what moves them (`Regrow`) decides on the host, so use `fit`. A penalty whose
    measure decomposes matrices (`mean_cca`) cannot be recorded: its due steps run as they are, slowly.
    `after_epoch(k, epoch)` is called for each network after each of its epochs. The rest is as for `fit`.
    """
    count = len(models)
    own_penalties = _one_each(penalties, count, "penalties")
    own_masks = _one_each(masks, count, "masks")
    if len(seeds) != count or not count:
        raise ValueError(f"need one seed a model: {count} models, {len(seeds)} seeds")
    if len({id(model) for model in models}) < count:
        raise ValueError("one model is given twice: networks trained side by side are models of their own")
    _check_apart(models)
    if at_once < 1:
        raise ValueError(f"at_once={at_once}: how many networks train at a time, 1 at least")
    check_epochs(epochs)
    check_data(images, labels, batch)
    if images.device.type != "cuda":
        for k, model in enumerate(models):
            fit(
                model, images, labels, epochs=epochs, seed=seeds[k], batch=batch, rate=rate, optimiser=optimiser,
                momentum=momentum, decay=decay, schedule=schedule, warmup=warmup, clip=clip, augment=augment,
                prepare=prepare, mixed=mixed, penalty=own_penalties[k], masks=own_masks[k],
                after_epoch=_told(after_epoch, k), task=f"{task}, {k + 1} of {count}",
            )  # fmt: skip
        return list(models)
    for model in models:
        check_types(model, images, prepare=prepare, mixed=mixed)
    an_epoch = -(-len(images) // batch)
    rates = rates_of(schedule, rate, epochs * an_epoch, round(warmup * an_epoch), momentum=momentum)
    source = augment.padded(images) if augment else images
    with Progress(task, epochs * -(-count // at_once), "epochs") as bar, _FASTEST:
        for start in range(0, count, at_once):
            group = range(start, min(start + at_once, count))
            recorded = {
                k: Recorded(
                    Training(
                        models[k], source, labels,
                        stepper=optimiser_of(
                            trained(models[k]), optimiser, rate, decay, momentum, fused=True, capturable=True
                        ),
                        augment=augment, prepare=prepare, mixed=mixed, penalty=own_penalties[k], masks=own_masks[k],
                        clip=clip,
                    ),
                    rates.to(images.device), seeds[k], batch, own_penalties[k],
                )
                for k in group
            }  # fmt: skip
            _train(recorded, epochs, an_epoch, after_epoch, bar)
    return [model.eval() for model in models]


def _train(
    recorded: dict[int, Recorded],
    epochs: int,
    an_epoch: int,
    after_epoch: Callable[[int, int], None] | None,
    bar: Progress,
) -> None:
    for k, each in recorded.items():
        _tell(after_epoch, k, 0, each)
        each.record()
    for epoch in range(1, epochs + 1):
        for each in recorded.values():
            each.shuffle(epoch - 1)
        for step in range(an_epoch):
            for each in recorded.values():
                each.replay((epoch - 1) * an_epoch + step, step)
        if after_epoch is not None or epoch % LOOKS == 0 or epoch == epochs:
            for k, each in recorded.items():
                _look(each, k, an_epoch)
                _tell(after_epoch, k, epoch, each)
        bar.advance()
    for each in recorded.values():
        each.training.stepper.zero_grad()  # gradients would hold on to the memory of the graphs


def _look(recorded: Recorded, k: int, an_epoch: int) -> None:
    recorded.wait()
    try:
        recorded.training.look(an_epoch)
    except ValueError as error:
        error.add_note(f"in network {k} of those trained side by side (seed {recorded.seed})")
        raise


def _tell(after_epoch: Callable[[int, int], None] | None, k: int, epoch: int, recorded: Recorded) -> None:
    if after_epoch is not None:
        after_epoch(k, epoch)
    recorded.training.model.train()


def _told(after_epoch: Callable[[int, int], None] | None, k: int) -> Callable[[int], None] | None:
    return None if after_epoch is None else lambda epoch: after_epoch(k, epoch)


def _check_apart(models: Sequence[nn.Module]) -> None:
    """Networks that share a part would each train it, at the same time."""
    owner: dict[int, int] = {}
    for k, model in enumerate(models):
        for name, number in itertools.chain(model.named_parameters(), model.named_buffers()):
            if owner.setdefault(id(number), k) != k:
                raise ValueError(
                    f"networks {owner[id(number)]} and {k} share {name!r}: those trained side by side have nothing in "
                    "common; copy.deepcopy makes a part their own"
                )


def _one_each(given: Sequence[T | None] | None, count: int, name: str) -> Sequence[T | None]:
    found = [None] * count if given is None else list(given)
    if len(found) != count:
        raise ValueError(f"{name}: need one for each of {count} models, or None in its place; got {len(found)}")
    return found


# cuDNN tries its algorithms on the first call of a shape: it pays when a step is replayed ten thousand times.
_FASTEST = Shared(lambda: switched(torch.backends.cudnn, "benchmark", True))

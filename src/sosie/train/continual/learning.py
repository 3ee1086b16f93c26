"""Learning one task after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.atoms import atom_layers, freeze
from ..adversarial import Prepare, floats
from ..heads import evaluating, features, find_head, refit_head
from ..loop import fit
from .result import Continual, replace_head

Task = tuple[Tensor, Tensor, Tensor, Tensor]  # images, labels 0 … k-1, test images, test labels
Method = Literal["atoms", "fine_tune", "separate"]
Start = Literal["first", "nearest"]
METHODS = ("atoms", "fine_tune", "separate")
STARTS = ("first", "nearest")
TRIAL = 50  # epochs that a last layer is fitted for to find the nearest earlier task


def learn_tasks(
    make: Callable[[], nn.Module],
    tasks: Sequence[Task],
    *,
    epochs: int | Sequence[int],
    seed: int,
    method: Method = "atoms",
    start: Start = "first",
    head: str | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> Continual:
    """Learn tasks in their order, each with a last layer of its own, and test on all so far after each.

    `tasks`: (images, labels, test images, test labels), labels counted from 0 in each. `make()` is the network to start
    from (under the global seed `seed`), trained already or not; its last linear layer (or `head`) is replaced.

    `method`: "atoms" trains everything on the first task, then for each further one only its own atoms and last layer,
    as Miao et al. 2021 do; coefficients, biases, other layers and the weights of norms stay those of the first task.
    Running statistics of batch norms are each task's own. `start` is where the atoms of a further task begin: those of
    the "first" task, or of the "nearest" earlier one, on whose features a last layer fits the new task's images best.
    "fine_tune" goes on training one network, and forgets; "separate" starts each task from the same untrained network.

    `epochs`: of every task, or one number a task. Other options are those of `fit`.
    """
    checked = _checked(tasks, method, start)
    each = [epochs] * len(tasks) if isinstance(epochs, int) else list(epochs)
    if len(each) != len(tasks):
        raise ValueError(f"epochs: one number, or one a task; got {len(each)} for {len(tasks)} tasks")
    device = tasks[0][0].device
    with _drawing(seed, device):
        template = make().to(device)
    name = find_head(template, head)
    if method == "atoms" and not atom_layers(template):
        raise ValueError("make() has no layer of atoms: decompose(model, m) or with_atoms(model, m) makes them")
    missing = torch.full((len(tasks), len(tasks)), torch.nan, dtype=torch.float64)
    found = Continual(method, template, name, {}, (), missing, missing.clone())
    for number, (task, classes) in enumerate(zip(tasks, checked, strict=True)):
        with _drawing(seed + number, device):
            model = _started(found, task, start, prepare)
            replace_head(model, name, classes).reset_parameters()
            fit(model, *task[:2], epochs=each[number], seed=seed + number, prepare=prepare, **options)
        found = _with(found, model)
        _test(found, tasks, prepare)
    return found


def _started(found: Continual, task: Task, start: Start, prepare: Prepare | None) -> nn.Module:
    """The network that the next task begins with, and what of it is to be trained."""
    if not len(found) or found.method == "separate":
        return copy.deepcopy(found.template)
    if found.method == "fine_tune":
        return found.model(-1)
    model = found.model(0 if start == "first" else _nearest(found, task, prepare))
    freeze(model.requires_grad_(False), "atoms", False)
    return model


def _nearest(found: Continual, task: Task, prepare: Prepare | None) -> int:
    """The earlier task whose network's features fit this one's labels best, by the loss of a last layer on them."""
    images, labels = task[:2]
    seen = torch.stack([features(found.model(t), images, head=found.head, prepare=prepare) for t in range(len(found))])
    seen = seen / seen.square().mean((1, 2), keepdim=True).sqrt()  # large features are learnt faster, not better
    logits = refit_head(seen, labels, int(labels.max()) + 1, epochs=TRIAL, rate=3e-2)(seen)
    losses = [float(functional.cross_entropy(each, labels)) for each in logits]
    return losses.index(min(losses))


def _with(found: Continual, model: nn.Module) -> Continual:
    """One task more: what of the model is its own is kept, what is shared is replaced where that was trained."""
    own_names = _own_names(found, model)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    own = {name: value for name, value in state.items() if name in own_names}
    keeps = found.method == "atoms" and len(found) > 0
    shared = found.shared if keeps else {name: value for name, value in state.items() if name not in own_names}
    return replace(found, shared=shared, own=(*found.own, own))


def _own_names(found: Continual, model: nn.Module) -> set[str]:
    if found.method == "separate":
        return set(model.state_dict())
    names = {name for name in model.state_dict() if name.startswith(f"{found.head}.")}
    if found.method == "atoms":
        names |= {f"{name}.atoms" for name in atom_layers(model)}
        names |= {name for name, _ in model.named_buffers()} & set(model.state_dict())
    return names


@torch.no_grad()
def _test(found: Continual, tasks: Sequence[Task], prepare: Prepare | None) -> None:
    """Fill the row of the last task."""
    now = len(found) - 1
    models = [found.model(task) for task in range(len(found))]
    for j, (_, _, images, labels) in enumerate(tasks[: now + 1]):
        logits = [answers(model, images, prepare=prepare) for model in models]
        right = logits[j].argmax(1) == labels
        surest = torch.stack([_odds(each) for each in logits]).argmax(0)
        found.accuracy[now, j] = right.double().mean().cpu()
        found.class_accuracy[now, j] = (right & (surest == j)).double().mean().cpu()


def _odds(logits: Tensor) -> Tensor:
    """Logarithm of p / (1 − p) of the largest softmax output: tells answers apart whose p rounds to 1."""
    ordered = logits.double().sort(1, descending=True).values
    return ordered[:, 0] - ordered[:, 1:].logsumexp(1)


@torch.no_grad()
def answers(model: nn.Module, images: Tensor, *, prepare: Prepare | None = None, batch: int = 500) -> Tensor:
    """What a model in evaluation mode answers, (images, classes)."""
    with evaluating(model):
        parts = (floats(part) for part in images.split(batch))
        return torch.cat([model(x if prepare is None else prepare(x)) for x in parts])


@contextmanager
def _drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a seed (first weights, dropout), and leave the global generators as found."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _checked(tasks: Sequence[Task], method: str, start: str) -> list[int]:
    """Classes of each task."""
    for what, asked, known in (("method", method, METHODS), ("start", start, STARTS)):
        if asked not in known:
            raise ValueError(f"no {what} is called {asked!r}; there are {', '.join(known)}")
    if not tasks:
        raise ValueError("no tasks to learn")
    found = []
    for k, (images, labels, test_images, test_labels) in enumerate(tasks):
        if (
            len(images) != len(labels)
            or len(test_images) != len(test_labels)
            or not len(images)
            or not len(test_images)
        ):
            counts = f"{len(images)} and {len(labels)}, tested {len(test_images)} and {len(test_labels)}"
            raise ValueError(f"task {k} needs as many labels as images, and some of both; got {counts}")
        classes = int(labels.max()) + 1
        whole = int(labels.min()) >= 0 and len(labels.unique()) == classes > 1
        if not whole or int(test_labels.min()) < 0 or int(test_labels.max()) >= classes:
            given, tested = (f"{int(each.min())} to {int(each.max())}" for each in (labels, test_labels))
            raise ValueError(
                f"task {k}: labels are counted from 0 in each task, and every class, of two or more, has images to "
                f"train on; got labels {given}, tested {tested}"
            )
        found.append(classes)
    return found

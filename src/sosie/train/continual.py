"""Learning one task after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from ..checks import one_of
from ..models import atom_layers, freeze
from ..stats import AtomTable
from .heads import RECIPE, features, find_head, refit_head
from .loop import fit
from .many_networks import State, build, seeded
from .recipe import Prepare, Recipe, floats


@dataclass(frozen=True, eq=False)
class Continual:
    """The networks of all tasks, and their accuracies after each.

    Entry (i, j) of `accuracy` is measured after task i on the test images of task j, NaN if j was not learnt yet.
    `accuracy` is given the task of an image (task-incremental); `class_accuracy` is not (class-incremental): the
    networks of all tasks answer, and the most confident one, by the odds of its largest softmax output, decides.
    """

    method: str
    template: nn.Module
    head: str  # the name of the last layer, which each task has for itself
    shared: State  # parameters and buffers that the networks of all tasks share
    own: tuple[State, ...]  # those of each task
    accuracy: Tensor  # (tasks, tasks)
    class_accuracy: Tensor  # (tasks, tasks)

    def __len__(self) -> int:
        return len(self.own)

    def __repr__(self) -> str:
        mean = float(self.accuracy[len(self) - 1].nanmean())
        return f"<Continual by {self.method}: {len(self)} tasks, mean accuracy {mean:.3f} after the last>"

    def model(self, task: int) -> nn.Module:
        """The network of one task as a module, in evaluation mode."""
        model, own = copy.deepcopy(self.template), self.own[task]
        replace_head(model, self.head, len(own[f"{self.head}.weight"]))
        model.load_state_dict({**self.shared, **own})
        return model.eval()

    def atoms(self) -> AtomTable:
        """The atoms of every task, one row per task; `.cosines()` gives the similarities of tasks."""
        layers = self._atom_layers()
        return AtomTable.of([{layer: own[f"{layer}.atoms"].cpu() for layer in layers} for own in self.own])

    @property
    def coefficients(self) -> State:
        """The coefficients that all tasks share, by layer."""
        return {layer: self.shared[f"{layer}.coefficients"] for layer in self._atom_layers()}

    def _atom_layers(self) -> list[str]:
        if self.method != "atoms":
            raise ValueError(f"method {self.method!r} shares no coefficients: only with 'atoms' can atoms be compared")
        return list(atom_layers(self.template))

    @property
    def forgetting(self) -> float:
        """The mean over all tasks but the last: best accuracy before the last task minus accuracy after it."""
        return _forgetting(self.accuracy)

    @property
    def class_forgetting(self) -> float:
        """Forgetting if the task of an image is not given; above 0 with atoms too, since more networks compete."""
        return _forgetting(self.class_accuracy)


def _forgetting(accuracy: Tensor) -> float:
    if len(accuracy) < 2:
        raise ValueError("a single task cannot be forgotten: forgetting needs two")
    before, final = accuracy[:-1, :-1], accuracy[-1, :-1]
    best = before.masked_fill(before.isnan(), -torch.inf).amax(0)
    return float((best - final).mean())


def replace_head(model: nn.Module, name: str, classes: int) -> nn.Linear:
    """Replace the last layer by one for this many classes, whose weights are not set yet."""
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    options = {"device": old.weight.device, "dtype": old.weight.dtype, "bias": old.bias is not None}
    new = skip_init(nn.Linear, old.in_features, classes, **options)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
    return new


Task = tuple[Tensor, Tensor, Tensor, Tensor]  # images, labels 0 … k-1, test images, test labels
Method = Literal["atoms", "fine_tune", "separate"]
Start = Literal["first", "nearest"]
TRIAL = Recipe(epochs=50, batch=50, rate=3e-2)  # fits the last layers that choose the nearest earlier task


def learn_tasks(
    make: Callable[[], nn.Module],
    tasks: Sequence[Task],
    *,
    recipe: Recipe | Sequence[Recipe],
    seed: int,
    method: Method = "atoms",
    start: Start = "first",
    head: str | None = None,
) -> Continual:
    """Learn tasks in order, each with its own last layer, and after each test on all tasks so far.

    `tasks`: (images, labels, test images, test labels), labels counted from 0 in each. `make()` is the network to start
    from (under the global seed `seed`), trained or not; its last linear layer (or `head`) is replaced.

    `method`: "atoms" trains everything on the first task, then for each further one only its own atoms and last layer,
    as Miao et al. 2021 do; coefficients, biases, other layers and the weights of norms stay those of the first task,
    and each task has its own running statistics of batch norms. `start` is where the atoms of a further task begin:
    those of the "first" task, or of the "nearest" earlier one, on whose features a last layer fits the new task's
    images best. "fine_tune" continues to train one network, and forgets; "separate" starts each task from the same
    untrained network.

    `recipe`: one for all tasks, or a list with one per task, all with the same `prepare`.
    """
    class_counts = _class_counts(tasks, method, start)
    recipes = [recipe] * len(tasks) if isinstance(recipe, Recipe) else list(recipe)
    if len(recipes) != len(tasks):
        raise ValueError(f"recipe: need one, or one per task; got {len(recipes)} for {len(tasks)} tasks")
    device, prepare = tasks[0][0].device, recipes[0].prepare
    template = build(make, seed, device)
    name = find_head(template, head)
    if method == "atoms" and not atom_layers(template):
        raise ValueError("make() has no layer of atoms: decompose(model, m) or with_atoms(model, m) makes them")
    missing = torch.full((len(tasks), len(tasks)), torch.nan, dtype=torch.float64)
    result = Continual(method, template, name, {}, (), missing, missing.clone())
    for number, (task, classes) in enumerate(zip(tasks, class_counts, strict=True)):
        with seeded(seed + number, device):
            model = _next_start(result, task, start, prepare)
            replace_head(model, name, classes).reset_parameters()
            fit(model, *task[:2], recipe=recipes[number], seed=seed + number)
        result = _with_task(result, model)
        _measure(result, tasks, prepare)
    return result


def _next_start(result: Continual, task: Task, start: Start, prepare: Prepare | None) -> nn.Module:
    """The network from which the next task starts; the parameters to train require gradients."""
    if not len(result) or result.method == "separate":
        return copy.deepcopy(result.template)
    if result.method == "fine_tune":
        return result.model(-1)
    model = result.model(0 if start == "first" else _nearest(result, task, prepare))
    freeze(model.requires_grad_(False), "atoms", False)
    return model


def _nearest(result: Continual, task: Task, prepare: Prepare | None) -> int:
    """The earlier task whose network's features fit these labels best, by the loss of a last layer on them."""
    images, labels = task[:2]
    inputs = torch.stack(
        [features(result.model(t), images, head=result.head, prepare=prepare) for t in range(len(result))]
    )
    inputs = inputs / inputs.square().mean((1, 2), keepdim=True).sqrt()  # large features learn faster, not better
    logits = refit_head(inputs, labels, int(labels.max()) + 1, recipe=TRIAL)(inputs)
    losses = [float(functional.cross_entropy(each, labels)) for each in logits]
    return losses.index(min(losses))


def _with_task(result: Continual, model: nn.Module) -> Continual:
    """The result with one more task; the shared part is replaced if it was trained."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if result.method == "separate":
        return replace(result, own=(*result.own, state))
    names = {name for name in state if name.startswith(f"{result.head}.")}
    if result.method == "atoms":
        names |= {f"{name}.atoms" for name in atom_layers(model)} | {name for name, _ in model.named_buffers()}
    own = {name: value for name, value in state.items() if name in names}
    keeps = result.method == "atoms" and len(result) > 0
    shared = result.shared if keeps else {name: value for name, value in state.items() if name not in names}
    return replace(result, shared=shared, own=(*result.own, own))


@torch.no_grad()
def _measure(result: Continual, tasks: Sequence[Task], prepare: Prepare | None) -> None:
    """Measure the accuracies after the last task."""
    now = len(result) - 1
    models = [result.model(task) for task in range(len(result))]
    for j, (_, _, images, labels) in enumerate(tasks[: now + 1]):
        logits = [_logits(model, images, prepare) for model in models]
        right = logits[j].argmax(1) == labels
        # The odds p / (1 − p) of the largest softmax output distinguish answers whose p rounds to 1.
        ordered = [each.double().sort(1, descending=True).values for each in logits]
        surest = torch.stack([each[:, 0] - each[:, 1:].logsumexp(1) for each in ordered]).argmax(0)
        result.accuracy[now, j] = right.double().mean().cpu()
        result.class_accuracy[now, j] = (right & (surest == j)).double().mean().cpu()


@torch.no_grad()
def _logits(model: nn.Module, images: Tensor, prepare: Prepare | None, batch: int = 500) -> Tensor:
    """The logits (images, classes) of a model that is in evaluation mode."""
    return torch.cat([model(floats(part, prepare)) for part in images.split(batch)])


def _class_counts(tasks: Sequence[Task], method: str, start: str) -> list[int]:
    """The number of classes of each task, after checking the arguments."""
    one_of(method, "method", get_args(Method))
    one_of(start, "start", get_args(Start))
    if not tasks:
        raise ValueError("no tasks to learn")
    class_counts = []
    for k, (images, labels, test_images, test_labels) in enumerate(tasks):
        if not 0 < len(images) == len(labels) or not 0 < len(test_images) == len(test_labels):
            counts = f"{len(images)} and {len(labels)}, for the test {len(test_images)} and {len(test_labels)}"
            raise ValueError(f"task {k} needs as many labels as images, and at least one; got {counts}")
        classes = int(labels.max()) + 1
        whole = int(labels.min()) >= 0 and len(labels.unique()) == classes > 1
        if not whole or int(test_labels.min()) < 0 or int(test_labels.max()) >= classes:
            trained, tested = (f"{int(part.min())} to {int(part.max())}" for part in (labels, test_labels))
            raise ValueError(
                f"task {k}: labels must be counted from 0, with two or more classes that all have training images; "
                f"got labels {trained} and test labels {tested}"
            )
        class_counts.append(classes)
    return class_counts


def ensemble(
    result: Continual,
    tasks: Sequence[Task],
    members: Tensor,
    *,
    recipe: Recipe = RECIPE,
    seed: int = 0,
    prepare: Prepare | None = None,
) -> tuple[Tensor, Tensor]:
    """The test accuracy of each task's network alone, and with the networks of other tasks: two tensors (tasks,).

    `members` (tasks, k) are the numbers of other tasks, whose softmax answers are averaged with those of the task's own
    network; `sosie.linalg.most_similar(result.atoms().cosines(), k)` chooses the most similar ones. A member's network
    computes features of the task's training images, and a last layer is fitted on them by `recipe` (see `refit_head`).
    """
    count = len(result)
    task = torch.arange(count)[:, None]
    members = members.cpu()
    if members.ndim != 2 or len(members) != count or len(tasks) != count:
        raise ValueError(f"need members (tasks, k) of {count} tasks, got {tuple(members.shape)} and {len(tasks)} tasks")
    if bool(((members < 0) | (members >= count) | (members == task)).any()):
        raise ValueError(f"members must be numbers of other tasks, 0 to {count - 1}, got {members.tolist()}")
    alone, helped = [], []
    for k, (images, labels, test_images, test_labels) in enumerate(tasks):
        models = [result.model(int(member)) for member in members[k]]
        inputs, test_inputs = (
            torch.stack([features(model, x, head=result.head, prepare=prepare) for model in models])
            for x in (images, test_images)
        )
        heads = refit_head(inputs, labels, int(labels.max()) + 1, recipe=recipe, seed=seed)
        answers = heads(test_inputs).softmax(-1)
        own_answer = _logits(result.model(k), test_images, prepare).softmax(-1)
        mean = torch.cat([own_answer[None], answers]).mean(0)
        alone.append((own_answer.argmax(1) == test_labels).double().mean().cpu())
        helped.append((mean.argmax(1) == test_labels).double().mean().cpu())
    return torch.stack(alone), torch.stack(helped)

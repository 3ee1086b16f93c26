"""Task-loss matching: train the layer between two frozen networks so that the stitched network does B's job.

Many layers between the same two sites are trained at once: they are folded into the batch of B's upper part, which
runs once for all of them.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..capture import as_found, count_inputs, labels_of
from ..capture.batches import rebuild
from ..capture.sites import tensors_in
from ..checks import call_text, check_options, one_of, positive, whole_number
from ..linalg import Affine, Fit, JointMoments, centred_grams, centred_rows, explained, find_fit, widened
from ..measures import linear_cka
from ..progress import Progress
from ..stats import Alignment, Scatter
from .cuts import CutModel, answer_of
from .joint import Form, Joint, in_chunks, scatter, similarity_at_joint

NAME = "task_loss"
RANDOM = "random"
UserLoss = Callable[[Tensor, Any], Tensor]

BUDGET = 2 * 2**30  # bytes of activations that are kept, and of inputs; on a GPU up to a quarter of the free memory
FOLDED = 2**30  # bytes of activations at the joint in one step; joints beyond that are trained afterwards
HELD_OUT = 10  # without validation data, one input in so many is held out for early stopping
INDICES = ("linear_cka", "mean_cca", "svcca")  # recorded in the history


@dataclass(frozen=True)
class TaskLoss:
    """Train the layer so that the stitched network does B's job (Csiszárik et al. 2021, section 4.2).

    Written as "task_loss(start='random', epochs=10)". `targets`: the cross-entropy is to B's own "soft" answers, or to
    the "labels" of the data. `start`: "random" (as torch.nn.Linear starts) or the text of any closed form. `rank`: the
    layer is a product of two factors with this many channels between them. The loss is the cross-entropy + `l1` Σ
    |weight| + `cka` × linear CKA between S(A) and B on the rows of the batch (biased upwards if these are few).
    `threshold`: weights that end up smaller are set to zero. The optimiser is Adam, with a `rate` that is divided by
    ten at each third of the epochs. `patience`: stop after that many epochs without a better validation loss. `seed`
    sets a random start, the order of the inputs, and which tenth is held out. `autocast`: the networks run in bfloat16.
    `record`: compute similarity values once in that many epochs, and at the end; 0: never (at 256 channels they take a
    good part of a second each time).

    `loss(outputs, batch)` replaces the targets; it is called once for every joint, with the stitched network's answers
    to one batch of the data and that batch on B's device, and returns their mean loss as a tensor. `validation`: data
    for early stopping; the layer of the epoch with the lowest loss on them is kept. These data and the training data
    are held in memory.
    """

    targets: str = "soft"
    start: str = "least_squares"
    rank: int | None = None
    l1: float = 0.0
    threshold: float = 0.0
    cka: float = 0.0
    bias: bool = True
    epochs: int = 30
    rate: float = 1e-3
    batch: int = 128
    patience: int | None = None
    seed: int = 0
    autocast: bool = False
    record: int = 1
    loss: UserLoss | None = field(default=None, compare=False)
    validation: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        one_of(self.targets, f"{NAME}: targets", ("soft", "labels"))
        for name, least in (("epochs", 1), ("batch", 1), ("seed", 0), ("record", 0), ("rank", 1), ("patience", 1)):
            if name not in ("rank", "patience") or getattr(self, name) is not None:
                whole_number(getattr(self, name), f"{NAME}: {name}", least=least, most=2**63 - 1)
        positive(self.rate, f"{NAME}: rate")
        for name in ("l1", "threshold", "cka"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or (value < 0 and name != "cka"):
                sign = "; a negative one pulls towards B" if name == "cka" else " of at least 0"
                raise ValueError(f"{NAME}: {name} must be a finite number{sign}, got {value!r}")
        if self.rank is not None and (self.l1 or self.threshold):
            raise ValueError(f"{NAME}: rank={self.rank} with l1 or threshold: weights set to zero would undo the rank")
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"{NAME}: loss must be a function loss(outputs, batch), got {type(self.loss).__name__}")
        if self.loss is not None and self.targets != "soft":
            raise ValueError(f"{NAME}: loss= replaces the targets: leave targets out")
        self.start_fit  # noqa: B018 (an unknown start raises now, not after the pass over the data)

    @property
    def start_fit(self) -> Fit | None:
        """The closed form to start from; None: a random start."""
        if not isinstance(self.start, str):
            raise ValueError(f"{NAME}: start must be '{RANDOM}' or the text of a closed form, got {self.start!r}")
        return None if self.start == RANDOM else find_fit(self.start, also=(RANDOM,))

    @property
    def name(self) -> str:
        """The text of this fit, with the options that differ from the defaults, except for the loss and data."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        changed = {key: value for key, value in values.items() if value != getattr(TaskLoss, key)}
        return call_text(NAME, changed) if changed else NAME

    @classmethod
    def parse(cls, options: dict[str, Any]) -> TaskLoss:
        """Make a task loss from the options of its text."""
        check_options(options, {f.name: f.default for f in fields(cls)}, NAME)
        return cls(**options)


def start_of(task: TaskLoss, moments: JointMoments) -> list[Tensor]:
    """The parameters at the start, in float64: the bias (q,), then the weight (q, p) or its factors."""
    p, q = moments.widths
    rank = None if task.rank is None else whole_number(task.rank, f"{NAME}: rank", least=1, most=min(p, q))
    fit = task.start_fit
    if fit is None:
        generator = torch.Generator().manual_seed(task.seed)

        def uniform(*shape: int, channels: int) -> Tensor:  # as torch.nn.Linear, for each factor
            return (torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1) / channels**0.5

        shapes = [(q, p)] if rank is None else [(q, rank), (rank, p)]
        factors = [uniform(*shape, channels=shape[1]) for shape in shapes]
        bias = uniform(q, channels=shapes[0][1])
    else:
        if rank is not None and fit.name == "least_squares":
            fit = find_fit(f"reduced_rank(k={rank})")  # the best of that rank
        for option in ("intercept", "centre"):  # without a bias, the best map differs
            if not task.bias and option in fit.parameters and option not in fit.options:
                fit = fit.using(**{option: False})
        affine = fit(moments)
        factors, bias = [affine.weight], affine.bias
        if rank is not None:
            left, sizes, right = torch.linalg.svd(affine.weight, full_matrices=False)
            left, roots, right = left[:, :rank], sizes[:rank].sqrt(), right[:rank]
            factors = [left * roots, roots[:, None] * right]
            weight = (left * sizes[:rank]) @ right
            bias = bias + (affine.weight - weight) @ moments.mean_a  # keeps the mean of the part that is cut off
    return [bias if task.bias else torch.zeros_like(bias), *factors]


class ActivationCache:
    """Activations and answers of the frozen networks, by index: computed once, and kept if they fit into memory.

    An index is (J, m): m inputs for each of J joints; J = 1: the same for all. Activations that do not fit are computed
    again for each batch.
    """

    def __init__(
        self, lower: CutModel, upper: CutModel, joint: Joint, inputs: Any, *, rows_of_b: bool, device: torch.device
    ) -> None:
        self.lower, self.upper, self.joint, self.device = lower, upper, joint, device
        self.n = count_inputs(inputs)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        budget = max(BUDGET, free // 4)
        fits = sum(tensor.nbytes for tensor in tensors_in(inputs)) <= budget
        self._inputs = inputs
        if fits:
            self._inputs = rebuild(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)
        labels = labels_of(inputs)
        self.labels = None if labels is None else labels.to(device).long()
        self._kept = {"a": self._whole(partial(self._rows, "a"), budget // (1 + rows_of_b))}
        self._kept["b"] = self._whole(partial(self._rows, "b"), budget // 2) if rows_of_b else None
        answers = self._whole(upper.answer, budget)
        self.soft: Tensor | None = None  # B's soft answers, if it is a classifier: (classes,) per input
        if answers is not None and answers.ndim == 2 and answers.is_floating_point():
            self.soft = answers.to(torch.promote_types(answers.dtype, torch.float32)).softmax(1)

    def _whole(self, make: Callable[[Any], Tensor], budget: int) -> Tensor | None:
        """`make` of all inputs; None if that does not fit, or if its shape differs between batches."""
        parts: list[Tensor] = []
        with torch.no_grad(), Progress("running the networks once", self.n, "inputs") as bar:
            for batch in in_chunks(self._inputs):
                part = make(batch)
                if part.nbytes / len(part) * self.n > budget or part.shape[1:] != (parts or [part])[0].shape[1:]:
                    return None
                parts.append(part)
                bar.advance(len(part))
        return torch.cat(parts)

    def rows(self, side: str, index: Tensor) -> Tensor:
        """(J, m × positions, channels): the rows of A at the joint, in B's shape, or those of B."""
        kept = self._kept[side]
        rows = self._rows(side, self.inputs(index)) if kept is None else kept[index.flatten()]
        return rows.reshape(len(index), -1, rows.shape[-1])

    def inputs(self, index: Tensor) -> Any:
        """The batch of these J × m inputs, in the structure of the data."""
        index = index.flatten()
        return rebuild(
            lambda leaf: leaf[index.to(leaf.device)] if isinstance(leaf, Tensor) else [leaf[i] for i in index.tolist()],
            self._inputs,
        )

    @torch.no_grad()
    def _rows(self, side: str, batch: Any) -> Tensor:
        """(inputs, positions, channels)."""
        activation, mask = (self.lower if side == "a" else self.upper).representation(batch)
        form = self.joint.target
        if side == "a":
            activation = self.joint.shaped(activation)
        elif mask is not None:
            raise ValueError("cka= compares tokens, and padding would count: give inputs of equal length")
        last = activation if form.tokens or not form.space else activation.movedim(1, -1)
        return last.reshape(len(last), -1, last.shape[-1]).to(self.device)


def activations_of(rows: Tensor, inputs: int, form: Form) -> Tensor:
    """Turn rows (K, inputs × positions, q) into K × inputs activations of a form; maps are in channels-last layout."""
    first, width = len(rows) * inputs, rows.shape[-1]
    if not form.space:
        return rows.reshape(first, width)
    if form.tokens and len(form.space) == 1:
        return rows.reshape(first, -1, width)  # texts may differ in length from the first
    activation = rows.reshape(first, *form.space, width)
    return activation if form.tokens else activation.movedim(-1, 1)


@dataclass
class History:
    """The training of one joint: a line for the start and for each epoch, and the layer that is kept.

    With validation data that is the layer of the epoch with the lowest loss on them, otherwise the last one. A joint
    whose loss is not finite stops, and keeps the layer of the epoch with the lowest loss before.
    """

    task: TaskLoss
    affine: Affine  # the layer that is kept
    epoch: int = 0  # of that layer
    lines: list[dict[str, float]] = field(default_factory=list)
    going: bool = True

    def __post_init__(self) -> None:
        self._best = math.inf, 0, self.affine  # loss, epoch, layer

    def add(self, line: dict[str, float], layer: Affine) -> None:
        """Record an epoch, and decide whether the joint stops."""
        loss, epoch = line.get("validation", line["loss"]), int(line["epoch"])
        if loss < self._best[0]:
            self._best = loss, epoch, layer
        if self.task.patience is not None and epoch - self._best[1] >= self.task.patience:
            self.going = False
        self.lines.append(line)
        self.epoch, self.affine = self._best[1:] if "validation" in line else (epoch, layer)

    def fails(self, epoch: int, losses: list[float], layer: Affine) -> bool:
        """Stop the joint, with a warning, if the losses of an epoch's steps or the layer are not finite."""
        step = next((k for k, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
        if step is None and bool(layer.weight.isfinite().all() and layer.bias.isfinite().all()):
            return False
        _, self.epoch, self.affine = self._best
        self.going = False
        loss = math.nan if step is None else losses[step - 1]
        where = f"in epoch {epoch}, at step {step or len(losses)} of it" if epoch else "at the start"
        warnings.warn(
            f"{self.task.name}: the loss is {loss} {where}; this joint stops and keeps its best layer so far, of "
            f"epoch {self.epoch}. Try a smaller rate",
            stacklevel=2,
        )
        return True

    def finish(self, moments: JointMoments, dtype: torch.dtype) -> None:
        """Set small weights to zero and report on the layer that is kept."""
        weight, bias = self.affine.weight, self.affine.bias
        weight = torch.where(weight.abs() < self.task.threshold, 0.0, weight)
        line = next((line for line in self.lines if line["epoch"] == self.epoch), {})
        report: dict[str, Any] = {
            "r2": explained(moments, Affine(weight, bias)),
            "rank": int(torch.linalg.matrix_rank(weight.to(dtype))),
            "condition": 1.0,
            "iterations": self.lines[-1]["step"] if self.lines else 0,
            "sparsity": float((weight == 0).double().mean()),
            "epoch": self.epoch,
            **{key: line[key] for key in ("loss", "validation", "cross_entropy") if key in line},
        }
        self.affine = Affine(weight, bias, report)


@dataclass
class JointTrainer:
    """Train layers between the same two sites of two frozen networks."""

    lower: CutModel
    upper: CutModel
    joint: Joint  # only its form is used
    moments: JointMoments
    inputs: Any

    def train(self, tasks: Sequence[TaskLoss]) -> list[History]:
        """Train one layer for each task; those with the same epochs, batch size and loss are trained together."""
        first = next((p for p in self.upper.model.parameters() if p.is_floating_point()), torch.zeros(()))
        # Half precision would lose small steps.
        like = torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
        starts = [start_of(task, self.moments) for task in tasks]
        groups: dict[object, list[int]] = {}
        for k, task in enumerate(tasks):
            shared = task.epochs, task.batch, task.autocast, task.patience is None, task.loss, id(task.validation)
            groups.setdefault(shared, []).append(k)
        numbers = FOLDED // first.element_size() // (self.joint.target.channels * math.prod(self.joint.target.space))
        histories: dict[int, History] = {}
        models = [self.lower.model, self.upper.model]
        with as_found(models):  # which also restores the flags
            for model in models:
                model.requires_grad_(False)
            data = self._cache(self.inputs, tasks, like.device)
            validations: dict[int, ActivationCache | None] = {id(None): None}
            for group in groups.values():
                inputs = tasks[group[0]].validation
                if id(inputs) not in validations:
                    users = [task for task in tasks if task.validation is inputs]
                    validations[id(inputs)] = self._cache(inputs, users, like.device)
                # Joints of one rate and rank come next to each other, so that their parameters are one tensor.
                group.sort(key=lambda k: (tasks[k].rate, tasks[k].rank or 0))
                most = max(1, numbers // tasks[group[0]].batch)
                for part in (group[k : k + most] for k in range(0, len(group), most)):
                    parts = [tasks[k] for k in part], [starts[k] for k in part]
                    trained = self._train(*parts, data, validations[id(inputs)], like)
                    histories.update(zip(part, trained, strict=True))
        for history in histories.values():
            history.finish(self.moments, like.dtype)
        return [histories[k] for k in range(len(tasks))]

    def _cache(self, inputs: Any, tasks: Sequence[TaskLoss], device: torch.device) -> ActivationCache:
        """Cache the data or validation data; raise if they do not suit the tasks."""
        rows_of_b = any(task.cka for task in tasks)
        cache = ActivationCache(self.lower, self.upper, self.joint, inputs, rows_of_b=rows_of_b, device=device)
        if cache.soft is None:
            if any(task.loss is None for task in tasks):
                raise ValueError(
                    "task_loss needs a network B that answers (inputs, classes); for other answers give "
                    "TaskLoss(loss=…), a function loss(outputs, batch)"
                )
        elif any(task.targets == "labels" for task in tasks):
            if cache.labels is None:
                raise ValueError("targets='labels' needs (x, y) batches with whole-numbered y; targets='soft' does not")
            low, high, classes = int(cache.labels.min()), int(cache.labels.max()), cache.soft.shape[1]
            if low < 0 or high >= classes:
                raise ValueError(
                    f"the labels range from {low} to {high}, but B answers {classes} classes: if label spaces differ, "
                    "use targets='soft'"
                )
        if inputs is self.inputs and cache.n < HELD_OUT and any(t.patience and t.validation is None for t in tasks):
            raise ValueError(f"patience holds out a tenth of the inputs, fewer than {HELD_OUT} here: give validation=")
        return cache

    def _train(
        self,
        tasks: Sequence[TaskLoss],
        starts: Sequence[list[Tensor]],
        data: ActivationCache,
        validation: ActivationCache | None,
        like: Tensor,
    ) -> list[History]:
        """The training loop, for K joints with the same number of epochs and the same batch size."""
        epochs, device = tasks[0].epochs, like.device
        blocks: list[list[Tensor]] = []  # the bias and the weight, or its factors, of joints with one rate and rank
        groups: list[dict[str, Any]] = []
        for (rate, _), members in itertools.groupby(range(len(tasks)), lambda k: (tasks[k].rate, tasks[k].rank)):
            parts = zip(*(starts[k] for k in members), strict=True)
            blocks.append([torch.stack(part).to(like).requires_grad_() for part in parts])
            groups.append({"params": blocks[-1], "lr": rate})
        # Adam works entry by entry, so joints do not affect each other, even if one is no longer finite.
        optimiser = torch.optim.Adam(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda epoch: 0.1 ** (3 * epoch // epochs))
        learns_bias = torch.tensor([[task.bias] for task in tasks], device=device)

        def layers() -> tuple[Tensor, Tensor]:
            """The weights (K, q, p) and biases (K, q)."""
            weights = [block[1] if len(block) == 2 else torch.bmm(block[1], block[2]) for block in blocks]
            return torch.cat(weights), torch.cat([block[0] for block in blocks]) * learns_bias

        def snapshot() -> list[Affine]:
            """The current layer of each joint, in float64 on the CPU."""
            weights, biases = (part.detach().double().cpu() for part in layers())
            return [Affine(weight.clone(), bias.clone()) for weight, bias in zip(weights, biases, strict=True)]

        losses_of = self._objective(tasks, like)

        def run(cache: ActivationCache, order: Tensor, *, train: bool = False) -> tuple[Tensor, Tensor]:
            """The losses and cross-entropies of every step, (steps, 2, K), and their mean over the inputs, (2, K)."""
            steps, counts = [], []
            n, size = order.shape[1], tasks[0].batch
            ends = list(range(size, n, size))
            if ends and size > 1 and n - ends[-1] == 1:
                ends.pop()  # a last batch of one input, which has no CKA, joins the one before
            for index in order.to(device, non_blocking=True).tensor_split(ends, dim=1):
                with torch.set_grad_enabled(train):
                    loss, cross_entropy = losses_of(*layers(), cache, index)
                    total = loss.sum()
                if train:
                    optimiser.zero_grad()
                    total.backward()
                    optimiser.step()
                steps.append(torch.stack([loss.detach(), cross_entropy]))
                counts.append(index.shape[1])
            table = torch.stack(steps).double().cpu()  # the only synchronisation with the device, once per pass
            return table, torch.einsum("s,sik->ik", torch.tensor(counts).double() / sum(counts), table)

        # A joint's seed sets which inputs it is trained on, and in which order; (1, n) if all have one seed.
        seeds = [task.seed for task in tasks]
        generators = {seed: torch.Generator().manual_seed(seed) for seed in seeds}
        rows = seeds if len(generators) > 1 else seeds[:1]

        def shuffled(n: int) -> Tensor:
            orders = {seed: torch.randperm(n, generator=generator) for seed, generator in generators.items()}
            return torch.stack([orders[seed] for seed in rows])

        chosen, held_out = torch.arange(data.n).expand(len(rows), -1), None
        if validation is not None:
            held_out = torch.arange(validation.n)[None]
        elif tasks[0].patience is not None:
            held_out, chosen = shuffled(data.n).tensor_split([data.n // HELD_OUT], dim=1)

        histories = [History(task, layer) for task, layer in zip(tasks, snapshot(), strict=True)]
        step = 0
        with Progress(f"training {len(tasks)} joints" if len(tasks) > 1 else "training", epochs, "epochs") as bar:
            for epoch in range(epochs + 1):  # epoch 0: the losses at the start
                order = chosen.gather(1, shuffled(chosen.shape[1])) if epoch else chosen
                table, mean = run(data, order, train=epoch > 0)
                step += len(table) if epoch else 0
                validated = None if held_out is None else run(validation or data, held_out)[1]
                for k, (history, layer) in enumerate(zip(histories, snapshot(), strict=True)):
                    if not history.going or history.fails(epoch, table[:, 0, k].tolist(), layer):
                        continue
                    line = {"epoch": epoch, "step": step, "loss": float(mean[0, k])}
                    if validated is not None:
                        line["validation"] = float(validated[0, k])
                    if data.soft is not None:
                        line["cross_entropy"] = float(mean[1, k])
                    if history.task.record and (epoch % history.task.record == 0 or epoch == epochs):
                        line |= self._indices(layer)
                    history.add(line, layer)
                if not any(history.going for history in histories):
                    break
                if epoch:
                    schedule.step()
                    bar.advance()
        return histories

    def _objective(
        self, tasks: Sequence[TaskLoss], like: Tensor
    ) -> Callable[[Tensor, Tensor, ActivationCache, Tensor], tuple[Tensor, Tensor]]:
        """Return a function of K layers and of the inputs at an index (1, m) or (K, m), which returns two tensors (K,).

        They are the loss of each joint, by its own options, and its cross-entropy to B's soft answers, NaN if B is not
        a classifier.
        """
        form, upper, autocast = self.joint.target, self.upper, tasks[0].autocast
        channels_last = True  # the layout of the rows, unless B's upper part does not accept it
        # Made once: copying a tensor to the device at every step would synchronise it.
        l1, cka = (torch.tensor([getattr(t, name) for t in tasks], dtype=like.dtype).to(like) for name in ("l1", "cka"))
        by_labels = torch.tensor([task.targets == "labels" for task in tasks], device=like.device)
        with_cka = torch.tensor([k for k, task in enumerate(tasks) if task.cka], dtype=torch.long, device=like.device)
        any_l1, any_labels = any(task.l1 for task in tasks), any(task.targets == "labels" for task in tasks)

        def losses_of(weight: Tensor, bias: Tensor, cache: ActivationCache, index: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal channels_last
            count = len(weight)
            with torch.autocast(like.device.type, torch.bfloat16, enabled=autocast):
                rows = cache.rows("a", index).expand(count, -1, -1)
                mapped = torch.baddbmm(bias[:, None].to(rows.dtype), rows, weight.transpose(1, 2).to(rows.dtype))
                activation = activations_of(mapped, index.shape[1], form)
                args, kwargs = (), {}
                if upper.cut.needs_input:
                    call = upper.call(cache.inputs(index))
                    args, kwargs = rebuild(lambda leaf: _repeated(leaf, count // len(index)), call)
                try:
                    output = upper.cut.task(activation if channels_last else activation.contiguous(), *args, **kwargs)
                except RuntimeError:  # `x.view(…)`, say
                    if not channels_last:
                        raise
                    channels_last = False
                    output = upper.cut.task(activation.contiguous(), *args, **kwargs)
            outputs = answer_of(output).unflatten(0, (count, index.shape[1]))
            cross_entropy = torch.full_like(bias[:, 0], math.nan)
            if cache.soft is not None:
                logarithms = outputs.to(cache.soft.dtype).log_softmax(-1)
                cross_entropy = -(cache.soft[index] * logarithms).sum(-1).mean(-1)
            loss = cross_entropy if tasks[0].loss is None else _by_user(tasks[0].loss, outputs, cache, index)
            if any_labels:
                assert cache.labels is not None
                labels = cache.labels[index].expand(count, -1)[..., None]
                loss = torch.where(by_labels, -logarithms.gather(-1, labels).mean((1, 2)), loss)
            if any_l1:
                loss = loss + l1 * weight.abs().sum((1, 2))
            if len(with_cka):
                rows_b = cache.rows("b", index if len(index) == 1 else index[with_cka])
                penalty = cka[with_cka] * cka_of_rows(mapped[with_cka], rows_b)
                loss = loss.index_add(0, with_cka, penalty.to(loss))
            return loss, cross_entropy.detach()

        return losses_of

    def _indices(self, layer: Affine) -> dict[str, float]:
        """The values in the history: how much of B the layer explains, and the similarity of S(A) and B."""
        r2 = {"r2": explained(self.moments, layer), "r2_about_zero": explained(self.moments, layer, about="zero")}
        try:
            return r2 | similarity_at_joint(self.moments, layer, INDICES, of_b=self._scatter_b)
        except ValueError:  # a map to a single point, as from a strong l1, has no similarity to B
            return r2

    @cached_property
    def _scatter_b(self) -> Scatter:
        return scatter(self.moments, "b")


def _by_user(loss: UserLoss, outputs: Tensor, cache: ActivationCache, index: Tensor) -> Tensor:
    """(K,): the user's loss of each joint's answers."""
    batches = [cache.inputs(row) for row in index]
    values = [loss(answers, batches[k if len(batches) > 1 else 0]) for k, answers in enumerate(outputs)]
    for value in values:
        if not isinstance(value, Tensor) or value.ndim or (torch.is_grad_enabled() and not value.requires_grad):
            got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"loss(outputs, batch) must return a single number computed from the outputs "
                f"{tuple(outputs.shape[1:])}, as a tensor without dimensions, got {got}"
            )
    return torch.stack(values)


def cka_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """(J,): linear CKA of rows x (J, n, p) and y (1 or J, n, q), in float32 at least; differentiable."""
    with torch.autocast(x.device.type, enabled=False):
        # Divided by their size, which CKA ignores: fourth powers of large activations overflow.
        sizes = [centred_rows(rows.detach()).square().sum((1, 2), keepdim=True).sqrt() for rows in (x, y)]
        x, y = (widened(rows) / size for rows, size in zip((x, y), sizes, strict=True))
        if x.shape[1] < max(x.shape[2], y.shape[2]):
            k, l = centred_grams(x), centred_grams(y)
            xx, yy, xy = (product.sum((1, 2)) for product in (k.square(), l.square(), k * l))
        else:
            x, y = centred_rows(x), centred_rows(y)
            xx, yy, xy = ((u.transpose(1, 2) @ v).square().sum((1, 2)) for u, v in ((x, x), (y, y), (x, y)))
        return linear_cka(Alignment(xx, yy, xy))


def _repeated(leaf: Any, times: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.repeat(times, *[1] * (leaf.ndim - 1))
    return leaf * times if isinstance(leaf, list) else leaf

"""The options of task-loss matching, written as "task_loss(start='random', epochs=10)"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..capture import count_inputs, cut, labels_of
from ..capture.structure import join, rebuild
from ..checks import whole_number
from ..factory import parse_call
from ..linalg import Fit, JointMoments, centred_grams, centred_rows, find_fit, widened
from ..measures import linear_cka
from ..process_state import kept_random_state
from ..progress import Progress
from ..stats import Alignment
from .halves import CHUNK, CutModel, answer_of, chunks_of
from .joint import Form, Joint

NAME = "task_loss"
TARGETS = ("soft", "labels")
RANDOM = "random"


@dataclass(frozen=True)
class TaskLoss:
    """Train the layer so that the stitched network does B's job (Csiszárik et al. 2021, section 4.2).

    `targets`: "soft", the cross-entropy to B's own soft answers, or "labels", to the data's. `start`: "random" (as
    torch.nn.Linear starts) or any closed form's text. `rank`: the layer is a product of two factors that meet in so
    few channels. The loss is that + `l1` Σ |weight| + `cka` × linear CKA between S(A) and B on the rows of the batch
    (biased upwards where these are few). `threshold`: weights that end up smaller are set to zero. Adam, at a `rate`
    that is divided by ten at each third of the epochs. `patience`: stop after so many epochs without a better
    validation loss. `seed`: of a random start, the order of the inputs, and which tenth is held out. `autocast`: the
    networks run in bfloat16. `record`: similarity indices every so many epochs, and at the end; 0: never (at 256
    channels they cost a good part of a second each time).
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

    def __post_init__(self) -> None:
        if self.targets not in TARGETS:
            raise _bad("targets", self.targets, "'soft' or 'labels'")
        for name in ("bias", "autocast"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        for name, least in (("epochs", 1), ("batch", 1), ("seed", 0), ("record", 0), ("rank", 1), ("patience", 1)):
            optional = name in ("rank", "patience")
            if not (optional and getattr(self, name) is None):
                _check_whole(name, getattr(self, name), least, " or None" if optional else "")
        if not _is_number(self.rate) or not self.rate > 0:
            raise _bad("rate", self.rate, "a finite number above 0")
        for name in ("l1", "threshold"):
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise _bad(name, getattr(self, name), "a finite number, 0 or more")
        if not _is_number(self.cka):
            raise _bad("cka", self.cka, "a finite number; a negative one pulls towards B")
        if self.rank is not None and (self.l1 or self.threshold):
            raise ValueError(f"{NAME}: rank={self.rank} with l1 or threshold: weights set to zero would undo the rank")
        self.start_fit  # noqa: B018 (an unknown start is refused here, not after the pass over the data)

    @property
    def start_fit(self) -> Fit | None:
        """The closed form to start from; None: at random."""
        if not isinstance(self.start, str):
            raise _bad("start", self.start, f"'{RANDOM}' or the text of a closed form")
        return None if self.start == RANDOM else find_fit(self.start, also=(RANDOM,))

    @property
    def name(self) -> str:
        """As it is written, with the options that are not the usual ones."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{NAME}({', '.join(f'{key}={value!r}' for key, value in changed)})" if changed else NAME


def find_way(text: str | Fit | TaskLoss) -> Fit | TaskLoss:
    """A closed form, or training, by name and options."""
    if not isinstance(text, str):
        if not isinstance(text, (Fit, TaskLoss)):
            raise TypeError(f"a fit is named by a text like 'least_squares' or 'task_loss(seed=1)', got {text!r}")
        return text
    name, options = parse_call(text)
    if name != NAME:
        return find_fit(text, also=(NAME,))
    known = [f.name for f in fields(TaskLoss)]
    if unknown := [key for key in options if key not in known]:
        raise ValueError(f"{NAME} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return TaskLoss(**options)


def find_ways(fit: Any) -> list[Fit | TaskLoss]:
    """All that were asked for, in order."""
    if isinstance(fit, (str, Fit, TaskLoss)):
        return [find_way(fit)]
    if not isinstance(fit, Sequence) or not fit:
        raise ValueError(f"fit is a text or a list of at least one, got {fit!r}")
    return [find_way(each) for each in fit]


def _bad(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{NAME}: {name} must be {allowed}, got {value!r}")


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def _check_whole(name: str, value: object, least: int, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise _bad(name, value, f"a whole number from {least} on{otherwise}")


# Where training begins: the layer of a closed form or a random one, whole or as two factors


@dataclass(frozen=True)
class Start:
    """weight = left right where there are factors, else left alone; in float64."""

    left: Tensor  # (q, p), or (q, rank)
    right: Tensor | None  # (rank, p)
    bias: Tensor  # (q,)


def start_of(task: TaskLoss, moments: JointMoments) -> Start:
    p, q = moments.widths
    rank = None if task.rank is None else whole_number(task.rank, "task_loss: rank", least=1, most=min(p, q))
    fit = task.start_fit
    found = _random(p, q, rank, task.seed) if fit is None else _fitted(fit, moments, rank, task.bias)
    return found if task.bias else Start(found.left, found.right, torch.zeros_like(found.bias))


def _random(p: int, q: int, rank: int | None, seed: int) -> Start:
    """As torch.nn.Linear: uniform within ± 1 / √(channels in); a factor is a layer of its own."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, channels: int) -> Tensor:
        return (torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1) / channels**0.5

    if rank is None:
        return Start(uniform(q, p, channels=p), None, uniform(q, channels=p))
    return Start(uniform(q, rank, channels=rank), uniform(rank, p, channels=p), uniform(q, channels=rank))


def _fitted(fit: Fit, moments: JointMoments, rank: int | None, bias: bool) -> Start:
    if rank is not None and fit.name == "least_squares":
        fit = find_fit(f"reduced_rank(k={rank})")  # the best of that rank, not the nearest to the best of any
    for option in ("intercept", "centre"):  # without a bias the best map is another
        if not bias and option in fit.parameters and option not in fit.options:
            fit = fit.using(**{option: False})
    affine = fit(moments)
    if rank is None:
        return Start(affine.weight, None, affine.bias)
    left, sizes, right = torch.linalg.svd(affine.weight, full_matrices=False)
    roots = sizes[:rank].sqrt()
    weight = (left[:, :rank] * sizes[:rank]) @ right[:rank]
    moved = affine.bias + (affine.weight - weight) @ moments.mean_a  # what was cut off keeps its mean
    return Start(left[:, :rank] * roots, roots[:, None] * right[:rank], moved)


# Many layers side by side: each has parameters and an optimiser of its own, all are moved by the same operations

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam's usual ones


class JointStack:
    """K affine maps (q, p), those of two factors after the others, and Adam, which works entry by entry.

    Factors of different rank are filled up with zeros on both sides: these have no gradient, so stay.
    """

    def __init__(self, tasks: Sequence[TaskLoss], starts: Sequence[Start], like: Tensor) -> None:
        whole = [start for start in starts if start.right is None]
        pairs = [(start.left, start.right) for start in starts if start.right is not None]
        self.count = len(starts)
        self.tensors: list[Tensor] = [torch.stack([start.bias for start in starts])]
        owners = [slice(None)]
        if whole:
            self.tensors.append(torch.stack([start.left for start in whole]))
            owners.append(slice(0, len(whole)))
        if pairs:
            rank = max(left.shape[1] for left, _ in pairs)
            self.tensors.append(torch.stack([_filled(left.T, rank).T for left, _ in pairs]))
            self.tensors.append(torch.stack([_filled(right, rank) for _, right in pairs]))
            owners += [slice(len(whole), None)] * 2
        self._has = bool(whole), bool(pairs)
        wide = torch.promote_types(like.dtype, torch.float32)  # half precision would lose small steps
        self.tensors = [tensor.to(like.device, wide).requires_grad_() for tensor in self.tensors]
        rates = torch.tensor([task.rate for task in tasks], dtype=wide, device=like.device)
        learns_bias = torch.tensor([task.bias for task in tasks], device=like.device)
        self._rates = [_beside(rates[own], tensor) for own, tensor in zip(owners, self.tensors, strict=True)]
        self._rates[0] = self._rates[0] * _beside(learns_bias, self.tensors[0])
        self._owners = owners
        self._first = [torch.zeros_like(tensor) for tensor in self.tensors]
        self._second = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.steps = 0

    @property
    def bias(self) -> Tensor:
        """(K, q)."""
        return self.tensors[0]

    def weight(self) -> Tensor:
        """(K, q, p)."""
        return _weight(self.tensors, self._has)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], factor: float) -> None:
        """One step of Adam at `factor` × each joint's rate; one that is no longer finite spoils no other."""
        self.steps += 1
        first_share, second_share = 1 - BETA_1**self.steps, 1 - BETA_2**self.steps
        for k, gradient in enumerate(gradients):
            first, second, tensor = self._first[k], self._second[k], self.tensors[k]
            first.lerp_(gradient, 1 - BETA_1)
            second.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
            size = (second.sqrt() / second_share**0.5).add_(EPSILON)
            tensor.sub_(self._rates[k] * (factor / first_share) * first / size)

    def state(self) -> list[Tensor]:
        """A copy of all parameters."""
        return [tensor.detach().clone() for tensor in self.tensors]

    def mixed(self, chosen: Tensor, one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
        """The state of `one` for the joints that are chosen, else that of the other."""
        return [
            torch.where(_beside(chosen[own], left), left, right)
            for own, left, right in zip(self._owners, one, other, strict=True)
        ]

    def maps(self, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The weights (K, q, p) and biases (K, q) of a state, in float64 on the CPU; one copy from the device each."""
        wide = [tensor.detach().double() for tensor in state]
        return _weight(wide, self._has).cpu(), wide[0].cpu()

    def finite(self) -> Tensor:
        """(K,): whose parameters are all finite."""
        found = self.bias.isfinite().all(1)
        for own, tensor in list(zip(self._owners, self.tensors, strict=True))[1:]:
            found[own] &= tensor.isfinite().all(2).all(1)
        return found


def _weight(tensors: Sequence[Tensor], has: tuple[bool, bool]) -> Tensor:
    whole, pairs = has
    if not pairs:
        return tensors[1]
    products = torch.bmm(tensors[-2], tensors[-1])
    return torch.cat([tensors[1], products]) if whole else products


def _filled(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])])


def _beside(per_joint: Tensor, tensor: Tensor) -> Tensor:
    """(K,) in a shape that broadcasts with (K, …)."""
    return per_joint.view(-1, *[1] * (tensor.ndim - 1))


# The inputs of a stitch, read once, and what the frozen networks make of them, kept where that fits

BUDGET = 2 * 2**30  # bytes that are kept of activations, and again of inputs; on a GPU a quarter of what is free


def read_inputs(data: Any, max_rows: int | None) -> Any:
    """All inputs as one batch, in the structure of the data's own."""
    with kept_random_state():
        return join([chunk.batch for chunk in chunks_of(data, max_rows)])


def in_chunks(inputs: Any) -> list[Any]:
    """The same inputs a chunk at a time, without a copy."""
    n = count_inputs(inputs)
    return [cut(inputs, start, min(start + CHUNK, n)) for start in range(0, n, CHUNK)]


class ActivationCache:
    """What training asks for over and over: A's rows at the site, B's, B's answers, labels and inputs, by index.

    An index is (J, m): m inputs each for J joints; J = 1: the same for all. Activations that do not fit are made anew
    for each batch.
    """

    def __init__(
        self, lower: CutModel, upper: CutModel, joint: Joint, inputs: Any, *, rows_of_b: bool, like: Tensor
    ) -> None:
        self.lower, self.upper, self.joint = lower, upper, joint
        self.n = count_inputs(inputs)
        self._budget = max(BUDGET, torch.cuda.mem_get_info(like.device)[0] // 4 if like.is_cuda else 0)
        self._device = like.device
        self._inputs = self._placed(inputs)
        labels = labels_of(inputs)
        self.labels = None if labels is None else labels.to(like.device).long()
        self._a: Tensor | None = None
        self._b: Tensor | None = None
        self._fill(rows_of_b)

    @torch.no_grad()
    def _fill(self, rows_of_b: bool) -> None:
        answers, a, b = _Pieces(self._budget), _Pieces(self._budget // (1 + rows_of_b)), _Pieces(self._budget // 2)
        with Progress("running both networks once", self.n, "inputs") as bar:
            for batch in in_chunks(self._inputs):
                answers.add(self.upper.answer(batch), self.n)
                if a.wanted:
                    a.add(self._rows_a(batch), self.n)
                if rows_of_b and b.wanted:
                    b.add(self._rows_b(batch), self.n)
                bar.advance(count_inputs(batch))
        self._a, self._b, found = a.whole(), b.whole(), answers.whole()
        # Soft answers are kept where B is a classifier: one answer (classes,) an input.
        self.soft = None
        if found is not None and found.ndim == 2 and found.is_floating_point():
            self.soft = found.to(torch.promote_types(found.dtype, torch.float32)).softmax(1)

    def rows_a(self, index: Tensor) -> Tensor:
        """(J, m, positions, p): A's rows at the joint, in B's shape."""
        flat = self._a[index.flatten()] if self._a is not None else self._rows_a(self.inputs(index))
        return flat.view(*index.shape, *flat.shape[1:])

    def rows_b(self, index: Tensor) -> Tensor:
        """(J, m, positions, q)."""
        flat = self._b[index.flatten()] if self._b is not None else self._rows_b(self.inputs(index))
        return flat.view(*index.shape, *flat.shape[1:])

    def inputs(self, index: Tensor) -> Any:
        """The batch of these J m inputs, as the data give it."""
        return rebuild(lambda leaf: _taken(leaf, index.flatten()), self._inputs)

    @torch.no_grad()
    def _rows_a(self, batch: Any) -> Tensor:
        return rows_of(self.joint.shaped(self.lower.representation(batch)), self.joint.target).to(self._device)

    @torch.no_grad()
    def _rows_b(self, batch: Any) -> Tensor:
        activation, keep = self.upper.tokens(batch)
        if keep is not None:
            raise ValueError("cka= compares the tokens of a batch, and padding would count: give inputs of one length")
        return rows_of(activation, self.joint.target).to(self._device)

    def _placed(self, inputs: Any) -> Any:
        """On the device if they fit, else where they are."""
        sizes: list[int] = []
        rebuild(lambda leaf: sizes.append(leaf.nbytes if isinstance(leaf, Tensor) else 0), inputs)
        if sum(sizes) > self._budget:
            return inputs
        return rebuild(lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, inputs)


def rows_of(activation: Tensor, form: Form) -> Tensor:
    """(inputs, positions, channels)."""
    last = activation if form.tokens or not form.space else activation.movedim(1, -1)
    return last.reshape(len(last), -1, last.shape[-1])


class _Pieces:
    """Parts of one tensor, as long as all of them have one shape and will fit."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._parts: list[Tensor] = []
        self.wanted = True

    def add(self, part: Tensor, n: int) -> None:
        fits = part.nbytes / len(part) * n <= self._budget
        same = not self._parts or part.shape[1:] == self._parts[0].shape[1:]
        self.wanted = self.wanted and fits and same
        if self.wanted:
            self._parts.append(part.detach())
        else:
            self._parts.clear()

    def whole(self) -> Tensor | None:
        return torch.cat(self._parts) if self._parts else None


def _taken(leaf: Any, index: Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[index.to(leaf.device)]
    return [leaf[i] for i in index.tolist()]


# What each of many joints loses on a batch: they are folded into the inputs of B's upper part, which runs once

UserLoss = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Losses:
    """Of every joint on one batch."""

    loss: Tensor  # (K,) with penalties
    cross_entropy: Tensor | None  # (K,) to B's soft answers; None where B is no classifier

    def detached(self) -> Losses:
        return Losses(self.loss.detach(), None if self.cross_entropy is None else self.cross_entropy.detach())

    @classmethod
    def mean(cls, parts: Sequence[Losses], counts: Sequence[int]) -> Losses:
        """Over batches of so many inputs."""
        shares = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        crosses = [part.cross_entropy for part in parts if part.cross_entropy is not None]

        def over(found: list[Tensor]) -> Tensor:
            return shares @ torch.stack(found).double().cpu()  # the device is waited for here

        return cls(over([part.loss for part in parts]), over(crosses) if crosses else None)


class Objective:
    """The loss of K joints, each by its own options."""

    def __init__(
        self, tasks: Sequence[TaskLoss], upper: CutModel, form: Form, user: UserLoss | None, like: Tensor
    ) -> None:
        def per_joint(name: str) -> Tensor:
            return torch.tensor([getattr(task, name) for task in tasks], dtype=like.dtype, device=like.device)

        self._upper, self._form, self._user = upper, form, user
        self._l1 = per_joint("l1") if any(task.l1 for task in tasks) else None
        penalised = [k for k, task in enumerate(tasks) if task.cka]
        self._with_cka = torch.tensor(penalised, device=like.device) if penalised else None  # made once: no waiting
        self._cka = per_joint("cka")[penalised]
        self._by_labels = torch.tensor([task.targets == "labels" for task in tasks], device=like.device)
        self._labelled = user is None and any(task.targets == "labels" for task in tasks)
        self._autocast = tasks[0].autocast
        self.channels_last = True  # until B's upper part turns out not to run on maps laid out so

    def __call__(self, stack: JointStack, kept: ActivationCache, index: Tensor) -> Losses:
        """Of the inputs at `index`, (1, m) or (K, m)."""
        weight = stack.weight()
        rows = kept.rows_a(index)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self._autocast):
            mapped = _mapped(rows.flatten(1, 2), weight, stack.bias)
            outputs = self._answers(mapped, rows.shape, kept, index)
        loss, cross = self._task(outputs.unflatten(0, (stack.count, index.shape[1])), kept, index)
        if self._l1 is not None:
            loss = loss + self._l1 * weight.abs().sum((1, 2))
        if self._with_cka is not None:
            rows_b = kept.rows_b(index if len(index) == 1 else index[self._with_cka]).flatten(1, 2)
            penalty = self._cka * cka_of_rows(mapped[self._with_cka], rows_b)
            loss = loss.index_add(0, self._with_cka, penalty.to(loss))
        return Losses(loss, cross)

    def _answers(self, mapped: Tensor, shape: torch.Size, kept: ActivationCache, index: Tensor) -> Tensor:
        """(K m, …) from the rows (K, m positions, q)."""
        activation = unfolded(mapped, shape[1], self._form)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if self._upper.cut.needs_input:
            times = len(mapped) // len(index)
            args, kwargs = rebuild(lambda leaf: _repeated(leaf, times), self._upper.call(kept.inputs(index)))
        return answer_of(
            self._upper.cut.task(activation if self.channels_last else activation.contiguous(), *args, **kwargs)
        )

    def _task(self, outputs: Tensor, kept: ActivationCache, index: Tensor) -> tuple[Tensor, Tensor | None]:
        cross = None
        if kept.soft is not None:
            logarithms = outputs.to(kept.soft.dtype).log_softmax(-1)
            cross = -(kept.soft[index] * logarithms).sum(-1).mean(-1)
        if self._user is not None:
            return self._by_user(self._user, outputs, kept, index), cross
        assert cross is not None
        if not self._labelled:
            return cross, cross
        assert kept.labels is not None
        chosen = kept.labels[index].expand(len(outputs), -1)[..., None]
        return torch.where(self._by_labels, -logarithms.gather(-1, chosen).mean((1, 2)), cross), cross

    def _by_user(self, loss: UserLoss, outputs: Tensor, kept: ActivationCache, index: Tensor) -> Tensor:
        batches = [kept.inputs(row) for row in index]
        found = [loss(own, batches[k if len(batches) > 1 else 0]) for k, own in enumerate(outputs)]
        for value in found:
            if not isinstance(value, Tensor) or value.ndim or (torch.is_grad_enabled() and not value.requires_grad):
                got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"loss(outputs, batch) must return a single number made from the outputs {tuple(outputs.shape[1:])}"
                    f" as a tensor without dimensions, got {got}"
                )
        return torch.stack(found)

    @torch.no_grad()
    def settle(self, stack: JointStack, kept: ActivationCache, index: Tensor) -> None:
        """Find out whether B's upper part runs on maps laid out channels last; `x.view(…)` in it may not."""
        try:
            self(stack, kept, index)
        except RuntimeError:
            self.channels_last = False


def _mapped(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(K, r, q) from the rows (1 or K, r, p)."""
    rows = rows.expand(len(weight), -1, -1)
    return torch.baddbmm(bias[:, None].to(rows.dtype), rows, weight.transpose(1, 2).to(rows.dtype))


def unfolded(mapped: Tensor, inputs: int, form: Form) -> Tensor:
    """The rows (K, inputs × positions, q) as K × inputs activations of a form; maps are laid out channels last."""
    first = len(mapped) * inputs
    width = mapped.shape[-1]
    if not form.space:
        return mapped.reshape(first, width)
    if form.tokens and len(form.space) == 1:
        return mapped.reshape(first, -1, width)  # texts need not be as long as the first
    activation = mapped.reshape(first, *form.space, width)
    return activation if form.tokens else activation.movedim(-1, 1)


def cka_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """(J,) linear CKA of rows x (J, n, p) and y (1 or J, n, q), in float32 at least; differentiable."""
    with torch.autocast(x.device.type, enabled=False):
        x, y = (_unit_scale(rows) for rows in (x, y))
        if x.shape[1] < max(x.shape[2], y.shape[2]):
            of_x, of_y = centred_grams(x), centred_grams(y)
            xx, yy, xy = (part.sum((1, 2)) for part in (of_x.square(), of_y.square(), of_x * of_y))
        else:
            x, y = centred_rows(x), centred_rows(y)
            pairs = (x, x), (y, y), (x, y)
            xx, yy, xy = ((one.transpose(1, 2) @ other).square().sum((1, 2)) for one, other in pairs)
        return linear_cka(Alignment(xx, yy, xy))


def _unit_scale(rows: Tensor) -> Tensor:
    """Over their size: CKA does not see it, and fourth powers of large activations overflow."""
    size = centred_rows(rows.detach()).square().sum((1, 2), keepdim=True).sqrt()
    return widened(rows) / size


def _repeated(leaf: Any, times: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.repeat(times, *[1] * (leaf.ndim - 1))
    return leaf * times if isinstance(leaf, list) else leaf

"""Putting the neurons of one network in the order of another's, by their weights alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..capture import as_found, kept_attributes, unwrap
from ..capture.batches import example_input
from ..capture.sites import tensors_in
from ..checks import whole_number
from ..linalg import best_assignment
from ..models.specification import seeded
from .axes import Axis, WeightAxes, leaves, named_weights, order_of, places_of, weight_axes

SWEEPS = 200  # far more than any descent took
GAIN = 1e-10  # of the size of all weights: less is rounding, and could go round in circles
# Differences of outputs that count as rounding, over their range; sums in another order stay far below.
SAME = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE = 5e-2  # in fewer digits
NAMED = 3  # names that an error spells out
BLIND = "the model answers all random inputs alike, so it could not be checked that matching leaves what it computes"

Orders: TypeAlias = Mapping[Axis, Tensor]


@dataclass(frozen=True, eq=False)
class Matched:
    """Model B with its neurons in the order of A's."""

    model_b: nn.Module  # a copy of B that computes what B computes
    permutations: dict[str, Tensor]  # for each group of axes: entry i of the copy is entry permutation[i] of B
    history: tuple[float, ...]  # cosine of all parameters with A's: as found, at the start, after each sweep
    starts: tuple[float, ...]  # that cosine from each start; the best was taken
    fixed: dict[str, str]  # axes that keep their order because an operation is not understood, and which
    blind: bool  # whether B answered all inputs alike, so that the check of its outputs says little

    @property
    def before(self) -> float:
        """Cosine of all parameters of A and B as they were."""
        return self.history[0]

    @property
    def after(self) -> float:
        """Cosine of all parameters of A and the matched B."""
        return self.history[-1]

    @property
    def caveats(self) -> tuple[str, ...]:
        """Axes that were not matched, and why; whether the check of the outputs says little."""
        texts = [f"{axis} was not matched: {reason}" for axis, reason in self.fixed.items()]
        return (*texts, BLIND) if self.blind else tuple(texts)


def match_weights(
    model_a: nn.Module,
    model_b: nn.Module,
    *,
    seed: int = 0,
    starts: int = 3,
    input_shape: Sequence[int] | None = None,
    example: Tensor | None = None,
) -> Matched:
    """Reorder B's neurons so that its parameters are as near to A's as coordinate descent brings them.

    The sum of squared differences over all parameters is made smaller one group of axes at a time, the others held
    (Ainsworth et al. 2023, weight matching), until no group improves: a local optimum, so there are several starts:
    from the input layer by layer, from the output, from B as it is, then random orders. The best is kept. What B
    computes stays the same, which is checked. Which axes belong together is read from one forward on `example`, or on
    random inputs of `input_shape` (without the batch axis), or of a shape that fits the first layer.

    Not removed: scales that ReLU passes on, signs that tanh does, and orders of neurons within one head of attention
    or one group of a convolution.
    """
    whole_number(starts, "starts", least=1)
    plain_a, plain_b = unwrap(model_a), unwrap(model_b)
    weights_a, weights_b = named_weights(plain_a), named_weights(plain_b)
    check_same_tensors(weights_a, weights_b)
    check_finite(weights_a, "A")
    check_finite(weights_b, "B")
    if example is None:
        example = example_input(plain_b, input_shape, seed=seed)
    axes = checked_axes(plain_b, example, seed=seed)
    trained = {name for name, _ in plain_b.named_parameters()}
    ours, theirs = ({name: w[name] for name in w if name in trained} for w in (weights_a, weights_b))
    problem = Problem.of(ours, theirs, axes)

    generator = torch.Generator().manual_seed(seed)
    runs = []
    for k in range(starts):
        start = problem.outwards(backwards=k == 1) if k < 2 else {} if k == 2 else random_orders(axes, generator)
        runs.append(problem.descend(start, generator))
        if runs[-1][1][-1] >= 1 - 1e-12:
            break  # A itself, in another order
    orders, history = max(runs, key=lambda run: run[1][-1])
    model = with_orders(plain_b, axes, orders)
    share, limit, blind = function_change(plain_b, model, example)
    if share > limit:
        raise ValueError(f"matching changed what the model computes, by {share:.1e} of its range")
    return Matched(
        model,
        {name: orders.get(axis, torch.arange(axis.size)) for name, axis in axes.groups.items()},
        (problem.cosine({}), *history),
        tuple(cosines[-1] for _, cosines in runs),
        axes.fixed,
        blind,
    )


# Coordinate descent over orders of neurons: one group of axes at a time is assigned anew, the others held

# One axis of one tensor that holds a group: the tensor's name, the axis, and (entries of the group, k) which k entries
# of the axis belong to each entry of the group.
Slices: TypeAlias = tuple[str, int, Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """The parameters of A and B in float64, and which axes hold which group."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    axes: dict[str, tuple[Axis, ...]]
    slices: dict[Axis, list[Slices]]
    size: float  # product of the norms of all of A's and all of B's parameters

    @classmethod
    def of(cls, a: Mapping[str, Tensor], b: Mapping[str, Tensor], axes: WeightAxes) -> Problem:
        device = next(iter(b.values())).device
        ours, theirs = ({name: t.detach().to(device, torch.float64) for name, t in side.items()} for side in (a, b))
        slices = {
            group: [
                (name, dim, places)
                for name in theirs
                for dim, axis in enumerate(axes.of[name])
                for places in places_of(axis, group)
            ]
            for group in axes.groups.values()
        }
        norms = [sum(float(t.square().sum()) for t in side.values()) ** 0.5 for side in (ours, theirs)]
        if not norms[0] * norms[1]:
            raise ValueError(f"all parameters of {'A' if not norms[0] else 'B'} are 0: there is nothing to match")
        return cls(ours, theirs, axes.of, slices, norms[0] * norms[1])

    def cosine(self, orders: Orders) -> float:
        """Cosine of all parameters, with B's in these orders."""
        products = (float((a * reordered(self.b[n], self.axes[n], orders)).sum()) for n, a in self.a.items())
        return sum(products) / self.size

    def scores(self, group: Axis, orders: Orders, only: Sequence[Slices] | None = None) -> Tensor:
        """(entries of A, entries of B): inner products of all weights that hold the group, other groups in order."""
        total = torch.zeros(group.size, group.size, dtype=torch.float64, device=next(iter(self.b.values())).device)
        others = {axis: order for axis, order in orders.items() if axis is not group}
        for name, dim, places in self.slices[group] if only is None else only:
            a, b, axes = self.a[name], self.b[name], self.axes[name]
            for i in range(len(axes)):
                b = reordered(b.movedim(i, 0), axes[i : i + 1], others if i == dim else orders).movedim(0, i)
            x, y = (side.movedim(dim, 0)[places.to(b.device)].flatten(1) for side in (a, b))
            total += x @ y.T
        return total

    def outwards(self, *, backwards: bool = False) -> dict[Axis, Tensor]:
        """A start: groups from the input on (or back from the output), by weights whose other axes are settled."""
        orders: dict[Axis, Tensor] = {}
        for group in reversed(self.slices) if backwards else self.slices:
            settled = []
            for name, dim, places in self.slices[group]:
                others = {each for axis in self.axes[name] for each in leaves(axis)} & self.slices.keys() - {group}
                if others <= orders.keys():
                    settled.append((name, dim, places))
            orders[group] = best_assignment(self.scores(group, orders, settled or None))[1].cpu()
        return orders

    def descend(self, start: Orders, generator: torch.Generator) -> tuple[dict[Axis, Tensor], list[float]]:
        """Sweep over the groups, in a random order each time, until none improves.

        Returns the orders, and the cosines at the start and after each sweep.
        """
        orders, groups = dict(start), list(self.slices)
        history = [self.cosine(orders)]
        for _ in range(SWEEPS):
            sweep = torch.randperm(len(groups), generator=generator).tolist()
            improved = [self._improve(groups[i], orders) for i in sweep]
            if not any(improved):
                break
            history.append(self.cosine(orders))
        return orders, history

    def _improve(self, group: Axis, orders: dict[Axis, Tensor]) -> bool:
        """Assign one group anew if that brings the weights nearer; whether it does."""
        scores = self.scores(group, orders)
        rows = torch.arange(group.size)
        before = orders.get(group, rows)
        after = best_assignment(scores)[1].cpu()
        names = [name for name, _, _ in self.slices[group]]
        if len(set(names)) == len(names):
            gain = float((scores[rows, after] - scores[rows, before]).sum())
        else:
            # A tensor that holds the group twice counts with its square, of which the scores are the slope.
            gain = (self.cosine({**orders, group: after}) - self.cosine({**orders, group: before})) * self.size
        if gain <= GAIN * self.size:
            return False
        orders[group] = after
        return True


# Networks with their neurons in another order, and whether they still compute the same


def reordered(tensor: Tensor, axes: tuple[Axis, ...], orders: Orders) -> Tensor:
    """A tensor with each axis in its order."""
    for i, axis in enumerate(axes):
        order = order_of(axis, orders)
        if not torch.equal(order, torch.arange(len(order))):
            tensor = tensor.index_select(i, order.to(tensor.device))
    return tensor


@torch.no_grad()
def with_orders(model: nn.Module, axes: WeightAxes, orders: Orders) -> nn.Module:
    """A copy of a model with its neurons in these orders."""
    changed = copy.deepcopy(model)
    for name, tensor in named_weights(changed).items():
        tensor.copy_(reordered(tensor.clone(), axes.of[name], orders))
    return changed


def function_change(model: nn.Module, other: nn.Module, example: Tensor) -> tuple[float, float, bool]:
    """How differently two models answer, in float64 where their forwards can.

    Returns the largest difference of their outputs, over how far one's answers to different inputs lie apart; what
    rounding may make it; and whether all inputs got the same answer, which then says little.
    """
    doubled = example.double() if example.is_floating_point() else example
    try:
        outputs = [_outputs(copy.deepcopy(each).double(), doubled) for each in (model, other)]
    except (RuntimeError, TypeError):  # some forwards insist on float32
        outputs = [_outputs(each, example) for each in (model, other)]
    spread, difference, limit = 0.0, 0.0, SAME[torch.float64]
    for one, another in zip(*outputs, strict=True):
        if not bool(torch.isfinite(one).all()):
            raise ValueError("the model's answer to random inputs is not finite: give example= as it would be used")
        several = one.ndim > 0 and len(one) > 1
        spread = max(spread, float((one - one.mean(0) if several else one).abs().max()))
        difference = max(difference, float((one - another).abs().max()))
        limit = max(limit, SAME.get(one.dtype, COARSE))
    return difference / spread if spread else difference, limit, spread == 0


def _outputs(model: nn.Module, example: Tensor) -> list[Tensor]:
    with kept_attributes(model), as_found(model), seeded(0):
        return [tensor for tensor in tensors_in(model(example)) if tensor.is_floating_point()]


def checked_axes(model: nn.Module, example: Tensor, *, seed: int = 0) -> WeightAxes:
    """The groups of a model's axes, tried out: neurons in a random order must leave what it computes as it is.

    A group that fails is fixed, and named.
    """
    axes = weight_axes(model, example)
    orders = random_orders(axes, torch.Generator().manual_seed(seed))

    def changes(groups: Iterable[Axis]) -> bool:
        other = with_orders(model, axes, {axis: orders[axis] for axis in groups})
        share, limit, _ = function_change(model, other, example)
        return share > limit

    if not changes(axes.groups.values()):
        return axes
    why = "another order of it changes what the model computes"
    bad = {name: why for name, axis in axes.groups.items() if changes([axis])}
    kept = {name: axis for name, axis in axes.groups.items() if name not in bad}
    axes = replace(axes, groups=kept, fixed={**axes.fixed, **bad})
    if changes(axes.groups.values()):
        raise ValueError("orders of neurons that change nothing one by one do together: this model cannot be matched")
    return axes


def random_orders(axes: WeightAxes, generator: torch.Generator) -> dict[Axis, Tensor]:
    """Every group in a random order."""
    return {axis: torch.randperm(axis.size, generator=generator) for axis in axes.groups.values()}


# Whether two models hold the same tensors, and numbers in them


def check_same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: tuple[str, str] = ("A", "B")) -> None:
    """Raise unless both have tensors of the same names and shapes; the error names what differs."""
    faults = []
    for label, ours, theirs in ((names[0], a, b), (names[1], b, a)):
        if only := [name for name in ours if name not in theirs]:
            faults.append(f"only {label} has {some(only)}")
    shapes = [name for name in a if name in b and a[name].shape != b[name].shape]
    differ = [f"{n} is {tuple(a[n].shape)} in {names[0]} and {tuple(b[n].shape)} in {names[1]}" for n in shapes]
    faults += [some(differ)] if differ else []
    if faults:
        raise ValueError(f"{names[0]} and {names[1]} are not of one architecture: {'; '.join(faults)}")


def check_finite(tensors: Mapping[str, Tensor], label: str) -> None:
    """Raise where a tensor holds NaN or infinity; the error names it."""
    for name, tensor in tensors.items():
        # A sum is finite only if all its terms are, and takes a fraction of the time.
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach().sum())):
            continue
        if bad := int((~torch.isfinite(tensor)).sum()):
            raise ValueError(f"{name} of {label} has {bad} of {tensor.numel()} values that are NaN or infinite")


def some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more

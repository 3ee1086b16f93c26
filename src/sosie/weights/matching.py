"""Put the neurons of one network in the order of another's, by their weights alone."""

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
from ..checks import listed, whole_number
from ..linalg import best_assignment
from ..models.specification import seeded
from .axes import Axis, WeightAxes, leaves, named_weights, order_of, places_of, weight_axes
from .maps import check_finite

SWEEPS = 200  # far more than any descent took
GAIN = 1e-10  # relative to the size of all weights: less is rounding, and could loop forever
# Differences of outputs that count as rounding, over their range; sums in a different order stay far below.
SAME = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE = 5e-2  # in half precision
BLIND = "the model gives all random inputs the same answer, so the check that matching changes nothing says little"

Orders: TypeAlias = Mapping[Axis, Tensor]


@dataclass(frozen=True, eq=False)
class Matching:
    """Model B with its neurons in the order of A's."""

    model_b: nn.Module  # a copy of B that computes what B computes
    permutations: dict[str, Tensor]  # for each group of axes: entry i of the copy is entry permutation[i] of B
    history: tuple[float, ...]  # cosine of all parameters with A's: of B itself, at the start, after each sweep
    starts: tuple[float, ...]  # that cosine at the end of each start; the best was taken
    fixed: dict[str, str]  # axes that keep their order because an operation is not understood, and which
    blind: bool  # whether B gave all inputs the same answer, so that the check of its outputs says little

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
        """Axes that were not matched, and why; and whether the check of the outputs says little."""
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
) -> Matching:
    """Reorder B's neurons so that its parameters are as close to A's as coordinate descent brings them.

    The sum of squared differences over all parameters is reduced one group of axes at a time, with the others fixed
    (Ainsworth et al. 2023, weight matching), until no group improves. This finds a local optimum, so there are several
    starts, of which the best is kept: layer by layer from the input, from the output, from B as it is, then random
    orders. B computes the same as before, which is checked. Which axes belong together is read from one forward on
    `example`, or on random inputs of `input_shape` (without the batch axis), or of a shape that fits the first layer.

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
    a, b = ({name: w[name] for name in w if name in trained} for w in (weights_a, weights_b))
    problem = Problem.of(a, b, axes)

    generator = torch.Generator().manual_seed(seed)
    runs = []
    for k in range(starts):
        start = problem.outwards(backwards=k == 1) if k < 2 else {} if k == 2 else random_orders(axes, generator)
        runs.append(problem.descend(start, generator))
        if runs[-1][1][-1] >= 1 - 1e-12:
            break  # A itself, reordered
    orders, history = max(runs, key=lambda run: run[1][-1])
    model = with_orders(plain_b, axes, orders)
    share, limit, blind = function_change(plain_b, model, example)
    if share > limit:
        raise ValueError(f"matching changed what the model computes, by {share:.1e} of its range")
    return Matching(
        model,
        {name: orders.get(axis, torch.arange(axis.size)) for name, axis in axes.groups.items()},
        (problem.cosine({}), *history),
        tuple(cosines[-1] for _, cosines in runs),
        axes.fixed,
        blind,
    )


# Coordinate descent over orders of neurons: one group of axes at a time is reassigned, with the others fixed

# One axis of one tensor that holds a group: the tensor's name, the axis, and (entries of the group, k) the k entries
# of the axis that belong to each entry of the group.
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
        a, b = ({name: t.detach().to(device, torch.float64) for name, t in side.items()} for side in (a, b))
        slices = {
            group: [
                (name, dim, places)
                for name in b
                for dim, axis in enumerate(axes.of[name])
                for places in places_of(axis, group)
            ]
            for group in axes.groups.values()
        }
        norm_a, norm_b = (sum(float(t.square().sum()) for t in side.values()) ** 0.5 for side in (a, b))
        if not norm_a * norm_b:
            raise ValueError(f"all parameters of {'B' if norm_a else 'A'} are 0: there is nothing to match")
        return cls(a, b, axes.of, slices, norm_a * norm_b)

    def cosine(self, orders: Orders) -> float:
        """Cosine of all parameters, with B's in these orders."""
        products = (float((a * reordered(self.b[n], self.axes[n], orders)).sum()) for n, a in self.a.items())
        return sum(products) / self.size

    def scores(self, group: Axis, orders: Orders, only: Sequence[Slices] | None = None) -> Tensor:
        """(entries of A, entries of B): inner products of all weights that hold the group, with the other orders."""
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
        """A start: groups from the input on (or back from the output), by weights whose other axes have an order."""
        orders: dict[Axis, Tensor] = {}
        for group in reversed(self.slices) if backwards else self.slices:
            settled = []
            for name, dim, places in self.slices[group]:
                others = {leaf for axis in self.axes[name] for leaf in leaves(axis)} & self.slices.keys() - {group}
                if others <= orders.keys():
                    settled.append((name, dim, places))
            orders[group] = best_assignment(self.scores(group, orders, settled or None))[1].cpu()
        return orders

    def descend(self, start: Orders, generator: torch.Generator) -> tuple[dict[Axis, Tensor], list[float]]:
        """Sweep over the groups, in a random order each time, until none improves.

        Return the orders, and the cosines at the start and after each sweep.
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
        """Reassign one group if that brings the weights closer; return whether it does."""
        scores = self.scores(group, orders)
        rows = torch.arange(group.size)
        before = orders.get(group, rows)
        after = best_assignment(scores)[1].cpu()
        names = [name for name, _, _ in self.slices[group]]
        if len(set(names)) == len(names):
            gain = float((scores[rows, after] - scores[rows, before]).sum())
        else:
            # A tensor that holds the group twice is quadratic in its order; the scores are only the slope.
            gain = (self.cosine({**orders, group: after}) - self.cosine({**orders, group: before})) * self.size
        if gain <= GAIN * self.size:
            return False
        orders[group] = after
        return True


# Networks with reordered neurons, and whether they still compute the same


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
    """Measure how much the answers of two models differ, in float64 if their forwards allow.

    Return the largest difference of outputs relative to the spread of the first model's answers over inputs; the limit
    up to which it may be rounding; and whether all inputs got the same answer, so that it says little.
    """
    doubled = example.double() if example.is_floating_point() else example
    try:
        outputs = [_outputs(copy.deepcopy(m).double(), doubled) for m in (model, other)]
    except (RuntimeError, TypeError):  # some forwards work in float32 only
        outputs = [_outputs(m, example) for m in (model, other)]
    spread, difference, limit = 0.0, 0.0, SAME[torch.float64]
    for x, y in zip(*outputs, strict=True):
        if not bool(torch.isfinite(x).all()):
            raise ValueError("the model's answer to random inputs is not finite: give example=, a batch of real inputs")
        several = x.ndim > 0 and len(x) > 1
        spread = max(spread, float((x - x.mean(0) if several else x).abs().max()))
        difference = max(difference, float((x - y).abs().max()))
        limit = max(limit, SAME.get(x.dtype, COARSE))
    return difference / spread if spread else difference, limit, spread == 0


def _outputs(model: nn.Module, example: Tensor) -> list[Tensor]:
    with kept_attributes(model), as_found(model), seeded(0):
        return [tensor for tensor in tensors_in(model(example)) if tensor.is_floating_point()]


def checked_axes(model: nn.Module, example: Tensor, *, seed: int = 0) -> WeightAxes:
    """The groups of a model's axes, after a check that random orders of the neurons do not change its answers.

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
    why = "reordering it changes what the model computes"
    bad = {name: why for name, axis in axes.groups.items() if changes([axis])}
    kept = {name: axis for name, axis in axes.groups.items() if name not in bad}
    axes = replace(axes, groups=kept, fixed={**axes.fixed, **bad})
    if changes(axes.groups.values()):
        raise ValueError(
            "this model cannot be matched: reordering groups of neurons together changes what it computes, though "
            "reordering each alone does not"
        )
    return axes


def random_orders(axes: WeightAxes, generator: torch.Generator) -> dict[Axis, Tensor]:
    """Every group in a random order."""
    return {axis: torch.randperm(axis.size, generator=generator) for axis in axes.groups.values()}


# Checks that two models hold the same tensors, with finite numbers


def check_same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: tuple[str, str] = ("A", "B")) -> None:
    """Raise unless both have tensors of the same names and shapes; the error names what differs."""
    faults = []
    for label, tensors, others in ((names[0], a, b), (names[1], b, a)):
        if only := [name for name in tensors if name not in others]:
            faults.append(f"only {label} has {listed(only, 3)}")
    shapes = [name for name in a if name in b and a[name].shape != b[name].shape]
    differ = [f"{n} is {tuple(a[n].shape)} in {names[0]} and {tuple(b[n].shape)} in {names[1]}" for n in shapes]
    faults += [listed(differ, 3)] if differ else []
    if faults:
        raise ValueError(f"{names[0]} and {names[1]} differ in architecture: {'; '.join(faults)}")

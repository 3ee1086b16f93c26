"""Putting the neurons of one network in the order of another's, by their weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...capture import unwrap
from ...capture.axes import named_weights
from ...capture.examples import example_input
from .descent import Problem
from .same_tensors import check_finite, check_same_tensors
from .symmetry import Change, checked_axes, function_change, random_orders, with_orders

BLIND = "the model gives all random inputs one answer: that matching leaves what it computes could not be checked"


@dataclass(frozen=True, eq=False)
class Matched:
    """Model B with its neurons in the order of A's."""

    model_b: nn.Module  # a copy of B that computes what B computes
    permutations: dict[str, Tensor]  # for each group of axes: entry i of the copy is entry permutation[i] of B
    history: tuple[float, ...]  # cosine of all parameters with A's: as found, at the start, after each sweep
    starts: tuple[float, ...]  # that cosine from each start; the best was taken
    fixed: dict[str, str]  # axes that were held in place for want of an understanding, and why
    change: Change  # what the new order made of B's outputs: rounding

    @property
    def before(self) -> float:
        """Cosine of all parameters of A and B as they were."""
        return self.history[0]

    @property
    def after(self) -> float:
        """The same once B is matched."""
        return self.history[-1]

    @property
    def caveats(self) -> tuple[str, ...]:
        """What was held in place, and why; whether the check of the outputs says anything."""
        found = [f"{axis} was not matched: {reason}" for axis, reason in self.fixed.items()]
        return (*found, BLIND) if self.change.blind else tuple(found)


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
    random inputs of `input_shape` (without the batch axis), or of a shape that the first layer tells.

    Not removed: scales that ReLU passes on, signs that tanh does, and orders of neurons within one head of attention
    or one group of a convolution.
    """
    if starts < 1:
        raise ValueError(f"matching needs at least one start, got starts={starts}")
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
        if runs[-1].history[-1] >= 1 - 1e-12:
            break  # A itself, in another order
    best = max(runs, key=lambda run: run.history[-1])
    model = with_orders(plain_b, axes, best.orders)
    change = function_change(plain_b, model, example)
    if not change.is_none:
        raise ValueError(f"matching changed what the model computes, by {change.share:.1e} of its range")
    return Matched(
        model,
        {name: best.orders.get(axis, torch.arange(axis.size)) for name, axis in axes.groups.items()},
        (problem.cosine({}), *best.history),
        tuple(run.history[-1] for run in runs),
        axes.fixed,
        change,
    )

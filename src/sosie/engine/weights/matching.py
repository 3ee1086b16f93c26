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
from .symmetry import checked_axes, function_change, random_orders, with_orders


@dataclass(frozen=True, eq=False)
class Matched:
    """Model B with its neurons in the order of A's."""

    model: nn.Module  # a copy of B that computes what B computes
    permutations: dict[str, Tensor]  # for each group of axes: entry i of the copy is entry permutation[i] of B
    history: tuple[float, ...]  # cosine of all parameters with A's: as found, at the start, after each sweep
    starts: tuple[float, ...]  # that cosine from each start; the best was taken
    fixed: dict[str, str]  # axes that were held in place for want of an understanding, and why
    change: float  # largest difference that the new order made to B's outputs, as a share of the largest

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
        return tuple(f"{axis} was not matched: {reason}" for axis, reason in self.fixed.items())


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
    problem = Problem.of(*({n: t for n, t in w.items() if n in trained} for w in (weights_a, weights_b)), axes)

    generator = torch.Generator().manual_seed(seed)
    runs = []
    for k in range(starts):
        first = (problem.outwards(), problem.outwards(backwards=True), {})[k] if k < 3 else None
        runs.append(problem.descend(random_orders(axes, generator) if first is None else first, generator))
        if runs[-1].history[-1] >= 1 - 1e-12:
            break  # A itself, in another order
    best = max(runs, key=lambda run: run.history[-1])
    model = with_orders(plain_b, axes, best.orders)
    change = function_change(plain_b, model, example)
    if not change.is_none:
        raise ValueError(f"matching changed what the model computes, by {change.share:.1e} of its largest output")
    return Matched(
        model,
        {name: best.orders.get(axis, torch.arange(axis.size)) for name, axis in axes.groups.items()},
        (problem.cosine({}), *best.history),
        tuple(run.history[-1] for run in runs),
        axes.fixed,
        change.share,
    )

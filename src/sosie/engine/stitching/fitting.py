"""Stitching: the lower part of one network, an affine layer, the upper part of another (Csiszárik et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...linalg import Affine, Fit
from ...models.joint import Form, Joint, Resize
from .evaluating import Stitch
from .halves import Stitched, look_into, open_half
from .journal import Trained
from .kept import in_chunks, read_inputs
from .losses import UserLoss
from .sums import Precision, check_precision, sums_at_joint
from .task_loss import TaskLoss, find_ways
from .training import Bench

Way = str | Fit | TaskLoss


def stitch(
    model_a: Any,
    site_a: str,
    model_b: Any,
    site_b: str,
    data: Any,
    *,
    fit: Way | Sequence[Way] = "least_squares",
    validation: Any = None,
    loss: UserLoss | None = None,
    precision: Precision = "float32",
    resize: Resize = "interpolate",
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    max_rows: int | None = None,
) -> Stitch | list[Stitch]:
    """Can B do its job with A's representation? Join A up to `site_a` to B from `site_b` on, by an affine layer.

    The layer is found from the activations of both networks on `data`, in one pass and exactly, whatever the batch
    size: `fit` is least_squares, ridge(strength=…), procrustes, reduced_rank(k=…), permutation, lasso(alpha=…) or
    identity. Or it is trained with both networks frozen: task_loss, with the options of `TaskLoss`. A list of fits
    gives a list of results from one pass, all task losses trained together. The layer acts on channels: every pixel or
    token of a map is a row. Where the sites differ in shape, A's activation is brought into B's first, see `resize` and
    sosie.models.joint. A cut that something goes around, a skip connection say, is refused.

    For task_loss: `loss(outputs, batch)` replaces its targets; it gets the stitched network's answers to one batch of
    the data, and that batch on B's device, once for every joint, and returns their mean loss as a tensor. `validation`:
    data for early stopping; of the layers after each epoch, the one that loses least on them is kept. Such data are
    held in memory.

    `precision` is that in which activations are multiplied; sums are in float64. float32 gives fitted values to about
    1e-4 of the exact ones, and directions of A with less than 1e-6 of the largest count as none; float64 equals a least
    squares solver on all rows.

    `result.model(x)` is the stitched network; `result.evaluate(data)` says how well it does.
    """
    check_precision(precision)
    ways = find_ways(fit)
    tasks = [way for way in ways if isinstance(way, TaskLoss)]
    check_options(tasks, validation, loss)
    if tasks:  # read once: they are gone through many times
        kept = read_inputs(data, max_rows)
        data, max_rows = in_chunks(kept), None
    first, data = look_into(data)
    lower, upper = (
        open_half(model, site, prepare, inputs, first)
        for model, site, prepare in ((model_a, site_a, prepare_a), (model_b, site_b, prepare_b))
    )
    args, kwargs = upper.call(first)
    upper.cut.check(*args, **kwargs)
    source, target = (Form.of(half.cut.site.shape, half.cut.site.channels_last) for half in (lower, upper))
    joint = Joint(source, target, resize)
    at_joint = sums_at_joint(lower, upper, joint, data, precision, max_rows).joint(0, 0)
    trained: list[Trained] = []
    if tasks:
        held_out = None if validation is None else read_inputs(validation, None)
        trained = Bench(lower, upper, joint, at_joint, kept, held_out, loss).train(tasks)
    rest = iter(trained)
    found = []
    for way in ways:
        one = next(rest) if isinstance(way, TaskLoss) else Trained(way(at_joint), [])
        own = Joint(source, target, resize)
        fill(own, one.affine, like=upper.model)
        model = Stitched(lower, own, upper)
        found.append(Stitch(model, way.name, dict(one.affine.report), at_joint.n, one.history))
    return found[0] if isinstance(fit, (str, Fit, TaskLoss)) else found


def check_options(tasks: list[TaskLoss], validation: Any, loss: UserLoss | None) -> None:
    if not tasks and (validation is not None or loss is not None):
        raise ValueError("validation= and loss= are for fit='task_loss'; closed forms are not trained")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function loss(outputs, batch), got {type(loss).__name__}")
    if loss is not None and any(task.targets != "soft" for task in tasks):
        raise ValueError("loss= replaces the targets: leave targets out")


@torch.no_grad()
def fill(joint: Joint, affine: Affine, *, like: nn.Module) -> None:
    first = next(like.parameters(), None)
    if first is not None:
        joint.to(first.device, first.dtype)
    joint.weight.copy_(affine.weight)
    assert joint.bias is not None
    joint.bias.copy_(affine.bias)

"""Where training begins: the layer of a closed form or a random one, whole or as two factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...linalg import Fit, JointMoments, find_fit
from ...linalg.fits.define import check_count
from .task_loss import TaskLoss


@dataclass(frozen=True)
class Start:
    """weight = left right where there are factors, else left alone; in float64."""

    left: Tensor  # (q, p), or (q, rank)
    right: Tensor | None  # (rank, p)
    bias: Tensor  # (q,)


def start_of(task: TaskLoss, moments: JointMoments) -> Start:
    p, q = moments.widths
    rank = None if task.rank is None else check_count("task_loss: rank", task.rank, min(p, q))
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

"""How well a linear map of a layer's rows tells classes apart, at rows that it was not fitted to: in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

GRID = tuple(10 ** (half / 2) for half in range(-12, 9))  # penalties tried, in units of the mean eigenvalue


def left_out_accuracy(rows: Tensor, labels: Tensor) -> float:
    """Share of rows (n, p) whose label (n,) ridge regression to one-hot targets finds when that row is left out.

    Exact for each penalty; of the penalties on a grid that with the least squared error at rows left out is taken,
    which makes the share a little too good.
    """
    classes, found = labels.unique(return_inverse=True)
    if len(classes) < 2 or len(rows) < 3:
        raise ValueError(f"{len(rows)} inputs of {len(classes)} classes: a probe needs at least 3 of at least 2")
    x = rows.double()
    x = x - x.mean(0)
    targets = torch.eye(len(classes), dtype=torch.float64, device=x.device)[found]
    spectrum, vectors = torch.linalg.eigh(x @ x.T)
    spectrum = torch.where(spectrum > 0, spectrum, torch.zeros_like(spectrum))
    mean = float(spectrum.mean())
    if not mean > 0:
        raise ValueError(f"all {len(rows)} rows of the layer are the same: a probe has nothing to learn from them")
    share, error = 0.0, float("inf")
    for penalty in GRID:
        answers = _left_out(spectrum, vectors, targets, penalty * mean)
        now = float((answers - targets).square().sum())
        if now < error:
            error, share = now, float((answers.argmax(1) == found).double().mean())
    return share


def _left_out(spectrum: Tensor, vectors: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """What a ridge regression with an intercept answers at each row when it was fitted to the others."""
    shrunk = spectrum / (spectrum + penalty)
    centre = targets.mean(0)
    fitted = centre + vectors @ (shrunk[:, None] * (vectors.T @ (targets - centre)))
    leverage = vectors.square() @ shrunk + 1 / len(targets)
    return targets - (targets - fitted) / (1 - leverage)[:, None]

"""The best one-to-one match of rows with columns."""

from __future__ import annotations

import torch
from torch import Tensor


def best_assignment(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the min(p, q) entries of scores (p, q), one a row and column, whose sum is largest."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(scores.detach().cpu().numpy(), maximize=True)
    return torch.from_numpy(rows).to(scores.device), torch.from_numpy(columns).to(scores.device)

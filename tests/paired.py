"""Paired rows for tests."""

from __future__ import annotations

import numpy as np
import torch


def correlated_rows(n: int = 60, p: int = 7, q: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sets of paired rows in float64 that have something in common, with uneven spectra and a mean."""
    random = torch.Generator().manual_seed(seed)
    shared = torch.randn(n, 3, generator=random, dtype=torch.float64)

    def side(width: int) -> torch.Tensor:
        mix = torch.randn(3, width, generator=random, dtype=torch.float64)
        noise = torch.randn(n, width, generator=random, dtype=torch.float64)
        scales = torch.linspace(0.3, 2.0, width, dtype=torch.float64)
        mean = torch.randn(width, generator=random, dtype=torch.float64)
        return (shared @ mix + noise) * scales + mean

    return side(p), side(q)


def numpy_pair(p: int = 6, q: int = 4, n: int = 80) -> tuple[np.ndarray, np.ndarray]:
    x, y = correlated_rows(n=n, p=p, q=q)
    return x.numpy(), y.numpy()

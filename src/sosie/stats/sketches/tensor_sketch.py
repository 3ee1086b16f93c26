"""TensorSketch: a short vector for f ⊗ g, whose inner products are ⟨f, f′⟩⟨g, g′⟩ on average."""

from __future__ import annotations

import torch
from torch import Tensor

from ..lottery import Fold


class TensorSketch:
    """Two independent sketches of f ⊗ g of `to` columns each (Pham and Pagh 2013).

    f and g are folded to `to` columns by hashes and signs of their own, and the two are convolved: entry (i, j) of
    f ⊗ g lands in column h(i) + h′(j) with sign s(i) s′(j). Products of one sketch with the other are unbiased where
    those of a sketch with itself are too large.
    """

    COPIES = 2

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        self.to = to
        self._of_f = [Fold(width, to, seed * 4 + 1_000_000 + copy) for copy in range(self.COPIES)]
        self._of_g = [Fold(width, to, seed * 4 + 1_000_002 + copy) for copy in range(self.COPIES)]

    def features(self, rows: Tensor) -> Tensor:
        """(copies, n, to // 2 + 1): what is kept of f until g is there."""
        return _spectra(self._of_f, rows)

    def product(self, features: Tensor, rows: Tensor) -> Tensor:
        """(copies, n, to): the sketch of f ⊗ g, from what was kept of f and the rows g."""
        return torch.fft.irfft(features * _spectra(self._of_g, rows), n=self.to)


def _spectra(folds: list[Fold], rows: Tensor) -> Tensor:
    return torch.fft.rfft(torch.stack([fold(rows) for fold in folds]))

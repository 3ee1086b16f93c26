"""Repeated responses to each stimulus: the view that measures of stochastic representations read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg import centred, singular


@dataclass(frozen=True)
class Repetitions:
    """The responses of one side to n stimuli, in float64: repetitions, or the mean and covariance of each stimulus.

    In coordinates of their own, the principal components of all responses, so that a rotation of the neurons changes
    nothing.
    """

    means: Tensor  # (n, k) about their mean over stimuli
    noise: Tensor  # (n, m, k): noiseᵀ noise is the covariance of a stimulus
    rows: Tensor | None  # (n, r, k) about the same mean; None if means and covariances were given
    width: int  # neurons

    @classmethod
    def of(cls, values: Tensor | tuple[Tensor, Tensor], label: str = "x") -> Repetitions:
        """From repetitions (n, r, p), or from means (n, p) and covariances (n, p, p)."""
        if isinstance(values, Tensor):
            means, noise, rows = _from_repetitions(values.detach().double(), label)
        else:
            means, noise = _from_covariances(values[0].detach().double(), values[1].detach().double(), label)
            rows = None
        directions = singular(torch.cat([means, noise.flatten(0, 1)]))[2]
        skew = (means @ directions.T).pow(3).sum(0)  # components have no sign of their own
        mapping = directions.T * torch.where(skew < 0, -1.0, 1.0)
        return cls(means @ mapping, noise @ mapping, None if rows is None else rows @ mapping, means.shape[1])

    def repeated(self, name: str) -> Tensor:
        """The repetitions (n, r, k)."""
        if self.rows is None:
            raise ValueError(f"{name} needs the repetitions themselves, (n, repeats, p), not means and covariances")
        return self.rows


def _from_repetitions(rows: Tensor, label: str) -> tuple[Tensor, Tensor, Tensor]:
    """The means, factors of the covariances, and the repetitions, all centred."""
    shape = tuple(rows.shape)
    if rows.ndim != 3 or not rows.numel():
        raise ValueError(f"{label} must be (n, repeats, p), or means (n, p) with covariances (n, p, p), got {shape}")
    if shape[1] < 2:
        raise ValueError(f"{label} has one repetition of each stimulus, shape {shape}: a covariance needs two")
    rows = rows - rows.mean((0, 1))
    noise = centred(rows) / (shape[1] - 1) ** 0.5
    return rows.mean(1), torch.linalg.qr(noise, mode="r").R if shape[1] > shape[2] else noise, rows


def _from_covariances(means: Tensor, covariances: Tensor, label: str) -> tuple[Tensor, Tensor]:
    """The centred means, and factors of the covariances."""
    if means.ndim != 2 or not means.numel() or covariances.shape != (*means.shape, means.shape[1]):
        shapes = f"{tuple(means.shape)} and {tuple(covariances.shape)}"
        raise ValueError(f"{label}: need means (n, p) and covariances (n, p, p), got {shapes}")
    sizes, vectors = torch.linalg.eigh(covariances)
    slack = 1e-8 * sizes.abs().amax()
    if bool((covariances - covariances.mT).abs().amax() > slack) or bool(sizes.amin() < -slack):
        raise ValueError(f"{label}: covariances must be symmetric, without eigenvalues below 0")
    return centred(means), sizes.clamp_min(0).sqrt()[:, :, None] * vectors.mT


@dataclass(frozen=True)
class PairedRepetitions:
    """Responses of two sides to the same stimuli; their repetitions need not be paired, nor equally many."""

    x: Repetitions
    y: Repetitions

    def __post_init__(self) -> None:
        if (n := len(self.x.means)) != (m := len(self.y.means)):
            raise ValueError(f"both sides need the same stimuli, got {n} and {m}")

"""A penalty on what channels have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import Site, to_rows
from .attached import Attached


def decorrelation(z: Tensor, *, normalised: bool = False) -> Tensor:
    """Σ (ZᵀZ)²ᵢⱼ over all pairs of different channels: 0 where no two have anything in common.

    z is rows (n, c), or maps (n, c, h, w) whose positions are rows. As printed in the paper it is a plain sum, so that
    it grows with the fourth power of the activations and the square of the number of rows. `normalised` is the mean
    over pairs of the squared cosine of two channels, from 0 to 1 whatever the scale and the rows; a channel that is 0
    everywhere has nothing in common with others. Neither subtracts a mean. Computed in float32 at least.
    """
    if z.ndim not in (2, 4):
        raise ValueError(f"need rows (n, c) or maps (n, c, h, w), got {tuple(z.shape)}")
    rows = z if z.ndim == 2 else z.movedim(1, -1).flatten(0, -2)
    count, channels = rows.shape
    if not count or (normalised and channels < 2):
        raise ValueError(f"need at least one row and, normalised, two channels, got {tuple(z.shape)}")
    with torch.autocast(z.device.type, enabled=False):
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        gram = rows.T @ rows
        # Taken off before squaring: of two large sums of squares the difference would be rounding.
        apart = gram - torch.diag(gram.diagonal())
        if not normalised:
            return apart.square().sum()
        own = gram.diagonal()
        lengths = torch.where(own > 0, own, torch.ones_like(own)).sqrt()
        return (apart / lengths / lengths[:, None]).square().sum() / (channels * (channels - 1))


class Decorrelation(Attached):
    """`with Decorrelation(model, sites, weight=3e-3) as penalty: fit(model, …, penalty=penalty)`.

    `penalty()` is weight × the sum over sites of `decorrelation` of the last forward; maps and tokens give a row a
    position. `rows` and `every` as in `Attached`.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Any = None,
        weight: float = 3e-3,
        *,
        normalised: bool = False,
        rows: int | None = None,
        every: int = 1,
    ) -> None:
        self.normalised = normalised
        super().__init__(model, sites, self._of, rows=rows, every=every, weight=weight)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "normalised": self.normalised}

    def _of(self, seen: Mapping[Site, Tensor]) -> Tensor:
        rows = (to_rows(z, "positions", site=site, inputs=len(z)) for site, z in seen.items())
        return torch.stack([decorrelation(each, normalised=self.normalised) for each in rows]).sum()

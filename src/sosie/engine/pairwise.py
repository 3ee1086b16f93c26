"""Values pair by pair, for measures whose views do not broadcast over all pairs of sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..measures import Measure
from ..progress import track
from ..stats import Covariances, Grams, PairedRows, Sample, Statistic


@dataclass
class Found:
    """One measure's values over pairs of sites, and why some are missing."""

    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    undefined: dict[tuple[int, int], str] = field(default_factory=dict)

    def matrix(self, shape: tuple[int, int]) -> Tensor:
        """NaN where there is no value; placed all at once, so that no pair waits for the device."""
        if not self.values:
            return torch.full(shape, torch.nan, dtype=torch.float64)
        stacked = torch.stack([value.double() for value in self.values.values()])
        matrix = torch.full(shape, torch.nan, dtype=torch.float64, device=stacked.device)
        matrix.view(-1)[[i * shape[1] + j for i, j in self.values]] = stacked
        return matrix


def by_pair(
    measures: Sequence[Measure], statistic: Statistic, defined_a: np.ndarray, defined_b: np.ndarray
) -> dict[str, Found]:
    """All measures on one pair before the next, so that they share its factorisations; a site's own are made once."""
    found = {measure.name: Found() for measure in measures}
    pairs = [(i, j) for i in np.flatnonzero(defined_a).tolist() for j in np.flatnonzero(defined_b).tolist()]
    names = ", ".join(found)
    for i, j in track(pairs, names, len(pairs), "pairs of sites"):
        views: dict[type, Covariances | PairedRows] = {}
        for measure in measures:
            try:
                if measure.reads not in views:
                    views[measure.reads] = _view(measure.reads, statistic, i, j)
                found[measure.name].values[i, j] = measure(views[measure.reads])
            except (ValueError, torch.linalg.LinAlgError) as error:
                found[measure.name].undefined[i, j] = str(error)
    return found


def _view(kind: type, statistic: Statistic, i: int, j: int) -> Covariances | PairedRows:
    if issubclass(kind, Covariances):
        assert not isinstance(statistic, Grams)
        return statistic.covariances(i, j)
    assert isinstance(statistic, Sample)
    return statistic.paired(i, j)

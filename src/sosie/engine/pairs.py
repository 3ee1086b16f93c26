"""Values pair by pair, for measures whose views do not broadcast over all pairs of sites."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..linalg import side_by_side
from ..measures import Measure
from ..progress import track
from ..results import Side
from ..stats import Covariances, Grams, Moments, Neurons, PairedRows, PairViews, Sample, Statistic

Widths = tuple[tuple[int, ...], tuple[int, ...]]

CONSTANT = {"float64": 1e-24}  # share of Σ‖x‖² that rounding alone can give a constant feature
CONSTANT_IN_FLOAT32 = 1e-12


@dataclass
class PairValues:
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
    measures: Sequence[Measure],
    statistic: Statistic | PairViews,
    widths: Widths,
    defined_a: np.ndarray,
    defined_b: np.ndarray,
    *,
    once: bool = False,
) -> dict[str, PairValues]:
    """All measures on one pair before the next, so that they share its factorisations; a site's own are made once.

    On a CPU several pairs at a time. `widths` are those of the sites: rows that were projected no longer tell. `once`:
    only pairs i ≤ j.
    """
    made = {measure.name: PairValues() for measure in measures}
    if not measures:
        return made
    pairs = [(i, j) for i in np.flatnonzero(defined_a).tolist() for j in np.flatnonzero(defined_b).tolist()]
    pairs = [(i, j) for i, j in pairs if i <= j or not once]

    def of_pair(pair: tuple[int, int]) -> None:
        i, j = pair
        views: dict[type, Covariances | Neurons | PairedRows] = {}
        for measure in measures:
            try:
                check_widths(measure, widths[0][i], widths[1][j])
                if measure.reads not in views:
                    views[measure.reads] = view_of(measure.reads, statistic, i, j)
                made[measure.name].values[i, j] = measure(views[measure.reads])
            except (ValueError, ImportError, torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:
                made[measure.name].undefined[i, j] = str(error)

    one_by_one = _on_gpu(statistic) or len(pairs) == 1
    # Closed at once after an interrupt, too: a traceback that is kept would keep torch on one thread.
    with closing((done for done in map(of_pair, pairs)) if one_by_one else side_by_side(of_pair, pairs)) as in_turn:
        for _ in track(in_turn, ", ".join(made), len(pairs), "pairs of sites"):
            pass
    return made


def _on_gpu(statistic: Statistic | PairViews) -> bool:
    if isinstance(statistic, Sample):
        return statistic.xs[0].is_cuda
    return isinstance(statistic, Moments) and statistic.cross.is_cuda


def check_widths(measure: Measure, x: int, y: int) -> None:
    if measure.same_width and x != y:
        raise ValueError(f"{measure.name} compares neuron by neuron, so needs equal widths, got {x} and {y}")


def view_of(kind: type, statistic: Statistic | PairViews, i: int, j: int) -> Covariances | Neurons | PairedRows:
    assert not isinstance(statistic, Grams)
    if issubclass(kind, Covariances):
        return statistic.covariances(i, j)
    if issubclass(kind, Neurons):
        assert isinstance(statistic, (Moments, Sample))
        return statistic.neurons(i, j)
    assert not isinstance(statistic, Moments)
    return statistic.paired(i, j)


def constant_sites(spread: Tensor, side: Side, slack: float = 1) -> np.ndarray:
    """Sites whose features do not vary beyond rounding; an all-zero site has spread 0/0."""
    limits = [CONSTANT.get(dtype, CONSTANT_IN_FLOAT32) for dtype in side.dtypes] or [CONSTANT_IN_FLOAT32]
    return ~(spread.detach().cpu().numpy() > slack * np.array(limits))

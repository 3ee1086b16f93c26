"""A matrix of models repeats a value for the other direction only where the measure is symmetric."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from nets import mlp

import sosie


def test_measures_with_a_direction_have_no_value_the_other_way(tmp_path: Path) -> None:
    models, x = [mlp(k, width=6 + 4 * k) for k in range(3)], torch.randn(200, 8)
    c = sosie.compare(models, x, sites="0", measures=["regression_r2", "linear_cka"])
    for each in (c, sosie.load(c.save(tmp_path / "c.json"))):
        there = each.matrix("regression_r2")
        assert np.isnan(there[np.tril_indices(3, -1)]).all()
        assert np.isfinite(there[np.triu_indices(3)]).all()
        both = each.matrix("linear_cka")
        assert np.array_equal(both, both.T)
        assert np.isfinite(both).all()
    for i, j in ((0, 1), (0, 2), (1, 2)):
        forward = sosie.compare(models[i], models[j], x, sites="0", measures="regression_r2").matrix()[0, 0]
        assert c.matrix("regression_r2")[i, j] == forward

"""A matrix of models repeats a value for the other direction only where the measure is symmetric."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
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


def test_the_mean_over_seeds_has_an_interval_about_other_seeds(tmp_path: Path) -> None:
    models, x = {f"m{k}": mlp(k) for k in range(4)}, torch.randn(200, 8)
    c = sosie.compare(
        models, x, sites=["0", "2"], measures=["linear_cka", "regression_r2"], null="permutation", draws=40
    )
    found = sosie.load(c.mean().save(tmp_path / "mean.json"))
    every = np.stack([pair.matrix("linear_cka") for pair in c])
    mean = (every.mean(0) + every.mean(0).T) / 2
    np.testing.assert_allclose(found.matrix("linear_cka"), mean)
    np.testing.assert_allclose(found.matrix("regression_r2"), np.mean([pair.matrix("regression_r2") for pair in c], 0))
    at = every[:, 0, 0]
    left = np.array([np.mean([v for (i, j), v in zip(c.pairs, at, strict=True) if k not in (i, j)]) for k in range(4)])
    reach = 3.182 * np.sqrt(3 * left.var())  # Student's t of 3 degrees of freedom
    values = found["linear_cka"]
    np.testing.assert_allclose(
        (values.low[0, 0], values.high[0, 0]), (mean[0, 0] - reach, min(mean[0, 0] + reach, 1)), rtol=1e-3
    )
    assert values.p[0, 0] == max(pair["linear_cka"].p[0, 0] for pair in c)
    assert "mean over 6 pairs of 4 models" in values.caveats[0].text
    sosie.write_report(found, tmp_path / "mean.html")


def test_a_mean_takes_models_of_the_same_sites() -> None:
    models, x = [mlp(0), mlp(1), torch.nn.Sequential(torch.nn.Linear(8, 6))], torch.randn(100, 8)
    with pytest.raises(ValueError, match="models with the same sites"):
        sosie.compare(models, x).mean()

"""Measures that match neurons with neurons, through compare(): from sums, from rows, never from projected rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import cnn, inputs, mlp
from paired import correlated_rows

import sosie
from sosie.measures import MEASURES
from sosie.stats import Neurons, RowSampler, Sample, SampleMaker, views

MATCHING = [name for name, measure in MEASURES.items() if issubclass(measure.reads, Neurons)]


def saved(n: int, p: int, q: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    x, y = correlated_rows(n=n, p=p, q=q)
    return {"a": x.numpy()}, {"b": y.numpy()}


def test_there_are_such_measures() -> None:
    assert len(MATCHING) >= 4


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MATCHING)
@pytest.mark.parametrize(("n", "statistic"), [(150, "moments of all 150 rows"), (10, "all 10 rows")])
def test_sums_and_rows_give_the_value_of_the_rows(name: str, n: int, statistic: str) -> None:
    a, b = saved(n, 12, 12)
    found = sosie.compare(a, b, measures=name)
    assert found[name].statistic == statistic
    assert found.matrix(name)[0, 0] == pytest.approx(sosie.measure(name, a["a"], b["b"]), abs=1e-9)


@pytest.mark.parametrize("name", MATCHING)
def test_covariances_over_the_budget_fall_back_to_rows_and_say_so(name: str) -> None:
    a, b = saved(150, 60, 60)
    found = sosie.compare(a, b, measures=name, memory=100_000)
    assert found[name].statistic.startswith("a seeded sample of 37 of 150 rows")
    assert any("over the budget" in caveat.text for caveat in found[name].caveats)
    assert np.isfinite(found.matrix(name)).all()


@pytest.mark.parametrize("name", MATCHING)
def test_projected_rows_are_refused_before_the_pass(name: str) -> None:
    seen = []

    def batches():
        for batch in inputs(400).split(50):
            seen.append(len(batch))
            yield batch

    with pytest.raises(ValueError, match=r"rows of 300 neurons projected to \d+ columns.*rows='mean'.*memory="):
        sosie.compare(mlp(0, width=300), mlp(1, width=300), batches(), measures=name, memory=1000)
    assert sum(seen) < 400
    # Measures that need no neurons may read such rows.
    found = sosie.compare(mlp(0, width=300), mlp(1, width=300), inputs(), measures="aligned_cosine", memory=1000)
    assert "projected" in found["aligned_cosine"].statistic


def test_pooling_and_more_memory_are_ways_out() -> None:
    x = torch.randn(150, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    asked = {"measures": "hard_correlation_match", "sites_a": ["3"], "sites_b": ["3"]}
    with pytest.raises(ValueError, match="not neurons"):
        sosie.compare(cnn(0), cnn(1), x, memory=20_000, **asked)
    for way_out in ({"rows": "mean", "memory": 20_000}, {"memory": "1GiB"}):
        assert np.isfinite(sosie.compare(cnn(0), cnn(1), x, **asked, **way_out).matrix()).all()


def test_a_projected_sample_has_no_neurons() -> None:
    lottery = RowSampler(16)
    x, y = (torch.randn(16, width, generator=torch.Generator().manual_seed(0)) for width in (100, 5))
    makers = [SampleMaker(lottery, widest=8) for _ in range(2)]
    sides = [
        maker.side([maker.part("s", r, 0) for r in (rows, y)], 0) for maker, rows in zip(makers, (x, y), strict=True)
    ]
    sample = Sample.join(*sides)
    with pytest.raises(ValueError, match="projected to 8 columns, which are not neurons"):
        sample.neurons(0, 0)
    assert sample.neurons(1, 0).xy.shape == (5, 5)  # narrow enough to have been left as they were


def test_too_many_pairs_leave_the_other_sites_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MOST_PAIRS", 100)
    found = sosie.compare(mlp(0), mlp(1), inputs(), measures="hard_correlation_match")
    wide, narrow = (next(r for r in found.rows() if r["site_a"] == r["site_b"] == site) for site in ("0", "2"))
    assert np.isnan(wide["value"])
    assert "matching 12 neurons with 12 means 144 pairs" in " ".join(wide["caveats"])
    assert np.isfinite(narrow["value"])


def test_widths_are_compared_before_rows_are_projected() -> None:
    """Both sides would have 64 columns."""
    found = sosie.compare(*saved(70, 200, 300), measures="bures_distance", memory=1000)
    assert "projected to 64 columns" in found["bures_distance"].statistic
    assert np.isnan(found.matrix()).all()
    assert any("needs equal widths, got 200 and 300" in caveat.text for caveat in found["bures_distance"].caveats)

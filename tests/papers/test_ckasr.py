"""Every experiment of the CKA-SR appendix runs, on a handful of images; its statistics are those of the textbooks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paper_scripts import PAPERS, draw, experiments_of, load, small_run, smoke

PAPER = PAPERS / "ckasr"


def test_the_smoke_run(tmp_path: Path) -> None:
    verdicts = smoke(PAPER, tmp_path)
    # What hangs on no training: mistakes in print, and identities.
    for name in (
        "lemma-2-information",
        "lemma-2-rank",
        "equation-2",
        "equation-7",
        "equation-13",
        "equation-14-listing",
    ):
        assert verdicts[name]["outcome"] == "contradicted", name
    for name in ("lemma-2-falls", "lemma-2-one-scale", "equation-14-penalty", "theorem-1", "theorem-2-derivative"):
        assert verdicts[name]["outcome"] == "reproduced", name
    records = [json.loads(path.read_text()) for path in (tmp_path / "nets").glob("*.json")]
    sparse = [each for each in records if each["job"]["sparsity"]]
    assert sparse
    for each in sparse:  # the masks held
        assert each["weights"]["density"] == pytest.approx(1 - each["job"]["sparsity"], abs=1e-3)
        assert each["weights"]["all"]["0.0001"] >= 1 - each["weights"]["density"]
    table = json.loads((tmp_path / "table-2.json").read_text())
    falls = table["similarity"]["penalised"]
    assert falls["cka_sr"]["before"] == falls["none"]["before"]  # a seed is one start and one mask, whatever the arm
    assert falls["cka_sr"]["after"] != falls["none"]["after"]
    kept = small_run(PAPER, tmp_path, "--resume", "--only", "table-3")
    assert "table-3: kept" in kept
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert draw(PAPER, tmp_path) == experiments_of(verdicts) - {"cost"}  # which is numbers alone


# Student's sleep data (1908), hours gained by ten patients with two drugs: what R's t.test prints for them.
FIRST = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SECOND = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)


def test_differences_are_those_of_the_sleep_data() -> None:
    found = load(PAPERS, "differences").difference(dict(enumerate(FIRST)), dict(enumerate(SECOND)))
    assert found["difference"] == pytest.approx(-1.58)
    assert (found["low"], found["high"]) == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)
    assert found["p"] == pytest.approx(0.002833, abs=1e-6)
    welch = found["welch"]
    assert (welch["low"], welch["high"]) == pytest.approx((-3.3654832, 0.2054832), abs=1e-7)
    assert welch["p"] == pytest.approx(0.07939, abs=1e-5)
    assert welch["df"] == pytest.approx(17.776, abs=1e-3)


def test_power_is_that_of_the_tables() -> None:
    """G*Power: half a standard deviation needs 34 pairs for 80 %, and then has .8077775."""
    differences = load(PAPERS, "differences")
    assert differences.power(0.5, 34) == pytest.approx(0.8077775, abs=1e-7)
    assert differences.power(0.5, 33) < 0.8
    assert differences.power(0.0, 10) == pytest.approx(0.05, abs=1e-9)  # no difference: the level of the test
    # statsmodels, TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8)
    for pairs, effect in ((5, 1.682), (10, 0.996), (20, 0.660)):
        assert differences.detectable_effect(pairs) == pytest.approx(effect, abs=5e-4)
    with pytest.raises(ValueError, match="two seeds"):
        differences.detectable_effect(1)


def test_power_of_two_pairs_is_what_draws_give() -> None:
    """Where scipy's noncentral t is no number: P(|Z + δ| > t |N|) by drawing both."""
    import numpy as np
    from scipy import stats

    differences = load(PAPERS, "differences")
    draws = np.random.default_rng(0).normal(differences.detectable_effect(2), 1, (200_000, 2))
    t = draws.mean(1) / (draws.std(1, ddof=1) / 2**0.5)
    assert (abs(t) > stats.t.ppf(0.975, 1)).mean() == pytest.approx(0.8, abs=0.004)


def test_holm_is_worked_by_hand() -> None:
    """Sorted .005 .01 .03 .04: × 4, 3, 2, 1, and none below the one before."""
    differences = load(PAPERS, "differences")
    assert differences.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert differences.holm([0.5, 0.9]) == [1.0, 1.0]
    assert differences.holm([]) == []


def test_arms_are_paired_by_seed_and_corrected_together() -> None:
    differences = load(PAPERS, "differences")
    base = {seed: 80 + float(seed) for seed in range(5)}
    better = {seed: value + 1 + 0.1 * (seed % 2) for seed, value in base.items()}  # far more alike than seeds are
    lone = {3: 90.0}
    found = differences.compare_arms({"none": base, "better": better, "lone": lone}, "none")
    cell = found["differences"]["better"]
    assert cell["low"] > 0.9
    assert cell["welch"]["low"] < 0 < cell["welch"]["high"]
    assert cell["p_holm"] == cell["p"]  # one seed has no test, so that there is one test only
    assert found["differences"]["lone"]["difference"] == pytest.approx(7.0)
    assert found["differences"]["lone"]["p"] is None
    assert differences.difference(base, base)["p"] is None  # no spread: no test, and no NaN


def test_experiments_share_networks() -> None:
    networks = load(PAPER, "networks")
    assert networks.sampled(None, 1, networks.CKA_SR.weight) == networks.CKA_SR  # table 3's in table 2
    assert networks.sampled(8, 5, 8e-4) != networks.CKA_SR

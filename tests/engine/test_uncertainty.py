"""Chance, intervals, and the caveats that go with them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import inputs, mlp

import sosie
from sosie.data import DataPart
from sosie.engine.uncertainty import from_all_rows
from sosie.measures import MEASURES
from sosie.results import Comparison
from sosie.stats import Grams


def related(n: int = 200, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sites that have something in common, and one on each side that has nothing to do with anything."""
    random = np.random.default_rng(seed)
    z = random.normal(size=(n, 4))

    def site(width: int, noise: float) -> np.ndarray:
        return z @ random.normal(size=(4, width)) + noise * random.normal(size=(n, width))

    a = {"near": site(6, 1), "far": site(5, 4), "noise": random.normal(size=(n, 7))}
    return a, {"near": site(8, 1), "noise": random.normal(size=(n, 3))}


def row(c: Comparison, measure: str, a: str, b: str) -> dict:
    [found] = [r for r in c.rows() if (r["measure"], r["site_a"], r["site_b"]) == (measure, a, b)]
    return found


PAIRED = [
    "debiased_cka",
    "linear_cka",
    "kernel_alignment",
    "rbf_cka",
    "mean_cca",
    "procrustes_angle",
    "mutual_knn",
    "rsa",
]


@pytest.mark.parametrize("memory", [None, 3000], ids=["all rows", "blocks"])
def test_what_is_alike_is_told_from_chance(memory: int | None) -> None:
    names = PAIRED if memory is None else PAIRED[:3]
    c = sosie.compare(*related(), measures=names, null="permutation", draws=99, memory=memory, block=16)
    for name in names:
        alike, noise = row(c, name, "near", "near"), row(c, name, "noise", "noise")
        assert alike["p"] == pytest.approx(0.01), name
        assert alike["p_search"] == pytest.approx(0.01), name
        assert 0.1 < alike["score"] < 1, name
        assert noise["p"] > 0.02, name
        assert noise["p_search"] >= noise["p"], name
        assert abs(noise["value"] - noise["null"]) < 4 * noise["null_spread"], name


def test_draws_are_seeded_and_leave_values_alone() -> None:
    a, b = related(80)
    first, again, other = (
        sosie.compare(a, b, measures=["rsa", "linear_cka"], null="permutation", draws=19, seed=s) for s in (0, 0, 1)
    )
    plain = sosie.compare(a, b, measures=["rsa", "linear_cka"])
    for name in ("rsa", "linear_cka"):
        assert np.array_equal(first.matrix(name), plain.matrix(name))
        assert np.array_equal(first[name].p, again[name].p)
    assert not np.array_equal(first["rsa"].null, other["rsa"].null)


def test_p_values_are_uniform_under_chance() -> None:
    """So that p ≤ 0.2 comes up in one case of five, for one pair and for the search over all."""
    random = np.random.default_rng(0)
    p, p_search = [], []
    for _ in range(150):
        a, b = ({str(k): random.normal(size=(24, 3)) for k in range(3)} for _ in range(2))
        found = sosie.compare(a, b, measures="linear_cka", null="permutation", draws=49)["linear_cka"]
        p.append(found.p[0, 0])
        p_search.append(found.p_search.min())
    for found in (p, p_search):
        assert 0.1 < np.mean(np.array(found) <= 0.2) < 0.31
    assert np.mean(np.array(p_search) <= 0.2) > 0.1, "the correction is not too strict either"


@pytest.mark.parametrize("name", ["debiased_cka", "linear_cka"])
@pytest.mark.parametrize("exact", [True, False])
def test_closed_forms_are_what_brute_force_gives(name: str, exact: bool) -> None:
    a, b = related(60)
    c = sosie.compare(a, b, measures=name, memory=None if exact else 3000, block=16)
    if name == "linear_cka" and not exact:
        assert c[name].null is None, "no formula for a whole-data value that is estimated from blocks"
        return
    x, y = a["near"], b["near"]
    random = np.random.default_rng(1)
    blocks = [np.arange(60)] if exact else [np.arange(0, 16), np.arange(16, 32), np.arange(32, 60)]
    drawn = []
    for _ in range(1500):
        order = np.concatenate([random.permutation(block) for block in blocks])
        if exact:
            drawn.append(sosie.measure(name, x, y[order]))
        else:
            drawn.append(sosie.compare({"s": x}, {"s": y[order]}, measures=name, memory=3000, block=16).matrix()[0, 0])
        if not exact and len(drawn) == 300:
            break
    found = row(c, name, "near", "near")
    assert found["null"] == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / len(drawn) ** 0.5)
    assert found["null_spread"] == pytest.approx(np.std(drawn), rel=0.15)


def test_score_is_0_for_chance_and_1_for_the_same() -> None:
    a, _ = related()
    c = sosie.compare(a, a, measures="linear_cka")
    assert np.allclose(np.diag(c["linear_cka"].score), 1)
    assert abs(row(c, "linear_cka", "near", "noise")["score"]) < 0.05
    assert row(c, "linear_cka", "near", "noise")["value"] > 0.01


def test_intervals_come_free_for_cka_and_on_request_for_all() -> None:
    a, b = related()
    names = ["linear_cka", "mean_cca", "mutual_knn"]
    plain, asked = sosie.compare(a, b, measures=names), sosie.compare(a, b, measures=names, interval=True)
    assert plain["linear_cka"].low is not None
    assert plain["mean_cca"].low is None
    for name in names:
        found = asked[name]
        assert (found.low <= found.value).all()
        assert (found.value <= found.high).all()
        assert (found.high - found.low > 0).all()


@pytest.mark.parametrize("measure", ["mean_cca", "cca_r2", "regression_r2"])
def test_a_value_that_is_1_whatever_the_rows_is_that_of_chance(measure: str) -> None:
    """Rounding alone tells them apart: neither the caveat nor a score may rest on that."""
    random = np.random.default_rng(0)
    a, b = ({f"s{k}": random.normal(size=(64, 70 + k)) for k in range(3)} for _ in "ab")
    options = {"measures": measure, "null": "permutation", "draws": 4, "interval": True}
    for row in sosie.compare(a, b, **options).rows():
        assert "close to chance, where the interval is unreliable" in row["caveats"]
        assert row["score"] is None or math.isnan(row["score"])


def test_an_interval_from_sampled_rows_shrinks_with_all_rows() -> None:
    """2048 rows are kept: with four times as many, the interval is half as wide."""
    widths = []
    for n in (2048, 8192):
        found = [sosie.compare(*related(n, seed), measures="linear_cka")["linear_cka"] for seed in range(6)]
        assert found[0].n == n
        widths.append(np.mean([values.high[0, 0] - values.low[0, 0] for values in found]))
    assert widths[1] / widths[0] == pytest.approx(0.5, abs=0.12)


def test_close_to_chance_an_interval_is_not_relied_on() -> None:
    c = sosie.compare(*related(), measures="debiased_cka")
    text = "close to chance, where the interval is unreliable"
    assert text in row(c, "debiased_cka", "noise", "noise")["caveats"]
    assert text not in row(c, "debiased_cka", "near", "near")["caveats"]


def test_chance_on_fewer_rows_is_said() -> None:
    c = sosie.compare(*related(3000), measures="linear_cka", null="permutation", draws=19)
    assert "p-values rest on a sample of 2048 of 3000 rows" in c.rows()[0]["caveats"]


@pytest.mark.parametrize("memory", [None, 3000], ids=["all rows", "blocks"])
def test_doubt_survives_saving_merging_and_resuming(memory: int | None, tmp_path: Path) -> None:
    x = inputs(300)
    names = ["debiased_cka", "mutual_knn"] if memory is None else ["debiased_cka"]
    options = {"measures": names, "null": "permutation", "draws": 19, "memory": memory}
    whole = sosie.compare(mlp(0), mlp(1), x, **options)
    whole.save(tmp_path / "c.json")
    again = sosie.load(tmp_path / "c.json")
    parts = []
    for k, (start, stop) in enumerate([(0, 192), (192, 300)]):
        parts.append(str(tmp_path / f"{k}.safetensors"))
        sosie.compare(mlp(0), mlp(1), DataPart(x[start:stop], start), **options, resume=parts[-1])
    merged = sosie.compare(parts)
    for name in names:
        assert np.array_equal(whole[name].p, again[name].p)
        assert np.array_equal(whole[name].score, again[name].score)
        assert np.allclose(whole[name].p, merged[name].p)
    assert whole.provenance["settings"]["null"] == "permutation, 19 draws"


def test_wrong_doubt() -> None:
    a, b = related(40)
    with pytest.raises(ValueError, match="'permutation' or None"):
        sosie.compare(a, b, null="bootstrap")
    with pytest.raises(ValueError, match=r"draws must be .*at least 1"):
        sosie.compare(a, b, null="permutation", draws=0)


def test_inputs_are_regressed_out_in_a_comparison_too() -> None:
    x = inputs(120)
    a, b = mlp(0), mlp(1)
    c = sosie.compare(a, b, [x[:50], x[50:]], measures=["deconfounded_cka", "linear_cka"], null="permutation", draws=19)
    with torch.no_grad():
        left, right = a[:1](x.clone()), b[:1](x.clone())
    expected = sosie.measure("deconfounded_cka", left, right, inputs=x)
    assert c.matrix("deconfounded_cka")[0, 0] == pytest.approx(expected, abs=1e-5)
    assert c["deconfounded_cka"].p is not None
    with pytest.raises(ValueError, match="floating-point data"):
        sosie.compare(*related(40), measures="deconfounded_cka")


# Caveats by rule


def caveats(a: np.ndarray, b: np.ndarray, measure: str = "linear_cka", **options) -> list[str]:
    return sosie.compare({"s": a}, {"t": b}, measures=measure, **options).rows()[0]["caveats"]


def test_what_an_interval_from_blocks_takes() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 256, 300))
    missing = "no interval: it takes 8 blocks of rows; take more rows, a smaller block, or exact=True"
    for options, lacks in (({}, True), ({"block": 16}, False), ({"exact": True, "memory": None}, False)):
        assert (missing in caveats(x, y, **{"interval": True, "memory": 1000, **options})) == lacks


@pytest.mark.parametrize("memory", [None, 1000], ids=["moments", "blocks"])
def test_one_direction_that_decides(memory: int | None) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(200, 5)), random.normal(size=(200, 5))
    stretched = x * [30, 1, 1, 1, 1]
    assert any("one direction holds about" in text for text in caveats(stretched, y, memory=memory))
    assert not any("one direction" in text for text in caveats(x, y, memory=memory))
    assert not any("one direction" in text for text in caveats(stretched, y, "mean_cca"))


@pytest.mark.parametrize("memory", [None, 1000], ids=["moments", "blocks"])
def test_one_row_that_decides(memory: int | None) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(200, 20)), random.normal(size=(200, 20))
    outlier = x.copy()
    outlier[3] *= 100
    assert any("one row makes up" in text for text in caveats(outlier, y, memory=memory))
    assert not any("one row" in text for text in caveats(x, y, memory=memory))


def test_features_that_hardly_vary() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(100, 5)), random.normal(size=(100, 5))
    assert any("features hardly vary (0.0001" in text for text in caveats(x + 1e4, y))
    assert not any("hardly" in text for text in caveats(x + 10, y))


def test_many_neighbours_for_few_rows() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(50, 5)), random.normal(size=(50, 5))
    assert "k=10 neighbours of n=50 rows: by chance 20% of neighbours are shared" in caveats(x, y, "mutual_knn")
    assert not caveats(x, y, "mutual_knn(k=3)")


def test_all_rows_are_as_far_off_as_blocks_say() -> None:
    """19 times in 20, and not much nearer: Student's t of 6 groups is 2.4."""
    measures = [MEASURES[name] for name in ("debiased_cka", "linear_cka", "kernel_alignment")]
    stated, off = [], []
    for seed in range(30):
        a, b = ([torch.from_numpy(site) for site in side.values()] for side in related(384, seed))
        blocks, whole = Grams.of(a, b), Grams.of(a, b, block=384)
        assert from_all_rows(measures[0], whole) is None
        stated.append([from_all_rows(m, blocks) for m in measures])
        off.append([(m(blocks.alignment(m.reads)) - m(whole.alignment(m.reads))).numpy() for m in measures])
    assert np.mean(np.abs(off) <= np.array(stated)) == pytest.approx(0.95, abs=0.04)
    ratio = np.sqrt(np.square(stated).mean(0) / np.square(off).mean(0))
    assert (ratio > 1.5).all()
    assert (ratio < 4).all()


def test_values_from_blocks_say_how_far_all_rows_may_be(tmp_path: Path) -> None:
    a, b = related(384)
    c = sosie.compare(a, b, measures="debiased_cka", memory=3000)
    found, largest = row(c, "debiased_cka", "near", "near"), c["debiased_cka"].block_error.max()
    assert 0 < found["block_error"] <= largest
    text = f"from blocks of 64 rows: within about {largest:.2g} of the value from all rows, which exact=True gives"
    assert text in found["caveats"]
    assert c.to_pandas()["block_error"].max() == largest
    loaded = sosie.load(c.save(tmp_path / "c.json"))
    assert np.array_equal(loaded["debiased_cka"].block_error, c["debiased_cka"].block_error)
    exact = row(sosie.compare(a, b, measures="debiased_cka"), "debiased_cka", "near", "near")
    assert exact["block_error"] is None
    assert not any("blocks" in text for text in exact["caveats"])


def test_too_few_rows_to_halve_is_said() -> None:
    text = "n=100 rows are few: the interval may be too wide"
    names = ["mean_cca", "linear_cka"]
    for n, said in ((100, True), (128, False)):
        c = sosie.compare(*related(n), measures=names, interval=True)
        assert (text in row(c, "mean_cca", "near", "near")["caveats"]) is said
        assert text not in row(c, "linear_cka", "near", "near")["caveats"]

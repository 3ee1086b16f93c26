"""What made p-values or intervals wrong once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import sosie


def test_positions_of_one_input_are_no_sample() -> None:
    random = torch.Generator().manual_seed(0)

    def smooth() -> torch.Tensor:
        return torch.nn.functional.interpolate(torch.randn(40, 3, 2, 2, generator=random), size=(8, 8))

    c = sosie.compare({"a": smooth()}, {"b": smooth()}, rows="positions", null="permutation", draws=9)
    row = c.rows()[0]
    assert row["p"] is None
    assert row["low"] is None
    assert row["null_spread"] is None
    assert any("positions of the same inputs" in text for text in row["caveats"])
    vectors = sosie.compare({"a": smooth()[:, :, 0, 0]}, {"b": smooth()[:, :, 0, 0]}, rows="positions")
    assert vectors.rows()[0]["null_spread"] is not None, "a vector has one position"


def test_draws_that_are_all_alike_are_no_discovery() -> None:
    random = np.random.default_rng(0)
    a, b = {"a": random.normal(size=(11, 4))}, {"b": random.normal(size=(11, 3))}
    found = sosie.compare(a, b, measures="mutual_knn", null="permutation", draws=19)["mutual_knn"]
    assert found.p[0, 0] == 1
    assert found.p_search[0, 0] == 1


@pytest.mark.parametrize("memory", [None, 10], ids=["all rows", "blocks"])
def test_ties_count_whatever_the_rounding(memory: int | None) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 3))
    turned = x @ np.linalg.qr(random.normal(size=(3, 3)))[0]
    exact = np.mean(
        [sosie.measure("debiased_cka", x, turned[list(order)]) > 1 - 1e-9 for order in itertools.permutations(range(4))]
    )
    c = sosie.compare({"a": x}, {"b": turned}, null="permutation", draws=999, memory=memory)
    assert c["debiased_cka"].p[0, 0] == pytest.approx(exact, abs=0.04)


@pytest.mark.parametrize("name", ["mutual_knn", "jaccard", "rank_similarity", "lcs_knn", "cknna"])
def test_ties_are_nothing_in_common(name: str) -> None:
    random = np.random.default_rng(0)
    p = []
    for _ in range(20):
        a, b = (np.eye(10)[random.integers(0, 10, 100)] for _ in range(2))
        p.append(sosie.compare({"a": a}, {"b": b}, measures=name, null="permutation", draws=19)[name].p[0, 0])
    assert np.mean(np.array(p) <= 0.05) < 0.25
    assert sosie.measure(name, a, a.copy()) == 1


def test_intervals_do_not_depend_on_the_order_of_measures() -> None:
    random = np.random.default_rng(0)
    a, b = {"a": random.normal(size=(80, 6))}, {"b": random.normal(size=(80, 5))}
    one, other = (
        sosie.compare(a, b, measures=names, interval=True)["mutual_knn"]
        for names in (["bures_distance", "mutual_knn"], ["mutual_knn", "bures_distance"])
    )
    assert np.isfinite(one.low).all()
    assert np.array_equal(one.low, other.low)


def test_no_room_for_chance_is_said() -> None:
    random = np.random.default_rng(0)
    a, b = {"a": random.normal(size=(500, 10))}, {"b": random.normal(size=(500, 10))}
    c = sosie.compare(a, b, measures="mean_cca", null="permutation", memory=200_000, interval=True)
    texts = c.rows()[0]["caveats"]
    assert any("no p-values" in text for text in texts)
    assert any("no interval" in text for text in texts)


def test_merged_statistics_keep_their_measures(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x = np.random.default_rng(0).normal(size=(40, 3))
    path = str(tmp_path / "part.safetensors")
    sosie.compare({"a": x}, {"b": x}, resume=path)
    assert sosie.compare(path).matrix()[0, 0] == pytest.approx(1)
    with pytest.raises(ValueError, match="when these statistics were collected"):
        sosie.compare(path, measures="rsa")
    with pytest.raises(ValueError, match="when these statistics were collected"):
        sosie.compare(path, null="permutation")

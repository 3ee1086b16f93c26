"""A row that stands for the whole model is no layer: it is in no mean over layers and in no count of them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import sosie
from sosie.models import small_cnn
from sosie.results import Comparison, Comparisons, Estimate, Side, summarise


def comparison(sites: tuple[str, ...], value: Any, rule: str = "tensors", **more: Any) -> Comparison:
    side = Side("A", sites, (1,) * len(sites), ((1,),) * len(sites))
    values = Estimate(np.array(value, dtype=float), 9, "the weights", "up", (-1, 1), 1.0, **more)
    return Comparison(side, side, {"m": values}, rule)


def by_site(whole: float, *own: float) -> Any:
    return np.where(np.eye(len(own) + 1, dtype=bool), np.diag([*own, whole]), -0.5)


SITES = ("conv1", "conv2", "fc", "all")


def test_means_and_the_sentence_are_of_layers() -> None:
    found = summarise(comparison(SITES, by_site(0.9, 0.1, 0.2, 0.6)), "m")
    assert found.diagonal.tolist() == [0.1, 0.2, 0.6, 0.9]
    assert found.diagonal_mean == pytest.approx(0.3)
    assert found.best_mean == pytest.approx(0.3)
    assert "most alike at fc (0.60) and least alike at conv1 (0.10); 3 of 3 layers" in found.sentence
    layers = summarise(comparison(SITES, by_site(0.9, 0.1, 0.2, 0.6), "flatten"), "m")  # a layer that is called so
    assert layers.diagonal_mean == pytest.approx(0.45)
    assert "most alike at all" in layers.sentence
    assert "4 of 4 layers" in layers.sentence


def test_best_matches_that_chance_hardly_gives_are_of_layers() -> None:
    p = np.where(np.eye(4, dtype=bool), np.diag([0.5, 0.01, 0.5, 0.01]), 1.0)
    made = comparison(SITES, by_site(0.9, 0.1, 0.2, 0.6), p=p, p_search=p)
    assert "1 of 3 best matches is distinguishable" in summarise(made, "m").sentence
    logged: dict[str, float] = {}
    made.log(type("Run", (), {"log": lambda self, found: logged.update(found)})())
    assert logged["sosie/m/distinguishable"] == pytest.approx(1 / 9)
    assert logged["sosie/m/same_depth"] == pytest.approx(0.3)


def test_depth_is_counted_among_layers() -> None:
    a = Side("A", ("a", "b", "all"), (1,) * 3, ((1,),) * 3)
    b = Side("B", ("a", "b", "c", "d", "all"), (1,) * 5, ((1,),) * 5)
    value = np.arange(15.0).reshape(3, 5)
    made = Comparison(a, b, {"m": Estimate(value, 9, "", "up", (None, None), None)}, "tensors")
    assert summarise(made, "m").depth_partner == (0, 3, 4)
    alone = Comparison(a, Side("B", ("a", "b"), (1,) * 2, ((1,),) * 2), {
        "m": Estimate(np.array([[1.0, 0], [0, 1], [np.nan] * 2]), 9, "", "up", (None, None), None)
    }, "tensors")  # fmt: skip
    assert summarise(alone, "m").depth_partner[:2] == (0, 1)
    assert np.isnan(summarise(alone, "m").diagonal[2])


def test_a_whole_model_alone_is_told() -> None:
    found = summarise(comparison(("all",), [[0.7]]), "m")
    assert found.diagonal_mean == 0.7
    both = np.array([[np.nan, np.nan], [np.nan, 0.7]])
    assert "most alike at all (0.70)" in summarise(comparison(("conv1", "all"), both), "m").sentence


@pytest.mark.parametrize("measure", ["weight_cosine", "atom_cosine"])
def test_the_matrix_of_models_is_a_mean_over_layers(measure: str) -> None:
    torch.manual_seed(0)
    models = {name: small_cnn(width=4) for name in "abc"}
    options: dict[str, Any] = {"joint": 4} if measure == "atom_cosine" else {}
    for sites in (None, ["conv1", "conv3", "all"], "all"):
        found = sosie.compare_weights(models, measures=measure, sites_a=sites, **options)
        assert isinstance(found, Comparisons)
        matrix = found.matrix(measure)
        for i, j in combinations(range(3), 2):
            pair = found[i, j]
            diagonal = pair.matrix(measure).diagonal()
            expected = diagonal[-1] if sites == "all" else diagonal[:-1].mean()
            assert pair.sites_a[-1] == "all"
            assert matrix[i, j] == pytest.approx(expected, abs=1e-9)
            assert found.matrix(measure)[i, j] == pytest.approx(expected, abs=1e-9)  # once pairs are made
        assert Comparisons(found.names, dict(found.pairs)).matrix(measure) == pytest.approx(matrix)

"""The registry: names, options, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sosie
from sosie.measures import MEASURES, Measure, UnknownMeasure, define, find, linear_cka, mutual_knn, snap_to_bounds
from sosie.stats import Alignment, Moments


def test_a_measure_is_a_function_of_a_view(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert float(linear_cka(Moments.of(*pair).alignment())) == pytest.approx(sosie.measure("linear_cka", *pair))


def test_what_people_call_a_measure_finds_it() -> None:
    for name, first in [("CKA", "debiased_cka"), ("cca", "mean_cca"), ("Procrustes", "procrustes_distance")]:
        with pytest.raises(UnknownMeasure, match=f"no measure is called {name!r}; did you mean {first} or "):
            find(name)


def test_a_measure_of_your_own_declares_what_the_laws_need() -> None:
    @define(reads=Alignment, bounds=(0, 1), closer="up", invariant={"rotation", "scale", "shift"})
    def mine(a: Alignment) -> torch.Tensor:
        """Mine."""
        return a.xy / (a.xx * a.yy).sqrt()

    MEASURES.pop("mine")
    assert (mine.chance, mine.cost, mine.paper) == ("unknown", "unknown", "unknown")


def test_the_measures_of_sosie_declare_every_fact() -> None:
    for measure in MEASURES.values():
        if measure.function.__module__.startswith("sosie."):
            assert "unknown" not in (measure.chance, measure.cost, measure.paper), measure.name
            assert hasattr(sosie.measures, measure.name), f"{measure.name} is not exported"


def test_the_name_comes_first(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = pair
    with pytest.raises(TypeError, match=r"measure\('linear_cka', x, y\); it is in the third place"):
        sosie.measure(x, y, "linear_cka")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got Tensor in its place"):
        sosie.measure(x, y, y)  # type: ignore[arg-type]


def test_options_make_a_new_measure_whose_name_says_so() -> None:
    few = mutual_knn.using(k=3)
    assert few.name == "mutual_knn(k=3)"
    assert find("mutual_knn(k=3)").options == {"k": 3}
    assert find(few.name).name == few.name
    assert find("rsa(compare='pearson')").name == "rsa(compare='pearson')"
    assert mutual_knn.options == {}


def test_a_missing_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownMeasure, match="did you mean linear_cka"):
        find("linear_ckaa")
    with pytest.raises(ValueError, match="has no option 'kk'; it has k"):
        find("mutual_knn(kk=3)")
    for bad in ("mutual_knn(3)", "mutual_knn(k=open('x'))", "mutual_knn(k=3"):
        with pytest.raises(ValueError, match="write options as"):
            find(bad)


def test_a_plain_function_is_told_how_to_become_a_measure(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    def mine(x: torch.Tensor, y: torch.Tensor) -> float:
        return 0.0

    for call in (
        lambda: sosie.measure(mine, *pair),  # type: ignore[arg-type]
        lambda: sosie.compare({"a": pair[0]}, {"b": pair[1]}, measures=mine),  # type: ignore[arg-type]
        lambda: sosie.compare({"a": pair[0]}, {"b": pair[1]}, measures=["linear_cka", mine]),  # type: ignore[list-item]
    ):
        with pytest.raises(TypeError, match=r"'mine' is a function without facts: .*@sosie\.measures\.define"):
            call()


def test_a_cell_of_a_notebook_defines_its_measure_again(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    try:
        for value in (0.25, 0.5):

            @define(reads=Alignment, bounds=(0, 1), closer="up", invariant=set())
            def run_twice(a: Alignment) -> torch.Tensor:
                """A number."""
                return torch.full_like(a.xy, value)  # noqa: B023

            assert sosie.measure("run_twice", *pair) == value
    finally:
        MEASURES.pop("run_twice", None)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="already defined"):

        @define(
            reads=Alignment,
            bounds=(0, 1),
            same=1,
            closer="up",
            invariant=set(),
            symmetric=True,
            paper="x",
            cost="1",
            chance="0",
        )
        def linear_cka(a: Alignment) -> torch.Tensor:
            """A second one."""
            return a.xy

    with pytest.raises(ValueError, match="no transformation is called"):
        define(
            reads=Alignment,
            bounds=(0, 1),
            same=1,
            closer="up",
            invariant={"twist"},
            symmetric=True,
            paper="x",
            cost="1",
            chance="0",
        )


def test_only_rounding_is_set_to_the_bound() -> None:
    value = torch.tensor([1 + 1e-14, 1.01, -1e-14, -0.2, 0.5], dtype=torch.float64)
    assert snap_to_bounds(value, linear_cka).tolist() == [1.0, 1.01, 0.0, -0.2, 0.5]


def test_list_measures_has_every_fact() -> None:
    found = {facts["name"]: facts for facts in sosie.list_measures()}
    assert set(found) == set(MEASURES)
    assert found["procrustes_angle"]["closer"] == "down"
    assert found["linear_cka"]["invariant"] == ["permutation", "rotation", "scale", "shift"]
    assert isinstance(MEASURES["linear_cka"], Measure)


# Bad input to sosie.measure


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((5, 2)), np.zeros((6, 2)), "need paired rows, got 5 and 6"),
        (np.zeros(5), np.zeros(5), r"x must be \(n, p\), got shape \(5,\): reshape"),
        (np.zeros((5, 2, 2)), np.zeros((5, 2)), "flatten"),
        (np.ones((1, 3)), np.ones((1, 3)), "at least 2 rows"),
        (np.ones((5, 0)), np.ones((5, 3)), "no columns"),
        (np.ones((5, 3)), np.eye(5), "x does not vary"),
        (np.eye(5), np.full((5, 3), 0.1, dtype=np.float32), "y does not vary"),
        (np.eye(5) * np.nan, np.eye(5), "x has 25 values that are NaN"),
    ],
)
def test_bad_rows_are_refused_in_words(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sosie.measure("linear_cka", x, y)


def test_too_few_rows_for_a_measure() -> None:
    x = np.random.RandomState(0).randn(3, 2)
    with pytest.raises(ValueError, match="at least 4 rows, got 3"):
        sosie.measure("debiased_cka", x, x)
    with pytest.raises(ValueError, match="needs more than k rows, got 3"):
        sosie.measure("mutual_knn", x, x)


def test_numpy_torch_and_lists_give_one_float(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = pair
    values = [sosie.measure("linear_cka", *both) for both in ((x, y), (x.numpy(), y.numpy()), (x.tolist(), y.tolist()))]
    assert len(set(values)) == 1
    assert type(values[0]) is float


def test_the_list_of_measures_is_a_table_in_a_notebook() -> None:
    found = sosie.list_measures()
    html = found._repr_html_()  # type: ignore[attr-defined]
    assert f"<td>{found[0]['name']}</td>" in html
    assert html.count("<tr>") < len(found)
    assert "see sosie measures" in html

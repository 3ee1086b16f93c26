"""Settling, its order, and dynamics as a file: by hand-made values whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

import sosie
from sosie.files import DamagedFile
from sosie.report import write_report
from sosie.results import Caveat, Dynamics, Estimate
from sosie.results.dynamics import rank_correlation


def towards(rows: list[list[float]], closer: Any = "up", steps: tuple[int, ...] | None = None, **more: Any) -> Dynamics:
    """Similarities to the last state, a row for each site; elsewhere 0."""
    ends = np.array(rows)
    value = np.zeros((len(ends), ends.shape[1], ends.shape[1]))
    value[:, :, -1] = value[:, -1, :] = ends
    steps = steps or tuple(range(0, 10 * ends.shape[1], 10))
    same, bounds = (1.0, (-1.0, 1.0)) if closer == "up" else (0.0, (0.0, None))
    values = {"m": Estimate(value, 5, "by hand", closer, bounds, same, **more)}
    return Dynamics("run", "run", "atoms", tuple(f"s{k}" for k in range(len(ends))), steps, steps, values)


def test_settled_is_from_when_on_it_stays() -> None:
    found = towards([
        [0.5, 0.99, 0.9, 0.99, 1.0],  # there once, and away again
        [0.5, 0.989, 0.9995, 0.999, 1.0],
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [0.1, 0.2, 0.3, 0.4, 1.0],
        [0.5, 1.0, np.nan, 1.0, 1.0],  # undefined is not near
        [np.nan] * 5,
    ])  # fmt: skip
    assert found.settled() == {"s0": 30, "s1": 20, "s2": 0, "s3": None, "s4": 30, "s5": None}
    assert found.settled(0.999) == {"s0": None, "s1": 20, "s2": 0, "s3": None, "s4": 30, "s5": None}
    assert found.settled(0.3)["s3"] == 20


def test_being_near_itself_at_the_last_step_is_no_finding(tmp_path: Path) -> None:
    found = towards([[0.1, 0.5, 1.0], [0.2, 0.3, 1.0]])
    assert found.settled() == {"s0": None, "s1": None}
    assert found.summary_columns("m")[1][1] == ["later", "later"]
    assert "no site came within 0.99 of its last state" in write_report(found, tmp_path / "d.html").read_text()
    assert "later" in found._repr_html_()


def test_of_a_distance_the_threshold_is_a_share_of_the_way() -> None:
    found = towards([[2.0, 0.021, 0.02, 0.0], [0.5, 0.005, 0.0, 0.0]], closer="down")
    assert found.settled() == {"s0": 20, "s1": 10}
    assert found.settled(0.5) == {"s0": 10, "s1": 10}
    assert found.settled(within=0.021) == {"s0": 10, "s1": 10}
    assert found.settled(within=0.0) == {"s0": None, "s1": 20}
    with pytest.raises(ValueError, match="where lower is closer"):
        towards([[0.5, 1.0]]).settled(within=0.1)
    with pytest.raises(ValueError, match="from 0 to 1"):
        found.settled(1.5)


@pytest.mark.parametrize("upwards", [True, False])
def test_the_order_goes_with_depth_or_against_it(upwards: bool) -> None:
    rows = [[1.0 if k >= s else 0.0 for k in range(5)] for s in (0, 1, 3)]
    found = towards(rows if upwards else rows[::-1]).order()
    assert found.sites == (("s0", "s1", "s2") if upwards else ("s2", "s1", "s0"))
    assert found.steps == (0, 10, 30)
    assert found.correlation == pytest.approx(1 if upwards else -1)
    assert found.bottom_up is upwards
    together = towards([[0.0, 1.0], [0.0, 1.0]]).order()
    assert (together.correlation, together.bottom_up) == (None, None)


def test_the_rank_correlation_is_scipys() -> None:
    x, y = np.random.default_rng(0).integers(0, 5, (2, 30))
    found = rank_correlation(list(zip(x.tolist(), y.tolist(), strict=True)))
    assert found == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert rank_correlation([(1, 2)]) is None


def test_it_is_saved_and_read_again_exactly(tmp_path: Path) -> None:
    found = towards([[np.nan, 1 / 3, 1.0], [0.1, 0.2, 1.0]], caveats=(Caveat("odd", "s1"),), steps=(3, 5, 900))
    again = sosie.load(found.save(tmp_path / "d.json"))
    assert isinstance(again, Dynamics)
    np.testing.assert_array_equal(again.matrix(), found.matrix())
    assert (again.steps, again.sites, again.rows()[1]["caveats"]) == ([3, 5, 900], ("s0", "s1"), [])
    assert again["m"].caveats == found["m"].caveats
    assert again.rows()[-1] == {**again.rows()[-1], "site": "s1", "step_a": 900, "value": 1.0, "caveats": ["odd"]}
    assert "NaN" not in (tmp_path / "d.json").read_text()
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    assert isinstance(found.to_pandas(), pandas.DataFrame)
    assert len(found.to_pandas()) == 18


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sites", ["s0"]),
        ("sites", [1, 2]),
        ("steps_a", [0, 0]),
        ("steps_a", [0, 1.5]),
        ("steps_a", "ab"),
        ("steps_b", [0, 20]),
        ("two_runs", 1),
        ("values", {"m": {}}),
        ("values", []),
        ("name_a", None),
        ("provenance", 3),
        ("version", 0),
        ("version", 99),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = towards([[0.0, 1.0], [0.5, 1.0]]).save(tmp_path / "d.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "hash": None, key: value}))
    with pytest.raises(DamagedFile):
        sosie.load(path)
    with pytest.raises(DamagedFile):
        Dynamics.load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("value", [[[1.0]]]),
        ("value", [[["x", 1], [1, 1]]] * 2),
        ("closer", "left"),
        ("n", -1),
        ("bounds", [0]),
        ("same", "1"),
    ],
)
def test_nonsense_among_the_values_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = towards([[0.0, 1.0], [0.5, 1.0]]).save(tmp_path / "d.json")
    found = json.loads(path.read_text())
    found["values"]["m"][key] = value
    path.write_text(json.dumps({**found, "hash": None}))
    with pytest.raises(DamagedFile):
        sosie.load(path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DamagedFile, match="cut off"):
        sosie.load(path)


def test_it_shows_itself_with_names_escaped() -> None:
    found = towards([[0.25, 1.0]])
    hostile = Dynamics("<b>run", "<b>run", "atoms", ("<script>",), (0, 1), (0, 1), found.values)
    text = hostile._repr_html_()
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert "0.250" in text
    assert "Dynamics of atoms" in repr(hostile)


def test_two_runs_have_no_settling() -> None:
    value = np.arange(6.0).reshape(1, 2, 3)
    found = Dynamics(
        "a", "b", "atoms", ("s",), (0, 1), (0, 5, 9), {"m": Estimate(value, 1, "", "up", (None, None), None)}, True
    )
    with pytest.raises(ValueError, match="one run"):
        found.settled()
    np.testing.assert_array_equal(found.to_end(), [[2.0, 5.0]])
    with pytest.raises(ValueError, match="values of shape"):
        Dynamics("a", "b", "atoms", ("s",), (0, 1), (0, 1), found.values, True)
    with pytest.raises(KeyError, match="there are m"):
        found.matrix("n")


def test_a_site_twice_and_a_number_without_end_are_refused(tmp_path: Path) -> None:
    path = towards([[0.5, 1.0], [0.7, 1.0]]).save(tmp_path / "d.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hash": None, "sites": ["s", "s"]}))
    with pytest.raises(DamagedFile, match="twice"):
        sosie.load(tmp_path / "d.json")
    (tmp_path / "d.json").write_text('{"format": "sosie-dynamics", "version": ' + "1" * 5000 + "}")
    with pytest.raises(DamagedFile, match="digits"):
        sosie.load(tmp_path / "d.json")

"""Arguments and files are checked once: what passes, and what the refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sosie
from sosie.checks import listed, matching, nearest, one_of, positive, whole_number
from sosie.cli.main import app
from sosie.data import open_data
from sosie.files import COUNT, DamagedFile, check_schema
from sosie.history import Recorder
from sosie.models import small_cnn


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_pass_as_python_has_them(value: Any) -> None:
    assert type(whole_number(value, "k", least=3, most=3)) is int


@pytest.mark.parametrize("value", [True, 3.0, "3", None, np.float64(3), np.bool_(True)])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="k must be a whole number, got"):
        whole_number(value, "k")


def test_bounds_of_whole_numbers() -> None:
    with pytest.raises(ValueError, match="k must be a whole number of at least 1, got 0: each row needs one"):
        whole_number(0, "k", least=1, why="each row needs one")
    with pytest.raises(ValueError, match="k must be a whole number of at most 4, got 5"):
        whole_number(5, "k", most=4)
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 4, got 5"):
        whole_number(5, "k", least=1, most=4)


@pytest.mark.parametrize("value", [2, 0.5, np.float32(0.5), np.int64(2)])
def test_numbers_above_zero_pass_as_floats(value: Any) -> None:
    assert positive(value, "rate", most=2) == value
    assert type(positive(value, "rate")) is float


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True, "1", None, 1j])
def test_what_is_no_number_above_zero_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="rate must be a number above 0, got"):
        positive(value, "rate")


def test_the_largest_number() -> None:
    with pytest.raises(ValueError, match="rate must be a number above 0 and at most 1, got 2: a share"):
        positive(2, "rate", most=1, why="a share")


def test_choices() -> None:
    assert one_of("mean", "rows", ["flatten", "mean"]) == "mean"
    with pytest.raises(
        ValueError, match=r"rows must be one of 'flatten', 'mean', got 'flaten'; did you mean 'flatten'"
    ):
        one_of("flaten", "rows", ["flatten", "mean"])
    with pytest.raises(ValueError, match=r"got 3$"):
        one_of(3, "rows", ["flatten", "mean"])


def test_names_near_a_mistyped_one() -> None:
    assert nearest("layr1", ["layer1", "head"]) == "; did you mean 'layer1'?"
    assert nearest("conv1", ["a.conv1", "b.conv1", "conv2"]) == "; did you mean 'a.conv1' or 'b.conv1'?"
    assert nearest("xyz", [f"layer{k}" for k in range(9)]).endswith("layer7 and 1 more")
    assert nearest("xyz", []) == "; there are none"


SCHEMA = {
    "name": str,
    "count": int,
    "share": float,
    "same": (bool, None),
    "values": [float],
    "by_name": {str: [int]},
    "note?": str,
    "closer?": ("up", "down"),
    "n?": COUNT,
}
WHOLE: dict[str, Any] = {
    "name": "a", "count": 1, "share": 1, "same": None, "values": [0.5, 2], "by_name": {"x": [1]}, "more": object,
}  # fmt: skip


def test_content_of_the_schema_passes() -> None:
    check_schema("file.json", WHOLE, SCHEMA)
    check_schema("file.json", {**WHOLE, "same": True, "note": "seen", "values": []}, SCHEMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name must be text, got 3"),
        ({"count": True}, "count must be a whole number, got true"),
        ({"count": 1.5}, "count must be a whole number, got 1.5"),
        ({"share": True}, "share must be a number, got true"),
        ({"share": None}, "share must be a number, got null"),
        ({"same": 1}, "same must be true or false, got 1"),
        ({"values": {"0": 1}}, "values must be a list"),
        ({"values": [1, "2"]}, r"values\[1\] must be a number"),
        ({"by_name": []}, "by_name must be an object"),
        ({"by_name": {"x": [1], "y": [None]}}, r"by_name\.y\[0\] must be a whole number"),
        ({"note": 1}, "note must be text"),
        ({"closer": "left"}, "closer must be 'up' or 'down', got"),
        ({"closer": None}, "closer must be 'up' or 'down', got null"),
        ({"n": -1}, "n must be at least 0, got -1"),
        ({"n": True}, "n must be a whole number, got true"),
    ],
)
def test_other_content_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DamagedFile, match=f"file.json is damaged: {message}"):
        check_schema("file.json", {**WHOLE, **change}, SCHEMA)


def test_a_missing_name_and_other_content() -> None:
    with pytest.raises(DamagedFile, match="it has no 'count'"):
        check_schema("file.json", {name: value for name, value in WHOLE.items() if name != "count"}, SCHEMA)
    with pytest.raises(DamagedFile, match=r"sites\[1\] has no 'label'"):
        check_schema("file.json", {"sites": [{"label": "a"}, {}]}, {"sites": [{"label": str}]})
    with pytest.raises(DamagedFile, match="its content must be an object, got null"):
        check_schema("file.json", None, SCHEMA)
    with pytest.raises(DamagedFile, match="its content must be null, got 1"):
        check_schema("file.json", 1, None)


def test_an_exact_name_wins_over_a_glob() -> None:
    known = ["a", "b1", "b2", "b*"]
    assert matching(known, "b*", "no layer is called") == ["b*"]
    assert matching(known, "b?", "no layer is called") == ["b1", "b2", "b*"]
    with pytest.raises(ValueError, match="no layer is called 'c'; there are a, b1, b2, b"):
        matching(known, "c", "no layer is called")


def test_long_lists_are_cut_in_messages() -> None:
    assert listed("abcde") == "a, b, c, d, e"
    assert listed("abcdef") == "a, b, c, d, e and 1 more"
    assert listed(["one thing", "another", "more"], 1, "; ") == "one thing; and 2 more"


def test_an_argument_that_was_renamed_is_accepted_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="limit= is called max_rows= now"):
        assert open_data("demo", limit=8).total == 8
    with pytest.raises(TypeError, match="limit= is called max_rows= now: give it once"):
        open_data("demo", limit=8, max_rows=8)
    with pytest.warns(FutureWarning, match="inputs= is called max_rows= now"):
        assert sosie.Zoo(tmp_path / "zoo", "demo", inputs=8).settings.n == 8
    with pytest.warns(FutureWarning, match="probe= is called data= now"):
        Recorder(tmp_path / "run", small_cnn(), "activations", probe=torch.rand(8, 1, 28, 28), sites="fc").close()


def test_inputs_is_called_max_rows_on_the_command_line(tmp_path: Path) -> None:
    for option in ("--inputs", "--max-rows"):
        made = CliRunner().invoke(app, ["zoo", "init", str(tmp_path / option), "--data", "demo", option, "8"])
        assert made.exit_code == 0, made.output
        assert ("--inputs is called --max-rows now" in made.output) == (option == "--inputs")

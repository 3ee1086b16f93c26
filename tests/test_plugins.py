"""Measures, models, data and fits of other packages: found by their entry points, imported when they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import sosie
from sosie.data import list_data, open_data
from sosie.linalg import FITS, find_fit
from sosie.measures import MEASURES, UnknownMeasure
from sosie.models import list_models, open_model

CODE = '''
import torch
from torch import nn
from sosie.linalg.fits import Affine, least_squares
from sosie.measures import define
from sosie.stats import Alignment

@define(reads=Alignment, bounds=(0, 1), closer="up", invariant={"rotation", "scale", "shift"})
def squared_cka(a: Alignment) -> torch.Tensor:
    """Linear CKA, squared."""
    return a.xy.square() / (a.xx * a.yy)

def two_layers(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

def ramps(rows: int = 6) -> list[torch.Tensor]:
    return [torch.arange(4.0).repeat(rows, 1)]

def as_usual(moments) -> Affine:
    return least_squares(moments)
'''
ENTRIES = """
[sosie.measures]
squared_cka = outside:squared_cka
gone = outside.nowhere
empty = outside
[sosie.models]
two-layers = outside:two_layers
tiny10 = outside:two_layers
no_model = outside:CODE
[sosie.data]
ramps = outside:ramps
[sosie.fits]
as_usual = outside:as_usual
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that is installed while the test runs."""
    (tmp_path / "outside.py").write_text(CODE, "utf-8")
    about = tmp_path / "outside_sosie-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-sosie\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("outside", None)
    MEASURES.pop("squared_cka", None)
    FITS.pop("as_usual", None)


def test_a_measure_is_imported_when_it_is_named(outside: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 5))
    sosie.measure("linear_cka", x, x)
    with pytest.raises(UnknownMeasure, match="did you mean squared_cka"):
        sosie.measure("squared_ckaa", x, x)
    assert "outside" not in sys.modules
    y = x + np.random.default_rng(1).normal(size=(40, 5))
    assert sosie.measure("squared_cka", x, y) == pytest.approx(sosie.measure("linear_cka", x, y) ** 2)
    assert sosie.compare({"x": x}, {"y": y}, measures="squared_cka").measures == ["squared_cka"]


def test_all_are_listed_with_their_package_and_broken_ones_are_named(outside: Path) -> None:
    with pytest.warns(UserWarning, match="; it is left out") as warned:
        packages = {facts["name"]: facts["package"] for facts in sosie.list_measures()}
    assert packages["squared_cka"] == "outside"
    assert packages["linear_cka"] == "sosie"
    assert {"gone", "empty"}.isdisjoint(packages)
    texts = sorted(str(warning.message) for warning in warned)
    assert len(texts) == 2
    assert texts[0].startswith("'empty' of the package outside-sosie cannot be loaded: ValueError: ")
    assert texts[1].startswith("'gone' of the package outside-sosie cannot be loaded: ModuleNotFound")
    with pytest.raises(ValueError, match="'gone' of the package outside-sosie cannot be loaded: ModuleNotFoundError"):
        sosie.measure("gone", np.eye(4), np.eye(4))


def test_a_model_with_its_options_and_weights(outside: Path, tmp_path: Path) -> None:
    assert "two-layers" in list_models()
    opened = open_model("two-layers(width=5, seed=1)")
    assert opened.model[0].out_features == 5
    from safetensors.torch import save_file

    save_file(opened.model.state_dict(), tmp_path / "weights.safetensors")
    again = open_model(f"two-layers(width=5)@{tmp_path / 'weights.safetensors'}")
    torch.testing.assert_close(again.model.state_dict(), opened.model.state_dict())
    assert type(open_model("tiny10").model).__module__.startswith("sosie."), "no package takes a name of sosie's"
    with pytest.raises(ValueError, match="'no_model' of the package outside-sosie cannot be loaded: AttributeError"):
        open_model("no_model")


def test_data_and_fits(outside: Path) -> None:
    assert "ramps" in list_data()
    assert len(next(iter(open_data("ramps(rows=9)")))) == 9
    assert len(next(iter(open_data("ramps(rows=9)", max_rows=5)))) == 5
    with pytest.raises(ValueError, match="no data set"):
        open_data("ramp")
    assert find_fit("as_usual").name == "as_usual"
    with pytest.raises(ValueError, match="no fit is called 'as_usua'; did you mean 'as_usual'"):
        find_fit("as_usua")


def test_the_command_lists_them_and_its_help_does_not_import_them(outside: Path) -> None:
    ask = "import sys; sys.path.insert(0, sys.argv.pop(1)); from sosie.cli.main import run; run()"
    run = [sys.executable, "-W", "ignore", "-c", ask, str(outside)]
    done = subprocess.run([*run, "measures", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[-1]["package"] == "outside"
    shown = subprocess.run([*run, "measures"], capture_output=True, text=True, check=True).stdout
    assert shown.count("from the package outside") == 1
    (outside / "outside.py").write_text("raise SystemExit(3)\n")
    subprocess.run([*run, "--help"], capture_output=True, check=True)

"""What results look like in a notebook: inline SVG that parses, no script, names escaped."""

from __future__ import annotations

import sys
import types
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
import torch
from report_examples import HOSTILE, blocks, doubted, leaves, pair, several, side, similarity, stages

import sosie
from sosie import progress
from sosie.models import small_cnn
from sosie.results import Comparison, Comparisons, Dynamics


def drawings(html: str) -> list[ElementTree.Element]:
    """Every SVG, parsed as XML."""
    found, start = [], 0
    while (start := html.find("<svg", start)) >= 0:
        end = html.index("</svg>", start) + 6
        found.append(ElementTree.fromstring(html[start:end]))
        start = end
    return found


def test_a_comparison_shows_a_map_and_curves() -> None:
    html = pair(stages(4), leaves(7))._repr_html_()
    figures = drawings(html)
    assert len(figures) == 2 * len(pair(stages(4), leaves(7)).measures)
    heat = figures[0]
    cells = sum(path.get("d", "").count("M") for path in heat.iter("{http://www.w3.org/2000/svg}path"))
    assert cells == 4 * 7
    assert "<script" not in html
    assert 'fill="currentColor"' in html  # legible on a dark page


def test_cells_that_chance_may_give_are_faded() -> None:
    html = doubted(stages(4), leaves(5))._repr_html_()
    assert 'fill-opacity=".35"' in html
    assert "not distinguishable from chance" in html


def test_chance_far_off_does_not_flatten_the_curves() -> None:
    def heights(null: float) -> list[float]:
        value = np.array([[0.97, 0.9], [0.9, 0.99]])
        facts = {"null": np.full((2, 2), null), "null_spread": np.full((2, 2), 0.01)}
        c = Comparison(side("a", stages(2)), side("b", stages(2)), {"m": similarity(value, doubt=False, **facts)})
        curve = drawings(c._repr_html_())[1]
        return [float(dot.get("cy", "")) for dot in curve.iter("{http://www.w3.org/2000/svg}circle")]

    far, near = heights(0.0), heights(0.96)
    assert far[:2] == [168, 18]  # from the foot of the axis to its top
    assert len(near) == len(far) + 2


def test_one_pair_is_one_table() -> None:
    html = doubted(["logits"], ["logits"])._repr_html_()
    assert html.count("<table") == 1
    assert html.count("<tr>") == 1 + 3


def test_undefined_cells_are_left_empty() -> None:
    value = blocks(3, 3)
    value[1, 1] = np.nan
    c = Comparison(side("a", stages(3)), side("b", stages(3)), {"m": similarity(value)})
    heat = drawings(c._repr_html_())[0]
    assert sum(path.get("d", "").count("M") for path in heat.iter("{http://www.w3.org/2000/svg}path")) == 8
    nothing = Comparison(c.side_a, c.side_b, {"m": similarity(np.full((3, 3), np.nan))})
    assert drawings(nothing._repr_html_())


def test_hostile_names_are_escaped() -> None:
    c = Comparison(side(HOSTILE[0], HOSTILE), side(HOSTILE[1], HOSTILE), {"<b>m": similarity(blocks(12, 12))})
    html = c._repr_html_()
    html.encode()  # half characters cannot be saved
    assert drawings(html)
    for bad in ("<img", "<script", "<svg onload", "<b>"):
        assert bad not in html
    assert "<b>" not in several_named("<b>x")._repr_html_()


def several_named(name: str) -> Comparisons:
    c = several(3, 4)
    return Comparisons((name, *c.names[1:]), c.pairs)


def test_large_maps_stay_small() -> None:
    c = Comparison(side("a", stages(300)), side("b", stages(250)), {"m": similarity(blocks(300, 250))})
    html = c._repr_html_()
    assert len(html) < 300_000
    assert "one in 3 sites is drawn" in html


def test_several_models_show_their_matrix_and_each_pair() -> None:
    c = several(3, 4)
    html = c._repr_html_()
    assert len(drawings(html)) >= 1 + 3
    assert "1.000" in html
    rows = c.rows()
    assert (rows[0]["model_a"], rows[0]["model_b"]) == c.names[:2]
    assert len(rows) == sum(len(one.rows()) for one in c)
    pandas = pytest.importorskip("pandas")
    assert isinstance(c.to_pandas(), pandas.DataFrame)


def test_dynamics_shows_maps_of_time() -> None:
    values = {"m": similarity(np.stack([blocks(5, 5)] * 4), doubt=False)}
    d = Dynamics("run", "run", "atoms", tuple("abcd"), tuple(range(5)), tuple(range(5)), values)
    html = d._repr_html_()
    assert len(drawings(html)) == 3
    assert "settled at" in html


def test_a_plot_is_one_figure_that_shows_itself() -> None:
    pytest.importorskip("matplotlib")
    figure = pair(stages(4), leaves(7)).plot("mutual_knn")
    assert len(figure.axes) == 3  # map, colours, curves
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert len(several(3, 4).plot().axes) == 2
    with pytest.raises(KeyError, match="mutual_knn"):
        pair(stages(4), leaves(7)).plot("mutual_kn")
    with pytest.raises(KeyError, match="no values for"):
        several(3, 4).plot("nothing")


def test_xarray(monkeypatch: pytest.MonkeyPatch) -> None:
    c = doubted(stages(3), ["mix", "mix"])
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"sosie\[xarray\]"):
        c.to_xarray()

    class Dataset:  # a stand-in with the real signature
        def __init__(self, data_vars: Any = None, coords: Any = None, attrs: Any = None) -> None:
            self.data_vars, self.coords, self.attrs = data_vars, coords, attrs

    stand_in = types.ModuleType("xarray")
    stand_in.Dataset = Dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xarray", stand_in)
    found: Any = c.to_xarray()
    name = c.measures[0]
    dims, array, _ = found.data_vars[name]
    assert dims == ("site_a", "site_b")
    np.testing.assert_array_equal(array, c.matrix(name))
    assert f"{name}_p" in found.data_vars
    assert found.coords["site_b"] == ["mix", "mix@2"]


def test_real_xarray() -> None:
    xarray = pytest.importorskip("xarray", reason="the xarray extra is not installed")
    c = pair(stages(3), leaves(4))
    found = c.to_xarray()
    assert isinstance(found, xarray.Dataset)
    site_a, site_b = c.sites_a[1], c.sites_b[2]
    assert float(found[c.measures[0]].sel(site_a=site_a, site_b=site_b)) == c.matrix(c.measures[0])[1, 2]


def test_measures_sketches_and_stitches_show_facts() -> None:
    from sosie.measures import linear_cka

    html = linear_cka._repr_html_()
    assert "linear_cka" in html
    assert "0 to 1" in html
    torch.manual_seed(0)
    a, b, images = small_cnn(), small_cnn(), torch.rand(16, 1, 28, 28)
    k = sosie.sketch(a, images, sites="relu4", size=16)
    assert "16 buckets" in k._repr_html_()
    s = sosie.stitch(a, "relu3", b, "relu3", images)
    assert "relu3" in s._repr_html_()


def test_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool = False) -> None:
            shown.append(content)

    def display(content: dict[str, str], raw: bool = False, display_id: bool = False) -> Handle:
        shown.append(content)
        return Handle()

    python, part = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    python.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    part.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.Progress("comparing <a>", 10, "inputs") as bar:
        bar.advance(3)
        bar.advance(7)
    assert shown[1]["text/plain"].startswith("comparing <a>: 3 of 10 inputs")
    assert "&lt;a&gt;" in shown[1]["text/html"]
    assert 'max="10"' in shown[1]["text/html"]
    assert shown[-1]["text/html"] == ""

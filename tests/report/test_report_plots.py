"""Static figures."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from report_examples import HOSTILE, doubted, leaves, pair, several, stages

from sosie.report import plot_curves, plot_heatmap, write_plots

matplotlib = pytest.importorskip("matplotlib", reason="the plots extra is not installed")


def test_rows_are_a_and_columns_are_b():
    comparison = pair(stages(4), leaves(7), hole=True)
    axes = plot_heatmap(comparison, "debiased_cka").axes[0]
    shown = axes.images[0].get_array()
    np.testing.assert_array_equal(np.ma.filled(shown, np.nan), comparison.matrix("debiased_cka"))
    assert axes.yaxis_inverted()  # the first layer is at the top
    assert [label.get_text() for label in axes.get_yticklabels()] == comparison.sites_a
    assert [label.get_text() for label in axes.get_xticklabels()] == comparison.sites_b
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("resnet20", "resnet56")


def test_alike_is_bright_whichever_way_the_measure_runs():
    for measure, most in (("mutual_knn", np.argmax), ("procrustes_angle", np.argmin)):
        comparison = pair(stages(5), stages(5))
        image = plot_heatmap(comparison, measure).axes[0].images[0]
        colours = image.cmap(image.norm(image.get_array()))[..., :3].sum(-1)
        assert np.argmax(colours) == most(comparison.matrix(measure))


@pytest.mark.filterwarnings("ignore:Glyph")  # the font has no brain
@pytest.mark.parametrize("plot", [plot_heatmap, plot_curves])
def test_the_suffix_names_the_format(plot, tmp_path):
    comparison = pair(HOSTILE, HOSTILE[::-1], names=("$x", "$$"))
    svg = plot(comparison, "debiased_cka", tmp_path / "x.svg")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert plot(comparison, "debiased_cka", tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"name a \.svg"):
        plot(comparison, "debiased_cka", tmp_path / "x.docx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.png", "x.svg"]


def test_curves_hold_the_two_lines_and_turn_distances_round():
    comparison = pair(stages(6), stages(6))
    axes = plot_curves(comparison, "procrustes_angle").axes[0]
    best = [match["value"] for match in comparison.best_match("procrustes_angle")]
    np.testing.assert_allclose(axes.lines[1].get_ydata(), best)
    assert axes.yaxis_inverted()
    assert len(axes.collections) == 2  # the two intervals


def test_cells_that_chance_could_give_are_striped_and_said_so():
    comparison = doubted(stages(5), stages(7), hole=True)
    values = comparison["debiased_cka"]
    axes = plot_heatmap(comparison, "debiased_cka").axes[0]
    (patch,) = [patch for patch in axes.patches if patch.get_gid() == "by-chance"]
    assert patch.get_hatch()
    corners = patch.get_path().vertices.reshape(-1, 5, 2)
    np.testing.assert_array_equal(np.ptp(corners, axis=1), 1)  # whole cells
    striped = {(int(y), int(x)) for x, y in (corners.min(axis=1) + corners.max(axis=1)) / 2}
    expected = {tuple(cell) for cell in np.argwhere((values.p_search > 0.05) & np.isfinite(values.value)).tolist()}
    assert striped == expected
    assert 0 < len(expected) < 30
    assert axes.get_legend().get_texts()[0].get_text() == "not distinguishable from chance"
    plain = plot_heatmap(pair(stages(5), stages(7)), "debiased_cka").axes[0]
    assert not plain.patches
    assert plain.get_legend() is None


def test_curves_show_the_chance_level_and_its_spread():
    comparison = doubted(stages(6), stages(6))
    axes = plot_curves(comparison, "debiased_cka").axes[0]
    np.testing.assert_allclose(axes.lines[2].get_ydata(), 0.02)
    assert len(axes.collections) == 3
    heights = axes.collections[2].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([heights.min(), heights.max()], [-0.03, 0.07])


def test_plots_of_several_models(tmp_path):
    written = [path.name for path in write_plots(several(3, 3), tmp_path / "maps.svg")]
    assert len(written) == len(set(written)) == 2 + 3 * 4
    assert written[0] == "maps-models-debiased_cka-heatmap.svg"
    assert "maps-0-seed-0-2-seed-2-procrustes_angle-curves.svg" in written
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)


def test_what_is_missing_is_named(monkeypatch):
    comparison = pair(stages(3), stages(3))
    with pytest.raises(ValueError, match="name the measure"):
        plot_heatmap(comparison)
    with pytest.raises(KeyError, match="did you mean"):
        plot_heatmap(comparison, "debiased_ckaa")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"sosie\[plots\]"):
        plot_curves(comparison, "mutual_knn")

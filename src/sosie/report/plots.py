"""Static figures for a paper or a slide, through matplotlib (`pip install 'sosie[plots]'`)."""

from __future__ import annotations

import io
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import nearest
from ..files import write_atomically
from ..results import Closer, Comparison, Comparisons, Side, by_chance, in_order, summarise
from .colour import RAMP, data_scale, full_scale
from .comparison import between_models, shared_measures
from .words import direction, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LONGEST_LABEL = 28
_SAME_DEPTH, _BEST_MATCH, _CHANCE = "#2f5fa8", "#b4531f", "#666b78"


def plot(result: Comparison | Comparisons, measure: str | None = None) -> Figure:
    """The heat map with the curves under it, or for several models their matrix; the first measure unless one is named.

    Where layers are paired one to one, so that most cells are empty, only the curves.
    """
    if isinstance(result, Comparisons):
        names = shared_measures(result)
        measure = measure or next(iter(names), None)
        result = _of_models(result, measure) if measure in names else result
    else:
        names, measure = result.measures, measure or next(iter(result.values), None)
    if measure is None:
        raise ValueError("nothing was measured, so there is nothing to plot")
    if isinstance(result, Comparisons):
        raise KeyError(f"no values for {measure!r} in every pair{nearest(measure, names)}")
    result[measure]  # raises for a wrong name
    one_line = in_order(result) or result.kind in ("shifts", "transfer")
    map_height = 0.0 if one_line else _height(result)
    curve_height = 0.0 if result.rows_rule == _MODELS else 4.5
    figure = _new_figure(map_height + curve_height)
    heights = [height for height in (map_height, curve_height) if height]
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if map_height:
        _draw_heatmap(figure, axes[0], result, measure)
    if curve_height:
        _draw_curves(axes[-1], result, measure)
    figure._repr_png_ = partial(_as_png, figure)  # type: ignore[attr-defined]  # shown in a notebook without pyplot
    return figure


_MODELS = "models"  # the row rule of a matrix of models


def _of_models(result: Comparisons, measure: str) -> Comparison:
    """The model by model matrix as if models were sites."""
    everyone = Side("models", result.names, (0,) * len(result.names), ((),) * len(result.names))
    return Comparison(everyone, everyone, {measure: between_models(result, measure)}, _MODELS)


def _as_png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()


def plot_heatmap(
    comparison: Comparison,
    measure: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    stretch: bool = False,
) -> Figure | Path:
    """A heat map with a row for each layer of A, the first at the top, and a column for each of B. Bright is alike.

    Cells whose value is not distinguishable from chance are faded and striped. Colours span the range of the measure,
    or with `stretch` that of the values. With a path, the figure is written in the format of its suffix, and the path
    is returned; without one, the figure.
    """
    figure, axes, measure = _begin(comparison, measure, _height(comparison))
    _draw_heatmap(figure, axes, comparison, measure, stretch=stretch)
    return _finish(figure, path)


def _draw_heatmap(figure: Figure, axes: Axes, comparison: Comparison, measure: str, *, stretch: bool = False) -> None:
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    values = comparison[measure]
    scale = data_scale(values) if stretch else full_scale(values)
    up = scale.far < scale.alike
    colours = LinearSegmentedColormap.from_list("sosie", RAMP if up else RAMP[::-1])
    axes.patch.set(facecolor="#f2f1ee", hatch="////", edgecolor="#b9b7b0")  # seen where a value is undefined
    low, high = sorted((scale.far, scale.alike))
    image = axes.imshow(
        np.ma.masked_invalid(values.value),
        cmap=colours,
        norm=Normalize(low, high),
        aspect="auto",
        interpolation="nearest",
    )
    _fade(axes, by_chance(values))
    beyond = "neither" if not scale.clipped else "min" if up else "max"
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=30, extend=beyond)
    bar.set_label(_quantity(measure, values.closer), parse_math=False)
    bar.outline.set_visible(False)
    if not up:
        bar.ax.invert_yaxis()  # alike is at the top, as it is bright
    _label(axes, "y", comparison.side_a.sites)
    _label(axes, "x", comparison.side_b.sites)
    axes.set_ylabel(_short(comparison.side_a.name), parse_math=False)
    axes.set_xlabel(_short(comparison.side_b.name), parse_math=False)


def plot_curves(
    comparison: Comparison, measure: str | None = None, path: str | os.PathLike[str] | None = None
) -> Figure | Path:
    """Curves over layers: the value at the same depth and the best match, with intervals and chance if known."""
    figure, axes, measure = _begin(comparison, measure, 4.5)
    _draw_curves(axes, comparison, measure)
    return _finish(figure, path)


def _draw_curves(axes: Axes, comparison: Comparison, measure: str) -> None:
    values, summary = comparison[measure], summarise(comparison, measure)
    layers = np.arange(len(comparison.side_a.sites))
    best = tuple(-1 if j is None else j for j in summary.best_partner)
    curves = (
        ("same depth", summary.diagonal, summary.depth_partner, _SAME_DEPTH, "-"),
        ("best match", summary.best, best, _BEST_MATCH, "--"),
    )
    for title, curve, partner, colour, style in curves:
        marker = "o" if len(layers) <= 40 else None
        axes.plot(layers, curve, style, color=colour, label=title, linewidth=1.4, marker=marker, markersize=3)
        if values.low is not None and values.high is not None:
            known = np.isfinite(curve)
            low, high = values.low[layers, list(partner)], values.high[layers, list(partner)]
            axes.fill_between(layers, low, high, where=known, color=colour, alpha=0.15, linewidth=0)
    if values.null is not None:
        level = values.null[layers, list(summary.depth_partner)]
        axes.plot(layers, level, ":", color=_CHANCE, label="by chance", linewidth=1)
        if values.null_spread is not None:
            spread = values.null_spread[layers, list(summary.depth_partner)]
            axes.fill_between(layers, level - spread, level + spread, color=_CHANCE, alpha=0.18, linewidth=0)
    if values.closer == "down":
        axes.invert_yaxis()  # up is more alike, as on the page
    _label(axes, "x", comparison.side_a.sites)
    axes.set_xlabel(_short(comparison.side_a.name), parse_math=False)
    axes.set_ylabel(_quantity(measure, values.closer), parse_math=False)
    axes.legend(frameon=False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e4e2dc", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _fade(axes: Axes, chance: np.ndarray | None) -> None:
    """Fade and stripe cells, as one shape, with a legend above the map."""
    if chance is None or not chance.any():
        return
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path as Outline

    corners = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5], [-0.5, -0.5]])
    cells = [corners + np.array([j, i]) for i, j in np.argwhere(chance)]
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(cells)
    look: dict[str, Any] = {"facecolor": "#8c8f986b", "edgecolor": "#ffffffa0", "hatch": "/////", "linewidth": 0}
    axes.add_patch(PathPatch(Outline(np.concatenate(cells), codes), gid="by-chance", **look))
    key = Patch(label="not distinguishable from chance", **{**look, "facecolor": "#55586b"})
    axes.legend(handles=[key], loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8, borderaxespad=0.2)


def _begin(comparison: Comparison, measure: str | None, height: float) -> tuple[Figure, Axes, str]:
    measure = comparison.only(measure)
    figure = _new_figure(height)
    return figure, figure.add_subplot(), measure


def _new_figure(height: float) -> Figure:
    """A figure outside pyplot's global state, which works without a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'sosie[plots]'") from error
    return Figure(figsize=(7.5, height), layout="constrained")


def _height(comparison: Comparison) -> float:
    """A height (inches) that makes cells about as high as wide, and fits a page."""
    rows, columns = len(comparison.side_a.sites), max(len(comparison.side_b.sites), 1)
    return 1.4 + min(max(6.0 * rows / columns, 2.4), 6.0)


def _label(axes: Axes, which: str, names: tuple[str, ...]) -> None:
    """A label for every k-th layer, as many as the axis has room for."""
    step = -(-len(names) // 40)
    places = list(range(0, len(names), step))
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_ticks(places, [_short(names[k]) for k in places])
    for label in axis.get_ticklabels():
        label.set(parse_math=False, fontsize=8 if len(places) <= 20 else 6)
        if which == "x" and (len(places) > 6 or max(map(len, names)) > 8):
            label.set(rotation=45, ha="right", rotation_mode="anchor")
    axes.tick_params(length=2, color="#999999")
    axes.spines[:].set(color="#999999", linewidth=0.6)


def _quantity(measure: str, closer: Closer) -> str:
    return f"{_short(measure)}\n{direction(closer)}"


def _short(name: str) -> str:
    return shorten(visible(name), _LONGEST_LABEL)


def _finish(figure: Figure, path: str | os.PathLike[str] | None) -> Figure | Path:
    if path is None:
        return figure
    suffix = Path(path).suffix.lower().lstrip(".")
    known = figure.canvas.get_supported_filetypes()
    if suffix not in known:
        raise ValueError(f"cannot draw {Path(path).name!r}: name a .svg, .png or .pdf file")
    extra: dict[str, Any] = {"metadata": {"Date": None}} if suffix == "svg" else {}  # same figure, same file
    return write_atomically(path, lambda part: figure.savefig(part, format=suffix, dpi=200, **extra))


def write_plots(result: Comparison | Comparisons, path: str | os.PathLike[str]) -> list[Path]:
    """Write a heat map and the curves of every measure: for maps.svg, maps-linear_cka-heatmap.svg and so on.

    For several models, first a map of the models, maps-models-linear_cka-heatmap.svg; then the figures of each pair,
    with the models' numbers and names, maps-0-first-1-second-linear_cka-heatmap.svg.
    """
    path = Path(path)
    if isinstance(result, Comparison):
        return _write_pair(result, path, ("heatmap", "curves"))
    written = []
    for measure in shared_measures(result):
        models = _of_models(result, measure)
        written += _write_pair(models, path.with_stem(f"{path.stem}-models"), ("heatmap",))
    for (i, j), pair in result.pairs.items():
        names = f"{i}-{_plain(result.names[i])[:40]}-{j}-{_plain(result.names[j])[:40]}"
        written += _write_pair(pair, path.with_stem(f"{path.stem}-{names}"), ("heatmap", "curves"))
    return written


def _write_pair(comparison: Comparison, path: Path, kinds: tuple[str, ...]) -> list[Path]:
    written_files = []
    for measure in comparison.measures:
        for kind in kinds:
            plot = plot_heatmap if kind == "heatmap" else plot_curves
            written = plot(comparison, measure, path.with_stem(f"{path.stem}-{_plain(measure)}-{kind}"))
            assert isinstance(written, Path)
            written_files.append(written)
    return written_files


def _plain(name: str) -> str:
    """The name with only letters that every file system accepts."""
    return re.sub(r"[^\w.-]+", "_", name).strip("_.")

"""Static figures for a paper or a slide, through matplotlib (`pip install 'sosie[plots]'`)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..results import Closer, Comparison, Comparisons, summarise, write_atomically
from .colour import data_scale, full_scale, ramp
from .words import direction, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGEST_LABEL = 28
_SAME_DEPTH, _BEST_MATCH = "#2f5fa8", "#b4531f"


def plot_heatmap(
    comparison: Comparison,
    measure: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    stretch: bool = False,
) -> Figure | Path:
    """Every pair of layers: A's are rows, from the first at the top, B's columns. Bright is alike.

    Colours span the measure's own range, or with `stretch` the values found. With a path the figure is
    written in the format its suffix names, and the path returned; without one the figure is.
    """
    figure, axes, measure = _begin(comparison, measure, _height(comparison))
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    values = comparison[measure]
    scale = data_scale(values) if stretch else full_scale(values)
    up = scale.far < scale.alike
    colours = LinearSegmentedColormap.from_list("sosie", ramp() if up else ramp()[::-1])
    axes.patch.set(facecolor="#f2f1ee", hatch="////", edgecolor="#b9b7b0")  # seen where a value is undefined
    low, high = sorted((scale.far, scale.alike))
    image = axes.imshow(
        np.ma.masked_invalid(values.value),
        cmap=colours,
        norm=Normalize(low, high),
        aspect="auto",
        interpolation="nearest",
    )
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
    return _finish(figure, path)


def plot_curves(
    comparison: Comparison, measure: str | None = None, path: str | os.PathLike[str] | None = None
) -> Figure | Path:
    """Layer by layer: the value at the same depth and that of the best match, with any intervals."""
    figure, axes, measure = _begin(comparison, measure, 4.5)
    values, found = comparison[measure], summarise(comparison, measure)
    layers = np.arange(len(comparison.side_a.sites))
    best = tuple(-1 if j is None else j for j in found.best_partner)
    curves = (
        ("same depth", found.diagonal, found.depth_partner, _SAME_DEPTH, "-"),
        ("best match", found.best, best, _BEST_MATCH, "--"),
    )
    for title, curve, partner, colour, style in curves:
        marker = "o" if len(layers) <= 40 else None
        axes.plot(layers, curve, style, color=colour, label=title, linewidth=1.4, marker=marker, markersize=3)
        if values.low is not None and values.high is not None:
            known = np.isfinite(curve)
            low, high = values.low[layers, list(partner)], values.high[layers, list(partner)]
            axes.fill_between(layers, low, high, where=known, color=colour, alpha=0.15, linewidth=0)
    if values.closer == "down":
        axes.invert_yaxis()  # up is more alike, as on the page
    _label(axes, "x", comparison.side_a.sites)
    axes.set_xlabel(_short(comparison.side_a.name), parse_math=False)
    axes.set_ylabel(_quantity(measure, values.closer), parse_math=False)
    axes.legend(frameon=False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e4e2dc", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    return _finish(figure, path)


def _begin(comparison: Comparison, measure: str | None, height: float) -> tuple[Figure, Axes, str]:
    """A figure that no window and no global state knows of, so that it works without a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'sosie[plots]'") from error
    if measure is None:
        if len(comparison.values) != 1:
            raise ValueError(f"name the measure: this comparison has {', '.join(comparison.values) or 'none'}")
        measure = next(iter(comparison.values))
    comparison[measure]  # a wrong name is told before anything is drawn
    figure = Figure(figsize=(7.5, height), layout="constrained")
    return figure, figure.add_subplot(), measure


def _height(comparison: Comparison) -> float:
    """Cells about as high as wide, within what fits a page (inches)."""
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
    """A heat map and the curves of every measure: for maps.svg maps-linear_cka-heatmap.svg and so on."""
    path = Path(path)
    if isinstance(result, Comparisons):
        raise ValueError("plots are made of one pair of models: result[0, 1]")
    found = []
    for measure in result.measures:
        plain = re.sub(r"[^\w.-]+", "_", measure).strip("_")
        for kind, plot in (("heatmap", plot_heatmap), ("curves", plot_curves)):
            written = plot(result, measure, path.with_name(f"{path.stem}-{plain}-{kind}{path.suffix}"))
            assert isinstance(written, Path)
            found.append(written)
    return found

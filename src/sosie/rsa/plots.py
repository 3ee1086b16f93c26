"""Figures of dissimilarity matrices and of what models explain, through matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .inference import Evaluation
    from .rdms import RDMs

LABELLED = 30  # stimuli whose names fit an axis
BAR, BAND = "#2f5fa8", "#c9c6bd"


def plot_rdms(rdms: RDMs) -> Figure:
    """A heat map of each RDM; bright is far apart."""
    columns = min(len(rdms), 4)
    rows = -(-len(rdms) // columns)
    figure = _figure(2.6 * columns + 1, 2.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    low, high = min(0.0, float(rdms.values.min())), float(rdms.values.max())
    for axes in panels.flat[len(rdms) :]:
        axes.set_axis_off()
    for axes, name, square in zip(panels.flat, rdms.names, rdms.matrices, strict=False):
        image = axes.imshow(square, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
        axes.set_title(name, parse_math=False, fontsize=9)
        ticks = range(len(rdms.stimuli)) if len(rdms.stimuli) <= LABELLED else ()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(list(ticks), [rdms.stimuli[k] for k in ticks], fontsize=6, parse_math=False)
        axes.tick_params(axis="x", rotation=90)
    figure.colorbar(image, ax=panels, fraction=0.04, label=rdms.dissimilarity.replace("_", " ") or "dissimilarity")
    return figure


def plot_evaluation(found: Evaluation) -> Figure:
    """A bar for each model with its 95 % interval, and the noise ceiling as a band."""
    figure = _figure(1.8 + 0.9 * len(found.names), 4)
    axes = figure.add_subplot()
    places = np.arange(len(found.names))
    axes.bar(places, found.values, width=0.7, color=BAR)
    reach = np.array([found.values - found.low, found.high - found.values])
    axes.errorbar(places, found.values, reach, fmt="none", ecolor="black", capsize=3, linewidth=1)
    if found.ceiling is not None:
        axes.axhspan(*found.ceiling, color=BAND, zorder=0, label="noise ceiling")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.1))
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(places, found.names, rotation=45, ha="right", parse_math=False)
    axes.set_ylabel(found.compare.replace("_", " "))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _figure(width: float, height: float) -> Any:
    """A figure outside pyplot's global state, which works without a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'sosie[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")

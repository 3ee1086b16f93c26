"""The figures, from results/*.json: python papers/frankenstein/draw.py [folder of results]. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import matplotlib.pyplot as plt
from drawing import draw_all, set_style

COLOURS = {"task_loss": "tab:blue", "least_squares": "tab:orange", "procrustes": "tab:green", "labels": "tab:purple"}
COLOURS["direct"] = COLOURS["least_squares"]
set_style({"font.size": 8})


def band(axis: Any, x: Any, points: list[list[float]], label: str, colour: str | None = None) -> None:
    """A line of means with a band of one standard deviation."""
    middle = [m for m, _ in points]
    (line,) = axis.plot(x, middle, marker=".", label=label, color=colour)
    low, high = ([m + sign * s for m, s in points] for sign in (-1, 1))
    axis.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)


def figure_2(found: dict[str, Any]) -> Any:
    columns = len(found["architectures"])
    figure, axes = plt.subplots(2, columns, figsize=(4.5 * columns, 5.5), sharey="row", squeeze=False)
    for column, (name, part) in enumerate(found["architectures"].items()):
        for row, key in enumerate(("relative_accuracy", "cross_entropy")):
            for kind in COLOURS:
                if kind in part["curves"]:
                    points = [part["curves"][kind][key][site] for site in part["sites"]]
                    band(axes[row, column], range(len(points)), points, kind.replace("_", " "), COLOURS[kind])
            axes[row, column].set_xticks(range(len(part["sites"])), part["sites"], rotation=45)
            axes[row, 0].set_ylabel(key.replace("_", " "))
        axes[0, column].set_title(name)
    axes[0, 0].legend()
    return figure


def figure_3(found: dict[str, Any]) -> Any:
    sites = list(found["curves"]["task_loss"])
    figure, axes = plt.subplots(1, len(sites), figsize=(2 * len(sites), 2.5), sharey=True, squeeze=False)
    for axis, site in zip(axes[0], sites, strict=True):
        for kind, curve in found["curves"].items():
            widths = [point[0] for point in curve[site]]
            band(axis, widths, [point[1:] for point in curve[site]], kind.replace("_", " "), COLOURS[kind])
        axis.set(title=site, xlabel="width", xticks=widths)
    axes[0, 0].set_ylabel("relative accuracy")
    axes[0, 0].legend()
    return figure


def figure_4(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, len(found["curves"]), figsize=(2.2 * len(found["curves"]), 2.5))
    for axis, (key, points) in zip(axes, found["curves"].items(), strict=True):
        epochs = [row["epoch"] for row in found["runs"][0]][: len(points)]
        band(axis, epochs, points, key)
        for run, style in zip(found["runs"][:2], (":", "--"), strict=False):
            axis.plot(epochs, [row[key] for row in run][: len(points)], style, color="grey")
        axis.set(title=key.replace("_", " "), xlabel="epoch")
    return figure


def figure_5(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8))
    for weight, row in zip(found["penalties"], found["rows"], strict=True):
        epochs = [record["epoch"] for record in row["history"]]
        label = f"weight {weight:g}: relative accuracy {row['relative_accuracy']:.3f}"
        for axis, key in zip(axes, ("linear_cka", "cross_entropy"), strict=True):
            axis.plot(epochs, [record[key] for record in row["history"]], label=label)
            axis.set(xlabel="epoch", ylabel=key.replace("_", " "))
    axes[0].axhline(0.7, color="grey", linestyle=":")
    axes[0].legend(fontsize=6)
    return figure


def figure_6(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, len(found["sites"]), figsize=(3.5 * len(found["sites"]), 2.8), squeeze=False)
    for axis, (site, starts) in zip(axes[0], found["sites"].items(), strict=True):
        lowest = min(min(values) for values in starts.values())
        for name, values in starts.items():
            axis.hist(values, bins=25, range=(lowest, 1.02), alpha=0.6, label=name.replace("_", " "))
        axis.set(title=site, xlabel="relative accuracy", ylabel="runs")
    axes[0, 0].legend()
    return figure


def mode_connectivity(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(2, 4, figsize=(9, 4.5), sharey=True)
    for axis, (site, layer) in zip(axes.flat, found["layers"].items(), strict=False):
        for line in layer["lines"]:
            axis.plot([step / found["steps"] for step in range(len(line))], line, color="tab:blue", alpha=0.5)
        axis.set(title=site, ylim=(0, 1.05))
    axes[0, 0].set_ylabel("relative accuracy")
    axes[1, 0].set_ylabel("relative accuracy")
    return figure


def figure_7(found: dict[str, Any]) -> Any:
    ranks = list(found["table"]["task_loss"])
    figure, axes = plt.subplots(1, len(ranks), figsize=(3 * len(ranks), 2.8), sharey=True, squeeze=False)
    for axis, rank in zip(axes[0], ranks, strict=True):
        for way, table in found["table"].items():
            axis.plot(list(table[rank]), list(table[rank].values()), marker=".", label=way.replace("_", " "))
        axis.set(title=f"rank {rank}")
        axis.tick_params(axis="x", rotation=45)
    axes[0, 0].set_ylabel("relative accuracy")
    axes[0, 0].legend()
    return figure


def figure_8(found: dict[str, Any]) -> Any:
    """A line for each pair of networks."""
    figure, axes = plt.subplots(1, len(found["sites"]), figsize=(3 * len(found["sites"]), 2.8), squeeze=False)
    for axis, site in zip(axes[0], found["sites"], strict=True):
        for k, pair in enumerate(found["pairs"]):
            for way, points in pair[site].items():
                label = None if k else way.replace("_", " ")
                axis.plot(*zip(*points, strict=True), color=COLOURS[way], alpha=0.5, marker=".", label=label)
        axis.set(title=site, xlabel="sparsity", ylim=(0, 1.05))
    axes[0, 0].set_ylabel("relative accuracy")
    axes[0, 0].legend()
    return figure


def curves(found: dict[str, Any]) -> Any:
    """Across data sets, architectures, and the control: one line each, least squares dotted."""
    figure, axis = plt.subplots(figsize=(5.5, 3))
    for name, rows in found["curves"].items():
        key = "accuracy" if name == "trained_to_random" else "relative_accuracy"
        label = name.replace("_", " ") + (" (accuracy)" if key == "accuracy" else "")
        (line,) = axis.plot([row[key] for row in rows], marker=".", label=label)
        axis.plot([row[f"least_squares_{key}"] for row in rows], ":", color=line.get_color())
    longest = max(found["curves"].values(), key=len)
    axis.set_xticks(range(len(longest)), [row["site_a"] for row in longest], rotation=45)
    axis.set(ylabel="relative accuracy")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6)
    return figure


FIGURES = {
    "figure-2": figure_2,
    "figure-3": figure_3,
    "figure-4": figure_4,
    "figure-5": figure_5,
    "figure-6": figure_6,
    "mode-connectivity": mode_connectivity,
    "figure-7": figure_7,
    "figure-8": figure_8,
    "data-sets": curves,
    "architectures": curves,
    "control": curves,
    "figure-2-ten": figure_2,
    "further-results": figure_2,
}

if __name__ == "__main__":
    draw_all(PAPER, FIGURES, tight=True)

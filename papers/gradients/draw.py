"""The figures, from results/*.json: python papers/gradients/draw.py [folder of results]. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import matplotlib.pyplot as plt
import numpy as np
from drawing import draw_all, set_style

NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST"}
PAIRS = {
    "cifar10-cifar10": ("tab:blue", "-"),
    "cifar100-cifar100": ("tab:green", "-"),
    "mnist-mnist": ("tab:red", "-"),
    "cifar10-cifar100": ("tab:cyan", "--"),
    "cifar10-mnist": ("tab:purple", "--"),
    "cifar100-mnist": ("tab:orange", "--"),
}
KERNELS = {
    "features": "features",
    "gradients": "gradients",
    "hadamard": "both (sketch of f ⊗ g)",
    "hadamard_of_sketches": "both (algorithm 1)",
    "sum": "sum",
    "maps": "f ∘ g",
    "midpoint": "midpoint",
}
MEASURES = {"linear_cka": "CKA", "normalized_bures": "NBS"}
SCORES = {
    "mean_embedding": "‖μ‖",
    "kernel_norm": "‖K‖/N²",
    "kernel_trace": "√(Tr K)/N",
    "mean_over_norm": "‖μ‖ over ‖K‖/N²",
    "mean_over_trace": "‖μ‖ over √(Tr K)/N",
}
set_style({"font.size": 7, "figure.constrained_layout.use": True})  # which makes room for a legend outside the panels


def named(pair: str, between: str = " – ") -> str:
    return between.join(NAMES[data] for data in pair.split("-"))


def legend_above(figure: Any, axis: Any, columns: int) -> None:
    """What the lines of all panels are, where it hides none of them."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=columns, frameon=False)


def figure_1(found: dict[str, Any]) -> Any:
    """Rows: representations. Columns: index, and whether networks of one data set share their sketch."""
    columns = [(sharing, measure) for sharing in found["curves"] for measure in MEASURES]
    figure, axes = plt.subplots(len(KERNELS), len(columns), figsize=(11, 13), sharex=True, sharey=True)
    x = range(1, len(found["sites"]) + 1)
    for row, (kernel, words) in enumerate(KERNELS.items()):
        for column, (sharing, measure) in enumerate(columns):
            axis, curves = axes[row, column], found["curves"][sharing][kernel][measure]
            for pair, (colour, style) in PAIRS.items():
                if pair not in curves:
                    continue
                points = [curves[pair][site] for site in found["sites"]]
                axis.errorbar(x, [p["mean"] for p in points], [p["spread"] for p in points], color=colour,
                              linestyle=style, marker=".", label=named(pair))  # fmt: skip
                if points[0]["chance"] is not None:
                    off_its_line = style == "-" and sharing == "shared"
                    label = "chance (black: of the line it lies on)" if pair == "cifar100-mnist" else None
                    axis.plot(x, [p["chance"] for p in points], "x", color=colour if off_its_line else "black",
                              markersize=3, zorder=3, label=label)  # fmt: skip
            axis.set_xticks(x)
            if row == 0:
                axis.set_title(f"{MEASURES[measure]}, {sharing} sketches")
            if column == 0:
                axis.set_ylabel(words)
    figure.supxlabel("site: stem, eight blocks, pooled output")
    legend_above(figure, axes[0, 0], 7)
    return figure


def bars(found: dict[str, Any], key: str, label: str) -> Any:
    figure, axis = plt.subplots(figsize=(5, 2.5))
    pairs = [pair for pair in PAIRS if pair in found[key]]
    values = [found[key][pair] for pair in pairs]
    axis.bar(range(len(pairs)), [v["mean"] for v in values], yerr=[v["spread"] for v in values],
             color=[PAIRS[pair][0] for pair in pairs])  # fmt: skip
    axis.set_xticks(range(len(pairs)), [named(pair, "\n") for pair in pairs])
    axis.set_ylabel(label)
    return figure


def figure_4(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(len(SCORES), 6, figsize=(13, 9), sharex="col", sharey="row")
    for column, (architecture, source) in enumerate((a, s) for a in found["curves"] for s in NAMES):
        for row, (score, words) in enumerate(SCORES.items()):
            for target, name in NAMES.items():
                curve = found["curves"][architecture][score][f"{source}-{target}"]
                line = axes[row, column].semilogy(range(1, len(curve) + 1), curve, ".-", label=f"on {name}")[0]
                if "algorithm_1" in found:
                    theirs = found["algorithm_1"][architecture][score][f"{source}-{target}"]
                    axes[row, column].semilogy(range(1, len(theirs) + 1), theirs, ":", color=line.get_color())
            axes[row, 0].set_ylabel(words)
        axes[0, column].set_title(f"{architecture} of {NAMES[source]}")
        axes[-1, column].set_xlabel("site" + ", dotted: by algorithm 1" * ("algorithm_1" in found))
    legend_above(figure, axes[0, 0], 3)
    return figure


def heat_maps(rows: dict[str, dict[str, Any]]) -> Any:
    width = max(len(maps) for maps in rows.values())
    shapes = [np.shape(next(iter(maps.values()))["value"]) for maps in rows.values()]
    heights = [high / wide for high, wide in shapes for _ in range(2)]
    figure, axes = plt.subplots(
        len(heights), width, figsize=(2 * width, 2.1 * sum(heights) + 0.3), height_ratios=heights, squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for row, (name, maps) in enumerate(rows.items()):
        for column, (pair, found) in enumerate(maps.items()):
            for line, what in enumerate(("value", "chance")):
                axis = axes[2 * row + line, column]
                axis.axis("on")
                image = axis.imshow(found[what], vmin=0, vmax=1, cmap="magma")
                axis.set(xticks=[], yticks=[], title=named(pair) if line == 0 else "what chance gives")
            axes[2 * row, 0].set_ylabel(KERNELS.get(name, name.replace("_", " ")))
    figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, shrink=0.4, label="CKA")
    figure.supxlabel("a row is a site of the first network, a column one of the second; the stems meet at the top left")
    return figure


def figure_13(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, len(found["curves"]), figsize=(8, 2.6))
    for axis, (base, targets) in zip(axes, found["curves"].items(), strict=True):
        for target, scores in targets.items():
            curve = scores["log_mean_over_norm"]
            line = axis.plot(range(1, len(curve) + 1), curve, ".-", label=f"on {NAMES[target]}")[0]
            if "algorithm_1" in found:
                theirs = found["algorithm_1"][base][target]["log_mean_over_norm"]
                axis.plot(range(1, len(theirs) + 1), theirs, ":", color=line.get_color())
        axis.set(title=f"network of {NAMES.get(base, 'ImageNet')}", xlabel="site", ylabel="log ‖μ‖ / (‖K‖/N²)")
        axis.set_xticks(range(1, len(curve) + 1))
    legend_above(figure, axes[0], 3)
    return figure


def figure_14(found: dict[str, Any]) -> Any:
    cases = [(base, task, case) for base, tasks in found["accuracy"].items() for task, case in tasks.items()]
    figure, axes = plt.subplots(1, len(cases), figsize=(2.6 * len(cases), 2.6), sharey=True)
    for axis, (base, task, case) in zip(axes, cases, strict=True):
        x = range(1, len(case["sites"]) + 1)
        for kernel in ("features", "hadamard", "hadamard_of_sketches"):
            axis.plot(x, case[kernel], ".-", label=KERNELS[kernel])
        axis.axhline(case["probe_converged"], color="grey", linestyle="--", label="last layer, converged")
        axis.axhline(case["probe_one_epoch"], color="grey", linestyle=":", label="last layer, one epoch")
        axis.set(title=f"{NAMES.get(base, 'ImageNet')} network on {NAMES[task]}", xlabel="site", xticks=x[::3])
    axes[0].set_ylabel("accuracy")
    legend_above(figure, axes[0], 5)
    return figure


def bounds(found: dict[str, Any]) -> Any:
    """A scale a panel: the noise of one site would flatten the others."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8))
    colours = {"features": "tab:blue", "hadamard": "tab:green", "hadamard_of_sketches": "tab:red"}
    styles = {"linear_cka": ("-", "CKA"), "debiased_cka": (":", "debiased")}
    lines = [(kernel, measure) for measure in styles for kernel in colours]
    for axis, site in zip(axes, ("layer2.1", "layer4.1", "avgpool"), strict=True):
        for place, (kernel, measure) in enumerate(lines):
            wanted, (style, words) = (site, kernel, measure), styles[measure]
            found_here = [r for r in found["rows"] if (r["site"], r["kernel"], r["measure"]) == wanted]
            rows = [r for r in found_here if r["bias"] is not None]
            if rows:
                x = [r["size"] * 1.04 ** (place - 2) for r in rows]  # side by side, or bars hide bars
                axis.errorbar(x, [r["bias"] for r in rows], [r["spread"] for r in rows], color=colours[kernel],
                              linestyle=style, marker=".", label=f"{KERNELS[kernel]}, {words}")  # fmt: skip
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set(title=site, xlabel="M", xscale="log")
        sizes = sorted({r["size"] for r in found["rows"]})
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("sketched less exact")
    legend_above(figure, axes[0], 5)
    return figure


FIGURES = {
    "figure-1": figure_1,
    "figure-2": lambda found: bars(found, "similarity", "cosine of Task2Vec"),
    "figure-3": lambda found: bars(found, "distance", "Fisher-Rao distance"),
    "figure-4": figure_4,
    "figure-5": lambda found: heat_maps(found["maps"]),
    "figure-11": lambda found: heat_maps(found["maps"]),
    "figure-13": figure_13,
    "figure-14": figure_14,
    "bounds": bounds,
}

if __name__ == "__main__":
    draw_all(PAPER, FIGURES)

"""The figures, from results/*.json: python papers/wcka/draw.py [folder of results]. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import matplotlib.pyplot as plt
import numpy as np
from drawing import draw_all, set_style
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

NAMES = {
    "normalized_bures": "Procrustes", "linear_cka": "CKA", "deconfounded_cka": "dCKA", "wcka": "wCKA",
    "debiased_cka": "debiased CKA", "kernel_alignment": "CKA, uncentred", "wcka_uncentred": "wCKA, uncentred",
    "wcka_lit": "wCKA, lit pixels", "mean_cca": "mean CCA", "mutual_knn": "mutual kNN",
    "soft_correlation_match": "soft match", "weight_cosine_matched": "weights, matched",
    "deconfounded_cka(positive=False)": "dCKA, unclipped",
}  # fmt: skip
PAPERS = ("normalized_bures", "linear_cka", "deconfounded_cka", "wcka")
COLOURS = dict(zip(NAMES, [*(f"C{k}" for k in range(10)), "teal", "tan", "black"], strict=True))
KINDS = ("epoch", "seed", "architecture", "strategy")
UNLIKE, ALIKE = "tab:blue", "tab:orange"
set_style({"font.size": 8, "axes.titlesize": 9, "legend.fontsize": 7, "legend.frameon": False})


def boxes(axis: Any, values: list[list[float]], colour: str) -> None:
    places = [k for k, one in enumerate(values) if one]
    axis.boxplot([values[k] for k in places], positions=places, widths=0.55, whis=(0, 100), manage_ticks=False,
                 patch_artist=True, boxprops={"facecolor": colour}, medianprops={"color": "black"})  # fmt: skip


def figure_1(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 6.4), layout="constrained")
    for axis, (kind, by_measure) in zip(axes[0], found["distributions"].items(), strict=True):
        names = [name for name in NAMES if name in by_measure]
        for key, colour in (("unlike", UNLIKE), ("alike", ALIKE)):
            boxes(axis, [by_measure[name][key] for name in names], colour)
        axis.set_xticks(range(len(names)), [NAMES[name] for name in names], rotation=45, ha="right")
        axis.set_title(f"(a) {found['images']:,} images, {'clean or corrupted' if kind == 'mixed' else kind}")
    axes[0, 0].set_ylabel("similarity")
    axes[0, 0].legend(handles=[Patch(color=ALIKE, label="consecutive checkpoints"),
                               Patch(color=UNLIKE, label="untrained networks")],
                      loc="center", bbox_to_anchor=(0.46, 0.72))  # fmt: skip
    for name, rows in found["by_number"].items():
        rows = [(n, row) for n, row in rows if row.get("unlike_mean") is not None]
        axes[1, 0].errorbar([n for n, _ in rows], [row["unlike_mean"] for _, row in rows],
                            [row["unlike_sd"] for _, row in rows], color=COLOURS[name], label=NAMES[name])  # fmt: skip
    axes[1, 0].set(xscale="log", xlabel="probing images", ylabel="similarity, mean and deviation")
    axes[1, 0].set_title("(b) untrained networks")
    for name, rows in found["pair_seconds"].items():
        label = NAMES.get(name, name.replace("wcka", "wCKA"))
        axes[1, 1].loglog([n for n, _ in rows], [seconds * 1e3 for _, seconds in rows], ".-",
                          color=COLOURS.get(name, "grey"), label=label)  # fmt: skip
    axes[1, 1].set(xlabel="probing images", ylabel="milliseconds")
    axes[1, 1].set_title("(c) one pair, activations at hand")
    for axis in axes[1]:
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def correlations(found: dict[str, Any]) -> Any:
    """Scatter of the paper's four over epochs; then both coefficients, with intervals of Fisher's z and over models."""
    figure, axes = plt.subplots(3, 4, figsize=(9.5, 7.4), sharey="row", layout="constrained")
    agreement = found["scatter"]["agreement"]
    for axis, name in zip(axes[0], PAPERS, strict=True):
        axis.plot(found["scatter"][name], agreement, ".", markersize=2, color=COLOURS[name], rasterized=True)
        axis.set(title=NAMES[name], xlabel="similarity")
    axes[0, 0].set_ylabel("agreement\n(pairs that differ in epoch)")
    names = [name for name in NAMES if name in found["correlations"]]
    for row, coefficient in zip(axes[1:], ("pearson", "spearman"), strict=True):
        for axis, kind in zip(row, KINDS, strict=True):
            for k, name in enumerate(names):
                one = found["correlations"][name][kind]["groups"].get("all", {}).get(coefficient)
                if one is not None:
                    axis.bar(k, one["value"], color=COLOURS[name], alpha=0.75)
                    axis.plot([k - 0.15] * 2, [one["low"], one["high"]], color="dimgrey", linewidth=1)
                    if one["over_models"] is not None:
                        axis.plot([k + 0.15] * 2, one["over_models"], color="black", linewidth=1.6)
            axis.axhline(0, color="black", linewidth=0.5)
            labels = [NAMES[name] for name in names] if coefficient == "spearman" else []
            axis.set_xticks(range(len(names)) if labels else [], labels, rotation=90)
            axis.set_title(f"differ in {kind}: {found['pairs'][kind]} pairs" if coefficient == "pearson" else "")
        row[0].set_ylabel("Pearson’s r" if coefficient == "pearson" else "Spearman’s ρ")
    figure.legend(handles=[Line2D([], [], color="dimgrey", linewidth=1, label="Fisher’s z, pairs independent"),
                           Line2D([], [], color="black", linewidth=1.6, label="bootstrap over training runs")],
                  loc="outside upper center", ncols=2)  # fmt: skip
    return figure


def figure_5(found: dict[str, Any]) -> Any:
    names = [name for name in NAMES if name in found["kinds"]]
    rows = (len(names) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(9.5, 1.55 * rows + 1), sharex=True, squeeze=False,
                                layout="constrained")  # fmt: skip
    for axis, name in zip(axes.T.flat, names, strict=False):
        kinds = found["kinds"][name]
        boxes(axis, [row["unlike"] for row in kinds.values()], UNLIKE)
        axis.set_title(NAMES[name])
    for axis in axes[-1]:
        axis.set_xticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds], rotation=60, ha="right")
    return figure


def blind(found: dict[str, Any]) -> Any:
    """The value after a manipulation, and the agreement that it leaves."""
    names = [name for name in NAMES if "manipulations" in found["measures"].get(name, {})]
    ways = list(found["measures"]["wcka"]["manipulations"])
    rows = [[found["measures"][name]["manipulations"][way].get("value") for way in ways] for name in names]
    rows = [[found["measures"]["wcka"]["manipulations"][way]["agreement"] for way in ways], *rows]
    table = np.array([[np.nan if value is None else value for value in row] for row in rows])
    figure, axis = plt.subplots(figsize=(8, 4.4), layout="constrained")
    axis.imshow(np.ma.masked_invalid(table), cmap="Blues", vmin=0, vmax=1.4, aspect="auto")
    for (k, j), value in np.ndenumerate(table):
        axis.text(j, k, "–" if np.isnan(value) else f"{value:.2f}", ha="center", va="center")
    axis.axhline(0.5, color="black", linewidth=1.5)
    kept = sum(found["measures"]["wcka"]["manipulations"][way]["keeps"] for way in ways)
    axis.axvline(kept - 0.5, color="black", linewidth=1.5)
    axis.set_yticks(range(len(table)), ["agreement, least", *(NAMES[name] for name in names)])
    axis.set_xticks(range(len(ways)), ways, rotation=25, ha="right")
    axis.set_title(f"What the function survives (first {kept}), and what breaks it: the value after it")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure


def networks(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, population in zip(axes, ("scratch", "heads"), strict=True):
        rows = [row for row in found["networks"] if row["population"] == population]
        strategies = list(dict.fromkeys(row["strategy"] for row in rows))
        for k, strategy in enumerate(strategies):
            own = [row for row in rows if row["strategy"] == strategy]
            places = [row["epoch"] * 1.12 ** (k - (len(strategies) - 1) / 2) for row in own]  # beside each other
            axis.plot(places, [row["accuracy"] for row in own], ".", label=strategy.partition("(")[0], alpha=0.6)
        epochs = sorted({row["epoch"] for row in rows})
        axis.set(title="from scratch" if population == "scratch" else "heads", xlabel="epoch", xscale="log")
        axis.set_xticks(epochs, [str(epoch) for epoch in epochs])
        axis.set_xticks([], minor=True)
        if population == "scratch":
            figure.legend(loc="outside upper center", ncols=len(strategies))
    axes[0].set_ylabel("accuracy on clean test images")
    return figure


def afterwards(found: dict[str, Any]) -> Any:
    """Pairs that differ in strategy, by epoch: open where one of the two has not learnt; then dark pixels."""
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.2), layout="constrained")
    pairs = found["strategy"]
    epochs = sorted(set(pairs["epoch"]))
    colours = {epoch: plt.colormaps["viridis"](k / max(len(epochs) - 1, 1)) for k, epoch in enumerate(epochs)}
    style = {"linestyle": "", "marker": "o", "markersize": 3.5, "markeredgewidth": 0.8}
    for axis, name in zip(axes, ("wcka", "normalized_bures"), strict=False):
        for epoch, learnt in ((epoch, learnt) for epoch in epochs for learnt in (True, False)):
            chosen = (np.array(pairs["epoch"]) == epoch) & (np.array(pairs["both_learnt"]) == learnt)
            axis.plot(np.array(pairs[name])[chosen], np.array(pairs["all"])[chosen], color=colours[epoch],
                      fillstyle="full" if learnt else "none", **style)  # fmt: skip
        axis.set(title=f"{NAMES[name]}, networks that differ in strategy", xlabel="similarity")
    axes[0].set_ylabel("agreement, all conditions")
    marks = [Line2D([], [], color=colour, label=f"epoch {epoch}", **style) for epoch, colour in colours.items()]
    marks.append(Line2D([], [], color="grey", fillstyle="none", label="one has not learnt", **style))
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks))
    for name, colour in (("converged", ALIKE), ("untrained", UNLIKE)):
        rows = found["dark_pixels"][name]
        axes[2].plot([row["factor"] for row in rows], [row["wcka"] for row in rows], ".-", color=colour, label=name)
    axes[2].set(title="wCKA after weights on dark pixels", xlabel="their norm over that of the layer", ylim=(0, 1))
    axes[2].legend()
    return figure


FIGURES = {
    "networks": networks,
    "figure-1": figure_1,
    "figure-3": correlations,
    "figure-4": correlations,
    "figure-5": figure_5,
    "blind": blind,
    "afterwards": afterwards,
}

if __name__ == "__main__":
    draw_all(PAPER, FIGURES)

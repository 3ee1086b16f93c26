"""The figures, from results/*.json: python papers/wcka/draw.py [folder of results]. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "results"
NAMES = {
    "normalized_bures": "Procrustes", "linear_cka": "CKA", "deconfounded_cka": "dCKA", "wcka": "wCKA",
    "debiased_cka": "debiased CKA", "kernel_alignment": "CKA, uncentred", "wcka_uncentred": "wCKA, uncentred",
    "wcka_lit": "wCKA, lit pixels", "mean_cca": "mean CCA", "mutual_knn": "mutual kNN",
    "soft_correlation_match": "soft match", "weight_cosine_matched": "weights, matched",
}  # fmt: skip
PAPERS = ("normalized_bures", "linear_cka", "deconfounded_cka", "wcka")
COLOURS = {name: f"C{k}" for k, name in enumerate(NAMES)}
KINDS = ("epoch", "seed", "architecture", "strategy")
plt.rcParams.update({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sosie"})


def figure_1(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(10, 6))
    for axis, (kind, by_measure) in zip(axes[0], found["distributions"].items(), strict=True):
        names = [name for name in NAMES if name in by_measure]
        for key, colour in (("unlike", "tab:blue"), ("alike", "tab:orange")):
            values = [by_measure[name][key] for name in names]
            places = [k for k, one in enumerate(values) if one]
            axis.boxplot([values[k] for k in places], positions=places, widths=0.5, whis=(0, 100), manage_ticks=False,
                         patch_artist=True, boxprops={"facecolor": colour}, medianprops={"color": "black"})  # fmt: skip
        axis.set_xticks(range(len(names)), [NAMES[name] for name in names], rotation=35, ha="right")
        axis.set_title(f"(a) probed with {kind} images: untrained (blue), consecutive checkpoints (orange)")
    for name, rows in found["by_number"].items():
        rows = [(n, row) for n, row in rows if row.get("unlike_mean") is not None]
        axes[1, 0].errorbar([n for n, _ in rows], [row["unlike_mean"] for _, row in rows],
                            [row["unlike_sd"] for _, row in rows], color=COLOURS[name], label=NAMES[name])  # fmt: skip
    axes[1, 0].set(xscale="log", xlabel="probing images", title="(b) untrained networks: mean and deviation")
    for name, rows in found["seconds"].items():
        axes[1, 1].loglog([n for n, _ in rows], [seconds * 1e3 for _, seconds in rows], ".-",
                          color=COLOURS.get(name, "grey"), label=NAMES.get(name, name))  # fmt: skip
    axes[1, 1].set(xlabel="probing images", title="(c) milliseconds for one pair")
    for axis in axes[1]:
        axis.legend(fontsize=5)
    return figure


def correlations(found: dict[str, Any]) -> Any:
    """Scatter of the paper's four over epochs; then both coefficients, with intervals of Fisher's z and over models."""
    figure, axes = plt.subplots(3, 4, figsize=(11, 8), sharey="row")
    agreement = found["scatter"]["agreement"]
    for axis, name in zip(axes[0], PAPERS, strict=True):
        axis.plot(found["scatter"][name], agreement, ".", markersize=2, color=COLOURS[name], rasterized=True)
        axis.set(title=f"{NAMES[name]}, networks that differ in epoch", xlabel="similarity")
    axes[0, 0].set_ylabel("agreement")
    names = [name for name in NAMES if name in found["correlations"]]
    for row, coefficient in zip(axes[1:], ("pearson", "spearman"), strict=True):
        for axis, kind in zip(row, KINDS, strict=True):
            for k, name in enumerate(names):
                one = found["correlations"][name][kind]["groups"].get("all", {}).get(coefficient)
                if one is not None:
                    axis.bar(k, one["value"], color=COLOURS[name])
                    axis.plot([k - 0.15] * 2, [one["low"], one["high"]], color="grey")
                    if one["over_models"] is not None:
                        axis.plot([k + 0.15] * 2, one["over_models"], color="black")
            axis.set_xticks(range(len(names)), [NAMES[name] for name in names], rotation=60, ha="right")
            axis.set_title(kind)
        row[0].set_ylabel(f"{coefficient} (grey: Fisher's z; black: over models)")
    return figure


def figure_5(found: dict[str, Any]) -> Any:
    names = [name for name in NAMES if name in found["kinds"]]
    figure, axes = plt.subplots(len(names), 1, figsize=(7, 1.5 * len(names)), sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        kinds = found["kinds"][name]
        values = [row["unlike"] for row in kinds.values()]
        places = [k for k, one in enumerate(values) if one]
        axis.boxplot([values[k] for k in places], positions=places, widths=0.5, whis=(0, 100), manage_ticks=False)
        axis.set_ylabel(NAMES[name])
    axes[-1, 0].set_xticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds], rotation=45, ha="right")
    return figure


def blind(found: dict[str, Any]) -> Any:
    """The value after a manipulation, over the agreement that it leaves."""
    names = [name for name in NAMES if "manipulations" in found["measures"].get(name, {})]
    ways = list(found["measures"]["wcka"]["manipulations"])
    figure, axis = plt.subplots(figsize=(9, 3))
    for k, name in enumerate(names):
        rows = [found["measures"][name]["manipulations"][way].get("value") for way in ways]
        places = [place + 0.07 * (k - len(names) / 2) for place, value in enumerate(rows) if value is not None]
        axis.bar(places, [v for v in rows if v is not None], width=0.065, color=COLOURS[name], label=NAMES[name])
    for place, way in enumerate(ways):
        share = found["measures"]["wcka"]["manipulations"][way]["agreement"]
        if share is not None:
            axis.plot([place - 0.4, place + 0.4], [share] * 2, color="black", label="agreement" if not place else None)
    axis.set_xticks(range(len(ways)), ways, rotation=20)
    axis.legend(fontsize=5, ncols=2)
    return figure


def networks(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
    for axis, population in zip(axes, ("scratch", "heads"), strict=True):
        rows = [row for row in found["networks"] if row["population"] == population]
        for strategy in dict.fromkeys(row["strategy"] for row in rows):
            own = [row for row in rows if row["strategy"] == strategy]
            axis.plot([row["epoch"] for row in own], [row["accuracy"] for row in own], ".", label=strategy, alpha=0.5)
        axis.set(title=population, xlabel="epoch", xscale="log")
        axis.legend(fontsize=5)
    axes[0].set_ylabel("accuracy on clean test images")
    return figure


FIGURES = {
    "networks": networks,
    "figure-1": figure_1,
    "figure-3": correlations,
    "figure-4": correlations,
    "figure-5": figure_5,
    "blind": blind,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        path = RESULTS / f"{name}.json"
        if not path.is_file():
            continue
        figure = draw(json.loads(path.read_text("utf-8")))
        figure.tight_layout()
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)
        print(path.with_suffix(".svg"))

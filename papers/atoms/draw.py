"""The figures, from results/*.json: python papers/atoms/draw.py [folder of results]. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "results"
NAMES = {
    "cca": "CCA", "linear_cka": "CKA", "rbf_cka": "CKA, Gaussian", "debiased_cka": "CKA, debiased",
    "grassmann": "Grassmann", "weights": "whole weights", "atoms": "atoms", "base": "alone", "random": "at random",
    "own": "itself", "refitted": "itself", "classes": "by classes", "all": "all",
}  # fmt: skip
plt.rcParams.update({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sosie"})


def figure_2(found: dict[str, Any]) -> Any:
    """Scatter of atoms with CCA in every arm; then all coefficients, with intervals over models."""
    arms = found["arms"]
    figure, axes = plt.subplots(2, len(arms), figsize=(2.4 * len(arms), 5), squeeze=False)
    for k, (name, arm) in enumerate(arms.items()):
        axes[0, k].plot(arm["pairs"]["atoms"], arm["pairs"]["cca"], ".", markersize=3)
        axes[0, k].set(title=name.replace("_", " "), xlabel="cosine of atoms", ylabel="CCA" if not k else "")
        rows = {name: one["network"]["pearson"] for name, one in arm["correlations"]["atoms"].items()}
        interval_bars(axes[1, k], rows)
    axes[1, 0].set_ylabel("Pearson's r with atoms")
    return figure


def interval_bars(axis: Any, rows: dict[str, Any]) -> None:
    for place, one in enumerate(rows.values()):
        if one["value"] is not None:
            axis.bar(place, one["value"], color=f"C{place}")
        if one["over_models"] is not None:
            axis.plot([place, place], one["over_models"], color="black")
    axis.set_xticks(range(len(rows)), [NAMES.get(name, name) for name in rows], rotation=60, ha="right")
    axis.axhline(0, color="grey", linewidth=0.5)


def figure_3(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8))
    rows = found["rows"]
    probes = [row["probes"] for row in rows]
    for name in ("cca", "linear_cka"):
        axes[0].loglog(probes, [row[name] / row["atoms"] for row in rows], ".-", label=NAMES[name])
    axes[0].loglog(probes, [row["paper"] / found["atom_entries"] for row in rows], "--", label="the paper's formula")
    for name in ("atoms", "cca", "linear_cka"):
        axes[1].loglog(probes, [row["seconds"][name][0] for row in rows], ".-", label=NAMES[name])
    axes[0].set(xlabel="probes", title="FLOPs, in those of atoms")
    axes[1].set(xlabel="probes", title="seconds")
    for axis in axes:
        axis.legend()
    return figure


def figure_4a(found: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(4, 2.8))
    for name, points in found["points"].items():
        axis.semilogy(*zip(*points, strict=True), ".", markersize=2, label=name.replace("_", " "))
    axis.axhline(1, color="grey")
    axis.set(xlabel="change of atoms", ylabel="change of features over the bound")
    axis.legend()
    return figure


def figure_4b(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8))
    interval_bars(axes[0], {name: arm["correlation"]["pearson"] for name, arm in found["arms"].items()})
    axes[0].set_title("Pearson's r of atoms with CCA, by β")
    for axis, key in zip(axes[1:], ("squared_cosine_of_channels", "accuracy"), strict=True):
        axis.bar(list(found["arms"]), [arm[key] for arm in found["arms"].values()])
        axis.tick_params("x", rotation=60)
        axis.set_title(key.replace("_", " "))
    return figure


def figure_4_table(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, len(found["arms"]), figsize=(8, 2.8), sharey=True, squeeze=False)
    for axis, (name, arm) in zip(axes[0], found["arms"].items(), strict=True):
        rows = {key: value for key, value in arm.items() if "start" not in key and key != "accuracy"}
        axis.bar(range(len(rows)), list(rows.values()))
        axis.set_xticks(range(len(rows)), [key.replace("_", " ") for key in rows], rotation=70, ha="right")
        axis.set_title(f"{name} coefficients")
    return figure


def figure_9a(found: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(4.5, 4))
    image = axis.imshow(found["cosines"], vmin=-1, vmax=1, cmap="RdBu_r")
    axis.set_xticks(range(len(found["names"])), found["names"], rotation=70, ha="right")
    axis.set_yticks(range(len(found["names"])), found["names"])
    figure.colorbar(image, label="cosine of atoms")
    return figure


def figure_9b(found: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(5, 2.8))
    values = found["values"]
    axis.boxplot(list(values.values()), whis=(0, 100))
    axis.set_xticks(range(1, len(values) + 1), [name.replace("_", " ") for name in values], rotation=50, ha="right")
    return figure


def maps(found: dict[str, Any]) -> Any:
    """A row a run, a column a layer; white: from when on a layer is within .99 (and .999) of its last state."""
    runs = found["runs"]
    columns = max(len(run["sites"]) for run in runs.values())
    figure, axes = plt.subplots(len(runs), columns, figsize=(1.5 * columns, 1.7 * len(runs)), squeeze=False)
    for row, (name, run) in zip(axes, runs.items(), strict=True):
        for axis in row[len(run["sites"]) :]:
            axis.axis("off")
        for axis, site, values in zip(row, run["sites"], run["maps"], strict=False):
            axis.imshow(values, origin="lower", vmin=np.min(run["maps"]), vmax=1)
            for threshold in run.get("settled", {}).values():
                if threshold[site] is not None:
                    axis.axvline(run["steps"].index(threshold[site]), color="white", linewidth=0.7)
            axis.set(title=site, xticks=[], yticks=[])
        row[0].set_ylabel(name.replace("_", " "))
    return figure


def figure_6(found: dict[str, Any]) -> Any:
    shown = [(epoch, name, values) for epoch, each in found["maps"].items() for name, values in each.items()]
    figure, axes = plt.subplots(1, len(shown), figsize=(2.2 * len(shown), 2.4), squeeze=False)
    count = len(found["groups"])
    for axis, (epoch, name, values) in zip(axes[0], shown, strict=True):
        matrix = np.eye(count)
        matrix[np.triu_indices(count, 1)] = values
        matrix = np.maximum(matrix, matrix.T) if min(values) >= 0 else matrix + matrix.T - np.eye(count)
        axis.imshow(matrix, vmin=min(values), vmax=max(values))
        score = found["scores"][epoch][name]
        title = f"{NAMES.get(name, name)}, epoch {epoch}\nARI {score['tasks_ari']:.2f}, {score['kinds_ari']:.2f}"
        axis.set(title=title, xticks=[], yticks=[])
    return figure


def table_1(found: dict[str, Any]) -> Any:
    methods = list(dict.fromkeys(row["method"] for row in found["rows"]))
    names = list(found["rows"][0]["accuracy"])
    figure, axis = plt.subplots(figsize=(8, 3))
    for k, name in enumerate(names):
        by_method = [[row["accuracy"][name] for row in found["rows"] if row["method"] == method] for method in methods]
        places = [place + 0.1 * (k - len(names) / 2) for place in range(len(methods))]
        axis.bar(places, [np.mean(each) for each in by_method], width=0.09, label=NAMES.get(name, name))
    axis.set_xticks(range(len(methods)), methods)
    axis.set_ylim(0.9 * min(np.mean(row["accuracy"]["base"]) for row in found["rows"]), None)
    axis.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def table_2(found: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(5, 2.8))
    names = list(found["rows"][0]["accuracy"])
    for k, name in enumerate(names):
        by_seed = [float(np.mean(row["accuracy"][name])) for row in found["rows"]]
        axis.plot([k] * len(by_seed), by_seed, ".", color=f"C{k}")
    axis.set_xticks(range(len(names)), [NAMES.get(name, name) for name in names], rotation=40, ha="right")
    axis.set_ylabel("accuracy, a point a seed")
    return figure


def table_3(found: dict[str, Any]) -> Any:
    cases = list(dict.fromkeys((row["data"], row["classes"]) for row in found["rows"]))
    figure, axes = plt.subplots(1, len(cases), figsize=(2.6 * len(cases), 2.8), sharey=True, squeeze=False)
    for axis, (data, classes) in zip(axes[0], cases, strict=True):
        rows = [row for row in found["rows"] if (row["data"], row["classes"]) == (data, classes)]
        means = [np.mean(row["accuracy"]) for row in rows]
        errors = [np.std(row["accuracy"]) / len(row["accuracy"]) ** 0.5 for row in rows]
        axis.bar(range(len(rows)), means, yerr=errors)
        axis.set_xticks(range(len(rows)), [row["method"] for row in rows], rotation=50, ha="right")
        axis.set_title(f"{data}, {classes} classes a client")
    return figure


FIGURES = {
    "figure-2": figure_2,
    "figure-3": figure_3,
    "figure-4a": figure_4a,
    "figure-4b": figure_4b,
    "figure-4-table": figure_4_table,
    "figure-5": maps,
    "figure-6": figure_6,
    "figure-9a": figure_9a,
    "figure-9b": figure_9b,
    "figure-12": maps,
    "table-1": table_1,
    "table-2": table_2,
    "table-3": table_3,
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

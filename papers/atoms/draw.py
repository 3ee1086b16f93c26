"""The figures, from results/*.json: python papers/atoms/draw.py [folder of results]. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import matplotlib.pyplot as plt
import numpy as np
from drawing import draw_all, set_style

NAMES = {
    "cca": "CCA", "linear_cka": "CKA", "rbf_cka": "CKA, Gaussian", "debiased_cka": "CKA, debiased",
    "grassmann": "Grassmann", "weights": "whole weights", "atoms": "atoms", "base": "alone", "random": "at random",
    "own": "itself", "refitted": "itself", "classes": "by classes", "all": "all",
}  # fmt: skip
CHOICES = ("atoms", "cca", "linear_cka", "random", "own", "classes")
PAPERS_R = 0.8638  # of atoms with CCA, figure 2
set_style({"font.size": 7})


def figure_2(found: dict[str, Any]) -> Any:
    """Scatter of atoms with CCA in every arm; then all coefficients, with intervals over models."""
    arms = found["arms"]
    figure, axes = plt.subplots(2, len(arms), figsize=(2 * len(arms), 4.6), squeeze=False)
    for k, (name, arm) in enumerate(arms.items()):
        source, _, rest = name.partition("_m")
        title = f"{rest[0]} atoms, coefficients\n{'at random' if source == 'random' else 'of the first task'}"
        title += "\nother atoms at first" if "other" in rest else "\nthe same atoms at first"
        axes[0, k].plot(arm["pairs"]["atoms"], arm["pairs"]["cca"], ".", markersize=3)
        axes[0, k].set(title=title, xlabel="cosine of atoms", ylabel="CCA" if not k else "")
        axes[0, k].locator_params("x", nbins=3)
        rows = {name: one["network"]["pearson"] for name, one in arm["correlations"]["atoms"].items()}
        interval_bars(axes[1, k], rows)
        axes[1, k].plot([-0.5, 0.5], [PAPERS_R] * 2, "--", color="black", linewidth=0.8)
        axes[1, k].set_ylim(-0.65, 1.05)
    axes[1, 0].set_ylabel("Pearson's r with atoms\n(dashed: the paper's)")
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
    for name, label in (("layer", "one layer"), ("both_layers", "atoms of both layers move")):
        axis.semilogy(*zip(*found["points"][name], strict=True), ".", markersize=2, label=label)
    axis.axhline(1, color="grey", linewidth=1, label="the bound")
    axis.set(xlabel="change of atoms", ylabel="change of features over the bound", ylim=(0.01, 1.5))
    axis.legend()
    return figure


def figure_4b(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8))
    arms = {f"β = {name}".replace("β = cosines_", "of cosines, "): arm for name, arm in found["arms"].items()}
    interval_bars(axes[0], {name: arm["correlation"]["pearson"] for name, arm in arms.items()})
    axes[0].set_title("Pearson's r of atoms with CCA")
    for axis, key in zip(axes[1:], ("squared_cosine_of_channels", "accuracy"), strict=True):
        for place, arm in enumerate(arms.values()):
            if arm[key] is None:
                axis.text(place, 0, "no value", rotation=90, ha="center", va="bottom", color="grey")
            else:
                axis.bar(place, arm[key], color=f"C{place}")
        axis.set_xticks(range(len(arms)), list(arms), rotation=60, ha="right")
        axis.set_title(key.replace("_", " "))
    axes[2].axhline(0.1, color="grey", linewidth=0.5)  # chance, of ten classes
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
    """Points where they learnt ("red") and others ("blue"), of networks with the same first atoms and with other."""
    figure, axes = plt.subplots(1, 2, figsize=(6, 2.6), sharey=True)
    words = {"linear": "CKA,", "cca": "CCA r²,", "cka": "", "r2": ""}
    for axis, start in zip(axes, ("same", "other"), strict=True):
        values = {name.split("_", 1)[1]: each for name, each in found["values"].items() if name.startswith(start)}
        for place, each in enumerate(values.values()):
            axis.plot([place] * len(each), each, ".", color=f"C{place}", alpha=0.6)
        names = [" ".join(filter(None, (words.get(word, word) for word in name.split("_")))) for name in values]
        axis.set_xticks(range(len(names)), names, rotation=50, ha="right")
        axis.set_title(f"{start.replace('same', 'the same')} atoms at first, {len(values['atoms'])} pairs")
    axes[0].set(ylabel="similarity", ylim=(-1, 1.05))
    return figure


def maps(found: dict[str, Any]) -> Any:
    """One row per run, one column per layer; white: from when on a layer is within .99 (and .999) of its last state."""
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
        row[0].set_ylabel(f"{name.replace('_', ', ')}\n{np.min(run['maps']):.2f} to 1")
    return figure


def figure_6(found: dict[str, Any]) -> Any:
    """Clients in the order of their tasks, digits last; a column an epoch."""
    count, epochs = len(found["groups"]), list(found["maps"])
    names = list(found["maps"][epochs[-1]])
    figure, axes = plt.subplots(len(names), len(epochs), figsize=(2.3 * len(epochs), 2.7 * len(names)), squeeze=False)
    for row, name in zip(axes, names, strict=True):
        for axis, epoch in zip(row, epochs, strict=True):
            if name not in found["maps"][epoch]:
                axis.axis("off")
                continue
            matrix = np.full((count, count), np.nan)  # a client with itself is left blank
            matrix[np.triu_indices(count, 1)] = values = found["maps"][epoch][name]
            matrix = np.where(np.isnan(matrix), matrix.T, matrix)
            axis.imshow(matrix, vmin=min(values), vmax=max(values))
            score = found["scores"][epoch][name]
            title = f"{NAMES.get(name, name)}, epoch {epoch}: {min(values):.3g} to {max(values):.3g}"
            judged = f"ARI of tasks {score['tasks_ari']:.2f}, of digits {score['kinds_ari']:.2f}"
            axis.set(title=f"{title}\n{judged}", xticks=[], yticks=[])
    return figure


def table_1(found: dict[str, Any]) -> Any:
    """What each choice of members adds to the client alone, with standard errors over clients; a method a group."""
    methods = list(dict.fromkeys(row["method"] for row in found["rows"]))
    names = [name for name in CHOICES if name in found["rows"][0]["accuracy"]]
    inside = [method for method in methods if method != "pretrain"]  # where gains are of another size
    parts = [part for part in (inside, [method for method in methods if method not in inside]) if part]
    ratios = [len(part) + 0.5 for part in parts]
    figure, axes = plt.subplots(1, len(parts), figsize=(8, 2.8), squeeze=False, width_ratios=ratios)
    for axis, part in zip(axes[0], parts, strict=True):
        for k, name in enumerate(names):
            each = [gains(found["rows"], method, name) for method in part]
            places = [place + 0.12 * (k - (len(names) - 1) / 2) for place in range(len(part))]
            means, errors = ([f(one) for one in each] for f in (np.mean, standard_error))
            axis.errorbar(places, means, errors, fmt=".", label=NAMES.get(name, name))
        bases = [np.mean([np.mean(r["accuracy"]["base"]) for r in found["rows"] if r["method"] == m]) for m in part]
        axis.set_xticks(range(len(part)), [f"{m}\nalone {100 * b:.2f}" for m, b in zip(part, bases, strict=True)])
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set_xlim(-0.6, len(part) - 0.4)
    axes[0, 0].set_ylabel("gain over the client alone, points")
    axes[0, 0].legend(ncols=6, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    return figure


def gains(rows: list[dict[str, Any]], method: str, name: str) -> Any:
    """Points that members chosen so add, a number a client."""
    own = [row["accuracy"] for row in rows if row["method"] == method]
    return 100 * np.concatenate([np.subtract(accuracy[name], accuracy["base"]) for accuracy in own])


def standard_error(values: Any) -> float:
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


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
    cases = list(dict.fromkeys((row["data"], row["classes"], row.get("clients", 100)) for row in found["rows"]))
    figure, axes = plt.subplots(1, len(cases), figsize=(2.6 * len(cases), 2.8), sharey=True, squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        rows = [row for row in found["rows"] if (row["data"], row["classes"], row.get("clients", 100)) == case]
        data, classes, clients = case
        means = [np.mean(row["accuracy"]) for row in rows]
        errors = [standard_error(row["accuracy"]) for row in rows]
        axis.bar(range(len(rows)), means, yerr=errors)
        axis.set_xticks(range(len(rows)), [row["method"] for row in rows], rotation=50, ha="right")
        axis.set_title(f"{data.replace('cifar', 'CIFAR-')}, {classes} classes a client\n{clients} clients")
    axes[0, 0].set_ylabel("accuracy")
    return figure


FIGURES = {
    "figure-2": figure_2,
    "figure-2-seeds": figure_2,
    "figure-3": figure_3,
    "figure-4a": figure_4a,
    "figure-4b": figure_4b,
    "figure-4-table": figure_4_table,
    "figure-4-table-long": figure_4_table,
    "figure-5": maps,
    "figure-6": figure_6,
    "figure-9a": figure_9a,
    "figure-9b": figure_9b,
    "figure-12": maps,
    "table-1": table_1,
    "table-1-short": table_1,
    "table-2": table_2,
    "table-3": table_3,
    "table-3-cifar10": table_3,
}

if __name__ == "__main__":
    draw_all(PAPER, FIGURES, tight=True)

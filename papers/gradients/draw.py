"""The figures, from results/*.json: python papers/gradients/draw.py [folder of results]. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "results"
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
plt.rcParams.update({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sosie"})


def named(pair: str) -> str:
    return " – ".join(NAMES[data] for data in pair.split("-"))


def figure_1(found: dict[str, Any]) -> Any:
    """Rows: representations. Columns: index, and whether networks of one data set share their sketch."""
    columns = [(sharing, measure) for sharing in found["curves"] for measure in MEASURES]
    figure, axes = plt.subplots(len(KERNELS), len(columns), figsize=(11, 13), sharex=True, sharey=True)
    for row, (kernel, words) in enumerate(KERNELS.items()):
        for column, (sharing, measure) in enumerate(columns):
            axis, x = axes[row, column], range(1, len(found["sites"]) + 1)
            for pair, (colour, style) in PAIRS.items():
                curve = found["curves"][sharing][kernel][measure].get(pair)
                if curve is None:
                    continue
                points = [curve[site] for site in found["sites"]]
                axis.errorbar(x, [p["mean"] for p in points], [p["spread"] for p in points], color=colour,
                              linestyle=style, marker=".", label=named(pair))  # fmt: skip
                if points[0]["chance"] is not None:
                    chance = [p["chance"] for p in points]
                    axis.plot(
                        x,
                        chance,
                        "x",
                        color="black",
                        markersize=3,
                        label="chance" if pair == "cifar100-mnist" else None,
                    )
            if row == 0:
                axis.set_title(f"{MEASURES[measure]}, {sharing} sketches")
            if column == 0:
                axis.set_ylabel(words)
    axes[-1, 0].set_xlabel("site: stem, eight blocks, pooled output")
    axes[0, 0].legend(fontsize=5)
    return figure


def bars(found: dict[str, Any], key: str, label: str) -> Any:
    figure, axis = plt.subplots(figsize=(5, 2.5))
    pairs = [pair for pair in PAIRS if pair in found[key]]
    values = [found[key][pair] for pair in pairs]
    axis.bar(range(len(pairs)), [v["mean"] for v in values], yerr=[v["spread"] for v in values],
             color=[PAIRS[pair][0] for pair in pairs])  # fmt: skip
    axis.set_xticks(range(len(pairs)), [named(pair) for pair in pairs], rotation=20)
    axis.set_ylabel(label)
    return figure


def figure_4(found: dict[str, Any]) -> Any:
    scores = {"mean_embedding": "‖μ‖", "kernel_norm": "‖K‖/N²", "kernel_trace": "√(Tr K)/N",
              "mean_over_norm": "‖μ‖ over ‖K‖/N²", "mean_over_trace": "‖μ‖ over √(Tr K)/N"}  # fmt: skip
    figure, axes = plt.subplots(len(scores), 6, figsize=(13, 9), sharex="col")
    for column, (architecture, source) in enumerate((a, s) for a in found["curves"] for s in NAMES):
        for row, (score, words) in enumerate(scores.items()):
            axis = axes[row, column]
            for target, name in NAMES.items():
                axis.semilogy(found["curves"][architecture][score][f"{source}-{target}"], ".-", label=f"on {name}")
            axes[row, 0].set_ylabel(words)
        axes[0, column].set_title(f"{architecture} of {NAMES[source]}")
    axes[0, 0].legend()
    return figure


def heat_maps(rows: dict[str, dict[str, Any]]) -> Any:
    width = max(len(maps) for maps in rows.values())
    figure, axes = plt.subplots(len(rows) * 2, width, figsize=(2 * width, 4.2 * len(rows)), squeeze=False)
    for row, (name, maps) in enumerate(rows.items()):
        for axis in axes[2 * row : 2 * row + 2].flat:
            axis.axis("off")
        for column, (pair, found) in enumerate(maps.items()):
            for line, what in enumerate(("value", "chance")):
                axis = axes[2 * row + line, column]
                axis.axis("on")
                axis.imshow(found[what], vmin=0, vmax=1, cmap="magma")
                axis.set(xticks=[], yticks=[], title=named(pair) if line == 0 else "what chance gives")
            axes[2 * row, 0].set_ylabel(KERNELS.get(name, name))
    return figure


def figure_13(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, len(found["curves"]), figsize=(8, 2.6))
    for axis, (base, targets) in zip(axes, found["curves"].items(), strict=True):
        for target, scores in targets.items():
            axis.plot(scores["log_mean_over_norm"], ".-", label=f"on {NAMES[target]}")
        axis.set(title=f"network of {NAMES.get(base, 'ImageNet')}", xlabel="site", ylabel="log ‖μ‖ / (‖K‖/N²)")
    axes[0].legend()
    return figure


def figure_14(found: dict[str, Any]) -> Any:
    cases = [(base, task, case) for base, tasks in found["accuracy"].items() for task, case in tasks.items()]
    figure, axes = plt.subplots(1, len(cases), figsize=(2.6 * len(cases), 2.6), sharey=True)
    for axis, (base, task, case) in zip(axes, cases, strict=True):
        for kernel in ("features", "hadamard", "hadamard_of_sketches"):
            axis.plot(case[kernel], ".-", label=KERNELS[kernel])
        axis.axhline(case["probe_converged"], color="grey", linestyle="--", label="last layer, converged")
        axis.axhline(case["probe_one_epoch"], color="grey", linestyle=":", label="last layer, one epoch")
        axis.set(title=f"{NAMES.get(base, 'ImageNet')} network on {NAMES[task]}", xlabel="site")
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize=5)
    return figure


def bounds(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
    for axis, site in zip(axes, ("layer2.1", "layer4.1", "avgpool"), strict=True):
        for kernel in ("features", "hadamard", "hadamard_of_sketches"):
            for measure, style in (("linear_cka", "-"), ("debiased_cka", ":")):
                wanted = (site, kernel, measure)
                rows = [
                    r
                    for r in found["rows"]
                    if (r["site"], r["kernel"], r["measure"]) == wanted and r["bias"] is not None
                ]
                if rows:
                    colour = {"features": "tab:blue", "hadamard": "tab:green"}.get(kernel, "tab:red")
                    axis.errorbar([r["size"] for r in rows], [r["bias"] for r in rows], [r["spread"] for r in rows],
                                  color=colour, linestyle=style, marker=".",
                                  label=f"{KERNELS[kernel]}, {'debiased' if style == ':' else 'CKA'}")  # fmt: skip
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set(title=site, xlabel="M", xscale="log")
    axes[0].set_ylabel("sketched less exact")
    axes[0].legend(fontsize=5)
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
    for name, draw in FIGURES.items():
        path = RESULTS / f"{name}.json"
        if path.is_file():
            figure = draw(json.loads(path.read_text("utf-8")))
            figure.tight_layout()
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
            plt.close(figure)
            print(f"wrote {path.with_suffix('.svg')}")

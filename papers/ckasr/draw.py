"""The figures, from results/*.json: python papers/ckasr/draw.py [folder of results]. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))  # what all papers share

import matplotlib.pyplot as plt
import numpy as np
from drawing import draw_all, set_style

NAMES = {
    "none": "none", "cka_sr": "CKA-SR", "augcka_sr": "AugCKA-SR", "cca": "CCA", "biased": "CKA",
    "debiased": "CKA, debiased", "all_pairs": "all pairs, debiased", "epsilon_all": "all weights",
    "epsilon_kept": "kept weights", "epsilon_relative": "kept, in units of a layer", "learned": "π alone",
    "cka": "with token CKA", "eq13": "equation 13",
}  # fmt: skip
PAPER = {
    ("table-5", 0.95): {"cka_sr": 0.99, "augcka_sr": 1.12},
    ("table-5", 0.98): {"cka_sr": 0.70, "augcka_sr": 0.86},
    ("table-5-rest", 0.70): {"cka_sr": 0.18, "augcka_sr": 0.43},
    ("table-5-rest", 0.85): {"cka_sr": 0.49, "augcka_sr": 0.52},
    ("table-5-rest", 0.90): {"cka_sr": 0.29, "augcka_sr": 0.06},
    ("table-5-rest", 0.998): {"cka_sr": 0.37, "augcka_sr": 0.09},
    ("table-5-longer", 0.95): {"cka_sr": 0.99, "augcka_sr": 1.12},
    ("table-5-full", 0.95): {"cka_sr": 0.99, "augcka_sr": 1.12},
    ("table-3", None): {"cca": 0.42, "cka_sr": 0.87},
}  # gains, in points
set_style({"font.size": 7})


def lemmas(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8))
    for key, label in (("path", "a path on which Lemma 2 fails"), ("together", "all correlations scaled together")):
        axes[0].plot(*zip(*found["lemma_2"][key], strict=True), ".-", label=label)
    axes[0].set(xlabel="linear CKA", ylabel="information, nats", title="Lemma 2")
    axes[0].legend()
    axes[1].plot([1 - value for value in found["equation_13"]["sums"]], ".", markersize=3)
    axes[1].axhspan(0, 1, color="grey", alpha=0.3)
    axes[1].set(xlabel="token", title="Equation 13 at π = 1 (grey: probabilities)")
    axes[2].loglog(*zip(*found["theorem_1"]["points"], strict=True), ".-")
    axes[2].set(xlabel="ε", ylabel="change of outputs", title="Theorem 1")
    return figure


def dense(found: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(4, 2.6))
    axis.bar(list(found["accuracies"]), list(found["accuracies"].values()))
    low = min([91.0, *found["accuracies"].values()])
    axis.axhline(91, color="black", linestyle="--", linewidth=0.8)
    axis.set(xlabel="seed", ylabel="accuracy, %", ylim=(low - 1, max([93.0, *found["accuracies"].values()]) + 0.5))
    return figure


def gains(axis: Any, accuracy: dict[str, Any], paper: dict[str, float]) -> None:
    """Every seed's gain, the mean with its interval, and the paper's."""
    base = accuracy["arms"][accuracy["baseline"]]["seeds"]
    for place, (name, cell) in enumerate(accuracy["differences"].items()):
        own = accuracy["arms"][name]["seeds"]
        each = [own[seed] - base[seed] for seed in own if seed in base]
        axis.plot([place + 0.18] * len(each), each, ".", color="grey", markersize=3)
        if cell["difference"] is not None:
            axis.plot(place, cell["difference"], "o", color=f"C{place % 10}", markersize=4)
        if cell["low"] is not None:
            axis.plot([place, place], [cell["low"], cell["high"]], color=f"C{place % 10}")
        if name in paper:
            axis.plot([place - 0.3, place + 0.3], [paper[name]] * 2, "--", color="black", linewidth=0.8)
    names = list(accuracy["differences"])
    axis.set_xticks(
        range(len(names)), [NAMES.get(name, name.replace("_", " ")) for name in names], rotation=60, ha="right"
    )
    axis.axhline(0, color="grey", linewidth=0.5)


def similarities(axis: Any, similarity: dict[str, Any]) -> None:
    """Within stages, before and after training, biased and debiased."""
    arms = list(similarity["biased"])
    for k, kind in enumerate(("biased", "debiased")):
        for place, arm in enumerate(arms):
            value = similarity[kind][arm]
            if value["before"] is not None and value["after"] is not None:
                axis.plot(
                    [place + 0.2 * k - 0.1] * 2, [value["before"], value["after"]], "-", color=f"C{k}", linewidth=0.8
                )
                axis.plot(place + 0.2 * k - 0.1, value["after"], "o", color=f"C{k}", markersize=4,
                          label=NAMES[kind] if not place else None)  # fmt: skip
    axis.set_xticks(range(len(arms)), [NAMES.get(arm, arm.replace("_", " ")) for arm in arms], rotation=60, ha="right")
    axis.set_title("CKA within stages (line: from before)")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.42), ncol=2, frameon=False)


def table_5(found: dict[str, Any]) -> Any:
    levels = found["levels"]
    if len(levels) == 1:
        figure, axes = plt.subplots(1, 2, figsize=(6, 2.8))
        axes = axes[:, None]
    else:
        figure, axes = plt.subplots(2, len(levels), figsize=(2.6 * len(levels), 5), squeeze=False)
    for k, level in enumerate(levels.values()):
        paper = PAPER.get((found["experiment"], level["sparsity"]), {})
        gains(axes[0, k], level["accuracy"], paper)
        axes[0, k].set_title(f"sparsity {level['sparsity']:g}, CIFAR-100")
        similarities(axes[1, k], level["similarity"])
    axes[0, 0].set_ylabel("gain in accuracy, points\n(dashed: the paper's; grey: seeds)")
    return figure


def table_3(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(6, 2.8))
    gains(axes[0], found["accuracy"], PAPER["table-3", None])
    axes[0].set_ylabel("gain in accuracy, points\n(dashed: the paper's; grey: seeds)")
    similarities(axes[1], found["similarity"])
    return figure


def table_2(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2))
    gains(axes[0], found["accuracy"], {})
    axes[0].set_ylabel("gain in accuracy, points (grey: seeds)")
    similarities(axes[1], found["similarity"])
    shares = {name: value for name, value in found["gradient_share_before"].items() if value is not None}
    axes[2].bar(range(len(shares)), list(shares.values()))
    axes[2].set_xticks(range(len(shares)), [NAMES.get(n, n.replace("_", " ")) for n in shares], rotation=60, ha="right")
    axes[2].set(title="gradient of the penalty over the task's, at first", yscale="log")
    return figure


def table_4(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(6, 2.8))
    for place, part in enumerate(found["networks"].values()):
        for k, name in enumerate(("none", "cka_sr")):
            mean = part["accuracy"]["arms"][name]["mean"]
            if mean is not None:
                axes[0].bar(place + 0.35 * k, mean, 0.3, color=f"C{k}", label=None if place else NAMES[name])
    axes[0].set_xticks([0.17, 1.17], [part["network"] for part in found["networks"].values()])
    axes[0].set_ylabel("accuracy, %, CIFAR-100, one seed")
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2, frameon=False)
    similarities(axes[1], next(iter(found["networks"].values()))["similarity"])
    return figure


def table_1(found: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(5.5, 3))
    whole = found["plain"]
    for k, (name, accuracy) in enumerate(whole["accuracy"].items()):
        axis.plot(1, accuracy, "s", color=f"C{k}", label=f"whole, pretrained with {NAMES[name]}")
    for row in found["rows"]:
        k = list(whole["accuracy"]).index(row["pretrained"])
        for marker, (rule, accuracy) in zip("ox+", row["accuracy"].items(), strict=True):
            axis.plot(row["flops"] / whole["flops"], accuracy, marker, color=f"C{k}", markersize=5,
                      label=NAMES[rule] if row is found["rows"][0] else None)  # fmt: skip
    axis.set(xlabel="operations, of the whole network's", ylabel="accuracy, %, one seed")
    axis.legend()
    return figure


def levels_figure(found: dict[str, Any]) -> Any:
    """Maps of all layers, biased above debiased, and histograms; then both against the weight of the penalty."""
    maps = found["maps"]
    figure, axes = plt.subplots(4, max(len(maps), 2), figsize=(2.1 * max(len(maps), 2), 8.4), squeeze=False)
    for column, (weight, one) in enumerate(maps.items()):
        for row, measure in enumerate(("linear_cka", "debiased_cka")):
            values = np.array([[np.nan if v is None else v for v in line] for line in one[measure]], dtype=float)
            axes[row, column].imshow(values, vmin=0, vmax=1, origin="lower")
            axes[row, column].set_title(f"β = {weight}" + (", debiased" if row else ""))
        axes[2, column].plot(*histogram(one), linewidth=0.8)
        axes[2, column].set_title("kept weights")
    against(axes[3, 0], found, ("biased", "debiased", "all_pairs"), "similarity of layers")
    against(axes[3, 1], found, ("epsilon_kept", "epsilon_relative"), "share of small weights")
    for axis in [*axes[0, len(maps) :], *axes[1, len(maps) :], *axes[2, len(maps) :], *axes[3, 2:]]:
        axis.set_axis_off()
    return figure


def histogram(one: dict[str, Any]) -> tuple[Any, list[int]]:
    """The middles of the bins, and how many weights are in each."""
    edges = np.linspace(-one["limit"], one["limit"], len(one["histogram"]) + 1)
    return (edges[1:] + edges[:-1]) / 2, one["histogram"]


def against(axis: Any, found: dict[str, Any], kinds: tuple[str, ...], title: str) -> None:
    for kind in kinds:
        values = [np.nan if value is None else value for value in found["rows"][kind]]
        axis.plot(range(len(values)), values, ".-", label=NAMES[kind])
    axis.set_xticks(range(len(found["weights"])), [f"{weight:g}" for weight in found["weights"]])
    axis.set(xlabel="β", title=title)
    axis.legend()


def figure_3(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(6, 2.6))
    for axis, part in zip(axes, found["networks"].values(), strict=True):
        for weight, one in part["maps"].items():
            axis.plot(*histogram(one), linewidth=0.8, label=f"β = {weight}")
        axis.set_title(f"weights of {part['network']}")
        axis.legend()
    return figure


FIGURES = {
    "lemmas": lemmas, "dense": dense, "table-5": table_5, "table-5-rest": table_5,
    "table-5-longer": table_5, "table-5-full": table_5, "table-3": table_3, "table-2": table_2, "table-4": table_4,
    "table-1": table_1,
    "figure-1": levels_figure, "figure-2": levels_figure, "figure-3": figure_3,
}  # fmt: skip

if __name__ == "__main__":
    draw_all(FOLDER, FIGURES, tight=True)

"""Figures of the zoo from results/*.json: `python papers/zoo/draw.py [folder]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

from drawing import draw_all, plt, set_style

COLOURS = ("#3b6ea8", "#c8553d", "#4f9d69", "#8e6bbf", "#b08900", "#5a5a5a", "#2aa5a0")
MARKERS = "os^Dv*P"
WAYS = {
    "cka_short": "CKA, short vectors", "cka": "CKA", "cka_symmetric": "CKA, both ways", "weights": "weights",
    "weights_symmetric": "weights, both ways", "atoms": "atoms", "family": "family",
}  # fmt: skip
ASKED = (  # who, whose relation, in words
    ("fine_tuned", "parent", "fine-tuned:\nparent"),
    ("fine_tuned", "family", "fine-tuned:\nfamily"),
    ("trained_on", "parent", "trained on:\nparent"),
    ("pruned", "parent", "pruned:\nparent"),
    ("rounded", "parent", "rounded:\nparent"),
    ("scratch", "seed", "from scratch:\nother seed"),
    ("scratch", "data", "from scratch:\nsame data"),
    ("scratch", "architecture", "from scratch:\nsame architecture"),
)


def train(found: dict[str, Any]) -> Any:
    """How well networks do what they were trained for."""
    networks = [each for each in found["networks"] if each["relation"] == "scratch"]
    datasets = list(dict.fromkeys(each["dataset"] for each in networks))
    figure, axis = plt.subplots(figsize=(6, 2.6))
    for k, name in enumerate(dict.fromkeys(each["architecture"] for each in networks)):
        own = [each for each in networks if each["architecture"] == name]
        places = [datasets.index(each["dataset"]) + 0.15 * (k - 1.5) for each in own]
        axis.plot(places, [each["accuracy"] for each in own], MARKERS[k], ms=4, color=COLOURS[k], label=name)
    axis.set(xticks=range(len(datasets)), xticklabels=datasets, ylabel="accuracy", ylim=(0, 1))
    axis.legend(frameon=False, ncols=2)
    return figure


def finetune(found: dict[str, Any]) -> Any:
    """What fine-tuning gives, by what a network was trained on before."""
    targets = found["accuracies"]
    figure, axes = plt.subplots(1, len(targets), figsize=(2.2 * len(targets), 2.8), squeeze=False)
    before = [name.partition("-")[2].rpartition("-")[0] for name in found["models"]]
    architectures = [name.partition("-")[0] for name in found["models"]]
    datasets = list(dict.fromkeys(before))
    for axis, (target, reached) in zip(axes[0], targets.items(), strict=True):
        for k, architecture in enumerate(dict.fromkeys(architectures)):
            own = [i for i, name in enumerate(architectures) if name == architecture]
            places = [datasets.index(before[i]) + 0.15 * (k - 1.5) for i in own]
            axis.plot(places, [reached[i] for i in own], MARKERS[k], ms=3, color=COLOURS[k], label=architecture)
        axis.set_title(target)
        axis.set_xticks(range(len(datasets)), datasets, rotation=60, ha="right")
    axes[0, 0].set_ylabel("accuracy after fine-tuning")
    axes[0, -1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def relatives(found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(3, 1, figsize=(9.5, 11), height_ratios=(1, 0.8, 1.5))
    _nearest(axes[0], found["nearest"])
    _bases(axes[1], found["bases"])
    _map(axes[2], found["map"])
    return figure


def _nearest(axis: Any, nearest: dict[str, Any]) -> None:
    width = 0.8 / len(WAYS)
    for k, (way, words) in enumerate(WAYS.items()):
        for place, (who, relation, _) in enumerate(ASKED):
            cell = nearest[who][way][relation]
            if cell["share"] is None:
                continue
            at = place + (k - len(WAYS) / 2 + 0.5) * width
            axis.bar(at, cell["share"], width * 0.9, color=COLOURS[k], label=words if place == 0 else None)
            axis.plot([at, at], [cell["low"], cell["high"]], color="black", lw=0.8)
            axis.plot([at - width / 2, at + width / 2], [cell["chance"]] * 2, color="black", lw=1.5)
    axis.set(xticks=range(len(ASKED)), xticklabels=[words for _, _, words in ASKED], ylim=(0, 1.02))
    axis.set_ylabel("share of nearest neighbours")
    axis.set_title("Is the nearest network a relative? (thick lines: chance)")
    axis.legend(frameon=False, ncols=len(WAYS), loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _bases(axis: Any, bases: dict[str, Any]) -> None:
    for k, (score, cells) in enumerate(bases["scores"].items()):
        curve = [cell for cell in cells["curve"] if cell["family_precision"] is not None]
        recall, precision = ([cell[f"family_{what}"] for cell in curve] for what in ("recall", "precision"))
        axis.plot(recall, precision, marker=".", color=COLOURS[k], label=f"{score} ({cells['auroc']:.2f})")
    axis.set(xlabel="children given a base of their family", ylabel="bases that are of the family", ylim=(0, 1.02))
    axis.set_title("Which base? Precision and recall over thresholds (area under the ROC curve)")
    axis.legend(frameon=False)


def _map(axis: Any, found: dict[str, Any]) -> None:
    points = [[name, "published" if relation == "published" else architecture, dataset, relation, x, y]
              for name, architecture, dataset, relation, x, y in found["points"]]  # fmt: skip
    architectures, datasets = (list(dict.fromkeys(point[k] for point in points)) for k in (1, 2))
    for _, architecture, dataset, relation, x, y in points:
        style = MARKERS[architectures.index(architecture) % len(MARKERS)]
        colour = COLOURS[datasets.index(dataset) % len(COLOURS)]
        whole = relation in ("scratch", "published")
        axis.plot(x, y, style, ms=5, color=colour, mfc=colour if whole else "none", mew=0.8)
    for k, name in enumerate(architectures):
        axis.plot([], [], MARKERS[k % len(MARKERS)], color="black", label=name)
    for k, name in enumerate(datasets):
        axis.plot([], [], "s", color=COLOURS[k % len(COLOURS)], label=name)
    axis.set(xticks=[], yticks=[])
    axis.set_title(f"Map of the zoo by CKA, stress {found['stress']:.2f} (hollow: fine-tuned, or a copy)")
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def recommend(found: dict[str, Any]) -> Any:
    """Rank correlation of every score with what fine-tuning gives, and how far behind its first choice is."""
    scores = found["scores"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for place, cell in enumerate(scores.values()):
        for each in cell["targets"].values():
            if each["spearman"] is not None:
                axes[0].plot(each["spearman"], place, "o", ms=3, color="#999999")
            axes[1].plot(each["regret_1"], place, "o", ms=3, color="#999999")
        if cell["interval"]:
            axes[0].plot(cell["interval"], [place] * 2, color=COLOURS[0], lw=2)
        if cell["spearman"] is not None:
            axes[0].plot(cell["spearman"], place, "D", ms=6, color=COLOURS[0])
        if cell["within"] is not None:
            axes[0].plot(cell["within"], place, "x", ms=6, color=COLOURS[1])
        axes[1].plot(cell["regret_1"], place, "D", ms=6, color=COLOURS[0])
    axes[0].plot([], [], "D", color=COLOURS[0], label="mean over targets, interval over networks")
    axes[0].plot([], [], "x", color=COLOURS[1], label="within an architecture")
    axes[0].axvline(0, color="black", lw=0.8)
    if found["again"]:
        ceiling = sum(value or 0.0 for value in found["again"].values()) / len(found["again"])
        axes[0].axvline(ceiling, color="black", lw=0.8, ls=":", label="fine-tuning and fine-tuning again")
    axes[1].axvline(found["numbers"]["random_regret_1"], color="black", lw=0.8, ls="--", label="one drawn at random")
    axes[0].set(yticks=range(len(scores)), yticklabels=list(scores), xlabel="Spearman's ρ with real accuracy")
    axes[0].invert_yaxis()
    axes[1].set_xlabel("accuracy lost by the first choice")
    for axis in axes:
        axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


FIGURES = {
    "train": train, "finetune": finetune, "finetune-again": finetune, "relatives": relatives, "recommend": recommend
}  # fmt: skip

if __name__ == "__main__":
    set_style({"font.size": 8, "legend.fontsize": 7})
    draw_all(PAPER, FIGURES, tight=True)

"""One small figure a paper for docs/papers.md, with the paper's numbers and ours: python papers/pictures.py

Needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PAPERS = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPERS))

import matplotlib.pyplot as plt  # noqa: E402
from claims import judge_all  # noqa: E402
from drawing import set_style  # noqa: E402
from scatter import reader  # noqa: E402

FOLDER = PAPERS.parent / "docs" / "pictures"
THEIRS, OURS, CHANCE = "tab:red", "tab:blue", "grey"
set_style({"font.size": 8, "svg.fonttype": "none", "figure.constrained_layout.use": True, "legend.frameon": False})


def judged(paper: str) -> dict[str, Any]:
    return {each["name"]: each for each in judge_all(PAPERS / paper, PAPERS / paper / "results")}


def bar(axis: Any, row: float, low: float, value: float, high: float, colour: str, label: str | None = None) -> None:
    axis.plot([low, high], [row, row], color=colour, linewidth=2)
    axis.plot([value], [row], "o", color=colour, markersize=4, label=label)


def ours(axis: Any, row: float, found: dict[str, Any], label: str | None = None, times: float = 1.0) -> None:
    low, value, high = (times * found[key] for key in ("interval_low", "value", "interval_high"))
    bar(axis, row, low, value, high, OURS, label)


def named(axis: Any, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()


def frankenstein() -> Any:
    found = judged("frankenstein")
    figure, axes = plt.subplots(1, 2, figsize=(6.2, 1.7))
    for axis, claims, title in (
        (axes[0], {"baseline-cka-tiny10": (0.883, 0.050), "baseline-cka-resnet20": (0.922, 0.098)}, "CKA, matched"),
        (
            axes[1],
            {"unstitched-cross-entropy-tiny10": (6.99, 1.96), "unstitched-cross-entropy-resnet20": (4.69, 2.91)},
            "cross-entropy, not matched",
        ),
    ):
        for row, (name, (mean, spread)) in enumerate(claims.items()):
            bar(axis, row - 0.12, mean - spread, mean, mean + spread, THEIRS, "the paper ± spread" if not row else None)
            ours(axis, row + 0.12, found[name], "ours, 95 %" if not row else None)
        named(axis, ["Tiny-10", "ResNet-20"])
        axis.set(title=title, ylim=(1.5, -0.5))
    axes[1].legend(fontsize=6)
    return figure


def gradients() -> Any:
    whole = reader(PAPERS / "gradients" / "results")("figure-1")
    figure, axes = plt.subplots(1, 2, figsize=(6.2, 2.2), sharey=True)
    pairs = {
        "cifar10-cifar10": "two of CIFAR-10",
        "cifar10-cifar100": "CIFAR-10, CIFAR-100",
        "cifar10-mnist": "CIFAR-10, digits",
    }
    for axis, sharing in zip(axes, ("shared", "independent"), strict=True):
        curves = whole["curves"][sharing]["hadamard_of_sketches"]["kernel_alignment"]
        for colour, (pair, label) in zip(("tab:blue", "tab:green", "tab:orange"), pairs.items(), strict=True):
            axis.plot([at["mean"] for at in curves[pair].values()], color=colour, label=label)
            axis.plot([at["chance"] for at in curves[pair].values()], ":", color=colour)
        axis.set(title=f"{sharing} sketches", xlabel="site, from the stem to the end", xticks=range(10))
    axes[0].set(ylabel="similarity (dotted: chance)", ylim=(0, 1.02))
    axes[1].legend(fontsize=6)
    return figure


def wcka() -> Any:
    found = judged("wcka")
    figure, axis = plt.subplots(figsize=(6.2, 2.0))
    relations = ("seed", "architecture", "strategy")
    for row, relation in enumerate(relations):
        for shift, coefficient, colour in ((-0.15, "pearson", "tab:cyan"), (0.15, "spearman", OURS)):
            claim = found[f"figure-3-{relation}-{coefficient}"]
            label = {"pearson": "Pearson's r", "spearman": "Spearman's ρ"}[coefficient] if not row else None
            bar(axis, row + shift, claim["interval_low"], claim["value"], claim["interval_high"], colour, label)
    axis.axvline(0, color="black", linewidth=0.6)
    axis.axvspan(0, 0.9, color=THEIRS, alpha=0.08, label="the paper: above 0, for all")
    named(axis, list(relations))
    axis.set(xlabel="lead of wCKA over the best of three others (95 %, training runs drawn again)", xlim=(-0.6, 0.9))
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def atoms() -> Any:
    found = judged("atoms")
    numbers = reader(PAPERS / "atoms" / "results")("table-1-short")["numbers"]
    theirs = {"fedavg": 2.04, "ditto": 2.51, "fedrep": 1.91, "fedprox": 2.35, "fedper": 1.64, "pretrain": 3.64}
    names = ["FedAvg", "Ditto", "FedRep", "FedProx", "FedPer", "Pretrain"]
    figure, axis = plt.subplots(figsize=(6.2, 2.2))
    for row, (method, gain) in enumerate(theirs.items()):
        axis.plot([gain], [row], "D", color=THEIRS, markersize=4, label=None if row else "the paper")
        ours(axis, row, found[f"table-1-{method}-gain"], None if row else "ours, members by atoms, 95 %", times=100)
        random = 100 * (numbers[f"{method}_random"] - numbers[f"{method}_base"])
        axis.plot(
            [random], [row + 0.25], "x", color=CHANCE, markersize=5, label=None if row else "ours, members at random"
        )
    axis.axvline(0, color="black", linewidth=0.6)
    named(axis, names)
    axis.set(xlabel="gain of an ensemble, points")
    axis.legend(fontsize=6)
    return figure


def ckasr() -> Any:
    read = reader(PAPERS / "ckasr" / "results")
    arms = {"cka_sr": ("CKA-SR", 0.99), "augcka_sr": ("AugCKA-SR", 1.12)}
    runs = {"12 epochs, 10 seeds": ("table-5", "main"), "24 epochs, 10 seeds": ("table-5-longer", "longer"),
            "160 epochs, 5 seeds": ("table-5-full", "full")}  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(6.2, 1.8), sharey=True)
    for axis, (arm, (name, gain)) in zip(axes, arms.items(), strict=True):
        for row, (table, level) in enumerate(runs.values()):
            found = read(table)["levels"][level]["accuracy"]["differences"][arm]
            bar(axis, row, found["low"], found["difference"], found["high"], OURS, None if row else "ours, 95 %")
        axis.axvline(0, color="black", linewidth=0.6)
        axis.axvline(gain, color=THEIRS, linestyle="--", linewidth=1, label="the paper, one run")
        axis.set(title=name, xlabel="gain at sparsity .95, points")
    named(axes[0], list(runs))
    axes[1].legend(fontsize=6)
    return figure


FIGURES = {"frankenstein": frankenstein, "gradients": gradients, "wcka": wcka, "atoms": atoms, "ckasr": ckasr}

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw()
        path = FOLDER / f"papers-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(path)

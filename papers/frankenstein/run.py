"""Similarity and Matching of Neural Network Representations (Csiszárik et al. 2021): every claim that can be run.

    python papers/frankenstein/run.py                        # all of it: some 80 minutes on one H200
    python papers/frankenstein/run.py --only figure-2,figure-4 --resume
    python papers/frankenstein/run.py --small                # a smoke run on a CPU: its numbers mean nothing
    python papers/frankenstein/draw.py                       # the figures, from results/*.json

SOSIE_DATA and SOSIE_WEIGHTS name the folders with the images and the published weights (README.md says which).
Figures 2, 3, 7 and 8, figure-2-ten, further-results and architectures write each network and each pair (figure 3: each
width) when it is done (nets/, or the folder SOSIE_CHECKPOINTS), and a run that was ended goes on behind it. Parts of
figure-3 and architectures, which have not ended, are in results/records and are taken as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

import sosie
from sosie.models import NamedModel

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import running
from networks import (
    RECIPES,
    Images,
    accuracy_of,
    akamaster,
    fit_batches,
    held_out,
    own_resnet20s,
    read,
    resnet20,
    tiny10,
    trained,
    untrained,
    wide_resnet20s,
)
from running import remember

# How much of everything: the real run, and a smoke run.


TINY_SITES = tuple(f"bn{i}" for i in range(1, 9))  # before the ReLU, as in the authors' code
RESNET_SITES = ("conv1", *(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)))
TINY_PAIRS = tuple((k, k + 1) for k in range(10))  # of twelve published seeds: A is the first, B the second
RESNET_PAIRS = ((0, 1), (1, 0))  # of two published seeds, both ways


@dataclass(frozen=True)
class Settings:
    """The real run; what the paper has instead is in brackets."""

    device: str
    results: Path
    nets: Path  # where networks trained here are kept
    mixed: bool = True  # bfloat16 in training networks [float32]

    # Images: joints are found on training images and evaluated on test images
    fit_images: int = 10_000  # [50,000]
    test_images: int = 10_000
    train_images: int = 50_000
    batch: int = 2_000  # that stitched networks are tested on

    # Task-loss training of a joint: Adam, the rate divided by ten at each third. 390 steps here, 11,700 in the authors'
    # code, so at a higher rate [30 epochs of 50,000 at batch 128, rate 1e-3]
    epochs: int = 10
    task_batch: int = 256
    rate: float = 5e-3

    # Figure 2 and 4
    tiny_sites: tuple[str, ...] = TINY_SITES
    tiny_pairs: tuple[tuple[int, int], ...] = TINY_PAIRS
    resnet_sites: tuple[str, ...] = RESNET_SITES
    resnet_pairs: tuple[tuple[int, int], ...] = RESNET_PAIRS
    label_pairs: int = 3  # pairs that are also trained on labels instead of B's answers

    cka_images: int = 500  # for CKA with one row per image

    # Ten ResNet-20s of our own (figure-2-ten), and others by other recipes (further-results)
    ten: int = 10
    few: int = 5
    own_epochs: int = 40
    own_batch: int = 128
    at_once: int = 10  # networks trained side by side, and written

    # Figure 3: networks of our own, ten seeds a width, each below the next [trained longer]
    widths: tuple[int, ...] = (1, 2, 3, 4)
    width_networks: int = 10
    width_sites: tuple[str, ...] = ("conv1", "layer1.1", "layer2.0", "layer3.1")
    net_epochs: int = 12
    net_batch: int = 512
    net_rate: float = 0.4
    vit_epochs: int = 20

    # Figure 5
    penalties: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)  # weights of the CKA penalty
    penalty_width: int = 3

    # Figure 6 and mode connectivity
    starts: int = 50
    start_sites: tuple[str, ...] = ("bn2", "bn5")
    start_images: int = 5_000  # for Figure 6: a hundred joints at once
    start_epochs: int = 30  # a random start has further to go: steps × rate as in the authors' code
    start_batch: int = 128
    start_rate: float = 1e-2
    modes: int = 10  # random starts a layer
    steps: int = 8  # between two maps
    good: float = 0.8  # relative accuracy that a map must have to count

    # Figure 7 and 8
    ranks: tuple[int, ...] = (4, 8, 16)
    rank_pairs: int = 10
    sparse_pairs: int = 10
    sparse_sites: tuple[str, ...] = ("bn3", "bn5", "bn7")
    alphas: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 4e-1)  # of the lasso
    l1s: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 0.06, 0.1, 0.2, 0.4)  # of the task loss
    threshold: float = 1e-4  # weights below are set to zero, as in Figure 8

    # Across data sets and architectures
    across_sites: tuple[str, ...] = ("layer1.0", "layer2.0", "layer3.0", "layer3.2")
    across_pairs: int = 3  # of sites between two architectures
    transformers: int = 5  # one published network and our own below and above them

    def task(self, **options: object) -> str:
        """Task-loss matching as the text that sosie.stitch reads."""
        given = {"epochs": self.epochs, "batch": self.task_batch, "rate": self.rate, **options}
        return f"task_loss({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    def long_task(self, **options: object) -> str:
        """The same where training starts at random."""
        return self.task(epochs=self.start_epochs, batch=self.start_batch, rate=self.start_rate, **options)


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    return replace(
        full,
        mixed=False,
        fit_images=64,
        test_images=100,
        train_images=64,
        batch=64,
        epochs=2,
        task_batch=32,
        tiny_sites=("bn3", "bn8"),
        tiny_pairs=TINY_PAIRS[:2],
        resnet_sites=("conv1", "layer1.0"),
        resnet_pairs=RESNET_PAIRS[:1],
        label_pairs=1,
        cka_images=64,
        ten=2,
        few=2,
        own_epochs=1,
        own_batch=32,
        widths=(1, 2),
        width_networks=2,
        width_sites=("layer3.1",),
        net_epochs=2,  # one of them a warm-up
        net_batch=32,
        net_rate=0.1,
        vit_epochs=2,
        penalties=(1.0,),
        penalty_width=2,
        starts=2,
        start_sites=("bn7",),
        start_images=64,
        start_epochs=2,
        start_batch=32,
        modes=2,
        steps=2,
        good=0.0,
        ranks=(4, 8, 16),
        rank_pairs=1,
        sparse_pairs=2,
        sparse_sites=("bn5",),
        alphas=(0.1, 1.0),
        l1s=(0.1,),
        across_sites=("layer3.1",),
        across_pairs=1,
        transformers=2,
    )


# Stitches and their evaluation, as rows that can be written down.


Row = dict[str, Any]


def join(
    a: NamedModel,
    site_a: str,
    b: NamedModel,
    site_b: str,
    fits: Sequence[str],
    settings: Settings,
    images: Images | None = None,
) -> list[Row]:
    """One row a fit: how well B does with A's representation on test images, and how the joint was found."""
    found = sosie.stitch(a, site_a, b, site_b, images or fit_batches(settings), fit=list(fits))
    return [row_of(each, settings) for each in found]


def row_of(found: Any, settings: Settings) -> Row:
    tested = found.evaluate(held_out(settings))
    return {"fit": found.fit, **rounded(tested), "report": rounded(found.report), "history": map_rows(found.history)}


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}


def map_rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rounded(row) for row in history]


def mean(values: Sequence[float]) -> float:
    return fmean(values)


def spread(values: Sequence[float]) -> float:
    return pstdev(values)


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's; None where one of them does not vary."""
    if len(x) < 2 or not spread(x) or not spread(y):
        return None
    return fmean((a - fmean(x)) * (b - fmean(y)) for a, b in zip(x, y, strict=True)) / (spread(x) * spread(y))


# Figure 2: least squares and task loss, layer by layer; with it what the text says of Procrustes, labels and CKA.
#
# Figure 4: similarity indices along the training of the joints of Figure 2 at the third layer of Tiny-10.


Opened = Callable[[Any], NamedModel]  # a network by its name or seed, opened or trained when it is asked for
CKAS = ("linear_cka", "debiased_cka")
CLOSED = ("least_squares", "procrustes", "identity")
COLLAPSED, FAIR = 0.5, 0.7  # relative accuracies that we take the paper's words "collapses" and "fairly well" to mean
LATE = 3  # layers from the end that count as late
FIGURE_4_SITE = "bn3"
INDICES = ("linear_cka", "r2_about_zero", "mean_cca", "svcca", "cross_entropy")  # r2: 1 − ‖AM − B‖² / ‖B‖²


def figure_2(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"numbers": {}, "architectures": {}}
    for name, opened, sites, pairs in (
        ("tiny10", tiny10, settings.tiny_sites, settings.tiny_pairs),
        ("resnet20", resnet20, settings.resnet_sites, settings.resnet_pairs),
    ):
        rows = stitched(name, partial(_by_seed, opened, settings), pairs, sites, settings)
        found["architectures"][name] = {"sites": list(sites), "rows": rows, "curves": curves(rows, sites)}
        found["numbers"] |= {f"{name}_{key}": value for key, value in numbers(rows, sites).items()}
    found["numbers"]["resnet20_least_squares_layer1.0_to_2.1"] = lowest_between(found["architectures"]["resnet20"])
    return found


def figure_2_ten(settings: Settings) -> dict[str, Any]:
    """ResNet-20 again, with ten networks of our own, each below the next; and their baseline CKA."""
    pairs = tuple((f"sgd {k}", f"sgd {(k + 1) % settings.ten}") for k in range(settings.ten))
    own = own_networks(settings, sgd=settings.ten)
    sites = settings.resnet_sites
    rows = stitched("resnet20-ten", own, pairs, sites, settings)
    ckas = [row for pair in pairs for row in kept_ckas("resnet20-ten", own, pair, sites, settings)]
    part = {"sites": list(sites), "rows": rows, "curves": curves(rows, sites)}
    found = {f"resnet20_{key}": value for key, value in numbers(rows, sites).items()}
    found["resnet20_least_squares_layer1.0_to_2.1"] = lowest_between(part)
    for key in CKAS:
        of = [row[key] for row in ckas]
        found |= {f"resnet20_{key}": mean(of), f"resnet20_{key}_spread": spread(of)}
    accuracies = {f"sgd {k}": accuracy_of(own(f"sgd {k}"), "cifar10", settings) for k in range(settings.ten)}
    found["lowest_accuracy"] = min(accuracies.values())
    return {"numbers": found, "accuracies": accuracies, "architectures": {"resnet20": part}, "cka": ckas}


def further_results(settings: Settings) -> dict[str, Any]:
    """Section 5.1: networks without batch norm, by Adam, and one by SGD below one by Adam: none was unmatchable."""
    few, sites = settings.few, ("conv1", *settings.across_sites)
    ring = [(k, (k + 1) % few) for k in range(few)]
    arms = {
        "plain": tuple((f"plain {a}", f"plain {b}") for a, b in ring),
        "adam": tuple((f"adam {a}", f"adam {b}") for a, b in ring),
        "sgd_to_adam": tuple((f"sgd {k}", f"adam {k}") for k in range(few)),
        "sgd_to_plain": tuple((f"sgd {k}", f"plain {k}") for k in range(few)),
    }
    own = own_networks(settings, sgd=settings.ten, adam=few, plain=few)
    found: dict[str, Any] = {"numbers": {}, "architectures": {}}
    for name, pairs in arms.items():
        rows = stitched(f"further-{name}", own, pairs, sites, settings)
        found["architectures"][name] = {"sites": list(sites), "rows": rows, "curves": curves(rows, sites)}
        found["numbers"] |= {f"{name}_{key}": value for key, value in numbers(rows, sites).items()}
        found["numbers"][f"{name}_task_loss_lowest"] = min(values(rows, "task_loss", None))
    keys = [f"{recipe} {k}" for recipe in ("sgd", "adam", "plain") for k in range(few)]
    found["accuracies"] = {key: accuracy_of(own(key), "cifar10", settings) for key in keys}
    for recipe in ("sgd", "adam", "plain"):
        own_accuracies = [value for key, value in found["accuracies"].items() if key.startswith(recipe)]
        found["numbers"][f"{recipe}_lowest_accuracy"] = min(own_accuracies)
    return found


def _by_seed(opened: Any, settings: Settings, seed: int) -> NamedModel:
    found: NamedModel = opened(seed, settings)
    return found


def own_networks(settings: Settings, **counts: int) -> Opened:
    """Networks by names like "adam 3"; so many of each recipe are trained when the first of them is asked for."""

    def opened(name: str) -> NamedModel:
        recipe, seed = name.split()
        return own_resnet20s(recipe, counts[recipe], settings)[int(seed)]

    return opened


def stitched(name: str, opened: Opened, pairs: Sequence[Any], sites: Sequence[str], settings: Settings) -> list[Row]:
    """Every kind of joint at every site of every pair; a pair is written when it is done."""
    rows: list[Row] = []
    for k, pair in enumerate(pairs):
        tasks = {"task_loss": settings.task(seed=k)}
        if k < settings.label_pairs:
            tasks["labels"] = settings.task(seed=k, targets="labels")
        asked = {**asked_of(pair, sites, settings), "fits": tasks}
        part = remember(
            settings.nets,
            f"stitch-{name}-{pair[0]}-to-{pair[1]}".replace(" ", ""),
            asked,
            lambda pair=pair, tasks=tasks: {"rows": pair_rows(opened, pair, sites, tasks, settings)},
        )
        rows += part["rows"]
    return rows


def asked_of(pair: Any, sites: Sequence[str], settings: Settings) -> dict[str, Any]:
    """What decides all that is done with a pair of networks."""
    recipes = {
        name: asdict(recipe) for name, recipe in RECIPES.items() if any(str(one).startswith(name) for one in pair)
    }
    trained = [settings.own_epochs, settings.own_batch] if recipes else []
    images = [len(read("cifar10", "train", settings.train_images, settings.device)[0]), settings.fit_images]
    return {"pair": list(pair), "recipes": recipes, "trained": trained, "images": images, "sites": list(sites)}


def pair_rows(opened: Opened, pair: Any, sites: Sequence[str], tasks: dict[str, str], settings: Settings) -> list[Row]:
    a, b = (opened(one) for one in pair)
    rows = []
    for site in sites:
        joined = join(a, site, b, site, [*CLOSED, *tasks.values()], settings)
        for kind, row in zip([*CLOSED, *tasks], joined, strict=True):
            rows.append({"pair": list(pair), "site": site, "kind": kind, **row})
    return rows


def lowest_between(part: dict[str, Any]) -> float:
    """Of least squares, between two layers that the paper names."""
    curve = part["curves"]["least_squares"]["relative_accuracy"]
    return min(curve[site][0] for site in part["sites"] if "layer1.0" <= site <= "layer2.1")


def curves(rows: list[Row], sites: tuple[str, ...]) -> dict[str, Any]:
    """Mean and standard deviation over pairs, for each kind of joint and each site."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return {
        kind: {
            key: {site: [mean(v), spread(v)] for site in sites for v in [values(rows, kind, site, key)]}
            for key in ("relative_accuracy", "cross_entropy")
        }
        for kind in kinds
    }


def values(rows: list[Row], kind: str, site: str | None, key: str = "relative_accuracy") -> list[float]:
    return [row[key] for row in rows if row["kind"] == kind and site in (None, row["site"])]


def numbers(rows: list[Row], sites: tuple[str, ...]) -> dict[str, float | None]:
    by_site = {kind: [mean(values(rows, kind, site)) for site in sites] for kind in (*CLOSED, "task_loss")}
    ends = {key: [row["history"][-1][key] for row in rows if row["kind"] == "task_loss"] for key in INDICES}
    starts = [row["history"][0]["linear_cka"] for row in rows if row["kind"] == "task_loss"]
    unstitched = values(rows, "identity", None, "cross_entropy")
    labelled = {(tuple(row["pair"]), row["site"]): row["relative_accuracy"] for row in rows if row["kind"] == "labels"}
    soft = {(tuple(row["pair"]), row["site"]): row["relative_accuracy"] for row in rows if row["kind"] == "task_loss"}
    procrustes = [abs(p - q) for p, q in zip(by_site["procrustes"], by_site["least_squares"], strict=True)]
    return {
        "task_loss_mean": mean(by_site["task_loss"]),
        "task_loss_lowest_layer": min(by_site["task_loss"]),
        "task_loss_first_layer": by_site["task_loss"][0],
        "first_layer_below_the_next_worst": min(by_site["task_loss"][1:]) - by_site["task_loss"][0],
        "least_squares_mean": mean(by_site["least_squares"]),
        "task_loss_above_least_squares": mean(by_site["task_loss"]) - mean(by_site["least_squares"]),
        "least_squares_collapsed_layers": sum(value < COLLAPSED for value in by_site["least_squares"]),
        "least_squares_fair_share": mean([value >= FAIR for value in by_site["least_squares"]]),
        "procrustes_difference_late": max(procrustes[-LATE:]),
        "procrustes_difference_early": max(procrustes[:-LATE], default=0.0),
        "unstitched_cross_entropy": mean(unstitched),
        "unstitched_cross_entropy_spread": spread(unstitched),
        "cka_of_task_loss": mean(ends["linear_cka"]),
        "cka_of_task_loss_spread": spread(ends["linear_cka"]),
        "cka_of_least_squares": mean(starts),
        "cka_of_least_squares_spread": spread(starts),
        "labels_against_soft": correlation([soft[key] for key in labelled], list(labelled.values())),
        "labels_less_soft": mean([labelled[key] - soft[key] for key in labelled]) if labelled else None,
    }


def baseline_cka(settings: Settings) -> dict[str, Any]:
    """CKA of S(A) and B with one row per image, not one per position: the map is that of least squares."""
    found: dict[str, Any] = {"numbers": {}, "rows": []}
    for name, opened, sites, pairs in (
        ("tiny10", tiny10, settings.tiny_sites, settings.tiny_pairs),
        ("resnet20", resnet20, settings.resnet_sites, settings.resnet_pairs),
    ):
        by_seed = partial(_by_seed, opened, settings)
        rows = [row for pair in pairs for row in kept_ckas(name, by_seed, pair, sites, settings)]
        found["rows"] += [{"network": name, **row} for row in rows]
        for key in CKAS:
            of = [row[key] for row in rows]
            found["numbers"] |= {f"{name}_{key}": mean(of), f"{name}_{key}_spread": spread(of)}
    return found


def kept_ckas(name: str, opened: Opened, pair: Any, sites: Sequence[str], settings: Settings) -> list[Row]:
    asked = {**asked_of(pair, sites, settings), "cka_images": settings.cka_images}
    part = remember(
        settings.nets,
        f"cka-{name}-{pair[0]}-to-{pair[1]}".replace(" ", ""),
        asked,
        lambda: {"rows": pair_ckas(opened, pair, sites, settings)},
    )
    rows: list[Row] = part["rows"]
    return rows


def pair_ckas(opened: Opened, pair: Any, sites: Sequence[str], settings: Settings) -> list[Row]:
    fitted = fit_batches(settings, count=settings.cka_images)
    tested = held_out(settings)[: -(-settings.cka_images // settings.batch)]
    lower, upper = (opened(one) for one in pair)
    rows = []
    for site in sites:
        joined = sosie.stitch(lower, site, upper, site, fitted).model
        x, y = (each[: settings.cka_images] for each in _images(joined, tested))
        both = sosie.compare({site: x.numpy()}, {site: y.numpy()}, measures=[*CKAS], exact=True)
        rows.append({"pair": list(pair), "site": site, **{key: float(both.matrix(key)[0, 0]) for key in CKAS}})
    return rows


@torch.no_grad()
def _images(stitched: Any, batches: Images) -> tuple[Tensor, Tensor]:
    """S(A) and B, one row per image."""
    x = [stitched.joint(stitched.lower.representation(batch)[0]).flatten(1).cpu() for batch in batches]
    y = [stitched.upper.representation(batch)[0].flatten(1).cpu() for batch in batches]
    return torch.cat(x), torch.cat(y)


def figure_4(settings: Settings) -> dict[str, Any]:
    """The histories of Figure 2's joints at the third layer: from least squares on, ten pairs."""
    stored = json.loads((settings.results / "figure-2.json").read_text("utf-8"))
    rows = stored["architectures"]["tiny10"]["rows"]
    histories = [row["history"] for row in rows if row["kind"] == "task_loss" and row["site"] == FIGURE_4_SITE]
    epochs = range(min(len(history) for history in histories))
    columns = {key: [[history[i][key] for history in histories] for i in epochs] for key in INDICES}
    change = {key: mean(column[-1]) - mean(column[0]) for key, column in columns.items()}
    return {
        "numbers": {
            "cross_entropy_change": change["cross_entropy"],
            "cka_change": change["linear_cka"],
            "runs_with_falling_cka": mean([h[-1]["linear_cka"] < h[0]["linear_cka"] for h in histories]),
            "r2_change": change["r2_about_zero"],
            "cca_largest_change": max(abs(h[i]["mean_cca"] - h[0]["mean_cca"]) for h in histories for i in epochs),
            "cka_spread_at_first_epoch_over_start": spread(columns["linear_cka"][1]) / spread(columns["linear_cka"][0]),
            "svcca_correlation_with_cross_entropy": _along(histories, "svcca"),
            "cka_correlation_with_cross_entropy": _along(histories, "linear_cka"),
        },
        "site": FIGURE_4_SITE,
        "curves": {key: [[mean(column), spread(column)] for column in columns[key]] for key in INDICES},
        "runs": histories,
    }


def _along(histories: list[list[dict[str, float]]], key: str) -> float | None:
    """Correlation with the cross-entropy along each training, the mean: levels differ from pair to pair."""
    runs = [[[record[name] for record in history] for name in (key, "cross_entropy")] for history in histories]
    known = [found for index, entropy in runs if (found := correlation(index, entropy)) is not None]
    return mean(known) if known else None


# Figure 3: wider networks are easier to stitch. Figure 5: CKA pushed down while the network does as well as before.


FIGURE_5_SITE = "layer2.0"
UNCHANGED = 0.99  # relative accuracy that we take "essentially unchanged" to mean


def figure_3(settings: Settings) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    accuracies = {}
    for width in settings.widths:
        asked = {"width": width, "images": [settings.train_images, settings.fit_images]}
        asked |= {key: getattr(settings, key) for key in ("width_networks", "width_sites", "net_epochs", "net_batch")}
        asked |= {"rate": settings.net_rate, "fit": settings.task()}
        make = partial(of_width, width, settings)
        part = remember(settings.nets, f"width-{width}", asked, make, settings.results / "records")
        accuracies[width] = part["accuracies"]
        rows += part["rows"]

    def at(kind: str, width: int, site: str | None = None) -> list[float]:
        chosen = [row for row in rows if row["kind"] == kind and row["width"] == width and site in (None, row["site"])]
        return [row["relative_accuracy"] for row in chosen]

    means = {kind: [mean(at(kind, width)) for width in settings.widths] for kind in ("least_squares", "task_loss")}
    return {
        "numbers": {
            "task_loss_at_width_1": means["task_loss"][0],
            "task_loss_gain_from_width": means["task_loss"][-1] - means["task_loss"][0],
            "task_loss_correlation_with_width": correlation(list(settings.widths), means["task_loss"]),
            "least_squares_gain_from_width": means["least_squares"][-1] - means["least_squares"][0],
        },
        "accuracies": accuracies,
        "curves": {
            kind: {
                site: [[w, mean(at(kind, w, site)), spread(at(kind, w, site))] for w in settings.widths]
                for site in settings.width_sites
            }
            for kind in means
        },
        "rows": rows,
    }


def of_width(width: int, settings: Settings) -> dict[str, Any]:
    """Networks of one width, each below the next."""
    count = settings.width_networks
    networks = wide_resnet20s(width, count, settings)
    rows = []
    for k, a in enumerate(networks):
        b = networks[(k + 1) % count]
        for site in settings.width_sites:
            joined = join(a, site, b, site, ["least_squares", settings.task(seed=k)], settings)
            for kind, row in zip(("least_squares", "task_loss"), joined, strict=True):
                rows.append({"width": width, "pair": k, "site": site, "kind": kind, **row, "history": []})
    return {"rows": rows, "accuracies": [accuracy_of(network, "cifar10", settings) for network in networks]}


def figure_5(settings: Settings) -> dict[str, Any]:
    """A network stitched to itself, from the identity on, for several weights of the penalty."""
    (network,) = wide_resnet20s(settings.penalty_width, 1, settings)
    fits = [settings.task(start="identity", cka=weight, epochs=settings.start_epochs) for weight in settings.penalties]
    rows = join(network, FIGURE_5_SITE, network, FIGURE_5_SITE, fits, settings)
    ends = [(row["history"][-1]["linear_cka"], row["relative_accuracy"]) for row in rows]
    unchanged = [(cka, accuracy) for cka, accuracy in ends if accuracy >= UNCHANGED]
    lowest = min(unchanged) if unchanged else (None, None)
    return {
        "numbers": {
            "lowest_cka": lowest[0],
            "relative_accuracy_there": lowest[1],
            **{f"cka_at_weight_{w:g}": cka for w, (cka, _) in zip(settings.penalties, ends, strict=True)},
            **{f"relative_accuracy_at_weight_{w:g}": acc for w, (_, acc) in zip(settings.penalties, ends, strict=True)},
        },
        "penalties": list(settings.penalties),
        "rows": rows,
    }


# What the maps are like: where training starts (Figure 6), mode connectivity, low rank (Figure 7), sparsity (8).


CLOSE = 0.1  # relative accuracies that differ by no more are "of the same order"
CONNECTED = 0.1  # the most that relative accuracy may fall between two maps that are connected
EARLY = ("bn1", "bn2", "bn3")  # "the first three layers"
SPARSE = 0.85  # "at around 80-90 % sparsity"


def figure_6(settings: Settings) -> dict[str, Any]:
    """Fifty random starts and fifty from least squares, the latter with other orders of the images, side by side."""
    a, b = tiny10(0, settings), tiny10(1, settings)
    found: dict[str, Any] = {"numbers": {}, "sites": {}}
    seeds = range(settings.starts)
    fits = [settings.long_task(start=start, seed=seed) for start in ("random", "least_squares") for seed in seeds]
    for site in settings.start_sites:
        rows = join(a, site, b, site, fits, settings, fit_batches(settings, count=settings.start_images))
        accuracies = [row["relative_accuracy"] for row in rows]
        found["sites"][site] = {"random": accuracies[: len(seeds)], "least_squares": accuracies[len(seeds) :]}
    random, fitted = ([x for site in found["sites"].values() for x in site[key]] for key in ("random", "least_squares"))
    close = [abs(x - mean(site["least_squares"])) <= CLOSE for site in found["sites"].values() for x in site["random"]]
    found["numbers"] = {
        "random_lowest": min(random),
        "random_mean": mean(random),
        "least_squares_lowest": min(fitted),
        "least_squares_mean": mean(fitted),
        "largest_spread_of_least_squares": max(spread(site["least_squares"]) for site in found["sites"].values()),
        "random_of_the_same_order": mean(close),
        "least_squares_lowest_above_random_lowest": min(fitted) - min(random),
    }
    return found


def mode_connectivity(settings: Settings) -> dict[str, Any]:
    """Relative accuracy on the line between two maps that were found from different random starts."""
    a, b = tiny10(0, settings), tiny10(1, settings)
    fits = [settings.long_task(start="random", seed=seed) for seed in range(settings.modes)]
    layers: dict[str, Any] = {}
    for site in settings.tiny_sites:
        stitches = sosie.stitch(a, site, b, site, fit_batches(settings), fit=fits)
        ends = [row_of(each, settings)["relative_accuracy"] for each in stitches]
        good = [k for k, end in enumerate(ends) if end >= settings.good]
        lines = [[ends[i], *between(stitches[i], stitches[j], settings), ends[j]] for i, j in combinations(good, 2)]
        falls = [min(line[0], line[-1]) - min(line) for line in lines]
        layers[site] = {"ends": ends, "kept": len(good), "lines": lines, "fall": mean(falls) if falls else None}
    early = [layers[site]["fall"] for site in settings.tiny_sites if site in EARLY]
    late = [layers[site]["fall"] for site in settings.tiny_sites if site not in EARLY]
    known = [[fall for fall in falls if fall is not None] for falls in (early, late)]
    return {
        "numbers": {
            "smallest_fall_early": min(known[0], default=None),
            "largest_fall_early": max(known[0], default=None),
            "largest_fall_late": max(known[1], default=None),
            "share_of_connected_layers": mean([fall <= CONNECTED for fall in (*known[0], *known[1])]),
            "fewest_maps_kept": min(layer["kept"] for layer in layers.values()),
        },
        "steps": settings.steps,
        "layers": layers,
    }


@torch.no_grad()
def between(one: Any, other: Any, settings: Settings) -> list[float]:
    """Relative accuracies inside the line from one joint to the other; the first is put back afterwards."""
    joint, target = one.model.joint, other.model.joint
    kept = {name: parameter.clone() for name, parameter in joint.named_parameters()}
    found = []
    for step in range(1, settings.steps):
        share = step / settings.steps
        for name, parameter in joint.named_parameters():
            parameter.copy_((1 - share) * kept[name] + share * target.get_parameter(name))
        found.append(one.evaluate(held_out(settings))["relative_accuracy"])
    for name, parameter in joint.named_parameters():
        parameter.copy_(kept[name])
    return found


def figure_7(settings: Settings) -> dict[str, Any]:
    """Low rank by reduced-rank regression, by cutting off singular values of the map, and by a bottleneck."""
    ways = {
        "reduced_rank": "reduced_rank(k={})",
        "truncated": "reduced_rank(k={}, truncate=True)",
        "task_loss": settings.task(rank=0).replace("rank=0", "rank={}"),
    }
    asked = {"fits": ways, "ranks": settings.ranks, "sites": settings.tiny_sites, "images": settings.fit_images}
    rows = []
    for pair in settings.tiny_pairs[: settings.rank_pairs]:
        name, make = f"rank-{pair[0]}-to-{pair[1]}", partial(of_ranks, pair, ways, settings)
        rows += remember(settings.nets, name, asked, make)["rows"]
    table = {
        way: {rank: {s: mean(_accuracies(rows, way, rank, s)) for s in settings.tiny_sites} for rank in settings.ranks}
        for way in ways
    }
    gaps = {
        rank: [table["task_loss"][rank][s] - table["reduced_rank"][rank][s] for s in settings.tiny_sites]
        for rank in settings.ranks
    }
    return {
        "numbers": {
            **{f"gap_at_rank_{rank}": mean(gap) for rank, gap in gaps.items()},
            **{f"smallest_gap_at_rank_{rank}": min(gap) for rank, gap in gaps.items()},
        },
        "table": table,
        "rows": rows,
    }


def of_ranks(seeds: tuple[int, int], ways: dict[str, str], settings: Settings) -> dict[str, Any]:
    a, b = (tiny10(seed, settings) for seed in seeds)
    keys = [(way, rank) for way in ways for rank in settings.ranks]
    rows = []
    for site in settings.tiny_sites:
        joined = join(a, site, b, site, [ways[way].format(rank) for way, rank in keys], settings)
        for (way, rank), row in zip(keys, joined, strict=True):
            rows.append({"pair": list(seeds), "site": site, "way": way, "rank": rank, **row, "history": []})
    return {"rows": rows}


def _accuracies(rows: list[dict[str, Any]], way: str, rank: int, site: str) -> list[float]:
    return [r["relative_accuracy"] for r in rows if (r["way"], r["rank"], r["site"]) == (way, rank, site)]


def figure_8(settings: Settings) -> dict[str, Any]:
    """Lasso and L1 with the task loss; weights below the threshold are set to zero in both."""
    keys = ("sparse_sites", "alphas", "l1s", "threshold", "fit_images")
    asked = {"fit": settings.task()} | {key: getattr(settings, key) for key in keys}
    pairs = [
        remember(settings.nets, f"sparse-{pair[0]}-to-{pair[1]}", asked, partial(of_sparsity, pair, settings))["sites"]
        for pair in settings.tiny_pairs[: settings.sparse_pairs]
    ]
    sites = [site for pair in pairs for site in pair.values()]
    at = {way: [interpolated(site[way], SPARSE) for site in sites] for way in ("direct", "task_loss")}
    reached = [
        (task, direct) for task, direct in zip(at["task_loss"], at["direct"], strict=True) if None not in (task, direct)
    ]
    drops = [s["direct"][0][1] - value for s, value in zip(sites, at["direct"], strict=True) if value is not None]
    return {
        "numbers": {
            "direct_drop_at_85_percent": mean(drops) if drops else None,
            "task_loss_above_direct_at_85_percent": mean([t - d for t, d in reached]) if reached else None,
            "task_loss_at_85_percent": mean([t for t, _ in reached]) if reached else None,
            "layers_compared": len(reached),
        },
        "sites": pairs[0],
        "pairs": pairs,
    }


def of_sparsity(seeds: tuple[int, int], settings: Settings) -> dict[str, Any]:
    a, b = (tiny10(seed, settings) for seed in seeds)
    direct = ["least_squares", *(f"lasso(alpha={alpha})" for alpha in settings.alphas)]
    trained = [settings.task(), *(settings.task(l1=l1, threshold=settings.threshold) for l1 in settings.l1s)]
    sites: dict[str, Any] = {}
    for site in settings.sparse_sites:
        stitches = sosie.stitch(a, site, b, site, fit_batches(settings), fit=[*direct, *trained])
        points = []
        for found in stitches:
            weight = found.model.joint.weight
            zero = weight.abs() < settings.threshold
            with torch.no_grad():
                weight[zero] = 0
            points.append([float(zero.double().mean()), row_of(found, settings)["relative_accuracy"]])
        sites[site] = {"direct": sorted(points[: len(direct)]), "task_loss": sorted(points[len(direct) :])}
    return {"sites": sites}


def interpolated(points: list[list[float]], sparsity: float) -> float | None:
    """Relative accuracy at a sparsity, on the line between its neighbours; None outside of what was reached."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= sparsity <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (sparsity - x0) / (x1 - x0)
    return None


# Stitching across data sets and architectures, and what a network that never learnt anything gives.


DEPTHS = (("layer1.2", "layer1.8"), ("layer2.2", "layer2.8"), ("layer3.2", "layer3.8"))  # last blocks of 20, of 56
TOKENS = (("layer1.2", "blocks.0"), ("layer2.2", "blocks.2"), ("layer3.1", "blocks.4"))
RESNET = "resnet20(shortcut='B', normalise='cifar', seed=2)"
RESNET_100 = "resnet20(classes=100, shortcut='B', normalise='cifar', seed=2)"
VIT = "vit(normalise='cifar', seed={})"


def data_sets(settings: Settings) -> dict[str, Any]:
    """A learnt other images, B CIFAR-10; the joint is found and tested on CIFAR-10."""
    b = resnet20(1, settings)
    lower = {
        "cifar10": resnet20(0, settings),
        "cifar100": trained([RESNET_100], "cifar100", [2], settings)[0],
        "fashion-mnist": trained([RESNET], "fashion-mnist", [2], settings)[0],
        "untrained": untrained(RESNET, settings),
    }
    pairs = tuple((site, site) for site in settings.across_sites)
    curves = {name: curve(a, b, pairs, settings) for name, a in lower.items()}
    own = {name: accuracy_of(lower[name], name, settings) for name in ("cifar10", "cifar100", "fashion-mnist")}
    numbers = {f"from_{name}": mean([row["relative_accuracy"] for row in rows]) for name, rows in curves.items()}
    numbers["cifar100_drop"] = numbers["from_cifar10"] - numbers["from_cifar100"]
    numbers["cifar100_above_untrained"] = numbers["from_cifar100"] - numbers["from_untrained"]
    return {"numbers": numbers, "accuracies": own, "curves": curves}


def architectures(settings: Settings) -> dict[str, Any]:
    """ResNet-20 and ResNet-56 both ways; ResNet-20s and small vision transformers both ways, a pair at a time."""
    pairs = []
    for seed in range(settings.transformers):
        asked = {"sites": settings.across_pairs, "fit": settings.task(), "epochs": settings.vit_epochs}
        asked |= {"images": [settings.train_images, settings.fit_images], "own_epochs": settings.own_epochs}
        name, make = f"architectures-{seed}", partial(of_kinds, seed, settings)
        pairs.append(remember(settings.nets, name, asked, make, settings.results / "records"))
    curves = pairs[0]["curves"]
    numbers = {
        name: mean([row["relative_accuracy"] for pair in pairs for row in pair["curves"].get(name, [])])
        for name in curves
    }
    return {
        "numbers": numbers,
        "vit_accuracy": pairs[0]["vit_accuracy"],
        "vit_accuracies": [pair["vit_accuracy"] for pair in pairs],
        "curves": curves,
        "pairs": [pair["curves"] for pair in pairs],
    }


def of_kinds(seed: int, settings: Settings) -> dict[str, Any]:
    """Published ResNets with the first transformer; one of our own with each of the others."""
    depths, tokens = DEPTHS[-settings.across_pairs :], TOKENS[-settings.across_pairs :]
    back = [pair[::-1] for pair in tokens]
    seeds = range(settings.transformers)
    transformer = trained([VIT.format(k) for k in seeds], "cifar10", seeds, settings)[seed]
    if seed:
        small = own_networks(settings, sgd=settings.ten)(f"sgd {seed}")
        curves = {}
    else:
        small, deep = akamaster(20, settings), akamaster(56, settings)
        curves = {
            "resnet20_to_resnet56": curve(small, deep, depths, settings),
            "resnet56_to_resnet20": curve(deep, small, [pair[::-1] for pair in depths], settings),
        }
    curves["resnet20_to_vit"] = curve(small, transformer, tokens, settings)
    curves["vit_to_resnet20"] = curve(transformer, small, back, settings)
    return {"vit_accuracy": accuracy_of(transformer, "cifar10", settings), "curves": curves}


def control(settings: Settings) -> dict[str, Any]:
    """The control that the paper lacks: random networks, below the joint and above it.

    Random below: can B's upper part and the joint do the job with any features at all? Random above: can the joint
    alone make an untrained upper part do the job? There B's answers mean nothing, so the joint learns the labels and
    its accuracy is compared with A's.
    """
    a, b, random = tiny10(0, settings), tiny10(1, settings), untrained("tiny10(normalise='cifar', seed=3)", settings)
    pairs = tuple((site, site) for site in settings.tiny_sites)
    curves = {
        "trained_to_trained": curve(a, b, pairs, settings),
        "random_to_trained": curve(random, b, pairs, settings),
        "trained_to_random": curve(a, random, pairs, settings, targets="labels"),
    }
    means = {name: mean([row["relative_accuracy"] for row in rows]) for name, rows in curves.items()}
    above = [row["accuracy"] / row["accuracy_a"] for row in curves["trained_to_random"]]
    first = {name: rows[0]["relative_accuracy"] for name, rows in curves.items()}
    return {
        "numbers": {
            "trained_above_random_below": means["trained_to_trained"] - means["random_to_trained"],
            "trained_above_random_below_first_layer": first["trained_to_trained"] - first["random_to_trained"],
            "random_to_trained": means["random_to_trained"],
            "random_to_trained_first_layer": first["random_to_trained"],
            "trained_to_random_over_a": mean(above),
            "trained_to_random_over_a_highest": max(above),
        },
        "curves": curves,
    }


def curve(
    a: NamedModel, b: NamedModel, pairs: Sequence[tuple[str, str]], settings: Settings, **options: object
) -> list[dict[str, Any]]:
    """Task-loss matching at pairs of sites; what least squares gives beside it."""
    rows = []
    for site_a, site_b in pairs:
        direct, task = join(a, site_a, b, site_b, ["least_squares", settings.task(**options)], settings)
        beside = {f"least_squares_{key}": direct.get(key) for key in ("relative_accuracy", "accuracy")}
        rows.append({"site_a": site_a, "site_b": site_b, **task, **beside, "history": []})
    return rows


EXPERIMENTS = {
    "figure-2": figure_2,
    "baseline-cka": baseline_cka,
    "figure-4": figure_4,  # reads what figure-2 wrote
    "figure-3": figure_3,
    "figure-5": figure_5,
    "figure-6": figure_6,
    "mode-connectivity": mode_connectivity,
    "figure-7": figure_7,
    "figure-8": figure_8,
    "data-sets": data_sets,
    "architectures": architectures,
    "control": control,
    "figure-2-ten": figure_2_ten,
    "further-results": further_results,  # its networks by SGD are those of figure-2-ten
}

if __name__ == "__main__":
    # A cut is compared with the whole network when it is made: TF32's rounding would be taken for a difference.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    running.start(PAPER, EXPERIMENTS, Settings, small)

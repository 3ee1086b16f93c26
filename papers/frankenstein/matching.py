"""Figure 2: least squares and task loss, layer by layer; with it what the text says of Procrustes, labels and CKA.

Figure 4: similarity indices along the training of the joints of Figure 2 at the third layer of Tiny-10.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from joining import Row, correlation, join, mean, spread
from networks import Images, accuracy_of, fit_batches, held_out, own_resnet20s, read, resnet20, tiny10
from running import remember
from settings import RECIPES, Settings
from torch import Tensor

import sosie
from sosie.models import NamedModel

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
            settings.results / "records",
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
    """CKA of S(A) and B with an image a row, not a position a row: the map is that of least squares."""
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
        settings.results / "records",
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
    """S(A) and B, an image a row."""
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

"""Figure 2: least squares and task loss, layer by layer; with it what the text says of Procrustes, labels and CKA.

Figure 4: similarity indices along the training of the joints of Figure 2 at the third layer of Tiny-10.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from joining import Row, correlation, join, mean, spread
from networks import Images, fit_batches, held_out, resnet20, tiny10
from settings import Settings
from torch import Tensor

import sosie

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
        networks = {seed: opened(seed, settings) for pair in pairs for seed in pair}
        rows = []
        for k, (a, b) in enumerate(pairs):
            tasks = {"task_loss": settings.task(seed=k)}
            if k < settings.label_pairs:
                tasks["labels"] = settings.task(seed=k, targets="labels")
            kinds = [*CLOSED, *tasks]
            for site in sites:
                joined = join(networks[a], site, networks[b], site, [*CLOSED, *tasks.values()], settings)
                for kind, row in zip(kinds, joined, strict=True):
                    rows.append({"pair": [a, b], "site": site, "kind": kind, **row})
            print(f"  {name} {a} to {b}", flush=True)
        found["architectures"][name] = {"sites": list(sites), "rows": rows, "curves": curves(rows, sites)}
        found["numbers"] |= {f"{name}_{key}": value for key, value in numbers(rows, sites).items()}
    curve = found["architectures"]["resnet20"]["curves"]["least_squares"]["relative_accuracy"]
    between = [site for site in settings.resnet_sites if "layer1.0" <= site <= "layer2.1"]
    found["numbers"]["resnet20_least_squares_layer1.0_to_2.1"] = min(curve[site][0] for site in between)
    return found


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
        "labels_less_soft": mean([labelled[key] - soft[key] for key in labelled]),
    }


def baseline_cka(settings: Settings) -> dict[str, Any]:
    """CKA of S(A) and B with an image a row, not a position a row: the map is that of least squares."""
    found: dict[str, Any] = {"numbers": {}, "rows": []}
    keys = ("linear_cka", "debiased_cka")
    fitted = fit_batches(settings, count=settings.cka_images)
    tested = held_out(settings)[: -(-settings.cka_images // settings.batch)]
    for name, opened, sites, pairs in (
        ("tiny10", tiny10, settings.tiny_sites, settings.tiny_pairs),
        ("resnet20", resnet20, settings.resnet_sites, settings.resnet_pairs),
    ):
        for a, b in pairs:
            lower, upper = opened(a, settings), opened(b, settings)
            for site in sites:
                stitched = sosie.stitch(lower, site, upper, site, fitted).model
                x, y = (rows[: settings.cka_images] for rows in _images(stitched, tested))
                both = sosie.compare({site: x.numpy()}, {site: y.numpy()}, measures=[*keys], exact=True)
                values = {key: float(both.matrix(key)[0, 0]) for key in keys}
                found["rows"].append({"network": name, "pair": [a, b], "site": site, **values})
            print(f"  {name} {a} to {b}", flush=True)
        for key in keys:
            values_of = [row[key] for row in found["rows"] if row["network"] == name]
            found["numbers"] |= {f"{name}_{key}": mean(values_of), f"{name}_{key}_spread": spread(values_of)}
    return found


@torch.no_grad()
def _images(stitched: Any, batches: Images) -> tuple[Tensor, Tensor]:
    """S(A) and B, an image a row."""
    x = [stitched.joint(stitched.lower.representation(batch)).flatten(1).cpu() for batch in batches]
    y = [stitched.upper.representation(batch).flatten(1).cpu() for batch in batches]
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

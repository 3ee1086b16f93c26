"""Figure 3: wider networks are easier to stitch. Figure 5: CKA pushed down while the network does as well as before."""

from __future__ import annotations

from typing import Any

from joining import correlation, join, mean, spread
from networks import accuracy_of, wide_resnet20
from settings import Settings

FIGURE_5_SITE = "layer2.0"
UNCHANGED = 0.99  # relative accuracy that we take "essentially unchanged" to mean


def figure_3(settings: Settings) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    accuracies = {}
    for width in settings.widths:
        networks = [wide_resnet20(width, seed, settings) for seed in (0, 1)]
        accuracies[width] = [accuracy_of(network, "cifar10", settings) for network in networks]
        print(f"  width {width}: accuracies {accuracies[width]}", flush=True)
        for k, (a, b) in enumerate((networks, networks[::-1])):
            for site in settings.width_sites:
                joined = join(a, site, b, site, ["least_squares", settings.task(seed=k)], settings)
                for kind, row in zip(("least_squares", "task_loss"), joined, strict=True):
                    rows.append({"width": width, "pair": k, "site": site, "kind": kind, **row, "history": []})

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


def figure_5(settings: Settings) -> dict[str, Any]:
    """A network stitched to itself, from the identity on, for several weights of the penalty."""
    network = wide_resnet20(settings.penalty_width, 0, settings)
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

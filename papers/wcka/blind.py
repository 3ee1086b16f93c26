"""What wCKA does not move for, and what it moves for: networks changed with and without a change of function."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from measures import candidate
from networks import SCRATCH, study
from parallel import each
from settings import OWN, Settings

from sosie.benchmark.population import CLEAN
from sosie.benchmark.trials import MANIPULATIONS, Bench, manipulate

ROLLED, BIASED, DARK, SAME = "classes rolled", "biased", "dark pixels", ("permuted", "rescaled")


@lru_cache
def bench_of(settings: Settings) -> Bench:
    """Converged networks of 4 × 32, changed in every way that the benchmark knows."""
    at = study(settings, SCRATCH)
    models = [run[-1] for run in at.population.converged[: settings.manipulated]]
    return Bench(models, at.images.test, seed=settings.seed)


def manipulated(settings: Settings, name: str) -> dict[str, Any]:
    at = study(settings, SCRATCH)
    measure = candidate(name, at.scale, at.images, paired_rows=settings.paired_rows)
    far = at.probes.values(measure, CLEAN, measure.rows or len(at.images.test))[1]
    try:
        return manipulate(measure, float(far.values[far.defined].mean()), bench_of(settings))
    except ValueError as error:
        return {"why": str(error)}


def blind(settings: Settings) -> dict[str, Any]:
    tasks = [(name,) for name in settings.measures]
    found = dict(zip(settings.measures, each(settings, manipulated, tasks, "blind"), strict=True))
    own = found[OWN]["manipulations"]
    value = {m.name: own[m.name].get("value") for m in MANIPULATIONS}
    agreement = {m.name: own[m.name]["agreement"] for m in MANIPULATIONS}
    return {
        "numbers": {
            "permuted_and_rescaled_farthest_from_1": max(abs(1 - value[name]) for name in SAME),
            "permuted_and_rescaled_agreement": min(agreement[name] for name in SAME),
            "rolled_wcka": value[ROLLED], "rolled_agreement": agreement[ROLLED],
            "biased_wcka": value[BIASED], "biased_agreement": agreement[BIASED],
            "dark_pixels_wcka": value[DARK], "dark_pixels_agreement": agreement[DARK],
            "dark_pixels_wcka_lit": found["wcka_lit"]["manipulations"][DARK].get("value"),
            "dark_pixels_linear_cka": found["linear_cka"]["manipulations"][DARK].get("value"),
            "rescaled_linear_cka": found["linear_cka"]["manipulations"]["rescaled"].get("value"),
            "untrained_wcka": found[OWN]["far"],
        },
        "measures": found,
    }  # fmt: skip

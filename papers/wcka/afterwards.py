"""Looked at after the run, to understand it: no claim rests on this. Which networks make the correlations of Figure 3,
and how large weights on dark pixels have to be before wCKA moves.

    python papers/wcka/afterwards.py              # results/afterwards.json, from the networks that run.py left
"""

from __future__ import annotations

import statistics
from functools import reduce
from typing import Any

import numpy as np
import torch
from networks import SCRATCH, Study, study
from run import OWN, PAPER, RIVALS, Settings, candidate, factors, running, small
from run import settings as settings_of
from torch import Tensor

import sosie
from sosie.benchmark.population import ALL, CLEAN, CORRUPTED, GROUPS, PAIR_KINDS
from sosie.benchmark.trials import COEFFICIENTS, difference
from sosie.train import accuracy

LEARNT = 0.9  # accuracy on clean test images
FACTORS = (1.0, 2.0, 3.0, 5.0, 10.0)  # norm of the weights on dark pixels, over that of the whole first layer


def afterwards(settings: Settings) -> dict[str, Any]:
    at = study(settings, SCRATCH)
    found, scatter = learnt(settings, at)
    dark = dark_pixels(settings, at)
    first = dark["converged"][0]
    numbers = {"networks_that_learnt": scatter.pop("learnt"), "dark_pixels_energy": first["energy"],
               "dark_pixels_energy_untrained": dark["untrained"][0]["energy"]}  # fmt: skip
    return {"numbers": numbers, "pairs": found, "strategy": scatter, "dark_pixels": dark}


def learnt(settings: Settings, at: Study) -> tuple[dict[str, Any], dict[str, Any]]:
    """Correlations over the pairs of which both networks have learnt the task, and over the others."""
    ground, members = at.ground, at.population.members
    reached = np.array([accuracy(m, at.images.test, at.images.test_labels) >= LEARNT for m in at.population.models])
    table: dict[str, Any] = {}
    scatter: dict[str, Any] = {"learnt": int(reached.sum())}
    for kind in PAIR_KINDS:
        pairs = ground.pairs(kind)
        both = reached[pairs].all(1)
        values = {name: ground.values(candidate(name, at.scale, at.seen, paired_rows=settings.paired_rows), kind).values
                  for name in (OWN, *RIVALS)}  # fmt: skip
        table[kind] = {
            word: {"pairs": int(mask.sum()), **_of_part(values, mask, at, kind)}
            for word, mask in (("all", np.ones_like(both)), ("both learnt", both), ("one did not", ~both))
        }
        if kind == "strategy":
            scatter |= {name: values[name].round(5).tolist() for name in (OWN, "normalized_bures")}
            scatter |= {group: ground.agreed(kind, group).round(5).tolist() for group in (CLEAN, CORRUPTED, ALL)}
            scatter |= {"epoch": [members[a].epoch for a, _ in pairs], "both_learnt": both.tolist()}
            scatter["one_is_standard"] = ["standard" in (members[a].strategy, members[b].strategy) for a, b in pairs]
    return table, scatter


def _of_part(values: dict[str, np.ndarray], mask: np.ndarray, at: Study, kind: str) -> dict[str, Any]:
    """Both coefficients for each measure and group of conditions, and wCKA's lead with its interval over models."""
    found: dict[str, Any] = {}
    own = np.where(mask, values[OWN], np.nan)
    for group in GROUPS:
        agreed = at.ground.agreed(kind, group)
        found[group] = {
            coefficient: {
                "values": {name: _correlation(coefficient, x, agreed, mask) for name, x in values.items()},
                "leads": {name: difference(own, values[name], at.ground, kind, group, ranks=coefficient == "spearman")
                          for name in RIVALS},
            }
            for coefficient in COEFFICIENTS
        }  # fmt: skip
    return found


def _correlation(coefficient: str, x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> float | None:
    kept = mask & np.isfinite(x)
    try:
        return COEFFICIENTS[coefficient](x[kept], y[kept]).value
    except ValueError:  # too few pairs, or all agree alike
        return None


def dark_pixels(settings: Settings, at: Study) -> dict[str, Any]:
    """Random weights on pixels that are 0 in all test images: wCKA, and their share in the product of the weights."""
    test, train = ((part.flatten(1) == 0).all(0) for part in (at.images.test, at.images.train))
    converged = [run[-1] for run in at.population.converged[: settings.manipulated]]
    untrained = at.population.untrained[: settings.manipulated]
    return {
        "dark_in_test": int(test.sum()),
        "of_which_lit_in_training": int((test & ~train).sum()),
        **{name: [_brightened(models, test, factor) for factor in FACTORS]
           for name, models in (("converged", converged), ("untrained", untrained))},
    }  # fmt: skip


def _brightened(models: Any, dark: Tensor, factor: float) -> dict[str, float]:
    values, energies = [], []
    for k, model in enumerate(models):
        first, *others = factors(model)
        noise = torch.randn(first.T.shape, generator=torch.Generator().manual_seed(k)).T * dark[:, None]
        noise *= factor * first.norm() / noise.norm()
        through = reduce(torch.matmul, others)
        values.append(sosie.measure(OWN, factors(model), [first + noise, *others]))
        energies.append(float((noise @ through).square().sum() / (first @ through).square().sum()))
    return {"factor": factor, "wcka": statistics.mean(values), "least": min(values), "most": max(values),
            "energy": statistics.mean(energies)}  # fmt: skip


if __name__ == "__main__":
    running.start(PAPER, {"afterwards": afterwards}, settings_of, small)

"""How often the 95 % interval holds the value it should, and what a bootstrap would do to CKA instead.

Two sides share a latent signal of four dimensions; `noise` sets how alike they are. Rows are Gaussian, or each row
is scaled by a common heavy-tailed factor (Student's t with 5 degrees of freedom). An interval is right when it
holds the mean of the estimate over all repetitions, which for the debiased CKA is the value of the population.
"""

from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from measuring import show, write
from rich.progress import track

import sosie

REPETITIONS = 500
CASES = [  # measure, rows, block Grams?
    ("debiased_cka", 1024, True),
    ("debiased_cka", 512, False),
    ("linear_cka", 512, False),
    ("mean_cca", 512, False),
    ("svcca", 512, False),
    ("procrustes_angle", 512, False),
    ("mutual_knn", 300, False),
    ("jaccard", 300, False),
]
NOISES = {"very alike": 0.3, "alike": 1.0, "a little alike": 2.5}


def rows(random: np.random.Generator, n: int, noise: float, heavy: bool) -> tuple[np.ndarray, np.ndarray]:
    mix = np.random.default_rng(0)
    z = random.normal(size=(n, 4))
    x, y = (z @ mix.normal(size=(4, w)) + noise * random.normal(size=(n, w)) for w in (12, 10))
    scale = np.sqrt(5 / random.chisquare(5, size=(n, 1))) if heavy else 1.0
    return x * scale, y * scale


def coverage(measure: str, n: int, blocks: bool, noise: float, heavy: bool) -> dict:
    random = np.random.default_rng(1)
    found = []
    for _ in range(REPETITIONS):
        x, y = rows(random, n, noise, heavy)
        memory = 3000 if blocks else None  # so little that covariances do not fit
        c = sosie.compare({"x": x}, {"y": y}, measures=measure, interval=True, memory=memory)[measure]
        found.append((c.value[0, 0], c.low[0, 0], c.high[0, 0]))
    value, low, high = np.array(found).T
    truth = value.mean()
    inside = float(((low <= truth) & (truth <= high)).mean())
    return {
        "measure": measure,
        "rows": n,
        "statistic": "blocks of 64" if blocks else "all rows",
        "tails": "heavy" if heavy else "Gaussian",
        "value": float(truth),
        "covered": inside,
        "give or take": 1.96 * math.sqrt(inside * (1 - inside) / len(found)),
    }


def _alone() -> None:
    torch.set_num_threads(1)


def bootstrap(n: int = 200, repetitions: int = 200) -> list[dict]:
    """Rows drawn with replacement hold some rows twice, and a row is as like itself as can be."""
    random, torch_random = np.random.default_rng(2), torch.Generator().manual_seed(0)
    found: dict[str, list[tuple[float, float]]] = {"linear_cka": [], "debiased_cka": []}
    for _ in range(repetitions):
        x, y = (random.normal(size=(n, 50)) for _ in range(2))
        again = torch.randint(0, n, (n,), generator=torch_random).numpy()
        for name, values in found.items():
            values.append((sosie.measure(name, x, y), sosie.measure(name, x[again], y[again])))
    return [
        {
            "measure": name,
            "rows": f"{n} independent rows, 50 columns",
            "value": float(np.mean([v for v, _ in values])),
            "value of bootstrap samples": float(np.mean([b for _, b in values])),
        }
        for name, values in found.items()
    ]


def main() -> None:
    cases = [(*case, noise, heavy) for case in CASES for noise in NOISES.values() for heavy in (False, True)]
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_alone) as pool:
        running = [pool.submit(coverage, *case) for case in cases]
        covered = [each.result() for each in track(running, "coverage of the 95 % interval")]
    show(f"coverage of the 95 % interval, {REPETITIONS} repetitions", covered)
    drawn_twice = bootstrap()
    show("why not a bootstrap", drawn_twice)
    write("coverage", {"what": __doc__, "coverage": covered, "bootstrap": drawn_twice})


if __name__ == "__main__":
    main()

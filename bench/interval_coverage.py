"""How often the 95 % interval holds the value it should, and what a bootstrap would do to CKA instead.

Two sides share a latent signal of four dimensions; `noise` sets how alike they are. The signal is Gaussian, the
positive part of a Gaussian (ReLU), lognormal, or Student's t with 3 degrees of freedom, each of variance 1; or all is
Gaussian and each row is scaled by a common heavy-tailed factor (Student's t with 5 degrees of freedom). An interval
is right when it holds the mean of the estimate with that many rows, over all repetitions. That is not the value of
the population (*limit*, computed from the covariances that the rows were made with): with few rows every measure is
biased, the debiased CKA by heavy tails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from measuring import show, write
from rich.progress import track
from torch import Tensor

import sosie
from sosie.engine.uncertainty import HALVED, around, by_halves, by_jackknife, halves_of_groups, quarters_of_groups
from sosie.measures import find

REPETITIONS = 300
CASES = [  # measures, rows, block Grams?
    (("debiased_cka",), 1024, True),
    (("svcca",), 512, False),
    (("mutual_knn", "jaccard"), 300, False),
]
NOISES = {"very alike": 0.3, "alike": 1.0, "a little alike": 2.5}
LATENTS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "Gaussian": lambda random, shape: random.normal(size=shape),
    "ReLU": lambda random, shape: np.maximum(random.normal(size=shape), 0) / math.sqrt(0.5 - 0.5 / math.pi),
    "scaled rows": lambda random, shape: random.normal(size=shape),
    "lognormal": lambda random, shape: random.lognormal(size=shape) / math.sqrt((math.e - 1) * math.e),
    "t3": lambda random, shape: random.standard_t(3, size=shape) / math.sqrt(3),
}
BY_LATENTS = ("linear_cka", "debiased_cka", "procrustes_angle", "mean_cca")
ROWS = (50, 100, 200, 500)
TOGETHER = 1000  # repetitions for each kind of latents


def rows(
    random: np.random.Generator, n: int, noise: float, latents: str, repetitions: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    mix, many = np.random.default_rng(0), () if repetitions is None else (repetitions,)
    z = LATENTS[latents](random, (*many, n, 4))
    x, y = (z @ mix.normal(size=(4, w)) + noise * random.normal(size=(*many, n, w)) for w in (12, 10))
    scale = np.sqrt(5 / random.chisquare(5, size=(*many, n, 1))) if latents == "scaled rows" else 1.0
    return x * scale, y * scale


def coverage(measures: tuple[str, ...], n: int, blocks: bool, noise: float, latents: str) -> list[dict]:
    random = np.random.default_rng(1)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in measures}
    for _ in range(REPETITIONS):
        x, y = rows(random, n, noise, latents)
        memory = 3000 if blocks else None  # so little that covariances do not fit
        c = sosie.compare({"x": x}, {"y": y}, measures=list(measures), interval=True, memory=memory)
        for name in measures:
            found[name].append((c[name].value[0, 0], c[name].low[0, 0], c[name].high[0, 0]))
    return [
        {
            "measure": name,
            "rows": n,
            "statistic": "blocks of 64" if blocks else "all rows",
            "tails": "heavy" if latents == "scaled rows" else "Gaussian",
            **_covered(*np.array(found[name]).T),
        }
        for name in measures
    ]


def _covered(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, float]:
    truth = value.mean()
    inside = float(((low <= truth) & (truth <= high)).mean())
    sure = 1.96 * math.sqrt(inside * (1 - inside) / len(value))
    return {"value": float(truth), "covered": inside, "give or take": sure}


def by_latents(latents: str, n: int) -> list[dict]:
    """All repetitions together: the values on parts of the rows from formulas for many pairs at once, the intervals by
    sosie. The first repetition is checked against `sosie.compare`.
    """
    table = {name: {"measure": name, "latents": latents, "rows": n} for name in BY_LATENTS}
    for alike, noise in NOISES.items():
        x, y = rows(np.random.default_rng(1), n, noise, latents, TOGETHER)
        c = sosie.compare({"x": x[0]}, {"y": y[0]}, measures=list(BY_LATENTS), interval=True)
        for name in BY_LATENTS:
            value, low, high = _intervals(name, torch.from_numpy(x), torch.from_numpy(y))
            expected = [getattr(c[name], kind)[0, 0] for kind in ("value", "low", "high")]
            np.testing.assert_allclose([value[0], low[0], high[0]], expected, rtol=1e-5, atol=1e-5)
            found = _covered(value, low, high)
            table[name][alike] = found["covered"]
            if alike == "a little alike":
                table[name] |= {"mean": found["value"], "limit": _limit(name, noise)}
    return list(table.values())


def _intervals(name: str, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n, count = x.shape[1], min(20, x.shape[1] // 4)

    def on(kept: np.ndarray) -> np.ndarray:
        """(…, repetitions): the values on the groups that are kept (…, groups)."""
        values = _on_parts(name, x, y, kept.reshape(-1, kept.shape[-1]))
        return values.reshape(*kept.shape[:-1], len(x))

    value = on(np.ones((1, 1), dtype=bool))[0]
    error = by_jackknife(on(~np.eye(count, dtype=bool)))
    if "cka" not in name and n >= 4 * HALVED:
        halved, holds = by_halves(on(halves_of_groups()), on(quarters_of_groups()))
        error = halved.where(holds, error)
    return value, *around(find(name), value, error)


def _on_parts(name: str, x: Tensor, y: Tensor, kept: np.ndarray) -> np.ndarray:
    """(parts, repetitions): x (repetitions, rows, columns), kept (parts, groups)."""
    group = np.arange(x.shape[1]) % kept.shape[1]
    if name == "debiased_cka":
        parts = [torch.from_numpy(np.flatnonzero(groups[group])) for groups in kept]
        return np.stack([_debiased_cka(x[:, part], y[:, part]) for part in parts])
    x, y = (torch.cat([rows, torch.ones_like(rows[..., :1])], 2) for rows in (x, y))  # for the sums of columns
    some = torch.from_numpy(kept).double()

    def covariance(a: Tensor, b: Tensor) -> Tensor:
        groups = [torch.bmm(a[:, group == g].mT, b[:, group == g]) for g in range(kept.shape[1])]
        sums = torch.einsum("pg,grij->prij", some, torch.stack(groups))
        return sums[..., :-1, :-1] - sums[..., :-1, -1:] * sums[..., -1:, :-1] / sums[..., -1:, -1:]

    return _from_covariances(name, covariance(x, x), covariance(y, y), covariance(x, y))


def _debiased_cka(x: Tensor, y: Tensor) -> np.ndarray:
    x, y = (rows - rows.mean(1, keepdim=True) for rows in (x, y))
    xx, yy, xy = (_unbiased(a, b) for a, b in ((x, x), (y, y), (x, y)))
    return (xy / (xx * yy).sqrt()).numpy()


def _unbiased(x: Tensor, y: Tensor) -> Tensor:
    """n (n − 3) HSIC without bias, from the lengths of centred rows and the covariance."""
    n, k, l = x.shape[1], x.square().sum(2), y.square().sum(2)
    on = n / (n - 2) * (k * l).sum(1) - k.sum(1) * l.sum(1) / ((n - 1) * (n - 2))
    return torch.bmm(x.mT, y).square().sum((1, 2)) - on


def _from_covariances(name: str, xx: Tensor, yy: Tensor, xy: Tensor) -> np.ndarray:
    if name == "procrustes_angle":
        traces = [c.diagonal(dim1=-2, dim2=-1).sum(-1) for c in (xx, yy)]
        return torch.arccos(torch.linalg.svdvals(xy).sum(-1) / (traces[0] * traces[1]).sqrt()).numpy()
    if name == "mean_cca":
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(xx), xy, upper=False)
        whole = torch.linalg.solve_triangular(torch.linalg.cholesky(yy), half.mT, upper=False)
        return torch.linalg.svdvals(whole).mean(-1).numpy()
    squares = [c.square().sum((-2, -1)) for c in (xx, yy, xy)]
    return (squares[2] / (squares[0] * squares[1]).sqrt()).numpy()


def _limit(name: str, noise: float) -> float:
    """With all rows there could be; a factor that all columns of a row share changes no covariance but for its size."""
    mix = np.random.default_rng(0)
    a, b = (torch.from_numpy(mix.normal(size=(4, w))) for w in (12, 10))
    xx, yy = (m.T @ m + noise**2 * torch.eye(m.shape[1]) for m in (a, b))
    return float(_from_covariances(name, xx[None], yy[None], (a.T @ b)[None])[0])


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
    kinds = ("Gaussian", "scaled rows")
    cases = [(*case, noise, latents) for case in CASES for noise in NOISES.values() for latents in kinds]
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_alone) as pool:
        together = [pool.submit(by_latents, latents, n) for latents in LATENTS for n in ROWS]
        running = [pool.submit(coverage, *case) for case in cases]
        made = [row for each in track(together, "coverage by latents") for row in each.result()]
        covered = [row for each in track(running, "coverage of the 95 % interval") for row in each.result()]
    made.sort(key=lambda row: BY_LATENTS.index(row["measure"]))
    covered.sort(key=lambda row: row["measure"])
    show(f"coverage of the 95 % interval by latents, {TOGETHER} repetitions", made)
    show(f"coverage of the 95 % interval, {REPETITIONS} repetitions", covered)
    drawn_twice = bootstrap()
    show("why not a bootstrap", drawn_twice)
    write("coverage", {"what": __doc__, "by latents": made, "coverage": covered, "bootstrap": drawn_twice})


if __name__ == "__main__":
    main()

"""Alignments, held-out predictions, noisy responses and dissimilarities, against whoever else has them.

Alignments are fitted on half of the rows and scored on the other half. sosie computes in float64 whatever it is given,
and so do the peers here. Where a peer is no package on PyPI (netrep), its published algorithm is written out in NumPy.
`python bench/align.py --only crossnobis --small` tries some jobs at a small size and writes nothing.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from measures import related
from measuring import show, timed, write
from peers import NUMPY
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from scipy.stats import kendalltau

import sosie
from sosie.measures import crossnobis
from sosie.measures.prediction import STRENGTHS
from sosie.rsa import RDMs, compare_rdms
from sosie.stats import dealt_folds

Array = np.ndarray
Call = Callable[[], Any]
SIZES = ((2000, 256), (512, 1024), (10000, 64))  # rows of the fit, neurons
SMALL = ((100, 16), (24, 40))


class Job(NamedTuple):
    name: str
    size: str
    ours: Call
    peers: dict[str, Call]  # raise ImportError if the package is missing
    same: bool = True  # whether both should have the same value


# Alignments, as one writes them with NumPy: fitted on x and y, the value for x2 and y2


def about(x: Array, y: Array, x2: Array, y2: Array) -> tuple[Array, Array, Array, Array]:
    mean_x, mean_y = x.mean(0), y.mean(0)
    return x - mean_x, y - mean_y, x2 - mean_x, y2 - mean_y


def procrustes(*rows: Array) -> float:
    a, b, a2, b2 = about(*rows)
    u, _, vt = np.linalg.svd(a.T @ b, full_matrices=False)
    return float(np.arccos(((a2 @ (u @ vt)) * b2).sum() / np.linalg.norm(a2) / np.linalg.norm(b2)))


def netrep(*rows: Array) -> float:
    from netrep.metrics import LinearMetric

    x, y, x2, y2 = rows
    return float(LinearMetric(alpha=1.0, score_method="angular").fit(x, y).score(x2, y2))


def correlations(a: Array, b: Array) -> float:
    a, b = a - a.mean(0), b - b.mean(0)
    return float(((a * b).sum(0) / np.sqrt((a**2).sum(0) * (b**2).sum(0))).mean())


def canonical(*rows: Array) -> float:
    a, b, a2, b2 = about(*rows)
    (qa, ra), (qb, rb) = np.linalg.qr(a), np.linalg.qr(b)
    u, _, vt = np.linalg.svd(qa.T @ qb)
    return correlations(*(side @ np.linalg.lstsq(r, to)[0] for side, r, to in ((a2, ra, u), (b2, rb, vt.T))))


def scikit_learn(*rows: Array) -> float:
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import r2_score

    x, y, x2, y2 = rows
    return float(r2_score(y2, LinearRegression().fit(x, y).predict(x2), multioutput="variance_weighted"))


def permutation(*rows: Array) -> float:
    a, b, a2, b2 = about(*rows)
    i, j = linear_sum_assignment(a.T @ b, maximize=True)
    return float(np.sqrt(2 - 2 * (a2[:, i] * b2[:, j]).sum() / np.linalg.norm(a2) / np.linalg.norm(b2)))


def cosines(a: Array, b: Array) -> Array:
    return (a / np.linalg.norm(a, axis=0)).T @ (b / np.linalg.norm(b, axis=0))


def hard_match(*rows: Array) -> float:
    a, b, a2, b2 = about(*rows)
    i, j = linear_sum_assignment(cosines(a, b), maximize=True)
    return correlations(a2[:, i], b2[:, j])


def soft_match(*rows: Array) -> float:
    a, b, a2, b2 = about(*rows)
    return correlations(a2, b2[:, cosines(a, b).argmax(1)])


ALIGNED: dict[str, dict[str, Callable[..., float]]] = {
    "procrustes_angle": {"netrep": netrep, NUMPY: procrustes},
    "mean_cca": {NUMPY: canonical},
    "regression_r2": {"scikit-learn": scikit_learn},
    "permutation_procrustes_distance": {"SciPy": permutation},
    "hard_correlation_match": {"SciPy": hard_match},
    "soft_correlation_match": {NUMPY: soft_match},
}


def alignments(small: bool) -> Iterator[Job]:
    for n, p in SMALL if small else SIZES:
        x, y = related(2 * n, p)
        for dtype in (np.float64, np.float32):
            rows = [half.astype(dtype) for half in (x[::2], y[::2], x[1::2], y[1::2])]
            for name, peers in ALIGNED.items():

                def ours(name: str = name, rows: list[Array] = rows) -> float:
                    return sosie.align(name, *rows[:2]).score(*rows[2:])

                def theirs(peer: Callable[..., float], rows: list[Array] = rows) -> Call:
                    return lambda: peer(*(half.astype(np.float64, copy=False) for half in rows))

                # Of more neurons than rows sosie leaves out directions that the rows do not have.
                same = n > p or name not in ("procrustes_angle", "mean_cca", "regression_r2")
                size = f"{n} × {p}, {np.dtype(dtype).name}"
                yield Job(f"align: {name}", size, ours, {who: theirs(peer) for who, peer in peers.items()}, same)


# Held-out predictions


def predictions(small: bool) -> Iterator[Job]:
    from sklearn.cross_decomposition import PLSRegression
    from sklearn.linear_model import LinearRegression, Ridge, RidgeCV
    from sklearn.metrics import r2_score
    from sklearn.model_selection import PredefinedSplit, cross_val_predict

    for n, p in SMALL if small else SIZES:
        x, y = related(n, p)
        fold, length = dealt_folds(torch.arange(n), 5, 0).numpy(), float(((x - x.mean(0)) ** 2).sum())

        def theirs(model: Any, x: Array = x, y: Array = y, fold: Array = fold) -> float:
            found = cross_val_predict(model, x, y, cv=PredefinedSplit(fold))
            scores = [r2_score(y[fold == k], found[fold == k], multioutput="variance_weighted") for k in range(5)]
            return float(np.mean(scores))

        fits: dict[str, tuple[dict[str, Any], Any]] = {
            "ridge": ({}, RidgeCV(np.array(STRENGTHS) * length)),
            "ridge of one penalty": ({"strength": 1e-3}, Ridge(1e-3 * length)),
            "linear": ({"fit": "linear"}, LinearRegression()),
            "pls": ({"fit": "pls", "components": 10}, PLSRegression(10, scale=False)),
        }
        for name, (options, model) in fits.items():
            yield Job(
                f"predictivity: {name}",
                f"{n} × {p}",
                lambda x=x, y=y, options=options: sosie.measure("predictivity", x, y, **options),  # type: ignore[misc]
                {"scikit-learn": lambda model=model, theirs=theirs: theirs(model)},  # type: ignore[misc]
                name != "ridge",  # RidgeCV chooses the penalty by leaving out one row, not a fold
            )


# Noisy responses: n stimuli, r repetitions, p neurons


def responses(n: int, r: int, p: int) -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    common, noise = random.normal(size=(n, 1, p)), random.normal(size=(2, n, r, p))
    return common + noise[0], common[:, :, ::-1] + random.normal(size=(n, 1, p)) + noise[1]


def gaussian_of_netrep(x: Array, y: Array, steps: int = 100, tolerance: float = 1e-8) -> float:
    """netrep's GaussianStochasticMetric, from one start, all stimuli in one call: rotations of roots, then of all."""
    means, roots = [], []
    for side in (x, y):
        mean = side.mean(1)
        noise = side - mean[:, None]
        values, vectors = np.linalg.eigh(noise.transpose(0, 2, 1) @ noise / (side.shape[1] - 1))
        means.append(mean - mean.mean(0))
        roots.append(vectors * np.sqrt(np.maximum(values, 0))[:, None] @ vectors.transpose(0, 2, 1))

    def closest(matrix: Array) -> Array:
        u, _, vt = np.linalg.svd(matrix)
        return u @ vt

    (a, b), (s, t) = means, roots
    rotation, before = closest(b.T @ a), np.inf
    for _ in range(steps):
        turned = t @ rotation
        inner = closest(turned @ s)  # t R s = u d vᵀ: the root of y that is nearest to that of x
        matched = inner.transpose(0, 2, 1) @ turned
        total = float((((b @ rotation - a) ** 2).sum() + ((matched - s) ** 2).sum()) / len(a))
        if before - total < tolerance:
            break
        before = total
        slope = np.tensordot(t, inner @ s, ((0, 1), (0, 1)))
        rotation = closest(b.T @ a + slope)
    return total**0.5


def energy_of_scipy(x: Array, y: Array, steps: int = 1000, tolerance: float = 1e-12) -> float:
    """netrep's EnergyStochasticMetric: rotations of pairs of responses, weighted by 1 / distance, from two starts."""
    x, y = (side - side.mean((0, 1)) for side in (x, y))

    def apart(a: Array, b: Array) -> Array:
        return np.array([cdist(one, other) for one, other in zip(a, b, strict=True)])

    def followed(slope: Array) -> float:
        before = np.inf
        for _ in range(steps):
            u, _, vt = np.linalg.svd(slope)
            distances = apart(x @ (u @ vt), y)
            if before - distances.mean() < tolerance * before:
                break
            before = distances.mean()
            slope = np.tensordot(x, (1 / distances) @ y, ((0, 1), (0, 1)))
        return before

    between = min(followed(x.mean(1).T @ y.mean(1)), followed(np.eye(x.shape[2])))
    return float(np.sqrt(between - apart(x, x).mean() / 2 - apart(y, y).mean() / 2))


def noisy(small: bool) -> Iterator[Job]:
    for n, r, p in ((20, 5, 8),) if small else ((100, 10, 64), (60, 40, 32)):
        x, y = responses(n, r, p)
        size = f"{n} × {r} × {p}"
        yield Job(
            "gaussian_shape_distance",
            size,
            lambda x=x, y=y: sosie.measure("gaussian_shape_distance", x, y, starts=0),  # type: ignore[misc]
            {"netrep, written out": lambda x=x, y=y: gaussian_of_netrep(x, y)},  # type: ignore[misc]
            False,  # of several local optima each may find another
        )
        yield Job(
            "energy_shape_distance",
            size,
            lambda x=x, y=y: sosie.measure("energy_shape_distance", x, y, starts=0),  # type: ignore[misc]
            {"netrep, written out with SciPy": lambda x=x, y=y: energy_of_scipy(x, y)},  # type: ignore[misc]
        )
        n, r, p = (20, 5, 8) if small else (n, min(r, 10), p)
        x = x[:, :r]
        yield Job("crossnobis", f"{n} × {r} × {p}", *_crossnobis(x))


def _crossnobis(x: Array) -> tuple[Call, dict[str, Call]]:
    n, r, p = x.shape
    above = np.triu_indices(n, 1)

    def theirs() -> Array:
        from rsatoolbox.data import Dataset
        from rsatoolbox.rdm import calc_rdm

        marks = {"stimulus": np.repeat(np.arange(n), r), "run": np.tile(np.arange(r), n)}
        data = Dataset(x.reshape(-1, p), obs_descriptors=marks)
        return calc_rdm(data, method="crossnobis", descriptor="stimulus", cv_descriptor="run").dissimilarities[0]

    return lambda: crossnobis(x, noise=np.eye(p))[above], {"rsatoolbox": theirs}


# Dissimilarities


def dissimilarities(small: bool) -> Iterator[Job]:
    n, p = (60, 10) if small else (1000, 256)
    x = related(n, p)[0]

    def rdm(method: str, over: float) -> Array:
        from rsatoolbox.data import Dataset
        from rsatoolbox.rdm import calc_rdm

        return over * calc_rdm(Dataset(x), method=method).dissimilarities[0]

    for name, method, over in (("squared_euclidean", "euclidean", p), ("correlation", "correlation", 1)):
        yield Job(
            f"RDM: {name}",
            f"{n} × {p}",
            lambda name=name: RDMs.of({"x": x}, name).values[0],  # type: ignore[misc]
            {"rsatoolbox": lambda method=method, over=over: rdm(method, over)},  # type: ignore[misc]
        )
    few = 20 if small else 100
    one, other = (RDMs.of({"x": rows[:few]}) for rows in related(n, p))
    yield Job(
        "compare_rdms: kendall_b",
        f"{few} stimuli",
        lambda: compare_rdms(one, other, "kendall_b")[0, 0],
        {"SciPy": lambda: kendalltau(one.values[0], other.values[0]).statistic},
    )


# A measure that grows batch by batch


class Sums:
    """The states of a metric of torchmetrics: float32 products and float64 sums of them, as sosie has for CKA."""

    def __init__(self) -> None:
        self.n, self.sums = 0, [torch.zeros((), dtype=torch.float64)] * 5

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.n += len(x)
        new = (x.sum(0), y.sum(0), x.T @ x, y.T @ y, x.T @ y)
        self.sums = [old + each.double() for old, each in zip(self.sums, new, strict=True)]

    def compute(self) -> float:
        x, y, *products = self.sums
        pairs = ((x, x), (y, y), (x, y))
        xx, yy, xy = (m - torch.outer(a, b) / self.n for m, (a, b) in zip(products, pairs, strict=True))
        return float(xy.square().sum() / (xx.norm() * yy.norm()))


def running(small: bool) -> Iterator[Job]:
    n, p = (256, 16) if small else (5120, 256)
    batches = [[torch.from_numpy(rows).float().split(128) for rows in related(n, p)]]
    pairs = list(zip(*batches[0], strict=True))

    def grown(metric: Any) -> float:
        for x, y in pairs:
            metric.update(x, y)
        return float(metric.compute())

    size = f"{len(pairs)} batches of 128 × {p}, float32"
    yield Job(
        "Running: linear_cka",
        size,
        lambda: grown(sosie.Running("linear_cka")),
        {"PyTorch, written out": lambda: grown(Sums())},
    )


def rows_of(job: Job, repeats: int) -> Iterator[dict[str, Any]]:
    ways, values = {"sosie": job.ours, **job.peers}, {}
    for who, call in list(ways.items()):
        try:
            values[who] = np.asarray(call(), float)
        except ImportError as missing:
            del ways[who]
            print(f"{job.name}: without {who}: {missing}")
    seconds = timed(ways, repeats=repeats, warm=False)
    for who in ways.keys() - {"sosie"}:
        difference = float(np.abs(values[who] - values["sosie"]).max())
        yield {
            "job": job.name,
            "size": job.size,
            "sosie, s": seconds["sosie"],
            "peer": who,
            "over the peer": seconds["sosie"] / seconds[who],
            "difference": difference if job.same else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="nothing is written")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="jobs with one of these in the name; nothing is written"
    )
    asked, _ = parser.parse_known_args()
    warnings.simplefilter("ignore")
    table: list[dict[str, Any]] = []
    for jobs in (alignments, predictions, noisy, dissimilarities, running):
        for job in jobs(asked.small):
            if any(each in job.name for each in asked.only):
                for row in rows_of(job, asked.repeats):
                    table.append(row)
                    print("{job}, {size}: {sosie, s:.3g} s, {over the peer:.2f} of {peer}".format_map(row), flush=True)
    show("Alignments, predictions, noisy responses, dissimilarities", table)
    if not asked.small and asked.only == [""]:
        write("align", {"what": (__doc__ or "").rpartition("\n`python")[0], "rows": table})


if __name__ == "__main__":
    main()

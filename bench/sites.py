"""20 x 20 sites that share statistics, n = 2000 rows, p = q = 512, float32: sosie once, peers once per pair.

`--grid --sites 32 --rows 1024 --width 768 --device cuda` times what follows the pass alone, by family and measure: all
pairs of sites in one evaluation beside each pair in one of its own. It writes nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measuring import show, wait, write
from peers import NUMPY, peers_of, quietly

import sosie
from sosie.engine.evaluate import by_pair
from sosie.measures import Measure, as_array, find
from sosie.stats import Sample

SITES, ROWS, WIDTH, PAIRS = 20, 2000, 512, 8
FAMILIES: dict[str, list[str]] = {
    "CKA": ["linear_cka", "debiased_cka"],
    "CCA": ["cca_r2", "mean_cca", "svcca"],
    "Procrustes": ["procrustes_distance", "normalized_bures"],
}
GRID: dict[str, list[str]] = {
    "Procrustes": ["procrustes_distance", "normalized_bures", "shape_angle"],
    "CCA": ["mean_cca", "svcca", "pwcca", "cca_r2"],
    "regression": ["regression_r2"],
    "RSA": ["rsa", "rsa(dissimilarity='euclidean', compare='pearson')"],
    "kernels": ["rbf_cka", "distance_correlation"],
    "neighbours": ["mutual_knn", "jaccard", "cknna", "rank_similarity"],
}
Peers = dict[str, tuple[float, dict[tuple[int, int], float]]]  # seconds a pair, and values by pair
SLOW = 5.0  # seconds a pair above which a peer is timed on one pair


def side(sites: int, rows: int, width: int, common: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def site() -> np.ndarray:
        mixed = common @ random.normal(size=(common.shape[1], width)) / common.shape[1] ** 0.5
        return (mixed + random.normal(size=(rows, width)) + random.normal(size=width)).astype(np.float32)

    return {f"layer{k}": site() for k in range(sites)}


def every_pair_by_pytorch_cka(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> np.ndarray:
    """The one peer that takes all sites in one call."""
    from cka import cka_from_features

    return cka_from_features(*([torch.from_numpy(x) for x in side.values()] for side in (a, b))).numpy()


def each_pair(measure: str, a: dict[str, np.ndarray], b: dict[str, np.ndarray], pairs: int) -> Peers:
    """For each peer the seconds a pair and the values; pairs spread over the whole table."""
    xs, ys = list(a.values()), list(b.values())
    chosen = [(k * len(xs) // pairs, (7 * k + 3) % len(ys)) for k in range(pairs)]
    found = {}
    for peer, function in peers_of(measure):
        try:
            seconds, values = _timed_on(function, xs, ys, chosen)
        except ImportError:
            continue
        found[peer] = (seconds, values)
    return found


def _timed_on(
    function: Callable[..., float], xs: list[np.ndarray], ys: list[np.ndarray], chosen: list[tuple[int, int]]
) -> tuple[float, dict[tuple[int, int], float]]:
    spent, values = [], {}
    for i, j in [chosen[0], *chosen]:  # the first warms up
        start = time.perf_counter()
        # In float64 as in the other table: in float32 most peers lose digits.
        values[i, j] = quietly(function, xs[i].astype(np.float64), ys[j].astype(np.float64))
        spent.append(time.perf_counter() - start)
        if spent[0] > SLOW:
            return spent[0], values
    return statistics.mean(spent[1:]), values


def ours(a: dict[str, np.ndarray], b: dict[str, np.ndarray], measures: list[str], repeats: int, **options: Any) -> Any:
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = sosie.compare(a, b, measures=measures, **options)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent), found


def beside(chosen: list[str], peers: dict[str, Peers], result: Any, seconds: float) -> dict[str, Any]:
    """What the same values take by the fastest package and by NumPy, called once per pair and measure."""
    count = result.matrix(chosen[0]).size
    packages = {}
    for m in chosen:
        having = [peer for peer in peers[m] if peer != NUMPY]
        packages[m] = min(having, key=lambda peer, m=m: peers[m][peer][0], default=NUMPY)
    by_packages = count * sum(peers[m][packages[m]][0] for m in chosen)
    by_numpy = count * sum(peers[m][NUMPY][0] for m in chosen)
    gaps = [abs(value - float(result.matrix(m)[at])) for m in chosen for at, value in peers[m][NUMPY][1].items()]
    return {
        "package": ", ".join(dict.fromkeys(packages.values())),
        "package, s": by_packages,
        "times faster": by_packages / seconds,
        "NumPy, s": by_numpy,
        "times faster than NumPy": by_numpy / seconds,
        "largest difference": max(gaps),
    }


def grid(asked: argparse.Namespace) -> None:
    """Seconds of all pairs, of each pair alone times their number, and errors of both against float64."""
    common = np.random.default_rng(0).normal(size=(asked.rows, asked.width // 2))
    here = [
        [torch.from_numpy(x) for x in side(asked.sites, asked.rows, asked.width, common, s).values()] for s in (1, 2)
    ]
    xs, ys = ([x.to(asked.device) for x in each] for each in here)
    chosen = [(k * len(xs) // asked.pairs, (7 * k + 3) % len(ys)) for k in range(asked.pairs)]
    table = []
    for family, names in GRID.items():
        for name in names:
            measure = find(name)
            evaluated(measure, xs[:2], ys[:2])  # warms up
            alone_on_cpu = functools.partial(sosie.measure, name)
            # The formulas invert covariances, which are singular with more columns than rows.
            written = dict(peers_of(name)).get(NUMPY, alone_on_cpu) if asked.width < asked.rows else alone_on_cpu
            truth = [quietly(written, here[0][i].double().numpy(), here[1][j].double().numpy()) for i, j in chosen]
            seconds, values = evaluated(measure, xs, ys)
            alone = [evaluated(measure, [xs[i]], [ys[j]]) for i, j in chosen]
            each = len(xs) * len(ys) * statistics.mean(spent for spent, _ in alone)
            table.append({"family": family, "measure": name, "grid, s": seconds, "pair by pair, s": each})
            table[-1] |= {
                "times faster": each / seconds,
                "error": max(abs(values[at] - true) for at, true in zip(chosen, truth, strict=True)),
                "error, alone": max(abs(v.item() - true) for (_, v), true in zip(alone, truth, strict=True)),
            }
    size = f"{asked.sites} x {asked.sites} sites, {asked.rows} rows of {asked.width} columns"
    show(
        f"{size}, on {asked.device}; {asked.pairs} pairs alone, scaled up; errors against one pair on a CPU in float64",
        table,
    )


def evaluated(measure: Measure, xs: list[torch.Tensor], ys: list[torch.Tensor]) -> tuple[float, np.ndarray]:
    """Seconds and values of all pairs of these sites."""
    wait()
    start = time.perf_counter()
    sample = Sample.of(xs, ys)
    everywhere = [np.ones(len(each), dtype=bool) for each in (xs, ys)]
    values = as_array(by_pair([measure], sample, sample.widths, *everywhere)[measure.name].matrix((len(xs), len(ys))))
    return time.perf_counter() - start, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("sites", SITES), ("rows", ROWS), ("width", WIDTH), ("pairs", PAIRS), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--grid", action="store_true", help="time the evaluation after the pass alone; writes nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of --grid")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.grid:
        grid(asked)
        return
    common = np.random.default_rng(0).normal(size=(asked.rows, asked.width // 2))
    a, b = (side(asked.sites, asked.rows, asked.width, common, seed) for seed in (1, 2))
    few = [{name: x[:64] for name, x in itertools.islice(each.items(), 2)} for each in (a, b)]
    sosie.compare(*few, measures=list(itertools.chain(*FAMILIES.values())))  # imports, and threads started
    table, details = [], []
    for family, measures in FAMILIES.items():
        peers = {measure: each_pair(measure, a, b, asked.pairs) for measure in measures}
        # Blocks of rows are an estimate of CKA; exact=True gives what the peers give.
        ways = {"exact": {"exact": True}, **({"blocks of 64": {}} if family == "CKA" else {})}
        for way, options in ways.items():
            for chosen in [*([m] for m in measures), measures]:
                seconds, result = ours(a, b, chosen, asked.repeats, **options)
                table.append({"measures": f"{family}: " + ", ".join(chosen), "sosie": way, "sosie, s": seconds})
                table[-1] |= beside(chosen, peers, result, seconds)
        details += [{"measure": m, "peer": p, "seconds a pair": s[0]} for m in measures for p, s in peers[m].items()]
    show(f"{asked.sites} x {asked.sites} sites, {asked.rows} rows of {asked.width} columns; peers scaled up", table)
    whole = _whole_table(a, b)
    print(f"pytorch-cka, all pairs in one call (debiased CKA, float32): {whole} s")
    if (asked.sites, asked.rows, asked.width) == (SITES, ROWS, WIDTH):
        note = f"peers timed on {asked.pairs} pairs and scaled up to {SITES**2}; written out: {NUMPY}"
        write("sites", {"what": __doc__, "note": note, "rows": table, "peers": details, "pytorch-cka, one call": whole})


def _whole_table(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float | None:
    start = time.perf_counter()
    try:
        every_pair_by_pytorch_cka(a, b)
    except ImportError:
        return None
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

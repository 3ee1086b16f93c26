"""RSA: models evaluated with a bootstrap over stimuli and subjects, against rsatoolbox; and how often intervals hold.

Three models of 12 subjects, 40 stimuli, 50 draws of each kind of bootstrap. `--coverage 200` repeats experiments with
new stimuli and new subjects, of which the 95 % intervals should hold the mean. That takes minutes and writes another
file.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from measuring import show, timed, write

import sosie
from sosie.rsa import RDMs, compare_rdms, evaluate

STIMULI, SUBJECTS, DRAWS = 40, 12, 50
METHODS = {
    "cosine": "cosine",
    "pearson": "corr",
    "spearman": "spearman",
    "rho_a": "rho-a",
    "whitened_cosine": "cosine_cov",
}
Array = np.ndarray


def made(x: Array, names: str) -> RDMs:
    return RDMs.of({f"{names}{k}": rows for k, rows in enumerate(x)}, "squared_euclidean")


def experiment(random: np.random.Generator, stimuli: int = STIMULI, subjects: int = SUBJECTS) -> tuple[RDMs, RDMs]:
    """Models of parts of what there is, and subjects who each mix it in a way of their own, with noise."""
    x = random.normal(size=(stimuli, 12))
    mixed = x @ (np.eye(12) + 0.5 * random.normal(size=(subjects, 12, 12)))
    models = made(np.stack([x[:, :6], x[:, 3:9], x[:, 6:]]), "m")
    return models, made(mixed + 1.5 * random.normal(size=mixed.shape), "s")


def with_rsatoolbox(models: RDMs, subjects: RDMs, method: str) -> Callable[[], Any]:
    from rsatoolbox import inference, model, rdm

    def given(values: Array) -> Any:
        return rdm.RDMs(np.array(values))

    chosen = [model.ModelFixed(n, given(v[None])) for n, v in zip(models.names, models.values, strict=True)]
    return lambda: inference.eval_dual_bootstrap(
        chosen, given(subjects.values), method=method, N=DRAWS, k_pattern=1, k_rdm=1
    )


def inference_rows() -> list[dict[str, Any]]:
    models, subjects = experiment(np.random.default_rng(0))
    rows = []
    for compare, method in METHODS.items():
        ways: dict[str, Callable[[], Any]] = {"sosie": partial(evaluate, models, subjects, compare, draws=DRAWS)}
        try:
            ways["rsatoolbox"] = with_rsatoolbox(models, subjects, method)
        except ImportError:
            print("rsatoolbox is not installed: pip install 'sosie[bench]'")
        seconds = timed(ways, repeats=1, warm=False)
        row: dict[str, Any] = {"compare": compare, **{name: round(value, 3) for name, value in seconds.items()}}
        row["times as fast"] = round(seconds.get("rsatoolbox", np.nan) / seconds["sosie"], 1)
        rows.append(row)
    return rows


def pair_rows() -> list[dict[str, Any]]:
    """One pair of 2,000 rows of 512 columns, against the plain formula."""
    x, y = np.random.default_rng(0).normal(size=(2, 2000, 512))

    def formula() -> float:
        triangles = []
        for rows in (x, y):
            products = rows @ rows.T
            lengths = products.diagonal()
            squares = lengths[:, None] + lengths - 2 * products
            triangles.append(squares[np.triu_indices(len(rows), 1)])
        a, b = triangles
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    def measured() -> float:
        return sosie.measure("rsa", x, y, dissimilarity="squared_euclidean", compare="cosine")

    assert abs(formula() - measured()) < 1e-12
    seconds = timed({"sosie": measured, "NumPy": formula})
    return [{"squared Euclidean, cosine": "2,000 × 512", **{name: round(value, 4) for name, value in seconds.items()}}]


def coverage(experiments: int) -> list[dict[str, Any]]:
    rows = []
    for compare in ("cosine", "pearson", "whitened_cosine", "spearman"):
        for stimuli, subjects in ((16, 8), (40, 12)):
            random = np.random.default_rng(1)
            means = [compare_rdms(*experiment(random, stimuli, subjects), compare).mean(1)[:2] for _ in range(3000)]
            true, held, apart, errors = np.mean(means, 0), 0, 0, []
            for seed in range(experiments):
                models, people = experiment(random, stimuli, subjects)
                found = evaluate(models[["m0", "m1"]], people, compare, draws=100, seed=seed)
                held += int(((found.low <= true) & (true <= found.high)).sum())
                apart += bool(found.p_pairs[0, 1] < 0.05)
                errors.append(found.errors)
            rows.append(
                {
                    "compare": compare,
                    "stimuli": stimuli,
                    "subjects": subjects,
                    "held": held / (2 * experiments),
                    "false differences": apart / experiments,
                    "error said": round(float(np.mean(errors)), 4),
                    "true spread": round(float(np.std(means, axis=0).mean()), 4),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main(experiments: int = 0) -> None:
    warnings.simplefilter("ignore")
    if experiments:
        found = {"experiments": experiments, "coverage": coverage(experiments)}
        show(f"95 % intervals over new stimuli and new subjects, {experiments} experiments", found["coverage"])
        write("rsa-coverage", found)
        return
    found = {"pair": pair_rows(), "inference": inference_rows()}
    show("one pair", found["pair"])
    show(f"{STIMULI} stimuli, {SUBJECTS} subjects, {DRAWS} draws of each kind", found["inference"])
    write("rsa", found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coverage", type=int, default=0, metavar="EXPERIMENTS")
    main(parser.parse_args().coverage)

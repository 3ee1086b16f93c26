"""Alignments fitted on half of the rows and scored on the other half, against whoever else has them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
from measures import WIDTH, related
from measuring import show, timed, write
from peers import NUMPY

import sosie

ROWS = 4000
Array = np.ndarray
Ways = dict[str, Callable[[Array, Array, Array, Array], float]]


def netrep(x: Array, y: Array, x2: Array, y2: Array) -> float:
    from netrep.metrics import LinearMetric

    return float(LinearMetric(alpha=1.0, score_method="angular").fit(x, y).score(x2, y2))


def procrustes(x: Array, y: Array, x2: Array, y2: Array) -> float:
    a, b, a2, b2 = x - x.mean(0), y - y.mean(0), x2 - x.mean(0), y2 - y.mean(0)
    u, _, vt = np.linalg.svd(a.T @ b, full_matrices=False)
    return float(np.arccos(((a2 @ (u @ vt)) * b2).sum() / np.linalg.norm(a2) / np.linalg.norm(b2)))


def scikit_learn(x: Array, y: Array, x2: Array, y2: Array) -> float:
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import r2_score

    return float(r2_score(y2, LinearRegression().fit(x, y).predict(x2), multioutput="variance_weighted"))


PEERS: dict[str, Ways] = {
    "procrustes_angle": {"netrep": netrep, NUMPY: procrustes},
    "regression_r2": {"scikit-learn": scikit_learn},
}


def main() -> None:
    x, y = related(ROWS, WIDTH)
    rows = x[::2], y[::2], x[1::2], y[1::2]
    table = []
    for name, peers in PEERS.items():
        found: Ways = {"sosie": lambda a, b, c, d, name=name: sosie.align(name, a, b).score(c, d)}  # type: ignore[misc]
        found |= {peer: way for peer, way in peers.items() if peer != "netrep" or importlib.util.find_spec("netrep")}
        values = {way: call(*rows) for way, call in found.items()}
        seconds = timed({way: lambda call=call: call(*rows) for way, call in found.items()})  # type: ignore[misc]
        for way in peers.keys() & found.keys():
            table.append(
                {
                    "measure": name,
                    "sosie, s": seconds["sosie"],
                    "peer": way,
                    "over the peer": seconds["sosie"] / seconds[way],
                    "difference": abs(values[way] - values["sosie"]),
                }
            )
    show(f"Fitted on {ROWS // 2} rows of {WIDTH} columns, scored on as many others, float64, CPU", table)
    write("align", {"what": __doc__, "rows": table})


if __name__ == "__main__":
    main()

"""Normalised Bures similarity of two kernels of 512 rows (of 512 or 1,024 columns), such as sketches have.

By two calls of scipy's sqrtm, as Tang et al. print it, Tr (K^½ L K^½)^½ / √(Tr K Tr L); and by the factored form of
their Eq. 13, ‖XᵀY‖₊ / (‖X‖ ‖Y‖), with NumPy's SVD and as sosie has it. Half of the signal is common to both. Errors
are against the factored form in float64, in which wide rows are brought to triangles by QR; that of rows in float32
holds their rounding.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from measuring import show, timed, write
from scipy.linalg import sqrtm
from torch import Tensor

from sosie.measures import find
from sosie.sketching.kernels import Kernel, SketchPair

ROWS, WIDTHS = 512, (512, 1024)  # kernels of features × gradients have 1,024 columns


def made(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose variances fall over a range of 30,000."""
    random = np.random.default_rng(0)
    common, fall = random.normal(size=(ROWS, width)), 0.99 ** (np.arange(width) * ROWS / width)
    x, y = ((common + random.normal(size=(ROWS, width))) * fall for _ in range(2))
    return x, y


def by_sqrtm(x: np.ndarray, y: np.ndarray) -> float:
    k, l = x @ x.T, y @ y.T
    root = np.real(sqrtm(k))
    return float(np.real(np.trace(sqrtm(root @ l @ root))) / np.sqrt(np.trace(k) * np.trace(l)))


def by_svd(x: np.ndarray, y: np.ndarray) -> float:
    a, b = ((np.linalg.qr(rows.T, mode="r").T if rows.shape[1] > ROWS else rows) for rows in (x, y))
    return float(np.linalg.svd(a.T @ b, compute_uv=False).sum() / np.sqrt((x**2).sum() * (y**2).sum()))


def by_sosie(rows: list[Tensor]) -> float:
    kernels = [Kernel("features", ROWS, lambda centred, side=side: side, dtype=side.dtype) for side in rows]
    pair = SketchPair(kernels[:1], kernels[1:], ROWS, exact=False)
    return float(find("normalized_bures")(pair.covariances(0, 0)))


def measured(width: int, repeats: int) -> list[dict[str, Any]]:
    x, y = made(width)
    doubles = [torch.from_numpy(side) for side in (x, y)]
    floats = [side.float() for side in doubles]
    found: dict[str, float] = {}
    ways = {
        "kernels, scipy.linalg.sqrtm twice": lambda: by_sqrtm(x, y),
        "factored, NumPy's SVD": lambda: by_svd(x, y),
        "factored, sosie, rows in float64": lambda: by_sosie(doubles),
        "factored, sosie, rows in float32": lambda: by_sosie(floats),
    }
    timing = {way: (lambda way=way, run=run: found.update({way: run()})) for way, run in ways.items()}
    seconds = timed(timing, repeats=repeats, rest=0.2)
    truth, peer = by_svd(x, y), next(iter(ways))
    return [
        {
            "way": way,
            "columns": width,
            "seconds": seconds[way],
            "times faster": seconds[peer] / seconds[way],
            "value": found[way],
            "error": abs(found[way] - truth),
        }
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    rows = [row for width in WIDTHS for row in measured(width, parser.parse_args().repeats)]
    show(f"normalised Bures similarity of {ROWS} rows", rows)
    write("bures", {"what": __doc__, "rows": rows})


if __name__ == "__main__":
    main()

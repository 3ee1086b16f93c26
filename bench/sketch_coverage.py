"""How often the 95 % interval of a sketched CKA holds what it should: from each bucket left out in turn.

Two networks pass on 32 and 24 of the columns they are given, which share a signal of four dimensions; 1,500 rows, 150
sketches, so that each share is known to about 3 %. With the same inputs throughout only buckets and signs differ, and
an interval is wider than it need be: it counts other inputs, too. With new inputs each time both do. *mean* is what
sketches give on average, which the interval is about; *all rows* is what they estimate, and the bias lies between the
two.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from measuring import show, write
from rich.progress import track
from torch import Tensor, nn

import sosie

ROWS, SKETCHES, EXACT = 1_500, 150, 10
WIDTHS = (32, 24)
CASES = [  # kernel, noise, heavy tails?, buckets, stack, new inputs?
    ("features", 0.3, False, 64, 1, False),
    ("features", 0.3, False, 256, 1, False),
    ("features", 0.3, False, 256, 4, False),
    ("features", 2.5, False, 256, 1, False),
    ("features", 0.3, False, 256, 1, True),
    ("features", 2.5, False, 256, 1, True),
    ("features", 1.0, True, 256, 1, True),
    ("gradients", 0.3, False, 256, 1, True),
    ("hadamard", 0.3, False, 64, 1, False),
    ("hadamard", 0.3, False, 256, 1, False),
    ("hadamard", 2.5, False, 256, 1, False),
]
MEASURES = ("linear_cka", "debiased_cka")


class Columns(nn.Module):
    """Passes some columns on, as its site `rows`, to a head that answers from what they tell about the signal."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.rows, self.head = nn.Identity(), nn.Linear(WIDTHS[which], 10)
        self.first = sum(WIDTHS[:which])
        answers = np.random.default_rng(1).normal(size=(4, 10))
        self.head.weight.data = torch.from_numpy((np.linalg.pinv(mixing()[which]) @ answers).T)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x[:, self.first : self.first + self.head.in_features]))


def mixing() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=(4, width)) for width in WIDTHS]


def inputs(noise: float, heavy: bool, seed: int) -> Tensor:
    random = np.random.default_rng(seed)
    z = random.normal(size=(ROWS, 4))
    x = np.concatenate([z @ mix + noise * random.normal(size=(ROWS, mix.shape[1])) for mix in mixing()], 1)
    scale = np.sqrt(5 / random.chisquare(5, size=(ROWS, 1))) if heavy else 1.0
    return torch.from_numpy(x * scale)


def coverage(kernel: str, noise: float, heavy: bool, size: int, stack: int, new: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    models = [Columns(which) for which in range(2)]

    def compared(data: Tensor, **how: Any) -> Any:
        parts = ("features", "gradients") if how["size"] is None and kernel == "hadamard" else kernel
        pair = [sosie.sketch(model, [data], sites="rows", kernels=parts, **how) for model in models]
        return sosie.compare(*(k.using(kernel) for k in pair), measures=list(MEASURES))

    data = [inputs(noise, heavy, 1 + number) for number in range(SKETCHES if new else 1)]
    found = [compared(data[seed % len(data)], size=size, stack=stack, seed=seed) for seed in range(SKETCHES)]
    exact = [compared(x, size=None) for x in data[:EXACT]]
    rows = []
    for measure in MEASURES:
        value, low, high = (np.array([getattr(c[measure], of)[0, 0] for c in found]) for of in ("value", "low", "high"))
        truth = np.mean([c.matrix(measure)[0, 0] for c in exact])
        inside = [float(((low <= aim) & (aim <= high)).mean()) for aim in (value.mean(), truth)]
        rows.append(
            {
                "measure": measure,
                "kernel": kernel,
                "buckets": f"{size}, stack {stack}" if stack > 1 else str(size),
                "inputs": ("new" if new else "the same") + (", heavy tails" if heavy else ""),
                "mean": float(value.mean()),
                "all rows": float(truth),
                "spread": float(value.std(ddof=1)),
                "half the interval / 1.96 spread": float((high - low).mean() / 2 / 1.96 / value.std(ddof=1)),
                "mean covered": inside[0],
                "all rows covered": inside[1],
            }
        )
    return rows


def main() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = [pool.submit(coverage, *case) for case in CASES]
        rows = [row for each in track(running, "coverage for sketches") for row in each.result()]
    show(f"coverage of the 95 % interval of {SKETCHES} sketches", rows)
    write("sketch-coverage", {"what": __doc__, "rows": rows})


if __name__ == "__main__":
    main()

"""How large a benchmark is: which networks, which images, which shifts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...data.corruptions import CORRUPTIONS

Architecture = tuple[int, int]  # hidden layers, neurons in each


@dataclass(frozen=True)
class Scale:
    """What one scale trains, shows and counts."""

    name: str
    data: tuple[str, ...]  # the first of these that is found
    train: int  # images at most
    test: int  # images at most that measures are probed with, and that agreement is counted on
    architectures: tuple[Architecture, ...]
    seeds: int
    epochs: tuple[int, ...]  # whose checkpoints are kept; the last is when training ends
    strategies: tuple[str, ...]
    corruptions: tuple[str, ...]
    attacks: tuple[str, ...]
    calibrated: Architecture  # what calibration and manipulation are tried on
    random: int  # networks that were not trained
    converged: int  # networks whose last checkpoints, an epoch apart, are compared
    checkpoints: int  # of each of those
    converged_epochs: int
    numbers: tuple[int, ...]  # of probing images
    paired_rows: int  # images at most for measures of rows, which grow with their square
    draws: int  # of the bootstrap
    budget: float  # seconds a measure may take over the pairs of one kind, or over one set of probing images
    batch: int = 64
    rate: float = 1e-3
    classes: tuple[int, ...] = (0, 1, 2)

    def facts(self) -> dict[str, Any]:
        return asdict(self)


SCALES = {
    "smoke": Scale(
        name="smoke", data=("demo",), train=300, test=120,
        architectures=((1, 16), (2, 16)), seeds=3, epochs=(1, 3, 6), strategies=("standard", "fgsm(epsilon=0.1)"),
        corruptions=("fog", "impulse_noise"), attacks=("fgsm(epsilon=0.1)",),
        calibrated=(2, 16), random=6, converged=2, checkpoints=4, converged_epochs=12, numbers=(20, 60),
        paired_rows=60, draws=200, budget=20.0, rate=3e-3,
    ),
    "small": Scale(
        name="small", data=("mnist", "demo"), train=1200, test=300,
        architectures=((1, 8), (1, 32), (4, 32)), seeds=4, epochs=(2, 6, 15),
        strategies=("standard", "fgsm(epsilon=0.1)", "pgd(epsilon=0.1, steps=5)"),
        corruptions=tuple(CORRUPTIONS), attacks=("fgsm(epsilon=0.1)", "pgd(epsilon=0.1)"),
        calibrated=(4, 32), random=20, converged=5, checkpoints=5, converged_epochs=40, numbers=(10, 30, 100),
        paired_rows=150, draws=500, budget=30.0, batch=128, rate=3e-3,
    ),
    "paper": Scale(
        name="paper", data=("mnist", "demo"), train=20_000, test=3147,
        architectures=((1, 8), (1, 32), (4, 8), (4, 32), (10, 32)), seeds=5, epochs=(10, 25, 50, 75, 100),
        strategies=("standard", "fgsm(epsilon=0.1)", "pgd(epsilon=0.1)"),
        corruptions=tuple(CORRUPTIONS),
        attacks=("fgsm(epsilon=0.1)", "fast_fgsm(epsilon=0.1)", "gaussian(epsilon=0.1)", "pgd(epsilon=0.1)",
                 "trades(epsilon=0.1)"),
        calibrated=(4, 32), random=100, converged=20, checkpoints=6, converged_epochs=100,
        numbers=(10, 30, 100, 300, 1000), paired_rows=1000, draws=1000, budget=600.0,
    ),
}  # fmt: skip

# Images at most, for measures that grow faster than the square of them, or are slow by nature.
SLOW = {
    "rtd": (32, "persistent homology"),
    "rsa": (1000, "ranks of all pairs of rows"),
}


def open_scale(scale: str | Scale) -> Scale:
    if isinstance(scale, Scale):
        return scale
    if scale not in SCALES:
        raise ValueError(f"no scale is called {scale!r}; there are {', '.join(SCALES)}")
    return SCALES[scale]

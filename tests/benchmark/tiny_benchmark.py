"""The smallest benchmark that has everything in it: a few seconds for all stages."""

from __future__ import annotations

from dataclasses import replace

from sosie.benchmark import SCALES

TINY = replace(
    SCALES["smoke"], name="tiny", train=120, test=40, seeds=3, epochs=(1, 3), corruptions=("fog",), random=4,
    converged=2, checkpoints=3, converged_epochs=6, numbers=(10,), paired_rows=30, draws=100,
)  # fmt: skip

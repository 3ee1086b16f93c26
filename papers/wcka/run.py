"""A well-calibrated measure of weight similarity (wCKA): its figures, on networks of our own training.

    python papers/wcka/run.py                             # all of it, on a GPU and some cores
    python papers/wcka/run.py --only figure-3 --resume    # the networks are kept in between
    python papers/wcka/run.py --small                     # a smoke run on a CPU: its numbers mean nothing
    python papers/wcka/draw.py                            # the figures, from results/*.json

SOSIE_DATA names the folder with MNIST (README.md says which files).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import blind  # noqa: E402
import calibration  # noqa: E402
import grounded  # noqa: E402
import networks  # noqa: E402
from running import start  # noqa: E402
from settings import Settings, small  # noqa: E402

EXPERIMENTS = {
    "networks": networks.networks,
    "figure-1": calibration.figure_1,
    "figure-3": grounded.figure_3,
    "figure-5": calibration.figure_5,
    "blind": blind.blind,
    "figure-4": grounded.figure_4,  # the longest
}


def settings(device: str, results: Path, nets: Path) -> Settings:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = int(os.environ.get("SOSIE_WORKERS", min(cores, 16) if cores > 2 else 0))
    return Settings(device, results, nets, workers)


if __name__ == "__main__":
    start(PAPER, EXPERIMENTS, settings, small)

"""Exploring neural network representational similarity using filter subspaces: its figures and tables, run again.

    python papers/atoms/run.py                              # all of it, on a GPU
    python papers/atoms/run.py --only figure-2,table-1 --resume
    python papers/atoms/run.py --small                      # a smoke run on a CPU: its numbers mean nothing
    python papers/atoms/draw.py                             # the figures, from results/*.json

Experiments share a GPU: run this a few times side by side, with another `--only` each; their seconds are then of a busy
machine. Tables 1 and 3 write each method and seed when it is done, figure-2-seeds each seed, figure-4-table-long each
arm (nets/, or the folder SOSIE_CHECKPOINTS), and a run that was ended goes on behind it. SOSIE_DATA names the folders
with the images (README.md says which).
"""

from __future__ import annotations

import sys
from pathlib import Path

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import continual  # noqa: E402
import correlation  # noqa: E402
import costs  # noqa: E402
import federated  # noqa: E402
import over_time  # noqa: E402
import users  # noqa: E402
import validation  # noqa: E402
from running import start  # noqa: E402
from settings import Settings, small  # noqa: E402

EXPERIMENTS = {
    "figure-2": correlation.figure_2,
    "figure-2-seeds": correlation.figure_2_seeds,
    "figure-4a": validation.figure_4a,
    "figure-4b": correlation.figure_4b,
    "figure-4-table": validation.figure_4_table,
    "figure-4-table-long": validation.figure_4_table_long,
    "figure-9a": validation.figure_9a,
    "figure-9b": validation.figure_9b,
    "figure-5": over_time.figure_5,  # 10 and 11 too
    "figure-12": over_time.figure_12,  # 13 too
    "table-2": continual.table_2,
    "figure-3": costs.figure_3,
    "figure-6": users.figure_6,  # 8 too
    "table-1": federated.table_1,
    "table-1-short": federated.table_1_short,  # 15 rounds
    "table-3": federated.table_3,
    "table-3-cifar10": federated.table_3_cifar10,
}

if __name__ == "__main__":
    start(PAPER, EXPERIMENTS, Settings, small)

"""CKA-SR, similarity between layers as a penalty for sparse training: the appendix's tables and figures, run again.

    python papers/ckasr/run.py                              # all of it, on a GPU
    python papers/ckasr/run.py --only table-5,table-3 --resume
    python papers/ckasr/run.py --small                      # a smoke run on a CPU: its numbers mean nothing
    python papers/ckasr/draw.py                             # the figures, from results/*.json

An experiment writes its results when it is done, and a record of each network as soon as it is trained (nets/, or the
folder SOSIE_CHECKPOINTS): a run that was ended goes on where it was, and experiments share networks. SOSIE_DATA names
the folders with the images (README.md says which).
"""

from __future__ import annotations

import sys
from pathlib import Path

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import figures  # noqa: E402
import lemmas  # noqa: E402
import tables  # noqa: E402
import tokens  # noqa: E402
from running import start  # noqa: E402
from settings import Settings, small  # noqa: E402

EXPERIMENTS = {  # the most important first
    "lemmas": lemmas.lemmas,
    "dense": tables.dense,
    "table-5": tables.table_5,
    "table-3": tables.table_3,
    "table-2": tables.table_2,
    "figure-2": figures.figure_2,  # networks of tables 2 and 3
    "table-1": tokens.table_1,
    "table-4": tables.table_4,
    "figure-3": figures.figure_3,  # networks of table 4
    "figure-1": figures.figure_1,
    "table-5-rest": tables.table_5_rest,
    "table-5-longer": tables.table_5_longer,
    "table-5-full": tables.table_5_full,
}

if __name__ == "__main__":
    start(PAPER, EXPERIMENTS, Settings, small)

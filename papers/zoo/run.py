"""A zoo whose relations are known: does a fingerprint find relatives, and does `recommend` find the best start?

    python papers/zoo/run.py --only train,finetune,finetune-again    # 200 networks and 800 fine-tunings, on a GPU
    python papers/zoo/run.py --only relatives,recommend --device cpu # what the zoo says of them: minutes on a CPU
    python papers/zoo/run.py --small                                 # a smoke run on a CPU: its numbers mean nothing
    python papers/zoo/draw.py                                        # the figures, from results/*.json

The networks lie in nets/, or the folder that SOSIE_CHECKPOINTS names, each in a file of its own that is written when it
is trained: a run that was ended goes on where it was. SOSIE_DATA names the folders with the images (README.md says
which).
"""

from __future__ import annotations

import sys
from pathlib import Path

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import recommending  # noqa: E402
import relatives  # noqa: E402
import training  # noqa: E402
from running import start  # noqa: E402
from settings import Settings, small  # noqa: E402

EXPERIMENTS = {
    "train": training.train,
    "finetune": training.finetune,
    "finetune-again": training.finetune_again,
    "relatives": relatives.relatives,
    "recommend": recommending.recommend,
}

if __name__ == "__main__":
    start(PAPER, EXPERIMENTS, Settings, small)

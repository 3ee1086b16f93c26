"""Similarity of Neural Networks with Gradients (Tang et al. 2020): every figure, on networks of our own training.

    python papers/gradients/train.py --device cuda --workers 2    # the networks, once
    python papers/gradients/run.py                                # all of it, on the same machine
    python papers/gradients/run.py --only figure-1 --resume
    python papers/gradients/run.py --small                        # a smoke run on a CPU: its numbers mean nothing
    python papers/gradients/draw.py                               # the figures, from results/*.json

SOSIE_DATA and SOSIE_WEIGHTS name the folders with the images and EfficientNet-Lite0 (README.md says which). Figures 4,
5 and 13 are of all training images, as many of each data set as the smallest has where norms are compared (so have
MNIST's 60,000 at hand); they write each part when it is done (nets/, or the folder SOSIE_CHECKPOINTS, which must be
train.py's --cache), and a run that was ended goes on behind it.
"""

from __future__ import annotations

import sys
from pathlib import Path

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import baselines  # noqa: E402
import blocks  # noqa: E402
import bounds  # noqa: E402
import desiderata  # noqa: E402
import norms  # noqa: E402
import ridge  # noqa: E402
from running import start  # noqa: E402
from settings import Study, small_study  # noqa: E402

EXPERIMENTS = {
    "figure-1": desiderata.figure_1,  # 7 and 8 too
    "figure-2": baselines.figure_2,
    "figure-3": baselines.figure_3,
    "figure-4": norms.figure_4,  # 6 too
    "figure-5": blocks.figure_5,  # 9 and 10 too
    "figure-11": blocks.figure_11,  # 12 too
    "figure-13": norms.figure_13,
    "figure-14": ridge.figure_14,
    "bounds": bounds.bounds,
}

if __name__ == "__main__":
    start(PAPER, EXPERIMENTS, Study, small_study)

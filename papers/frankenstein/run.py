"""Similarity and Matching of Neural Network Representations (Csiszárik et al. 2021): every claim that can be run.

    python papers/frankenstein/run.py                        # all of it: a quarter of an hour on one H200
    python papers/frankenstein/run.py --only figure-2,figure-4 --resume
    python papers/frankenstein/run.py --small                # a smoke run on a CPU: its numbers mean nothing
    python papers/frankenstein/draw.py                       # the figures, from results/*.json

SOSIE_DATA and SOSIE_WEIGHTS name the folders with the images and the published weights (README.md says which). What is
in matching.py writes each network and each pair when it is done (nets/, or the folder SOSIE_CHECKPOINTS), and a run
that was ended goes on behind it.
"""

from __future__ import annotations

import sys
from pathlib import Path

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

import across  # noqa: E402
import matching  # noqa: E402
import structure  # noqa: E402
import torch  # noqa: E402
import width  # noqa: E402
from running import start  # noqa: E402
from settings import Settings, small  # noqa: E402

EXPERIMENTS = {
    "figure-2": matching.figure_2,
    "baseline-cka": matching.baseline_cka,
    "figure-4": matching.figure_4,  # reads what figure-2 wrote
    "figure-3": width.figure_3,
    "figure-5": width.figure_5,
    "figure-6": structure.figure_6,
    "mode-connectivity": structure.mode_connectivity,
    "figure-7": structure.figure_7,
    "figure-8": structure.figure_8,
    "data-sets": across.data_sets,
    "architectures": across.architectures,
    "control": across.control,
    "figure-2-ten": matching.figure_2_ten,
    "further-results": matching.further_results,  # its networks by SGD are those of figure-2-ten
}

if __name__ == "__main__":
    # A cut is compared with the whole network when it is made: TF32's rounding would be taken for a difference.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    start(PAPER, EXPERIMENTS, Settings, small)

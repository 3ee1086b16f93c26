"""Every benchmark that this machine can run: `make bench`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import align
import atoms
import bures
import cpu
import fingerprints
import gpu
import interval_coverage
import joints
import measures
import penalty
import rows
import rsa
import side_by_side
import sites
import sketch_coverage
import sketching
import startup
import stitching
import task2vec
import together
import tokens
import torch
import weights

SHARED = Path(__file__).resolve().parents[2] / "shared"


def main() -> None:
    for variable, folder in (("SOSIE_DATA", "data"), ("SOSIE_WEIGHTS", "weights")):
        if (SHARED / folder).is_dir():
            os.environ.setdefault(variable, str(SHARED / folder))
    startup.main()
    rows.main()
    interval_coverage.main()
    sketch_coverage.main()
    measures.main()
    align.main()
    rsa.main()
    sites.main()
    sketching.main()
    bures.main()
    together.main()
    penalty.main()
    side_by_side.main()
    tokens.main()
    weights.main()
    atoms.main()
    try:
        cpu.main()
        stitching.main()
    except FileNotFoundError as error:
        print(f"the CPU benchmarks need CIFAR-10 and published weights: {error}")
    if torch.cuda.is_available():
        joints.main()
        task2vec.main()
        fingerprints.main()
    if torch.cuda.is_available() and importlib.util.find_spec("torchvision"):
        gpu.main()
    else:
        print("no GPU with torchvision here: bench/results/gpu.json keeps what was measured on one")


if __name__ == "__main__":
    main()

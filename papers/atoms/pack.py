"""Tiny-ImageNet's packed validation images (JPEG, 64 × 64) as 32 × 32 bytes that need no Pillow to be read.

    python papers/atoms/pack.py folder/with/tiny-imagenet-val2k.npz [folder to write to]

Writes tiny-imagenet-32.npz, 6 MB, to papers/atoms/nets (which git ignores) if no folder is named: 2,000 images, each
the mean of 2 × 2 pixels. The packed file holds its 200 classes in turn, so the first 1,000 are five of each.
"""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path

import numpy as np
from data import NETS, TINY
from PIL import Image


def main(source: Path, target: Path) -> None:
    with np.load(source / "tiny-imagenet-val2k.npz", allow_pickle=False) as packed:
        data, offsets, labels = packed["jpeg"], packed["offsets"], packed["labels"]
    images = np.stack([
        np.asarray(Image.open(io.BytesIO(data[a:b].tobytes())).convert("RGB").reduce(2))
        for a, b in itertools.pairwise(offsets)
    ])  # fmt: skip
    assert images.shape[1:] == (32, 32, 3), f"expected 64 × 64 images, got half of {images.shape[1:]}"
    target.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target / TINY, images=images, labels=labels.astype(np.int64))
    print(f"wrote {target / TINY}: {len(images)} images, {(target / TINY).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else NETS)

"""Tiny-ImageNet's packed images (JPEG, 64 × 64) as 32 × 32 bytes that need no Pillow to be read.

    python papers/pack_tiny_imagenet.py folder/with/tiny-imagenet-val2k.npz [folder to write to]

Writes tiny-imagenet-32.npz, 6 MB, to papers/atoms/nets (which git ignores) if no folder is named: the 2,000 validation
images, each the mean of 2 × 2 pixels. The packed file holds its 200 classes in turn, so the first 1,000 are five of
each. Where tiny-imagenet-train5k.npz lies beside it, its 5,000 images become tiny-imagenet-32-train.npz, 14 MB, which
papers/zoo trains on.
"""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path

import numpy as np
from PIL import Image

NETS = Path(__file__).resolve().parent / "atoms" / "nets"

FILES = {"tiny-imagenet-val2k.npz": "tiny-imagenet-32.npz", "tiny-imagenet-train5k.npz": "tiny-imagenet-32-train.npz"}


def main(source: Path, target: Path) -> None:
    for name, made in FILES.items():
        if name == "tiny-imagenet-val2k.npz" or (source / name).is_file():
            pack(source / name, target / made)


def pack(source: Path, target: Path) -> None:
    with np.load(source, allow_pickle=False) as packed:
        data, offsets, labels = packed["jpeg"], packed["offsets"], packed["labels"]
    images = np.stack([
        np.asarray(Image.open(io.BytesIO(data[a:b].tobytes())).convert("RGB").reduce(2))
        for a, b in itertools.pairwise(offsets)
    ])  # fmt: skip
    assert images.shape[1:] == (32, 32, 3), f"expected 64 × 64 images, got half of {images.shape[1:]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, images=images, labels=labels.astype(np.int64))
    print(f"wrote {target}: {len(images)} images, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else NETS)

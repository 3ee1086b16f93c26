"""Images from .npz files: plain arrays, colour planes packed as differences, or packed JPEG files."""

from __future__ import annotations

import io
import itertools
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosie.results import DamagedFile

from .folder import decode
from .images import ImageData, check_limit

IMAGE_KEYS = ("images", "x")
LABEL_KEYS = ("labels", "y")
CHANNELS = (1, 3, 4)

Array = NDArray[Any]


def read_packed(path: str | os.PathLike[str], *, split: str = "test", limit: int | None = None) -> ImageData:
    """The images of one .npz file; `split` matters only where it holds `train_images` and `test_images`."""
    path, limit = Path(path), check_limit(limit)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name an .npz file, or write folder:{path} for image files")
    arrays = _Arrays(path)
    with arrays:
        images, count = _read_images(arrays, split, limit)
        labels = _read_labels(arrays, split, count)
        names = arrays["class_names"] if "class_names" in arrays else np.array([], dtype=str)
    if names.ndim != 1 or (len(names) and names.dtype.kind != "U"):
        raise ValueError(f"{path}: class_names must be a list of text, got {names.dtype} {names.shape}")
    return ImageData(images, None if labels is None else labels[:limit], path.stem, tuple(str(name) for name in names))


class _Arrays(Mapping[str, Array]):
    """The arrays of an .npz file, read one by one, with errors that name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = self._guard(lambda: np.load(path, allow_pickle=False), "opened")
        if not isinstance(self._file, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} holds a single array: save images and labels with numpy.savez(path, ...)")

    def _guard(self, read: Any, what: str) -> Any:
        try:
            return read()
        except FileNotFoundError:
            raise FileNotFoundError(f"no file {self.path}") from None
        except ValueError as error:
            if "allow_pickle" in str(error) or "pickled" in str(error):
                raise ValueError(
                    f"{self.path} cannot be {what} without unpickling, which could run any code: save plain "
                    "arrays of numbers with numpy.savez"
                ) from error
            raise DamagedFile(f"{self.path} cannot be {what}: {error}") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
            raise DamagedFile(f"{self.path} is not a whole .npz file ({error}); was it cut off?") from error

    def __enter__(self) -> _Arrays:
        return self

    def __exit__(self, *details: object) -> None:
        self._file.close()

    def __getitem__(self, key: str) -> Array:
        return self._guard(lambda: self._file[key], f"read at {key!r}")

    def __iter__(self) -> Any:
        return iter(self._file.files)

    def __len__(self) -> int:
        return len(self._file.files)

    def __contains__(self, key: object) -> bool:
        return key in self._file.files

    def find(self, names: tuple[str, ...], split: str) -> str | None:
        """The first of the names that is there, by itself or after `train_` or `test_`."""
        return next((key for name in names for key in (name, f"{split}_{name}") if key in self), None)


def _read_images(arrays: _Arrays, split: str, limit: int | None) -> tuple[Tensor, int]:
    """The images, as many as asked for, and how many the file holds."""
    if "planes" in arrays:
        planes = arrays["planes"]
        return torch.from_numpy(unpack_planes(planes, limit, arrays.path)), planes.shape[1]
    if "jpeg" in arrays and "offsets" in arrays:
        return torch.from_numpy(_unpack_jpeg(arrays, limit)), len(arrays["offsets"]) - 1
    key = arrays.find(IMAGE_KEYS, split)
    if key is None:
        raise ValueError(
            f"{arrays.path} has no images for the split {split!r}; its keys are {', '.join(arrays)}. "
            "Name them images (or x) and labels (or y), or train_images, test_images …"
        )
    images = to_channels_first(arrays[key], f"{key!r} in {arrays.path}")
    return torch.from_numpy(images[:limit]), len(images)


def _read_labels(arrays: _Arrays, split: str, images: int) -> Tensor | None:
    key = arrays.find(LABEL_KEYS, split)
    if key is None:
        return None
    labels = arrays[key]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{key!r} in {arrays.path} must be whole numbers (N,), got {labels.dtype} {labels.shape}")
    if len(labels) != images:
        raise ValueError(f"{arrays.path}: {images} images but {len(labels)} labels in {key!r}")
    return torch.from_numpy(labels.astype(np.int64))


def to_channels_first(images: Array, what: str) -> Array:
    """(N, H, W), (N, H, W, C) or (N, C, H, W) to (N, C, H, W), where the shape says which it is."""
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise ValueError(f"{what} must be uint8, or floating point in [0, 1], got {images.dtype}: convert it first")
    if images.dtype.kind == "f" and images.dtype.itemsize > 8:
        raise ValueError(f"{what} is {images.dtype}, which torch does not know: save it as float32")
    if not images.dtype.isnative:
        images = images.astype(images.dtype.newbyteorder("="))
    if images.ndim == 3:
        return images[:, None]
    first, last = (images.ndim == 4 and images.shape[axis] in CHANNELS for axis in (1, 3))
    if first == last:
        reason = "channels could be second or last" if first else "no axis of 1, 3 or 4 channels"
        raise ValueError(f"{what} has shape {images.shape}, {reason}: save it as (N, H, W, C) or (N, C, H, W)")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if last else images


def unpack_planes(planes: Array, limit: int | None, path: Path) -> Array:
    """Colour images (N, 3, H, W) from planes G, R - G, B - G, kept as differences modulo 256."""
    if planes.ndim != 4 or planes.shape[0] != 3 or planes.dtype != np.uint8:
        raise ValueError(f"'planes' in {path} must be uint8 (3, N, H, W), got {planes.dtype} {planes.shape}")
    down = np.cumsum(planes[:, :limit], axis=2, dtype=np.uint8)
    green, red, blue = np.cumsum(down, axis=3, dtype=np.uint8)
    return np.stack([red + green, green, blue + green], axis=1)


def _unpack_jpeg(arrays: _Arrays, limit: int | None) -> Array:
    """RGB images (N, 3, H, W) from JPEG files laid end to end; only as many as asked for are decoded."""
    stored, offsets = arrays["jpeg"], arrays["offsets"]
    whole = stored.ndim == 1 and stored.dtype == np.uint8 and offsets.ndim == 1 and offsets.dtype.kind in "iu"
    fits = whole and len(offsets) > 1 and offsets[0] >= 0 and offsets[-1] <= len(stored)
    if not fits or np.any(np.diff(offsets.astype(np.int64)) <= 0):
        raise DamagedFile(f"{arrays.path}: the offsets do not fit the {stored.size:,} bytes of JPEG data")
    edges = offsets[: None if limit is None else limit + 1]
    images = []
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        images.append(decode(io.BytesIO(stored[start:stop].tobytes()), f"image {i} of {arrays.path}"))
        if images[i].shape != images[0].shape:
            raise ValueError(f"image {i} of {arrays.path} is {images[i].shape}, the first is {images[0].shape}")
    return np.stack(images)

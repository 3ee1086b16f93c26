"""Image files in a folder, read batch by batch."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from .images import Batch, Batches, check_limit, to_float

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MODES = ("RGB", "L")


@dataclass(frozen=True)
class ImageFolder:
    """Image files in the order of their names; the labels are the sub-folders, where there are any.

    Every image is turned into `mode` ("RGB", or "L" for grey). With a `size`, its short side becomes `size`
    and the centre is kept; without, all images must have the same shape.
    """

    root: Path
    files: tuple[str, ...]  # relative to the root
    classes: tuple[str, ...] = ()
    size: int | None = None
    mode: str = "RGB"

    @property
    def name(self) -> str:
        return self.root.resolve().name

    def __len__(self) -> int:
        return len(self.files)

    def first(self, count: int | None) -> ImageFolder:
        """At most the first `count` images; all of them for None."""
        return replace(self, files=self.files[: check_limit(count)])

    def batches(self, size: int = 256) -> Batches:
        return Batches(self, size)

    def read(self, start: int, stop: int) -> Batch:
        """Images as float32 in [0, 1], with their labels where there are sub-folders."""
        images = [self._read_one(file) for file in self.files[start:stop]]
        wanted = images[0].shape if start == 0 else self._read_one(self.files[0]).shape
        for file, image in zip(self.files[start:stop], images, strict=True):
            if image.shape != wanted:
                raise ValueError(
                    f"{self.root / file} is {image.shape[1:]}, {self.files[0]} {wanted[1:]} (height, width): "
                    f"give a size, as in folder:{self.root}(size=224)"
                )
        x = to_float(torch.from_numpy(np.stack(images)))
        if not self.classes:
            return x
        labels = [self.classes.index(Path(file).parts[0]) for file in self.files[start:stop]]
        return x, torch.tensor(labels, dtype=torch.int64)

    def _read_one(self, file: str) -> NDArray[np.uint8]:
        path = self.root / file
        with open(path, "rb") as opened:
            return decode(opened, str(path), size=self.size, mode=self.mode)


def open_folder(path: str | os.PathLike[str], *, size: int | None = None, mode: str = "RGB") -> ImageFolder:
    """The images below a folder; nothing is decoded yet."""
    root = Path(path).expanduser()
    if not root.is_dir():
        kind = "is a file, not a folder" if root.exists() else "does not exist"
        raise NotADirectoryError(f"{root} {kind}: folder: wants a folder of images")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"size is the side of the images in pixels, got {size!r}")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: 'RGB' or 'L' (grey)")
    files = _list_files(root.resolve())
    if not files:
        raise ValueError(f"{root} holds no images ({', '.join(SUFFIXES)})")
    loose = [file for file in files if len(Path(file).parts) == 1]
    if loose and len(loose) < len(files):
        raise ValueError(
            f"{root} holds images of its own ({loose[0]} …) and sub-folders with images: sub-folders are "
            "classes, so put every image into one"
        )
    classes = () if loose else tuple(sorted({Path(file).parts[0] for file in files}))
    return ImageFolder(root, tuple(_in_turn(files) if classes else files), classes, size, mode)


def _in_turn(files: list[str]) -> list[str]:
    """One image of each class after the other: consecutive images, and any first few, are of all classes."""
    by_class: dict[str, list[str]] = {}
    for file in files:
        by_class.setdefault(Path(file).parts[0], []).append(file)
    rounds = itertools.zip_longest(*by_class.values())
    return [file for each in rounds for file in each if file is not None]


def _list_files(root: Path) -> list[str]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                raise ValueError(f"{os.path.join(folder, name)} is a link to a folder, which is not followed")
        for name in files:
            path = Path(folder, name)
            if name.startswith(".") or path.suffix.lower() not in SUFFIXES:
                continue
            if not path.is_file():
                raise ValueError(f"{path} is not a plain file (a pipe, a device or a broken link)")
            if not path.resolve().is_relative_to(root):
                raise ValueError(f"{path} is a link that leads out of {root}: copy the image into the folder")
            found.append(path.relative_to(root).as_posix())
    return sorted(found)


def decode(file: IO[bytes], what: str, *, size: int | None = None, mode: str = "RGB") -> NDArray[np.uint8]:
    """One image as uint8 (channels, height, width)."""
    Image = _import_pillow()
    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # Pillow would clip 16 bits to white
                raise ValueError(f"it has more than 8 bits per channel (mode {image.mode}); convert it first")
            image = image.convert(mode)
            if size is not None:
                image = _fit(image, size)
            pixels = np.array(image, dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"{what} cannot be read as an image: {error}") from error
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if pixels.ndim == 3 else pixels[None]


def _fit(image: Any, size: int) -> Any:
    """Short side to `size`, then the centre square."""
    width, height = image.size
    scale = size / min(width, height)
    image = image.resize((max(size, round(width * scale)), max(size, round(height * scale))))
    left, top = (image.size[0] - size) // 2, (image.size[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading image files needs Pillow, which is not installed: pip install 'sosie[images]'", name="PIL"
        ) from error
    return Image

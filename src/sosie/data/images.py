"""Images in memory, in folders and in files: .npz and the formats in which data sets are published."""

from __future__ import annotations

import gzip
import io
import itertools
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import one_of, renamed, whole_number
from ..factory import import_library
from ..files import DamagedFile

Array = NDArray[Any]
Batch = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class DataBatches:
    """Batches in the order of the source, the same on every pass; the last batch may be smaller."""

    source: Any  # ImageData, ImageFolder or Table
    size: int = 256

    def __post_init__(self) -> None:
        whole_number(self.size, "the batch size", least=1)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def total(self) -> int:
        """The number of inputs of one pass."""
        return len(self.source)

    def __repr__(self) -> str:
        return f"<DataBatches {self.name}: {self.total} inputs in batches of {self.size}>"

    def __len__(self) -> int:
        return -(-self.total // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.total, self.size):
            yield self.read(start, min(start + self.size, self.total))

    def read(self, start: int, stop: int) -> Any:
        """Return the inputs from `start` to `stop`, across batches."""
        return self.source.read(start, stop)


@dataclass(frozen=True, eq=False, repr=False)
class ImageData:
    """Images (N, channels, height, width), with labels (N,) if there are any.

    They are kept as stored, uint8 or floating point in [0, 1], and become float32 batch by batch. `note` is a remark
    about the data set.
    """

    images: Tensor
    labels: Tensor | None = None
    name: str = "images"
    classes: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        advice = "divide by 255, or yield normalised images from your own path/to/file.py:factory"
        check_images(self.images, self.name, advice)
        if not len(self.images):
            raise ValueError(f"{self.name} holds no images")
        if self.labels is None:
            return
        if tuple(self.labels.shape) != (len(self.images),):
            raise ValueError(f"{self.name}: {len(self.images)} images but labels of shape {tuple(self.labels.shape)}")
        if self.labels.dtype != torch.int64:
            raise TypeError(f"{self.name}: labels are int64, got {self.labels.dtype}")
        first, last = int(self.labels.min()), int(self.labels.max())
        if self.classes and (first < 0 or last >= len(self.classes)):
            raise ValueError(f"{self.name}: labels {first} to {last} for {len(self.classes)} classes")

    def __repr__(self) -> str:
        labels = "no labels" if self.labels is None else f"{len(self.classes) or 'unnamed'} classes"
        kind = str(self.images.dtype).removeprefix("torch.")
        return f"ImageData({self.name!r}, {tuple(self.images.shape)}, {kind}, {labels})"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, part: slice) -> ImageData:
        """Return a part of the images as a data set."""
        if not isinstance(part, slice):
            raise TypeError(f"take a part as data[10:20], not data[{part!r}]")
        indices = range(len(self))[part]
        if not len(indices):
            raise ValueError(f"{self.name}[{part.start}:{part.stop}] of {len(self)} images is empty")
        chosen = part if (part.step or 1) > 0 else list(indices)  # tensors cannot step backwards
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, images=self.images[chosen], labels=labels)

    def first(self, count: int | None) -> ImageData:
        """Return at most the first `count` images; all of them for None."""
        return self if check_max_rows(count) is None else self[:count]

    def read(self, start: int, stop: int) -> Batch:
        """Return images as float32 in [0, 1], with their labels if there are any."""
        x = to_float(self.images[start:stop])
        return x if self.labels is None else (x, self.labels[start:stop].clone())

    def batches(self, size: int = 256) -> DataBatches:
        return DataBatches(self, size)


def check_images(images: Tensor, name: str, advice: str) -> None:
    """Raise unless these are images (N, channels, height, width), uint8 or floating point in [0, 1]."""
    if images.ndim != 4:
        raise ValueError(f"{name}: images are (N, channels, height, width), got {tuple(images.shape)}")
    if images.is_floating_point():
        low, high = (float(edge) for edge in torch.aminmax(images.detach())) if images.numel() else (0.0, 1.0)
        if not (low >= 0 and high <= 1):  # also where they are NaN
            raise ValueError(f"{name}: images must lie in [0, 1], found {low:.4g} to {high:.4g}; {advice}")
    elif images.dtype != torch.uint8:
        raise TypeError(f"{name}: images are uint8 or floating point in [0, 1], got {images.dtype}")


def to_float(images: Tensor) -> Tensor:
    """Copy uint8 to float32 in [0, 1] and floating point to float32; a copy, since a model may work in place."""
    copy = images.to(torch.float32, copy=True)
    return copy.div_(255) if images.dtype == torch.uint8 else copy


def check_max_rows(max_rows: int | None) -> int | None:
    """Return a number of inputs of at least 1, or None for all."""
    return None if max_rows is None else whole_number(max_rows, "max_rows", least=1, why="None takes all inputs")


# Images in a folder

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MODES = ("RGB", "L")


@dataclass(frozen=True)
class ImageFolder:
    """Image files in the order of their names; sub-folders, if there are any, are the labels.

    Every image is converted to `mode` ("RGB", or "L" for grey). With a `size`, the short side is scaled to it and the
    centre is kept; without, all images must have the same shape.
    """

    root: Path
    files: tuple[str, ...]  # relative to the root
    classes: tuple[str, ...] = ()
    size: int | None = None
    mode: str = "RGB"

    def __repr__(self) -> str:
        classes = f" of {len(self.classes)} classes" if self.classes else ""
        return f"<ImageFolder {self.root}: {len(self)} images{classes}>"

    @property
    def name(self) -> str:
        return self.root.resolve().name

    def __len__(self) -> int:
        return len(self.files)

    def first(self, count: int | None) -> ImageFolder:
        """Return at most the first `count` images; all of them for None."""
        return replace(self, files=self.files[: check_max_rows(count)])

    def batches(self, size: int = 256) -> DataBatches:
        return DataBatches(self, size)

    def read(self, start: int, stop: int) -> Batch:
        """Return images as float32 in [0, 1], with their labels if there are sub-folders."""
        images = [decode(self.root / file, size=self.size, mode=self.mode) for file in self.files[start:stop]]
        wanted = images[0].shape if start == 0 else self.read(0, 1)[0].shape[-3:]
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


def open_folder(path: str | os.PathLike[str], *, size: int | None = None, mode: str = "RGB") -> ImageFolder:
    """Open the images below a folder without decoding them."""
    root = Path(path).expanduser()
    if not root.is_dir():
        kind = "is a file, not a folder" if root.exists() else "does not exist"
        raise NotADirectoryError(f"{root} {kind}: folder: needs a folder of images")
    size = None if size is None else whole_number(size, "size", least=1, why="the side of the images in pixels")
    one_of(mode, "mode", MODES)
    files = _list_files(root.resolve())
    if not files:
        raise ValueError(f"{root} holds no images ({', '.join(SUFFIXES)})")
    loose = [file for file in files if len(Path(file).parts) == 1]
    if loose and len(loose) < len(files):
        raise ValueError(
            f"{root} holds both images ({loose[0]} …) and sub-folders with images: sub-folders are classes, so put "
            "every image into one"
        )
    if loose:
        return ImageFolder(root, tuple(files), (), size, mode)
    # Classes alternate, so that consecutive images, and any first few, come from all classes.
    by_class: dict[str, list[str]] = {}
    for file in files:
        by_class.setdefault(Path(file).parts[0], []).append(file)
    in_turn = (file for group in itertools.zip_longest(*by_class.values()) for file in group if file is not None)
    return ImageFolder(root, tuple(in_turn), tuple(sorted(by_class)), size, mode)


def _list_files(root: Path) -> list[str]:
    paths = []
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
            paths.append(path.relative_to(root).as_posix())
    return sorted(paths)


def decode(
    file: Path | IO[bytes], what: str | None = None, *, size: int | None = None, mode: str = "RGB"
) -> NDArray[np.uint8]:
    """Return one image as uint8 (channels, height, width); with a size, scaled by its short side and centre-cropped."""
    Image = import_library("PIL.Image", "reading image files", extra="images")
    try:
        with Image.open(file) as opened:
            if opened.mode[0] in "IF":  # Pillow would clip 16 bits to white
                raise ValueError(f"it has more than 8 bits per channel (mode {opened.mode}); convert it first")
            image = opened.convert(mode)
            if size is not None:
                width, height = image.size
                scale = size / min(width, height)
                image = image.resize((max(size, round(width * scale)), max(size, round(height * scale))))
                left, top = (image.size[0] - size) // 2, (image.size[1] - size) // 2
                image = image.crop((left, top, left + size, top + size))
            pixels = np.array(image, dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"{what or file} cannot be read as an image: {error}") from error
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if pixels.ndim == 3 else pixels[None]


# Images from .npz files: plain arrays, colour planes packed as differences, or packed JPEG files

IMAGE_KEYS = ("images", "x")
LABEL_KEYS = ("labels", "y")
CHANNELS = (1, 3, 4)


def read_packed(
    path: str | os.PathLike[str], *, split: str = "test", max_rows: int | None = None, limit: int | None = None
) -> ImageData:
    """Return the images of one .npz file; `split` matters if it holds `train_images` and `test_images`."""
    path, max_rows = Path(path), check_max_rows(renamed(limit, max_rows, "limit", "max_rows"))
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name an .npz file, or write folder:{path} for image files")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")

    def first_of(names: tuple[str, ...]) -> str | None:
        """Return the first name in the file, by itself or after `train_` or `test_`."""
        return next((key for name in names for key in (name, f"{split}_{name}") if key in keys), None)

    with _explained(path):
        opened = np.load(path, allow_pickle=False)
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} holds a single array: save images and labels with numpy.savez(path, ...)")
    with opened:
        keys = opened.files
        image_key, label_key = first_of(IMAGE_KEYS), first_of(LABEL_KEYS)
        with _explained(path):
            wanted = {"planes", "jpeg", "offsets", "class_names", image_key, label_key}
            arrays = {key: opened[key] for key in keys if key in wanted}
    if "planes" in arrays:
        count = arrays["planes"].shape[1]
        images = unpack_planes(arrays["planes"], max_rows, path)
    elif "jpeg" in arrays and "offsets" in arrays:
        count = len(arrays["offsets"]) - 1
        images = _unpack_jpeg(arrays["jpeg"], arrays["offsets"], max_rows, path)
    elif image_key is not None:
        count = len(arrays[image_key])
        images = to_channels_first(arrays[image_key], f"{image_key!r} in {path}")[:max_rows]
    else:
        raise ValueError(
            f"{path} has no images for the split {split!r}; its keys are {', '.join(keys)}. "
            "Name them images (or x) and labels (or y), or train_images, test_images …"
        )
    labels = None if label_key is None else _labels(arrays[label_key], count, f"{label_key!r} in {path}")[:max_rows]
    names = arrays.get("class_names", np.array([], dtype=str))
    if names.ndim != 1 or (len(names) and names.dtype.kind != "U"):
        raise ValueError(f"{path}: class_names must be a list of text, got {names.dtype} {names.shape}")
    return ImageData(torch.from_numpy(images), labels, path.stem, tuple(str(name) for name in names))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Make errors of NumPy and zipfile name the file."""
    try:
        yield
    except ValueError as error:
        if "pickle" in str(error):
            raise ValueError(
                f"{path} cannot be read without unpickling, which could run any code: save plain arrays of numbers "
                "with numpy.savez"
            ) from error
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise DamagedFile(f"{path} is not a whole .npz file ({error}); was it cut off?") from error


def _labels(labels: Array, images: int, what: str) -> Tensor:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{what} must be whole numbers (N,), got {labels.dtype} {labels.shape}")
    if len(labels) != images:
        raise ValueError(f"{images} images but {len(labels)} labels in {what}")
    return torch.from_numpy(labels.astype(np.int64))


def to_channels_first(images: Array, what: str) -> Array:
    """Convert (N, H, W), (N, H, W, C) or (N, C, H, W) to (N, C, H, W) if the shape tells them apart."""
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise ValueError(f"{what} must be uint8, or floating point in [0, 1], got {images.dtype}: convert it first")
    if images.dtype.kind == "f" and images.dtype.itemsize > 8:
        raise ValueError(f"{what} is {images.dtype}, which torch lacks: save it as float32")
    if not images.dtype.isnative:
        images = images.astype(images.dtype.newbyteorder("="))
    if images.ndim == 3:
        return images[:, None]
    first, last = (images.ndim == 4 and images.shape[axis] in CHANNELS for axis in (1, 3))
    if first == last:
        reason = "so channels may be second or last" if first else "with no axis of 1, 3 or 4 channels"
        raise ValueError(f"{what} has shape {images.shape}, {reason}: save it as (N, H, W, C) or (N, C, H, W)")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if last else images


def unpack_planes(planes: Array, max_rows: int | None, path: Path) -> Array:
    """Return colour images (N, 3, H, W) from the planes G, R - G, B - G, stored as differences modulo 256."""
    if planes.ndim != 4 or planes.shape[0] != 3 or planes.dtype != np.uint8:
        raise ValueError(f"'planes' in {path} must be uint8 (3, N, H, W), got {planes.dtype} {planes.shape}")
    down = np.cumsum(planes[:, :max_rows], axis=2, dtype=np.uint8)
    green, red, blue = np.cumsum(down, axis=3, dtype=np.uint8)
    return np.stack([red + green, green, blue + green], axis=1)


def _unpack_jpeg(stored: Array, offsets: Array, max_rows: int | None, path: Path) -> Array:
    """Return RGB images (N, 3, H, W) from concatenated JPEG files; only the first `max_rows` are decoded."""
    whole = stored.ndim == 1 and stored.dtype == np.uint8 and offsets.ndim == 1 and offsets.dtype.kind in "iu"
    fits = whole and len(offsets) > 1 and offsets[0] >= 0 and offsets[-1] <= len(stored)
    if not fits or np.any(np.diff(offsets.astype(np.int64)) <= 0):
        raise DamagedFile(f"{path}: the offsets do not fit the {stored.size:,} bytes of JPEG data")
    edges = offsets[: None if max_rows is None else max_rows + 1]
    images = []
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        images.append(decode(io.BytesIO(stored[start:stop].tobytes()), f"image {i} of {path}"))
        if images[i].shape != images[0].shape:
            raise ValueError(f"image {i} of {path} is {images[i].shape}, the first is {images[0].shape}")
    return np.stack(images)


# The files in which data sets are published: CIFAR binary, MNIST idx, SVHN .mat

CIFAR_PIXELS = 3 * 32 * 32
# The first labels of two data sets whose files have the same names
FIRST_LABELS = {
    ("mnist", "train"): (5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
    ("mnist", "test"): (7, 2, 1, 0, 4, 1, 4, 9, 5, 9),
    ("fashion-mnist", "train"): (9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
    ("fashion-mnist", "test"): (9, 2, 1, 1, 6, 1, 4, 6, 5, 7),
}


def read_cifar(files: list[Path], name: str, *, label_bytes: int, classes: tuple[str, ...]) -> ImageData:
    """Read CIFAR binary files: per image `label_bytes` labels (the last is the fine one), then 3072 pixels."""
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


def read_svhn(folder: Path, split: str) -> ImageData | None:
    """Read SVHN's cropped digits from a MATLAB file; the digit 0, stored as 10, gets label 0."""
    path = folder / f"{split}_32x32.mat"
    if not path.is_file():
        return None
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
    return ImageData(torch.from_numpy(first), torch.from_numpy(digits), f"svhn-{split}", tuple("0123456789"))


def read_mnist(name: str, classes: tuple[str, ...], folder: Path, split: str) -> ImageData | None:
    """Read MNIST or Fashion-MNIST from a pair of idx files."""
    start = "t10k" if split == "test" else "train"
    images, labels = _idx_file(folder, f"{start}-images", 3), _idx_file(folder, f"{start}-labels", 1)
    if images is None or labels is None:
        return None
    pictures, answers = read_idx(images), read_idx(labels)
    if pictures.ndim != 3 or answers.ndim != 1 or len(pictures) != len(answers):
        raise DamagedFile(f"{images} is {pictures.shape} and {labels} is {answers.shape}: not one data set")
    first = tuple(answers[:10].tolist())
    for (other, other_split), known in FIRST_LABELS.items():
        if first == known and (other, other_split) != (name, split):
            raise ValueError(f"{labels} is {other} ({other_split}), not {name} ({split}): put each in its own folder")
    numbers = torch.from_numpy(answers.astype(np.int64))
    return ImageData(torch.from_numpy(pictures)[:, None], numbers, f"{name}-{split}", classes)


def _idx_file(folder: Path, stem: str, axes: int) -> Path | None:
    names = [f"{stem}{dot}idx{axes}-ubyte{suffix}" for dot in "-." for suffix in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_idx(path: Path) -> NDArray[Any]:
    """Return an array of bytes from an idx file, gzipped or not."""
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

"""Open data from the text that names them, as on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import plugins
from ..checks import check_options, one_of, parse_call, renamed, whole_number
from ..factory import find_file, import_library, is_factory, listed_folders, load_factory
from .images import (
    DataBatches,
    ImageData,
    ImageFolder,
    check_max_rows,
    open_folder,
    read_cifar,
    read_mnist,
    read_packed,
    read_svhn,
)
from .texts import open_dataset, read_texts

VARIABLE = "SOSIE_DATA"
SPLITS = ("train", "test")
_PREFIXES = {".npz": "npz", ".txt": "texts"}
_FOLDER_OPTIONS = re.compile(r"(?P<path>.+?)(?P<options>\(\s*\w+\s*=.*\))?", re.DOTALL)


def list_data() -> list[str]:
    """Return the names of the data sets; each of sosie's can be followed by :train or :test.

    Installed packages add names by the entry point `sosie.data`.
    """
    return ["demo", *NAMED, *plugins.names("data")]


@dataclass(frozen=True)
class DataPart:
    """One part of a larger data set, of which other machines read the rest.

    `data` is any data, or None for a part of saved activations. `first_row` is the index of its first input in the
    whole set; it determines which rows are sampled, and their buckets in a sketch.
    """

    data: Any = None
    first_row: int = 0

    def __post_init__(self) -> None:
        whole_number(self.first_row, "first_row", least=0, most=2**40 - 1)


def open_data(
    spec: str, *, split: str = "test", batch: int = 256, max_rows: int | None = None, limit: int | None = None
) -> DataBatches | Iterable[Any]:
    """Open the data that a specification names as batches in a fixed order that can be read again.

    - `demo`, `cifar10`, `cifar100`, `svhn`, `mnist`, `fashion-mnist`, with `:train` or `:test` if wanted (a split in
      the text wins); all but the demo are searched for in the folders of SOSIE_DATA
    - `npz:file`: `images` or `x`, and `labels` or `y` if known; the path as it is, then in SOSIE_DATA
    - `folder:path`: image files, with sub-folders as classes; `folder:path(size=224, mode='RGB')`
    - `texts:file`: a text file, in which each line is a text
    - `datasets:org/name(config='…', column='…')@revision:split`: texts or images of the Hugging Face library
    - `path/to/file.py:factory`: the result of your own function, which chooses split and batch itself
    - any name that an installed package offers under the entry point `sosie.data`, such a function

    Image batches are (float32 in [0, 1], labels), or the images alone without labels.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"a data specification is text such as 'demo' or 'npz:file', got {spec!r}")
    spec, max_rows = spec.strip(), check_max_rows(renamed(limit, max_rows, "limit", "max_rows"))
    if is_factory(spec):
        return _batches(spec, load_factory(spec)(), batch, max_rows)
    kind, _, rest = spec.partition(":")
    if kind == "texts" and rest:
        return read_texts(rest, VARIABLE, max_rows).batches(batch)
    if kind == "datasets" and rest:
        return open_dataset(rest, split, max_rows).batches(batch)
    name = spec.partition("(")[0].strip()
    if name not in ("demo", *NAMED) and (make := plugins.load("data", name, plugins.function)) is not None:
        return _batches(spec, make(**parse_call(spec)[1]), batch, max_rows)
    return open_images(spec, split=split, max_rows=max_rows).batches(batch)


def open_images(
    spec: str, *, split: str = "test", max_rows: int | None = None, limit: int | None = None
) -> ImageData | ImageFolder:
    """Open the images themselves (not their batches) of any specification but `file.py:factory`."""
    max_rows = renamed(limit, max_rows, "limit", "max_rows")
    kind, _, rest = spec.strip().partition(":")
    if kind == "npz" and rest:
        return read_packed(find_file(rest, VARIABLE), split=one_of(split, "the split", SPLITS), max_rows=max_rows)
    if kind == "folder" and rest:
        return _from_folder(rest).first(max_rows)
    name = kind.strip().lower().replace("_", "-")
    if name in ("demo", *NAMED):
        split = one_of(rest.strip() or split, "the split", SPLITS)
        return read_demo(split).first(max_rows) if name == "demo" else read_named(name, split, check_max_rows(max_rows))
    forms = [*list_data(), "npz:file", "folder:path", "texts:file", "datasets:name", "path/to/file.py:factory"]
    near = get_close_matches(name, forms, n=3, cutoff=0.5) or forms
    path = Path(spec.strip())
    if path.suffix in _PREFIXES or path.is_dir():
        near = [f"{_PREFIXES.get(path.suffix, 'folder')}:{spec.strip()}"]
    raise ValueError(f"no data set {spec!r}; did you mean {', '.join(near)}?")


def _from_folder(text: str) -> ImageFolder:
    match = _FOLDER_OPTIONS.fullmatch(text)
    path, options = (match["path"], match["options"] or "") if match else (text, "")
    _, values = parse_call(f"folder{options}")
    check_options(values, ("size", "mode"), "folder:")
    return open_folder(path.strip(), **values)


def _batches(spec: str, data: Any, batch: int, max_rows: int | None) -> Iterable[Any]:
    """What a function of the user made, in batches."""
    if isinstance(data, ImageData | ImageFolder):
        return data.first(max_rows).batches(batch)
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise TypeError(
            f"{spec} must return something to iterate over (a DataLoader, a list of batches), it returned "
            f"{type(data).__name__}"
        )
    return data if max_rows is None else FirstInputs(data, max_rows)


class FirstInputs:
    """The first inputs of any iterable of batches; the last batch is cut."""

    def __init__(self, batches: Iterable[Any], max_rows: int) -> None:
        self.batches, self.max_rows = batches, max_rows

    def __iter__(self) -> Iterator[Any]:
        left = self.max_rows
        for batch in self.batches:
            batch = dict(batch) if isinstance(batch, Mapping) else batch
            counts = [len(part) for part in tree_leaves(batch) if isinstance(part, Tensor) and part.dim()]
            if not counts:
                raise TypeError(f"cannot cut batches of {type(batch).__name__} without a tensor: do so in the factory")
            count = counts[0]
            yield batch if count <= left else tree_map(partial(_first, count=count, max_rows=left), batch)
            left -= count
            if left <= 0:
                return


def _first(part: Any, count: int, max_rows: int) -> Any:
    return part[:max_rows] if isinstance(part, Tensor) and part.dim() and len(part) == count else part


# Data sets by name, searched for in the folders of SOSIE_DATA

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle_boot"
)  # fmt: skip
OWN_CIFAR100 = (
    "this packed CIFAR-100 mixes the official training and test images into a different split: do not quote official "
    "test accuracy, nor evaluate networks trained on the official training images"
)


def read_demo(split: str) -> ImageData:
    """Return the subset of Fashion-MNIST that comes with sosie: 2000 training, 1000 test images, balanced."""
    path = package_files("sosie.data") / "files" / "demo-fashion-mnist-3k.npz"
    return replace(read_packed(str(path), split=split), name=f"demo-{split}")


@dataclass(frozen=True)
class _PublishedForm:
    """The form in which a data set is published."""

    read: Callable[[Path, str], ImageData | None]  # takes a folder and the split; None if the files are missing
    fetch: Callable[[Any, str, str], object]  # takes torchvision.datasets, a folder and the split
    folders: tuple[str, ...]  # below a folder of SOSIE_DATA
    official: str  # the files to get, in words
    pickled: str = ""  # the folder of the pickled version, which is refused


def read_named(name: str, split: str, max_rows: int | None = None) -> ImageData:
    """Open a data set by name: packed files first, then the official ones, then (if allowed) a download."""
    known, folders = NAMED[name], listed_folders(VARIABLE)
    data = _look(name, split, folders, max_rows)
    if data is None and os.environ.get("SOSIE_DOWNLOAD") == "1":
        if not folders:
            raise FileNotFoundError(f"SOSIE_DOWNLOAD=1 needs a folder to download {name} to: set {VARIABLE}")
        known.fetch(import_library("torchvision.datasets", f"downloading {name}"), str(folders[0]), split)
        data = _look(name, split, folders, max_rows)
    if data is not None:
        return data.first(max_rows)
    looked = f"{VARIABLE} is not set: set it to the folder of your data (or folders, with {os.pathsep!r} between)"
    if folders:
        looked = f"looked in {', '.join(map(str, folders))}"
    for refused in [folder / known.pickled for folder in folders if known.pickled]:
        if refused.is_dir():
            looked += (
                f". {refused} is the pickled version, refused because loading a pickle can run any code: "
                "get the binary version of the same data"
            )
    raise FileNotFoundError(
        f"{name} ({split}) was not found; {looked}. Expected {name}-{split}10k.npz or similar, or {known.official}. "
        "With torchvision installed, SOSIE_DOWNLOAD=1 downloads it."
    )


def _look(name: str, split: str, folders: list[Path], max_rows: int | None) -> ImageData | None:
    for folder in folders:
        if (data := _read_packed_parts(folder, name, split, max_rows)) is not None:
            return data
    for folder in folders:
        for below in (*NAMED[name].folders, "."):
            if (folder / below).is_dir() and (data := NAMED[name].read(folder / below, split)) is not None:
                return data
    return None


def _read_packed_parts(folder: Path, name: str, split: str, max_rows: int | None) -> ImageData | None:
    """Read the largest `name-split10k.npz` in the folder, or all parts of a `name-split49k-a.npz`, `…-b.npz`."""
    pattern = re.compile(rf"{re.escape(name)}-{split}(\d+)k(-[a-z])?\.npz")
    sizes: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := pattern.fullmatch(path.name):
            sizes.setdefault(int(match[1]), []).append(path)
    if not sizes:
        return None
    size, paths = max(sizes.items())
    letters = [path.stem[-1] for path in paths if re.search(r"-[a-z]$", path.stem)]
    wanted = [chr(ord("a") + i) for i in range(max(2, len(letters)))]
    if letters and letters != wanted:
        missing = sorted(set(wanted) - set(letters))
        raise FileNotFoundError(f"{folder} has part {', '.join(letters)} of {name}-{split}{size}k, not {missing}")
    parts: list[ImageData] = []
    for path in paths:
        missing_rows = None if max_rows is None else max_rows - sum(len(part) for part in parts)
        if missing_rows is None or missing_rows > 0:
            parts.append(read_packed(path, split=split, max_rows=missing_rows))
    images = parts[0].images if len(parts) == 1 else torch.cat([part.images for part in parts])
    labels = [part.labels for part in parts if part.labels is not None]
    note = OWN_CIFAR100 if name == "cifar100" else ""
    return ImageData(images, torch.cat(labels) if labels else None, f"{name}-{split}{size}k", parts[0].classes, note)


def _read_cifar10(folder: Path, split: str) -> ImageData | None:
    names = ["test_batch.bin"] if split == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    paths = [folder / name for name in names if (folder / name).is_file()]
    if not paths:
        return None
    if len(paths) < len(names):
        missing = [name for name in names if not (folder / name).is_file()]
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)} of CIFAR-10's five training files")
    return read_cifar(paths, f"cifar10-{split}", label_bytes=1, classes=CIFAR10)


def _read_cifar100(folder: Path, split: str) -> ImageData | None:
    path = folder / f"{split}.bin"
    if not path.is_file():
        return None
    names = folder / "fine_label_names.txt"
    classes = tuple(names.read_text("utf-8").split()) if names.is_file() else ()
    classes = classes if len(classes) == 100 else tuple(map(str, range(100)))
    return read_cifar([path], f"cifar100-{split}", label_bytes=2, classes=classes)


def _fetch_cifar(archive: str, md5: str) -> Callable[[Any, str, str], object]:
    """Fetch the binary archive; torchvision's own CIFAR classes would fetch and unpickle the pickled one."""
    address = f"https://www.cs.toronto.edu/~kriz/{archive}"
    return lambda datasets, root, _: datasets.utils.download_and_extract_archive(address, root, md5=md5)


_FOUR_FILES = "/*-ubyte or *-ubyte.gz (the four idx files)"
NAMED = {
    "cifar10": _PublishedForm(
        _read_cifar10,
        _fetch_cifar("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        ("cifar-10-batches-bin",),
        "cifar-10-batches-bin/*.bin (the official binary version)",
        "cifar-10-batches-py",
    ),
    "cifar100": _PublishedForm(
        _read_cifar100,
        _fetch_cifar("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
        ("cifar-100-binary",),
        "cifar-100-binary/*.bin (the official binary version)",
        "cifar-100-python",
    ),
    "svhn": _PublishedForm(
        read_svhn,
        lambda datasets, root, split: datasets.SVHN(root, split=split, download=True),
        ("svhn", "SVHN"),
        "test_32x32.mat and train_32x32.mat",
    ),
    "mnist": _PublishedForm(
        partial(read_mnist, "mnist", tuple("0123456789")),
        lambda datasets, root, split: datasets.MNIST(root, train=split == "train", download=True),
        ("mnist", "MNIST/raw", "MNIST"),
        "mnist" + _FOUR_FILES,
    ),
    "fashion-mnist": _PublishedForm(
        partial(read_mnist, "fashion-mnist", FASHION),
        lambda datasets, root, split: datasets.FashionMNIST(root, train=split == "train", download=True),
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
        "fashion-mnist" + _FOUR_FILES,
    ),
}

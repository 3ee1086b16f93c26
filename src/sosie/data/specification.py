"""Data from the text that names it, as on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor

from sosie.factory import find_file, is_factory, load_factory, parse_call

from .folder import ImageFolder, open_folder
from .images import Batches, ImageData, check_limit
from .named import NAMED, SPLITS, VARIABLE, read_demo, read_named
from .packed import read_packed

_FOLDER_OPTIONS = re.compile(r"(?P<path>.+?)(?P<options>\(\s*\w+\s*=.*\))?", re.DOTALL)


def list_data() -> list[str]:
    """The data sets known by name; each can be followed by :train or :test."""
    return ["demo", *NAMED]


def open_data(spec: str, *, split: str = "test", batch: int = 256, limit: int | None = None) -> Batches | Iterable[Any]:
    """Batches of the data that a specification names, in a fixed order, as often as they are wanted.

    - `demo`, `cifar10`, `cifar100`, `svhn`, `mnist`, `fashion-mnist`, each with `:train` or `:test` if wanted
      (a split in the text wins); all but the demo are looked for in the folders of SOSIE_DATA
    - `npz:file`: `images` or `x`, and `labels` or `y` if known; as given, then in SOSIE_DATA
    - `folder:path`: image files, sub-folders are classes; `folder:path(size=224, mode='RGB')`
    - `path/to/file.py:factory`: what your own function returns; `split` and `batch` are its affair

    Image batches are (float32 in [0, 1], labels), or the images alone where there are no labels.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"a data specification is text such as 'demo' or 'npz:file', got {spec!r}")
    spec, limit = spec.strip(), check_limit(limit)
    if is_factory(spec):
        return _from_factory(spec, batch, limit)
    return open_images(spec, split=split, limit=limit).batches(batch)


def open_images(spec: str, *, split: str = "test", limit: int | None = None) -> ImageData | ImageFolder:
    """The images themselves (not their batches) of any specification but a `file.py:factory`."""
    kind, _, rest = spec.strip().partition(":")
    if kind == "npz" and rest:
        return read_packed(find_file(rest, VARIABLE), split=_check_split(split), limit=limit)
    if kind == "folder" and rest:
        return _from_folder(rest).first(limit)
    name = kind.strip().lower().replace("_", "-")
    if name in list_data():
        split = _check_split(rest.strip() or split)
        return read_demo(split).first(limit) if name == "demo" else read_named(name, split, check_limit(limit))
    forms = [*list_data(), "npz:file", "folder:path", "path/to/file.py:factory"]
    near = _as_path(spec.strip()) or get_close_matches(name, forms, n=3, cutoff=0.5) or forms
    raise ValueError(f"no data set {spec!r}; did you mean {', '.join(near)}?")


def _as_path(spec: str) -> list[str]:
    """What was meant by a path alone: data in a file or a folder are named with their kind."""
    if Path(spec).suffix == ".npz":
        return [f"npz:{spec}"]
    return [f"folder:{spec}"] if Path(spec).is_dir() else []


def _check_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: {' or '.join(SPLITS)}")
    return split


def _from_folder(text: str) -> ImageFolder:
    match = _FOLDER_OPTIONS.fullmatch(text)
    path, options = (match["path"], match["options"] or "") if match else (text, "")
    _, given = parse_call(f"folder{options}")
    unknown = sorted(set(given) - {"size", "mode"})
    if unknown:
        raise ValueError(f"folder: has no option {', '.join(unknown)}; it takes size and mode")
    return open_folder(path.strip(), **given)


def _from_factory(spec: str, batch: int, limit: int | None) -> Iterable[Any]:
    made = load_factory(spec)()
    if isinstance(made, ImageData | ImageFolder):
        return made.first(limit).batches(batch)
    if isinstance(made, str | bytes) or not isinstance(made, Iterable):
        raise TypeError(
            f"{spec} must return something to iterate over (a DataLoader, a list of batches), "
            f"it returned {type(made).__name__}"
        )
    return made if limit is None else FirstInputs(made, limit)


class FirstInputs:
    """The first inputs of any iterable of batches; the batch that passes the limit is cut."""

    def __init__(self, batches: Iterable[Any], limit: int) -> None:
        self.batches, self.limit = batches, limit

    def __iter__(self) -> Iterator[Any]:
        left = self.limit
        for batch in self.batches:
            count = _count(batch)
            yield batch if count <= left else _cut(batch, count, left)
            left -= count
            if left <= 0:
                return


def _count(batch: Any) -> int:
    """How many inputs a tensor, a tuple or a dict of tensors holds."""
    if isinstance(batch, Tensor) and batch.dim():
        return len(batch)
    parts = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, tuple | list) else ()
    for part in parts:
        if isinstance(part, Tensor) and part.dim():
            return len(part)
    raise TypeError(f"cannot limit batches of {type(batch).__name__} that hold no tensor: limit them in the factory")


def _cut(batch: Any, count: int, left: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[:left] if batch.dim() and len(batch) == count else batch
    if hasattr(batch, "items"):
        return {key: _cut(value, count, left) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_cut(value, count, left) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch

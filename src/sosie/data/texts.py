"""Texts of a file, and data sets of the Hugging Face library: rows of a table as batches of texts or images."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import listed, parse_call
from ..factory import find_file, import_library
from .images import DataBatches

_DATASET = re.compile(r"(?P<name>[^(@:]+)(?P<options>\(.*\))?(?:@(?P<revision>[^:]+))?(?::(?P<split>.+))?", re.DOTALL)
_TEXT_COLUMNS = ("text", "sentence")  # taken if a table has several columns of text
_LABEL_COLUMNS = ("label", "labels")


@dataclass(frozen=True, repr=False)
class Table:
    """One column of a table, with labels if it has some.

    `rows` is a list of texts, or gives a dict of columns for a slice, as a `datasets.Dataset` does.
    """

    rows: Any
    name: str
    column: str
    labels: str | None = None
    first: int | None = None

    def __repr__(self) -> str:
        return f"<Table {self.name}: {len(self)} rows of {self.column!r}>"

    def __len__(self) -> int:
        return len(self.rows) if self.first is None else min(self.first, len(self.rows))

    def read(self, start: int, stop: int) -> Any:
        """Return the inputs from `start` to `stop`, as (inputs, labels) if there are labels."""
        columns = self.rows[start:stop]
        inputs: Any = columns if isinstance(columns, list) else list(columns[self.column])
        if not isinstance(inputs[0], str):
            inputs = _images(inputs, f"{self.name}, rows {start} to {stop - 1}")
        return inputs if self.labels is None else (inputs, torch.tensor(columns[self.labels]))

    def batches(self, size: int) -> DataBatches:
        return DataBatches(self, size)


def read_texts(file: str, variable: str, max_rows: int | None) -> Table:
    """Read a text file of which each line that is not empty is a text."""
    path = find_file(file, variable)
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start})") from error
    if not lines:
        raise ValueError(f"{path} has no text")
    return Table(lines, path.name, "text", first=max_rows)


def open_dataset(text: str, split: str, max_rows: int | None) -> Table:
    """Open `name(config='…', column='…')@revision:split` with the Hugging Face library; no code of a repository runs.

    `name` is a repository of the Hub, or a folder of files that the library can read.
    """
    match = _DATASET.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read datasets:{text}: write datasets:org/name(column='text')@revision:train")
    name, split = match["name"].strip(), match["split"] or split
    options = parse_call(f"datasets{match['options'] or ''}")[1]
    if unknown := options.keys() - {"config", "column"}:
        raise ValueError(f"datasets:{name} has no option {', '.join(sorted(unknown))}; it takes config and column")
    datasets = import_library("datasets", f"datasets:{name}")
    safely = {"trust_remote_code": False} if int(datasets.__version__.partition(".")[0]) < 4 else {}
    try:
        rows = datasets.load_dataset(name, options.get("config"), split=split, revision=match["revision"], **safely)
    except ConnectionError as error:
        raise FileNotFoundError(
            f"datasets:{name}: there is no folder {name} here, and the Hugging Face Hub cannot be reached: check the "
            "network, or download the data elsewhere and name their folder"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"datasets:{text} cannot be opened: {error}") from error
    kinds = {column: _kind(feature) for column, feature in rows.features.items()}
    column = options.get("column") or _main_column(name, kinds)
    if kinds.get(column) not in ("text", "image"):
        raise ValueError(f"datasets:{name}: {column!r} is not a column of texts or images; it has {_described(kinds)}")
    whole = [label for label in _LABEL_COLUMNS if "int" in kinds.get(label, "")]  # as in a .csv file
    labels = next((label for label in [*whole, *kinds] if label in whole or kinds[label] == "labels"), None)
    rows = rows.select_columns([column] if labels is None else [column, labels])
    return Table(rows, f"{Path(name).name}-{split}", column, labels, first=max_rows)


def _kind(feature: Any) -> str:
    """Return what a column holds: text, image, labels, or the type of anything else."""
    kind = type(feature).__name__
    if kind == "Value":
        return "text" if "string" in feature.dtype else str(feature.dtype)
    return {"Image": "image", "ClassLabel": "labels"}.get(kind, kind)


def _main_column(name: str, kinds: dict[str, str]) -> str:
    candidates = [column for column, kind in kinds.items() if kind in ("text", "image")]
    named = [column for column in _TEXT_COLUMNS if column in candidates]
    if len(candidates) == 1 or named:
        return (named or candidates)[0]
    raise ValueError(f"datasets:{name}: which column? datasets:{name}(column='…'); it has {_described(kinds)}")


def _described(kinds: dict[str, str]) -> str:
    return listed([f"{column} ({kind})" for column, kind in kinds.items()], 8)


def _images(images: list[Any], place: str) -> Tensor:
    """Stack images (Pillow's) as float32 (n, channels, height, width) in [0, 1]; they must have one size."""
    mode = "L" if images[0].mode in ("1", "L") else "RGB"
    arrays = [np.asarray(image.convert(mode)) for image in images]
    sizes = sorted({array.shape[:2] for array in arrays})
    if len(sizes) > 1:
        raise ValueError(
            f"{place}: images of sizes {listed([f'{height}×{width}' for height, width in sizes], 4)}, which do not fit "
            "into one batch: resize them in a path/to/file.py:factory"
        )
    stacked = torch.from_numpy(np.stack(arrays)).float() / 255
    return stacked[:, None] if mode == "L" else stacked.permute(0, 3, 1, 2)

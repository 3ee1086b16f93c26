"""Texts of a file, and data sets of the Hugging Face library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sosie.data import open_data

TEXTS = ["a b", "c", "b b a", "a", "c c"]


def test_lines_of_a_file_are_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_text("a b\n\nc\nréseau\n", encoding="utf-8")
    found = open_data(f"texts:{tmp_path / 't.txt'}", batch=2)
    assert (list(found), found.total) == ([["a b", "c"], ["réseau"]], 3)
    assert list(open_data(f"texts:{tmp_path / 't.txt'}", max_rows=1)) == [["a b"]]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no data set 't\.txt'; did you mean texts:t\.txt\?"):
        open_data("t.txt")
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"t\.txt is not text in UTF-8 \(.* at byte 0\)"):
        open_data("texts:t.txt")
    (tmp_path / "t.txt").write_text("\n")
    with pytest.raises(ValueError, match="has no text"):
        open_data("texts:t.txt")


class Value:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class ClassLabel:
    pass


class Image:
    pass


class Rows:
    """What `datasets.Dataset` offers of itself."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
        self.columns, self.features = columns, features

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, part: slice) -> dict[str, list[Any]]:
        return {name: column[part] for name, column in self.columns.items()}

    def select_columns(self, names: list[str]) -> Rows:
        return Rows({name: self.columns[name] for name in names}, {name: self.features[name] for name in names})


def library(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[tuple[Any, ...]]:
    """A stand-in for the library; returns what it was asked for."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: Any, **options: Any) -> Any:
        asked.append((name, config, options))
        if isinstance(rows, Exception):
            raise rows
        return rows

    module = ModuleType("datasets")
    module.__version__, module.load_dataset = "4.0.0", load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_texts_and_labels_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"id": [1, 2, 3, 4, 5], "sentence": TEXTS, "note": TEXTS, "label": [0, 1, 0, 1, 1]}
    features = {"id": Value("int64"), "sentence": Value("string"), "note": Value("large_string"), "label": ClassLabel()}
    asked = library(monkeypatch, Rows(columns, features))
    found = open_data("datasets:org/name(config='small')@v2:validation", batch=3, max_rows=4)
    (first, labels), (rest, _) = found
    assert (first, rest, labels.tolist(), labels.dtype) == (TEXTS[:3], TEXTS[3:4], [0, 1, 0], torch.int64)
    assert asked == [("org/name", "small", {"split": "validation", "revision": "v2"})]
    open_data("datasets:name(column='note')")
    assert asked[-1] == ("name", None, {"split": "test", "revision": None})
    with pytest.raises(
        ValueError, match=r"'id' is not a column of texts or images; it has id \(int64\), sentence \(text\)"
    ):
        open_data("datasets:name(column='id')")
    with pytest.raises(ValueError, match=r"has no option split; it takes config and column"):
        open_data("datasets:name(split='train')")


def test_a_column_has_to_be_named_if_several_may_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, Rows({"a": TEXTS, "b": TEXTS}, {"a": Value("string"), "b": Value("string")}))
    with pytest.raises(ValueError, match=r"which column\? datasets:name\(column='…'\)"):
        open_data("datasets:name")
    assert list(open_data("datasets:name(column='b')", batch=5)) == [TEXTS], "without labels"
    whole = {"text": Value("string"), "label": Value("int64")}
    library(monkeypatch, Rows({"text": TEXTS, "label": [1, 0, 2, 0, 1]}, whole))
    ((_, labels),) = open_data("datasets:folder", batch=5)
    assert labels.tolist() == [1, 0, 2, 0, 1], "whole numbers, as a .csv file has them"


def test_images_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    pillow = pytest.importorskip("PIL.Image")
    arrays = [np.full((4, 5, 3), 51 * k, np.uint8) for k in range(3)]
    library(monkeypatch, Rows({"image": [pillow.fromarray(array) for array in arrays]}, {"image": Image()}))
    (found,) = open_data("datasets:name")
    assert found.shape == (3, 3, 4, 5)
    torch.testing.assert_close(found[:, 0, 0, 0], torch.tensor([0, 0.2, 0.4]))
    others = [pillow.fromarray(arrays[0]), pillow.fromarray(arrays[1][:2])]
    library(monkeypatch, Rows({"image": others}, {"image": Image()}))
    with pytest.raises(ValueError, match=r"rows 0 to 1: images of sizes 2×5, 4×5, which do not fit"):
        list(open_data("datasets:name"))


def test_without_the_library_or_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, ConnectionError("Couldn't reach the Hub"))
    with pytest.raises(FileNotFoundError, match=r"there is no folder org/name here, and the .* Hub cannot be reached"):
        open_data("datasets:org/name")
    library(monkeypatch, ValueError("Unknown split 'test'. Should be one of ['train']."))
    with pytest.raises(ValueError, match=r"datasets:org/name cannot be opened: Unknown split"):
        open_data("datasets:org/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="datasets:org/name needs datasets, which is not installed"):
        open_data("datasets:org/name")

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sosie.data import DataBatches, DataPart, list_data, open_data, open_images


def test_names() -> None:
    assert list_data() == ["demo", "cifar10", "cifar100", "svhn", "mnist", "fashion-mnist"]


def test_the_demo_in_batches() -> None:
    batches = open_data("demo", batch=100, max_rows=250)
    assert isinstance(batches, DataBatches)
    assert (batches.total, len(batches), batches.name) == (250, 3, "demo-test")
    x, y = next(iter(batches))
    assert (x.shape, x.dtype, y.dtype) == ((100, 1, 28, 28), torch.float32, torch.int64)
    assert 0 <= x.min() < x.max() <= 1


def test_npz_as_given_or_in_the_listed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 8, 8), np.uint8))
    assert open_data(f"npz:{tmp_path / 'mine.npz'}").total == 4
    with pytest.raises(FileNotFoundError, match="set SOSIE_DATA"):
        open_data("npz:mine.npz")
    monkeypatch.setenv("SOSIE_DATA", str(tmp_path))
    (x,) = open_data("npz:mine.npz", max_rows=3)
    assert x.shape == (3, 1, 8, 8)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "a data specification is text"),
        ("cifar", "did you mean cifar10"),
        ("zzz", "did you mean demo, cifar10"),
        ("mine.npz", "did you mean npz:mine.npz"),
        (".", "did you mean folder:."),
        ("npz:", "did you mean npz:file"),
        ("demo:validation", "the split must be one of 'train', 'test', got 'validation'"),
        ("data.py", "names no function"),
    ],
)
def test_specifications_that_cannot_be_read(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_data(spec)


def test_splits_and_underscores() -> None:
    with pytest.raises(ValueError, match=r"the split must be .*'train', 'test', got 'dev'"):
        open_data("demo", split="dev")
    with pytest.raises(FileNotFoundError, match="fashion-mnist"):
        open_data("Fashion_MNIST")


FACTORIES = """
import torch
from collections import namedtuple
from sosie.data import ImageData
Pair = namedtuple("Pair", "x y")
def tensors(): return [torch.arange(4.0), torch.arange(4.0)]
def pairs(): return [(torch.zeros(4, 2), torch.arange(4), "kept")] * 2
def named(): return [Pair(torch.zeros(4, 2), torch.arange(4))]
def dicts(size=4): return [{"ids": torch.zeros(size, 3), "flag": True}] * 2
def images(): return ImageData(torch.zeros(5, 1, 2, 2))
def number(): return 5
def text(): return "cifar10"
def strange(): return [{"a", "b"}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mydata.py").write_text(FACTORIES)
    return tmp_path / "mydata.py"


def test_your_own_factory_is_passed_through(file: Path) -> None:
    assert len(open_data(f"{file}:tensors")) == 2
    assert len(open_data(f"{file}:dicts(size=7)")[0]["ids"]) == 7
    assert open_data(f"{file}:images", batch=2, max_rows=3).total == 3


def test_the_limit_cuts_any_batch(file: Path) -> None:
    limited = open_data(f"{file}:tensors", max_rows=6)
    assert [len(x) for x in limited] == [len(x) for x in limited] == [4, 2]
    (x, y, word) = next(iter(open_data(f"{file}:pairs", max_rows=3)))
    assert (x.shape, y.tolist(), word) == ((3, 2), [0, 1, 2], "kept")
    assert [batch["ids"].shape[0] for batch in open_data(f"{file}:dicts", max_rows=5)] == [4, 1]
    (pair,) = open_data(f"{file}:named", max_rows=2)
    assert pair.y.tolist() == [0, 1]
    assert len(list(open_data(f"{file}:tensors", max_rows=4))) == 1


def test_what_a_factory_must_return(file: Path) -> None:
    for name in ("number", "text"):
        with pytest.raises(TypeError, match=f"{name} must return something to iterate over"):
            open_data(f"{file}:{name}")
    with pytest.raises(TypeError, match="batches of set"):
        list(open_data(f"{file}:strange", max_rows=1))
    with pytest.raises(ValueError, match="no data set"):
        open_images(f"{file}:images")


@pytest.mark.parametrize("first_row", [-1, 1.5, 2**70])
def test_a_part_begins_at_a_whole_number(first_row: object) -> None:
    with pytest.raises(ValueError, match="first_row must be a whole number from 0 to"):
        DataPart([], first_row)  # type: ignore[arg-type]

"""Named sets, from small files written here in the published formats."""

from __future__ import annotations

import gzip
import os
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.io import savemat

from sosie.data import list_data, open_data, open_images
from sosie.files import DamagedFile

RANDOM = np.random.default_rng(0)


def cifar(path: Path, labels: list[list[int]]) -> np.ndarray:
    """One record per row of labels; the pixels come back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RANDOM.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    path.write_bytes(np.hstack([np.array(labels, np.uint8), pixels]).tobytes())
    return pixels.reshape(-1, 3, 32, 32)


def idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "sets").mkdir()
    monkeypatch.setenv("SOSIE_DATA", os.pathsep.join([str(tmp_path / "empty"), str(tmp_path / "sets")]))
    return tmp_path / "sets"


def test_the_demo_is_shipped() -> None:
    test, train = open_images("demo"), open_images("demo:train")
    assert test.images.shape == (1000, 1, 28, 28)
    assert train.images.shape == (2000, 1, 28, 28)
    assert test.labels.bincount().tolist() == [100] * 10
    assert test.classes[9] == "Ankle_boot"
    assert (test.name, train.name) == ("demo-test", "demo-train")
    assert torch.equal(open_images("demo", split="train").images, train.images)


def test_every_name_says_where_it_looked(place: Path) -> None:
    for name in set(list_data()) - {"demo"}:
        with pytest.raises(FileNotFoundError, match=rf"{name} \(train\) was not found; looked in .*sets") as caught:
            open_data(f"{name}:train")
        assert "SOSIE_DOWNLOAD=1" in str(caught.value)


def test_no_folder_listed() -> None:
    with pytest.raises(FileNotFoundError, match="SOSIE_DATA is not set"):
        open_data("cifar10")


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "."])
def test_cifar10_binary(place: Path, folder: str) -> None:
    pixels = cifar(place / folder / "test_batch.bin", [[3], [9]])
    data = open_images("cifar10")
    assert np.array_equal(data.images.numpy(), pixels)
    assert data.labels.tolist() == [3, 9]
    assert data.classes[9] == "truck"
    for i in range(1, 6):
        cifar(place / folder / f"data_batch_{i}.bin", [[i]])
    assert open_images("cifar10:train").labels.tolist() == [1, 2, 3, 4, 5]
    (place / folder / "data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_4\.bin"):
        open_images("cifar10:train")


def test_cifar100_binary_takes_the_fine_label(place: Path) -> None:
    cifar(place / "cifar-100-binary" / "test.bin", [[1, 77], [2, 5]])
    data = open_images("cifar100:test")
    assert data.labels.tolist() == [77, 5]
    assert data.classes[77] == "77"
    assert data.note == ""
    (place / "cifar-100-binary" / "fine_label_names.txt").write_text("\n".join(f"name{i}" for i in range(100)))
    assert open_images("cifar100").classes[77] == "name77"


def test_damaged_cifar(place: Path) -> None:
    cifar(place / "test_batch.bin", [[10]])
    with pytest.raises(DamagedFile, match="label 10 beyond its 10 classes"):
        open_data("cifar10")
    (place / "test_batch.bin").write_bytes(b"\0" * 5000)
    with pytest.raises(DamagedFile, match="5,000 bytes, not a multiple of 3073"):
        open_data("cifar10")


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_pickled_cifar_is_refused(place: Path, name: str, folder: str) -> None:
    (place / folder).mkdir()
    with pytest.raises(FileNotFoundError, match=f"{folder} is the pickled version, refused .*binary version"):
        open_data(name)


def test_svhn(place: Path) -> None:
    images = RANDOM.integers(0, 256, (32, 32, 3, 2), dtype=np.uint8)
    savemat(place / "test_32x32.mat", {"X": images, "y": np.array([[10], [7]], np.uint8)})
    data = open_images("svhn")
    assert data.labels.tolist() == [0, 7]
    assert np.array_equal(data.images[1, :, 4, 5].numpy(), images[4, 5, :, 1])
    savemat(place / "test_32x32.mat", {"X": images[:, :8], "y": np.array([[1], [7]])})
    with pytest.raises(DamagedFile, match=r"\(32, 8, 3, 2\)"):
        open_data("svhn")
    savemat(place / "test_32x32.mat", {"Z": images})
    with pytest.raises(DamagedFile, match="no X and y"):
        open_data("svhn")
    (place / "test_32x32.mat").write_bytes(b"MATLAB" * 30)
    with pytest.raises(DamagedFile, match="MATLAB file"):
        open_data("svhn")


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "fashion-mnist"), ("mnist", ".")]
)
def test_idx_files(place: Path, name: str, folder: str, suffix: str) -> None:
    images = RANDOM.integers(0, 256, (3, 28, 28), dtype=np.uint8)
    idx(place / folder / f"t10k-images-idx3-ubyte{suffix}", images)
    idx(place / folder / f"t10k-labels-idx1-ubyte{suffix}", np.array([4, 0, 9], np.uint8))
    data = open_images(name)
    assert np.array_equal(data.images[:, 0].numpy(), images)
    assert data.labels.tolist() == [4, 0, 9]
    assert data.name == f"{name}-test"


def test_the_two_sets_of_the_same_file_names_are_told_apart(place: Path) -> None:
    labels = np.array([9, 2, 1, 1, 6, 1, 4, 6, 5, 7, 0], np.uint8)  # as Fashion-MNIST's test set begins
    idx(place / "t10k-images-idx3-ubyte", np.zeros((11, 28, 28), np.uint8))
    idx(place / "t10k-labels-idx1-ubyte", labels)
    assert open_images("fashion-mnist").classes[9] == "Ankle_boot"
    with pytest.raises(ValueError, match=r"is fashion-mnist \(test\), not mnist \(test\)"):
        open_data("mnist")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x08\x03abc", "not an idx file"),
        (b"\0\0\x08\x01\0\0\0\x05abc", r"\(5,\)"),
    ],
)
def test_damaged_idx(place: Path, content: bytes, message: str) -> None:
    for stem in ("images-idx3", "labels-idx1"):
        (place / f"t10k-{stem}-ubyte").write_bytes(content)
    with pytest.raises(DamagedFile, match=message):
        open_data("mnist")
    for stem in ("images-idx3", "labels-idx1"):
        (place / f"t10k-{stem}-ubyte").unlink()
        (place / f"t10k-{stem}-ubyte.gz").write_bytes(gzip.compress(bytes(100))[:-9])
    with pytest.raises(DamagedFile, match="not a whole gzip file"):
        open_data("mnist")


def packed(path: Path, first: int, count: int = 3) -> None:
    np.savez(path, images=np.zeros((count, 32, 32, 3), np.uint8), labels=np.arange(first, first + count))


def test_packed_files_come_first_and_parts_are_joined(place: Path) -> None:
    cifar(place / "cifar-100-binary" / "train.bin", [[1, 77]])
    packed(place / "cifar100-train49k-a.npz", 0)
    with pytest.raises(FileNotFoundError, match=r"has part a of cifar100-train49k, not \['b'\]"):
        open_data("cifar100:train")
    packed(place / "cifar100-train49k-b.npz", 50)
    data = open_images("cifar100:train")
    assert data.labels.tolist() == [0, 1, 2, 50, 51, 52]
    assert data.name == "cifar100-train49k"
    assert "do not quote official test accuracy" in data.note
    assert open_images("cifar100:train", max_rows=4).labels.tolist() == [0, 1, 2, 50]
    assert open_images("cifar100:train", max_rows=2).labels.tolist() == [0, 1]


def test_the_largest_packed_file_is_taken(place: Path) -> None:
    packed(place / "cifar10-train2k.npz", 0)
    packed(place / "cifar10-train10k.npz", 5)
    assert open_images("cifar10", split="train").name == "cifar10-train10k"


def test_the_published_packed_files(shared: Path) -> None:
    for name, shape in [("mnist", (1, 28, 28)), ("fashion-mnist", (1, 28, 28)), ("cifar100", (3, 32, 32))]:
        data = open_images(name, max_rows=20)
        assert data.images.shape == (20, *shape)
        assert data.classes
    assert open_images("mnist").labels[:4].tolist() == [7, 2, 1, 0]


def test_download_only_when_asked_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def mnist(root: str, train: bool, download: bool) -> None:
        calls.append((root, train, download))
        raw = Path(root) / "MNIST" / "raw"
        idx(raw / "t10k-images-idx3-ubyte", np.zeros((2, 28, 28), np.uint8))
        idx(raw / "t10k-labels-idx1-ubyte", np.array([1, 2], np.uint8))

    def archive(url: str, root: str, md5: str) -> None:
        assert url.endswith("cifar-10-binary.tar.gz")
        cifar(Path(root) / "cifar-10-batches-bin" / "test_batch.bin", [[3]])

    datasets = ModuleType("torchvision.datasets")
    datasets.MNIST = mnist
    datasets.utils = SimpleNamespace(download_and_extract_archive=archive)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    with pytest.raises(FileNotFoundError, match="SOSIE_DOWNLOAD=1 downloads it"):
        open_data("mnist")
    assert not calls
    monkeypatch.setenv("SOSIE_DOWNLOAD", "1")
    assert open_images("mnist").labels.tolist() == [1, 2]
    assert calls == [(str(place.parent / "empty"), False, True)]
    assert open_images("cifar10").labels.tolist() == [3]
    monkeypatch.delenv("SOSIE_DATA")
    with pytest.raises(FileNotFoundError, match="set SOSIE_DATA"):
        open_data("mnist")


def test_download_without_torchvision(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOSIE_DOWNLOAD", "1")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="pip install torchvision"):
        open_data("svhn")

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from sosie.data import open_images
from sosie.data.images import read_packed
from sosie.files import DamagedFile

RANDOM = np.random.default_rng(0)
COLOUR = RANDOM.integers(0, 256, (5, 8, 6, 3), dtype=np.uint8)


def pack(images: np.ndarray) -> np.ndarray:
    """The inverse of unpacking, written out: G, R - G, B - G, then differences, modulo 256."""
    red, green, blue = np.moveaxis(images, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    planes = np.diff(planes, axis=3, prepend=np.uint8(0))
    return np.diff(planes, axis=2, prepend=np.uint8(0))


def save(path: Path, **arrays: object) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def test_planes_come_back_exactly(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", planes=pack(COLOUR), labels=np.arange(5, dtype=np.uint8))
    data = read_packed(path)
    assert np.array_equal(data.images.numpy(), COLOUR.transpose(0, 3, 1, 2))
    assert data.labels.tolist() == [0, 1, 2, 3, 4]
    part = read_packed(path, max_rows=2)
    assert torch.equal(part.images, data.images[:2])
    assert len(part.labels) == 2


@pytest.mark.parametrize(
    ("images", "shape"),
    [
        (COLOUR, (5, 3, 8, 6)),
        (COLOUR.transpose(0, 3, 1, 2), (5, 3, 8, 6)),
        (COLOUR[..., 0], (5, 1, 8, 6)),
        (COLOUR[..., :1] / 255, (5, 1, 8, 6)),
        ((COLOUR / 255).astype(">f4"), (5, 3, 8, 6)),
    ],
)
@pytest.mark.parametrize("keys", [("images", "labels"), ("x", "y"), ("test_images", "test_labels")])
def test_layouts_and_keys(tmp_path: Path, images: np.ndarray, shape: tuple, keys: tuple[str, str]) -> None:
    path = save(tmp_path / "a.npz", **{keys[0]: images, keys[1]: np.arange(5)})
    data = read_packed(path, max_rows=5)
    assert data.images.shape == shape
    assert len(data.labels) == 5
    pixel = float(next(iter(data.batches(1)))[0][0, 0, 1, 2])
    assert pixel == pytest.approx(COLOUR[0, 1, 2, 0] / 255)


def test_jpeg_files_end_to_end(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    files = []
    for shade in (0, 200):
        buffer = io.BytesIO()
        Image.new("L" if shade else "RGB", (4, 6), shade).save(buffer, "JPEG")
        files.append(np.frombuffer(buffer.getvalue(), np.uint8))
    offsets = np.cumsum([0, *map(len, files)])
    path = save(tmp_path / "a.npz", jpeg=np.concatenate(files), offsets=offsets, labels=np.array([3, 4]))
    data = read_packed(path)
    assert data.images.shape == (2, 3, 6, 4)
    assert data.images[1].unique().tolist() == [200]
    assert len(read_packed(path, max_rows=1)) == 1
    for bad in (offsets + 10, offsets[::-1], offsets[:1]):
        save(tmp_path / "b.npz", jpeg=np.concatenate(files), offsets=bad)
        with pytest.raises(DamagedFile, match="offsets do not fit"):
            read_packed(tmp_path / "b.npz")
    save(tmp_path / "c.npz", jpeg=np.zeros(offsets[-1], np.uint8), offsets=offsets)
    with pytest.raises(ValueError, match=r"image 0 of .*c\.npz cannot be read"):
        read_packed(tmp_path / "c.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": COLOUR}, "its keys are pictures"),
        ({"images": COLOUR.astype(np.int32)}, "int32"),
        ({"images": COLOUR.astype(np.longdouble)}, "torch lacks|must be"),
        ({"images": COLOUR / 1.0}, r"must lie in \[0, 1\]"),
        ({"images": np.zeros((2, 3, 5, 3), np.uint8)}, "channels may be second or last"),
        ({"images": np.zeros((16, 9, 28, 28), np.uint8)}, r"\(16, 9, 28, 28\), with no axis"),
        ({"images": np.zeros(7, np.uint8)}, r"\(7,\)"),
        ({"planes": COLOUR}, r"planes.*\(3, N, H, W\)"),
        ({"images": COLOUR, "labels": np.arange(4)}, "5 images but 4 labels"),
        ({"planes": pack(COLOUR), "labels": np.arange(9)}, "5 images but 9 labels"),
        ({"images": COLOUR, "labels": np.eye(5)}, r"whole numbers.*float64 \(5, 5\)"),
        (
            {"images": COLOUR, "labels": np.arange(5), "class_names": np.array(["a", "b"])},
            "labels 0 to 4 for 2",
        ),
        ({"images": COLOUR, "class_names": np.arange(5)}, "list of text"),
        ({"images": np.array([{}], dtype=object)}, "without unpickling"),
    ],
)
def test_wrong_content_is_named(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_packed(save(tmp_path / "a.npz", **arrays), max_rows=5)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.98])
def test_a_file_that_was_cut_off(tmp_path: Path, keep: float) -> None:
    path = save(tmp_path / "a.npz", images=COLOUR)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=r"a\.npz"):
        read_packed(path)


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", images=COLOUR)
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"a\.npz"):
        read_packed(path)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", COLOUR)
    with pytest.raises(ValueError, match="single array"):
        read_packed(tmp_path / "a.npy")
    (tmp_path / "a.npz").write_bytes(b"\x80\x04]\x94.")
    with pytest.raises(ValueError, match="unpickling"):
        read_packed(tmp_path / "a.npz")
    with pytest.raises(IsADirectoryError, match="write folder:"):
        read_packed(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        read_packed(tmp_path / "none.npz")


def test_the_published_files(shared: Path) -> None:
    data = open_images("npz:cifar10-test10k.npz", max_rows=300)
    assert data.images.shape == (300, 3, 32, 32)
    assert data.classes[3] == "cat"
    assert data.labels[:5].tolist() == [3, 8, 8, 0, 6]  # the official order: cat, ship, ship, airplane, frog
    mean = (data.images.double() / 255).mean((0, 2, 3))
    torch.testing.assert_close(mean, torch.tensor([0.4914, 0.4822, 0.4465]).double(), atol=0.02, rtol=0)
    with pytest.raises(ValueError, match=r"\(16, 1000, 28, 28\)"):
        open_images("npz:mnist-c-regenerated-1k.npz")
    with pytest.raises(ValueError, match="its keys are predictions"):
        open_images("npz:cifar10-test-predictions.npz")

from __future__ import annotations

import pytest
import torch

from sosie.data import DataBatches, ImageData


def some(count: int = 10, **options: object) -> ImageData:
    images = torch.arange(count * 4, dtype=torch.uint8).view(count, 1, 2, 2)
    return ImageData(images, torch.arange(count), **options)


def test_batches_are_the_same_on_every_pass() -> None:
    batches = some().batches(4)
    assert isinstance(batches, DataBatches)
    assert (len(batches), batches.total) == (3, 10)
    once, again = list(batches), list(batches)
    assert [len(x) for x, _ in once] == [4, 4, 2]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(once, again, strict=True))
    x, y = once[1]
    assert x.dtype == torch.float32
    torch.testing.assert_close(x[0].flatten() * 255, torch.tensor([16.0, 17.0, 18.0, 19.0]))
    assert y.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_a_model_that_works_in_place_does_not_change_the_data(kind: torch.dtype) -> None:
    data = ImageData(torch.ones(2, 1, 2, 2).to(kind))
    for x in data.batches(2):
        x.zero_()
    assert data.images.all()


def test_without_labels_the_images_come_alone() -> None:
    batches = list(ImageData(torch.zeros(3, 1, 2, 2)).batches(2))
    assert [x.shape[0] for x in batches] == [2, 1]


def test_parts() -> None:
    data = some(classes=tuple("abcdefghij"), name="letters", note="mind the gap")
    assert data[2:5].labels.tolist() == [2, 3, 4]
    assert data[::-3].labels.tolist() == [9, 6, 3, 0]
    assert (len(data.first(4)), len(data.first(99)), len(data.first(None))) == (4, 10, 10)
    assert (data.first(4).name, data.first(4).note) == ("letters", "mind the gap")
    assert data.first(4).images.data_ptr() == data.images.data_ptr()  # a view, not a copy
    assert repr(data) == "ImageData('letters', (10, 1, 2, 2), uint8, 10 classes)"
    with pytest.raises(TypeError, match=r"data\[3\]"):
        data[3]
    with pytest.raises(ValueError, match="empty"):
        data[20:]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_sizes_and_limits_are_whole_numbers(bad: object) -> None:
    with pytest.raises(ValueError, match="whole number of at least 1"):
        some().batches(bad)
    with pytest.raises(ValueError, match="whole number of at least 1"):
        some().first(bad)


@pytest.mark.parametrize(
    ("images", "labels", "kind", "message"),
    [
        (torch.zeros(3, 2, 2), None, ValueError, r"got \(3, 2, 2\)"),
        (torch.zeros(0, 1, 2, 2), None, ValueError, "no images"),
        (torch.zeros(2, 1, 2, 2, dtype=torch.int64), None, TypeError, "int64"),
        (torch.full((2, 1, 2, 2), 255.0), None, ValueError, r"found 255 to 255; divide by 255"),
        (torch.full((2, 1, 2, 2), torch.nan), None, ValueError, "found nan"),
        (torch.zeros(2, 1, 2, 2), torch.tensor([0]), ValueError, r"2 images but labels of shape \(1,\)"),
        (torch.zeros(2, 1, 2, 2), torch.tensor([0.0, 1.0]), TypeError, "labels are int64"),
        (torch.zeros(2, 1, 2, 2), torch.tensor([0, 3]), ValueError, "labels 0 to 3 for 2 classes"),
    ],
)
def test_what_is_not_image_data(
    images: torch.Tensor, labels: torch.Tensor | None, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ImageData(images, labels, "set", ("a", "b"))

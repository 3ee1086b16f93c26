"""Images in memory, and the batches that walk over them in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import whole_number

Batch = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches in the order of the source, the same on every pass; the last one may be smaller."""

    source: Any  # ImageData or ImageFolder: has a name, a length and `read(start, stop)`
    size: int = 256

    def __post_init__(self) -> None:
        whole_number(self.size, "the batch size", least=1)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def total(self) -> int:
        """The number of inputs of one pass, without reading any."""
        return len(self.source)

    def __len__(self) -> int:
        return -(-self.total // self.size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.total, self.size):
            yield self.read(start, min(start + self.size, self.total))

    def read(self, start: int, stop: int) -> Batch:
        """The inputs from `start` to `stop`, whichever batches they belong to."""
        return self.source.read(start, stop)


@dataclass(frozen=True, eq=False, repr=False)
class ImageData:
    """Images (N, channels, height, width) with labels (N,), if there are any.

    Kept as they are stored, uint8 or floating point in [0, 1], and turned into float32 batch by batch. `note`
    says what a reader of a result should know about the set.
    """

    images: Tensor
    labels: Tensor | None = None
    name: str = "images"
    classes: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        if self.images.dim() != 4:
            raise ValueError(f"{self.name}: images are (N, channels, height, width), got {shape}")
        if not (self.images.dtype == torch.uint8 or self.images.is_floating_point()):
            raise TypeError(f"{self.name}: images are uint8 or floating point in [0, 1], got {self.images.dtype}")
        if not len(self.images):
            raise ValueError(f"{self.name} holds no images")
        if self.images.is_floating_point():
            low, high = (float(edge) for edge in torch.aminmax(self.images))
            if not (low >= 0 and high <= 1):  # also where they are NaN
                raise ValueError(
                    f"{self.name}: floating-point images must lie in [0, 1], found {low:.4g} to {high:.4g}; "
                    "divide by 255, or yield images already normalised from your own path/to/file.py:factory"
                )
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
        """A set of these images alone."""
        if not isinstance(part, slice):
            raise TypeError(f"take a part as data[10:20], not data[{part!r}]")
        indices = range(len(self))[part]
        if not len(indices):
            raise ValueError(f"{self.name}[{part.start}:{part.stop}] of {len(self)} images is empty")
        chosen = part if (part.step or 1) > 0 else list(indices)  # tensors cannot step backwards
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, images=self.images[chosen], labels=labels)

    def first(self, count: int | None) -> ImageData:
        """At most the first `count` images; all of them for None."""
        return self if check_limit(count) is None else self[:count]

    def read(self, start: int, stop: int) -> Batch:
        """Images as float32 in [0, 1], with their labels where there are any."""
        x = to_float(self.images[start:stop])
        return x if self.labels is None else (x, self.labels[start:stop].clone())

    def batches(self, size: int = 256) -> Batches:
        return Batches(self, size)


def to_float(images: Tensor) -> Tensor:
    """uint8 to float32 in [0, 1]; floating point to float32. Always a copy: a model may work in place."""
    copy = images.to(torch.float32, copy=True)
    return copy.div_(255) if images.dtype == torch.uint8 else copy


def check_limit(limit: int | None) -> int | None:
    """A number of inputs from 1 up, or None for all."""
    return None if limit is None else whole_number(limit, "the limit", least=1, why="a number of inputs; None is all")

"""Images that stay on the device as bytes; tasks, and what each of many networks is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from settings import Settings
from torch import Tensor, nn

from sosie.data import open_images
from sosie.factory import listed_folders

MEAN, STD = (0.5075, 0.4867, 0.4411), (0.2673, 0.2565, 0.2762)  # of CIFAR-100; for all, since networks see others too
TINY = "tiny-imagenet-32.npz"  # pack.py makes it
NETS = Path(__file__).parent / "nets"


@dataclass(frozen=True, eq=False)
class Pool:
    """Images (N, 3, 32, 32) as bytes, and their classes."""

    images: Tensor
    labels: Tensor

    def of(self, classes: Sequence[int], a_class: int | None = None) -> Tensor:
        """Numbers of the images of these classes, in turn (any beginning is balanced), at most so many of each."""
        each = [(self.labels == c).nonzero().flatten() for c in classes]
        count = min(len(one) for one in each)
        if not count:
            raise ValueError(f"no image of one of the classes {list(classes)}")
        return torch.stack([one[: min(count, a_class or count)] for one in each], 1).flatten()

    def merge(self, other: Pool) -> Pool:
        """Both; the classes of the other are numbered after ours."""
        first = int(self.labels.max()) + 1
        return Pool(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels + first]))


@lru_cache
def pool(settings: Settings, name: str, split: str) -> Pool:
    """A data set on the device; digits get a black border and three equal channels."""
    found = open_images(name, split=split, max_rows=settings.limit)
    assert found.labels is not None
    images, labels = found.images, found.labels
    if images.shape[1] == 1:
        border = (32 - images.shape[-1]) // 2
        images = nn.functional.pad(images, [border] * 4).expand(-1, 3, -1, -1).contiguous()
    return Pool(images.to(settings.device), labels.to(settings.device))


def probes(settings: Settings, name: str = "cifar100") -> Tensor:
    """The first test images, as bytes: the packed sets hold their classes in turn, MNIST's own order is mixed."""
    if name == "tiny-imagenet":
        images = tiny_imagenet(settings)
    else:
        images = pool(settings, name, "test").images
    if len(images) < settings.probes.images:
        raise ValueError(f"{name} has {len(images)} images to probe with, {settings.probes.images} are wanted")
    return images[: settings.probes.images]


def tiny_imagenet(settings: Settings) -> Tensor:
    for folder in [*listed_folders("SOSIE_DATA"), NETS]:
        if (folder / TINY).is_file():
            with np.load(folder / TINY, allow_pickle=False) as found:
                return torch.from_numpy(found["images"]).permute(0, 3, 1, 2).contiguous().to(settings.device)
    raise FileNotFoundError(f"{TINY} is in no folder of SOSIE_DATA, nor in {NETS}: papers/atoms/pack.py makes it")


@dataclass(frozen=True, eq=False)
class Lessons:
    """What each of N networks learns: numbers of images (N, n) and its own labels of them, from 0 on."""

    index: Tensor
    labels: Tensor

    @staticmethod
    def of(images: Pool, tasks: Sequence[Sequence[int]], limit: int | None = None) -> Lessons:
        """One task, a list of classes, for each network; every one gets equally many images."""
        index = [images.of(classes) for classes in tasks]
        least = min(len(one) for one in index)
        count = min(least, limit or least)
        rows = torch.stack([one[:count] for one in index])
        return Lessons(rows, own_labels(images.labels[rows], tasks))

    def repeat(self, times: int) -> Lessons:
        return Lessons(self.index.repeat(times, 1), self.labels.repeat(times, 1))

    def __getitem__(self, which: slice | list[int]) -> Lessons:
        return Lessons(self.index[which], self.labels[which])


def own_labels(labels: Tensor, tasks: Sequence[Sequence[int]]) -> Tensor:
    """Classes (N, n) as numbers within each network's own list of classes."""
    own = torch.tensor([list(task) for task in tasks], device=labels.device)
    return (labels[:, :, None] == own[:, None, :]).int().argmax(2)


class Prepare:
    """Bytes to normalised floats, on their device; the constants are kept there, so that nothing waits for them."""

    def __init__(self, settings: Settings) -> None:
        device = settings.device
        self.mean = torch.tensor(MEAN, device=device).view(3, 1, 1) * 255
        self.scale = 1 / (torch.tensor(STD, device=device).view(3, 1, 1) * 255)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_floating_point():  # [0, 1], from loops that turn bytes into floats themselves
            return (x * 255 - self.mean) * self.scale
        return (x.float() - self.mean) * self.scale


def class_tasks(tasks: int, classes: int) -> list[list[int]]:
    """Classes in their order, so many a task."""
    return [list(range(k * classes, (k + 1) * classes)) for k in range(tasks)]

"""Images that stay on the device as bytes, (N, 3, 32, 32), in the order of their files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from settings import Settings, Source, Target
from torch import Tensor
from torch.nn import functional

from sosie.data import open_images
from sosie.factory import listed_folders

NORMALISE = "mean .5 .5 .5 std .25 .25 .25"  # one for all: networks see the data of others
FILES = {  # the first that is there; a part of a set is enough
    ("mnist", "train"): ("mnist-train10k.npz",),
    ("mnist", "test"): ("mnist-test10k.npz",),
    ("fashion-mnist", "train"): ("fashion-mnist-train10k.npz",),
    ("fashion-mnist", "test"): ("fashion-mnist-test10k.npz",),
    ("cifar10", "train"): ("cifar10-train50k-a.npz", "cifar10-train10k.npz"),
    ("cifar10", "test"): ("cifar10-test10k.npz",),
    ("cifar100", "train"): ("cifar100-train49k-a.npz",),
    ("cifar100", "test"): ("cifar100-test10k.npz",),
    ("tiny-imagenet", "train"): ("tiny-imagenet-32-train.npz",),  # papers/atoms/pack.py makes these two
    ("tiny-imagenet", "test"): ("tiny-imagenet-32.npz",),
}


@dataclass(frozen=True, eq=False)
class Images:
    """Images as bytes and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, some: slice) -> Images:
        return Images(self.images[some], self.labels[some])

    def of(self, classes: Sequence[int]) -> Images:
        """Those of some classes, in turn, so that any beginning is balanced; labels count from 0."""
        each = [(self.labels == c).nonzero().flatten() for c in classes]
        count = min(map(len, each))
        if not count:
            raise ValueError(f"no image of one of the classes {list(classes)}")
        index = torch.stack([one[:count] for one in each], 1).flatten()
        labels = torch.arange(len(classes), device=index.device).repeat(count)
        return Images(self.images[index], labels)


@lru_cache
def whole(settings: Settings, name: str, split: str) -> Images:
    """A data set on the device; grey images get a black border and three equal channels."""
    if settings.synthetic:
        return _random(settings, name, split)
    if name == "tiny-imagenet":
        with np.load(_find(name, split), allow_pickle=False) as found:
            images = torch.from_numpy(found["images"]).permute(0, 3, 1, 2).contiguous()
            labels = torch.from_numpy(found["labels"].astype(np.int64))
    else:
        opened = open_images(f"npz:{_find(name, split)}", split=split)
        assert opened.labels is not None
        images, labels = opened.images, opened.labels.long()
    if images.shape[1] == 1:
        border = (32 - images.shape[-1]) // 2
        images = functional.pad(images, [border] * 4).expand(-1, 3, -1, -1).contiguous()
    return Images(images.to(settings.device), labels.to(settings.device))


def _find(name: str, split: str) -> Path:
    for file in FILES[name, split]:
        for folder in listed_folders("SOSIE_DATA"):
            if (folder / file).is_file():
                return folder / file
    raise FileNotFoundError(f"{' or '.join(FILES[name, split])} is in no folder of SOSIE_DATA: README.md says whence")


def _random(settings: Settings, name: str, split: str) -> Images:
    """Classes differ in their mean, so that something can be learnt."""
    classes, each = 10, 2 * settings.sources[0].half // 3
    generator = torch.Generator().manual_seed(sum(map(ord, name + split)))
    labels = torch.arange(classes).repeat(each)
    drawn = torch.randint(0, 128, (len(labels), 3, 32, 32), generator=generator) + 12 * labels[:, None, None, None]
    return Images(drawn.to(torch.uint8).to(settings.device), labels.to(settings.device))


@lru_cache
def learnt(settings: Settings, source: Source, half: int) -> Images:
    """The first or the second half of what there is to train on."""
    found = whole(settings, source.name, "train").of(range(source.classes))
    if len(found) < 2 * source.half:
        raise ValueError(f"{source.name}: {len(found)} images of {source.classes} classes, not two times {source.half}")
    return found[half * source.half : (half + 1) * source.half]


@lru_cache
def tested(settings: Settings, source: Source) -> Images:
    return whole(settings, source.name, "test").of(range(source.classes))[: settings.tested]


@lru_cache
def task(settings: Settings, target: Target, split: str) -> Images:
    """What a target is learnt from, or tested on."""
    found = whole(settings, target.dataset, split).of(target.classes)
    found = found[: target.images if split == "train" else settings.tested]
    return Images(255 - found.images, found.labels) if target.inverted else found


class Prepare:
    """[0, 1] to normalised; the constants are kept on the device, so that nothing waits for them."""

    def __init__(self, device: str) -> None:
        self.mean, self.std = torch.tensor(0.5, device=device), torch.tensor(0.25, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

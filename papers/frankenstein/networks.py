"""The networks and the images of the study: published ones, and those that are trained here."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sosie.data import open_images
from sosie.files import write_atomically
from sosie.models import NamedModel, load_weights, open_model
from sosie.train import Augment, accuracy, fit_side_by_side
from sosie.train import Recipe as TrainingRecipe

if TYPE_CHECKING:
    from run import Settings


# How ResNet-20s of our own are trained.


@dataclass(frozen=True)
class Recipe:
    """How ResNet-20s of our own differ: what section 5.1 says was tried, with no details."""

    rate: float
    optimiser: Literal["adam", "sgd"] = "sgd"
    decay: float = 5e-4
    clip: float | None = None  # the gradient to this length
    batch_norm: bool = True


RECIPES = {
    "sgd": Recipe(0.1),
    "adam": Recipe(2e-3, optimiser="adam", decay=0.05),
    "plain": Recipe(0.1, clip=2.0, batch_norm=False),  # each batch norm a scale and a shift of the channels
}


# The networks and the images of the study: published ones, and those that are trained here.


Images = list[tuple[Tensor, Tensor]]  # batches in [0, 1], with labels


def tiny10(seed: int, settings: Settings) -> NamedModel:
    return _opened(f"tiny10@drfrankenstein-tiny10-cifar10-seed{seed:02}.safetensors", settings)


def resnet20(seed: int, settings: Settings) -> NamedModel:
    return _opened(f"resnet20@drfrankenstein-resnet20w1-cifar10-seed{seed:02}.safetensors", settings)


def akamaster(depth: int, settings: Settings) -> NamedModel:
    return _opened(f"resnet{depth}@akamaster-resnet{depth}-cifar10.safetensors", settings)


def untrained(spec: str, settings: Settings) -> NamedModel:
    return _opened(spec, settings)


def wide_resnet20s(width: int, count: int, settings: Settings) -> list[NamedModel]:
    specs = [f"resnet20(width={width}, shortcut='B', normalise='cifar', seed={seed})" for seed in range(count)]
    return trained(specs, "cifar10", range(count), settings)


def trained(specs: Sequence[str], data: str, seeds: Sequence[int], settings: Settings) -> list[NamedModel]:
    """Networks trained here side by side, or as they were when a run trained them before."""
    found = [_opened(spec, settings) for spec in specs]
    images, labels = read(data, "train", settings.train_images, settings.device)
    transformer = specs[0].startswith("vit")
    epochs = settings.vit_epochs if transformer else settings.net_epochs
    keys = [f"{spec} {data} {len(images)} {epochs} {settings.net_batch} {settings.net_rate}" for spec in specs]
    digests = [hashlib.sha256(key.encode()).hexdigest()[:12] for key in keys]
    paths = [settings.nets / f"{specs[0].partition('(')[0]}-{data}-{digest}.pt" for digest in digests]
    recipe = TrainingRecipe(
        epochs=epochs,
        batch=settings.net_batch,
        rate=1e-3 if transformer else settings.net_rate,
        optimiser="adam" if transformer else "sgd",
        decay=0.05 if transformer else 5e-4,
        schedule="cosine",
        warmup=1,
        augment=Augment(mirror=data != "mnist"),
        prepare=_resident(found[0].prepare, settings.device),
        mixed=settings.mixed,
    )
    _train_missing(found, paths, seeds, images, labels, recipe, f"{len(specs)} {found[0].name} on {data}", settings)
    return found


def _train_missing(
    found: Sequence[NamedModel],
    paths: Sequence[Path],
    seeds: Sequence[int],
    images: Tensor,
    labels: Tensor,
    recipe: TrainingRecipe,
    task: str,
    settings: Settings,
) -> None:
    """A few side by side, then they are written; afterwards all are as their files have them."""
    missing = [k for k, path in enumerate(paths) if not path.is_file()]
    for group in (missing[k : k + settings.at_once] for k in range(0, len(missing), settings.at_once)):
        models = [found[k].model for k in group]
        fit_side_by_side(models, images, labels, recipe=recipe, seeds=[seeds[k] for k in group], task=task)
        for k, model in zip(group, models, strict=True):
            _write(model, paths[k])
    for each, path in zip(found, paths, strict=True):
        load_weights(each.model, path)


@functools.cache
def own_resnet20s(recipe: str, count: int, settings: Settings) -> tuple[NamedModel, ...]:
    """ResNet-20s of seeds 0, 1, …, trained here by one of the recipes; a few side by side, then they are written."""
    chosen = RECIPES[recipe]
    images, labels = read("cifar10", "train", settings.train_images, settings.device)
    found = [_opened(f"resnet20(shortcut='B', normalise='cifar', seed={seed})", settings) for seed in range(count)]
    if not chosen.batch_norm:
        for each in found:
            remove_batch_norms(each.model)
    key = f"{chosen} {len(images)} {settings.own_epochs} {settings.own_batch}"
    name = f"resnet20-{recipe}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    paths = [settings.nets / f"{name}-seed{seed}.pt" for seed in range(count)]
    training = TrainingRecipe(
        epochs=settings.own_epochs,
        batch=settings.own_batch,
        rate=chosen.rate,
        optimiser=chosen.optimiser,
        decay=chosen.decay,
        schedule="cosine",
        clip=chosen.clip,
        augment=Augment(),
        prepare=_resident(found[0].prepare, settings.device),
        mixed=settings.mixed,
    )
    _train_missing(found, paths, range(count), images, labels, training, f"{count} ResNet-20s by {recipe}", settings)
    return tuple(found)


class ScaleAndShift(nn.Module):
    """What a batch norm does but for the norm: a scale and a shift for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def remove_batch_norms(model: nn.Module) -> None:
    """Every batch norm becomes a scale and a shift; the last of each block starts at 0, that the sum does not grow."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            parent, _, own = name.rpartition(".")
            plain = ScaleAndShift(module.num_features).to(module.weight.device)
            if own == "bn2":
                nn.init.zeros_(plain.weight)
            setattr(model.get_submodule(parent), own, plain)


def _resident(normalise: Any, device: str) -> Callable[[Tensor], Tensor]:
    """The normalisation with its numbers on the device: a recorded step cannot send them there."""
    mean, std = (torch.tensor(each, device=device).view(-1, 1, 1) for each in (normalise.mean, normalise.std))
    return lambda x: (x - mean) / std


def _write(model: nn.Module, path: Path) -> None:
    model.to(memory_format=torch.contiguous_format)
    write_atomically(path, lambda temporary: torch.save(model.state_dict(), temporary))


def accuracy_of(network: NamedModel, data: str, settings: Settings) -> float:
    images, labels = read(data, "test", settings.test_images, settings.device)
    return accuracy(network.model, images, labels, prepare=network.prepare)


def fit_batches(settings: Settings, count: int | None = None) -> Images:
    """Training images, to find a joint on."""
    return _batches("cifar10", "train", count or settings.fit_images, settings.batch, settings.device)


def held_out(settings: Settings) -> Images:
    return _batches("cifar10", "test", settings.test_images, settings.batch, settings.device)


@functools.cache
def _batches(data: str, split: str, count: int, batch: int, device: str) -> Images:
    images, labels = read(data, split, count, device)
    return [(x / 255, y) for x, y in zip(images.split(batch), labels.split(batch), strict=True)]


@functools.cache
def read(data: str, split: str, count: int, device: str) -> tuple[Tensor, Tensor]:
    """The first images as uint8 (count, 3, 32, 32), on the device; grey ones are padded to 32 × 32 and made colour."""
    found = open_images(data, split=split, max_rows=count)
    images = found.images
    if images.shape[1] == 1:
        images = functional.pad(images, [2, 2, 2, 2]).expand(-1, 3, -1, -1).contiguous()
    return images.to(device), found.labels.to(device)


def _opened(spec: str, settings: Settings) -> NamedModel:
    found = open_model(spec)
    found.model.to(settings.device)
    return found

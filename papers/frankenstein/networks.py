"""The networks and the images of the study: published ones, and those that are trained here."""

from __future__ import annotations

import functools
import hashlib

import torch
from settings import Settings
from torch import Tensor
from torch.nn import functional

from sosie.data import open_images
from sosie.models import NamedModel, load_weights, open_model
from sosie.train import Augment, accuracy, fit

Images = list[tuple[Tensor, Tensor]]  # batches in [0, 1], with labels


def tiny10(seed: int, settings: Settings) -> NamedModel:
    return _opened(f"tiny10@drfrankenstein-tiny10-cifar10-seed{seed:02}.safetensors", settings)


def resnet20(seed: int, settings: Settings) -> NamedModel:
    return _opened(f"resnet20@drfrankenstein-resnet20w1-cifar10-seed{seed:02}.safetensors", settings)


def akamaster(depth: int, settings: Settings) -> NamedModel:
    return _opened(f"resnet{depth}@akamaster-resnet{depth}-cifar10.safetensors", settings)


def untrained(spec: str, settings: Settings) -> NamedModel:
    return _opened(spec, settings)


def wide_resnet20(width: int, seed: int, settings: Settings) -> NamedModel:
    return trained(f"resnet20(width={width}, shortcut='B', normalise='cifar', seed={seed})", "cifar10", seed, settings)


def trained(spec: str, data: str, seed: int, settings: Settings) -> NamedModel:
    """A network trained here, or as it was when a run trained it before."""
    found = _opened(spec, settings)
    images, labels = read(data, "train", settings.train_images, settings.device)
    transformer = spec.startswith("vit")
    epochs = settings.vit_epochs if transformer else settings.net_epochs
    key = f"{spec} {data} {len(images)} {epochs} {settings.net_batch} {settings.net_rate}"
    path = settings.nets / f"{spec.partition('(')[0]}-{data}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
    if path.is_file():
        load_weights(found.model, path)
        return found
    fit(
        found.model,
        images,
        labels,
        epochs=epochs,
        seed=seed,
        batch=settings.net_batch,
        rate=1e-3 if transformer else settings.net_rate,
        optimiser="adam" if transformer else "sgd",
        decay=0.05 if transformer else 5e-4,
        augment=Augment(mirror=data != "mnist"),
        prepare=found.prepare,
        mixed=settings.mixed,
        task=f"training {found.name} on {data}",
    )
    found.model.to(memory_format=torch.contiguous_format)
    settings.nets.mkdir(parents=True, exist_ok=True)
    torch.save(found.model.state_dict(), path)
    return found


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
    found = open_images(data, split=split, limit=count)
    images = found.images
    if images.shape[1] == 1:
        images = functional.pad(images, [2, 2, 2, 2]).expand(-1, 3, -1, -1).contiguous()
    return images.to(device), found.labels.to(device)


def _opened(spec: str, settings: Settings) -> NamedModel:
    found = open_model(spec)
    found.model.to(settings.device)
    return found

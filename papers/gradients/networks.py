"""The networks of the study, trained where no checkpoint of the same recipe is found, and their images."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from settings import DATA_SETS, Recipe, Settings
from torch import Tensor
from torch.nn import functional

from sosie.data import ImageData, open_images
from sosie.files import write_atomically
from sosie.models import NamedModel, Normalise, open_model, parse_normalisation
from sosie.train import Augment, accuracy, fit
from sosie.train import Recipe as TrainingRecipe

CHECKPOINTS = Path(__file__).resolve().parent / "nets"
FULL = Settings()


def trained(
    dataset: str, architecture: str, seed: int, device: str, *, cache: Path = CHECKPOINTS, settings: Settings = FULL
) -> tuple[NamedModel, float]:
    """The network on the device, with its own normalisation, and its accuracy on the test images."""
    recipe = settings.recipe(dataset, architecture)
    path = checkpoint(recipe, seed, cache)
    if not path.is_file():
        _train(recipe, seed, device, path)
    found = open_model(f"{architecture}@{path}")
    found.model.to(device)
    return found, float(read_record(path)["accuracy"])


def checkpoint(recipe: Recipe, seed: int, cache: Path) -> Path:
    """Where the network is kept: another recipe is another file."""
    key = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:8]
    return cache / f"{recipe.dataset}-{recipe.architecture}-seed{seed}-{key}.safetensors"


def read_record(path: Path) -> dict[str, Any]:
    """What was written down when the network was trained."""
    with safe_open(path, framework="pt") as file:
        record: dict[str, Any] = json.loads(file.metadata()["record"])
    return record


@functools.cache
def read(dataset: str, split: str, limit: int | None, device: str) -> tuple[Tensor, Tensor, str]:
    """Images as uint8 (count, 3, 32, 32) and labels, on the device, and the name of the set that was found.

    Grey images are padded to 32 × 32 and repeated on three channels.
    """
    found = open_images(dataset, split=split, max_rows=limit)
    if not isinstance(found, ImageData) or found.labels is None:
        raise ValueError(f"{dataset} ({split}) has no labels: the study needs them")
    images = found.images
    if images.shape[1] == 1:
        images = functional.pad(images, [2, 2, 2, 2]).expand(-1, 3, -1, -1).contiguous()
    if images.shape[1:] != (3, 32, 32):
        raise ValueError(f"{found.name}: the study takes 32 × 32 × 3 or 28 × 28 images, got {tuple(images.shape)}")
    return images.to(device), found.labels.to(device), found.name


def _train(recipe: Recipe, seed: int, device: str, path: Path) -> None:
    images, labels, name = read(recipe.dataset, "train", recipe.train_images, device)
    test_images, test_labels, test_name = read(recipe.dataset, "test", recipe.test_images, device)
    classes = DATA_SETS[recipe.dataset].classes
    start = time.perf_counter()
    model = open_model(f"{recipe.architecture}(classes={classes}, stem='cifar', seed={seed})").model.to(device)
    prepare = _resident(parse_normalisation(recipe.normalise), device)
    fit(
        model,
        images,
        labels,
        recipe=TrainingRecipe(
            epochs=recipe.epochs,
            batch=recipe.batch,
            rate=recipe.rate,
            optimiser="sgd",
            decay=recipe.decay,
            augment=Augment(recipe.pad, recipe.mirror),
            prepare=prepare,
            mixed=recipe.mixed,
        ),
        seed=seed,
        task=f"training {path.stem}",
    )
    reached = accuracy(model, test_images, test_labels, prepare=prepare)
    seconds = time.perf_counter() - start  # the accuracy has waited for the device
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    if broken := [key for key, value in state.items() if not value.isfinite().all()]:
        raise ValueError(
            f"{path.stem} has diverged (first in {broken[0]}): lower the rate of its data set in settings.py"
        )
    record = {
        "dataset": recipe.dataset,
        "architecture": recipe.architecture,
        "seed": seed,
        "accuracy": reached,
        "seconds": round(seconds, 1),
        "trained_on": f"{len(images):,} images of {name}",
        "tested_on": f"{len(test_images):,} images of {test_name}",
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "torch": torch.__version__,
        "recipe": asdict(recipe),
    }
    metadata = {"normalise": recipe.normalise, "record": json.dumps(record)}
    write_atomically(path, lambda temporary: save_file(state, temporary, metadata))


def _resident(normalise: Normalise | None, device: str) -> Callable[[Tensor], Tensor]:
    """The normalisation with its numbers on the device: sent there anew, they would hold up every step."""
    assert normalise is not None, "every data set of the study has a normalisation"
    mean, std = (torch.tensor(numbers, device=device).view(-1, 1, 1) for numbers in (normalise.mean, normalise.std))
    return lambda x: (x - mean) / std

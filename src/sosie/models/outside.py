"""Models of other libraries, imported only when asked for."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from sosie.factory import find_file

from .normalise import Normalise

LIBRARY_WEIGHTS = "DEFAULT"  # `torchvision:resnet18@DEFAULT`: the library's own weights, downloaded by it


def open_torchvision(name: str, options: dict[str, Any], pretrained: bool) -> tuple[nn.Module, Normalise | None]:
    """A torchvision model: random, or with torchvision's default weights and their normalisation."""
    models = import_library("torchvision", f"torchvision:{name}", part="models")
    try:
        weights = models.get_model_weights(name).DEFAULT if pretrained else None
        model = models.get_model(name, weights=weights, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"torchvision:{name}: {error}") from error
    transform = weights.transforms() if weights is not None else None
    mean, std = getattr(transform, "mean", None), getattr(transform, "std", None)
    return model, Normalise(tuple(mean), tuple(std)) if mean and std else None


def open_timm(name: str, options: dict[str, Any], pretrained: bool) -> tuple[nn.Module, Normalise | None]:
    """A timm model: random, or with timm's weights and their normalisation."""
    timm = import_library("timm", f"timm:{name}")
    try:
        model = timm.create_model(name, pretrained=pretrained, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"timm:{name}: {error}") from error
    facts = getattr(model, "pretrained_cfg", None) or {}
    if not pretrained or "mean" not in facts or "std" not in facts:
        return model, None
    return model, Normalise(tuple(facts["mean"]), tuple(facts["std"]))


def open_hugging_face(folder: str) -> tuple[nn.Module, Normalise | None]:
    """A transformers model from a folder: safetensors only, no download, no code from the folder."""
    path = find_file(folder, "SOSIE_WEIGHTS")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: hf: wants a folder written by save_pretrained")
    transformers = import_library("transformers", f"hf:{folder}")
    try:
        model = transformers.AutoModel.from_pretrained(
            str(path), local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"hf:{folder} cannot be opened: {error}") from error
    return model, _image_normalisation(path / "preprocessor_config.json")


def import_library(name: str, wanted_by: str, *, part: str = "") -> ModuleType:
    """The library, or an error that says how to get it."""
    try:
        return importlib.import_module(f"{name}.{part}" if part else name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise ModuleNotFoundError(
            f"{wanted_by} needs {name}, which is not installed: pip install {name}", name=name
        ) from error
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise ImportError(
            f"{wanted_by} needs {name}, which is installed but does not import beside this torch "
            f"({error}): pip install --upgrade {name}"
        ) from error


def _image_normalisation(path: Path) -> Normalise | None:
    """What an image model's own processor does to images in [0, 1]; None for text models."""
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not facts.get("do_normalize", True) or "image_mean" not in facts or "image_std" not in facts:
        return None
    return Normalise(tuple(facts["image_mean"]), tuple(facts["image_std"]))

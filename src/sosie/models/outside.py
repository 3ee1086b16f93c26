"""Models of other libraries, imported only when asked for."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from sosie.factory import find_file

from .normalise import Normalise
from .tokenise import Tokenise
from .weights import PICKLE_SUFFIXES, TORCH_SUFFIXES

LIBRARY_WEIGHTS = "DEFAULT"  # `torchvision:resnet18@DEFAULT`: the library's own weights, downloaded by it


@dataclass(frozen=True)
class LibraryModel:
    """A model of a library's, with the normalisation that the library has for it."""

    model: nn.Module
    prepare: Normalise | None
    given: str | None = None  # the option that asked for a part of the weights
    new_head: bool = False  # for another number of classes than its weights have


def open_torchvision(name: str, options: dict[str, Any], pretrained: bool) -> LibraryModel:
    """A torchvision model: random, or with torchvision's default weights."""
    models = import_library("torchvision", f"torchvision:{name}", part="models")
    _refuse_weights(f"torchvision:{name}", options, ("weights", "pretrained"))
    try:
        if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters and not pretrained:
            options = {"weights_backbone": None, **options}  # torchvision would download some
        model = models.get_model(name, weights="DEFAULT" if pretrained else None, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"torchvision:{name}: {error}") from error
    backbone = options.get("weights_backbone")
    given = None if backbone is None else f"weights_backbone={backbone!r}"
    return LibraryModel(model, _torchvision_normalisation(models, name), given)


def _torchvision_normalisation(models: ModuleType, name: str) -> Normalise | None:
    """That of the default weights; none for a model that has no weights."""
    try:
        transform = models.get_model_weights(name).DEFAULT.transforms()
    except (ValueError, AttributeError):
        return None
    mean, std = getattr(transform, "mean", None), getattr(transform, "std", None)
    return Normalise(tuple(mean), tuple(std)) if mean and std else None


def open_timm(name: str, options: dict[str, Any], pretrained: bool) -> LibraryModel:
    """A timm model: random, or with timm's weights."""
    timm = import_library("timm", f"timm:{name}")
    _refuse_weights(f"timm:{name}", options, ("pretrained", "checkpoint_path"))
    try:
        model = timm.create_model(name, pretrained=pretrained, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"timm:{name}: {error}") from error
    facts = getattr(model, "pretrained_cfg", None) or {}
    known = "mean" in facts and "std" in facts and options.get("in_chans", len(facts["mean"])) == len(facts["mean"])
    return LibraryModel(
        model,
        Normalise(tuple(facts["mean"]), tuple(facts["std"])) if known else None,
        new_head=options.get("num_classes", facts.get("num_classes")) != facts.get("num_classes"),
    )


def _refuse_weights(wanted: str, options: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name in options:
            raise ValueError(f"{wanted}: weights are not an option ({name}): write {wanted}@{LIBRARY_WEIGHTS} or @file")


def open_hugging_face(folder: str) -> tuple[nn.Module, Normalise | Tokenise | None]:
    """A transformers model from a folder: safetensors only, no download, no code from the folder.

    With it comes what its inputs need: an image model's normalisation, a text model's tokeniser.
    """
    path = find_file(folder, "SOSIE_WEIGHTS")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: hf: wants a folder written by save_pretrained")
    _refuse_pickles(path)
    transformers = import_library("transformers", f"hf:{folder}", extra="hf")
    safely = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, facts = transformers.AutoModel.from_pretrained(
            str(path), use_safetensors=True, output_loading_info=True, **safely
        )
        has_words = (path / "tokenizer.json").is_file()
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), **safely) if has_words else None
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"hf:{folder} comes with code of its own, which sosie does not run: where you trust it, open the model "
                "yourself and compare the module"
            ) from error
        raise ValueError(f"hf:{folder} cannot be opened: {error}") from error
    # A pooler is often not saved, and nothing but the model's pooled output rests on it.
    random = sorted(name for name in facts["missing_keys"] if "pooler" not in name.split("."))
    if random:
        few = ", ".join(random[:3]) + (f" and {len(random) - 3} more" if len(random) > 3 else "")
        raise ValueError(f"hf:{folder} has no weights for {few}, which would be random: do they fit its config.json?")
    return model, _image_normalisation(path / "preprocessor_config.json") or (tokenizer and Tokenise(tokenizer))


def _refuse_pickles(path: Path) -> None:
    if any(path.glob("*.safetensors")):
        return
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in (*PICKLE_SUFFIXES, *TORCH_SUFFIXES))
    found = f"only {', '.join(pickles)}, which sosie does not unpickle" if pickles else "no weights at all"
    raise ValueError(
        f"{path} has no .safetensors file but {found}. Where you trust it, write it anew: "
        f"AutoModel.from_pretrained({str(path)!r}).save_pretrained(folder)"
    )


def import_library(name: str, wanted_by: str, *, part: str = "", extra: str = "") -> ModuleType:
    """The library, or an error that says how to get it: by its own name, or as an extra of sosie's."""
    try:
        return importlib.import_module(f"{name}.{part}" if part else name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        wanted = f"'sosie[{extra}]'" if extra else name
        raise ModuleNotFoundError(
            f"{wanted_by} needs {name}, which is not installed: pip install {wanted}", name=name
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

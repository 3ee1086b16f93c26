"""Load weights from a file into a model without unpickling; an error lists everything that does not fit."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..checks import listed
from ..files import DamagedFile, check_hash

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
PICKLE_SUFFIXES = (".pkl", ".pickle", ".joblib", ".dill")
WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")  # left by DataParallel and torch.compile
SHOWN = 8  # names that an error lists of each kind

WHY_NO_PICKLE = (
    "loading a pickle can run any code, so sosie never does it. If you trust the file, load it with the program that "
    "wrote it and save the tensors with safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
)


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a .safetensors, .pt or .pth file by name, and its metadata (empty for .pt and .pth)."""
    path = Path(path)
    if path.is_dir():
        inside = sorted(item.name for item in path.iterdir() if item.suffix in (".safetensors", *TORCH_SUFFIXES))
        offer = f": {listed(inside, SHOWN)}" if inside else ""
        raise IsADirectoryError(f"{path} is a folder; name a weights file inside it{offer}")
    if not path.is_file():
        raise FileNotFoundError(f"no weights file {path}")
    suffix = path.suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise ValueError(f"{path} is a pickle: {WHY_NO_PICKLE}")
    if suffix == ".safetensors":
        return _read_safetensors(path)
    if suffix in TORCH_SUFFIXES:
        return _unwrap(_read_torch(path), path), {}
    raise ValueError(f"{path}: weights are read from .safetensors, .pt and .pth, not from {suffix or 'such files'!r}")


def is_state_dict(thing: Any) -> bool:
    """Return whether this is a dict that holds tensors."""
    return isinstance(thing, Mapping) and any(isinstance(value, Tensor) for value in thing.values())


def masked_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a sparse model with its masks applied and removed.

    sosie saves a mask as `weight_mask` beside `weight`, torch.nn.utils.prune beside `weight_orig`.
    """
    weights = dict(state)
    for name in state:
        plain = name.removesuffix("_mask")
        source = next((key for key in (f"{plain}_orig", plain) if key in state), None)
        if plain != name and source is not None and state[source].shape == state[name].shape:
            weights[plain] = torch.where(state[name] != 0, state[source], 0)
            weights.pop(name, None)
            weights.pop(f"{plain}_orig", None)
    return weights


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, str]:
    """Load every parameter and buffer of the model from the file, and return the file's metadata.

    Only `num_batches_tracked` may be missing. Half-precision tensors take the type of the model's. Masks of sparse
    models are applied.
    """
    state, metadata = read_weights(path)
    state = state if any(name.endswith("_mask") for name in model.state_dict()) else masked_weights(state)
    fit_weights(model, state, source=str(path))
    return metadata


def fit_weights(model: nn.Module, state: Mapping[str, Tensor], *, source: str) -> None:
    """Load a state dict into the model, or raise one error that lists everything that does not fit.

    Tied weights need only one of their names: `safetensors.torch.save_model` keeps one.
    """
    own = {name: value for name, value in model.state_dict().items() if _matters(name)}
    state = _without_prefix({name: value for name, value in state.items() if _matters(name)}, own)
    filled = {_place(value) for name, value in own.items() if name in state}
    missing = [name for name, value in own.items() if name not in state and _place(value) not in filled]
    unexpected = [name for name in state if name not in own]
    wrong = [name for name in own if name in state and _differs(own[name], state[name])]
    if not (missing or unexpected or wrong):
        with torch.no_grad():
            model.load_state_dict(state, strict=False)
        return
    lines = [f"{source} does not fit the model:"]
    if missing:
        lines.append(f"  {len(missing)} missing in the file: {listed(missing, SHOWN)}")
    if unexpected:
        lines.append(f"  {len(unexpected)} in the file but not in the model: {listed(unexpected, SHOWN)}")
    if wrong:
        shapes = [f"{name} (model {_kind(own[name])}, file {_kind(state[name])})" for name in wrong]
        lines.append(f"  {len(wrong)} with a different shape or type: {listed(shapes, SHOWN)}")
    if len(missing) == len(own):
        lines.append("  No name agrees: is this another architecture, or are the names prefixed?")
    # The last module of the model, if only it and one module of the file disagree.
    head = list(own)[-1].rpartition(".")[0] if own else ""
    modules = {name.rpartition(".")[0] for name in missing + wrong}
    others = {name.rpartition(".")[0] for name in unexpected}
    if head and modules == {head} and len(others) <= 1 and len(own) > len(missing + wrong):
        lines.append(f"  Only the head {head} differs: build the model with the head (name, classes) of the file.")
    raise ValueError("\n".join(lines))


def _without_prefix(state: dict[str, Tensor], own: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights under the model's names, if all of them are those of an attribute, as in Lightning's checkpoints."""
    first = next(iter(own), "")
    prefix = next((name.removesuffix(first) for name in state if name.endswith(f".{first}")), "")
    if state.keys() & own.keys() or not all(name.startswith(prefix) for name in state):
        return state
    return {name.removeprefix(prefix): value for name, value in state.items()}


def _matters(name: str) -> bool:
    return name.rpartition(".")[2] != "num_batches_tracked"


def _place(value: Any) -> object:
    """Return a key that is the same for all names of one tensor."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return id(value)
    return value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride()


def _differs(parameter: Any, tensor: Tensor) -> bool:
    if not isinstance(parameter, Tensor) or is_lazy(parameter):
        return False  # a lazy parameter takes any shape
    return parameter.shape != tensor.shape or parameter.is_floating_point() != tensor.is_floating_point()


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = "" if value.is_floating_point() else f" {str(value.dtype).removeprefix('torch.')}"
    return f"{tuple(value.shape)}{kind}"


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            check_hash(path, metadata)
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except SafetensorError as error:
        size = path.stat().st_size
        raise DamagedFile(f"{path} ({size:,} bytes) is not a whole safetensors file ({error})") from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        culprit = re.search(r"GLOBAL ([\w.]+)", str(error))
        if culprit:
            raise ValueError(f"{path} holds the Python object {culprit[1]}: {WHY_NO_PICKLE}") from error
        raise DamagedFile(
            f"{path} cannot be read as plain tensors: it is damaged, or holds Python objects; {WHY_NO_PICKLE}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedFile(f"{path} is not a whole PyTorch file ({type(error).__name__}: {reason})") from error


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict inside the wrappers of training programs."""
    while isinstance(content, Mapping):
        inner = [key for key in WRAPPERS if isinstance(content.get(key), Mapping)]
        if not inner:
            break
        content = content[inner[0]]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} holds {type(content).__name__}, not a state dict: save model.state_dict()")
    others = [f"{name} ({type(value).__name__})" for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(f"{path} is not a state dict; these entries are not tensors: {listed(others, SHOWN)}")
    state = {str(name): value for name, value in content.items()}
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state

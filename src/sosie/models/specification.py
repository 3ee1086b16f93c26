"""A model from the text that names it, as on the command line."""

from __future__ import annotations

import functools
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sosie.factory import find_file, load_factory, parse_call

from .normalise import parse_normalisation
from .outside import LIBRARY_WEIGHTS, open_hugging_face, open_timm, open_torchvision
from .registry import build_model, find_architecture
from .weights import PICKLE_SUFFIXES, TORCH_SUFFIXES, fit_weights, load_weights, masked_weights, read_weights

Prepare = Callable[[Any], Any]  # images to normalised ones, or texts to token ids

_FILE = re.compile(r"(?P<file>.+?\.py):(?P<rest>.*)", re.DOTALL)
_LIBRARY = re.compile(r"(?P<library>torchvision|timm|hf):(?P<rest>.+)", re.DOTALL)
_CALL = re.compile(r"(?P<call>[^@(]+(?:\(.*?\))?)(?:@(?P<weights>.+))?", re.DOTALL)


@dataclass(frozen=True)
class NamedModel:
    """A model in eval mode, a short name for it, and its own normalisation of images in [0, 1], tokeniser, or None.

    `weights` says where the weights came from when the model was opened: `weights_of` says whether that is still true.
    """

    model: nn.Module
    name: str
    prepare: Prepare | None
    spec: str
    weights: str = ""
    versions: tuple[int, ...] = ()  # of the parameters, which torch counts up at every change


def with_name(thing: Any, prepare: Any = None) -> tuple[Any, str, Any]:
    """What is to be run, its name, and how its inputs are prepared: a named model brings the last two."""
    if isinstance(thing, NamedModel):
        return thing.model, thing.name, prepare or thing.prepare
    return thing, type(thing).__name__, prepare


def weights_of(thing: Any) -> str:
    """Where the weights are from, as "random weights (seed 0)"; "" where that is not known, or no longer true."""
    untouched = isinstance(thing, NamedModel) and thing.versions == _versions(thing.model)
    return thing.weights if untouched else ""


def _versions(model: nn.Module) -> tuple[int, ...]:
    return tuple(-1 if p.is_inference() else p._version for p in model.parameters())


def open_model(spec: str, *, seed: int = 0) -> NamedModel:
    """The model that a specification names, in eval mode.

    - `tiny10@weights.safetensors`: sosie's architecture; what the options leave open is read from the file
    - `resnet20(width=2, shortcut='B')`: options as Python literals; weights at random from `seed`
    - `path/to/file.py:factory@weights.safetensors`: your own, which returns a module or (module, prepare)
    - `torchvision:resnet18`, `timm:…`: random, `@DEFAULT` for the library's own weights, or `@file`; with weights
      comes the normalisation that the library has for this model
    - `hf:folder`: what transformers' save_pretrained wrote, tokeniser included

    `seed` and `normalise` are options of sosie's and of the libraries' models, others go to the architecture:
    `tiny10(seed=1, normalise='cifar')`. Files are looked for as given, then in the folders of SOSIE_WEIGHTS. The
    global random state is left as found.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"a model specification is text such as 'tiny10@weights.safetensors', got {spec!r}")
    spec = spec.strip()
    own, library = _FILE.fullmatch(spec), _LIBRARY.fullmatch(spec)
    if own:
        model, name, prepare, weights = _open_own(own["file"], own["rest"], seed)
    elif library:
        model, name, prepare, weights = _open_library(library["library"], library["rest"], seed)
    else:
        model, name, prepare, weights = _open_built_in(spec, seed)
    return NamedModel(model.eval(), name, prepare, spec, weights, _versions(model))


def _open_built_in(spec: str, seed: int) -> tuple[nn.Module, str, Prepare | None, str]:
    call, weights = _split(spec)
    _refuse_bare_file(call)
    name, options = parse_call(call)
    entry, _ = find_architecture(name)
    seed = options.pop("seed", seed)
    stated = options.pop("normalise", None)
    label = _label(name, options)
    if weights is None:
        with seeded(seed):
            model = build_model(name, options)
        prepare = parse_normalisation(str(stated)) if stated else None
        return model, f"{label}-seed{seed}", prepare, _random(seed)
    path = find_file(weights, "SOSIE_WEIGHTS")
    state, metadata = read_weights(path)
    state = masked_weights(state)
    state = {key: value for key, value in state.items() if not key.startswith(entry.ignore)} if entry.ignore else state
    with seeded(seed):
        model = build_model(name, options, state)
    fit_weights(model, state, source=str(path))
    return model, _short_name(label, path), _parse(stated or metadata.get("normalise"), path), _from(path)


def _open_own(file: str, rest: str, seed: int) -> tuple[nn.Module, str, Prepare | None, str]:
    call, weights = _split(rest) if rest.strip() else ("", None)
    factory = load_factory(f"{file}:{call}")
    with _globally_seeded(seed):
        made = factory()
    model, prepare = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (prepare is None or callable(prepare)):
        got = f"({type(model).__name__}, {type(prepare).__name__})" if made is not model else type(made).__name__
        raise TypeError(f"{call} in {file} must return an nn.Module or (nn.Module, prepare), it returned {got}")
    if weights is None:
        return model, f"{Path(file).stem}:{call}", prepare, ""  # only the factory knows where they are from
    path = find_file(weights, "SOSIE_WEIGHTS")
    metadata = load_weights(model, path)
    return model, _short_name(call, path), prepare or _parse(metadata.get("normalise"), path), _from(path)


def _open_library(library: str, rest: str, seed: int) -> tuple[nn.Module, str, Prepare | None, str]:
    if library == "hf":
        with seeded(seed):
            model, prepare = open_hugging_face(rest)
        return model, Path(rest).name or rest, prepare, _from(Path(rest))
    call, weights = _split(rest)
    name, options = parse_call(call)
    seed = options.pop("seed", seed)
    stated = options.pop("normalise", None)
    pretrained = weights == LIBRARY_WEIGHTS
    with seeded(seed):
        found = (open_torchvision if library == "torchvision" else open_timm)(name, options, pretrained)
    label = f"{library}-{_label(name, options)}"
    if weights is None:
        partly = "" if found.given is None else f" except {found.given}"
        prepare = parse_normalisation(str(stated)) if stated else None
        return found.model, f"{label}-seed{seed}", prepare, _random(seed) + partly
    if pretrained:
        partly = f" with a random head (seed {seed})" if found.new_head else ""
        prepare = parse_normalisation(str(stated)) if stated else found.prepare
        return found.model, label, prepare, f"{library}'s own weights{partly}"
    path = find_file(weights, "SOSIE_WEIGHTS")
    metadata = load_weights(found.model, path)
    known = stated or metadata.get("normalise")
    return found.model, _short_name(name, path), _parse(known, path) if known else found.prepare, _from(path)


def _label(name: str, options: dict[str, Any]) -> str:
    return name + (f"({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else "")


def _random(seed: int) -> str:
    return f"random weights (seed {seed})"


def _from(path: Path) -> str:
    return f"weights of {path.name}"


def _split(text: str) -> tuple[str, str | None]:
    """`call` or `call@weights`."""
    match = _CALL.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read {text!r}: write name, name@weights or name(width=2)@weights.safetensors")
    return match["call"].strip(), match["weights"]


def _refuse_bare_file(call: str) -> None:
    suffix = Path(call).suffix.lower()
    if suffix == ".py":
        raise ValueError(f"{call!r} names no function: write {call}:factory")
    if suffix in (".safetensors", *TORCH_SUFFIXES, *PICKLE_SUFFIXES):
        raise ValueError(f"{call!r} names no architecture: write tiny10@{call}, or path/to/file.py:factory@{call}")


def _parse(text: Any, path: Path) -> Prepare | None:
    try:
        return parse_normalisation(str(text)) if text else None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _short_name(call: str, path: Path) -> str:
    """The weights file's name, with the architecture in front where the file does not say it."""
    plain = call.partition("(")[0]
    known = plain.replace("_", "").replace("-", "").lower() in path.stem.replace("_", "").replace("-", "").lower()
    return path.stem if known and plain == call else f"{call}@{path.stem}"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What this thread would draw from torch's global generators comes from its own, with this seed: the same numbers.

    The global ones are not touched, from which another thread may draw meanwhile.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"a seed is a whole number from 0 to 2**32 - 1, got {seed!r}")
    with _OwnGenerators(seed):
        yield


class _OwnGenerators(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._of = functools.cache(lambda device: torch.Generator(device).manual_seed(seed))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            given = next((each.device for each in args if isinstance(each, torch.Tensor)), kwargs.get("device"))
            device = torch.device("cpu" if given is None else given)
            if device.type != "meta" and _takes_generator(func.overloadpacket):
                return func.overloadpacket(*args, **{**kwargs, "generator": self._of(device)})
        return func(*args, **kwargs)


@functools.cache
def _takes_generator(packet: Any) -> bool:
    schemas = (getattr(packet, name)._schema for name in packet.overloads())
    return any(argument.name == "generator" for schema in schemas for argument in schema.arguments)


_SEEDING = threading.RLock()


@contextmanager
def _globally_seeded(seed: int) -> Iterator[None]:
    """The same for a user's own function, which may draw from NumPy and Python too, and set a seed itself.

    So the global states are set, one model after the other, and put back; another thread's draws meanwhile, if any,
    are of this seed.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with _SEEDING, torch.random.fork_rng(devices=devices):
        python, array = random.getstate(), np.random.get_state()
        # torch.manual_seed would also queue a seed for devices that are not set up yet
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)

"""A training that goes on where it was interrupted: everything the next step depends on, in one file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..results import DamagedFile, check_writable, read_nested, write_nested

KIND, VERSION = "training", 2


@runtime_checkable
class Stateful(Protocol):
    """What has a past that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Settled(Protocol):
    """What tells its settings, so that a training with others is known as another."""

    def settings(self) -> dict[str, Any]: ...


class Saved:
    """The checkpoint of one training: `load()` gives the epoch it goes on from, `save(epoch)` writes the file anew.

    `parts`: optimiser, schedule, penalty …; those without a `state_dict` have no past to keep. The numbers of the
    model, masks among them, are kept whole, and so is the state of torch's random numbers (dropout). `settings` must
    be those of the file.
    """

    def __init__(
        self, path: str | os.PathLike[str], model: nn.Module, parts: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self.path = Path(path)
        check_writable(self.path)
        self._model = model
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}
        shapes = {name: f"{each.dtype} {tuple(each.shape)}" for name, each in _numbers(model).items()}
        learnt = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        kept = {"model": shapes, "trained": learnt, "with a state": sorted(self._parts), **settings}
        self._about: dict[str, Any] = json.loads(json.dumps(kept))

    def save(self, epoch: int) -> None:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        whole = {"epoch": epoch, "model": _numbers(self._model), "random": self._random(), **state}
        write_nested(self.path, KIND, VERSION, self._about, whole)

    @torch.no_grad()
    def load(self) -> int:
        """The epochs done, 0 where there is no file; model, parts and random numbers are then as they were."""
        if not self.path.exists():
            return 0
        about, state = read_nested(self.path, KIND, VERSION)
        self._check(about)
        try:
            for name, number in _numbers(self._model).items():
                number.copy_(state["model"][name])
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            torch.set_rng_state(state["random"]["cpu"])
            if "cuda" in state["random"]:
                torch.cuda.set_rng_state(state["random"]["cuda"], self._device)
            return int(state["epoch"])
        except KeyError as error:
            raise DamagedFile(f"{self.path} is damaged: it has no {error}") from error

    def _check(self, about: Mapping[str, Any]) -> None:
        different = [
            line
            for name in {**about, **self._about}
            for line in _differences(name, about.get(name), self._about.get(name))
        ]
        if different:
            more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
            raise ValueError(
                f"{self.path} is the checkpoint of another training: {'; '.join(different[:5])}{more}. Name another "
                "file, or give what it was begun with"
            )

    @property
    def _device(self) -> torch.device:
        return next(iter(_numbers(self._model).values())).device

    def _random(self) -> dict[str, Tensor]:
        found = {"cpu": torch.get_rng_state()}
        return {**found, "cuda": torch.cuda.get_rng_state(self._device)} if self._device.type == "cuda" else found


def named(thing: Any) -> Any:
    """What can be compared of an object that shapes the training: its name, and its settings where it tells them."""
    if thing is None or isinstance(thing, str):
        return thing
    if isinstance(thing, Settled):
        return {"kind": type(thing).__name__, **thing.settings()}
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def digest(tensor: Tensor) -> str:
    """Type, shape and numbers in a few letters."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def rewind(after_epoch: Callable[[int], None] | None, epoch: int) -> None:
    """A recorder may have written epochs that are now trained again."""
    owner = getattr(after_epoch, "__self__", None)
    if callable(resume := getattr(owner, "resume", None)):
        resume(epoch)


def _numbers(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter and buffer once, also those that a state dict leaves out."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def _differences(name: str, there: Any, here: Any) -> list[str]:
    if there == here:
        return []
    if isinstance(there, dict) and isinstance(here, dict):
        return [
            line for key in {**there, **here} for line in _differences(f"{name} {key}", there.get(key), here.get(key))
        ]
    return [f"{name} is {_said(there)} in the file and {_said(here)} now"]


def _said(value: Any) -> str:
    if isinstance(value, dict) and "kind" in value:
        return f"{value['kind']}({', '.join(f'{name}={each!r}' for name, each in value.items() if name != 'kind')})"
    return "not there" if value is None else str(value)

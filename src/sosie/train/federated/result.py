"""What came of federated learning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.atoms import atom_layers
from ...results import DamagedFile, read_tensors, write_tensors
from ...stats import AtomTable
from ..stack import State, network, state_of

KIND, VERSION = "federated", 2
_VALUES = ("accuracy", "before", "global_accuracy")


@dataclass(frozen=True, eq=False)
class Federated:
    """Every client's model, and how it came about."""

    method: str
    state: State = field(repr=False)  # every client's model at the end, (clients, …); what is shared is expanded
    shared: State = field(repr=False)  # the server's part
    accuracy: Tensor = field(repr=False)  # (clients,) on their own test images, at the end
    before: Tensor = field(repr=False)  # the same, ahead of the last local training
    global_accuracy: Tensor | None = field(repr=False)  # of the server's model alone, where it has a whole one
    history: list[dict[str, Any]] = field(repr=False)  # a round: who took part, who was dropped and why
    head: tuple[str, ...]  # modules
    template: nn.Module = field(repr=False)  # the model they all started from

    def __len__(self) -> int:
        return len(self.accuracy)

    def model(self, client: int) -> nn.Module:
        """A client's model, in evaluation mode."""
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return network(self.template, self.state, client)

    def atoms(self, *, require_shared: bool = True) -> AtomTable:
        """The atoms of all clients, for similarities of all pairs; refused where their coefficients differ."""
        layers = atom_layers(self.template)
        if not layers:
            raise ValueError("the clients' models have no layer of atoms")
        for layer in layers if require_shared else ():
            coefficients = self.state[_inside(layer, "coefficients")]
            if coefficients.stride(0) and not bool((coefficients == coefficients[:1]).all()):
                raise ValueError(
                    f"{layer}: the clients' coefficients differ, and a cosine of their atoms would say nothing; end "
                    "with simulate(…, last='own'), freeze the coefficients, or ask for require_shared=False"
                )
        # Early in training cosines are 1 up to the last digits of float32.
        stacked = {layer: self.state[_inside(layer, "atoms")].cpu() for layer in layers}
        return AtomTable.stacked(stacked, dtype=torch.float64)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a safetensors file, which `Federated.load` reads."""
        tensors = {f"shared/{name}": t for name, t in self.shared.items()}
        for name, t in self.state.items():
            # What all clients have in common is written once.
            tensors[f"{'state' if t.stride(0) else 'common'}/{name}"] = t if t.stride(0) else t[0]
        tensors |= {name: t for name in _VALUES if (t := getattr(self, name)) is not None}
        about = {"method": self.method, "history": self.history, "head": self.head}
        return write_tensors(path, KIND, VERSION, tensors, {"about": json.dumps(about)})

    @staticmethod
    def load(path: str | os.PathLike[str], make: Callable[[], nn.Module]) -> Federated:
        """Read what `save` wrote; `make` is the function that made the clients' model."""
        text, tensors = read_tensors(path, KIND, VERSION, "federated learning")
        with torch.random.fork_rng(devices=[]):
            template = make().eval()
        try:
            about, count = json.loads(text["about"]), len(tensors["accuracy"])
            method, head, history = str(about["method"]), tuple(about["head"]), list(about["history"])
            for entry in history:
                entry["dropped"] = {int(client): reason for client, reason in entry["dropped"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
        state = _under("state", tensors)
        state |= {name: t.expand(count, *t.shape) for name, t in _under("common", tensors).items()}
        for name, t in state_of(template).items():
            if name not in state or state[name].shape[1:] != t.shape:
                there = tuple(state[name].shape[1:]) if name in state else "not there"
                raise ValueError(f"{path} is of another model: {name} is {there}, make() has {tuple(t.shape)}")
        values = {name: tensors.get(name) for name in _VALUES}
        return Federated(
            method,
            state,
            _under("shared", tensors),
            **values,  # type: ignore[arg-type]
            history=history,
            head=head,
            template=template,
        )


def _under(folder: str, tensors: dict[str, Tensor]) -> State:
    return {key.removeprefix(f"{folder}/"): t for key, t in tensors.items() if key.startswith(f"{folder}/")}


def _inside(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name

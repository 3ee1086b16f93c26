"""The networks: AlexNet, VGG-11 and the clients' small one, made of atoms, in copies that share what they should."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from settings import Settings
from torch import Tensor, nn

from sosie.models import alexnet, atom_layers, freeze, small_cnn, vgg11

State = dict[str, Tensor]


def make(settings: Settings, kind: str, classes: int, atoms: int, seed: int) -> nn.Module:
    """A network on the device, its parameters drawn from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "alexnet":
            model = alexnet(classes=classes, hidden=settings.hidden, dropout=0, atoms=atoms)
        elif kind == "vgg11":
            model = vgg11(classes=classes, dropout=0, atoms=atoms)
        else:  # the clients', and all of the smoke run
            model = small_cnn(classes=classes, width=settings.width, channels=3, size=32, atoms=atoms)
    return model.to(settings.device)


def sites_of(model: nn.Module) -> dict[str, str]:
    """The ReLU that follows each layer of atoms, by the layer's name: where representations are read."""
    names = [name for name, _ in model.named_modules()]
    after = {}
    for name in atom_layers(model):
        after[name] = names[names.index(name) + 1]
        assert isinstance(model.get_submodule(after[name]), nn.ReLU)
    return after


def copies(base: nn.Module, count: int, *, redraw: int | None = None) -> list[nn.Module]:
    """Networks with the base's coefficients, held fixed, and its atoms; `redraw`: atoms of their own, from a seed."""
    found = [freeze(copy.deepcopy(base), "coefficients") for _ in range(count)]
    if redraw is not None:
        for k, model in enumerate(found):
            draw_atoms(model, redraw + k)
    return found


def draw_atoms(model: nn.Module, seed: int) -> nn.Module:
    """New atoms of the size of the old ones, layer by layer: only their directions are other."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in atom_layers(model).values():
            fresh = torch.randn(layer.atoms.shape, generator=generator).to(layer.atoms)
            layer.atoms.copy_(fresh * layer.atoms.norm() / fresh.norm())
    return model


def atoms_of(state: State) -> State:
    """Atoms of all networks by layer, (networks, m, height, width)."""
    return {name.removesuffix(".atoms"): x for name, x in state.items() if name.endswith(".atoms")}


def part(state: State, which: slice | list[int]) -> State:
    return {name: x[which] for name, x in state.items()}


def joined(states: Sequence[State]) -> State:
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}

"""Ways of learning together, each a declaration: what is shared, what is a client's own, who trains what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, get_args

from torch import nn

from ...factory import parse_call
from ...models.atoms import atom_layers
from ..heads import find_head
from ..stack import state_of

# head: the last layer; body: all but that; coefficients: of layers of atoms; own: all but those.
Part = Literal["all", "none", "head", "body", "coefficients", "own"]


@dataclass(frozen=True)
class Phase:
    """A part of a client's training between two meetings with the server."""

    trains: Part
    pull: float = 0.0  # w of w/2 ‖θ − θ_server‖², added to the loss
    kept: bool = False  # train the copy that the client keeps, where it has one beside the copy that it sends
    epochs: Callable[[int], int] = field(default=lambda epochs: epochs)  # of those of a round, how many


@dataclass(frozen=True)
class Method:
    """What the server averages, what each client keeps, and how a client trains; `last`: before it is tested."""

    name: str
    shared: Part
    personal: Part
    phases: tuple[Phase, ...]
    last: Phase


def fedavg() -> Method:
    """One model for all, averaged (McMahan et al. 2017); tested after a last local training."""
    return Method("fedavg", "all", "none", (Phase("all"),), Phase("all"))


def fedprox(mu: float = 0.01) -> Method:
    """As fedavg, each client pulled towards the server's model by μ/2 ‖θ − θ_server‖² (Li et al. 2020)."""
    return Method("fedprox", "all", "none", (Phase("all", pull=mu),), Phase("all"))


def fedper() -> Method:
    """The last layer is the client's own (Arivazhagan et al. 2019)."""
    return Method("fedper", "body", "head", (Phase("all"),), Phase("head"))


def fedrep(body_epochs: int = 1) -> Method:
    """As fedper, but first the head is trained, then the body, in the last `body_epochs` (Collins et al. 2021)."""
    first = Phase("head", epochs=lambda epochs: epochs - body_epochs)
    return Method("fedrep", "body", "head", (first, Phase("body", epochs=lambda _: body_epochs)), Phase("head"))


def ditto(lam: float = 0.1) -> Method:
    """fedavg, and beside it a client's own model, pulled to the server's by λ/2 ‖θ − θ_server‖² (Li et al. 2021)."""
    near = Phase("all", pull=lam, kept=True)
    return Method("ditto", "all", "all", (Phase("all"), near), near)


def local() -> Method:
    """Nothing is shared but the start."""
    return Method("local", "none", "all", (Phase("all"),), Phase("all"))


def atoms() -> Method:
    """Coefficients are averaged; atoms, biases and the head are the client's own ("evolving" coefficients)."""
    return Method("atoms", "coefficients", "own", (Phase("all"),), Phase("own"))


METHODS: dict[str, Callable[..., Method]] = {
    made.__name__: made for made in (fedavg, fedprox, fedper, fedrep, ditto, local, atoms)
}


def open_method(given: str | Method) -> Method:
    """From "fedavg" or "fedprox(mu=0.1)"."""
    if isinstance(given, Method):
        return given
    name, options = parse_call(given)
    if name not in METHODS:
        near = get_close_matches(name.lower(), METHODS, n=3, cutoff=0.5)
        offer = f"near it: {', '.join(near)}" if near else f"there are {', '.join(METHODS)}"
        raise ValueError(f"no method is called {name!r}; {offer}")
    known = inspect.signature(METHODS[name]).parameters
    if wrong := [option for option in options if option not in known]:
        raise ValueError(f"{name} has no option {wrong[0]!r}; it has {', '.join(known) or 'none'}")
    return METHODS[name](**options)


def head_of(model: nn.Module, head: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the modules of the head: those given, else of the last linear layer."""
    if head is None:
        return (find_head(model),)
    given = (head,) if isinstance(head, str) else tuple(head)
    modules = dict(model.named_modules())
    for name in given:
        if name not in modules:
            near = get_close_matches(name, modules, n=3) or [n for n in modules if n][-3:]
            raise ValueError(f"the model has no module {name!r} to be its head; it has {', '.join(near)}")
    return given


def names_of(part: Part, model: nn.Module, head: Sequence[str]) -> set[str]:
    """The names of the parameters and buffers of a part of a model."""
    every = set(state_of(model))
    if part not in get_args(Part):
        raise ValueError(f"no part of a model is called {part!r}; there are {', '.join(get_args(Part))}")
    if part in ("all", "none"):
        return every if part == "all" else set()
    if part in ("head", "body"):
        chosen = {name for name in every if any(not module or name.startswith(f"{module}.") for module in head)}
        return chosen if part == "head" else every - chosen
    layers = atom_layers(model)
    if not layers:
        raise ValueError(
            f"the part {part!r} is of models made of atoms, and this one has none: alexnet(atoms=9), or "
            "with_atoms(model, 9), makes one"
        )
    chosen = {f"{layer}.coefficients" if layer else "coefficients" for layer in layers} & every
    return chosen if part == "coefficients" else every - chosen

"""Which weights can have a mask: those of convolutions and linear layers, each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy

from ...capture import nearest, unwrap
from ...capture.names import Names

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, _ConvTransposeNd)
MASK = "weight_mask"  # the name torch.nn.utils.prune gives the buffer


def layers_of(model: nn.Module) -> dict[str, list[str]]:
    """The first name of each layer with a weight of its own, not empty, and every name that its weight goes by.

    Modules that share a parameter (tied weights), and names that share a module, are one layer.
    """
    modules = Names.of(unwrap(model)).by_name
    found: dict[int, list[str]] = {}
    for name, module in modules.items():
        weight = module._parameters.get("weight")
        if isinstance(module, KINDS) and weight is not None and (is_lazy(weight) or weight.numel()):
            found.setdefault(id(weight), []).append(name)
    return {names[0]: names for names in found.values()}


def maskable(model: nn.Module, dense: str | Iterable[str] = ()) -> dict[str, nn.Module]:
    """The layers to be masked by name; `dense`: names or globs of layers that stay whole."""
    modules, layers = Names.of(unwrap(model)).by_name, layers_of(model)
    aliases = {alias: name for name, names in layers.items() for alias in names}
    kinds = {name: module for name, module in modules.items() if isinstance(module, KINDS)}
    computed = [name for name, module in kinds.items() if module._parameters.get("weight") is None]
    whole = named([*aliases, *computed], dense, "dense")
    if odd := [name for name in computed if name not in whole]:
        raise ValueError(
            f"the weight of {listed(odd)} is no parameter: where torch.nn.utils.prune masked it, Masks.of(model) takes "
            "the masks over; remove a parametrisation, or name the layer in dense"
        )
    whole = {aliases.get(name, name) for name in whole}
    found = {name: modules[name] for name in layers if name not in whole}
    if lazy := [name for name, module in found.items() if is_lazy(weight_of(module))]:
        raise ValueError(f"{listed(lazy)} has no shape yet: call the model once first")
    if not found:
        left = f"; all {len(layers)} stay dense" if layers else ": it has no convolution or linear layer with a weight"
        raise ValueError(f"nothing to mask in {type(unwrap(model)).__name__}{left}")
    return found


def named(known: Iterable[str], wanted: str | Iterable[str], word: str) -> set[str]:
    """The known names that are wanted, an exact name before a glob; one that fits nothing is refused."""
    known = list(known)
    found: set[str] = set()
    for each in [wanted] if isinstance(wanted, str) else wanted:
        fits = {each} & set(known) or {name for name in known if fnmatchcase(name, each)}
        if not fits:
            raise ValueError(f"{word}: no convolution or linear layer is called {each!r}{nearest(each, known)}")
        found |= fits
    return found


def weight_of(module: nn.Module) -> nn.Parameter:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def shapes_of(layers: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight_of(module).shape) for name, module in layers.items()}


def mask_of(module: nn.Module) -> Tensor | None:
    """The mask that a module has, if any; of its own weight only, not of its children's."""
    return module._buffers.get(MASK)


def listed(names: Iterable[str], shown: int = 5) -> str:
    names = list(names)
    rest = f" … and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + rest

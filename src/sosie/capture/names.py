"""The modules of a model by name, seen through the wrappers that torch puts around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

_COMPILED = "_orig_mod"  # the child under which torch.compile keeps the module it wraps
_REPARAMETRIZED = "parametrizations"  # modules that compute weights, not activations


def unwrap(model: nn.Module) -> nn.Module:
    """The module itself, out of torch.compile, DataParallel and DistributedDataParallel.

    Hooks added after a compiled model's first call do not fire, and the wrapper's names carry a prefix.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"need a torch.nn.Module, got {type(model).__name__}")
    while True:
        if _COMPILED in model._modules:
            model = model.get_submodule(_COMPILED)
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Every module once, as `model.modules()` has them, but not in that order, and in a quarter of the time."""
    found, known = [model], {id(model)}
    for module in found:
        if children := module._modules:  # most have none
            for child in children.values():
                if child is not None and id(child) not in known:
                    known.add(id(child))
                    found.append(child)
    return found if _as_torch_has(found, "modules", "named_modules") else list(model.modules())


def parameters_of(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """As `model.parameters()` has them, of a model whose modules are known; a shared one more than once."""
    if not _as_torch_has(modules, "parameters", "named_parameters"):
        return list(model.parameters())
    return [own for module in modules for own in module._parameters.values() if own is not None]


def _as_torch_has(modules: Iterable[nn.Module], *methods: str) -> bool:
    """Whether no class among these has methods of its own in place of torch's: it may show what lies elsewhere."""
    kinds = set(map(type, modules))
    return all(getattr(kind, method) is getattr(nn.Module, method) for kind in kinds for method in methods)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile stands between a call of this module and its code."""
    return (
        _COMPILED in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def is_script(module: nn.Module) -> bool:
    """Whether this is TorchScript, of which torch takes no hooks."""
    return isinstance(module, torch.jit.ScriptModule)


@dataclass(frozen=True)
class Names:
    """Every name a module of the model goes by; a shared module's first name is the one it is shown under."""

    by_name: dict[str, nn.Module]  # in registration order, "" is the model itself
    first: dict[int, str]  # id of a module -> its first name
    parents: frozenset[str]  # names that have names below them

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        if is_script(model):
            raise TypeError(
                "this is a TorchScript module, whose layers cannot be watched: give the model that it was scripted or "
                "traced from (compare_outputs takes it as it is)"
            )
        by_name: dict[str, nn.Module] = {}
        first: dict[int, str] = {}
        for raw, module in model.named_modules(remove_duplicate=False):
            name = raw
            if _REPARAMETRIZED in raw or _COMPILED in raw:
                parts = raw.split(".")
                if _REPARAMETRIZED in parts:
                    continue
                name = ".".join(part for part in parts if part != _COMPILED)
            by_name[name] = module  # a compiled child's original comes after its wrapper and takes its place
            first.setdefault(id(module), name)
        parents = {above for name in by_name for above in ancestors(name)}
        return cls(by_name, first, frozenset(parents))

    def unique(self) -> dict[str, nn.Module]:
        """Each module once, under its first name."""
        return {name: module for name, module in self.by_name.items() if self.first[id(module)] == name}

    def is_leaf(self, name: str) -> bool:
        """No children that are ever called: attention reads `out_proj`'s weight and never calls it."""
        return name not in self.parents or isinstance(self.by_name[name], nn.MultiheadAttention)

    def leaves(self) -> list[str]:
        found = []
        for name in self.unique():
            inside = any(isinstance(self.by_name[above], nn.MultiheadAttention) for above in ancestors(name))
            if self.is_leaf(name) and not inside:
                found.append(name)
        return found


@lru_cache(maxsize=100_000)
def ancestors(name: str) -> tuple[str, ...]:
    """The names above this one, the model's own "" first: `a.b.c` gives "", `a`, `a.b`."""
    if not name:
        return ()
    parts = name.split(".")
    return tuple(".".join(parts[:i]) for i in range(len(parts)))

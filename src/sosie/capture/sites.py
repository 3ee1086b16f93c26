"""Sites: the modules of a model by name, which of them are taken by default, and how to ask for others."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..checks import nearest

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


def named_parameters(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by name, of a model or a state dict; weights that a layer computes, as it computes them.

    Pruned weights, weight norm, spectral norm and other parametrisations are meant. A state dict tells only of pruning.
    """
    if isinstance(model, nn.Module):
        plain = unwrap(model)
        computed = {
            ".".join(filter(None, (name, part))): (".".join(filter(None, (name, own))), tensor)
            for name, module in plain.named_modules()
            for own, parts, tensor in _computed_weights(module)
            for part in parts
        }
        return dict(computed.get(name, (name, parameter.detach())) for name, parameter in plain.named_parameters())
    statistics = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm
    pruned = {own for own in (name[:-5] for name in model if name.endswith("_orig")) if f"{own}_mask" in model}
    found = {}
    for name, tensor in model.items():
        own = name.removesuffix("_orig")
        if own in pruned:
            found[own] = tensor.detach() * model[f"{own}_mask"]
        elif not name.endswith(statistics) and name.removesuffix("_mask") not in pruned:
            found[name] = tensor.detach()
    return found


def _computed_weights(module: nn.Module) -> Iterator[tuple[str, list[str], Tensor]]:
    """Weights that a layer makes of other parameters: their name, those of the others, and the numbers."""
    with torch.no_grad():
        chains = module._modules.get(_REPARAMETRIZED)
        for own, chain in [] if chains is None else chains.named_children():
            parts = [f"{_REPARAMETRIZED}.{own}.{part}" for part, _ in chain.named_parameters()]
            yield own, parts, copy.deepcopy(chain).eval()()  # some change their state while they train
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                yield hook._tensor_name, [f"{hook._tensor_name}_orig"], hook.apply_mask(module)
            elif isinstance(hook, WeightNorm):
                yield hook.name, [f"{hook.name}_g", f"{hook.name}_v"], hook.compute_weight(module)
            elif isinstance(hook, SpectralNorm):
                yield hook.name, [f"{hook.name}_orig"], hook.compute_weight(module, do_power_iteration=False)


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


# Which sites to take when nobody says: a model's repeated blocks, or the layers of a plain net

_UNCHANGED_AT_EVAL = (nn.modules.dropout._DropoutNd, nn.Identity, nn.Flatten)


def default_sites(names: Names) -> list[str]:
    """Repeated blocks where the model has them, else every layer that changes what passes through it."""
    layers = (name for name in names.leaves() if not isinstance(names.by_name[name], _UNCHANGED_AT_EVAL))
    return repeated_blocks(names) or list(layers) or [""]


def repeated_blocks(names: Names) -> list[str]:
    """The outermost modules with children whose class occurs at least twice; of a stack its layers."""
    blocks = {name: type(module) for name, module in names.unique().items() if _is_block(names, name)}
    by_class = defaultdict(list)
    for name, kind in blocks.items():
        by_class[kind].append(name)
    repeated = {kind for kind, where in by_class.items() if len(where) > 1 and not _parts_of_one(names, where)}
    outermost: list[str] = []
    for name, kind in blocks.items():
        inside = not set(outermost).isdisjoint(ancestors(name))
        if not inside and kind in repeated and not _is_stack(names, name):
            outermost.append(name)
    return outermost


def _is_block(names: Names, name: str) -> bool:
    """A part of the model that computes something out of other parts; no mere container of them."""
    kind = type(names.by_name[name])
    if not name or names.is_leaf(name) or kind is nn.Sequential:
        return False
    # Looked up without descriptors: a scripted module's forward cannot be read off its class.
    return getattr_static(kind, "forward") is not nn.Module.forward


def _is_stack(names: Names, name: str) -> bool:
    """Whether a module is one half of a model, as T5's encoder and decoder are, and its listed layers the blocks.

    A block of a block is none: blocks are numbered themselves, and few are mostly one list of one class.
    """
    if name.rpartition(".")[2].isdecimal():
        return False
    leaves = sum(name in ancestors(leaf) for leaf in names.leaves())
    for child, module in names.by_name[name].named_children():
        listed = f"{name}.{child}"
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(layer) for layer in module}) == 1:
            inside = sum(listed in ancestors(leaf) for leaf in names.leaves())
            if _is_block(names, f"{listed}.0") and 2 * inside >= leaves:
                return True
    return False


def _parts_of_one(names: Names, found: list[str]) -> bool:
    """Whether all lie in one block of which they are the lesser part, as two MLPs beside an attention do.

    An encoder that is nothing but its layers is the opposite case: there the layers are the blocks.
    """
    shared = set(ancestors(found[0])).intersection(*map(ancestors, found[1:]))
    home = max((name for name in shared if name == "" or _is_block(names, name)), key=len)
    if home == "":
        return False
    leaves = [name for name in names.leaves() if home in ancestors(name)]
    covered = [name for name in leaves if set(found).intersection(ancestors(name))]
    return 2 * len(covered) < len(leaves)


# Sites: the places of a model where activations are taken, and how to ask for them

OUTPUT = "output"


class SiteError(ValueError):
    """Something is wrong with a site that was asked for."""


class UnknownSite(SiteError):
    """No module of the model answers to this name, glob or type."""


class SilentSite(SiteError):
    """A site that was asked for did not fire."""


class NoRows(SiteError):
    """What a site returned cannot become rows: an error where it was named, else the site is left out."""

    def __init__(self, label: str, reason: str, instead: str) -> None:
        super().__init__(f"site {label!r} {reason}. {instead}")
        self.reason = reason


@dataclass(frozen=True)
class Site:
    """One call of one module: where activations are taken, under a label that is unique in the model."""

    label: str  # "layer1.0"; the second call of a module in one forward is "mix@2"
    module_name: str  # "" is the model itself
    call: int  # counted from 1
    shape: tuple[int, ...]  # of one input's activation, as in the first forward
    channels_last: bool | None  # whether the last dimension holds the features, or else the first; None: not known


@dataclass
class SiteRequest:
    """What was asked of one module: which of its calls, and which of them must happen."""

    module: nn.Module
    calls: set[int] | None = field(default_factory=set)  # None: every call
    required: set[int] = field(default_factory=set)  # named exactly, so their absence is an error


def select(model: nn.Module, sites: Any = None) -> dict[str, SiteRequest]:
    """The modules asked for, by their first name, in registration order.

    `sites` is None (repeated blocks, or the layers of a plain net), one selector, or a list of them: a
    module's name (every call of it), "name@k" (its k-th call), a glob (`*` crosses dots; an exact name wins),
    a module type, a module of the model, "leaves", "blocks", or "." for the model's own output.
    """
    return selected(Names.of(unwrap(model)), sites)


def selected(names: Names, sites: Any = None) -> dict[str, SiteRequest]:
    """The same, of a model whose names are known."""
    if sites is None:
        chosen: list[tuple[str, int | None, bool]] = [(name, None, False) for name in default_sites(names)]
    else:
        selectors = [sites] if isinstance(sites, (str, type, nn.Module)) else list(sites)
        if not selectors:
            raise UnknownSite("an empty list of sites; leave sites out for the default")
        chosen = [each for selector in selectors for each in _resolve(names, selector)]
    requests: dict[str, SiteRequest] = {}
    for name, call, exact in chosen:
        request = requests.setdefault(name, SiteRequest(names.by_name[name]))
        if call is None:
            request.calls = None
        elif request.calls is not None:
            request.calls.add(call)
        if exact:
            request.required.add(call or 1)
    return {name: requests[name] for name in names.by_name if name in requests}


def _resolve(names: Names, selector: Any) -> list[tuple[str, int | None, bool]]:
    if isinstance(selector, str):
        return _by_text(names, selector)
    if isinstance(selector, nn.Module):
        name = names.first.get(id(selector), names.first.get(id(unwrap(selector))))
        if name is None:
            raise UnknownSite(f"this {type(selector).__name__} is not a part of the model")
        return [(name, None, True)]
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        found = [name for name, module in names.unique().items() if isinstance(module, selector)]
        if not found:
            kinds = sorted({type(module).__name__ for module in names.by_name.values()})
            raise UnknownSite(f"no module of type {selector.__name__}; there are {', '.join(kinds)}")
        return [(name, None, False) for name in found]
    raise UnknownSite(f"a site is a name, a glob, a module type or a module; got {selector!r}")


def _by_text(names: Names, text: str) -> list[tuple[str, int | None, bool]]:
    exact = find_name(names, text)
    if exact is not None:
        return [(*exact, True)]
    if text == "leaves":
        return [(name, None, False) for name in names.leaves()]
    if text == "blocks":
        found = repeated_blocks(names)
        if not found:
            raise UnknownSite('no blocks: no class of modules with children occurs twice; try "leaves"')
        return [(name, None, False) for name in found]
    pattern, call = split_call(text)
    globbed = [name for name in names.by_name if name and fnmatchcase(name, pattern)]
    matched = {names.first[id(names.by_name[name])] for name in globbed}
    if not matched or not set("*?[") & set(pattern):
        alone = "; the model has no parts: '.' is its own output"
        near = nearest(pattern, names.by_name) if len(names.by_name) > 1 else alone
        raise UnknownSite(f"no module is called {pattern!r}{near}")
    return [(name, call, False) for name in names.by_name if name in matched]


def find_name(names: Names, text: str) -> tuple[str, int | None] | None:
    """First name and call that a text names exactly (by an alias too), or None."""
    for candidate, call in ((text, None), split_call(text)):
        name = "" if candidate in ("", ".") else candidate
        if name == OUTPUT and OUTPUT not in names.by_name:
            name = ""
        if name in names.by_name:
            return names.first[id(names.by_name[name])], call
    return None


def split_call(text: str) -> tuple[str, int | None]:
    """Name and call: "mix@2" gives ("mix", 2); without a number the call is None."""
    name, _, call = text.rpartition("@")
    if call.isdecimal() and "@" in text:
        if int(call) == 0:
            raise UnknownSite(f"calls are counted from 1, got {text!r}")
        return name, int(call)
    return text, None


def label_of(names: Names, name: str, call: int) -> str:
    """How a site is shown; the model's own output is "output" unless a module took that name."""
    base = name or ("." if OUTPUT in names.by_name else OUTPUT)
    return base if call == 1 else f"{base}@{call}"

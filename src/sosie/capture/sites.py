"""Sites of a model: which modules are taken, and hooks that capture their activations during the forward."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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
from torch.utils.hooks import RemovableHandle

from ..checks import listed, nearest
from ..process_state import without_autocast
from .layout import FeatureAxes
from .restore import COMPILED, every_module_called

_REPARAMETRIZED = "parametrizations"  # modules that compute weights, not activations
PACKED = "_packed_params"  # and one that holds those of a quantised layer


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DataParallel and DistributedDataParallel.

    Hooks added after a compiled model's first call do not fire, and the wrapper's names carry a prefix.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"need a torch.nn.Module, got {type(model).__name__}")
    while True:
        if COMPILED in model._modules:
            model = model.get_submodule(COMPILED)
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def named_parameters(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a model or a state dict by name, with computed weights in their computed form.

    Computed are pruned weights, weight norm, spectral norm and other parametrisations; a state dict shows only pruning.
    """
    if isinstance(model, nn.Module):
        plain = unwrap(model)
        computed = {
            ".".join(filter(None, (name, source))): (".".join(filter(None, (name, weight))), tensor)
            for name, module in plain.named_modules()
            for weight, sources, tensor in _computed_weights(module)
            for source in sources
        }
        return dict(computed.get(name, (name, parameter.detach())) for name, parameter in plain.named_parameters())
    statistics = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm
    pruned = {name[:-5] for name in model if name.endswith("_orig") and f"{name[:-5]}_mask" in model}
    parameters = {}
    for name, tensor in model.items():
        plain_name = name.removesuffix("_orig")
        if plain_name in pruned:
            parameters[plain_name] = tensor.detach() * model[f"{plain_name}_mask"]
        elif not name.endswith(statistics) and name.removesuffix("_mask") not in pruned:
            parameters[name] = tensor.detach()
    return parameters


def _computed_weights(module: nn.Module) -> Iterator[tuple[str, list[str], Tensor]]:
    """Yield each weight that a layer computes: its name, the names of the parameters behind it, and the numbers."""
    with torch.no_grad():
        chains = module._modules.get(_REPARAMETRIZED)
        for name, chain in [] if chains is None else chains.named_children():
            sources = [f"{_REPARAMETRIZED}.{name}.{part}" for part, _ in chain.named_parameters()]
            yield name, sources, copy.deepcopy(chain).eval()()  # some change their state in training mode
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                yield hook._tensor_name, [f"{hook._tensor_name}_orig"], hook.apply_mask(module)
            elif isinstance(hook, WeightNorm):
                yield hook.name, [f"{hook.name}_g", f"{hook.name}_v"], hook.compute_weight(module)
            elif isinstance(hook, SpectralNorm):
                yield hook.name, [f"{hook.name}_orig"], hook.compute_weight(module, do_power_iteration=False)


@dataclass(frozen=True)
class Names:
    """All names of a model's modules; a shared module is shown under its first name."""

    by_name: dict[str, nn.Module]  # in registration order, "" is the model itself
    first: dict[int, str]  # id of a module -> its first name
    parents: frozenset[str]  # names of modules with children

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                "a TorchScript module, whose layers cannot be watched: give the model that was scripted or traced "
                "(compare_outputs takes TorchScript)"
            )
        by_name: dict[str, nn.Module] = {}
        first: dict[int, str] = {}
        for raw, module in model.named_modules(remove_duplicate=False):
            name = raw
            if _REPARAMETRIZED in raw or PACKED in raw or COMPILED in raw:
                parts = raw.split(".")
                if _REPARAMETRIZED in parts or PACKED in parts:
                    continue
                name = ".".join(part for part in parts if part != COMPILED)
            by_name[name] = module  # a compiled child's original comes after its wrapper and takes its place
            first.setdefault(id(module), name)
        parents = {above for name in by_name for above in ancestors(name)}
        return cls(by_name, first, frozenset(parents))

    def unique(self) -> dict[str, nn.Module]:
        """Each module once, under its first name."""
        return {name: module for name, module in self.by_name.items() if self.first[id(module)] == name}

    def is_leaf(self, name: str) -> bool:
        """Return whether no child is ever called: attention reads `out_proj`'s weight without calling it."""
        return name not in self.parents or isinstance(self.by_name[name], nn.MultiheadAttention)

    def leaves(self) -> list[str]:
        """Return the modules without children, and attention, whose parts do not count."""
        attention = {name for name, module in self.by_name.items() if isinstance(module, nn.MultiheadAttention)}
        return [name for name in self.unique() if self.is_leaf(name) and attention.isdisjoint(ancestors(name))]


@lru_cache(maxsize=100_000)
def ancestors(name: str) -> tuple[str, ...]:
    """Return the names above this one, the model's own "" first: `a.b.c` gives "", `a`, `a.b`."""
    if not name:
        return ()
    parts = name.split(".")
    return tuple(".".join(parts[:i]) for i in range(len(parts)))


# The default sites: a model's repeated blocks, or the layers of a plain network

_UNCHANGED_AT_EVAL = (nn.modules.dropout._DropoutNd, nn.Identity, nn.Flatten)


def repeated_blocks(names: Names) -> list[str]:
    """Return the outermost modules with children whose class occurs at least twice, or the layers of a stack."""
    blocks = {name: type(module) for name, module in names.unique().items() if _is_block(names, name)}
    by_class = defaultdict(list)
    for name, kind in blocks.items():
        by_class[kind].append(name)
    repeated = {kind for kind, group in by_class.items() if len(group) > 1 and not _parts_of_one(names, group)}
    outermost: list[str] = []
    for name, kind in blocks.items():
        inside = not set(outermost).isdisjoint(ancestors(name))
        if not inside and kind in repeated and not _is_stack(names, name):
            outermost.append(name)
    return outermost


def outside(names: Names, sites: Iterable[str]) -> list[str]:
    """Return the outermost modules with weights beside these sites: embeddings, a stem, a head."""
    sites = set(sites)
    above = {name for site in sites for name in ancestors(site)}
    found: list[str] = []
    for name, module in names.unique().items():
        if name in above or not {name, *ancestors(name)}.isdisjoint(sites | set(found)) or not _has_forward(module):
            continue
        if next(module.parameters(), None) is not None:
            found.append(name)
    return found


def _has_forward(module: nn.Module) -> bool:
    # A static lookup, since a scripted module's class raises when its forward is read.
    return getattr_static(type(module), "forward") is not nn.Module.forward


def _is_block(names: Names, name: str) -> bool:
    """Return whether a module computes something out of its children and is not only their container."""
    module = names.by_name[name]
    return bool(name) and not names.is_leaf(name) and type(module) is not nn.Sequential and _has_forward(module)


def _is_stack(names: Names, name: str) -> bool:
    """Return whether a module is a half of a model, such as T5's encoder, whose listed layers are the blocks.

    A block inside a list is not a stack, and few blocks consist mostly of one list of one class.
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


def _parts_of_one(names: Names, group: list[str]) -> bool:
    """Return whether all lie in one block and make up less than half of it, as two MLPs beside an attention do.

    An encoder that consists of its layers is the opposite case: there the layers are the blocks.
    """
    shared = set(ancestors(group[0])).intersection(*map(ancestors, group[1:]))
    home = max((name for name in shared if name == "" or _is_block(names, name)), key=len)
    if home == "":
        return False
    leaves = [name for name in names.leaves() if home in ancestors(name)]
    covered = [name for name in leaves if set(group).intersection(ancestors(name))]
    return 2 * len(covered) < len(leaves)


# Sites: where in a model activations are taken, and how to select them

OUTPUT = "output"


class SiteError(ValueError):
    """A requested site does not exist or cannot be read."""


class SilentSite(SiteError):
    """A requested site did not fire."""


class NoRows(SiteError):
    """The output of a site cannot become rows: an error for a named site; other sites are left out."""

    def __init__(self, label: str, reason: str, instead: str) -> None:
        super().__init__(f"site {label!r} {reason}. {instead}")
        self.reason = reason


@dataclass(frozen=True)
class Site:
    """One call of one module, under a label that is unique in the model."""

    label: str  # "layer1.0"; "mix@2" for the second call of a module in one forward
    module_name: str  # "" is the model itself
    call: int  # counted from 1
    shape: tuple[int, ...]  # of one input's activation, in the first forward
    channels_last: bool | None  # whether the last dimension holds the features, else the first; None: unknown


@dataclass
class SiteRequest:
    """The requested calls of one module, and those among them that must happen."""

    module: nn.Module
    calls: set[int] | None = field(default_factory=set)  # None: every call
    required: set[int] = field(default_factory=set)  # named exactly, so silence is an error


def select(model: nn.Module | Names, sites: Any = None) -> dict[str, SiteRequest]:
    """Return the selected modules by their first name, in registration order.

    `sites` is None (repeated blocks, or every layer that changes its input), one selector, or a list of them: a
    module's name (every call of it), "name@k" (its k-th call), a glob (`*` crosses dots; an exact name wins),
    a module type, a module of the model, "leaves", "blocks", or "." for the model's own output.
    """
    names = model if isinstance(model, Names) else Names.of(unwrap(model))
    if sites is None:
        layers = (name for name in names.leaves() if not isinstance(names.by_name[name], _UNCHANGED_AT_EVAL))
        default = repeated_blocks(names) or list(layers) or [""]
        chosen: list[Choice] = [(name, None, False) for name in default]
    else:
        selectors = [sites] if isinstance(sites, (str, type, nn.Module)) else list(sites)
        if not selectors:
            raise SiteError("the list of sites is empty; leave sites out for the default")
        chosen = [choice for selector in selectors for choice in _resolve(names, selector)]
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


Choice = tuple[str, int | None, bool]  # a module's name, the call (None: all), and whether it was named exactly


def _resolve(names: Names, selector: Any) -> list[Choice]:
    if isinstance(selector, str):
        return _by_text(names, selector)
    if isinstance(selector, tuple):
        return [selector]
    if isinstance(selector, nn.Module):
        name = names.first.get(id(selector), names.first.get(id(unwrap(selector))))
        if name is None:
            raise SiteError(f"this {type(selector).__name__} is not a part of the model")
        return [(name, None, True)]
    if not (isinstance(selector, type) and issubclass(selector, nn.Module)):
        raise SiteError(f"a site is a name, a glob, a module type or a module; got {selector!r}")
    matches = [name for name, module in names.unique().items() if isinstance(module, selector)]
    if not matches:
        kinds = sorted({type(module).__name__ for module in names.by_name.values()})
        raise SiteError(f"no module of type {selector.__name__}; there are {', '.join(kinds)}")
    return [(name, None, False) for name in matches]


def _by_text(names: Names, text: str) -> list[Choice]:
    exact = find_name(names, text)
    if exact is not None:
        return [(*exact, True)]
    if text in ("leaves", "blocks"):
        matches = names.leaves() if text == "leaves" else repeated_blocks(names)
        if not matches:
            raise SiteError('no blocks: no class of modules with children occurs twice; try "leaves"')
        return [(name, None, False) for name in matches]
    pattern, call = split_call(text)
    matches = [name for name in names.by_name if name and fnmatchcase(name, pattern)]
    if not matches or not set("*?[") & set(pattern):
        alone = "; the model has no children: '.' is its own output"
        near = nearest(pattern, names.by_name) if len(names.by_name) > 1 else alone
        raise SiteError(f"no module is called {pattern!r}{near}")
    first_names = {names.first[id(names.by_name[name])] for name in matches}
    return [(name, call, False) for name in names.by_name if name in first_names]


def find_name(names: Names, text: str) -> tuple[str, int | None] | None:
    """Return the first name and the call that a text (or an alias) names exactly, or None."""
    for candidate, call in ((text, None), split_call(text)):
        name = "" if candidate in ("", ".") else candidate
        if name == OUTPUT and OUTPUT not in names.by_name:
            name = ""
        if name in names.by_name:
            return names.first[id(names.by_name[name])], call
    return None


def split_call(text: str) -> tuple[str, int | None]:
    """Split "mix@2" into ("mix", 2); the call is None without a number."""
    name, _, call = text.rpartition("@")
    if call.isdecimal() and "@" in text:
        if int(call) == 0:
            raise SiteError(f"calls are counted from 1, got {text!r}")
        return name, int(call)
    return text, None


def label_of(names: Names, name: str, call: int) -> str:
    """Return the label of a site; the model's own output is "output" unless a module has that name."""
    base = name or ("." if OUTPUT in names.by_name else OUTPUT)
    return base if call == 1 else f"{base}@{call}"


# The main tensor in whatever a module returns

_PREFERRED = ("last_hidden_state", "logits", "out")  # of a layer
ANSWERS = ("logits", "out", "last_hidden_state")  # of a whole model


def first_tensor(output: Any, preferred: Sequence[str] = _PREFERRED) -> Tensor | None:
    """Return the main tensor of an output: the tensor itself, the first of a tuple or list, or a dict's main entry.

    In a dict (ModelOutput too) or an object with such attributes it is `last_hidden_state`, else `logits`, else `out`
    (or the `preferred` keys), else the first tensor.
    """
    path = path_to_tensor(output, preferred)
    return None if path is None else at_path(output, path)


def path_to_tensor(output: Any, preferred: Sequence[str] = _PREFERRED) -> tuple[Any, ...] | None:
    """Return the keys that lead to an output's `first_tensor`, outermost first; None without a tensor."""
    if isinstance(output, Tensor):
        return ()
    for key, part in parts_of(output, preferred):
        inside = path_to_tensor(part, preferred)
        if inside is not None:
            return (key, *inside)
    return None


def like(parts_of: Any, parts: list[Any]) -> Any:
    """Return a tuple (named ones too) or list of the same kind with other parts."""
    return type(parts_of)(*parts) if hasattr(parts_of, "_fields") else type(parts_of)(parts)


def at_path(output: Any, path: Sequence[Any]) -> Any:
    for key in path:
        output = getattr(output, key) if _is_record(output) else output[key]
    return output


def replaced(output: Any, path: Sequence[Any], new: Any) -> Any:
    """Return a copy of the output with `new` at the end of a path."""
    if not path:
        return new
    inside = replaced(at_path(output, path[:1]), path[1:], new)
    if isinstance(output, (tuple, list)):
        return like(output, [inside if i == path[0] else part for i, part in enumerate(output)])
    changed = copy.copy(output)
    if _is_record(output):
        object.__setattr__(changed, path[0], inside)
    else:
        changed[path[0]] = inside
    return changed


def fresh_leaf(output: Any, *, anew: bool = False) -> tuple[Tensor, Any] | None:
    """Return a leaf to differentiate by, and the output with a copy of the leaf in place of its activation.

    None if gradients flow already, unless the graph is to begin `anew`. The copy lets the model work in place.
    """
    path = path_to_tensor(output)
    if path is None:
        return None
    activation = at_path(output, path)
    if (activation.requires_grad and not anew) or not activation.is_floating_point():
        return None
    leaf = activation.detach().requires_grad_()
    return leaf, replaced(output, path, leaf.clone())


def unshared(output: Any) -> Any:
    """Return the output, with a copy of its activation if that is a view."""
    path = path_to_tensor(output)
    if path is None or not at_path(output, path)._is_view():
        return output
    return replaced(output, path, at_path(output, path).clone())


def tensors_at(structure: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield every tensor in a structure, with the keys that lead to it."""
    if isinstance(structure, Tensor):
        yield path, structure
        return
    for key, part in parts_of(structure, ()):
        yield from tensors_at(part, (*path, key))


def tensors_in(output: Any) -> list[Tensor]:
    """Return every tensor in an output of any structure."""
    return [tensor for _, tensor in tensors_at(output)]


def parts_of(output: Any, preferred: Sequence[str]) -> list[tuple[Any, Any]]:
    """Return the parts of a container by key, the preferred keys first; nothing for other objects."""
    if _is_record(output):
        output = {
            key: getattr(output, key) for key in [*_PREFERRED, *getattr(output, "__dict__", {})] if hasattr(output, key)
        }
    if isinstance(output, Mapping):
        keys = [key for key in preferred if key in output]
        keys += [key for key in output if key not in keys]
        return [(key, output[key]) for key in keys]
    return list(enumerate(output)) if isinstance(output, (tuple, list)) else []


def _is_record(output: Any) -> bool:
    """Return whether an output is a dataclass, or holds its main tensor as an attribute as in other libraries.

    A dataclass without fields is an object with a state of its own, as the caches of transformers 4.40 are.
    """
    if isinstance(output, (Tensor, Mapping, tuple, list, type)):
        return False
    if dataclasses.is_dataclass(output) and dataclasses.fields(output):
        return True
    return any(isinstance(getattr(output, k, None), Tensor) for k in _PREFERRED)


def answer_in(output: Any) -> Tensor | None:
    """Return the tensor that a whole model answers with: itself, the first of a tuple, or a dict's `logits`."""
    return first_tensor(output, ANSWERS)


def activation_in(output: Any) -> Tensor | str:
    """Return the activation, or the reason why there is none."""
    tensor = first_tensor(output)
    if tensor is None:
        return f"returned {type(output).__name__}, which holds no tensor"
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if not tensor.is_floating_point():
        return f"returned a tensor of {str(tensor.dtype).removeprefix('torch.')}, not of floating-point numbers"
    if tensor.is_nested:
        return "returned a nested tensor, whose inputs differ in shape"
    if tensor.layout != torch.strided:
        return f"returned a {str(tensor.layout).removeprefix('torch.')} tensor, not a dense one"
    return tensor


# Watching a model


class Keep:
    """The sink that keeps the activation itself, cloned only if the model overwrites it.

    The first forward clones everything and learns from the tensors' version counters which sites are
    overwritten; afterwards only those are cloned.
    """

    def __init__(self) -> None:
        self._overwritten: set[str] | None = None  # None until the first forward is over
        self.start()

    def start(self) -> None:
        self._live: list[tuple[str, Tensor, int]] = []
        self._versions: dict[str, int] = {}

    def __call__(self, site: Site, activation: Tensor) -> Tensor:
        if activation.is_inference():
            # It has no version counter and could not enter a later backward; a clone can.
            with torch.inference_mode(False), torch.no_grad():
                return activation.clone()
        if self._overwritten is None:
            self._live.append((site.label, activation, activation._version))
            return activation.clone()
        if site.label in self._overwritten:
            return activation.clone()
        self._versions[site.label] = activation._version
        return activation

    def learn(self) -> None:
        """Called when a forward is over."""
        if self._overwritten is None:
            self._overwritten = {label for label, live, version in self._live if live._version != version}
        self._live.clear()

    def check(self, label: str, kept: Tensor) -> None:
        """Raise if a tensor was changed in place that was unchanged in the first forward."""
        version = self._versions.get(label)
        if version is not None and kept._version != version:
            if self._overwritten is not None:
                self._overwritten.add(label)
            raise SiteError(
                f"the activation of site {label!r} was changed in place after it was captured; "
                "run the forward again (it will be cloned), and change the model's output only after reading"
            )


Sink = Callable[[Site, Tensor], Any]

# The watch whose run() is active: if one model is watched twice, only that watch records.
_RUNNING: ContextVar[Watch | None] = ContextVar("sosie_running_watch", default=None)


@contextmanager
def watch(model: nn.Module, sites: Any = None, *, sink: Sink | None = None, axes: bool = True) -> Iterator[Watch]:
    """Record the activations of a model's forwards at these sites (see `select`) within the block.

    `sink(site, activation)` is called inside the hook, outside autocast, and its result is kept instead of the
    activation; it receives the live tensor, before any later in-place operation, and must not change it. If it raises,
    the watch stops recording and the error is raised at the end of the forward, which always runs to its end. Without a
    sink the activation is kept, cloned if the model overwrites it. Inside the block attention's fused inference path
    and compiled code are off, since both bypass hooks, and other threads that need the model wait. `axes=False` skips
    the search for the dimension with the features, which makes the first forward faster; `Site.channels_last` is then
    None.
    """
    seen = Watch(model, sites, sink, axes)
    with every_module_called(model):
        try:
            seen._open()
            yield seen
        finally:
            seen._close()


class Watch:
    """The values of the last forward by label, and the sites in execution order.

    It is filled by `seen.run(x)` or a plain call of the model; each forward starts afresh. It stays readable after the
    block.
    """

    def __init__(self, model: nn.Module, sites: Any, sink: Sink | None, axes: bool) -> None:
        self._root = unwrap(model)
        self._names = Names.of(self._root)
        self._requests = select(self._names, sites)
        self._keep = Keep() if sink is None else None
        self._sink: Sink = sink or self._keep  # type: ignore[assignment]
        self._handles: list[RemovableHandle] = []
        self._sites: dict[str, Site] | None = None  # in execution order, set at the end of the first forward
        self._axes = axes
        self._layout: FeatureAxes | None = None  # during the first forward
        self._silent: dict[str, str] = {}  # the sites of modules that were never called, and why
        self._no_activation: dict[str, str] = {}
        self._thread = threading.get_ident()
        self._depth = 0  # a model may call itself
        self._start()
        self._active = False

    # The forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward that fills only this watch, and return what the model answers."""
        if not self._handles:
            raise RuntimeError("this watch is over: call run() inside its with block")
        token = _RUNNING.set(self)
        try:
            return self._root(*args, **kwargs)
        except Exception as error:
            if self._failure is not None and error is not self._failure:
                raise self._failure from error
            raise
        finally:
            self._active, self._depth = False, 0
            _RUNNING.reset(token)

    def _open(self) -> None:
        self._handles.append(self._root.register_forward_pre_hook(self._begin, prepend=True))
        for name, request in self._requests.items():
            if isinstance(request.module, torch.jit.ScriptModule):
                if request.required:
                    raise SiteError(f"site {name!r} is a TorchScript module, which cannot be watched")
                continue
            self._handles.append(request.module.register_forward_hook(self._hook(name, request)))
        self._handles.append(self._root.register_forward_hook(self._finish))
        self._handles.append(self._root.register_forward_hook(self._leave, always_call=True))

    def _close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._end_layout()
        self._active = False

    def _start(self) -> None:
        self._active, self._complete = True, False
        self._failure: Exception | None = None  # of a site; raised at the end of the forward
        self._calls = dict.fromkeys(self._requests, 0)
        self._values: dict[str, Any] = {}
        if self._sites is None:
            self._new_sites: dict[str, Site] = {}
            self._no_activation.clear()

    def _elsewhere(self) -> bool:
        """Return whether another thread is calling the model."""
        return threading.get_ident() != self._thread

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._elsewhere():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._active = False
        if _RUNNING.get() in (None, self):
            self._start()
            if self._keep is not None:
                self._keep.start()
            if self._sites is None and self._axes:
                self._layout = FeatureAxes()
                self._layout.__enter__()

    def _leave(self, *_: Any) -> None:
        if self._elsewhere():
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._end_layout()

    def _end_layout(self) -> None:
        """Stop following operations after the first forward, even a failed one."""
        if self._layout is not None:
            self._layout.__exit__(None, None, None)
            self._layout = None

    def _hook(self, name: str, request: SiteRequest) -> Callable[[nn.Module, Any, Any], None]:
        def fire(module: nn.Module, args: Any, output: Any) -> None:
            if not self._active or self._elsewhere() or (module is self._root and self._depth > 1):
                return  # called outside the model's forward, by the model itself, or in another watch's run
            self._calls[name] += 1
            call = self._calls[name]
            if self._failure is None and (request.calls is None or call in request.calls):
                try:
                    self._record(name, call, output)
                except Exception as error:
                    # Raising here could leave the model in an inconsistent state.
                    self._failure = error

        return fire

    def _record(self, name: str, call: int, output: Any) -> None:
        label = label_of(self._names, name, call)
        if label in self._no_activation:
            return
        required = self._sites is not None or call in self._requests[name].required
        activation = activation_in(output)
        if isinstance(activation, str):
            if required:
                raise SiteError(f"site {label!r} ({type(self._names.by_name[name]).__name__}) {activation}")
            self._no_activation[label] = activation
            return
        if self._sites is None:
            last = None if self._layout is None else self._layout.channels_last(activation)
            site = self._new_sites[label] = Site(label, name, call, tuple(activation.shape[1:]), last)
        elif label in self._sites:
            site = self._sites[label]
        else:
            raise SiteError(
                f"site {label!r} fired now but not in the first forward: the model's path depends on its input. Name "
                "sites that every input passes"
            )
        try:
            with without_autocast(activation.device.type):
                self._values[label] = self._sink(site, activation)
        except NoRows as problem:
            if required:
                raise
            del self._new_sites[label]
            self._no_activation[label] = problem.reason

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._active or self._elsewhere() or self._depth > 1:
            return
        self._active = False
        if self._failure is not None:
            raise self._failure
        if self._sites is None:
            self._check_first_forward()
            self._sites = self._new_sites
        missing = [label for label in self._sites if label not in self._values]
        if missing:
            raise SilentSite(f"fired in the first forward but not in this one: {', '.join(missing)}")
        if self._keep is not None:
            self._keep.learn()
        self._complete = True

    def _check_first_forward(self) -> None:
        silent = []
        for name, request in self._requests.items():
            calls = self._calls[name]
            if not calls:
                script = isinstance(request.module, torch.jit.ScriptModule)
                self._silent[label_of(self._names, name, 1)] = "is TorchScript" if script else "was never called"
            why = f"{type(request.module).__name__}, {f'called {calls} times' if calls else 'never called'}"
            silent += [f"{label_of(self._names, name, k)!r} ({why})" for k in sorted(request.required) if k > calls]
        if silent:
            raise SilentSite(f"sites that never fired: {', '.join(silent)}; name modules that the forward calls")
        if not self._new_sites:
            reasons = listed(f"{label!r} {reason}" for label, reason in self.left_out.items())
            raise SilentSite(f"no site gave an activation: {reasons}; name others")

    # What was seen

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites in execution order, as in the first forward."""
        if self._sites is None:
            raise RuntimeError("no forward has finished yet: call seen.run(x) or model(x) first")
        return tuple(self._sites.values())

    @property
    def left_out(self) -> dict[str, str]:
        """The sites of a glob, a type or the default without an activation or rows, with the reason."""
        return {**self._silent, **self._no_activation}

    def __getitem__(self, label: str) -> Any:
        known = list(self)
        exact = find_name(self._names, label)
        shown = label_of(self._names, exact[0], exact[1] or 1) if exact else label
        if shown not in known:
            raise KeyError(f"no site {label!r}{nearest(label, known)}")
        return self._value(shown)

    def values(self) -> list[Any]:
        """Return one value per site, in the order of `sites`."""
        return [self._value(label) for label in self]

    def items(self) -> list[tuple[str, Any]]:
        return [(label, self._value(label)) for label in self]

    def _value(self, label: str) -> Any:
        if not self._complete:
            raise RuntimeError("the last forward did not finish, so there is nothing to read: run it again")
        if self._keep is not None:
            self._keep.check(label, self._values[label])
        return self._values[label]

    def __iter__(self) -> Iterator[str]:
        return iter([site.label for site in self.sites])

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        state = "no forward yet" if self._sites is None else f"{len(self._sites)} sites"
        return f"<Watch of {type(self._root).__name__}: {state}>"

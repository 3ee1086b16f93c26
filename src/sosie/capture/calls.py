"""The calls of chosen modules during a forward: what each is given and returns, recorded or replaced.

Feeding a module of one model with what its counterpart in another was given is done here: see `fed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .batches import named_arguments
from .restore import every_module_called
from .sites import OUTPUT, Names, SilentSite, at_path, find_name, label_of, path_to_tensor, replaced, tensors_at, unwrap

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Path = tuple[Any, ...]
Enter = Callable[[str, nn.Module, Arguments], Arguments | None]  # the label, the module, what it is given
Leave = Callable[[str, nn.Module, Any], Any]  # what it returns; None leaves it as it is


def run_around(
    model: nn.Module,
    labels: Collection[str],
    arguments: Arguments,
    *,
    enter: Enter | None = None,
    leave: Leave | None = None,
) -> Any:
    """Run one forward with functions around the calls of modules that are named by the labels of their sites.

    `enter` may replace what a module is given, `leave` what it returns; where they return None nothing changes.
    "mix@2" is the second call of `mix`, "output" the model itself (a module of that name is "output@1").
    """
    root = unwrap(model)
    if isinstance(root, torch.jit.ScriptModule):
        return _around_script(root, OUTPUT if OUTPUT in labels else None, arguments, enter, leave)
    names = Names.of(root)
    wanted: dict[nn.Module, dict[int, str]] = {}
    for label in labels:
        name, call = _find(names, label) or (None, None)
        if name is not None and not isinstance(names.by_name[name], torch.jit.ScriptModule):
            wanted.setdefault(names.by_name[name], {})[call or 1] = label
    counts = dict.fromkeys(wanted, 0)
    running: list[str | None] = []  # the labels of the calls that have begun; None: one that was not asked for

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        counts[module] += 1
        running.append(wanted[module].get(counts[module]))
        return None if enter is None or running[-1] is None else enter(running[-1], module, (args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        label = running.pop()
        return None if leave is None or label is None else leave(label, module, output)

    with every_module_called(model), ExitStack() as stack:
        for module in wanted:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        args, kwargs = arguments
        return root(*args, **kwargs)


def with_output_reserved(names: Names, label: str) -> str:
    """The label of a site, in which "output" is the whole model: a module of that name is "output@1"."""
    return {".": OUTPUT, OUTPUT: f"{OUTPUT}@1"}.get(label, label) if OUTPUT in names.by_name else label


def _find(names: Names, label: str) -> tuple[str, int | None] | None:
    return ("", None) if label == OUTPUT else find_name(names, label)


def _around_script(
    root: nn.Module, label: str | None, arguments: Arguments, enter: Enter | None, leave: Leave | None
) -> Any:
    """The same for TorchScript, whose layers take no hooks: only the call of the whole is seen."""
    if enter is not None and label is not None:
        arguments = enter(label, root, arguments) or arguments
    args, kwargs = arguments
    output = root(*args, **kwargs)
    changed = leave(label, root, output) if leave is not None and label is not None else None
    return output if changed is None else changed


@dataclass(frozen=True)
class Seen:
    """A call that a forward made: its label, and the shape and type of the main tensor of what it returned."""

    label: str
    shape: tuple[int, ...]  # of the tensor, inputs included
    dtype: torch.dtype
    activation: Tensor | None = field(default=None, compare=False, repr=False)  # for the inputs that were looked at


def calls_inside(model: nn.Module, label: str, arguments: Arguments) -> list[Seen]:
    """The outermost calls of modules inside one call of a module, in the order in which they end."""
    root = unwrap(model)
    if isinstance(root, torch.jit.ScriptModule):
        return []
    names = Names.of(root)
    home, call = _find(names, label) or ("", None)
    parent = names.by_name[home]
    inner = [
        module
        for name, module in names.unique().items()
        if module is not parent and not isinstance(module, torch.jit.ScriptModule)
    ]
    counts: Counter[nn.Module] = Counter()
    depth, inside, seen = 0, False, []

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal depth, inside
        counts[module] += 1
        if module is parent:
            inside |= counts[module] == (call or 1)
        else:
            depth += inside

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth, inside
        if module is parent:
            inside &= counts[module] != (call or 1)
            return
        depth -= inside
        path = path_to_tensor(output)
        if inside and not depth and path is not None:
            tensor = at_path(output, path)
            own = with_output_reserved(names, label_of(names, names.first[id(module)], counts[module]))
            seen.append(Seen(own, tuple(tensor.shape), tensor.dtype, tensor.detach().clone()))

    with every_module_called(model), ExitStack() as stack:
        for module in (parent, *inner):
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        args, kwargs = arguments
        root(*args, **kwargs)
    return seen


def run_changed(
    model: nn.Module,
    module: nn.Module,
    call: int,
    change: Callable[[Any], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run the model with `change(output)` in place of the output of one call of a module, counted from 1.

    None changes nothing.
    """
    names, reached = Names.of(unwrap(model)), False
    label = with_output_reserved(names, label_of(names, names.first[id(module)], call))

    def leave(label: str, module: nn.Module, output: Any) -> Any:
        nonlocal reached
        reached = True
        return change(output)

    output = run_around(model, [label], (tuple(args), dict(kwargs)), leave=leave)
    if not reached:
        raise SilentSite(f"the forward of this input did not reach {label!r}")
    return output


# Recording


@dataclass
class Call:
    """One call of a module: what it was given and what it returned."""

    names: Sequence[str | int]  # of the positional arguments
    arguments: Arguments
    output: Any

    @property
    def activation(self) -> Tensor | None:
        """The main tensor of what it returned."""
        path = path_to_tensor(self.output)
        return None if path is None else at_path(self.output, path)


def some_inputs(call: Call, start: int, stop: int, *, of: int) -> Call:
    """A call, of `of` inputs, as if only some of them had been given."""

    def part(structure: Any) -> Any:
        for path, tensor in tensors_at(structure):
            if tensor.ndim and len(tensor) == of:
                structure = replaced(structure, path, in_layout(in_layout(tensor)[start:stop], tensor.layout))
        return structure

    return replace(call, arguments=part(call.arguments), output=part(call.output))


def record_calls(
    model: nn.Module, labels: Sequence[str], arguments: Callable[[], Arguments], overwritten: set[Path]
) -> tuple[dict[str, Call], Any]:
    """One forward: the calls by label, in the order in which they ended, and the model's output.

    `arguments` makes those of the model anew for each forward, which may change them. Tensors that the model overwrites
    later are copied: which these are shows in their version counters once the forward is over. It is then run again,
    and they are added to `overwritten`, for the next call of this function too.
    """
    given: dict[str, Arguments] = {}
    calls: dict[str, Call] = {}
    versions: dict[Path, tuple[Tensor, int]] = {}

    def kept(structure: Any, key: Path) -> Any:
        for path, tensor in tensors_at(structure):
            if tensor.is_inference() or (*key, path) in overwritten:
                structure = replaced(structure, path, tensor.clone())
            else:
                versions[(*key, path)] = tensor, tensor._version
        return structure

    def enter(label: str, module: nn.Module, arguments: Arguments) -> None:
        given[label] = kept(arguments, (label, "given"))

    def leave(label: str, module: nn.Module, output: Any) -> None:
        given_here = given.pop(label)
        calls[label] = Call(names_of(module, given_here), given_here, kept(output, (label, "returned")))

    output = run_around(model, labels, arguments(), enter=enter, leave=leave)
    changed = {key for key, (tensor, version) in versions.items() if tensor._version != version}
    if not changed:
        return calls, output
    overwritten |= changed
    return record_calls(model, labels, arguments, overwritten)


# Feeding a module with what another was given


def is_mask(name: str, leaf: Any) -> bool:
    """Whether an argument says which tokens count, or where they are, and not what they are."""
    return isinstance(leaf, Tensor) and (leaf.dtype == torch.bool or name.endswith(("mask", "position_ids")))


@dataclass(frozen=True)
class Argument:
    """A tensor that a module of B is given, and what its counterpart of A was given in its place."""

    name: str
    path: Path  # in B's (args, kwargs)
    own: Tensor
    other: Tensor | None  # None: A has none there

    @property
    def is_mask(self) -> bool:
        return self.own.dtype == torch.bool or "mask" in self.name

    @property
    def fits(self) -> bool:
        """Whether A's can stand in for B's: a mask only where both write it alike, as bias or as yes and no."""
        if self.other is None or self.other.shape != self.own.shape:
            return False
        if self.is_mask:
            return self.other.dtype == self.own.dtype
        return _kind(self.other) == _kind(self.own)


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point() or tensor.is_quantized:
        return "float"
    return "complex" if tensor.is_complex() else "bool" if tensor.dtype == torch.bool else "integer"


def matched(call: Call, module: nn.Module, arguments: Arguments) -> list[Argument]:
    """Every tensor that a module of B is given, with that of A's call: by its name, else by its position."""
    ours, theirs = _located(names_of(module, arguments), arguments), _located(call.names, call.arguments)
    by_position = {path: tensor for path, (_, tensor) in theirs.items() if path[0] == 0}
    by_name = dict(theirs.values())
    names = {name[0] for name, _ in ours.values()}
    free = {path: tensor for path, tensor in by_position.items() if theirs[path][0][0] not in names}
    return [
        Argument(str(name[0]), path, tensor, by_name[name] if name in by_name else free.get(path))
        for path, (name, tensor) in ours.items()
    ]


def names_of(module: nn.Module, arguments: Arguments) -> Sequence[str | int]:
    """The names of the arguments that are given by position."""
    args, kwargs = arguments
    return list(named_arguments(module, args, kwargs))[: len(args)]


def _located(names: Sequence[str | int], arguments: Arguments) -> dict[Path, tuple[Path, Tensor]]:
    """Every tensor of a call by its path in (args, kwargs): the name of the argument with the path inside it."""
    return {
        path: ((names[path[1]] if path[0] == 0 else path[1], *path[2:]), tensor)
        for path, tensor in tensors_at(arguments)
    }


def fed(arguments: Arguments, given: Iterable[Argument]) -> Arguments:
    """B's arguments with A's tensors, copied into B's type and device, in place of those that fit.

    Only activations are A's. Caches, flags and other objects stay B's own, and so do masks that say the same, since how
    a mask is written belongs to an implementation.
    """
    for each in given:
        if each.fits and not (each.is_mask and says_the_same(each.own, each.other)):
            arguments = replaced(arguments, each.path, like_own(each.other, each.own))
    return arguments


def like_own(other: Tensor | None, own: Tensor) -> Tensor:
    """A copy of A's tensor in the type and on the device of B's, also in its steps if B's is quantised."""
    assert other is not None
    if own.is_quantized:
        other = other.dequantize() if other.is_quantized else other.float()
        if own.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return torch.quantize_per_tensor(other, own.q_scale(), own.q_zero_point(), own.dtype)
        scales, zeros, axis = own.q_per_channel_scales(), own.q_per_channel_zero_points(), own.q_per_channel_axis()
        return torch.quantize_per_channel(other, scales, zeros, axis, own.dtype)
    if other.is_quantized:
        other = other.dequantize()
    return in_layout(other, own.layout).to(own.device, own.dtype, copy=True)


def in_layout(tensor: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    """The tensor as a dense one, or as a sparse one of this kind."""
    if tensor.layout == layout:
        return tensor
    return tensor.to_dense() if layout == torch.strided else tensor.to_sparse(layout=layout)


def says_the_same(own: Tensor, other: Tensor | None) -> bool:
    """Whether two masks of one type say the same: −∞, the least number and −10,000 all rule a token out."""
    assert other is not None
    if own.is_floating_point():
        own, other = own.clamp(min=RULED_OUT), other.clamp(min=RULED_OUT)
    return bool(torch.equal(own, other.to(own.device)))


RULED_OUT = -1e3  # a bias of attention from which on a token has no weight


def answering_as(
    own: Any, other: Any, arranged: Callable[[Tensor], Tensor] = lambda tensor: tensor, *, stand_in: bool = True
) -> tuple[Any, list[tuple[Tensor, Tensor, Tensor]], bool]:
    """B's output with A's numbers in place of its own, the tensors in it that are compared (A's, B's, what stands in
    its place), and whether their main tensors have one shape.

    These are floating-point tensors and the main one, whatever its type. The main tensors belong together, A's
    `arranged` as B's; others do where they are at the same place and of the same shape. Without
    `stand_in` B's output stays as it is, and nothing is copied.
    """
    main, theirs = path_to_tensor(own), path_to_tensor(other)
    if main is None or theirs is None:
        return own, [], main is theirs  # neither has numbers
    places = dict(tensors_at(other))
    places[main] = arranged(at_path(other, theirs))
    pairs, fits, result = [], True, own
    for path, tensor in tensors_at(own):
        counterpart = places.get(path)
        kinds = None if counterpart is None else {_kind(tensor), _kind(counterpart)}
        if counterpart is None or (kinds != {"float"} and (path != main or kinds != {_kind(tensor)})):
            continue
        if counterpart.shape != tensor.shape:
            fits &= path != main
            continue
        new = like_own(counterpart, tensor) if stand_in else tensor
        pairs.append((counterpart, tensor, new))
        result = replaced(result, path, new) if stand_in else result
    return result, pairs, fits

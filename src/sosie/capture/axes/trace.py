"""Reading one forward: which axes of which weights must be permuted together for the function to stay the same."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...process_state import attention_in_parts
from ..outputs import tensors_in
from ..quiet import as_found
from .algebra import Axis, fix, leaf, leaves, repeated
from .calls import INPUT, ORDINARY, OUTPUT, Call, Known, NotUnderstood, not_understood
from .rules import find_rule

UNUSED = "not used in the forward"
REPEATED = "one axis is twice a factor of another"


@dataclass(frozen=True)
class WeightAxes:
    """The axes of every parameter and buffer, and the groups of them that share a permutation."""

    of: dict[str, tuple[Axis, ...]]  # by the tensor's first name; scalars are left out
    groups: dict[str, Axis]  # what may be permuted, in execution order; named after the first axis that holds it
    fixed: dict[str, str]  # axes of parameters that are held in place for want of an understanding, and why

    def members(self, group: str) -> list[tuple[str, int]]:
        """The axes that hold a group, as the tensor's name and the axis's number."""
        wanted = self.groups[group]
        return [(name, i) for name, axes in self.of.items() for i, axis in enumerate(axes) if wanted in leaves(axis)]

    def without(self, groups: dict[str, str]) -> WeightAxes:
        """The same with some groups fixed, each for a reason."""
        kept = {name: axis for name, axis in self.groups.items() if name not in groups}
        return WeightAxes(self.of, kept, {**self.fixed, **groups})


def weight_axes(model: nn.Module, *inputs: Any) -> WeightAxes:
    """Run the model once on these inputs, in eval mode, and read from it which axes of weights belong together.

    Axes of the input and of the output keep their order. So does what goes through an operation that is not
    understood, and that is named. Symmetries that are not whole axes in another order are left out: heads of attention
    or groups of a convolution are permuted within all alike.
    """
    known = Known()
    tensors = named_weights(model)
    for tensor in tensors.values():
        known.set(tensor, [leaf(size) for size in tensor.shape])
    with as_found(model), attention_in_parts, _Reader(known, model) as reader:
        for tensor in tensors_in(inputs):
            known.set(tensor, [leaf(size, INPUT) for size in tensor.shape])
        outputs = model(*inputs)
    for tensor in tensors_in(outputs):
        for axis in known.of(tensor):
            fix(axis, OUTPUT)
    for key, tensor in known.held.items():
        if key not in reader.used and any(tensor is weight for weight in tensors.values()):
            for axis in known.of(tensor):
                fix(axis, UNUSED)
    return _grouped(model, {name: tuple(known.of(tensor)) for name, tensor in tensors.items()}, reader.order)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that have axes, each once, under its first name."""
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in found if tensor.ndim}


def _grouped(model: nn.Module, of: dict[str, tuple[Axis, ...]], order: dict[int, int]) -> WeightAxes:
    for axes in of.values():
        for axis in axes:
            for each in repeated(axis):
                fix(each, REPEATED)
    groups: dict[Axis, str] = {}
    fixed: dict[str, str] = {}
    tensors = named_weights(model)
    by_use = sorted(of, key=lambda name: order.get(id(tensors[name]), len(order)))
    parameters = {name for name, _ in model.named_parameters()}
    for name in by_use:
        for i, axis in enumerate(of[name]):
            label = f"{name}[{i}]"
            free = [each for each in leaves(axis) if each.reason is None and each.size > 1]
            for each in free:
                again = sum(other.partition("#")[0] == label for other in groups.values())
                groups.setdefault(each, f"{label}#{again + 1}" if again else label)
            odd = [each.reason for each in leaves(axis) if each.reason is not None and each.reason not in ORDINARY]
            if odd and axis.size > 1 and name in parameters:
                fixed[label] = str(odd[0])
    return WeightAxes(of, {name: axis for axis, name in groups.items()}, fixed)


class _Reader(TorchDispatchMode):
    """Sees every operation of a forward and writes down what it says about axes."""

    def __init__(self, known: Known, model: nn.Module) -> None:
        super().__init__()
        self._known, self._model = known, model
        self._inside: list[str] = []
        self._hooks = ExitStack()
        self.used: set[int] = set()
        self.order: dict[int, int] = {}  # of the tensors, as they are first used

    def __enter__(self) -> _Reader:
        for name, module in self._model.named_modules():

            def enter(*_: Any, name: str = name) -> None:
                self._inside.append(name)

            def leave(*_: Any) -> None:
                self._inside.pop()

            self._hooks.callback(module.register_forward_pre_hook(enter).remove)
            self._hooks.callback(module.register_forward_hook(leave).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        call = Call.of(func, args, kwargs or {}, output, self._inside[-1] if self._inside else "")
        for tensor in call.tensors:
            self.used.add(id(tensor))
            self.order.setdefault(id(tensor), len(self.order))
        self._read(call)
        return output

    def _read(self, call: Call) -> None:
        known, rule = self._known, find_rule(call)
        if call.in_place and (rule is None or len(call.tensors) > 1):
            # What is written into a part of another tensor changes that one too.
            others = [axes for output in call.outputs for axes in known.sharing(output)]
            if others:
                for axis in (axis for axes in others for axis in axes):
                    fix(axis, str(call))
                rule = None
        try:
            if rule is None or not call.outputs:
                raise NotUnderstood
            first = rule(known, call)
            known.set(call.outputs[0], first)
            self._label_rest(call, first)
        except NotUnderstood:
            not_understood(known, call)

    def _label_rest(self, call: Call, first: list[Axis]) -> None:
        """Further outputs: indices beside what was pooled, sums kept for a gradient."""
        for output in call.outputs[1:]:
            if id(output) not in self._known.axes:
                alike = output.shape == call.outputs[0].shape
                self._known.set(output, first if alike else [leaf(size, str(call)) for size in output.shape])

"""The one tensor in whatever a module returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PREFERRED = ("last_hidden_state", "logits", "out")
ANSWERS = ("logits", "out", "last_hidden_state")


def first_tensor(output: Any, preferred: Sequence[str] = _PREFERRED) -> Tensor | None:
    """The tensor that stands for an output: itself, the first of a tuple or list, or a dict's main entry.

    A dict (ModelOutput too) or an object with such attributes gives `last_hidden_state`, else `logits`, else `out` (or
    whatever is `preferred`), else its first tensor.
    """
    path = path_to_tensor(output, preferred)
    return None if path is None else at_path(output, path)


def path_to_tensor(
    output: Any,
    preferred: Sequence[str] = _PREFERRED,
    is_tensor: Callable[[Any], bool] = lambda x: isinstance(x, Tensor),
) -> tuple[Any, ...] | None:
    """The keys that lead to an output's `first_tensor`, outermost first; None if there is no tensor in it."""
    if is_tensor(output):
        return ()
    for key, part in _parts(output, preferred):
        inside = path_to_tensor(part, preferred, is_tensor)
        if inside is not None:
            return (key, *inside)
    return None


def at_path(output: Any, path: Sequence[Any]) -> Any:
    for key in path:
        output = getattr(output, key) if _is_record(output) else output[key]
    return output


def replaced(output: Any, path: Sequence[Any], new: Any) -> Any:
    """The output with something else at the end of a path; what lies beside it is kept, and the original too."""
    if not path:
        return new
    inside = replaced(at_path(output, path[:1]), path[1:], new)
    if isinstance(output, (tuple, list)):
        parts = [inside if i == path[0] else part for i, part in enumerate(output)]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    changed = copy.copy(output)
    if _is_record(output):
        object.__setattr__(changed, path[0], inside)
    else:
        changed[path[0]] = inside
    return changed


def fresh_leaf(output: Any, *, anew: bool = False) -> tuple[Tensor, Any] | None:
    """A leaf to differentiate by, and the output with a copy of it in place of its activation.

    None where gradients flow already, unless the graph is to begin `anew`. A copy, since the model may go on in place.
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
    """The output with a copy of its activation where that is a view of something else."""
    path = path_to_tensor(output)
    if path is None or not at_path(output, path)._is_view():
        return output
    return replaced(output, path, at_path(output, path).clone())


def tensors_in(output: Any) -> list[Tensor]:
    """Every tensor in an output of any structure."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for _, part in _parts(output, ()) for tensor in tensors_in(part)]


def _parts(output: Any, preferred: Sequence[str]) -> list[tuple[Any, Any]]:
    """What an output is made of, by key, the preferred keys first; nothing if it is no container."""
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
    """A dataclass, or whatever has its main tensor as an attribute, as results of other libraries do."""
    if isinstance(output, (Tensor, Mapping, tuple, list, type)):
        return False
    return dataclasses.is_dataclass(output) or any(isinstance(getattr(output, k, None), Tensor) for k in _PREFERRED)


def answer_in(output: Any) -> Tensor | None:
    """The tensor that a whole model answers with: itself, the first of a tuple, or a dict's `logits`."""
    return first_tensor(output, ANSWERS)


def activation_in(output: Any) -> Tensor | str:
    """The activation, or in words why there is none."""
    found = first_tensor(output)
    if found is None:
        return f"returned no tensor but {type(output).__name__}"
    if not found.is_floating_point():
        return f"returned a tensor of {str(found.dtype).removeprefix('torch.')}, which is no activation"
    if found.layout != torch.strided and not found.is_nested:
        return f"returned a tensor of layout {str(found.layout).removeprefix('torch.')}, not a dense one"
    if found.is_nested:
        return "returned a nested tensor, whose inputs differ in shape"
    return found

"""The one tensor in whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_PREFERRED = ("last_hidden_state", "logits", "out")
_ANSWERS = ("logits", "out", "last_hidden_state")


def first_tensor(output: Any, preferred: Sequence[str] = _PREFERRED) -> Tensor | None:
    """The tensor that stands for an output: itself, the first of a tuple or list, or a dict's main entry.

    A dict (ModelOutput too) gives `last_hidden_state`, else `logits`, else `out` (or whatever is `preferred`), else
    its first tensor.
    """
    if isinstance(output, Tensor):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, (Mapping, type)):
        output = vars(output)
    if isinstance(output, Mapping):
        keys = [key for key in preferred if key in output]
        keys += [key for key in output if key not in keys]
        parts = [output[key] for key in keys]
    elif isinstance(output, (tuple, list)):
        parts = list(output)
    else:
        return None
    return next((found for part in parts if (found := first_tensor(part, preferred)) is not None), None)


def answer_in(output: Any) -> Tensor | None:
    """The tensor that a whole model answers with: itself, the first of a tuple, or a dict's `logits`."""
    return first_tensor(output, _ANSWERS)


def activation_in(output: Any) -> Tensor | str:
    """The activation, or in words why there is none."""
    found = first_tensor(output)
    if found is None:
        return f"returned no tensor but {type(output).__name__}"
    if not found.is_floating_point():
        return f"returned a tensor of {str(found.dtype).removeprefix('torch.')}, which is no activation"
    if found.is_nested:
        return "returned a nested tensor, whose inputs differ in shape"
    return found

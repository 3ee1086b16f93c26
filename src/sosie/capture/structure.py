"""Batches and outputs of any structure: counted, cut and joined along the inputs; the one tensor that is meant.

A batch is a tensor, a NumPy array, a list of anything (strings, say), or tuples, lists and dicts of these.
Numbers, booleans and None inside a dict are options of the call: they belong to no input and pass through.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

MASK, DECODER_MASK = "attention_mask", "decoder_attention_mask"
_OPTIONS = (bool, int, float, str, type(None))


class BadBatch(ValueError):
    """The data yielded something that cannot be given to a model as a batch of inputs."""


def count_inputs(batch: Any) -> int:
    """How many inputs a batch holds; everything in it must agree."""
    lengths = _lengths(batch, "the batch", ())
    if not lengths:
        raise BadBatch(f"a batch of {type(batch).__name__} with no tensor in it; {_ACCEPTED}")
    (first, count), *others = lengths
    for name, length in others:
        if length != count:
            raise BadBatch(f"a batch must hold as many of each: {first} has {count} rows, {name} has {length}")
    return count


def cut(batch: Any, start: int, stop: int) -> Any:
    """The inputs from start to stop; tensors are views."""
    return rebuild(lambda leaf: leaf[start:stop], batch)


def join(batches: Sequence[Any]) -> Any:
    """Several batches of one structure as one; one alone is passed through without a copy."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    kinds = {_kind(batch) for batch in batches}
    if len(kinds) > 1:
        raise BadBatch(f"batches of different structure: {' and '.join(sorted(kinds))}")
    if isinstance(first, Mapping):
        same_length = batches
        for mask in (MASK, DECODER_MASK):
            same_length = _pad_tokens(same_length, mask) if mask in first else same_length
        return {key: join([batch[key] for batch in same_length]) for key in first}
    if is_parts(first):
        return _like(first, [join(parts) for parts in zip(*batches, strict=True)])
    if isinstance(first, Tensor):
        shapes = sorted({tuple(tensor.shape[1:]) for tensor in batches})
        if len(shapes) > 1:
            raise BadBatch(
                f"inputs of different shape, {shapes[0]} and {shapes[1]}, cannot be cut into blocks of rows: pad or "
                f"resize them in the loader (dicts with an {MASK} are padded here)"
            )
        return torch.cat(list(batches))
    if isinstance(first, list):
        return [item for batch in batches for item in batch]
    return first


def rebuild(change: Callable[[Any], Any], batch: Any) -> Any:
    """The same structure with every tensor and list changed."""
    return rebuild_named(lambda _, leaf: change(leaf), batch)


def rebuild_named(change: Callable[[str, Any], Any], batch: Any, name: str = "") -> Any:
    """The same structure with `change(key, leaf)` in place of every tensor and list, by the innermost dict's key."""
    if isinstance(batch, Mapping):
        return {key: rebuild_named(change, part, str(key)) for key, part in batch.items()}
    if is_parts(batch):
        return _like(batch, [rebuild_named(change, part, name) for part in batch])
    return batch if isinstance(batch, _OPTIONS) else change(name, batch)


def with_tensors(batch: Any) -> Any:
    """NumPy arrays as tensors (sharing memory where they can), arrays of objects or text as lists."""
    return rebuild(_as_tensor, batch)


def number_array(given: Any, label: str) -> np.ndarray[Any, Any]:
    """An array of numbers that torch can hold as well; an error where the meaning of what was given would be lost."""
    if np.ma.is_masked(given):
        raise ValueError(
            f"{label} is a masked array with {np.ma.count_masked(given)} masked entries, which would count like the "
            "others: leave those rows out of both sides, or fill them with .filled(…)"
        )
    array = np.asarray(given)
    if array.dtype.names:
        raise TypeError(
            f"{label} is a structured array with the fields {', '.join(array.dtype.names)}: make columns of them with "
            "numpy.lib.recfunctions.structured_to_unstructured"
        )
    if array.dtype == object:
        kinds = ", ".join(sorted({type(item).__name__ for item in array.flat[:100]}))
        raise TypeError(
            f"{label} must hold numbers, got an array of Python objects ({kinds}): leave out missing values and "
            "convert it with .astype(float)"
        )
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{label} must hold numbers, got an array of {array.dtype}")
    if array.dtype in (np.longdouble, np.clongdouble) and array.dtype.itemsize > 8 * (1 + (array.dtype.kind == "c")):
        raise TypeError(
            f"{label} holds {array.dtype}, more digits than torch has: round it with .astype(numpy.float64)"
        )
    return array


def is_text(batch: Any) -> bool:
    """A list of strings, an input each; a tuple of them too, as a DataLoader of (text, label) has it."""
    return isinstance(batch, (list, tuple)) and bool(batch) and all(isinstance(item, str) for item in batch)


def is_parts(batch: Any) -> bool:
    """A tuple, or a list with tensors, arrays or dicts in it; other lists are one item per input, and so is text."""
    if isinstance(batch, tuple):
        return not is_text(batch)
    return isinstance(batch, list) and any(isinstance(part, (Tensor, np.ndarray, Mapping)) for part in batch)


_ACCEPTED = "data yields tensors, NumPy arrays, (x, y) pairs, dicts of keyword arguments or lists of strings"


def _as_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return list(leaf) if isinstance(leaf, tuple) else leaf
    if leaf.dtype.kind not in "biufc":
        return leaf.tolist()
    leaf = number_array(leaf, "an array of the data")
    if not leaf.dtype.isnative:
        leaf = leaf.astype(leaf.dtype.newbyteorder("="))
    if not leaf.flags.writeable or any(stride < 0 for stride in leaf.strides):
        leaf = leaf.copy()  # torch has no read-only tensors and no negative strides
    return torch.from_numpy(leaf)


def _lengths(batch: Any, name: str, options: tuple[type, ...]) -> list[tuple[str, int]]:
    if isinstance(batch, Mapping):
        return [each for key, part in batch.items() for each in _lengths(part, repr(key), _OPTIONS)]
    if is_parts(batch):
        parts = [(f"part {i} of {name}", part) for i, part in enumerate(batch)]
        return [each for label, part in parts for each in _lengths(part, label, (type(None),))]
    if isinstance(batch, (Tensor, np.ndarray)):
        if batch.ndim == 0:
            raise BadBatch(f"{name} is a tensor of no dimensions; its first must count the inputs")
        return [(name, len(batch))]
    if isinstance(batch, (list, tuple)):
        return [(name, len(batch))]
    if isinstance(batch, options):
        return []
    samples = "; single samples go through a DataLoader first" if isinstance(batch, (int, float, str)) else ""
    raise BadBatch(f"{name} is of type {type(batch).__name__}; {_ACCEPTED}{samples}")


def _kind(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"dict of {', '.join(map(str, batch))}"
    return f"{type(batch).__name__} of {len(batch)}" if is_parts(batch) else type(batch).__name__


def _like(batch: Any, parts: list[Any]) -> Any:
    if hasattr(batch, "_fields"):
        return type(batch)(*parts)
    return type(batch)(parts)


def _pad_tokens(batches: Sequence[Mapping[str, Any]], mask: str) -> list[dict[str, Any]]:
    """Right-pad with zeros whatever is as long as its mask, which says that they do not count."""
    longest = max(batch[mask].shape[1] for batch in batches)
    alike = []
    for batch in batches:
        own = batch[mask].shape[1]
        if batch[mask].ndim != 2 and own != longest:
            raise BadBatch(f"{mask} of shape {tuple(batch[mask].shape)} cannot be padded to {longest} tokens")
        padded = dict(batch)
        for key, part in batch.items():
            # The decoder's tokens must not be padded without a mask of their own.
            decoders = key.startswith("decoder_") or (key == "labels" and DECODER_MASK in batch)
            mine = decoders == (mask == DECODER_MASK)
            if mine and isinstance(part, Tensor) and part.ndim >= 2 and part.shape[1] == own < longest:
                padded[key] = pad(part, (0, 0) * (part.ndim - 2) + (0, longest - own))
        alike.append(padded)
    return alike


def input_rows(batch: Any, count: int) -> Tensor:
    """What the networks are given as (inputs, numbers): the first tensor of the batch that holds real numbers."""
    leaves: list[Any] = []
    rebuild(leaves.append, batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and len(leaf) == count:
            return leaf.detach().reshape(count, -1)
    raise BadBatch(
        "a measure that regresses the inputs out needs data with real numbers in it (images, say): "
        f"found {', '.join(type(leaf).__name__ for leaf in leaves) or 'no data'}"
    )


# The one tensor in whatever a module returns

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
        return _like(output, [inside if i == path[0] else part for i, part in enumerate(output)])
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
    """The activation, or the reason why there is none."""
    tensor = first_tensor(output)
    if tensor is None:
        return f"returned no tensor but {type(output).__name__}"
    if not tensor.is_floating_point():
        return f"returned a tensor of {str(tensor.dtype).removeprefix('torch.')}, which is no activation"
    if tensor.is_nested:
        return "returned a nested tensor, whose inputs differ in shape"
    if tensor.layout != torch.strided:
        return f"returned a tensor of layout {str(tensor.layout).removeprefix('torch.')}, not a dense one"
    return tensor

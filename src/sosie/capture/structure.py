"""Batches of any structure: counted, cut and joined along the inputs.

A batch is a tensor, a NumPy array, a list of anything (strings, say), or tuples, lists and dicts of these.
Numbers, booleans and None inside a dict are options of the call: they belong to no input and pass through.
"""

from __future__ import annotations

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
        raise BadBatch(f"batches of different structure: {' and '.join(sorted(map(str, kinds)))}")
    if isinstance(first, Mapping):
        same_length = batches
        for mask in (MASK, DECODER_MASK):
            same_length = _pad_tokens(same_length, mask) if mask in first else same_length
        return {key: join([batch[key] for batch in same_length]) for key in first}
    if is_parts(first):
        return _like(first, [join(parts) for parts in zip(*batches, strict=True)])
    if isinstance(first, Tensor):
        return _concatenate(batches)
    if isinstance(first, list):
        return [item for batch in batches for item in batch]
    return first


def rebuild(change: Callable[[Any], Any], batch: Any) -> Any:
    """The same structure with every tensor and list changed."""
    return rebuild_named(lambda _, leaf: change(leaf), batch)


def rebuild_named(change: Callable[[str, Any], Any], batch: Any, name: str = "") -> Any:
    """The same structure with every tensor and list changed, told the key of the innermost dict that it is under."""
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
    """A tuple, or a list with tensors, arrays or dicts in it; other lists are one item an input, and so is text."""
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
        return [found for key, part in batch.items() for found in _lengths(part, repr(key), _OPTIONS)]
    if is_parts(batch):
        parts = [(f"part {i} of {name}", part) for i, part in enumerate(batch)]
        return [found for label, part in parts for found in _lengths(part, label, (type(None),))]
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


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        one, other, *_ = sorted(shapes)
        raise BadBatch(
            f"inputs of different shape, {one} and {other}, cannot be cut into blocks of rows: pad or resize "
            f"them in the loader (dicts with an {MASK} are padded here)"
        )
    return torch.cat(list(tensors))


def _pad_tokens(batches: Sequence[Mapping[str, Any]], mask: str) -> list[dict[str, Any]]:
    """Right-pad with zeros whatever is as long as its mask, which says that they do not count."""
    longest = max(batch[mask].shape[1] for batch in batches)
    found = []
    for batch in batches:
        own = batch[mask].shape[1]
        if batch[mask].ndim != 2 and own != longest:
            raise BadBatch(f"{mask} of shape {tuple(batch[mask].shape)} cannot be padded to {longest} tokens")
        padded = dict(batch)
        for key, part in batch.items():
            mine = _is_decoders(key, batch) == (mask == DECODER_MASK)
            if mine and isinstance(part, Tensor) and part.ndim >= 2 and part.shape[1] == own < longest:
                padded[key] = pad(part, (0, 0) * (part.ndim - 2) + (0, longest - own))
        found.append(padded)
    return found


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


def _is_decoders(key: str, batch: Mapping[str, Any]) -> bool:
    """Whether an entry has the decoder's tokens: without a mask of their own they must not be padded."""
    return key.startswith("decoder_") or (key == "labels" and DECODER_MASK in batch)

"""What a model is given: batches of any structure, the data as a stream of them, and the arguments of its forward.

A batch is a tensor, a NumPy array, a list of anything (strings, say), or tuples, lists and dicts of these.
Numbers, booleans and None inside a dict are options of the call: they belong to no input and pass through.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, default_collate

from ..checks import whole_number
from .restore import as_found, kept_attributes
from .sites import like, tensors_in, unwrap

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
        return like(first, [join(parts) for parts in zip(*batches, strict=True)])
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
        return like(batch, [rebuild_named(change, part, name) for part in batch])
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


# The data as a stream of chunks, cut anew so that the loader's batch size does not matter

BATCH = 128  # inputs per batch where the data come in no batches of their own


class NoData(ValueError):
    """The data held no inputs."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive inputs of the stream, in the structure of the loader's batches."""

    batch: Any  # None: of saved activations, or of another process's share
    start: int  # index of the first input in the whole data
    count: int


@dataclass(frozen=True)
class Share:
    """Every `of`-th chunk, from number `rank` on: nothing is read twice, nothing is padded."""

    rank: int = 0
    of: int = 1

    def has(self, number: int) -> bool:
        return number % self.of == self.rank


ALL = Share()
Span = tuple[int, int]  # from one input up to another


class Places(NamedTuple):
    """Data whose inputs can be read in any order: how many, in batches of how many, and how."""

    total: int
    size: int
    read: Callable[[Iterable[Span]], Iterable[Any]]  # one batch for each span of inputs


class Batches:
    """Any data as batches: an iterable of them, a whole tensor, array, dict or list of texts, or a Dataset of samples.

    `total` is the number of inputs where that is known without reading the data, else None; `places` is how to read
    them in any order, or None where they only come in their own.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._used = False
        self.total = _total(data)
        if isinstance(data, (Tensor, np.ndarray, Mapping)) or is_text(data):
            whole, count = with_tensors(data), count_inputs(data)
            self._data = [cut(whole, start, min(start + BATCH, count)) for start in range(0, count, BATCH)]
        elif isinstance(data, Dataset) or _is_map_style(data):
            self._data = DataLoader(data, batch_size=BATCH, shuffle=False)
        elif isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
            raise TypeError(f"data must be iterable and yield batches, got {type(data).__name__}")
        elif isinstance(data, tuple) and _looks_like_a_pair(data):
            raise BadBatch("a tuple of different tensors may be one batch or two: give [(x, y)] or TensorDataset(x, y)")
        self.places = None if self.total is None else _places(self.total, self._data)
        self.reuses_buffers = not isinstance(self._data, (list, tuple, DataLoader))  # or may do so

    def __iter__(self) -> Iterator[Any]:
        for batch, _ in self._counted():
            yield batch

    def _counted(self) -> Iterator[tuple[Any, int]]:
        stream = iter(self._data)
        if stream is self._data and self._used:
            raise NoData("the data are a one-shot iterator that was read before: give a list or a DataLoader")
        self._used = True
        empty = True
        for raw in stream:
            batch = with_tensors(raw)
            count = count_inputs(batch)
            if count:
                empty = False
                yield batch, count
        if empty:
            raise NoData("the data yielded no inputs")


def recut(
    batches: Any,
    *,
    block: int | None,
    skip: int = 0,
    max_rows: int | None = None,
    largest: int | None = None,
    share: Share = ALL,
) -> Iterator[Chunk]:
    """The same inputs in chunks of a multiple of `block`: as large as the loader's first batch, or `largest`.

    The last chunk has what is left: fewer than `block` inputs never stand alone unless there are no more.
    With `block=None` the loader's batches pass as they are. The first `skip` inputs are left out, and those
    from index `max_rows` on (counted from the start of the data, the skipped ones included). Chunks that are not
    of this process's `share` come without their inputs, which are not even read where that can be helped.
    """
    if block is not None:
        whole_number(block, "block", least=1)
    if max_rows is not None:
        whole_number(max_rows, "max_rows", least=1)
    source = batches if isinstance(batches, Batches) else Batches(batches)
    if share.of > 1 and source.places is not None:
        yield from _read_there(source.places, share, block=block, skip=skip, max_rows=max_rows, largest=largest)
    elif block is None:
        for number, (_, chunk) in enumerate(_bounded(source, skip, max_rows)):
            yield chunk if share.has(number) else replace(chunk, batch=None)
    else:
        waiting: deque[Chunk] = deque()  # inputs read but not yet handed on
        number, held, size = 0, 0, None
        for loaded, chunk in _bounded(source, skip, max_rows):
            size = size or _chunk_size(loaded, block, largest)
            waiting.append(chunk)
            held += chunk.count
            while held >= size + block:
                yield _take(waiting, size, wanted=share.has(number))
                number, held = number + 1, held - size
            if source.reuses_buffers and waiting:
                waiting[-1] = replace(waiting[-1], batch=rebuild(_copied, waiting[-1].batch))
        if held:
            yield _take(waiting, held, wanted=share.has(number))


def _chunk_size(loaded: int, block: int, largest: int | None) -> int:
    return max(block, min(loaded, largest or loaded) // block * block)


def _read_there(places: Places, share: Share, **how: Any) -> Iterator[Chunk]:
    """The chunks that going through the batches would give, of which only those of the share are read."""
    spans = list(_spans(places, **how))
    batches = iter(places.read(span for number, span in enumerate(spans) if share.has(number)))
    for number, (start, stop) in enumerate(spans):
        batch = None
        if share.has(number):
            batch = with_tensors(next(batches))
            if count_inputs(batch) != stop - start:
                raise BadBatch(f"inputs {start} to {stop - 1} were asked for, and {count_inputs(batch)} came")
        yield Chunk(batch, start, stop - start)


def _spans(
    places: Places, *, block: int | None, skip: int, max_rows: int | None, largest: int | None
) -> Iterator[Span]:
    """Where the chunks of `recut` begin and end."""
    total, size, _ = places
    end = total if max_rows is None else min(total, max_rows)
    if skip >= end:
        return
    if block is None:
        yield from pairwise(chain([skip], range((skip // size + 1) * size, end, size), [end]))
        return
    chunk = _chunk_size(min(size, total - skip // size * size), block, largest)
    while end - skip >= chunk + block:
        yield skip, skip + chunk
        skip += chunk
    yield skip, end


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _bounded(source: Batches, skip: int, max_rows: int | None) -> Iterator[tuple[int, Chunk]]:
    """The size of each batch as loaded, and what of it lies between skip and max_rows."""
    seen = 0
    for batch, count in source._counted():
        first = min(max(skip - seen, 0), count)
        last = count if max_rows is None else min(count, max_rows - seen)
        if first < last:
            part = batch if (first, last) == (0, count) else cut(batch, first, last)
            yield count, Chunk(part, seen + first, last - first)
        seen += count
        if max_rows is not None and seen >= max_rows:
            return


def _take(waiting: deque[Chunk], size: int, *, wanted: bool) -> Chunk:
    """The next inputs, taken off those that wait; they are put together, which copies, only if they are wanted."""
    start, taken, missing = waiting[0].start, [], size
    while missing:
        part = waiting.popleft()
        if part.count > missing:
            waiting.appendleft(Chunk(cut(part.batch, missing, part.count), part.start + missing, part.count - missing))
            part = Chunk(cut(part.batch, 0, missing), part.start, missing)
        taken.append(part.batch)
        missing -= part.count
    return Chunk(join(taken) if wanted else None, start, size)


def _places(total: int, data: Any) -> Places | None:
    if isinstance(data, DataLoader):
        # In order, in batches of one size, and put together without regard to the others of a batch.
        in_order = type(data.sampler) is SequentialSampler and not isinstance(data.dataset, IterableDataset)
        if data.batch_size is None or not in_order or data.collate_fn is not default_collate:
            return None
        return Places(total, data.batch_size, lambda spans: _loaded(data, spans))
    read, size = getattr(data, "read", None), getattr(data, "size", None)
    if callable(read) and isinstance(size, int) and isinstance(getattr(data, "total", None), int):
        return Places(total, size, lambda spans: (read(start, stop) for start, stop in spans))
    return None


def _loaded(loader: DataLoader[Any], spans: Iterable[Span]) -> Iterable[Any]:
    """As the user's own loader would: with its workers, its pinned memory."""
    return DataLoader(
        loader.dataset,
        batch_sampler=(list(range(*span)) for span in spans),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        generator=loader.generator,
    )


def _looks_like_a_pair(data: tuple[Any, ...]) -> bool:
    arrays = [part for part in data if isinstance(part, (Tensor, np.ndarray))]
    return len(arrays) == len(data) > 1 and len({tuple(part.shape[1:]) for part in arrays}) > 1


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable)


def _total(data: Any) -> int | None:
    try:
        if isinstance(data, DataLoader):
            if data.batch_size is None:
                return None  # batches are made by the data set or a sampler of the user's own
            inputs = len(data.dataset if isinstance(data.dataset, IterableDataset) else data.sampler)  # type: ignore[arg-type]
            return inputs // data.batch_size * data.batch_size if data.drop_last else inputs
        if isinstance(data, (Tensor, np.ndarray, Mapping)) or is_text(data):
            return count_inputs(data)
        if isinstance(data, Dataset) or _is_map_style(data):
            return len(data)
        if isinstance(data, (list, tuple)):
            return sum(count_inputs(with_tensors(batch)) for batch in data)
        if isinstance(getattr(data, "total", None), int):
            return int(data.total)  # batches that know how many inputs they hold
    except (TypeError, NotImplementedError):
        pass  # a sampler or data set without a length
    return None


# What a model is called with: which parts of a batch, on which device

_TARGETS = ("labels", "label")
_IMAGES = ("pixel_values", "x")
_NUMBERED = "argument "  # before the number of an argument without a name


@dataclass(frozen=True)
class CallArguments:
    """What a model is called with, as one structure whose tensors have names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...] = ()  # of the forward's positional parameters

    def map(self, change: Callable[[str, Any], Any]) -> CallArguments:
        """The same arguments with `change(name, leaf)` in place of every tensor and list."""
        names = (*self.names, *[""] * len(self.args))
        args = tuple(rebuild_named(change, arg, name) for arg, name in zip(self.args, names, strict=False))
        return replace(self, args=args, kwargs=rebuild_named(change, self.kwargs))

    def leaves(self) -> list[Any]:
        """Every tensor and list, in the order of `map`."""
        return [leaf for _, leaf in self.named_leaves()]

    def named_leaves(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        self.map(lambda name, leaf: found.append((name, leaf)))
        return found

    def form(self) -> CallArguments:
        """The same with names in place of tensors and lists: equal for calls of one structure and the same options."""
        return self.map(lambda name, leaf: name)

    def count(self) -> int:
        """The number of inputs."""
        return count_inputs((self.args, self.kwargs))

    def inputs(self, start: int, stop: int) -> CallArguments:
        """The inputs from start to stop."""
        return self.map(lambda _, leaf: leaf[start:stop])


def model_arguments(
    batch: Any,
    *,
    model: nn.Module | None = None,
    inputs: Callable[[Any], Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a model, moved to its device.

    A tensor is the argument; of a pair the first part is; a dict gives keyword arguments, without its labels.
    Where the forward of `model` takes an `attention_mask`, a part (inputs, tokens) beside ids or embeddings is that.
    `inputs(batch)` overrides that and returns a tensor, a tuple of arguments or a dict. `prepare` (the
    model's own normalisation) is applied after the move, to the first argument, or in a dict to
    `pixel_values`, `x`, or the first floating-point tensor. Where there is text, a list of strings or a dict
    with one in it, `prepare` is the model's tokeniser: it gets all of that, and returns the arguments.
    """
    chosen = without_labels(batch) if inputs is None else inputs(batch)
    has_text = is_text(chosen) or (isinstance(chosen, Mapping) and any(map(is_text, chosen.values())))
    if has_text and prepare is None and inputs is None:
        raise BadBatch("the data are texts, which a model cannot read: give its tokeniser as prepare_a= and prepare_b=")
    if has_text and prepare is not None:
        chosen, prepare = _tokenised(chosen, prepare), None
    elif getattr(prepare, "text_only", False):
        prepare = None
    mask = _mask_beside(batch, model) if inputs is None and model is not None else None
    beside = {} if mask is None else {MASK: _moved(mask, device)}
    moved = rebuild(lambda leaf: _moved(leaf, device), with_tensors(chosen))
    if isinstance(moved, Mapping):
        keywords = dict(moved)
        if prepare is not None:
            key = _main_key(keywords)
            keywords[key] = prepare(keywords[key])
        return (), keywords
    positional = moved if isinstance(moved, tuple) else (moved,)
    if prepare is not None:
        if not positional or not isinstance(positional[0], Tensor):
            got = type(positional[0]).__name__ if positional else "nothing"
            raise BadBatch(f"prepare is applied to the model's first argument, which is {got} and no tensor")
        positional = (prepare(positional[0]), *positional[1:])
    return positional, beside


def _mask_beside(batch: Any, model: nn.Module) -> Tensor | None:
    """The padding mask among the parts of a batch (ids, mask, …), for a model that takes one; None: there is none.

    The first part may be embeddings (inputs, tokens, features), too. Labels of tokens are as large as the ids, so that
    a part which may be either is an error. A mask has 1 at tokens and 0 at the padding before or after them: labels of
    0 and 1 are in no such order.
    """
    if not is_parts(batch) or len(batch) < 2 or not isinstance(ids := with_tensors(batch[0]), Tensor):
        return None
    if ids.ndim not in (2, 3) or (ids.ndim == 2 and ids.is_floating_point()):
        return None
    parts = [part for part in map(with_tensors, batch[1:]) if isinstance(part, Tensor)]
    others = [part for part in parts if part.shape == ids.shape[:2]]
    of_scores = [part for part in parts if part.shape != ids.shape and _masks_scores(part, *ids.shape[:2])]
    if not (others or of_scores):
        return None
    if not _takes_mask(unwrap(model)):
        _check_own_mask(unwrap(model), [part for part in others if _pads(part)])
        return None
    if not others:
        raise BadBatch(
            f"{type(unwrap(model)).__name__} takes an {MASK}, and a part of the batch has shape "
            f"{tuple(of_scores[0].shape)}, as a mask of attention scores has; padding is read from (inputs, tokens), 1 "
            "at tokens: give that one"
        )
    binary = [part for part in others if bool(((part == 0) | (part == 1)).all())]
    if len(binary) == 1 and _pads(binary[0]):
        return binary[0]
    if len(binary) == 1:
        fit = "one has nothing but 0 and 1 in it, but zeros among its ones, as labels of tokens have"
    else:
        fit = f"{len(binary) or 'none'} {'have' if binary else 'has'} nothing but 0 and 1 in it, as a mask has"
    raise BadBatch(
        f"{type(unwrap(model)).__name__} takes an {MASK}, and {len(others)} of the parts of a batch beside the ids may "
        f"be it by their shape, {tuple(ids.shape[:2])}; {fit}. Give dicts: "
        f"{{'input_ids': …, {MASK!r}: …}}, and 'labels' where there are any"
    )


def _pads(part: Tensor) -> bool:
    """Whether every row is 1 at tokens and 0 at the padding before or after them."""
    ones = part == 1
    return bool(((part == 0) | ones).all()) and bool(((ones[:, 1:] != ones[:, :-1]).sum(1) <= 1).all())


def _check_own_mask(model: nn.Module, masks: Sequence[Tensor]) -> None:
    """Raise if a forward takes a mask by another name and a part of the batch may be it: it would not be passed on."""
    own = [name for name in _parameters(model) if _is_mask(name)]
    if own and any(not bool(mask.all()) for mask in masks):
        raise BadBatch(
            f"the forward of {type(model).__name__} takes {own[0]!r}, and a part of the batch, with 1 and then 0 or "
            "0 and then 1 in every row, may be that or labels: give dicts that name the arguments and 'labels'"
        )


def _is_mask(name: str) -> bool:
    return name == "mask" or name.endswith("_mask")


def named_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; positional ones by those of the forward's parameters, or by their number."""
    own = _parameters(unwrap(model)).values()
    names = [each.name for each in own if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    names += [f"{_NUMBERED}{k + 1}" for k in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def unread_mask(model: nn.Module, named: Mapping[str, Any]) -> tuple[str, int] | None:
    """An argument that may tell padding but is not called `attention_mask`, and its number of tokens; None without one.

    Whether such a mask has 1 at tokens or at padding cannot be known.
    """
    for name, part in named.items():
        if not isinstance(part, Tensor) or part.ndim != 2 or not (_is_mask(name) or name.startswith(_NUMBERED)):
            continue
        mixed = bool(((part == 0) | (part == 1)).all()) and bool((part != part[:1, :1]).any())
        if mixed and (_is_mask(name) or any(MASK in _parameters(module) for module in unwrap(model).modules())):
            return name, part.shape[1]
    return None


def _takes_mask(model: nn.Module) -> bool:
    """Whether a forward has an `attention_mask`, or hands all keywords on to a module whose forward has."""
    parameters = _parameters(model)
    if MASK in parameters or all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        return MASK in parameters
    return any(MASK in _parameters(module) for module in model.modules())


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Those of the forward; TorchScript says none."""
    return {} if isinstance(model, torch.jit.ScriptModule) else inspect.signature(model.forward).parameters


def _masks_scores(part: Tensor, inputs: int, tokens: int) -> bool:
    """Whether the shape is (inputs, 1, tokens), (inputs, 1, 1, tokens), or with tokens for a 1."""
    return (
        part.ndim in (3, 4)
        and part.shape[-1] == tokens
        and len(part) == inputs
        and set(part.shape[1:-1]) <= {1, tokens}
    )


def _tokenised(texts: Any, prepare: Callable[[Any], Any]) -> Any:
    tokens = prepare(texts)
    parts = tokens.values() if isinstance(tokens, Mapping) else [tokens]
    if not any(isinstance(part, (Tensor, np.ndarray)) for part in with_tensors(list(parts))):
        raise BadBatch(
            f"of text, prepare must make tensors, but it made {type(tokens).__name__} without one: have the tokeniser "
            'pad them to one length and return tensors, e.g. tokeniser(texts, padding=True, return_tensors="pt")'
        )
    return tokens


def labels_of(batch: Any) -> Tensor | None:
    """The class numbers (inputs,) of a batch: the second of a pair, or a dict's `labels`; None if there are none.

    Of ids, a mask as large as they are, and labels, the third.
    """
    parts: Any = batch if is_parts(batch) and batch else (batch,)
    labels = parts[1] if len(parts) > 1 else parts[0]
    if len(parts) == 3:
        shapes = [tuple(each.shape) for each in parts[:2] if isinstance(each, (Tensor, np.ndarray))]
        labels = parts[2] if len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 2 else labels
    if isinstance(labels, Mapping):
        labels = next((labels[key] for key in _TARGETS if key in labels), None)
    elif len(parts) == 1:
        return None
    labels = with_tensors(labels)
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        return None
    return labels


def without_labels(batch: Any) -> Any:
    """What of a batch a model is given: the first of a pair, a dict without its labels."""
    if is_parts(batch):
        if not batch:
            raise BadBatch("an empty tuple as batch: there is nothing to give to the model")
        batch = batch[0]
    if isinstance(batch, Mapping):
        return {key: part for key, part in batch.items() if key not in _TARGETS}
    return batch


def _moved(leaf: Any, device: str | torch.device | None) -> Any:
    """A copy on the device: a model or its `prepare` may work in place, and the next model gets the same batch."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device or leaf.device, non_blocking=True, copy=True)


def _main_key(keywords: dict[str, Any]) -> str:
    floating = (key for key, part in keywords.items() if isinstance(part, Tensor) and part.is_floating_point())
    named = (key for key in _IMAGES if isinstance(keywords.get(key), Tensor))
    key = next(named, None) or next(floating, None)
    if key is None:
        raise BadBatch(f"prepare found no floating-point tensor among {', '.join(keywords) or 'no arguments'}")
    return key


# An input for a model that came without data, to see how its forward goes

SIDES = {1: (16, 64, 256, 1024), 2: (32, 28, 64, 96, 128, 224, 256), 3: (8, 16, 32)}  # tried in turn, by axes of space


def example_input(model: nn.Module, input_shape: Sequence[int] | None = None, *, seed: int = 0) -> Tensor:
    """Two random inputs of this shape (without the batch axis), or of one that the model's first layer takes.

    A first convolution gives the channels; of the usual sizes, the first with which the forward runs is taken.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = next(iter(model.parameters()), None)
    if weight is None:
        raise ValueError("the model has no weights")
    if input_shape is not None:
        return torch.randn(2, *input_shape, generator=generator).to(weight)
    first = next((m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding, _ConvNd))), None)
    if isinstance(first, nn.Embedding):
        return torch.randint(first.num_embeddings, (2, 8), generator=generator).to(weight.device)
    if first is None:
        raise ValueError("the model's first layer does not show which inputs it takes: give input_shape=")
    shapes = shapes_for(first) if isinstance(first, _ConvNd) else [(first.in_features,)]
    failure: Exception | None = None
    for shape in shapes:
        example = torch.randn(2, *shape, generator=generator).to(weight)
        try:
            with kept_attributes(model), as_found(model):
                model(example)
            return example
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # whatever a forward says of a wrong shape
            failure = error
    tried = ", ".join(map(str, shapes))
    raise ValueError(f"the forward ran for no input of shape {tried}: give input_shape=; the last error: {failure}")


def shapes_for(first: _ConvNd) -> list[tuple[int, ...]]:
    """Shapes of one input that a first convolution takes, the likeliest first."""
    axes = first.weight.ndim - 2
    sides: Sequence[int] = SIDES[axes]
    if axes == 2:
        # Grey images are mostly MNIST's, images that the first layer makes smaller mostly ImageNet's.
        best = 28 if first.in_channels == 1 else 224 if first.stride[0] > 1 else 32
        sides = sorted(sides, key=lambda side: side != best)
    return [(first.in_channels, *[side] * axes) for side in sides]


def explain_types(error: RuntimeError, model: nn.Module, given: Any, word: str) -> None:
    """Raise a clearer error where torch objects to the type of an input; otherwise return, to raise the original."""
    own = types_of(model)
    whole = "long" in str(error).lower()  # else ids, which are whole numbers, are not what it objects to
    floating = [x for x in tensors_in(given) if whole or x.is_floating_point()]
    odd = sorted({_type_name(x.dtype) for x in floating if x.dtype not in own})
    if own and odd and "type" in str(error):
        here = sorted(map(_type_name, own))
        raise ValueError(
            f"{word} of {' and '.join(odd)} for a model of {' and '.join(here)}: bring them to one type, with "
            f"{word}.to(torch.{here[0]}) for instance"
        ) from error


def types_of(model: nn.Module) -> set[torch.dtype]:
    """Of its floating point numbers."""
    return {t.dtype for t in itertools.chain(model.parameters(), model.buffers()) if t.is_floating_point()}


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

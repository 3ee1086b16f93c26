"""Batches of any structure, the data as a stream of them, and the arguments of a model's forward.

A batch is a tensor, a NumPy array, a list with one item per input (strings, say), or tuples, lists and dicts of these.
Numbers, booleans and None inside a dict are options of the call: they are passed on as they are.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, default_collate

from ..checks import listed, whole_number
from .restore import as_found, kept_attributes
from .sites import like, tensors_in, unwrap

MASK, DECODER_MASK = "attention_mask", "decoder_attention_mask"
_OPTIONS = (bool, int, float, str, type(None))


def count_inputs(batch: Any) -> int:
    """Return the number of inputs in a batch; all its parts must agree."""
    lengths = _lengths(batch, "the batch", ())
    if not lengths:
        raise ValueError(f"a batch of type {type(batch).__name__} holds no tensor; {_ACCEPTED}")
    (first, count), *others = lengths
    for name, length in others:
        if length != count:
            raise ValueError(f"all parts of a batch need one length: {first} has {count} rows, {name} has {length}")
    return count


def cut(batch: Any, start: int, stop: int) -> Any:
    """Return the inputs from start to stop; tensors are views."""
    return rebuild(lambda leaf: leaf[start:stop], batch)


def copied(batch: Any) -> Any:
    """Copy a batch, lists too, so that later changes of the original do not reach it."""
    return rebuild(lambda leaf: list(leaf) if isinstance(leaf, list) else _moved(leaf, None), batch)


def join(batches: Sequence[Any], name: str = "batch") -> Any:
    """Concatenate batches of one structure; a single batch is returned without a copy."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    kinds = {_kind(batch) for batch in batches}
    if len(kinds) > 1:
        raise ValueError(f"batches of different structure: {' and '.join(sorted(kinds))}")
    if isinstance(first, Mapping):
        for mask in (MASK, DECODER_MASK):
            if mask in first:
                batches = _pad_tokens(batches, mask)
        return {key: join([batch[key] for batch in batches], str(key)) for key in first}
    if is_parts(first):
        return like(first, [join(parts, name) for parts in zip(*batches, strict=True)])
    if isinstance(first, Tensor):
        shapes = sorted({tuple(tensor.shape[1:]) for tensor in batches})
        if len(shapes) > 1:
            raise ValueError(
                f"inputs of different shape, {shapes[0]} and {shapes[1]}, cannot be regrouped into blocks of rows: pad "
                f"or resize them in the loader (dicts with an {MASK} are padded automatically)"
            )
        return torch.cat(list(batches))
    if isinstance(first, list):
        return [item for batch in batches for item in batch]
    if other := [option for option in batches if option != first]:
        raise ValueError(
            f"batches with {name}={first!r} and {name}={other[0]!r} cannot be joined into one: give {name} as a tensor "
            "with one value per input, or compare their inputs separately"
        )
    return first


def rebuild(change: Callable[[Any], Any], batch: Any) -> Any:
    """Apply `change` to every tensor and list of a batch and return the same structure."""
    return rebuild_named(lambda _, leaf: change(leaf), batch)


def rebuild_named(change: Callable[[str, Any], Any], batch: Any, name: str = "") -> Any:
    """Apply `change(key, leaf)` to every tensor and list; `key` is that of the innermost dict."""
    if isinstance(batch, Mapping):
        return {key: rebuild_named(change, part, str(key)) for key, part in batch.items()}
    if is_parts(batch):
        return like(batch, [rebuild_named(change, part, name) for part in batch])
    return batch if isinstance(batch, _OPTIONS) else change(name, batch)


def with_tensors(batch: Any) -> Any:
    """Turn NumPy arrays into tensors (sharing memory where possible), and arrays of objects or text into lists."""
    return rebuild(_as_tensor, batch)


def number_array(values: Any, label: str) -> np.ndarray[Any, Any]:
    """Return an array of numbers that torch can hold; raise where the conversion would change their meaning."""
    if np.ma.is_masked(values):
        raise ValueError(
            f"{label} is a masked array, and its {np.ma.count_masked(values)} masked entries would count like the "
            "others: leave those rows out of both sides, or fill them with .filled(…)"
        )
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{label} must be an array, but its parts have different shapes") from error
    if array.dtype.names:
        raise TypeError(
            f"{label} is a structured array with the fields {', '.join(array.dtype.names)}: turn these into columns "
            "with numpy.lib.recfunctions.structured_to_unstructured"
        )
    if array.dtype == object:
        kinds = ", ".join(sorted({type(item).__name__ for item in array.flat[:100]}))
        raise TypeError(
            f"{label} must hold numbers, got an array of Python objects ({kinds}): remove missing values and convert "
            "it with .astype(float)"
        )
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{label} must hold numbers, got an array of {array.dtype}")
    if array.dtype in (np.longdouble, np.clongdouble) and array.dtype.itemsize > 8 * (1 + (array.dtype.kind == "c")):
        raise TypeError(f"{label} holds {array.dtype}, which torch lacks: round it with .astype(numpy.float64)")
    return array


def is_text(batch: Any) -> bool:
    """Return whether this is a list of strings, or a tuple of them as a DataLoader of (text, label) yields."""
    return isinstance(batch, (list, tuple)) and bool(batch) and all(isinstance(item, str) for item in batch)


def is_parts(batch: Any) -> bool:
    """Return whether this is a tuple, or a list of tensors, arrays or dicts; other lists hold one item per input."""
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
        return [length for key, part in batch.items() for length in _lengths(part, repr(key), _OPTIONS)]
    if is_parts(batch):
        parts = [(f"part {i} of {name}", part) for i, part in enumerate(batch)]
        return [length for label, part in parts for length in _lengths(part, label, (type(None),))]
    if isinstance(batch, (Tensor, np.ndarray)):
        if batch.ndim == 0:
            raise ValueError(f"{name} is a tensor without dimensions; the first dimension must count the inputs")
        return [(name, len(batch))]
    if isinstance(batch, (list, tuple)):
        return [(name, len(batch))]
    if isinstance(batch, options):
        return []
    samples = "; use a DataLoader to batch single samples" if isinstance(batch, (int, float, str)) else ""
    raise ValueError(f"{name} is of type {type(batch).__name__}; {_ACCEPTED}{samples}")


def _kind(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"dict of {', '.join(map(str, batch))}"
    return f"{type(batch).__name__} of {len(batch)}" if is_parts(batch) else type(batch).__name__


def _pad_tokens(batches: Sequence[Mapping[str, Any]], mask: str) -> list[dict[str, Any]]:
    """Right-pad with zeros every part that is as long as its mask, which marks the padding."""
    longest = max(batch[mask].shape[1] for batch in batches)
    padded_batches = []
    for batch in batches:
        tokens = batch[mask].shape[1]
        if batch[mask].ndim != 2 and tokens != longest:
            raise ValueError(f"{mask} of shape {tuple(batch[mask].shape)} cannot be padded to {longest} tokens")
        padded = dict(batch)
        for key, part in batch.items():
            # The decoder's tokens must not be padded without a mask of their own.
            is_decoders = key.startswith("decoder_") or (key == "labels" and DECODER_MASK in batch)
            belongs = is_decoders == (mask == DECODER_MASK)
            if belongs and isinstance(part, Tensor) and part.ndim >= 2 and part.shape[1] == tokens < longest:
                padded[key] = pad(part, (0, 0) * (part.ndim - 2) + (0, longest - tokens))
        padded_batches.append(padded)
    return padded_batches


def input_rows(batch: Any, count: int) -> Tensor:
    """Return the first floating-point tensor of the batch as (inputs, numbers)."""
    leaves: list[Any] = []
    rebuild(leaves.append, batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and len(leaf) == count:
            return leaf.detach().reshape(count, -1)
    raise ValueError(
        "a measure that regresses out the inputs needs floating-point data (images, say): "
        f"got {', '.join(type(leaf).__name__ for leaf in leaves) or 'no data'}"
    )


# The data as a stream of chunks, recut so that the loader's batch size does not matter

BATCH = 128  # inputs per batch where the data are not batched


@dataclass(frozen=True)
class Chunk:
    """Consecutive inputs of the stream, in the structure of the loader's batches."""

    batch: Any  # None for saved activations, and for another process's share
    start: int  # index of the first input in the whole data
    count: int


@dataclass(frozen=True)
class Share:
    """Every `of`-th chunk, starting with number `rank`: nothing is read twice, nothing is padded."""

    rank: int = 0
    of: int = 1

    def has(self, number: int) -> bool:
        return number % self.of == self.rank


ALL = Share()
Span = tuple[int, int]  # start and stop of consecutive inputs
Reader = Callable[[Iterable[Span]], Iterable[Any]]  # yields one batch per span


class Batches:
    """Any data as batches: an iterable of them, a whole tensor, array, dict or list of texts, or a Dataset of samples.

    `total` is the number of inputs, None if it is unknown before the data are read. `read` reads inputs in any order,
    None if that is impossible; `size` is then the batch size.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._used = False
        if isinstance(data, (Tensor, np.ndarray, Mapping)) or is_text(data):
            whole, count = with_tensors(data), count_inputs(data)
            self._data = [cut(whole, start, min(start + BATCH, count)) for start in range(0, count, BATCH)]
        elif isinstance(data, Dataset) or _is_map_style(data):
            self._data = DataLoader(data, batch_size=BATCH, shuffle=False)
        elif isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
            raise TypeError(f"data must be iterable and yield batches, got {type(data).__name__}")
        elif isinstance(data, tuple) and _may_be_one_batch(data):
            raise ValueError(
                "a tuple of tensors as data is read as several batches, but the parts of this one look like those of "
                "one batch: give [(x, y)], TensorDataset(x, y) or a dict {'input_ids': …, 'attention_mask': …}; or a "
                "list if each part is a batch"
            )
        self.total = _total(self._data)
        self.size, self.read = (0, None) if self.total is None else _random_access(self._data)

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self._data)
        if stream is self._data and self._used:
            raise ValueError("the data are a one-shot iterator that was read before: give a list or a DataLoader")
        self._used = True
        empty = True
        for batch in map(with_tensors, stream):
            if count_inputs(batch):
                empty = False
                yield batch
        if empty:
            raise ValueError("the data yielded no inputs")

    def kept(self, batch: Any) -> Any:
        """Return a batch that is kept while others are read: a copy if the data may reuse one buffer for all."""
        return batch if isinstance(self._data, (list, tuple, DataLoader)) else copied(batch)


def recut(
    batches: Any,
    *,
    block: int | None,
    skip: int = 0,
    max_rows: int | None = None,
    largest: int | None = None,
    share: Share = ALL,
) -> Iterator[Chunk]:
    """Yield the inputs in chunks of a multiple of `block`: as large as the loader's first batch, or `largest`.

    The last chunk takes the remainder: fewer than `block` inputs never stand alone unless there are no more.
    With `block=None` the loader's batches pass unchanged. The first `skip` inputs are left out, and so are those from
    index `max_rows` on (counted from the start of the data, skipped inputs included). Chunks outside this process's
    `share` come without their inputs, which are not read where the data allow it.
    """
    if block is not None:
        whole_number(block, "block", least=1)
    if max_rows is not None:
        whole_number(max_rows, "max_rows", least=1)
    source = batches if isinstance(batches, Batches) else Batches(batches)
    if share.of > 1 and source.total is not None and source.read is not None:
        end = source.total if max_rows is None else min(source.total, max_rows)
        spans = list(_spans(source.total, source.size, end, block=block, skip=skip, largest=largest))
        yield from _read_share(source.read, spans, share)
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
            if waiting:
                waiting[-1] = replace(waiting[-1], batch=source.kept(waiting[-1].batch))
        if held:
            yield _take(waiting, held, wanted=share.has(number))


def _chunk_size(loaded: int, block: int, largest: int | None) -> int:
    return max(block, min(loaded, largest or loaded) // block * block)


def _read_share(read: Reader, spans: Sequence[Span], share: Share) -> Iterator[Chunk]:
    """Yield the chunks of a pass over the data, reading only those of the share."""
    batches = iter(read(span for number, span in enumerate(spans) if share.has(number)))
    for number, (start, stop) in enumerate(spans):
        batch = None
        if share.has(number):
            batch = with_tensors(next(batches))
            if count_inputs(batch) != stop - start:
                raise ValueError(f"inputs {start} to {stop - 1} were requested, and {count_inputs(batch)} came")
        yield Chunk(batch, start, stop - start)


def _spans(total: int, size: int, end: int, *, block: int | None, skip: int, largest: int | None) -> Iterator[Span]:
    """Yield the start and stop of each chunk of `recut` up to `end`."""
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


def _bounded(source: Batches, skip: int, max_rows: int | None) -> Iterator[tuple[int, Chunk]]:
    """Yield the size of each loaded batch and its part between skip and max_rows."""
    seen = 0
    for batch in source:
        count = count_inputs(batch)
        first = min(max(skip - seen, 0), count)
        last = count if max_rows is None else min(count, max_rows - seen)
        if first < last:
            part = batch if (first, last) == (0, count) else cut(batch, first, last)
            yield count, Chunk(part, seen + first, last - first)
        seen += count
        if max_rows is not None and seen >= max_rows:
            return


def _take(waiting: deque[Chunk], size: int, *, wanted: bool) -> Chunk:
    """Take the next inputs from the queue; they are joined, which copies, only if they are wanted."""
    start, taken, missing = waiting[0].start, [], size
    while missing:
        part = waiting.popleft()
        if part.count > missing:
            waiting.appendleft(Chunk(cut(part.batch, missing, part.count), part.start + missing, part.count - missing))
            part = Chunk(cut(part.batch, 0, missing), part.start, missing)
        taken.append(part.batch)
        missing -= part.count
    return Chunk(join(taken) if wanted else None, start, size)


def _random_access(data: Any) -> tuple[int, Reader | None]:
    """Return the batch size and a reader of any inputs, or no reader."""
    if isinstance(data, DataLoader):
        # Sequential batches of one size, whose samples are collated independently.
        in_order = type(data.sampler) is SequentialSampler and not isinstance(data.dataset, IterableDataset)
        if data.batch_size is None or not in_order or data.collate_fn is not default_collate:
            return 0, None
        return data.batch_size, lambda spans: _loaded(data, spans)
    read, size = getattr(data, "read", None), getattr(data, "size", None)
    if callable(read) and isinstance(size, int) and isinstance(getattr(data, "total", None), int):
        return size, lambda spans: (read(start, stop) for start, stop in spans)
    return 0, None


def _loaded(loader: DataLoader[Any], spans: Iterable[Span]) -> Iterable[Any]:
    """Return a loader of these spans with the workers and the pinned memory of the user's own."""
    options = "num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor generator"
    same: dict[str, Any] = {name: getattr(loader, name) for name in options.split()}
    return DataLoader(loader.dataset, batch_sampler=(list(range(*span)) for span in spans), **same)


def _may_be_one_batch(data: tuple[Any, ...]) -> bool:
    """Return whether the parts of a tuple differ as inputs and labels do, or ids and their mask."""
    parts = [with_tensors(part) for part in data if isinstance(part, (Tensor, np.ndarray))]
    if hasattr(data, "_fields") or len(parts) < len(data) or not all(isinstance(part, Tensor) for part in parts):
        return hasattr(data, "_fields")
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1:
        return True
    if parts[0].is_floating_point() or parts[0].ndim != 2 or len({len(part) for part in parts}) > 1:
        return False
    return any(map(_pads, parts)) and any(bool(((part != 0) & (part != 1)).any()) for part in parts)


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable)


def _total(data: Any) -> int | None:
    """Return the number of inputs in these batches if it is known before they are read."""
    try:
        if isinstance(data, DataLoader):
            if data.batch_size is None:
                return None  # the data set or a custom sampler makes the batches
            inputs = len(data.dataset if isinstance(data.dataset, IterableDataset) else data.sampler)  # type: ignore[arg-type]
            return inputs // data.batch_size * data.batch_size if data.drop_last else inputs
        if isinstance(data, (list, tuple)):
            return sum(count_inputs(with_tensors(batch)) for batch in data)
        if isinstance(getattr(data, "total", None), int):
            return int(data.total)  # batches that know their number of inputs
    except (TypeError, NotImplementedError):
        pass  # a sampler or data set without a length
    return None


# The arguments of a model: which parts of a batch, on which device

_TARGETS = ("labels", "label")
_IMAGES = ("pixel_values", "x")
_NUMBERED = "argument "  # prefix for positional arguments without a name


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a model's forward as one structure whose tensors have names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...] = ()  # of the forward's positional parameters

    def map(self, change: Callable[[str, Any], Any]) -> CallArguments:
        """Return the arguments with `change(name, leaf)` in place of every tensor and list."""
        names = (*self.names, *[""] * len(self.args))
        args = tuple(rebuild_named(change, arg, name) for arg, name in zip(self.args, names, strict=False))
        return replace(self, args=args, kwargs=rebuild_named(change, self.kwargs))

    def leaves(self) -> list[Any]:
        """Return every tensor and list, in the order of `map`."""
        return [leaf for _, leaf in self.named_leaves()]

    def named_leaves(self) -> list[tuple[str, Any]]:
        leaves: list[tuple[str, Any]] = []
        self.map(lambda name, leaf: leaves.append((name, leaf)))
        return leaves

    def form(self) -> CallArguments:
        """Return names in place of tensors and lists: equal for calls of one structure with the same options."""
        return self.map(lambda name, leaf: name)

    def count(self) -> int:
        return count_inputs((self.args, self.kwargs))

    def inputs(self, start: int, stop: int) -> CallArguments:
        return self.map(lambda _, leaf: leaf[start:stop])


def model_arguments(
    batch: Any,
    *,
    model: nn.Module | None = None,
    inputs: Callable[[Any], Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for a model, moved to its device.

    A tensor is the argument, and so is the first part of a pair; a dict gives keyword arguments, without its labels.
    If the forward of `model` takes an `attention_mask`, a part (inputs, tokens) beside ids or embeddings is passed as
    that. `inputs(batch)` overrides all this and returns a tensor, a tuple of arguments or a dict. `prepare` (its own
    normalisation) is applied after the move to the first argument, or in a dict to `pixel_values`, `x`, or the
    first floating-point tensor. For text (a list of strings, or a dict with such a list) `prepare` is the model's
    tokeniser: it receives the whole batch and returns the arguments.
    """
    chosen = without_labels(batch) if inputs is None else inputs(copied(batch))  # it may work in place
    has_text = is_text(chosen) or (isinstance(chosen, Mapping) and any(map(is_text, chosen.values())))
    if has_text and prepare is None and inputs is None:
        raise ValueError("the data are texts, which a model cannot read: give tokenisers as prepare_a= and prepare_b=")
    if has_text and prepare is not None:
        chosen, prepare = _tokenised(chosen, prepare), None
    elif getattr(prepare, "text_only", False):
        if isinstance(chosen, Tensor) and chosen.is_floating_point():
            raise ValueError(
                f"the data are numbers of shape {tuple(chosen.shape)}, but the model reads texts or token ids: give "
                "texts (texts:file), or dicts of input_ids and attention_mask"
            )
        prepare = None
    mask = _mask_beside(batch, model) if inputs is None and model is not None else None
    beside = {} if mask is None else {MASK: _moved(mask, device)}
    moved = rebuild(lambda leaf: _moved(leaf, device), with_tensors(chosen))
    if isinstance(moved, Mapping):
        keywords = dict(moved)
        if prepare is not None:
            key = _main_key(keywords)
            keywords[key] = prepare(keywords[key])
        return _as_exported(model, (), keywords)
    positional = moved if isinstance(moved, tuple) else (moved,)
    if prepare is not None:
        if not positional or not isinstance(positional[0], Tensor):
            got = type(positional[0]).__name__ if positional else "nothing"
            raise ValueError(f"prepare is applied to the model's first argument, which is {got}, not a tensor")
        positional = (prepare(positional[0]), *positional[1:])
    return _as_exported(model, positional, beside)


def _as_exported(
    model: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as a program of torch.export takes them, by position or by name; others as they are."""
    if model is None or (exported := _exported_names(unwrap(model))) is None:
        return args, kwargs
    positional, keywords = exported
    names = [*positional, *keywords]
    named = dict(zip(names, args, strict=False)) | kwargs
    if named.keys() != set(names) or len(args) + len(kwargs) != len(names):
        given = listed([*kwargs, *[f"{len(args)} without a name"] * bool(args)])
        raise TypeError(
            f"the exported program takes {listed(names)}, and is given {given}. Choose what it is given with inputs=, "
            "a function from a batch to a dict"
        )
    return tuple(named[name] for name in positional), {name: named[name] for name in keywords}


def _exported_names(model: nn.Module) -> tuple[list[str], list[str]] | None:
    """Return the arguments that a program of torch.export takes by position and by name; None if they are nested."""
    program: Any = getattr(model, "program", model)
    calls = getattr(program, "module_call_graph", None)
    spec = calls[0].signature.in_spec if calls else getattr(program, "_in_spec", None)
    if spec is None:
        return None
    leaves = [node.target for node in program.graph.find_nodes(op="placeholder")]
    args, kwargs = tree_unflatten(leaves, spec) if len(leaves) == spec.num_leaves else ([None], {})
    names = [*args, *kwargs.values()]
    return (list(args), list(kwargs)) if all(isinstance(name, str) for name in names) else None


def _mask_beside(batch: Any, model: nn.Module) -> Tensor | None:
    """Return the padding mask among the parts of a batch (ids, mask, …) if the model takes one, else None.

    The first part may also be embeddings (inputs, tokens, features). Labels of tokens have the shape of the ids, so a
    part that may be either is an error. A mask has 1 at tokens and 0 at the padding before or after them.
    """
    if not is_parts(batch) or len(batch) < 2 or not isinstance(ids := with_tensors(batch[0]), Tensor):
        return None
    if ids.ndim not in (2, 3) or (ids.ndim == 2 and ids.is_floating_point()):
        return None
    parts = [part for part in map(with_tensors, batch[1:]) if isinstance(part, Tensor)]
    candidates = [part for part in parts if part.shape == ids.shape[:2]]
    inputs, tokens = ids.shape[:2]
    of_scores = [  # masks of attention scores: (inputs, 1, tokens) or (inputs, 1, 1, tokens), or with tokens for a 1
        part
        for part in parts
        if part.shape != ids.shape
        and part.ndim in (3, 4)
        and (len(part), part.shape[-1]) == (inputs, tokens)
        and set(part.shape[1:-1]) <= {1, tokens}
    ]
    if not (candidates or of_scores):
        return None
    model = unwrap(model)
    binary = [part for part in candidates if bool(((part == 0) | (part == 1)).all())]
    if not _takes_mask(model):
        _check_other_masks(model, binary)
        return None
    if not candidates:
        raise ValueError(
            f"{type(model).__name__} takes an {MASK}, but a part of the batch has shape {tuple(of_scores[0].shape)}, "
            "as a mask of attention scores has: give the padding mask (inputs, tokens), 1 at tokens"
        )
    if len(binary) == 1 and _pads(binary[0]):
        return binary[0]
    gaps = ", with zeros between ones as in labels of tokens" if len(binary) == 1 else ""
    raise ValueError(
        f"{type(model).__name__} takes an {MASK}, and it is unclear which part of the batch that is: "
        f"{len(candidates)} beside the ids have shape {tuple(ids.shape[:2])}, and {len(binary)} of these hold only 0 "
        f"and 1{gaps}. Give dicts: {{'input_ids': …, {MASK!r}: …}}, and 'labels' if there are any"
    )


def _pads(part: Tensor) -> bool:
    """Return whether every row is 1 at tokens and 0 at the padding before or after them."""
    ones = part == 1
    return bool(((part == 0) | ones).all()) and bool(((ones[:, 1:] != ones[:, :-1]).sum(1) <= 1).all())


def _check_other_masks(model: nn.Module, masks: Sequence[Tensor]) -> None:
    """Raise if the forward takes a mask by another name and a part of the batch may be it."""
    names = [name for name in _parameters(model) if is_mask(name)]
    if names and not all(bool(mask.all()) for mask in masks):
        raise ValueError(
            f"the forward of {type(model).__name__} takes {names[0]!r}, and it is unclear whether a part of the batch "
            "that holds only 0 and 1 is that or labels: give dicts that name the arguments and 'labels'"
        )


def is_mask(name: str) -> bool:
    return name == "mask" or name.endswith("_mask")


def named_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; positional ones by the forward's parameters, or by their number."""
    parameters = _parameters(unwrap(model)).values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += [f"{_NUMBERED}{k + 1}" for k in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def unread_mask(model: nn.Module, named: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return an argument that may mark padding but is not called `attention_mask`, and its number of tokens.

    It is unknown whether such a mask has 1 at tokens or at padding. None if there is no such argument.
    """
    for name, part in named.items():
        if not isinstance(part, Tensor) or part.ndim != 2 or not (is_mask(name) or name.startswith(_NUMBERED)):
            continue
        mixed = bool(((part == 0) | (part == 1)).all()) and bool((part != part[:1, :1]).any())
        if mixed and (is_mask(name) or any(MASK in _parameters(module) for module in unwrap(model).modules())):
            return name, part.shape[1]
    return None


def _takes_mask(model: nn.Module) -> bool:
    """Return whether the forward takes an `attention_mask`, or passes all keywords to a module whose forward does."""
    parameters = _parameters(model)
    if MASK in parameters or all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        return MASK in parameters
    return any(MASK in _parameters(module) for module in model.modules())


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the forward; TorchScript shows none."""
    if (exported := _exported_names(model)) is not None:
        names = [*exported[0], *exported[1]]
        return {name: inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names}
    return {} if isinstance(model, torch.jit.ScriptModule) else inspect.signature(model.forward).parameters


def _tokenised(texts: Any, prepare: Callable[[Any], Any]) -> Any:
    tokens = prepare(texts)
    parts = tokens.values() if isinstance(tokens, Mapping) else [tokens]
    if not any(isinstance(part, (Tensor, np.ndarray)) for part in with_tensors(list(parts))):
        raise ValueError(
            f"prepare must turn text into tensors, but returned {type(tokens).__name__} without one: let the tokeniser "
            'pad the texts and return tensors, e.g. tokeniser(texts, padding=True, return_tensors="pt")'
        )
    return tokens


def labels_of(batch: Any) -> Tensor | None:
    """Return the class numbers (inputs,) of a batch: the second of a pair, or a dict's `labels`; None without labels.

    In a tuple of ids, a mask of their shape, and labels, the third part.
    """
    parts: Any = batch if is_parts(batch) and batch else (batch,)
    labels = parts[1] if len(parts) > 1 else parts[0]
    if len(parts) == 3:
        shapes = [tuple(part.shape) for part in parts[:2] if isinstance(part, (Tensor, np.ndarray))]
        labels = parts[2] if len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 2 else labels
    if isinstance(labels, Mapping):
        labels = next((labels[key] for key in _TARGETS if key in labels), None)
    elif len(parts) == 1:
        return None
    if isinstance(labels, list) and labels and all(type(label) is int for label in labels):  # beside texts
        labels = torch.tensor(labels)
    labels = with_tensors(labels)
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        return None
    return labels


def without_labels(batch: Any) -> Any:
    """Return the part of a batch that a model is given: the first of a pair, a dict without its labels."""
    if is_parts(batch):
        if not batch:
            raise ValueError("a batch is an empty tuple: there is nothing to give to the model")
        batch = batch[0]
    if isinstance(batch, Mapping):
        return {key: part for key, part in batch.items() if key not in _TARGETS}
    return batch


def _moved(leaf: Any, device: str | torch.device | None) -> Any:
    """Copy to the device: a model or its `prepare` may work in place, and the next model gets the same batch."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device or leaf.device, non_blocking=True, copy=True)


def _main_key(keywords: dict[str, Any]) -> str:
    tensors = {key: part for key, part in keywords.items() if isinstance(part, Tensor)}
    for key in (*_IMAGES, *tensors):
        if key in tensors and (key in _IMAGES or tensors[key].is_floating_point()):
            return key
    raise ValueError(f"prepare found no floating-point tensor among {', '.join(keywords) or 'no arguments'}")


# A random input for a model without data, to see how its forward runs

SIDES = {1: (16, 64, 256, 1024), 2: (32, 28, 64, 96, 128, 224, 256), 3: (8, 16, 32)}  # by number of spatial axes


def example_input(model: nn.Module, input_shape: Sequence[int] | None = None, *, seed: int = 0) -> Tensor:
    """Return two random inputs of this shape (without the batch axis), or of one that the model's first layer takes.

    A first convolution gives the channels; the first of the usual sizes with which the forward runs is taken.
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
        raise ValueError("the model's first layer does not show the shape of its inputs: give input_shape=")
    shapes = shapes_for(first) if isinstance(first, _ConvNd) else [(first.in_features,)]
    failure: Exception | None = None
    for shape in shapes:
        example = torch.randn(2, *shape, generator=generator).to(weight)
        try:
            with kept_attributes(model), as_found(model):
                model(example)
            return example
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # whatever a wrong shape causes
            failure = error
    tried = ", ".join(map(str, shapes))
    raise ValueError(f"the forward ran for no input of shape {tried}: give input_shape=; the last error: {failure}")


def shapes_for(first: _ConvNd) -> list[tuple[int, ...]]:
    """Return shapes of one input that a first convolution takes, the likeliest first."""
    axes = first.weight.ndim - 2
    sides: Sequence[int] = SIDES[axes]
    if axes == 2:
        # Grey images are mostly MNIST's; a first layer with a stride mostly belongs to ImageNet.
        best = 28 if first.in_channels == 1 else 224 if first.stride[0] > 1 else 32
        sides = sorted(sides, key=lambda side: side != best)
    return [(first.in_channels, *[side] * axes) for side in sides]


def explain_images(error: Exception, model: nn.Module, batch: Any) -> None:
    """Raise a clearer error if images of uint8, or without a batch axis, may be why a model cannot be run."""
    if not isinstance(images := without_labels(batch), Tensor):
        return
    shape = tuple(images.shape)
    if images.dtype == torch.uint8 and types_of(model) and "type" in str(error):
        expected = " and ".join(sorted(map(_type_name, types_of(model))))
        raise ValueError(
            f"images of uint8, shape {shape}, for a model of {expected}: give floats in [0, 1], images.float() / 255"
        ) from error
    first = next((m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding, _ConvNd))), None)
    if isinstance(first, _ConvNd) and images.ndim == first.weight.ndim - 1:
        raise ValueError(
            f"a batch has shape {shape}, but the first layer takes {first.weight.ndim} dimensions, of which the first "
            "counts the inputs: write image[None] for a single image, torch.stack(images) for a list of them "
            f"(the model says: {error})"
        ) from error


def explain_types(error: RuntimeError, model: nn.Module, inputs: Any, word: str) -> None:
    """Raise a clearer error if torch objects to the type of an input; otherwise return, so the caller re-raises."""
    types = types_of(model)
    whole = "long" in str(error).lower()  # else torch does not object to ids, which are whole numbers
    tensors = [x for x in tensors_in(inputs) if whole or x.is_floating_point()]
    wrong = sorted({_type_name(x.dtype) for x in tensors if x.dtype not in types})
    if types and wrong and "type" in str(error):
        expected = sorted(map(_type_name, types))
        raise ValueError(
            f"{word} of {' and '.join(wrong)} for a model of {' and '.join(expected)}: convert one to the type of the "
            f"other, for instance with {word}.to(torch.{expected[0]})"
        ) from error


def types_of(model: nn.Module) -> set[torch.dtype]:
    """Return the floating-point types of the model's parameters and buffers."""
    return {t.dtype for t in chain(model.parameters(), model.buffers()) if t.is_floating_point()}


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Golden records: what a model gives at its sites for a few inputs, in one file that a model is held against later."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture import Chunk, TokenMasks, count_inputs, cut, select, unwrap
from ..capture.batches import rebuild
from ..capture.calls import Call, Seen, in_layout, some_inputs
from ..capture.sites import Names, SilentSite, outside
from ..checks import positive, whole_number
from ..engine.network import OUTPUT
from ..engine.plan import MEMORY, parse_size
from ..engine.provenance import digest_of, provenance
from ..engine.stream import Stream
from ..files import PLAIN, check_writable, read_nested, reading, write_nested
from ..results import counted
from ..stats import coarser, is_statistics
from .floor import FACTOR, Floor, Level
from .pairing import Pair
from .replay import Subject, held_tensors

VERSION = 2
INPUTS = 16  # of a record, unless more are asked for
_TENSOR = "tensor"  # the key under which a structure names one of the record's tensors


def record(
    model: Any,
    data: Any,
    out: str | os.PathLike[str],
    *,
    sites: Any = None,
    floor: str = "batch",
    replay: bool = True,
    max_rows: int = INPUTS,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | bool | None = None,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
    name: str | None = None,
) -> Path:
    """Write what a model gives at every site for the first inputs of the data, for `diff` and `assert_same`.

    `model`, `data`, `prepare`, `device`, `name`: as in `diff`. `sites`: by default the blocks or layers, and what has
    weights beside them: embeddings, a stem, a head; "leaves" lets `diff` name the innermost module. The record holds
    the first `max_rows` inputs and, with `replay`, what each site is given, so that the error that a layer makes can be
    told from what it inherits. `inputs`: a function from a batch to the model's arguments, or False: the record does
    not hold the inputs, and `data` must be given again. `floor`, what must not matter, is measured now and kept.
    """
    check_writable(out)
    if Path(out).suffix != ".safetensors":
        raise ValueError(f"a record is written as .safetensors, got out={str(out)!r}")
    whole_number(max_rows, "max_rows", least=1)
    keep, make = inputs is not False, inputs if callable(inputs) else None
    subject = Subject.of(model, name=name, prepare=prepare, inputs=make, device=device)
    subject.sites = _default_sites(subject) if sites is None else sites
    with subject.borrowed():
        stream = Stream.of(data, [subject], max_rows)
        count = min(max_rows, count_inputs(stream.first))
        chunk = Chunk(cut(stream.first, 0, count), 0, count)
        subject.settle(chunk)
        try:
            seen, _ = subject.look_at(chunk)
            silent = [f"{subject.name}: {site} {why}, and is left out" for site, why in subject.silent.items()]
        except SilentSite as error:
            if sites is not None:
                raise
            seen, silent = [], [f"{subject.name}: {error}. Only its output is recorded"]
        labels = [site.label for site in seen]
        calls, _, masks = subject.recorder([*labels, OUTPUT])(chunk)
        measured = Floor.of(floor, subject, subject, parse_size(memory) or MEMORY, chunk.batch)
        levels = measured.at([Pair(label, label, "") for label in labels], [chunk])
    tensors: dict[int, tuple[int, Tensor]] = {}

    def stored(call: Call) -> dict[str, Any]:
        given = _plain(list(call.arguments), tensors) if replay else [[], {}]
        return {"names": list(call.names), "given": given, "returned": _plain(call.output, tensors)}

    batch = rebuild(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, chunk.batch)
    value = {
        "batch": _plain(batch, tensors) if keep else None,
        "masks": _plain([masks.tokens, masks.decoder], tensors),
        "calls": {label: stored(call) for label, call in calls.items()},
        "tensors": [in_layout(_in_floats(tensor.detach().cpu())) for _, tensor in tensors.values()],
    }
    about = {
        "name": subject.name,
        "model": subject.describe(),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "inputs": count,
        "digest": digest_of(chunk.batch),
        "sites": [
            {"label": site.label, "shape": list(site.shape), "dtype": str(site.dtype).removeprefix("torch.")}
            for site in seen
        ],
        "floor": floor,
        "floor_words": measured.words,
        "caveats": silent + measured.caveats,
        "levels": {label: list(level) for label, level in levels.items()},
        "provenance": provenance(data=data),
    }
    return write_nested(out, "record", VERSION, about, value)


def _default_sites(subject: Subject) -> Any:
    """The default sites and what has weights beside them, since a record cannot be opened later."""
    root = unwrap(subject.model)
    if isinstance(root, torch.jit.ScriptModule) or subject.values is not None:
        return None
    names = Names.of(root)
    sites = list(select(names, None))
    return [(site, None, False) for site in [*sites, *outside(names, sites)]]  # nobody has named them


def _plain(structure: Any, tensors: dict[int, tuple[int, Tensor]]) -> Any:
    """What a file can hold of a structure; its tensors, each with its number, go to `tensors`, by id: each once."""
    if isinstance(structure, Tensor):
        return {_TENSOR: tensors.setdefault(id(structure), (len(tensors), structure))[0]}
    if isinstance(structure, Mapping):
        return {str(key): _plain(part, tensors) for key, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_plain(part, tensors) for part in structure]
    if isinstance(structure, PLAIN):
        return structure
    if isinstance(structure, (np.ndarray, np.generic)) and structure.dtype.kind in "biufc":
        return _plain(torch.as_tensor(structure), tensors)
    return {key: _plain(part, tensors) for key, part in held_tensors(structure).items()} or None


def _in_floats(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor


def _whole(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """A structure with its tensors in place."""
    if isinstance(structure, dict):
        if structure.keys() == {_TENSOR}:
            return tensors[structure[_TENSOR]]
        return {key: _whole(part, tensors) for key, part in structure.items()}
    return [_whole(part, tensors) for part in structure] if isinstance(structure, list) else structure


@dataclass
class Record:
    """A record as the reference of a diff: it answers as the model did, for the inputs that it holds."""

    path: Path
    name: str
    about: dict[str, Any]
    batch: Any  # None if it holds no inputs
    calls: dict[str, Call]
    masks: TokenMasks
    levels: dict[str, Level]
    sites: Any = None
    silent: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str], name: str | None = None) -> Record:
        about, value = read_nested(path, "record", VERSION)
        with reading(path):
            tensors = value["tensors"]
            calls = {
                label: Call(call["names"], _whole(call["given"], tensors), _whole(call["returned"], tensors))
                for label, call in value["calls"].items()
            }
            levels = {label: Level(*map(float, numbers)) for label, numbers in about["levels"].items()}
            masks = TokenMasks(*_whole(value["masks"], tensors))
            batch = _whole(value["batch"], tensors)
            known = [site["label"] for site in about["sites"]]
            if missing := [label for label in [*known, OUTPUT] if label not in calls or label not in levels]:
                raise ValueError(f"the record lacks {missing[0]!r}")
            return cls(Path(path), name or about["name"], about, batch, calls, masks, levels)

    @property
    def inputs(self) -> int:
        return int(self.about["inputs"])

    @property
    def dtype(self) -> torch.dtype:
        return _dtype(self.about["dtype"])

    @property
    def seen(self) -> list[Seen]:
        """The sites in execution order."""
        return [Seen(s["label"], tuple(s["shape"]), _dtype(s["dtype"])) for s in self.about["sites"]]

    def data(self, given: Any) -> Any:
        """The inputs to run the other model on: the record's own, or the ones that it was made of, given again."""
        if given is None:
            if self.batch is None:
                raise TypeError(f"{self.path} holds no inputs: give the data that it was made of")
            return [self.batch]
        stream = Stream.reading(given, self.inputs)
        batch = cut(stream.first, 0, min(self.inputs, count_inputs(stream.first)))
        if digest_of(batch) != self.about["digest"]:
            count = counted(self.inputs, "input")
            raise ValueError(
                f"{self.path} is a record of other inputs: the first {count} of the data differ from those "
                "that it was made of. Give the same data in the same order"
                + (", or none: the record holds its inputs" if self.batch is not None else "")
            )
        return [batch]

    # What a diff asks of its reference

    def describe(self) -> str:
        return f"{self.about['model']} (record of {counted(self.inputs, 'input')}, {self.path.name})"

    @contextmanager
    def borrowed(self) -> Iterator[Record]:
        yield self

    def floor(self, given: Any, b: Subject) -> Floor:
        """The floor that was measured when the record was made, or a tolerance."""
        least, kept = torch.finfo(coarser(self.dtype, b.dtype)).eps, self.about["floor"]
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            tolerance = positive(given, "floor")
            return Floor(b, [], tolerance, 1.0, f"a relative error of {tolerance:g}, as given", given)
        if given not in ("batch", kept):  # "batch" is the default
            raise ValueError(
                f"{self.path} holds the floor {kept!r}, measured when it was made, not {given!r}: make it again with "
                f"floor={given!r}, or give a tolerance"
            )
        words = f"{self.about['floor_words']}, measured when the record was made"
        return Floor(b, [], least, FACTOR, words, kept, list(self.about["caveats"]), self.levels)

    def first_inputs(self, batch: Any) -> str | None:
        return None  # `data` has seen to it

    def in_training(self) -> list[str]:
        return []

    def on_cpu(self) -> bool:
        return True

    def look_at(self, chunk: Chunk) -> tuple[list[Seen], dict[str, Tensor]]:
        """The sites, and their activations for some inputs."""
        calls = {label: self._part(call, chunk) for label, call in self.calls.items()}
        numbers = {label: x for label, call in calls.items() if (x := call.activation) is not None}
        return [replace(site, activation=numbers.get(site.label)) for site in self.seen], numbers

    def recorder(self, labels: Sequence[str]) -> Callable[[Chunk], tuple[dict[str, Call], Any, TokenMasks]]:
        def run(chunk: Chunk) -> tuple[dict[str, Call], Any, TokenMasks]:
            calls = {label: self._part(self.calls[label], chunk) for label in labels if label in self.calls}
            start, stop = self._place(chunk)
            tokens, decoder = (None if m is None else m[start:stop] for m in (self.masks.tokens, self.masks.decoder))
            return calls, self._part(self.calls[OUTPUT], chunk).output, TokenMasks(tokens, decoder)

        return run

    def _part(self, call: Call, chunk: Chunk) -> Call:
        start, stop = self._place(chunk)
        return call if (start, stop) == (0, self.inputs) else some_inputs(call, start, stop, of=self.inputs)

    def _place(self, chunk: Chunk) -> tuple[int, int]:
        if chunk.start + chunk.count > self.inputs:
            raise ValueError(f"{self.path} holds {counted(self.inputs, 'input')}, but the data go on")
        return chunk.start, chunk.start + chunk.count


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no type of numbers is called {name[:40]!r}")
    return found


def is_record(thing: Any) -> bool:
    """Whether this is the path of a record."""
    return isinstance(thing, (str, os.PathLike)) and is_statistics(thing, kind="record")


def assert_same(model: Any, reference: Any, data: Any = None, **options: Any) -> None:
    """Raise AssertionError, with the table, if the model is not the same as the reference: a record, or a model.

    `data` and `options` are those of `diff`, whose second model this is; a record holds its inputs. For tests.
    """
    from .comparing import diff

    found = diff(reference, model, data, **options)
    if not found.same:
        raise AssertionError(found.as_text())

"""What is compared: a model that is run, or activations that were saved; both hand over rows a chunk at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from ..capture import (
    TRIED,
    ActivationFile,
    Chunk,
    Masks,
    Rule,
    Site,
    Watch,
    answer_in,
    as_found,
    count_inputs,
    cut,
    ends,
    kept_attributes,
    mixing_note,
    model_arguments,
    needs_axes,
    open_activations,
    restored_after_errors,
    rows_per_input,
    select,
    to_rows,
    watch,
)
from ..models import NamedModel, open_model, weights_of, with_name
from ..process_state import kept_random_state
from ..results import Side
from ..stats import is_statistics as is_statistics_file
from .plan import Settings
from .provenance import Digest, describe_inputs, describe_model, digest_of

Sink = Callable[[str, Tensor], Any]


class Source(Protocol):
    """Hands the rows of every site of a chunk to a sink, in execution order."""

    name: str
    largest: dict[str, float]

    def identity(self) -> object: ...
    def describe(self) -> str: ...
    def on_cpu(self) -> bool: ...
    def digest(self) -> str: ...
    def opened(self) -> AbstractContextManager[Any]: ...
    def look(self, batch: Any) -> Side: ...
    def mixing(self, batch: Any) -> str | None: ...
    def per_input(self) -> dict[str, int]: ...
    def counts(self) -> dict[str, Tensor]: ...
    def read(self, chunk: Chunk, sink: Sink) -> list[Any]: ...


@dataclass
class Network:
    """A model under watch."""

    model: nn.Module
    name: str
    sites: Any = None
    rows: Rule = "flatten"
    prepare: Callable[[Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    device: str | torch.device | None = None
    weights: str = ""  # where they are from, if that is known

    def __post_init__(self) -> None:
        self._seen: Watch | None = None
        self._sink: Sink | None = None
        self._chunk: Chunk | None = None
        self._masks = Masks(None)
        self._counts: dict[str, Tensor] = {}
        self._widths: dict[str, int] = {}
        self._usual: dict[str, Tensor] | None = None
        self.largest: dict[str, float] = {}  # number of the first few inputs at each site
        self.tokens: Tensor | None = None  # those of the last chunk that this model's own `prepare` made of text

    @classmethod
    def of(cls, thing: Any, *, name: str | None = None, prepare: Any = None, **options: Any) -> Self:
        """From a module or a specification; a specification brings a name and a normalisation of its own."""
        if isinstance(thing, (str, os.PathLike)):
            thing = open_model(str(thing))
        weights = weights_of(thing)
        model, own, prepare = with_name(thing, prepare)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"cannot compare {own}: give a torch.nn.Module, or a specification like 'tiny10@weights.safetensors'"
            )
        return cls(model, name or own, prepare=prepare, weights=weights, **options)

    def identity(self) -> object:
        """Equal for sources that would hand over the same rows."""
        chosen = [(name, sorted(wanted.calls or ())) for name, wanted in select(self.model, self.sites).items()]
        return id(self.model), repr(chosen), id(self.prepare)

    def describe(self) -> str:
        return describe_model(self.model, self.name, self.weights, describe_inputs(self.prepare))

    @property
    def home(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU for a model without any."""
        first = next(itertools.chain(self.model.parameters(), self.model.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    @contextmanager
    def borrowed(self) -> Iterator[Network]:
        """The model in eval mode and on its device, without gradients; afterwards as it was."""
        with restored_after_errors(self.model), as_found(self.model, self.device):
            yield self

    def arguments(self, chunk: Chunk) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with: copies, on its device."""
        return model_arguments(
            chunk.batch, model=self.model, inputs=self.inputs, prepare=self.prepare, device=self.home
        )

    def outputs(self, chunk: Chunk) -> Tensor:
        """What the model answers to the inputs of a chunk, as a dense tensor."""
        with self._named_in_errors(chunk):
            args, kwargs = self.arguments(chunk)
            output = self.model(*args, **kwargs)
        answer = answer_in(output)
        if answer is None:
            raise ValueError(f"{self.name} returned no tensor but {type(output).__name__}")
        return answer if answer.layout == torch.strided else answer.to_dense()

    @contextmanager
    def _named_in_errors(self, chunk: Chunk) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"while running {self.name} on inputs {chunk.start} to {chunk.start + chunk.count - 1}")
            raise

    @contextmanager
    def opened(self) -> Iterator[Network]:
        with (
            restored_after_errors(self.model),
            as_found(self.model, self.device),
            watch(self.model, self.sites, sink=self._receive, axes=needs_axes(self.rows)) as seen,
        ):
            self._seen = seen
            try:
                yield self
            finally:
                self._seen = None

    def look(self, batch: Any) -> Side:
        """Run the first few inputs of a batch to learn the sites; the model is as before afterwards."""
        count = min(TRIED, count_inputs(batch))
        with kept_random_state(), kept_attributes(self.model):
            found = self.read(Chunk(cut(batch, 0, count), 0, count), self._first_rows)
        labels = [site.label for site in self._watched().sites]
        self._usual = {label: rows for label, (_, rows, _) in zip(labels, found, strict=True)}
        largest = torch.stack([most.to(found[0][2].device) for _, _, most in found])
        self.largest = dict(zip(labels, largest.tolist(), strict=True))
        side = _side(self.name, self._watched().sites, [rows for rows, _, _ in found])
        return replace(side, left_out=tuple(self.left_out.items()))

    def _first_rows(self, site: str, rows: Tensor) -> tuple[tuple[int, str], Tensor, Tensor]:
        """Width and type of a site's rows, what `mixing` compares, and the largest number: read later, all at once."""
        largest = torch.linalg.vector_norm(rows, torch.inf).double()
        return _form(rows), ends(rows, self._counts.get(site)), largest

    @property
    def left_out(self) -> dict[str, str]:
        """Sites that were not named one by one and gave no rows, with the reason; of a model that is being watched."""
        return self._watched().left_out

    def mixing(self, batch: Any) -> str | None:
        """Whether the inputs of a batch are mixed, in words; None: they are not."""

        def read(chunk: Chunk) -> dict[str, Tensor]:
            found = self.read(chunk, lambda site, rows: ends(rows, self._counts.get(site)))
            return dict(zip((site.label for site in self._watched().sites), found, strict=True))

        return mixing_note(self.name, self.model, batch, read, self._usual)

    def per_input(self) -> dict[str, int]:
        """Rows that one input gives at each site."""
        return {site.label: rows_per_input(site, self.rows) for site in self._watched().sites}

    def read(self, chunk: Chunk, sink: Sink) -> list[Any]:
        seen = self._watched()
        self._sink, self._chunk = sink, chunk
        try:
            args, kwargs = model_arguments(
                chunk.batch, model=self.model, inputs=self.inputs, prepare=self.prepare, device=self._home()
            )
            # What `inputs` made of the batch comes first; else the batch's own mask, which is on the CPU already.
            self._masks = Masks.of(*((kwargs, chunk.batch) if self.inputs else (chunk.batch, kwargs)))
            self._counts, self.tokens = {}, None if self.prepare is None else kwargs.get("input_ids")
            seen.run(*args, **kwargs)
        except Exception as error:
            error.add_note(f"while running {self.name} on inputs {chunk.start} to {chunk.start + chunk.count - 1}")
            raise
        finally:
            self._sink = self._chunk = None
        return seen.values()

    def counts(self) -> dict[str, Tensor]:
        """Under "positions", how many rows each input of the last chunk gave, by site; else nothing."""
        return self._counts

    def _receive(self, site: Site, activation: Tensor) -> Any:
        assert self._sink is not None
        assert self._chunk is not None
        count, mask = self._chunk.count, self._masks.at(site, activation)
        rows = to_rows(activation.detach(), self.rows, site=site, inputs=count, mask=mask)
        first = self._widths.setdefault(site.label, rows.shape[1])
        if rows.shape[1] != first:
            raise ValueError(
                f"site {site.label!r} gave rows of {first} features at first and of {rows.shape[1]} now: inputs that "
                "differ in length or size have no common features flattened. Use rows='mean', or for tokens 'cls' or "
                "'last'"
            )
        if self.rows == "positions":
            whole = torch.full((count,), len(rows) // count)
            self._counts[site.label] = whole if mask is None else (mask != 0).sum(1)
        return self._sink(site.label, rows)

    def _watched(self) -> Watch:
        if self._seen is None:
            raise RuntimeError(f"{self.name} is not being watched")
        return self._seen

    def digest(self) -> str:
        """Of the weights, and of how inputs are prepared for them."""
        return self.begun_digest().read()

    def begun_digest(self) -> Digest:
        """The same, to be read later: until then a GPU is not waited for."""
        return Digest({**self.model.state_dict(), "prepare": _called(self.prepare)})

    def on_cpu(self) -> bool:
        home = self._home()
        return home is None or home.type == "cpu"

    def _home(self) -> torch.device | None:
        """Where the model is: the device of its first parameter or buffer."""
        first = next(itertools.chain(self.model.parameters(), self.model.buffers()), None)
        return None if first is None else first.device


@dataclass
class SavedActivations:
    """Activations saved earlier; row i belongs to input i."""

    saved: ActivationFile
    name: str
    sites: Any = None  # names and globs; None: all of them
    rows: Rule = "flatten"
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        self._sites = self.saved.select(self.sites)
        self.largest: dict[str, float] = {}  # not looked for

    def identity(self) -> object:
        return id(self.saved), self._sites

    def describe(self) -> str:
        return f"{self.name}: saved activations, {self.saved.n} inputs"

    def digest(self) -> str:
        return digest_of([site.label for site in self._sites])

    def activations(self, start: int, stop: int) -> dict[str, Tensor]:
        """As they were saved, of some inputs, by site."""
        return {site.label: self.saved.activation(site.label, start, stop) for site in self._sites}

    def on_cpu(self) -> bool:
        return self.device is None or torch.device(self.device).type == "cpu"

    def opened(self) -> AbstractContextManager[Any]:
        return nullcontext(self)

    def look(self, batch: Any) -> Side:
        few = Chunk(None, 0, min(TRIED, self.saved.n))
        return _side(self.name, self._sites, self.read(few, lambda _, rows: _form(rows)))

    def mixing(self, batch: Any) -> str | None:
        return None  # not known any more

    def per_input(self) -> dict[str, int]:
        return {site.label: rows_per_input(site, self.rows) for site in self._sites}

    def counts(self) -> dict[str, Tensor]:
        """All inputs give as many rows, which `per_input` says."""
        return {}

    def read(self, chunk: Chunk, sink: Sink) -> list[Any]:
        stop = chunk.start + chunk.count
        if stop > self.saved.n:
            raise ValueError(
                f"need paired rows: {self.name} has {self.saved.n} saved, but the data goes on to input {stop}"
            )
        found = []
        for site in self._sites:
            rows = self.saved.rows(site.label, chunk.start, stop, rule=self.rows)
            found.append(sink(site.label, rows if self.device is None else rows.to(self.device)))
        return found


def _form(rows: Tensor) -> tuple[int, str]:
    return rows.shape[1], str(rows.dtype).removeprefix("torch.")


def _side(name: str, sites: Sequence[Site], forms: Sequence[tuple[int, str]]) -> Side:
    widths, dtypes = zip(*forms, strict=True)
    return Side(name, tuple(s.label for s in sites), widths, tuple(s.shape for s in sites), dtypes)


def _called(function: Callable[[Any], Any] | None) -> str:
    """A name that is the same in every process: a plain repr may hold an address in memory."""
    named = getattr(function, "__qualname__", None) or repr(function)
    return type(function).__qualname__ if " at 0x" in named else named


class Named(Protocol):
    """Whatever has a name that a result shows."""

    name: str


def number_duplicates(sources: Sequence[Named]) -> None:
    """Number sources that have one name."""
    names = [source.name for source in sources]
    for k, source in enumerate(sources):
        if names.count(names[k]) > 1:
            source.name = f"{names[k]} ({'AB'[k] if len(names) == 2 else k + 1})"


# What compare is given, as sources: models, saved activations, or the names of either


def arguments_of(model_a: Any, model_b: Any, data: Any) -> tuple[list[Any], Any]:
    """The things compared and the data, from compare(a, b, data) or compare([a, b, c], data)."""
    if isinstance(model_a, (list, tuple)) and not isinstance(model_a, nn.Module):
        if data is not None and model_b is not None:
            raise TypeError("with a list of models, there is no second model: compare([m1, m2, m3], data)")
        if len(model_a) < 2 and not (model_a and is_statistics(model_a[0])):
            raise ValueError(f"need at least two models to compare, got {len(model_a)}")
        return list(model_a), model_b if data is None else data
    if model_b is None:
        if is_statistics(model_a):
            return [model_a], data
        raise TypeError("compare needs two models (the same one twice is fine), or a list of them and data")
    return [model_a, model_b], data


# What is neither a model nor activations knows how to compare itself: in the package that its kind of file names.
ROOMS = {"sketch": "sosie.sketching"}


def room_of(thing: Any) -> Any:
    """The package that compares such things, for an object or a file; None for models, activations and statistics."""
    if isinstance(thing, (str, os.PathLike)):
        if Path(thing).suffix != ".safetensors":
            return None
        kinds = [kind for kind in ROOMS if is_statistics_file(thing, kind=kind)]
    else:
        kinds = [kind for kind in ROOMS if getattr(type(thing), "kind", None) == kind]
    return import_module(ROOMS[kinds[0]]) if kinds else None


def is_statistics(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike)) and Path(thing).suffix == ".safetensors" and is_statistics_file(thing)


def open_source(text: str | os.PathLike[str], *, seed: int = 0) -> NamedModel | ActivationFile | str:
    """What a text names: a model, saved activations, or (as it is) a file of saved statistics or a sketch."""
    path = Path(text)
    if is_statistics(path) or room_of(path) is not None:
        return str(text)
    if path.suffix in (".npz", ".safetensors") and ("@" not in str(text) or path.is_file()):
        return open_activations(path)
    return open_model(str(text), seed=seed)


def source_of(
    thing: Any, sites: Any, prepare: Callable[[Any], Any] | None, settings: Settings, inputs: Any
) -> Network | SavedActivations:
    if isinstance(thing, (str, os.PathLike)):
        thing = open_source(thing)
    if isinstance(thing, Mapping):
        thing = open_activations(thing)
    if isinstance(thing, ActivationFile):
        return SavedActivations(thing, Path(thing.name).stem, sites, settings.rows, settings.device)
    weights = weights_of(thing)
    thing, name, prepare = with_name(thing, prepare)
    if not isinstance(thing, nn.Module):
        raise TypeError(
            f"cannot compare {name}: give a torch.nn.Module, a specification like 'tiny10@weights.safetensors', "
            "or saved activations ({site: array}, .npz, .safetensors). Data come third: compare(model, model, data) "
            "holds the layers of one network against each other"
        )
    return Network(thing, name, sites, settings.rows, prepare, inputs, settings.device, weights)

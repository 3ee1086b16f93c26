"""What is compared: a model with what it is fed, or activations that were saved. Both hand over rows chunk by chunk."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..capture import (
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
    explain_types,
    gives_several_rows,
    join,
    kept_attributes,
    model_arguments,
    named_arguments,
    needs_axes,
    open_activations,
    restored_after_errors,
    rows_per_input,
    select,
    to_rows,
    types_of,
    unread_mask,
    watch,
    without_labels,
)
from ..models import NamedModel, open_model, weights_of, with_name
from ..process_state import kept_random_state, other_random_state, random_state
from ..results import Side
from ..stats import is_statistics as is_statistics_file
from .provenance import Digest, describe_inputs, describe_model, digest_of

Sink = Callable[[str, Tensor], Any]
RowSample = dict[str, list[list[float]]]  # by site, for each of the first few inputs: its size, and a weighted sum
# Share of their size by which the rows of one input may differ on another machine, by the type of the weights. As
# measured for networks of 11 to 56 layers, in float32 the threads, the number of inputs and the kernels of a CPU change
# 2e-6, and TF32, which a GPU may take, 3e-3; in bfloat16 the kernels of a CPU change up to 0.021.
TOLERATED = {torch.float64: 1e-9, torch.float32: 0.01}
TOLERATED_COARSE = 0.05
OUTPUT = "output"  # the site of what a model answers


@dataclass
class Network:
    """A model with what it is fed: which sites are watched, how inputs are prepared, how activations become rows."""

    model: nn.Module
    name: str
    sites: Any = None
    rows: Rule = "flatten"
    prepare: Callable[[Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    device: str | torch.device | None = None
    weights: str = ""  # where they come from, if that is known

    def __post_init__(self) -> None:
        self._seen: Watch | None = None
        self._sink: Sink | None = None
        self._chunk: Chunk | None = None
        self._masks = Masks(None)
        self._counts: dict[str, Tensor] = {}
        self._widths: dict[str, int] = {}
        self._usual: dict[str, Tensor] | None = None  # numbers of the few inputs that were tried, by site
        self._second = 0  # which input the second of them is,
        self._whole: Chunk | None = None  # the chunk of the pass that it comes in,
        self._among: dict[str, Tensor] = {}  # and its numbers there
        self.largest: dict[str, float] = {}  # number among the first few inputs at each site
        self.tokens: Tensor | None = None  # those of the last chunk that this model's own `prepare` made of text

    @classmethod
    def of(
        cls, thing: Any, *, name: str | None = None, prepare: Any = None, otherwise: str = "", **options: Any
    ) -> Self:
        """From a module or a specification; a specification brings a name and a normalisation of its own.

        `otherwise` ends the error for anything else: what could be given instead.
        """
        if isinstance(thing, (str, os.PathLike)):
            thing = open_model(str(thing))
        weights = weights_of(thing)
        model, own, prepare = with_name(thing, prepare)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{own} is not a model: give a torch.nn.Module, a specification like 'tiny10@weights.safetensors'"
                + otherwise
            )
        return cls(model, name or own, prepare=prepare, weights=weights, **options)

    def identity(self) -> object:
        """Equal for networks that would hand over the same rows."""
        chosen = [(name, sorted(wanted.calls or ())) for name, wanted in select(self.model, self.sites).items()]
        return id(self.model), repr(chosen), id(self.prepare)

    def describe(self) -> str:
        return describe_model(self.model, self.name, self.weights, describe_inputs(self.prepare))

    def digest(self) -> str:
        """Of the weights, and of how inputs are prepared for them."""
        return self.begun_digest().read()

    def begun_digest(self) -> Digest:
        """The same, to be read later: until then a GPU is not waited for."""
        return Digest({**self.model.state_dict(), "prepare": _stable_name(self.prepare)})

    @property
    def home(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU for a model without any."""
        return self._own_device() or torch.device("cpu")

    def _own_device(self) -> torch.device | None:
        first = next(itertools.chain(self.model.parameters(), self.model.buffers()), None)
        return None if first is None else first.device

    def on_cpu(self) -> bool:
        return self.home.type == "cpu"

    # Running the model

    @contextmanager
    def borrowed(self) -> Iterator[Network]:
        """The model in eval mode and on its device, without gradients; afterwards as it was."""
        with restored_after_errors(self.model), as_found(self.model, self.device):
            yield self

    @contextmanager
    def opened(self) -> Iterator[Network]:
        """The same, with its sites watched."""
        axes = needs_axes(self.rows)
        with self.borrowed(), watch(self.model, self.sites, sink=self._receive, axes=axes) as self._seen:
            try:
                yield self
            finally:
                self._seen = None

    def arguments(self, chunk: Chunk) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with: copies, on its device; where it has none, on that of the data."""
        return model_arguments(
            chunk.batch, model=self.model, inputs=self.inputs, prepare=self.prepare, device=self._own_device()
        )

    def masks(self, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Masks:
        """Which tokens are padding, by the arguments of a call and the batch they came from."""
        named = named_arguments(self.model, args, kwargs)
        # What `inputs` made of the batch comes first; else the batch's own mask, which is on the CPU already.
        return Masks.of(
            *((named, batch) if self.inputs else (batch, named)),
            unread=lambda: None if callable(self.rows) else unread_mask(self.model, named),
        )

    def outputs(self, chunk: Chunk) -> Tensor:
        """What the model answers to the inputs of a chunk, as a dense tensor."""
        with self._named_in_errors(chunk):
            args, kwargs = self.arguments(chunk)
            output = self.model(*args, **kwargs)
        answer = answer_in(output)
        if answer is None:
            raise ValueError(f"{self.name} returned no tensor but {type(output).__name__}")
        answer = answer if answer.layout == torch.strided else answer.to_dense()
        if self._usual is not None and self._seen is None and answer.ndim and len(answer) == chunk.count:
            self._keep_tried(chunk, OUTPUT, answer)
        return answer

    def read(self, chunk: Chunk, sink: Sink) -> list[Any]:
        """Run a chunk and return what the sink makes of the rows of each site, in execution order."""
        watched = self._watched()
        self._sink, self._chunk = sink, chunk
        try:
            with self._named_in_errors(chunk):
                args, kwargs = self.arguments(chunk)
                self._masks = self.masks(chunk.batch, args, kwargs)
                self._counts, self.tokens = {}, None if self.prepare is None else kwargs.get("input_ids")
                watched.run(*args, **kwargs)
        finally:
            self._sink = self._chunk = None
        return watched.values()

    @contextmanager
    def _named_in_errors(self, chunk: Chunk) -> Iterator[None]:
        try:
            try:
                yield
            except RuntimeError as error:
                if self.prepare is None and self.inputs is None:
                    explain_types(error, self.model, without_labels(chunk.batch), "inputs")
                raise
        except Exception as error:
            error.add_note(f"while running {self.name} on inputs {chunk.start} to {chunk.start + chunk.count - 1}")
            raise

    def _receive(self, site: Site, activation: Tensor) -> Any:
        """Called by the watch inside the forward pass, once for each site."""
        chunk, label, mask = self._chunk, site.label, self._masks.at(site, activation)
        assert chunk is not None and self._sink is not None  # noqa: PT018
        rows = to_rows(activation.detach(), self.rows, site=site, inputs=chunk.count, mask=mask)
        width = rows.shape[1]
        if self._widths.setdefault(label, width) != width:
            raise ValueError(
                f"site {label!r} gave rows of {self._widths[label]} features at first and of {width} now: inputs that "
                "differ in length or size have no common features flattened. Use rows='mean', or for tokens 'cls' or "
                "'last'"
            )
        if gives_several_rows(self.rows):
            whole = torch.full((chunk.count,), len(rows) // chunk.count)
            self._counts[label] = whole if mask is None or activation.ndim != 3 else (mask != 0).sum(1)
        if self._usual is not None:
            self._keep_tried(chunk, label, rows)
        return self._sink(label, rows)

    def _keep_tried(self, chunk: Chunk, site: str, rows: Tensor) -> None:
        """Of a whole chunk with the input that was tried, what it makes of that one: see `mixing_in_pass`."""
        at = self._second - chunk.start
        if self._whole is None and chunk.count > TRIED and 0 <= at < chunk.count:
            self._whole = chunk
        if chunk is self._whole:
            self._among[site] = of_input(rows, at, self._counts.get(site))

    def _watched(self) -> Watch:
        if self._seen is None:
            raise RuntimeError(f"{self.name} is not being watched")
        return self._seen

    # What is learnt before the pass

    def look(self, batch: Any) -> Side:
        """Run a few inputs of the first batch to learn the sites; the model is as before afterwards."""

        def first_rows(site: str, rows: Tensor) -> tuple[tuple[int, str], Tensor, Tensor]:
            largest = torch.linalg.vector_norm(rows, torch.inf).double()
            return _form(rows), by_input(rows, self._counts.get(site)), largest

        start, stop = tried_of(batch)
        with kept_random_state(), kept_attributes(self.model):
            looks = self.read(Chunk(cut(batch, start, stop), start, stop - start), first_rows)
        labels = [site.label for site in self._watched().sites]
        self._usual = {label: rows for label, (_, rows, _) in zip(labels, looks, strict=True)}
        # The largest numbers are read from the device all at once.
        largest = torch.stack([most.to(looks[0][2].device) for _, _, most in looks])
        self.largest = dict(zip(labels, largest.tolist(), strict=True))
        side = _side(self.name, self._watched().sites, [form for form, _, _ in looks])
        return replace(side, left_out=tuple(self.left_out.items()))

    def sampled_rows(self, batch: Any) -> RowSample:
        """What the first few inputs of a batch give, in a few numbers; nothing of sites where two forwards differ."""
        count = min(TRIED, count_inputs(batch))
        few, labels = Chunk(cut(batch, 0, count), 0, count), [site.label for site in self._watched().sites]

        def run() -> RowSample:
            with kept_attributes(self.model):
                numbers = self.read(few, lambda site, rows: _numbers(rows, count, self._counts.get(site)))
            return dict(zip(labels, (each.tolist() for each in numbers), strict=True))

        with kept_random_state():
            once, again = run(), run()
        return {label: once[label] for label in labels if not unlike(once, again, label, self.tolerated())}

    def tolerated(self) -> float:
        """By how much rows may differ on another machine."""
        if torch.is_autocast_enabled(self.home.type):
            return TOLERATED_COARSE
        types = types_of(self.model) or {torch.float32}
        return max(TOLERATED.get(each, TOLERATED_COARSE) for each in types)

    @property
    def left_out(self) -> dict[str, str]:
        """Sites that were not named one by one and gave no rows, with the reason; of a model that is being watched."""
        return self._watched().left_out

    def mixing(self, batch: Any) -> str | None:
        """Whether the inputs of a batch are mixed, in words; None: they are not. At the sites, if they are watched."""

        def read(chunk: Chunk) -> dict[str, Tensor]:
            numbers = self._read_by_input(chunk)
            self._usual = self._usual or numbers  # the first run is of the inputs as they are
            return numbers

        self._second = tried_of(batch)[0] + 1
        return mixing_note(self.name, self.model, batch, read, self._usual)

    def mixing_in_pass(self) -> str | None:
        """The same for models that keep few inputs apart and mix many, once the pass has come by what was tried.

        If an input came out otherwise in its chunk, which may be rounding or chance, the chunk is tried as a whole.
        """
        if self._usual is None or self._whole is None:
            return None
        usual = {site: rows for site, rows in self._usual.items() if site in self._among}
        among, self._usual = {site: self._among[site] for site in usual}, None
        if not differ(self.model, usual, among, (1, 0)):
            return None
        at = self._second - self._whole.start
        return mixing_note(self.name, self.model, self._whole.batch, self._read_by_input, at=at)

    def _read_by_input(self, chunk: Chunk) -> dict[str, Tensor]:
        if self._seen is None:
            return {OUTPUT: by_input(self.outputs(chunk))}
        values = self.read(chunk, lambda site, rows: by_input(rows, self._counts.get(site)))
        return dict(zip((site.label for site in self._watched().sites), values, strict=True))

    def per_input(self) -> dict[str, int]:
        """Rows that one input gives at each site."""
        return {site.label: rows_per_input(site, self.rows) for site in self._watched().sites}

    def counts(self) -> dict[str, Tensor]:
        """Where an input gives several rows, how many each of the last chunk gave, by site; else nothing."""
        return self._counts


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

    @property
    def count(self) -> int:
        return self.saved.n

    def describe(self) -> str:
        return f"{self.name}: saved activations, {self.saved.n} inputs"

    def digest(self) -> str:
        return digest_of([site.label for site in self._sites])

    def on_cpu(self) -> bool:
        return self.device is None or torch.device(self.device).type == "cpu"

    def opened(self) -> AbstractContextManager[Any]:
        return nullcontext(self)

    def look(self, batch: Any) -> Side:
        few = Chunk(None, 0, min(TRIED, self.saved.n))
        return _side(self.name, self._sites, self.read(few, lambda _, rows: _form(rows)))

    def sampled_rows(self, batch: Any) -> RowSample:
        """What the first few inputs give, in a few numbers."""
        few = Chunk(None, 0, min(TRIED, self.saved.n))
        numbers = self.read(few, lambda _, rows: _numbers(rows, few.count))
        return dict(zip((site.label for site in self._sites), (each.tolist() for each in numbers), strict=True))

    def tolerated(self) -> float:
        return TOLERATED[torch.float32]

    def per_input(self) -> dict[str, int]:
        return {site.label: rows_per_input(site, self.rows) for site in self._sites}

    def counts(self) -> dict[str, Tensor]:
        return {}  # every input gives as many rows, as `per_input` says

    def row_bytes(self) -> dict[str, int]:
        """What one input takes at each site, in double precision."""
        return {site.label: 8 * math.prod(site.shape) for site in self._sites}

    def activations(self, start: int, stop: int) -> dict[str, Tensor]:
        """The activations of some inputs as they were saved, by site."""
        return {site.label: self.saved.activation(site.label, start, stop) for site in self._sites}

    def read(self, chunk: Chunk, sink: Sink) -> list[Any]:
        stop = chunk.start + chunk.count
        if stop > self.saved.n:
            raise ValueError(
                f"need paired rows: {self.name} has {self.saved.n} saved, but the data goes on to input {stop}"
            )
        made = []
        for site in self._sites:
            rows = self.saved.rows(site.label, chunk.start, stop, rule=self.rows)
            made.append(sink(site.label, rows if self.device is None else rows.to(self.device)))
        return made


Source = Network | SavedActivations


def meeting_place(device: torch.device) -> torch.device:
    """Where what networks give is joined: the first one's device, if it can count in float64."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def _form(rows: Tensor) -> tuple[int, str]:
    return rows.shape[1], str(rows.dtype).removeprefix("torch.")


def _side(name: str, sites: Sequence[Site], forms: Sequence[tuple[int, str]]) -> Side:
    widths, dtypes = zip(*forms, strict=True)
    return Side(name, tuple(s.label for s in sites), widths, tuple(s.shape for s in sites), dtypes)


def _numbers(rows: Tensor, inputs: int, counts: Tensor | None = None) -> Tensor:
    """(inputs, 2): the length of all numbers of an input, and their sum with weights that tell their order."""
    parts = rows.detach().cpu().double().split(len(rows) // inputs if counts is None else counts.tolist())
    flat = [part.flatten() for part in parts]
    sums = [each @ torch.arange(len(each), dtype=each.dtype, device="cpu").cos() for each in flat]
    return torch.stack([torch.stack([each.norm(), total]) for each, total in zip(flat, sums, strict=True)])


def unlike(one: RowSample, other: RowSample, site: str, tolerated: float) -> bool:
    """Whether the same inputs gave other rows at a site, by more than rounding; sites that only one has say nothing."""
    pairs = zip(one.get(site, ()), other.get(site, ()), strict=False)  # a first batch may hold fewer inputs
    return any(abs(x - y) > tolerated * max(a[0], b[0]) for a, b in pairs for x, y in zip(a, b, strict=False))


def _stable_name(function: Callable[[Any], Any] | None) -> str:
    """A name that is the same in every process: a plain repr may hold an address in memory."""
    name = getattr(function, "__qualname__", None) or repr(function)
    return type(function).__qualname__ if " at 0x" in name else name


# From what the user gives to what is compared


def number_duplicates(sources: Sequence[Any]) -> None:
    """Number things whose `name`, which a result shows, is the same."""
    names = [source.name for source in sources]
    for k, source in enumerate(sources):
        if names.count(names[k]) > 1:
            source.name = f"{names[k]} ({'AB'[k] if len(names) == 2 else k + 1})"


def things_and_data(model_a: Any, model_b: Any, data: Any) -> tuple[list[Any], Any]:
    """The things to compare and the data, from (a, b, data) or ([a, b, c], data)."""
    if isinstance(model_a, (list, tuple)) and not isinstance(model_a, nn.Module):
        if data is not None and model_b is not None:
            raise TypeError("with several models there is no second one: give ([m1, m2, m3], data)")
        if len(model_a) < 2 and not (model_a and is_statistics(model_a[0])):
            raise ValueError(f"need at least two models to compare, got {len(model_a)}")
        return list(model_a), model_b if data is None else data
    if model_b is None:
        if is_statistics(model_a):
            return [model_a], data
        raise TypeError("need two models to compare (the same one twice is fine), or a list of them and data")
    return [model_a, model_b], data


def for_each(names: str, count: int, a: Any, b: Any, both: Any = None) -> list[Any]:
    """An option of every model, from those of A, of B, and of both; of more than two models that of A is for all."""
    if count != 2 and b is not None:
        raise ValueError(f"with more than two models, {names}_a is for all of them; leave {names}_b out")
    a, b = (both if own is None else own for own in (a, b))
    return [a, b] if count == 2 else [a] * count


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


def is_array_file(text: str | os.PathLike[str]) -> bool:
    """Whether a text names a file of arrays, rather than a model with weights from such a file."""
    path = Path(text)
    return path.suffix in (".npz", ".safetensors") and ("@" not in str(text) or path.is_file())


def open_source(text: str | os.PathLike[str], *, seed: int = 0) -> NamedModel | ActivationFile | str:
    """What a text names: a model, saved activations, or (as it is) a file of saved statistics or a sketch."""
    if is_statistics(text) or room_of(text) is not None:
        return str(text)
    return open_activations(text) if is_array_file(text) else open_model(str(text), seed=seed)


def open_network(thing: Any, *, sites: Any, rows: Rule, prepare: Any, inputs: Any, device: Any) -> Source:
    """A network from a module or specification, saved activations from {site: array} or a file of them."""
    if isinstance(thing, (str, os.PathLike)):
        thing = open_source(thing)
    if isinstance(thing, Mapping):
        thing = open_activations(thing)
    if isinstance(thing, ActivationFile):
        return SavedActivations(thing, Path(thing.name).stem, sites, rows, device)
    otherwise = (
        ", or saved activations ({site: array}, .npz, .safetensors). Data come third: compare(model, model, data) "
        "compares the layers of one network"
    )
    options = {"sites": sites, "rows": rows, "inputs": inputs, "device": device}
    return Network.of(thing, prepare=prepare, otherwise=otherwise, **options)


# Whether a model mixes the inputs of a batch: then what it makes of an input depends on the batch that it came in

TRIED = 4  # inputs of the first batch that a model is run on before all others
AMONG = 64  # they are the last of so many: a model may mix an input with one far before it
FEWEST = 3  # one that is looked at, one before and one behind it
NUMBERS = 4096  # of each input and site that are compared
# By how much an activation may change without mixing: a share of the difference between two inputs, or of its own size,
# whichever is more. The latter is ten times what a product loses, in TF32 on a GPU. Batches of one shape take the same
# kernels and hardly differ at all, but tokens, say, may be padded to another length.
OF_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 1e-2}
OF_SIZE = {("cpu", torch.float64): 1e-12, ("cpu", torch.float32): 1e-5, ("cuda", torch.float64): 1e-12}
COARSE_DIFFERENCE, COARSE_SIZE = 0.1, 1e-2


def mixing_note(
    name: str,
    model: nn.Module,
    batch: Any,
    read: Callable[[Chunk], dict[str, Tensor]],
    usual: dict[str, Tensor] | None = None,
    *,
    at: int | None = None,
) -> str | None:
    """In words, the first site where an input's activation changes with the other inputs of its batch; None: nowhere.

    A few inputs of the batch are run as they are, and once more with copies of the second in place of all others: the
    second stays where it was, and may not change. `read` runs the model and gives `by_input` of every site, in
    execution order. Each run starts from the same random state and the same attributes of the model, which are put
    back. `usual`: what the run as they are gave, if that was done in the same way already. `at`: the whole batch is
    run instead of a few, and this input of it takes the part of the second.
    """
    start, stop = tried_of(batch) if at is None else (0, count_inputs(batch))
    count, at = stop - start, 1 if at is None else at
    unknown = f"{name}: not known whether inputs of a batch are mixed"
    if count < FEWEST:
        return f"{unknown}: the first batch has {count} of them, and it takes {FEWEST} to tell"

    drew = False

    def run(given: Any, state: Callable[[], AbstractContextManager[None]] = kept_random_state) -> dict[str, Tensor]:
        nonlocal drew
        with state(), kept_attributes(model):
            before = random_state()
            numbers = read(Chunk(given, 0, count))
            drew = drew or random_state() != before
        return numbers

    try:
        few = cut(batch, start, stop)
        usual = usual or run(few)
        changed = differ(model, usual, run(join([cut(few, at, at + 1)] * count)), (at, at))
        itself = differ(model, usual, run(few), (at, at)) if changed else []
        # Some models draw numbers that they do not use.
        drawn = differ(model, usual, run(few, other_random_state), (at, at)) if drew and not changed else []
    except Exception as error:  # a model may take batches of one size only; if it takes none, the pass itself will tell
        return f"{unknown}: it could not be run on {count} of them ({error})"
    mixed = [site for site in changed if site not in itself]
    if mixed:
        return (
            f"{name} mixes the inputs of a batch, at first at {mixed[0]!r}: what it makes of an input, and so every "
            "value, depends on which others are in its batch"
        )
    if itself:
        return (
            f"{name}: two forwards of the same inputs differ at {itself[0]!r}: it draws random numbers, or keeps "
            "something that could not be put back, so that its values may differ from run to run"
        )
    if drawn:
        return (
            f"{name} draws random numbers in evaluation mode, at first at {drawn[0]!r} (dropout that stays on, say): "
            "its values depend on them, and differ with another random state"
        )
    return None


def tried_of(batch: Any) -> tuple[int, int]:
    """From which input to which of a first batch a model is run before all others."""
    stop = min(AMONG, count_inputs(batch))
    return max(0, stop - TRIED), stop


def by_input(rows: Tensor, counts: Tensor | None = None) -> Tensor:
    """Some of the numbers of each input, (inputs, numbers); `counts`: how many rows each input has, if not one."""
    rows = rows.detach()
    if counts is None or bool((counts == counts[0]).all()):
        each = rows.reshape(len(rows) if counts is None else len(counts), -1)
        return each[:, :: each.shape[1] // NUMBERS | 1].clone()  # an odd step, or it might stay within one channel
    parts = [part.flatten()[:: part.numel() // NUMBERS | 1] for part in rows.split(counts.tolist())]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def of_input(rows: Tensor, at: int, counts: Tensor | None = None) -> Tensor:
    """The same of one input alone, (1, numbers)."""
    if counts is None:
        return by_input(rows[at : at + 1])
    start = int(counts[:at].sum())
    return by_input(rows[start : start + int(counts[at])], counts[at : at + 1])


def differ(model: nn.Module, one: dict[str, Tensor], other: dict[str, Tensor], at: tuple[int, int]) -> list[str]:
    """The sites where an input, which has these numbers in two runs, differs by more than rounding."""
    found = []
    dtypes = {parameter.dtype for parameter in model.parameters()}
    for site, a, b in zip(one, _on_cpu(one), _on_cpu(other), strict=True):
        numbers = min(a.shape[1], b.shape[1])  # inputs of several lengths are padded to the longest
        own, neighbour = a[at[0]], a[at[0] + 1 if at[0] + 1 < len(a) else at[0] - 1]
        difference = (own[:numbers] - b[at[1], :numbers]).norm()
        of_difference, of_size = _rounding(dtypes, one[site])
        allowed = max(of_difference * (own - neighbour).norm(), of_size * own.norm())
        if difference > allowed or (allowed.isfinite() and not difference.isfinite()):  # 0 / 0, say
            found.append(site)
    return found


def _rounding(of_model: set[torch.dtype], numbers: Tensor) -> tuple[float, float]:
    device = numbers.device.type
    if torch.is_autocast_enabled(device):
        return COARSE_DIFFERENCE, 10 * COARSE_SIZE
    dtypes = {numbers.dtype, *of_model} if numbers.is_floating_point() else set()
    of_difference = max((OF_DIFFERENCE.get(dtype, COARSE_DIFFERENCE) for dtype in dtypes), default=COARSE_DIFFERENCE)
    return of_difference, max((OF_SIZE.get((device, dtype), COARSE_SIZE) for dtype in dtypes), default=COARSE_SIZE)


def _on_cpu(run: dict[str, Tensor]) -> list[Tensor]:
    """The numbers of all sites, brought over in one copy, for which a GPU is waited for once."""
    home = next(iter(run.values())).device
    flat = torch.cat([each.to(home).flatten() for each in run.values()]).to("cpu", torch.float64)
    shapes = [each.shape for each in run.values()]
    return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
